# SPDX-License-Identifier: Apache-2.0
"""Spawned workers of a DataLoader whose dataset logs the last ten items."""
# /// truth
# leaks = false
# ///
import collections

import torch

from watched import steps


class Items(torch.utils.data.Dataset):
    def __init__(self):
        self.log = collections.deque(maxlen=10)

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        self.log.append(b"x" * 40_000)
        return index


def main():
    loader = torch.utils.data.DataLoader(Items(), batch_size=4, num_workers=2, multiprocessing_context="spawn")
    batches = iter(loader)
    next(batches)
    for step in steps():
        next(batches)


if __name__ == "__main__":
    main()
