# SPDX-License-Identifier: Apache-2.0
"""An evaluation keeps the logits of all its batches, and those of the evaluations before."""
# /// truth
# leaks = true
# owners = ["native", "tensors"]
# bytes_per_step = 256000
# phase = "evaluation"
# holder = "logits"
# needs = ["torch"]
# ///
import torch

from watched import phase, steps

net, logits = torch.nn.Linear(64, 2000), []
for step in steps():
    net(torch.randn(8, 64)).mean().backward()
    if step % 5 == 4:
        with phase("evaluation"), torch.no_grad():
            for _ in range(16):
                logits.append(net(torch.randn(10, 64)))  # site
