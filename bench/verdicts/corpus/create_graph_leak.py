# SPDX-License-Identifier: Apache-2.0
"""backward(create_graph=True): parameter and gradient hold each other, beyond Python's collector."""
# /// truth
# leaks = true
# owners = ["native", "tensors"]
# ///
import torch

from watched import steps

for step in steps():
    layer = torch.nn.Linear(256, 256)  # site
    layer(torch.randn(64, 256)).pow(2).sum().backward(create_graph=True)  # site
