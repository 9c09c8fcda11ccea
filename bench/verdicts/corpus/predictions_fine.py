# SPDX-License-Identifier: Apache-2.0
"""Outputs of the model kept for a metric that is reset after each epoch of 20 steps."""
# /// truth
# leaks = false
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
    if step % 20 == 0:
        metric.predictions.clear()
    with torch.no_grad():
        metric.update(net(torch.randn(64, 256)))
