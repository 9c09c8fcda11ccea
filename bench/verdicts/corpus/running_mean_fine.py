# SPDX-License-Identifier: Apache-2.0
"""A running mean of numbers."""
# /// truth
# leaks = false
# ///
import torch

from watched import steps


class Meter:
    def __init__(self):
        self.average = 0.0

    def update(self, loss):
        self.average = 0.9 * self.average + 0.1 * loss.item()


def main():
    net, meter = torch.nn.Linear(256, 256), Meter()
    for step in steps():
        batch = torch.randn(128, 256)
        meter.update((net(batch) - batch).pow(2).mean())


main()
