# SPDX-License-Identifier: Apache-2.0
"""Batches that workers sent through shared memory, each let go of."""
# /// truth
# leaks = false
# ///
import torch

from watched import steps


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.full((10_000,), float(index))


def main():
    loader = torch.utils.data.DataLoader(Items(), batch_size=4, num_workers=1, multiprocessing_context="fork")
    batches, total = iter(loader), 0.0
    for step in steps():
        total += next(batches).sum().item()


if __name__ == "__main__":
    main()
