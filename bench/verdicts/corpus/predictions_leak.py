# SPDX-License-Identifier: Apache-2.0
"""Outputs of the model kept for a metric that is never reset."""
# /// truth
# leaks = true
# owners = ["native", "tensors"]
# bytes_per_step = 65536
# holder = "predictions|Metric"
# ///
import torch

from watched import steps


class Metric:
    def __init__(self):
        self.predictions = []

    def update(self, output):
        self.predictions.append(output)


net, metric = torch.nn.Linear(256, 256), Metric()
for step in steps():
    with torch.no_grad():
        metric.update(net(torch.randn(64, 256)))  # site
