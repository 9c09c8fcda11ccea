# SPDX-License-Identifier: Apache-2.0
"""A running sum of losses in a local variable, without their graphs."""
# /// truth
# leaks = false
# needs = ["torch"]
# ///
import torch

from watched import steps


def main():
    net, total = torch.nn.Linear(256, 128), 0.0
    for step in steps():
        out = net(torch.randn(128, 256))
        loss = out.tanh().square().mean()
        total = total + loss.detach()
    return total.item()


main()
