# SPDX-License-Identifier: Apache-2.0
"""Parts of a run: state that a resumption restores, each under a name.

    model, optimizer, schedule, scaler, …   state_dict() and load_state_dict()
    a tensor, a dict of plain values        their values
    a generator of torch, NumPy or Python   its state

Threads: the thread that trains.
Memory:  a commit streams tensors in place. Restoring maps the checkpoint file until the interrupted loop continues:
         pages of a file, which the kernel may take back. A part that is no module is copied
         from it, one part at a time. A part that is neither module nor optimizer is in memory twice while it is restored.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core._random_states import generator_state, set_generator_state
from ..training._checkpoint import check_plain, copied
from ..training._reach import is_generator
from ._part_settings import PartSettings


class Parts:
    """The parts of one run."""

    def __init__(self, saved: dict[str, Any] | None, where: str, settings: PartSettings) -> None:
        """Takes the states to restore. saved: states by name, from the commit `where`; None: a new run."""
        self._saved, self._where = saved, where
        self.settings = settings
        self._parts: dict[str, Any] = {}
        self._others: dict[str, Any] = {}  # States for put_back().
        self.closed = False
        """Whether the first loop has begun; a part tracked later would not have been restored."""

    def track(self, name: str, part: Any) -> list[dict[str, Any]]:
        """Tracks a part and restores it. Returns its settings that differ from the commit's. Errors: ValueError; the part is then unchanged."""
        part = getattr(part, "_orig_mod", part)  # torch.compile() wraps a module, and renames its tensors.
        if name in self._parts:
            raise ValueError(f"track: there is a part {name!r} already; names are unique")
        if self.closed:
            raise ValueError(f"track: {name!r} comes after the first batch: track everything before "
                             "run.steps(), where it is restored")
        check_plain(_state_of(name, part), name)
        if self._saved is not None:
            if name not in self._saved:
                raise ValueError(f"track: {self._where} has no part {name!r}; it has "
                                 f"{_names(self._saved)}. Train anew in another folder, or leave it out")
        differs = self.settings.compare(name, part)
        if self._saved is not None:
            self._restore(name, part, self._saved[name])
        self._parts[name] = part
        return differs

    def check_complete(self) -> None:
        """Raises ValueError naming saved parts that are not tracked, or parameters of an optimizer that are in no tracked part."""
        missing = sorted((self._saved or {}).keys() - self._parts.keys())
        if missing:
            raise ValueError(f"steps: {self._where} holds {', '.join(missing)}, which this program does not "
                             f"track: run.track({', '.join(f'{one}=…' for one in missing)})")
        held = {id(tensor) for part in self._parts.values() for tensor in _tensors_of(part)}
        for name, part in self._parts.items():
            if isinstance(part, torch.optim.Optimizer):
                loose = [p for group in part.param_groups for p in group["params"] if id(p) not in held]
                if loose:
                    raise ValueError(f"steps: {len(loose)} parameters of {name} are in no tracked part (the "
                                     f"first is {list(loose[0].shape)}): track their module as well")
        self.closed = True

    def forget(self) -> None:
        """Drops the saved states, and with them the mapping of the file."""
        self._saved = None

    def load_again(self) -> None:
        """Restores modules and optimizers again when the interrupted loop continues, as the program has changed its parts since track().
        Then calls forget(), before workers are forked. Other parts are copied for put_back().
        """
        for name, state in (self._saved or {}).items():
            part = self._parts[name]
            if isinstance(part, torch.optim.Optimizer):
                part.state.clear()  # Otherwise old and new state would be in memory together.
            if isinstance(part, (torch.nn.Module, torch.optim.Optimizer)):
                self._restore(name, part, state)
            else:
                self._others[name] = copied(state)
        self.forget()

    def put_back(self) -> None:
        """Restores the parts other than modules and optimizers, after the data source has drawn random numbers."""
        others, self._others = self._others, {}
        for name, state in others.items():
            self._load(name, self._parts[name], state)

    def states(self, wanted: Callable[[Any], bool] = lambda _: True) -> dict[str, Any]:
        """Returns the states of the parts that `wanted` accepts, for a commit. Errors: ValueError for a state that could not be loaded safely."""
        states = self.live(wanted)
        self.check(states)
        return states

    @staticmethod
    def check(states: dict[str, Any]) -> None:
        """Raises ValueError for a state that could not be loaded safely."""
        for name, state in states.items():
            check_plain(state, name)

    def live(self, wanted: Callable[[Any], bool] = lambda _: True) -> dict[str, Any]:
        """Returns the states of the parts that `wanted` accepts, unchecked."""
        return {name: _state_of(name, part) for name, part in self._parts.items() if wanted(part)}

    def named(self, kind: type) -> list[tuple[str, Any]]:
        """Returns (name, part) for each part of a kind, in the order of tracking."""
        return [(name, part) for name, part in self._parts.items() if isinstance(part, kind)]

    def those(self, kind: type) -> list[Any]:
        """Returns the parts of a kind, in the order of tracking."""
        return [part for part in self._parts.values() if isinstance(part, kind)]

    def generators(self) -> list[Any]:
        """Returns the parts that are random generators."""
        return [part for part in self._parts.values() if is_generator(part)]

    def has(self, part: Any) -> bool:
        """Whether the part is tracked."""
        return any(one is part for one in self._parts.values())

    def _restore(self, name: str, part: Any, state: Any) -> None:
        if isinstance(part, torch.nn.Module):
            differs = _differences(part.state_dict(), state)
            if differs:
                raise ValueError(f"{name} is not what {self._where} holds: {'; '.join(differs)}")
            part.load_state_dict(state)
        else:
            self._load(name, part, copied(state))

    def _load(self, name: str, part: Any, state: Any) -> None:
        """Loads a state into the part. state: belongs to the part afterwards."""
        if isinstance(part, torch.Tensor):
            differs = _differences({"it": part}, {"it": state})
            if differs:
                raise ValueError(f"{name} is not what {self._where} holds: {'; '.join(differs)}")
            with torch.no_grad():
                part.copy_(state)
        elif is_generator(part):
            set_generator_state(part, state)
        elif type(part) is dict:
            part.clear()
            part.update(state)
        else:
            groups = part.param_groups if isinstance(part, torch.optim.Optimizer) else []
            try:
                part.load_state_dict(state)
            except (ValueError, KeyError, RuntimeError, TypeError) as error:
                raise ValueError(f"{name} is not what {self._where} holds: {error}") from error
            self.settings.take(part)
            for k, group in enumerate(groups):  # The program may hold references to these dicts: they stay the same objects.
                if group is not part.param_groups[k]:
                    loaded, part.param_groups[k] = part.param_groups[k], group
                    group.clear()
                    group.update(loaded)


def _state_of(name: str, part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.detach()
    if is_generator(part):
        return generator_state(part)
    if type(part) is dict:
        return dict(part)
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return part.state_dict()
    raise ValueError(f"track: {name} is a {type(part).__name__}, which has no state_dict() and "
                     "load_state_dict(), and is no tensor, dict or random generator")


def _differences(now: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Returns at most eight differences, as texts."""
    found = []
    for key in [*now, *(key for key in saved if key not in now)]:
        if key not in saved:
            found.append(f"{key} is not there")
        elif key not in now:
            found.append(f"{key} is there and not here")
        elif isinstance(now[key], torch.Tensor) and isinstance(saved[key], torch.Tensor):
            here, there = _kind(now[key]), _kind(saved[key])
            if here != there:
                found.append(f"{key} is {here} and was {there}")
    return found[:8]


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _tensors_of(part: Any) -> list[torch.Tensor]:
    if isinstance(part, torch.nn.Module):
        return list(part.parameters())
    return [part] if isinstance(part, torch.Tensor) else []


def _names(parts: dict[str, Any]) -> str:
    return ", ".join(sorted(parts)) or "no parts"
