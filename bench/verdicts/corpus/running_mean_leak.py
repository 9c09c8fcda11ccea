# SPDX-License-Identifier: Apache-2.0
"""A running mean that is a tensor with the graph of every batch so far."""
# /// truth
# leaks = true
# owners = ["native", "tensors"]
# bytes_per_step = 262144
# holder = "average|Meter|grad_fn|[Gg]raph"
# ///
import torch

from watched import steps


class Meter:
    def __init__(self):
        self.average = torch.zeros(())

    def update(self, loss):
        self.average = 0.9 * self.average + 0.1 * loss


def main():
    net, meter = torch.nn.Linear(256, 256), Meter()
    for step in steps():
        batch = torch.randn(128, 256)  # site: saved for backward
        meter.update((net(batch) - batch).pow(2).mean())  # site


main()
