# SPDX-License-Identifier: Apache-2.0
"""A copy of the model's weights kept at each evaluation."""
# /// truth
# leaks = true
# owners = ["native", "tensors"]
# bytes_per_step = 209715
# phase = "eval"
# holder = "snapshots"
# ///
import copy

import torch

from watched import phase, steps

net = torch.nn.Linear(1024, 512, bias=False)
snapshots = []
for step in steps():
    with torch.no_grad():
        net(torch.randn(4, 1024))
    if step % 10 == 9:
        with phase("eval"):
            snapshots.append(copy.deepcopy(net.state_dict()))  # site
