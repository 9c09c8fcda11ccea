# SPDX-License-Identifier: Apache-2.0
"""Pictures of 30 sizes: oneDNN keeps a kernel for each size it has seen."""
# /// truth
# leaks = false
# ///
import random

import torch

from watched import steps

draw = random.Random(3)
sizes = [(draw.randint(40, 90), draw.randint(40, 90)) for _ in range(30)]
net = torch.nn.Conv2d(3, 16, 3)
for step in steps():
    height, width = sizes[step % 30]
    with torch.no_grad():
        net(torch.randn(1, 3, height, width))
