# SPDX-License-Identifier: Apache-2.0
"""A gradient penalty by torch.autograd.grad(create_graph=True)."""
# /// truth
# leaks = false
# ///
import torch

from watched import steps

net = torch.nn.Linear(256, 256)
for step in steps():
    batch = torch.randn(64, 256, requires_grad=True)
    gradient, = torch.autograd.grad(net(batch).pow(2).sum(), batch, create_graph=True)
    gradient.pow(2).sum().backward()
    net.zero_grad()
