# SPDX-License-Identifier: Apache-2.0
"""Rows that the original saved (embeddings_chunk_<k>.pt): what is damaged is refused, and Python's import is the program's."""
import collections
import random

import numpy as np
import pytest

import plimsoll
from test_import_saved_graphs import SEED, Storage, Tensor, write_pt


def rows_of(count, dim):
    numbers = np.random.default_rng(SEED)
    return dict(zip(numbers.permutation(10 * count)[:count].tolist(), numbers.random((count, dim), np.float32), strict=True))


def stored(folder, tmp_path):
    plimsoll.store.export(folder, tmp_path / "back.npy", memory_limit="3GiB")
    back = dict(zip(np.load(tmp_path / "back.ids.npy").tolist(), np.load(tmp_path / "back.npy"), strict=True))
    for name in ("back.npy", "back.ids.npy"):
        (tmp_path / name).unlink()
    return back


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[one], b[one]) for one in a)


def test_rows_of_several_files_in_blocks_come_out_as_they_were(tmp_path):
    rows = rows_of(2000, 300)  # More than a block of 1 MiB.
    ids = list(rows)
    whole = Storage(np.stack([rows[one] for one in ids[:900]]).reshape(-1), "0")
    first = {one: Tensor(rows[one], whole, 300 * at) for at, one in enumerate(ids[:900])}
    files = [write_pt(tmp_path / "embeddings_chunk_0.pt", first, {"0": whole.array}),
             write_pt(tmp_path / "embeddings_chunk_1.pt", collections.OrderedDict((one, Tensor(rows[one])) for one in ids[900:]))]
    assert plimsoll.store.import_rows(files, tmp_path / "table", memory_limit="3GiB") == 2000
    assert same(stored(tmp_path / "table", tmp_path), rows)


@pytest.mark.parametrize("mutations", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_any_damage_is_refused_or_changes_nothing(tmp_path, mutations):
    """Seeded mutations: never a crash, never a hang, never other numbers without a word."""
    rows = rows_of(20, 6)
    path = write_pt(tmp_path / "embeddings_chunk_0.pt", {one: Tensor(row) for one, row in rows.items()})
    whole = path.read_bytes()
    random.seed(SEED)
    refused = 0
    for number in range(mutations):
        changed = bytearray(whole)
        if number % 3 == 0:
            changed = changed[:random.randrange(len(changed))]
        for _ in range(random.randint(1, 4)):
            if number % 3 and changed:
                changed[random.randrange(len(changed))] = random.randrange(256)
        path.write_bytes(changed)
        out = tmp_path / f"table{number}"
        try:
            plimsoll.store.import_rows(path, out, memory_limit="3GiB")
        except plimsoll.CorruptError as error:
            assert "embeddings_chunk_0.pt" in str(error), (SEED, number, error)
            assert not out.exists()
            refused += 1
        else:
            assert same(stored(out, tmp_path), rows), (SEED, number)
    assert refused > mutations / 2
