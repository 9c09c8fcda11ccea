# SPDX-License-Identifier: Apache-2.0
"""A metric of torchmetrics with list states that is reset every 20 steps."""
# /// truth
# leaks = false
# needs = ["torchmetrics"]
# ///
import torch
import torchmetrics

from watched import steps

metric = torchmetrics.CatMetric()
for step in steps():
    metric.update(torch.rand(40_000))
    if step % 20 == 19:
        metric.reset()
