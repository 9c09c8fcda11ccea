# SPDX-License-Identifier: Apache-2.0
"""An average meter that adds up losses with their graphs."""
# /// truth
# leaks = true
# owners = ["native", "tensors"]
# holder = "meter.sum|`sum` of Meter"
# needs = ["torch"]
# ///
import torch

from watched import steps


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum += value  # site
        self.count += 1


def main():
    net, meter = torch.nn.Linear(256, 256), Meter()
    for step in steps():
        hidden = net(torch.randn(64, 256)).exp()  # site
        meter.update((hidden * hidden).mean())  # site
    return float(meter.sum) / meter.count


main()
