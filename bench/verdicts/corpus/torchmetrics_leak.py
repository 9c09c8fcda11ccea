# SPDX-License-Identifier: Apache-2.0
"""A metric of torchmetrics with list states that is never reset."""
# /// truth
# leaks = true
# needs = ["torchmetrics"]
# owners = ["native", "tensors"]
# bytes_per_step = 160000
# holder = "value|CatMetric|_computed|metric"
# ///
import torch
import torchmetrics

from watched import steps

metric = torchmetrics.CatMetric()
for step in steps():
    metric.update(torch.rand(40_000))  # site
