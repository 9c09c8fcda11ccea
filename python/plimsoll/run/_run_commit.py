# SPDX-License-Identifier: Apache-2.0
"""A run's commits: what they hold, and in which order they become true.

    checkpoints/step-000000100/parts.pt    written and synced: parts, random states, the position
    embeddings/NAME/                       each table commits step 100, and keeps the commit before it;
                                           before the file, where a thread writes that (_run_writer.py)
    checkpoints/manifest.json              published: from here on a crash comes back to step 100
    checkpoints/step-000000098/            deleted: two commits are kept

Of several ranks rank-1/parts.pt is written too, beside rank 0's and before the manifest: the parts, random
states and gradients of `accumulate` that are not the same on all of them. Where there are none, another number of ranks may go on.
A step that is committed again, at another position, has rank-1/parts-LOOP-EPOCH-BATCH.pt, and rank 0's parts.pt, which names it, is
replaced last.

Where the disk is full, each of these waits for room, and is made again by itself (_room.py, os/room.h).

Threads: the thread that trains, and one that writes.   Memory: see _checkpoint.py and _run_writer.py.
"""
from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import time
from typing import TYPE_CHECKING, Any

from .. import _core
from ..core._folders import sync_folder
from ..core._room import with_room
from ..errors import CorruptError
from ..rows._embedding import EmbeddingStore
from ..training._checkpoint import check_plain, copied, read, write
from ._run_writer import Image, Writer

if TYPE_CHECKING:
    from ..memory._memory import Governor
    from ..ranks._ranks import Ranks

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
    """The epoch of the run: its count goes on from one loop to the next."""
    batch: int = 0
    """Batches of the epoch that were done."""
    source: Any = None
    """The state of what batches come from, where it has one."""
    ended: str = ""
    """How the loop has: "whole", or "left" by `break`; "": it is in an epoch."""


