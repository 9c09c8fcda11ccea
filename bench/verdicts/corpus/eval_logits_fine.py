# SPDX-License-Identifier: Apache-2.0
"""An evaluation keeps the logits of all its batches until it ends."""
# /// truth
# leaks = false
# needs = ["torch"]
# ///
import torch

from watched import phase, steps

net = torch.nn.Linear(64, 2000)
for step in steps():
    net(torch.randn(8, 64)).mean().backward()
    if step % 5 == 4:
        with phase("evaluation"), torch.no_grad():
            logits = [net(torch.randn(10, 64)) for _ in range(16)]
            accuracy = torch.cat(logits).argmax(1).float().mean().item()
            del logits
