# SPDX-License-Identifier: Apache-2.0
"""A parameter in each step with an optimizer of its own."""
# /// truth
# leaks = false
# ///
import torch

from watched import steps

for step in steps():
    head = torch.nn.Parameter(torch.ones(64, 256))
    optimizer = torch.optim.AdamW([head], foreach=True)
    head.sum().backward()
    optimizer.step()
