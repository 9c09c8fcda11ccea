# SPDX-License-Identifier: Apache-2.0
"""Reads rows of Parquet and Arrow files by pyarrow, a few at a time, however large the file's groups or batches are.

A folder written by datasets.save_to_disk() stands for the Arrow files in it.

Threads: one owner.
Memory:  rows of about a mebibyte, and pyarrow's own memory (the pages of a group's columns; nothing where a file is
         mapped): leased as it grows.
"""
from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from ...memory._memory import Governor

_ROWS_BYTES = 1 << 20
_PAGE_BYTES = 1 << 20  # Bytes of a column that are read at a time.
_ROWS_MOST = 1024
_IMAGES = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM")


def library() -> Any:
    """Returns pyarrow. Errors: ImportError naming the package to install."""
    try:
        import pyarrow
    except ImportError:
        raise ImportError("Parquet and Arrow files are read by pyarrow, which is not installed: pip install "
                          "pyarrow") from None
    return pyarrow


def arrow_rows(path: str, kind: str, governor: Governor) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, row). The name is "": rows have only their number. kind: "parquet", "arrow-file" or "arrow-stream".

    Errors: ImportError; ValueError naming file and row (damaged, or not representable in JSON); BudgetExceeded; OSError.
    """
    arrow = library()
    pool = arrow.default_memory_pool()
    before = pool.bytes_allocated()
    with contextlib.ExitStack() as held:
        lease = held.enter_context(governor.reserve(2 * _PAGE_BYTES))
        held.callback(pool.release_unused)
        batches = _parquet(path) if kind == "parquet" else _arrow(path, kind)
        number = 0
        while True:
            try:
                batch = next(batches, None)
            except arrow.ArrowException as error:
                raise ValueError(f"{path}[{number}]: damaged, or not as pyarrow reads it: {error}") from None
            if batch is None:
                return
            lease.grow(max(0, pool.bytes_allocated() - before + 2 * _PAGE_BYTES - lease.bytes))
            has_bytes = any(_has_bytes(arrow, field.type) for field in batch.schema)
            for begin, count in _slices(batch):
                rows = batch.slice(begin, count).to_pylist()
                for row in rows:
                    yield "", _with_texts(row) if has_bytes else row
                number += len(rows)


def _parquet(path: str) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, buffer_size=_PAGE_BYTES, pre_buffer=False) as file:
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)
            each = max(1, about.total_byte_size // max(1, about.num_rows))
            yield from file.iter_batches(max(1, min(_ROWS_MOST, _ROWS_BYTES // each)), row_groups=[group], use_threads=False)


def _arrow(path: str, kind: str) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(path) as mapped:
        if kind == "arrow-stream":
            with pyarrow.ipc.open_stream(mapped) as stream:
                yield from stream
        else:
            with pyarrow.ipc.open_file(mapped) as file:
                for number in range(file.num_record_batches):
                    yield file.get_batch(number)


def _slices(batch: Any) -> Iterator[tuple[int, int]]:
    """Yields (first row, number of rows) of slices that take about _ROWS_BYTES each."""
    count = max(1, min(_ROWS_MOST, _ROWS_BYTES // max(1, batch.nbytes // max(1, batch.num_rows))))
    for begin in range(0, batch.num_rows, count):
        yield begin, min(count, batch.num_rows - begin)


def _has_bytes(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_has_bytes(arrow, kind.field(number).type) for number in range(kind.num_fields))


def _with_texts(value: Any) -> Any:
    """Decodes bytes that are UTF-8 text, as some writers store it. Bytes of images stay bytes."""
    if isinstance(value, dict):
        return {key: one if key == "bytes" else _with_texts(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_texts(one) for one in value]
    if isinstance(value, bytes) and not value.startswith(_IMAGES):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    return value


def saved_files(folder: str) -> list[str]:
    """Returns the Arrow files of a folder written by datasets.save_to_disk(). Errors: ValueError for any other folder; OSError."""
    if os.path.exists(os.path.join(folder, "dataset_dict.json")):
        with open(os.path.join(folder, "dataset_dict.json"), encoding="utf-8") as file:
            splits = json.load(file)["splits"]
        raise ValueError(f"{folder}: a data set of several splits: name one of {', '.join(os.path.join(folder, s) for s in splits)}")
    state = os.path.join(folder, "state.json")
    if not os.path.exists(state):
        raise ValueError(f"{folder}: a folder that datasets.save_to_disk() did not write: name the files in it")
    with open(state, encoding="utf-8") as file:
        said = json.load(file)
    if said.get("_indices_data_files") or said.get("_indices_files"):
        raise ValueError(f"{folder}: written by an early version of datasets, with indices: load it, and save it again")
    return [os.path.join(folder, one["filename"]) for one in said["_data_files"]]
