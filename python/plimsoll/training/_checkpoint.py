# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training loop of your own: model, optimizer, random states, written whole or not at all.

    FOLDER/step-000000100.pt    a file of torch.save: {"step", "parts": {name: state}, "random"}

Threads: the thread that trains.
Memory:  saving streams tensors from where they are; loading holds the file's tensors once more.
"""
from __future__ import annotations

import collections
import io
import os
import pathlib
import re
import zipfile
from typing import TYPE_CHECKING, Any

from ..core._folders import make_folders, replaced
from ..core._random_states import RandomStates
from ..core._room import RoomFile
from ..errors import CorruptError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable


_PARTIAL = ".checkpoint.partial"  # One writer a folder: a file left by a kill is replaced by the next.


def save_checkpoint(folder: str | os.PathLike[str], step: int, /, *, keep: int = 2, **parts: Any) -> None:
    """Writes the state of `parts` and the random states of torch, NumPy and Python to `folder`, durably.

        plimsoll.save_checkpoint("run", step, model=model, optimizer=optimizer)
        vectors.commit(step)           # afterwards: a commit always has its checkpoint

    A power cut leaves either the whole file or none. A checkpoint of the same step is replaced. Checkpoints of
    later steps are deleted, and so are all but the `keep` newest. With the default of 2 the checkpoint of the
    last commit stays until the next commit.

    parts:  name=part. A part is a torch.Generator, or has state_dict() and load_state_dict(): a model,
            an optimizer, a scheduler, a Loader, a TrainingStep.
    Errors: ValueError (step, keep, a part without state, a value that cannot be read back safely);
            OSError where the file cannot be written. The older checkpoints are then unchanged.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"save_checkpoint: step {step} must be 0 or more, and keep {keep} 1 or more")
    states = {name: _state_of(name, part) for name, part in parts.items()}
    for name, state in states.items():
        check_plain(state, name)
    content = {"step": step, "parts": states, "random": RandomStates().to_plain()}
    place = pathlib.Path(folder)
    make_folders(place)
    write(content, _path(place, step), step)
    steps = _steps(place)
    for old in [one for one in steps if one > step] + [one for one in steps if one <= step][:-keep]:
        _path(place, old).unlink(missing_ok=True)


def load_checkpoint(folder: str | os.PathLike[str], step: int | None = None, /, **parts: Any) -> int:
    """Restores `parts` and the random states from a checkpoint. Returns its step.

        vectors = plimsoll.EmbeddingStore.open(governor, "run/items", …)
        begin = plimsoll.load_checkpoint("run", vectors.last_commit, model=model, optimizer=optimizer)
        for step in range(begin + 1, steps + 1): …

    step:   the checkpoint to load; None: the newest. With a table, pass its `last_commit`: a newer checkpoint
            belongs to a step that is made again. For None in an empty folder, and for a negative step,
            nothing is loaded and 0 is returned.
    parts:  the same names as in save_checkpoint().
    Errors: NotFoundError, which lists the steps that exist; CorruptError (a checksum does not match);
            ValueError where the names differ from the saved ones; errors of a part's load_state_dict(),
            after the parts before it were loaded.
    """
    place = pathlib.Path(folder)
    steps = _steps(place)
    if step is None:
        step = steps[-1] if steps else -1
    if step < 0:
        return 0
    if step not in steps:
        there = ", ".join(map(str, steps)) if steps else "none"
        raise NotFoundError(f"{place}: no checkpoint of step {step}; there: {there}. Save before you "
                            "commit, and commit after each save")
    content = read(_path(place, step), step)
    for name, part in parts.items():
        _state_of(name, part, asked=False)
    if set(content["parts"]) != set(parts):
        raise ValueError(f"{_path(place, step)}: holds {_names(content['parts'])}, and load_checkpoint was "
                         f"given {_names(parts)}")
    for name, part in parts.items():
        state = content["parts"].pop(name)  # So only one part at a time is in memory twice.
        part.load_state_dict(state) if hasattr(part, "load_state_dict") else part.set_state(state)
    RandomStates.from_plain(content["random"]).put_back()
    return step


def _state_of(name: str, part: Any, asked: bool = True) -> Any:
    """Returns the state of a part. Errors: ValueError where it has none."""
    import torch

    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return part.state_dict() if asked else None
    if isinstance(part, torch.Generator):
        return part.get_state()
    raise ValueError(f"{name}: {type(part).__name__} has no state_dict() and load_state_dict()")


def check_plain(value: Any, where: str) -> None:
    """Checks that a value can be read back without running code from the file. Errors: ValueError."""
    import torch

    if isinstance(value, torch.Tensor) or type(value) in (
            type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device):
        return
    if type(value) in (dict, collections.OrderedDict, collections.Counter):
        for key, inner in value.items():
            check_plain(key, f"{where}: a key")
            check_plain(inner, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, inner in enumerate(value):
            check_plain(inner, f"{where}[{index}]")
    else:
        raise ValueError(f"{where} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint "
                         "holds tensors, numbers, texts, lists and dictionaries of them")


def write(content: dict[str, Any], path: pathlib.Path, step: int) -> int:
    """Replaces the file `path` durably by `content`. Returns its bytes. Errors: OSError."""
    import torch

    try:
        with replaced(path, _PARTIAL) as partial, io.BufferedWriter(RoomFile(partial)) as file:
            torch.save(content, file)
            return file.tell()
    except RuntimeError as error:
        cause = error.__context__  # torch's writer wraps the file's error.
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"the checkpoint of step {step} was not saved: "
                          f"{cause.strerror}", str(path.parent)) from None
        raise


def read(path: pathlib.Path, step: int, mapped: bool = False) -> dict[str, Any]:
    """Returns the content that write() wrote. mapped: its tensors are pages of the file. Errors: CorruptError; OSError."""
    import torch

    try:
        # torch.load does not compare the CRC-32 that torch.save writes beside every record.
        with zipfile.ZipFile(path) as records:
            damaged = records.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} does not match")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        good = content["step"] == step and isinstance(content["parts"], dict) and content["random"]
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise CorruptError(f"{path}: is damaged, or no checkpoint: {error}") from error
    if not good:
        raise CorruptError(f"{path}: is not the checkpoint of step {step}")
    return content


def copied(value: Any, copy_of: Callable[[Any], Any] | None = None, kind: type | None = None) -> Any:
    """Copies a value that passes check_plain(), tensors included. A model's state keeps its attributes.

    copy_of: makes a tensor's copy. kind: the type that is copied instead of tensors; it needs a copy_of.
    """
    if kind is None:
        import torch

        kind, copy_of = torch.Tensor, copy_of or torch.Tensor.clone
    if isinstance(value, kind):
        assert copy_of is not None
        return copy_of(value)
    if isinstance(value, dict):
        kept = type(value)()
        kept.update({key: copied(inner, copy_of, kind) for key, inner in value.items()})
        if hasattr(value, "__dict__"):
            vars(kept).update(vars(value))
        return kept
    if type(value) in (list, tuple):
        return type(value)(copied(inner, copy_of, kind) for inner in value)
    return value


def _path(place: pathlib.Path, step: int) -> pathlib.Path:
    return place / f"step-{step:09}.pt"


def _steps(place: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in `place`, ascending."""
    if not place.is_dir():
        return []
    found = (re.fullmatch(r"step-(\d{9,18})\.pt", name) for name in os.listdir(place))
    return sorted(int(match.group(1)) for match in found if match)


def _names(parts: dict[str, Any]) -> str:
    return ", ".join(sorted(parts)) or "no parts"
