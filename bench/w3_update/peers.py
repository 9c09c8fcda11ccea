#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures torch.optim.SparseAdam on the shapes of w3_update; prints one JSON object.

Like the store's gather and apply: rows are read by index, then one optimizer step is taken with a
sparse gradient of distinct random rows. The table lives in RAM as weight, exp_avg, exp_avg_sq.
"""
import argparse
import json
import statistics
import time

import torch

DIM, BATCH, BATCHES, PROBES = 128, 4096, 8, 5


def nanoseconds_per_row(rows: int, threads: int) -> float:
    torch.set_num_threads(threads)
    torch.manual_seed(3)
    weight = torch.nn.Parameter(torch.zeros(rows, DIM))
    optimizer = torch.optim.SparseAdam([weight], lr=1e-3)
    ids = [torch.randperm(rows)[:BATCH].sort().values[None] for _ in range(BATCHES)]
    grads = [torch.randn(BATCH, DIM) for _ in range(BATCHES)]

    def probe() -> float:
        begin = time.perf_counter()
        for index, grad in zip(ids, grads):
            with torch.no_grad():
                weight.index_select(0, index[0])
            weight.grad = torch.sparse_coo_tensor(index, grad, weight.shape, is_coalesced=True,
                                                  check_invariants=False)
            optimizer.step()
        return (time.perf_counter() - begin) * 1e9 / (BATCH * BATCHES)

    probe()  # Makes the state and touches the rows.
    return statistics.median(probe() for _ in range(PROBES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    rows = 20_000 if smoke else (4 << 30) // (16 + 12 * DIM)
    print(json.dumps({f"torch_sparse_adam_{threads}_threads_ns_per_row":
                      round(nanoseconds_per_row(rows, threads), 1) for threads in (1, 2)}))


if __name__ == "__main__":
    main()
