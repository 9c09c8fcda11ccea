# SPDX-License-Identifier: Apache-2.0
"""The same by torch.autograd.grad(): nothing keeps the inner model."""
# /// truth
# leaks = false
# needs = ["torch"]
# ///
import torch

from watched import steps


def adapt(batch):
    net = torch.nn.Sequential(torch.nn.Linear(96, 160), torch.nn.Tanh(), torch.nn.Linear(160, 1))
    loss = net(batch).square().mean()
    gradients = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    return sum(one.square().sum() for one in gradients).item()


history = []
for step in steps():
    history.append(adapt(torch.randn(16, 96)))
