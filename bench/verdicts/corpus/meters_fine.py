# SPDX-License-Identifier: Apache-2.0
"""An average meter that adds up numbers."""
# /// truth
# leaks = false
# needs = ["torch"]
# ///
import torch

from watched import steps


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum += value
        self.count += 1


def main():
    net, meter = torch.nn.Linear(256, 256), Meter()
    for step in steps():
        hidden = net(torch.randn(64, 256)).exp()
        meter.update((hidden * hidden).mean().item())
    return float(meter.sum) / meter.count


main()
