# SPDX-License-Identifier: Apache-2.0
"""A module compiled again for each sequence length, and kept with a mask of that length."""
# /// truth
# leaks = true
# owners = ["native", "tensors", "python"]
# holder = "compiled"
# ///
import torch

from watched import steps

compiled = {}
for step in steps():
    if step % 5 == 0:
        net = torch.nn.Linear(512, 512)  # site
        compiled[step] = torch.compile(net, backend="eager")
    with torch.no_grad():
        compiled[step - step % 5](torch.randn(4, 512))
