# SPDX-License-Identifier: Apache-2.0
"""A copy of the best weights, replaced at each evaluation."""
# /// truth
# leaks = false
# ///
import copy

import torch

from watched import phase, steps

net = torch.nn.Linear(1024, 512, bias=False)
for step in steps():
    with torch.no_grad():
        net(torch.randn(4, 1024))
    if step % 10 == 9:
        with phase("eval"):
            best = copy.deepcopy(net.state_dict())
