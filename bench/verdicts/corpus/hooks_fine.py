# SPDX-License-Identifier: Apache-2.0
"""Forward hooks registered in each step and removed."""
# /// truth
# leaks = false
# ///
import torch

from watched import steps

net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))

for step in steps():
    seen = []
    handle = net[0].register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
    with torch.no_grad():
        net(torch.randn(128, 256))
    handle.remove()
