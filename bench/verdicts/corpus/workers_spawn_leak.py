# SPDX-License-Identifier: Apache-2.0
"""Spawned workers of a DataLoader whose dataset logs what it did."""
# /// truth
# leaks = true
# owners = ["children"]
# bytes_per_step = 160000
# holder = "log|Items"
# ///
import torch

from watched import steps


class Items(torch.utils.data.Dataset):
    def __init__(self):
        self.log = []

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        self.log.append(b"x" * 40_000)  # site
        return index


def main():
    loader = torch.utils.data.DataLoader(Items(), batch_size=4, num_workers=2, multiprocessing_context="spawn")
    batches = iter(loader)
    next(batches)
    for step in steps():
        next(batches)


if __name__ == "__main__":
    main()
