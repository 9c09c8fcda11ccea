# SPDX-License-Identifier: Apache-2.0
"""Pictures of ever new sizes: oneDNN keeps a kernel for each of the last 1,024."""
# /// truth
# leaks = false
# ///
import random

import torch

from watched import steps

draw = random.Random(3)
net = torch.nn.Conv2d(3, 16, 3)
for step in steps():
    with torch.no_grad():
        net(torch.randn(1, 3, draw.randint(40, 90), draw.randint(40, 90)))
