# SPDX-License-Identifier: Apache-2.0
"""A run's commits: their content, and the order in which it is made durable.

    checkpoints/step-000000100/parts.pt    written and synced: parts, random states, the position
    embeddings/NAME/                       each table commits step 100, and keeps the commit before it;
                                           before the file, if a thread writes that (_run_writer.py)
    checkpoints/manifest.json              published: from here on a crash comes back to step 100
    checkpoints/step-000000098/            deleted: two commits are kept

With several ranks, rank-1/parts.pt is written too, beside rank 0's and before the manifest. It has the parts, random states
and gradients of `accumulate` that differ between ranks. If none differ, another number of ranks may resume.
If a step is committed again at another position, the file is rank-1/parts-LOOP-EPOCH-BATCH.pt. Rank 0's parts.pt, which names it,
is replaced last.

If the disk is full, each of these waits for room and is then made again (_room.py, os/room.h).

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
_FORMAT = 1


@dataclasses.dataclass
class Position:
    """The position of a run between two steps."""

    step: int = 0
    """The number of steps made."""
    loop: int = 0
    """The number of the call of steps(), from 0, that is running or has ended."""
    first: int = 0
    """The first epoch of this loop."""
    epoch: int = 0
    """The epoch of the run; the count continues from one loop to the next."""
    batch: int = 0
    """The number of batches done in the epoch."""
    source: Any = None
    """The state of the data source, if it has one."""
    ended: str = ""
    """How the loop ended: "whole", or "left" by `break`; "": it has not."""


def load(folder: _core.RunFolder, step: int, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Returns the content that save() or save_together() wrote, from which rank `rank` of `ranks` resumes.

    Errors: CorruptError; OSError; ValueError naming parts that differed between ranks, if the number of ranks has changed.
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
    # Parts stay pages of the mapped file. The rest is small, outlives the file, and is copied.
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
         tables: list[EmbeddingStore], again: bool, keep: int) -> int:
    """Commits everything under position.step. Returns the bytes of the checkpoint.

    keep:   number of checkpoints that are left, this one included.
    again:  the step is published already, and only the position has changed: its file is replaced.
    Errors: OSError; the commit before it stands.
    """
    whole, step = _whole(content, position), position.step
    if again:
        return write(whole, pathlib.Path(folder.checkpoint_path(step)) / _FILE, step)
    return _written(folder, whole, step, tables, keep)


def save_beside(folder: _core.RunFolder, content: dict[str, Any], position: Position,
                tables: list[EmbeddingStore], governor: Governor, keep: int) -> Writer | None:
    """Commits the tables, and returns a Writer whose thread then writes the file as save() does.

    None: there is no room for a copy of the content, and nothing was done. Errors: OSError.
    """
    began, step = time.monotonic(), position.step
    image = Image.of(_whole(content, position), governor)
    if image is None:
        return None
    try:
        for table in tables:
            table.commit(step)
        return Writer(image, step, began, lambda: _written(folder, image.content, step, [], keep))
    except BaseException:
        image.close()
        raise


def _written(folder: _core.RunFolder, content: dict[str, Any], step: int,
             tables: list[EmbeddingStore], keep: int) -> int:
    partial = _begin(pathlib.Path(folder.checkpoint_path(step)))
    size = write(content, partial / _FILE, step)
    _finish(folder, partial, tables, step, keep)
    return size


def save_together(ranks: Ranks, folder: _core.RunFolder, content: dict[str, Any], position: Position,
                  tables: list[EmbeddingStore], again: bool, keep: int) -> int:
    """Commits on all ranks: each writes its own content, then rank 0 publishes. Returns the bytes of all ranks' files.

    content: that of this rank; "own" names the entries that differ between ranks.
    again:   as for save(). The published files stay until rank 0's, which names the others, is replaced.
    Errors:  those of save(), on all ranks.
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
            if table.last_commit < position.step:  # Otherwise only the position has changed.
                table.commit(position.step)

    if tables:
        ranks.agreed("a commit", tables_committed)

    def published() -> None:
        if ranks.first:
            sync_folder(partial)  # The other ranks' folders are in it.
            _finish(folder, partial, [], position.step, keep)

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
    """Returns the temporary name of a checkpoint's folder. RunFolder removes such folders after a crash."""
    return place.with_name(place.name + ".partial")


def _of_rank(place: pathlib.Path, rank: int) -> pathlib.Path:
    return place / f"rank-{rank}" if rank else place


def _begin(place: pathlib.Path) -> pathlib.Path:
    partial = _partial_of(place)
    for left in (partial, place):
        shutil.rmtree(left, ignore_errors=True)
    with_room(partial, partial.mkdir)
    return partial


def _finish(folder: _core.RunFolder, partial: pathlib.Path, tables: list[EmbeddingStore], step: int, keep: int) -> None:
    place = pathlib.Path(folder.checkpoint_path(step))
    with_room(place, lambda: os.rename(partial, place))
    sync_folder(place.parent)
    for table in tables:
        table.commit(step)
    folder.publish(step, keep)
