# SPDX-License-Identifier: Apache-2.0
"""Tools for stores, token sets and a run's rows: the functions behind `plimsoll store`. No torch is imported.

    plimsoll.store.info("run")                       a store's contents
    plimsoll.store.verify("data")                    all checksums
    plimsoll.store.export("run", "rows.safetensors")
    plimsoll.store.import_rows("rows.npy", "table")
    plimsoll.store.export("chats.tokens", "megatron/chats.idx")
    plimsoll.store.compact("run")

Threads: one call at a time for one store.
Memory:  functions that write stay within `memory_limit`; "": the limit that `plimsoll limits` prints.
"""
from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from . import _core

Path = str | os.PathLike[str]


def info(path: Path) -> dict[str, Any]:
    """Returns the contents of a store, or of a run's store. Errors: NotFoundError, CorruptError, OSError."""
    return json.loads(_core.describe(_core.store_directory(os.fspath(path))))


def verify(path: Path) -> None:
    """Reads a whole store and compares its checksums. Errors: CorruptError naming file and page."""
    _core.store_verify(os.fspath(path))


def export(path: Path, out: Path, *, format: str = "", column: str = "", since: int = -1,
           step: int = -1, memory_limit: int | str = "") -> int:
    """Writes a store as .safetensors, .npy or .csv, or a token set as Megatron's .idx and .bin. Returns the number of rows.

    out:    file to make; it must not exist.
    format: "safetensors", "npy", "csv", "megatron"; "": by the name of `out`. Megatron's format does not record
            which tokens are trained on.
    column: the feature store's column to write as .npy or .csv.
    since:  writes only rows changed since the commit of this step.
    step:   the commit to write; -1: the newest.
    Errors: ValueError (format, column, step, file exists); NotFoundError; OSError.
    """
    return _core.store_export(os.fspath(path), os.fspath(out), format, column, since, step,
                              str(memory_limit))


def import_rows(files: Path | Sequence[Path], out: Path, *, format: str = "",
                optimizer: str = "adamw", dtype: str = "float32", number_rows: bool = False,
                memory_limit: int | str = "") -> int:
    """Makes a table of rows at `out` from other programs' files. Returns the number of rows.

    files: shards in order: .safetensors, .npy, .csv, or embeddings_chunk_*.pt. Megatron's .idx, with its .bin beside it,
           becomes a token set in the file `out`: a row per document, all tokens trained on.
    number_rows: accepts a .npy without NAME.ids.npy beside it, and gives its rows the ids 0, 1, 2, …
    Errors: ValueError (format, optimizer, dtype, an id twice, `out` not empty); CorruptError; OSError.
    """
    some = [files] if isinstance(files, (str, os.PathLike)) else files
    return _core.store_import([os.fspath(one) for one in some], os.fspath(out), format, optimizer,
                              dtype, number_rows, str(memory_limit))


def compact(path: Path, *, rows_max: int = 0, memory_limit: int | str = "") -> tuple[int, int]:
    """Shrinks a table by rewriting its live rows, or joins the parts of a feature store. Returns (bytes before, bytes after).

    rows_max: the table's new maximum of rows; 0: unchanged.
    Errors: NotFoundError; ValueError when a process trains in the table or adds to the features, or rows_max is too
            small.
    """
    return _core.store_compact(os.fspath(path), rows_max, str(memory_limit))
