# SPDX-License-Identifier: Apache-2.0
"""Templates and checkpoints: every row of a table in a folder, with a fingerprint.

    copy.json      ids, dim, strategy, seed, factor; <n>; the checksums. Replaced last.
    rows-<n>.npy   float32 [rows, dim]
    ids-<n>.npy    int64 [rows]: the rows' ids

Threads: the manager's lock.   Memory: one piece of rows.
"""
from __future__ import annotations

import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core._folders import sync_folder
from ..errors import CorruptError, NotFoundError
from ._files import map_npy, read_json, replace_json

_PIECE = 4096


class _Stream:
    """A .npy file that is written piece by piece."""

    def __init__(self, path: pathlib.Path, dtype: str, shape: tuple[int, ...]) -> None:
        self._file = open(path, "wb")
        self.crc = 0
        np.lib.format.write_array_header_1_0(
            self._file, {"descr": dtype, "fortran_order": False, "shape": shape})

    def write(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        self.crc = zlib.crc32(data, self.crc)
        self._file.write(data)

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def write_copy(folder: pathlib.Path, record: dict[str, Any], rows: int, dim: int,
               pieces: Iterator[tuple[np.ndarray, np.ndarray]]) -> None:
    """Writes (ids, rows) pieces to `folder`. The copy already there stays valid until the new one is durable.

    Errors: OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    old = read_json(folder / "copy.json") or {}
    number = int(old.get("number", 0)) + 1
    ids_file = _Stream(folder / f"ids-{number}.npy", "<i8", (rows,))
    rows_file = _Stream(folder / f"rows-{number}.npy", "<f4", (rows, dim))
    for ids, values in pieces:
        ids_file.write(ids)
        rows_file.write(values)
    ids_file.close()
    rows_file.close()
    sync_folder(folder)
    replace_json(folder / "copy.json", {**record, "format": 1, "number": number,
                                        "ids_crc": ids_file.crc, "rows_crc": rows_file.crc})
    for name in ("ids", "rows"):
        for path in folder.glob(f"{name}-*.npy"):
            if path.name != f"{name}-{number}.npy":
                path.unlink()


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of copy.json. Errors: NotFoundError; CorruptError."""
    record = read_json(folder / "copy.json")
    if record is None:
        raise NotFoundError(f"{folder}: there is no template or checkpoint here")
    return record


def compare_record(folder: pathlib.Path, there: dict[str, Any], wanted: dict[str, Any],
                   names: tuple[str, ...]) -> None:
    """Compares the record `there` with `wanted`. Errors: ValueError naming the first difference."""
    for name in names:
        if there.get(name) != wanted[name]:
            shown = "other samples" if name == "ids" else repr(there.get(name))
            here = "" if name == "ids" else f", but here it is {wanted[name]!r}"
            option = {"ids": "sample_ids", "dim": "embedding_dim",
                      "strategy": "initialization_strategy"}.get(name, name)
            raise ValueError(f"{folder}: {option} is {shown}{here}; it belongs to another table")


def read_copy(folder: pathlib.Path,
              record: dict[str, Any]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Checks all checksums, then yields (ids, rows) pieces. Errors: CorruptError; OSError."""
    arrays = {}
    for name in ("ids", "rows"):
        path = folder / f"{name}-{record['number']}.npy"
        try:
            arrays[name] = map_npy(path)
        except FileNotFoundError:
            raise CorruptError(f"{path}: it is missing; restore the file") from None
        crc = 0
        for begin in range(0, len(arrays[name]), _PIECE):
            piece = np.ascontiguousarray(arrays[name][begin:begin + _PIECE])
            crc = zlib.crc32(piece.reshape(-1).view(np.uint8).data, crc)
        if crc != record[f"{name}_crc"]:
            raise CorruptError(f"{path}: its checksum is wrong; restore the file")
    for begin in range(0, len(arrays["ids"]), _PIECE):
        yield (np.ascontiguousarray(arrays["ids"][begin:begin + _PIECE]),
               np.ascontiguousarray(arrays["rows"][begin:begin + _PIECE]))
