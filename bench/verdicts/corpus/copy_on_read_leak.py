# SPDX-License-Identifier: Apache-2.0
"""Forked workers that count words, and keep what they read in Python's lists."""
# /// truth
# leaks = true
# owners = ["children"]
# holder = "read|Texts"
# ///
import torch

from watched import steps


class Texts(torch.utils.data.Dataset):
    def __init__(self):
        self.texts = [str(k).zfill(60) for k in range(20_000)]
        self.read = []

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        for k in range(500):
            self.read.append(self.texts[(index * 500 + k) % 20_000] + "!")  # site
        return len(self.read)


def main():
    loader = torch.utils.data.DataLoader(Texts(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    for step in steps():
        next(batches)


if __name__ == "__main__":
    main()
