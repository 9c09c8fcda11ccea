# SPDX-License-Identifier: Apache-2.0
"""A parameter added to the optimizer in each step, with its gradient and two moments."""
# /// truth
# leaks = true
# owners = ["native", "tensors"]
# bytes_per_step = 262144
# holder = "param_groups|optimizer|AdamW|state"
# ///
import torch

from watched import steps

optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(8))], foreach=True)
for step in steps():
    head = torch.nn.Parameter(torch.ones(64, 256))  # site
    optimizer.add_param_group({"params": [head]})
    head.sum().backward()  # site: its gradient
    optimizer.step()  # site: its moments
