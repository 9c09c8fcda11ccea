# SPDX-License-Identifier: Apache-2.0
"""Validation losses kept as numbers."""
# /// truth
# leaks = false
# ///
import torch

from watched import steps

net = torch.nn.Linear(256, 256)
losses = []
for step in steps():
    batch = torch.randn(128, 256)
    losses.append((net(batch) - batch).pow(2).mean().item())
