# SPDX-License-Identifier: Apache-2.0
"""Forked workers that read their parent's objects: counting references copies each page once (pytorch#13246)."""
# /// truth
# leaks = false
# ///
import torch

from watched import steps


class Texts(torch.utils.data.Dataset):
    def __init__(self):
        self.texts = [str(k).zfill(60) for k in range(120_000)]

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return sum(len(self.texts[(index * 500 + k) % 120_000]) for k in range(500))


def main():
    loader = torch.utils.data.DataLoader(Texts(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    for step in steps():
        next(batches)


if __name__ == "__main__":
    main()
