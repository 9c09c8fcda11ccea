# SPDX-License-Identifier: Apache-2.0
"""Forward hooks registered again in each step; each keeps the output it saw."""
# /// truth
# leaks = true
# owners = ["native", "tensors"]
# bytes_per_step = 131072
# holder = "hook|_forward_hooks|closure|cell|seen"
# ///
import torch

from watched import steps

net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))


def watch_first_layer():
    seen = []

    def keep(module, inputs, output):
        if not seen:
            seen.append(output.detach().clone())  # site

    net[0].register_forward_hook(keep)


for step in steps():
    watch_first_layer()
    with torch.no_grad():
        net(torch.randn(128, 256))
