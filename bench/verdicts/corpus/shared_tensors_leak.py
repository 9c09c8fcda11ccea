# SPDX-License-Identifier: Apache-2.0
"""Tensors in shared memory kept in a queue that nobody reads."""
# /// truth
# leaks = true
# owners = ["shared"]
# bytes_per_step = 400000
# holder = "pending"
# ///
import collections

import torch

from watched import steps

pending = collections.deque()
for step in steps():
    one = torch.zeros(100_000).share_memory_()  # site
    pending.append(one.fill_(1))
