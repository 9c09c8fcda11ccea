# SPDX-License-Identifier: Apache-2.0
"""Batches that grow from step to step: more is needed for a moment, nothing is kept."""
# /// truth
# leaks = false
# ///
import torch

from watched import steps

net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
for step in steps():
    batch = torch.randn(64 + step // 3, 256)
    result = net(batch)
    (result - batch).pow(2).mean().backward()
