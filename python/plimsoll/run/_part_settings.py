# SPDX-License-Identifier: Apache-2.0
"""Settings of tracked parts, as the program sets them before a part is restored. If a resumed program has other settings, the run
warns and keeps the old ones, or takes the new ones that `accept` names.

    optimizers             the entries of its groups: lr, betas, weight_decay, …
    modules                the kinds of devices they are on; a difference is a ValueError, as a warning is not enough
    schedulers, scalers    the entries of state_dict(): T_max, gamma, growth_interval, …

A commit stores the program's settings, not the values that a scheduler has computed from them.

Threads: the thread that trains.   Memory: some numbers per part.
"""
from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..core._devices import kind_of

_FOLLOW = ("base_lrs", "_last_lr", "initial_lr")  # Copies of the learning rate.
_DEVICE = "device"
_PLAIN = (bool, int, float, str, type(None))


def settings_of(part: Any) -> dict[str, Any]:
    """Returns the settings by name: "lr", "1.lr" for the second of several groups, "_schedulers.0.T_max" for a nested scheduler."""
    if isinstance(part, torch.optim.Optimizer):
        groups = [{name: value for name, value in group.items() if name not in ("params", "param_names")} for group in part.param_groups]
        return dict(_flat(groups[0] if len(groups) == 1 else groups))
    if isinstance(part, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)):
        return dict(_flat(part.state_dict()))
    if isinstance(part, torch.nn.Module):
        kinds = {one.device for one in part.parameters() if one.device.type != "meta"}
        return {_DEVICE: ", ".join(sorted(map(kind_of, kinds)))} if kinds else {}
    return {}


def _flat(value: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, _PLAIN) or isinstance(value, (tuple, list)) and all(isinstance(one, _PLAIN) for one in value):
        yield ".".join(before), list(value) if isinstance(value, tuple) else value
    elif isinstance(value, dict):
        for name, one in value.items():
            if name not in _FOLLOW:
                yield from _flat(one, (*before, str(name)))
    elif isinstance(value, (tuple, list)):
        for k, one in enumerate(value):
            yield from _flat(one, (*before, str(k)))


class PartSettings:
    """The settings of one run's parts. saved: to_plain() of the commit to resume from. accept: names whose new values are taken."""

    def __init__(self, saved: dict[str, dict[str, Any]], accept: Iterable[str]) -> None:
        self._saved, self._accept = saved, set(accept)
        self._said: dict[str, dict[str, Any]] = {}
        self._taken: dict[int, dict[str, tuple[Any, Any]]] = {}  # By id(part): name → (old value, new value).

    def to_plain(self) -> dict[str, dict[str, Any]]:
        """Returns the settings for a commit."""
        return self._said

    def compare(self, name: str, part: Any) -> list[dict[str, Any]]:
        """Compares the part's settings with the commit's, before it is restored. Returns the differences, for events. Warns (RuntimeWarning)
        of new settings that are not accepted. Errors: ValueError for another kind of device.
        """
        now, before = settings_of(part), self._saved.get(name, {})
        differs = {key: (before[key], value) for key, value in now.items() if key in before and before[key] != value}
        taken = {key: both for key, both in differs.items() if self._accepts(name, key)}
        stay = {key: was for key, (was, _) in differs.items() if key not in taken}
        if _DEVICE in stay and isinstance(part, torch.nn.Module):
            raise ValueError(f"track: {name} is on {now[_DEVICE]} and was on {stay[_DEVICE]}, whose bits are others: move it there "
                             "before it is tracked, or take what is, and other bits, by accept=(\"device\",) of Run(…)")
        self._said[name], self._taken[id(part)] = {**now, **stay}, taken
        if stay:
            said = "; ".join(f"{name}.{key} was {was!r} and is {now[key]!r}" for key, was in stay.items())
            last = dict.fromkeys(key.rpartition(".")[2] for key in stay)
            warnings.warn(f"track: {said}: the run goes on with what it had. accept=({', '.join(map(repr, last))},) of Run(…) takes "
                          "the new, and other bits", RuntimeWarning, stacklevel=4)
        return [{"part": name, "name": key, "was": str(was), "is": str(value), "taken": key in taken}
                for key, (was, value) in differs.items()]

    def _accepts(self, name: str, key: str) -> bool:
        return bool(self._accept & {key, key.rpartition(".")[2], f"{name}.{key}"})

    def take(self, part: Any) -> None:
        """Sets the accepted new settings again; called each time after the part was restored."""
        if isinstance(part, torch.optim.Optimizer):
            for key, both in self._taken.get(id(part), {}).items():
                _take_of_group(part, key, *both)
            return
        if isinstance(part, torch.optim.lr_scheduler.LRScheduler):
            rates = self._taken.get(id(getattr(part, "optimizer", None)), {})
            for one in _with_those_within(part):
                for key, (_, value) in rates.items():
                    if key.rpartition(".")[2] == "lr" and hasattr(one, "base_lrs"):
                        one.base_lrs[_group_of(key)] = value
        if taken := self._taken.get(id(part)):
            state = copy.deepcopy(part.state_dict())
            for key, (_, value) in taken.items():
                _set(state, key.split("."), value)
            part.load_state_dict(state)


def _group_of(key: str) -> int:
    return int(key.partition(".")[0]) if "." in key else 0


def _take_of_group(optimizer: torch.optim.Optimizer, key: str, was: Any, value: Any) -> None:
    """Sets an entry of a group. A learning rate under a scheduler is scaled, so that it keeps its progress on the schedule."""
    group, name = optimizer.param_groups[_group_of(key)], key.rpartition(".")[2]
    if name == "lr" and "initial_lr" in group:
        group["initial_lr"] = value
        value = float(group["lr"]) * (value / was) if was else value
    elif isinstance(value, list):
        value = tuple(value)
    if isinstance(group.get(name), torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def _with_those_within(schedule: Any) -> Iterator[Any]:
    yield schedule
    for one in getattr(schedule, "_schedulers", ()):
        yield from _with_those_within(one)


def _set(state: Any, path: list[str], value: Any) -> None:
    for step in path[:-1]:
        state = state[int(step)] if isinstance(state, (list, tuple)) else state[step]
    state[path[-1]] = value
