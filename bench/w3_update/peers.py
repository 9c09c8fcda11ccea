#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures torch.optim.SparseAdam, and FBGEMM's fused row-wise Adagrad, on the shapes of w3_update; prints one JSON object.

Like the store's gather and apply: rows are read by index, then one optimizer step is taken with
gradients of distinct random rows. The tables live in RAM: weight, exp_avg, exp_avg_sq; weight and a number a row.
FBGEMM's operators for CPU have no Adam (fbgemm-gpu-cpu 1.8.0: "Optimizer adam is not supported in CPU mode"); its
figure stands beside that of --optimizer row_adagrad. It is left out where it is not installed.
"""
import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

DIM, BATCH, BATCHES, PROBES = 128, 4096, 8, 5
RATE, EPSILON = 1e-3, 1e-8


def batches(rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(3)
    ids = [torch.randperm(rows)[:BATCH].sort().values for _ in range(BATCHES)]
    return ids, [torch.randn(len(each), DIM) for each in ids]


def nanoseconds_per_row(step: Callable[[int], None], rows_a_batch: int) -> float:
    """Median over probes of all batches; the first probe makes the state and touches the rows."""
    def probe() -> float:
        begin = time.perf_counter()
        for number in range(BATCHES):
            step(number)
        return (time.perf_counter() - begin) * 1e9 / (rows_a_batch * BATCHES)
    probe()
    return statistics.median(probe() for _ in range(PROBES))


def sparse_adam(rows: int) -> float:
    ids, grads = batches(rows)
    weight = torch.nn.Parameter(torch.zeros(rows, DIM))
    optimizer = torch.optim.SparseAdam([weight], lr=RATE)

    def step(number: int) -> None:
        with torch.no_grad():
            weight.index_select(0, ids[number])
        weight.grad = torch.sparse_coo_tensor(ids[number][None], grads[number], weight.shape, is_coalesced=True,
                                              check_invariants=False)
        optimizer.step()
    return nanoseconds_per_row(step, len(ids[0]))


def fbgemm_table(rows: int):
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (ComputeDevice, EmbeddingLocation,
                                                                        SplitTableBatchedEmbeddingBagsCodegen)
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RATE, eps=EPSILON, pooling_mode=PoolingMode.NONE)
    table.init_embedding_weights_uniform(-0.1, 0.1)
    return table


def fbgemm_is_right() -> bool:
    """Three steps on the same rows, compared with row-wise Adagrad written out."""
    table, ids = fbgemm_table(1000), torch.randperm(1000)[:64]
    starts = torch.arange(len(ids) + 1)
    wanted, squares = table(ids, starts).detach().clone(), torch.zeros(len(ids), 1)
    for _ in range(3):
        grad = torch.randn(len(ids), DIM)
        table(ids, starts).backward(grad)
        squares += (grad ** 2).mean(1, keepdim=True)
        wanted -= RATE * grad / (squares.sqrt() + EPSILON)
    return torch.allclose(table(ids, starts), wanted, atol=1e-6)


def fbgemm(rows: int) -> float:
    ids, grads = batches(rows)
    table, starts = fbgemm_table(rows), torch.arange(len(ids[0]) + 1)
    return nanoseconds_per_row(lambda number: table(ids[number], starts).backward(grads[number]), len(ids[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    rows = 20_000 if smoke else (4 << 30) // (16 + 12 * DIM)
    peers = {"torch_sparse_adam": sparse_adam}
    if importlib.util.find_spec("fbgemm_gpu"):
        try:
            right = fbgemm_is_right()
        except OSError as error:  # Built for another torch.
            print(f"w3_update: without FBGEMM: {str(error)[:200]}", file=sys.stderr)
        else:
            if not right:
                sys.exit("w3_update: FBGEMM's rows are not those of row-wise Adagrad")
            peers["fbgemm_row_adagrad"] = fbgemm
    figures = {}
    for name, measure in peers.items():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            figures[f"{name}_{threads}_threads_ns_per_row"] = round(measure(rows), 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
