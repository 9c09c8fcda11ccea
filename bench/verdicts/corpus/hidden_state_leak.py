# SPDX-License-Identifier: Apache-2.0
"""A hidden state carried from batch to batch without detach(): the graph reaches back to the first."""
# /// truth
# leaks = true
# owners = ["native", "tensors"]
# holder = "state|grad_fn|[Gg]raph"
# ///
import torch

from watched import steps

cell = torch.nn.GRUCell(64, 256)
state = torch.zeros(64, 256)
for step in steps():
    state = cell(torch.randn(64, 64), state)  # site
