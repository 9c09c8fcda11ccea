# SPDX-License-Identifier: Apache-2.0
"""Forked workers of a DataLoader that make each item anew."""
# /// truth
# leaks = false
# ///
import numpy as np
import torch

from watched import steps


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return float(np.ones(15_000)[0])


def main():
    loader = torch.utils.data.DataLoader(Items(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    for step in steps():
        next(batches)


if __name__ == "__main__":
    main()
