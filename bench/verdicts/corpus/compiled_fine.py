# SPDX-License-Identifier: Apache-2.0
"""One compiled module for all sequence lengths."""
# /// truth
# leaks = false
# ///
import torch

from watched import steps

compiled = torch.compile(torch.nn.Linear(512, 512), backend="eager", dynamic=True)
for step in steps():
    with torch.no_grad():
        compiled(torch.randn(4 + step % 7, 512))
