#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes small tables and feature stores, and expected.npz, which says what reading them must give.

    make.py DIR     with the package of the version whose format is to be kept
"""
import pathlib
import shutil
import sys

import numpy as np

import plimsoll

DIM = 3
SPARSE = np.array([7, -5, 1 << 40, 12, 99, -(1 << 50), 3, 8, 21, 1000], np.int64)
TABLES = {"dense": {"rows": 20},
          "growing-bfloat16": {"ids": SPARSE, "rows_max": 16, "dtype": "bfloat16"},
          "sample-order": {"ids": SPARSE, "layout": "sample_order", "order_seed": 4}}
GROUPS = np.array([1, 1, 2, 3, 3, 3, 4, 5, 5, 6])
# Elements of records that begin pages, cross them, fill them and have none.
RAGGED = np.array([300, 5000, 3000, 4096, 6000, 100, 8192, 2500, 0, 9000, 4000, 1500])


def open_table(governor: plimsoll.Governor, folder: pathlib.Path, **how) -> plimsoll.EmbeddingStore:
    return plimsoll.EmbeddingStore.open(governor, folder, optimizer=plimsoll.AdamW(lr=0.5), store_bytes="4MiB", **how)


def train(table: plimsoll.EmbeddingStore, ids: np.ndarray, step: int) -> None:
    """A step with gradients that follow from positions and step, and its commit."""
    some = np.ascontiguousarray(ids[step % 2::2])
    table.apply(some, (np.outer(np.arange(len(some)) - 2, np.arange(1, DIM + 1)) * step / 8).astype(np.float32))
    table.commit(step)


def content(table: plimsoll.EmbeddingStore) -> dict[str, np.ndarray]:
    """Ids, counts of steps, and weights with slots, as scan() shows them."""
    pieces = []
    table.scan(lambda *arrays: pieces.append([array.copy() for array in arrays]))
    return {name: np.concatenate(arrays) for name, arrays in zip(("ids", "sequences", "values"), zip(*pieces))}


def make_table(governor: plimsoll.Governor, folder: pathlib.Path, name: str, expected: dict[str, np.ndarray]) -> None:
    how = TABLES[name]
    ids = how.get("ids", np.arange(20))
    path = folder / f"table-{name}"
    with open_table(governor, path, dim=DIM, init=plimsoll.Normal(0.1, seed=2), **how) as table:
        for step in (1, 2, 3):
            train(table, ids, step)
        if "rows_max" in how:
            table.insert(np.array([5, 6]))
            table.erase(np.array([7]))
            ids = np.append(ids[1:], [5, 6])
        expected |= {f"{name}.before.{key}": value for key, value in content(table).items()}
        table.commit(4)
    (path / ".lock").unlink()
    shutil.copytree(path, folder / "trained")
    with open_table(governor, folder / "trained") as table:
        train(table, ids, 5)
        expected |= {f"{name}.after.{key}": value for key, value in content(table).items()}
    shutil.rmtree(folder / "trained")
    expected[f"{name}.ids"] = ids


def make_features(governor: plimsoll.Governor, folder: pathlib.Path, expected: dict[str, np.ndarray]) -> None:
    x, y = np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10) * 3
    for compression in ("none", "lz4"):
        with plimsoll.FeatureWriter(governor, folder / f"features-{compression}",
                                    {"x": ("float32", (2,)), "y": ("int64", ())}, grouped=True,
                                    compression=compression) as writer:
            writer.append(SPARSE, x=x, y=y, groups=GROUPS)
    expected |= {"features.ids": SPARSE, "features.x": x, "features.y": y}


def ragged_records(first: int = 0) -> tuple[np.ndarray, dict[str, list[np.ndarray]]]:
    """(ids, columns) of twelve records. first: the first one's id."""
    ids = np.arange(first, first + len(RAGGED))
    return ids, {"tokens": [(np.arange(n) * (k + 3) % 251).astype(np.uint8) for k, n in zip(ids, RAGGED)],
                 "boxes": [np.arange(n % 3 * 4, dtype=np.int32).reshape(-1, 4) for n in RAGGED]}


def make_ragged(governor: plimsoll.Governor, folder: pathlib.Path) -> None:
    with plimsoll.FeatureWriter(governor, folder / "features-ragged", {"tokens": ("uint8", ()), "boxes": ("int32", (4,))},
                                ragged={"tokens": 9000, "boxes": 2}) as writer:
        ids, columns = ragged_records()
        writer.append(ids, columns)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True)
    expected: dict[str, np.ndarray] = {}
    with plimsoll.Governor("1GiB") as governor:
        for name in TABLES:
            make_table(governor, folder, name, expected)
        make_features(governor, folder, expected)
        make_ragged(governor, folder)
    np.savez_compressed(folder / "expected.npz", **expected)


if __name__ == "__main__":
    main()
