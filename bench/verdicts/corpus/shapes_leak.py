# SPDX-License-Identifier: Apache-2.0
"""Pictures of ever new sizes; what was computed is kept by its size."""
# /// truth
# leaks = true
# owners = ["native", "tensors"]
# holder = "by_size"
# ///
import random

import torch

from watched import steps

draw = random.Random(3)
net = torch.nn.Conv2d(3, 16, 3)
by_size = {}
for step in steps():
    height, width = draw.randint(40, 90), draw.randint(40, 90)
    with torch.no_grad():
        by_size[step, height, width] = net(torch.randn(1, 3, height, width))  # site
