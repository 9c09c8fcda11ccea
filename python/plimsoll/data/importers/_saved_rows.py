# SPDX-License-Identifier: Apache-2.0
"""Rows that the original saved (embeddings_chunk_<k>.pt), for the import of src/tables/store_import.cpp.

Such a file is a torch.save of {id: float32 [dim]}. It is read as plain values (_torch_file.py): torch need not be there.

Threads: the calling one.   Memory: that of TorchFile, and 1 MiB of rows.
"""
from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import _core
from ...errors import CorruptError
from ._torch_file import Tensor, TorchFile

_ADVICE = "save the original's rows again, with torch.save of {id: tensor}"
_BLOCK_BYTES = 1 << 20


def read_saved_rows(governor: _core.Governor, path: str, with_rows: bool, take: Callable[[np.ndarray, np.ndarray], object]) -> int:
    """Reads the rows of a file, in the order of its dict. Returns their width.

    take:   called with blocks of ids [n] and rows [n, dim]; of ids alone, rows is [0, dim].
    Errors: CorruptError naming the file: damage, a class in it, or no dict of whole numbers to float32 [dim]; BudgetExceeded; OSError.
    """
    with TorchFile(pathlib.Path(path), governor, _ADVICE) as file:
        rows = file.value(lambda module, name: False)
        dim = _width(path, rows)
        file.array(next(iter(rows.values())))  # It has that width.
        ids = np.fromiter(rows, np.int64, len(rows))
        if not with_rows:
            take(ids, np.empty((0, dim), np.float32))
            return dim
        block = np.empty((max(1, _BLOCK_BYTES // (4 * dim)), dim), np.float32)
        held = 0
        for at, row in enumerate(rows.values()):
            block[held] = file.array(row)
            held += 1
            if held == len(block) or at + 1 == len(rows):
                take(ids[at + 1 - held:at + 1], block[:held])
                held = 0
    return dim


def _width(path: str, rows: Any) -> int:
    """Returns the width of the rows, all of which are as they must be. Errors: CorruptError."""
    if type(rows) is not dict or not rows:
        raise CorruptError(f"{path}: holds no dict of rows; {_ADVICE}")
    dim: int | None = None
    for one, row in rows.items():
        if type(one) is not int or not -1 << 63 <= one < 1 << 63:
            raise CorruptError(f"{path}: an id that is no whole number; {_ADVICE}")
        if not isinstance(row, Tensor):
            raise CorruptError(f"{path}: id {one} has no tensor; {_ADVICE}")
        if row.dtype != "f4" or len(row.shape) != 1 or row.shape[0] < 1 or row.shape[0] != (dim or row.shape[0]):
            raise CorruptError(f"{path}: the row of id {one} is not float32 [{dim or 'dim'}]; {_ADVICE}")
        dim = row.shape[0]
    assert dim is not None  # There are rows.
    return dim
