# SPDX-License-Identifier: Apache-2.0
"""Tensors in shared memory that are let go of."""
# /// truth
# leaks = false
# ///
import torch

from watched import steps

for step in steps():
    torch.zeros(100_000).share_memory_().fill_(1)
