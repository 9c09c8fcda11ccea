# SPDX-License-Identifier: Apache-2.0
"""Tools that look after stores, token sets and a run's rows; what `plimsoll store` does. No torch is imported.

    plimsoll.store.info("run")                       what a store holds
    plimsoll.store.verify("data")                    every checksum
    plimsoll.store.export("run", "rows.safetensors")
    plimsoll.store.import_rows("rows.npy", "table")
    plimsoll.store.export("chats.tokens", "megatron/chats.idx")
    plimsoll.store.compact("run")

Threads: one call at a time for one store.
Memory:  what writes is inside its own memory_limit; "" is what `plimsoll limits` finds.
"""
from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from . import _core

Path = str | os.PathLike[str]


def info(path: Path) -> dict[str, Any]:
    """Returns what a store, or the store of a run, holds. Errors: NotFoundError, CorruptError, OSError."""
    return json.loads(_core.describe(_core.store_directory(os.fspath(path))))


def verify(path: Path) -> None:
    """Reads a whole store and compares its checksums. Errors: CorruptError naming file and page."""
    _core.store_verify(os.fspath(path))


def export(path: Path, out: Path, *, format: str = "", column: str = "", since: int = -1,
           step: int = -1, memory_limit: int | str = "") -> int:
    """Writes a store as .safetensors, .npy or .csv, a token set as Megatron's .idx and .bin; returns the number of rows.

    format: "safetensors", "npy", "csv", "megatron"; "": by the name of `out`, which must not exist. Megatron's form
            does not say which tokens are trained on.
    column: of a feature store, for .npy and .csv. since: only rows changed since the commit of that
    step. step: the commit to write; -1: the newest.
    Errors: ValueError (format, column, step, file exists); NotFoundError; OSError.
    """
    return _core.store_export(os.fspath(path), os.fspath(out), format, column, since, step,
                              str(memory_limit))


def import_rows(files: Path | Sequence[Path], out: Path, *, format: str = "",
                optimizer: str = "adamw", dtype: str = "float32", number_rows: bool = False,
                memory_limit: int | str = "") -> int:
    """Makes a table of rows at `out` from other programs' files; returns the number of rows.

    files: shards in order: .safetensors, .npy, .csv, or embeddings_chunk_*.pt. Megatron's .idx, its .bin beside it,
           becomes a token set in the file `out`: each document a row, all of its tokens trained on.
    number_rows: the rows of a .npy without NAME.ids.npy beside it get the ids 0, 1, 2, …; without, it is refused.
    Errors: ValueError (format, optimizer, dtype, an id twice, `out` not empty); CorruptError; OSError.
    """
    some = [files] if isinstance(files, (str, os.PathLike)) else files
    return _core.store_import([os.fspath(one) for one in some], os.fspath(out), format, optimizer,
                              dtype, number_rows, str(memory_limit))


def compact(path: Path, *, rows_max: int = 0, memory_limit: int | str = "") -> tuple[int, int]:
    """Shrinks a table by rewriting its live rows, or joins the parts of a feature store; returns its bytes before and
    after.

    rows_max: largest number of a table's rows from then on; 0: as it was.
    Errors: NotFoundError; ValueError when a process trains in the table or adds to the features, or rows_max is too
            small.
    """
    return _core.store_compact(os.fspath(path), rows_max, str(memory_limit))
