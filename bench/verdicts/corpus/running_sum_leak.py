# SPDX-License-Identifier: Apache-2.0
"""A running sum of losses in a local variable, each with its graph."""
# /// truth
# leaks = true
# owners = ["native", "tensors"]
# holder = "`total`"
# needs = ["torch"]
# ///
import torch

from watched import steps


def main():
    net, total = torch.nn.Linear(256, 128), 0.0
    for step in steps():
        out = net(torch.randn(128, 256))  # site
        loss = out.tanh().square().mean()  # site
        total = total + loss  # site
    return total.item()


main()
