# SPDX-License-Identifier: Apache-2.0
"""A run's commits: what they hold, and in which order they become true.

    checkpoints/step-000000100/parts.pt    written and synced: parts, random states, the position
    embeddings/NAME/                       each table commits step 100, and keeps the commit before it
    checkpoints/manifest.json              published: from here on a crash comes back to step 100
    checkpoints/step-000000098/            deleted: two commits are kept

Threads: the thread that trains.   Memory: see _checkpoint.py.
"""
from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
from typing import Any

from . import _core
from ._checkpoint import check_plain, copied, read, write
from ._embedding import EmbeddingStore
from ._folders import sync_folder
from .errors import CorruptError

_FILE = "parts.pt"
_KEEP = 2
_FORMAT = 1


@dataclasses.dataclass
class Position:
    """Where a run is, between two steps."""

    step: int = 0
    """Steps made."""
    loop: int = 0
    """The call of steps() that it is in, or that has ended."""
    first: int = 0
    """The epoch that this loop began with."""
    epoch: int = 0
    """Of the run: loops count on."""
    batch: int = 0
    """Batches of the epoch that were done."""
    source: Any = None
    """The state of what batches come from, where it has one."""


def load(folder: _core.RunFolder, step: int) -> dict[str, Any]:
    """What save() wrote. Errors: CorruptError; OSError."""
    path = pathlib.Path(folder.checkpoint_path(step)) / _FILE
    try:
        content = read(path, step, mapped=True)
    except FileNotFoundError:
        raise CorruptError(f"{path}: the manifest names step {step}, and its checkpoint is not there") from None
    if content.get("format") != _FORMAT:
        raise CorruptError(f"{path}: is of format {content.get('format')}, not {_FORMAT}")
    # Of parts the pages of the file are used; all else is small, and kept longer than the file.
    kept = {name: value if name == "parts" else copied(value) for name, value in content.items()}
    kept["position"] = Position(**kept["position"])
    return kept


def save(folder: _core.RunFolder, content: dict[str, Any], position: Position,
         tables: list[EmbeddingStore], again: bool) -> int:
    """Commits everything under position.step; returns the bytes of the checkpoint.

    again:  the step is published already, and only the position is another: the file is replaced.
    Errors: OSError; the commit before it stands.
    """
    step = position.step
    check_plain(position.source, "the state of the data")
    content = {"format": _FORMAT, "step": step, "position": dict(vars(position)), **content}
    place = pathlib.Path(folder.checkpoint_path(step))
    if again:
        return write(content, place / _FILE)
    # RunFolder removes folders of such a name, which a crash left.
    partial = place.with_name(place.name + ".partial")
    for left in (partial, place):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir()
    size = write(content, partial / _FILE)
    os.rename(partial, place)
    sync_folder(place.parent)
    for table in tables:
        table.commit(step)
    folder.publish(step, _KEEP)
    return size
