# SPDX-License-Identifier: Apache-2.0
"""An inner model a step, as in meta learning: backward(create_graph=True) leaves each parameter and its gradient in a circle."""
# /// truth
# leaks = true
# owners = ["native", "tensors"]
# holder = "nobody in Python: create_graph"
# needs = ["torch"]
# ///
import warnings

import torch

from watched import steps

warnings.simplefilter("ignore")


def adapt(batch):
    net = torch.nn.Sequential(torch.nn.Linear(96, 160), torch.nn.Tanh(), torch.nn.Linear(160, 1))  # site
    loss = net(batch).square().mean()  # site
    loss.backward(create_graph=True)  # site
    return loss.item()


history = []
for step in steps():
    history.append(adapt(torch.randn(16, 96)))
