# SPDX-License-Identifier: Apache-2.0
"""Forked workers of a DataLoader whose dataset keeps each item it made."""
# /// truth
# leaks = true
# owners = ["children"]
# bytes_per_step = 240000
# holder = "cache|Items"
# ///
import numpy as np
import torch

from watched import steps


class Items(torch.utils.data.Dataset):
    def __init__(self):
        self.cache = {}

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        self.cache[index] = np.ones(15_000)  # site
        return float(self.cache[index][0])


def main():
    loader = torch.utils.data.DataLoader(Items(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    for step in steps():
        next(batches)


if __name__ == "__main__":
    main()