def load(folder: _core.RunFolder, step: int, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Returns the content that save() or save_together() wrote, as rank `rank` of `ranks` goes on from it.

    Errors: CorruptError; OSError; ValueError naming parts that differed between ranks, where the number of ranks has changed.
    """
    place = pathlib.Path(folder.checkpoint_path(step))
    content = _read(place / _FILE, step)
    own, before = content.pop("own", []), content.get("ranks", 1)
    if own and ranks != before:
        raise ValueError(f"{place}: {', '.join(own)} of its {before} ranks were not the same, so {ranks} cannot go on "
                         f"with them: start {before} again, and change nothing by the rank where others are to go on")
    if own and rank:
        mine = _read(_of_rank(place, rank) / content.get("own_file", _FILE), step)
        content["parts"] |= mine["parts"]
        content |= {name: mine[name] for name in ("random", "step_state")}
    # Of parts the pages of the file are used; all else is small, and kept longer than the file.
    kept = {name: value if name == "parts" else copied(value) for name, value in content.items()}
    kept["position"] = Position(**kept["position"])
    return kept


def _read(path: pathlib.Path, step: int) -> dict[str, Any]:
    try:
        content = read(path, step, mapped=True)
    except FileNotFoundError:
        raise CorruptError(f"{path}: the manifest names step {step}, and its checkpoint is not there") from None
    if content.get("format") != _FORMAT:
        raise CorruptError(f"{path}: is of format {content.get('format')}, not {_FORMAT}")
    return content


def save(folder: _core.RunFolder, content: dict[str, Any], position: Position,
         tables: list[EmbeddingStore], again: bool) -> int:
    """Commits everything under position.step; returns the bytes of the checkpoint.

    again:  the step is published already, and only the position is another: the file is replaced.
    Errors: OSError; the commit before it stands.
    """
    whole, step = _whole(content, position), position.step
    if again:
        return write(whole, pathlib.Path(folder.checkpoint_path(step)) / _FILE, step)
    return _written(folder, whole, step, tables)


def save_beside(folder: _core.RunFolder, content: dict[str, Any], position: Position,
                tables: list[EmbeddingStore], governor: Governor) -> Writer | None:
    """save(), whose file a thread writes from the writer's start() on; the tables have committed when this returns.

    None: there is no room for the copy that it is written from, and nothing was done. Errors: OSError.
    """
    began, step = time.monotonic(), position.step
    image = Image.of(_whole(content, position), governor)
    if image is None:
        return None
    try:
        for table in tables:
            table.commit(step)
        return Writer(image, step, began, lambda: _written(folder, image.content, step, []))
    except BaseException:
        image.close()
        raise


def _written(folder: _core.RunFolder, content: dict[str, Any], step: int,
             tables: list[EmbeddingStore]) -> int:
    partial = _begin(pathlib.Path(folder.checkpoint_path(step)))
    size = write(content, partial / _FILE, step)
    _finish(folder, partial, tables, step)
    return size


def save_together(ranks: Ranks, folder: _core.RunFolder, content: dict[str, Any], position: Position,
                  tables: list[EmbeddingStore], again: bool) -> int:
    """save(), of all ranks: each writes what is its own, and then rank 0 publishes.

    content: of each rank; "own" names what is not the same on all.
    again:   as save()'s. The published files stay until rank 0's is replaced, which names the others'.
    Errors:  as save(), on all.
    """
    place = pathlib.Path(folder.checkpoint_path(position.step))
    if again:
        return _save_again(ranks, content, position, place)
    partial = _partial_of(place)
    ranks.agreed("a commit", lambda: _begin(place) if ranks.first else None)
    own = _of_rank(partial, ranks.rank)

    def prepared() -> int:
        if not (ranks.first or content["own"]):
            return 0
        with_room(own, lambda: own.mkdir(exist_ok=True))
        return write(_whole(content, position), own / _FILE, position.step)

    said = ranks.agreed("a commit", prepared, lambda size: (size,))[1]

    def tables_committed() -> None:
        for table in tables:
            if table.last_commit < position.step:  # Else only the place in the data is another.
                table.commit(position.step)

    if tables:
        ranks.agreed("a commit", tables_committed)

    def published() -> None:
        if ranks.first:
            sync_folder(partial)  # The other ranks' folders are in it.
            _finish(folder, partial, [], position.step)

    ranks.agreed("a commit", published)
    return int(sum(one.numbers[0] for one in said))


def _save_again(ranks: Ranks, content: dict[str, Any], position: Position, place: pathlib.Path) -> int:
    """Saves a published step again, at another position: new files of ranks beside the old ones, then rank 0's over its old one."""
    name = f"parts-{position.loop}-{position.epoch}-{position.batch}.pt"
    own = _of_rank(place, ranks.rank)

    def written(path: pathlib.Path) -> int:
        return write({**_whole(content, position), "own_file": name}, path, position.step)

    def prepared() -> int:
        if ranks.first or not content["own"]:
            return 0
        with_room(own, lambda: own.mkdir(exist_ok=True))
        return written(own / name)

    def published() -> int:
        if not ranks.first:
            return 0
        sync_folder(place)  # The other ranks' folders are in it.
        return written(place / _FILE)

    return sum(int(one.numbers[0]) for work in (prepared, published)
               for one in ranks.agreed("a commit", work, lambda size: (size,))[1])


def _whole(content: dict[str, Any], position: Position) -> dict[str, Any]:
    check_plain(position.source, "the state of the data")
    return {"format": _FORMAT, "step": position.step, "position": dict(vars(position)), **content}


def _partial_of(place: pathlib.Path) -> pathlib.Path:
    """RunFolder removes folders of such a name, which a crash left."""
    return place.with_name(place.name + ".partial")


def _of_rank(place: pathlib.Path, rank: int) -> pathlib.Path:
    return place / f"rank-{rank}" if rank else place


def _begin(place: pathlib.Path) -> pathlib.Path:
    partial = _partial_of(place)
    for left in (partial, place):
        shutil.rmtree(left, ignore_errors=True)
    with_room(partial, partial.mkdir)
    return partial


def _finish(folder: _core.RunFolder, partial: pathlib.Path, tables: list[EmbeddingStore], step: int) -> None:
    place = pathlib.Path(folder.checkpoint_path(step))
    with_room(place, lambda: os.rename(partial, place))
    sync_folder(place.parent)
    for table in tables:
        table.commit(step)
    folder.publish(step, _KEEP)
