# SPDX-License-Identifier: Apache-2.0
"""Validation losses kept in a list, each with its graph."""
# /// truth
# leaks = true
# owners = ["native", "tensors"]
# bytes_per_step = 262144
# holder = "losses"
# ///
import torch

from watched import steps

net = torch.nn.Linear(256, 256)
losses = []
for step in steps():
    batch = torch.randn(128, 256)  # site: saved for backward
    losses.append((net(batch) - batch).pow(2).mean())  # site
