# SPDX-License-Identifier: Apache-2.0
"""LoopWatch: a Watch in the loop of another library. It logs, warns once of a leak, and ends with a summary.

Threads: the thread that trains.   Memory: its Watch's.
"""
from __future__ import annotations

import gc
import logging
import warnings
from contextlib import ExitStack
from typing import Any

from .. import _core
from ..core import _torch_gate
from ._watch import Watch

_ASKED_EVERY = 50  # Steps between two questions for the verdict.
_TENSORS_MOST = 10
_LARGE_BYTES = 1 << 20
_log = logging.getLogger("plimsoll.watch")


class LoopWatch:
    """A Watch for the callbacks of plimsoll.integrations: steps, one phase at a time, log lines, a warning, a summary."""

    def __init__(self, watch: Watch | None, log_every_n_steps: int = 0) -> None:
        if log_every_n_steps < 0:
            raise ValueError(f"WatchCallback: log_every_n_steps {log_every_n_steps} must be 0 or more")
        self.watch = Watch() if watch is None else watch
        """The Watch, whose verdict() may be asked for at any time."""
        self._phase = ExitStack()
        self._inside = ""
        self._warned: set[tuple[str, str]] = set()
        self._log_every = log_every_n_steps
        self._first_bytes = self._most_bytes = self.watch.held_bytes

    def step(self) -> None:
        """Counts a step of the optimizer, and logs or warns when that is due."""
        self.leave()
        self.watch.step()
        self._most_bytes = max(self._most_bytes, self.watch.held_bytes)
        if self._log_every > 0 and self.watch.steps % self._log_every == 0:
            _say(self.line())
        if self.watch.steps % _ASKED_EVERY == 0:
            self.ask()

    def enter(self, phase: str) -> None:
        """Enters a phase, which lasts until leave(). Does nothing if the phase is the current one."""
        if self._inside != phase:
            self.leave()
            self._phase.enter_context(self.watch.phase(phase))
            self._inside = phase

    def leave(self) -> None:
        self._phase.close()
        self._inside = ""

    def ask(self, *, wait: bool = False) -> None:
        """Warns of a leak, once per owner and kind. wait: finishes a running search first."""
        found = self.watch.verdict(wait=wait)
        if self.watch.searching and not wait:
            return
        if found.kind in ("leak", "uncollected garbage") and (found.kind, found.owner) not in self._warned:
            self._warned.add((found.kind, found.owner))
            warnings.warn("; ".join([f"plimsoll: {found}", *found.advice]), RuntimeWarning, stacklevel=2)

    def end(self) -> None:
        """Warns of a leak at the end, and logs the summary if lines are logged."""
        self.ask(wait=True)
        if self._log_every > 0:
            for line in self.summary():
                _say(line)

    def line(self) -> str:
        """Returns a log line such as "step 120: 1.4 GiB held (tensors 1.1 GiB, native 212.0 MiB), 24.0 MiB more than at the start"."""
        held = self.watch.held_bytes
        owners = sorted(((size, name) for name, size in self.watch.owners.items() if size > 0), reverse=True)
        swapped = _core.resident().swapped
        parts = [f"{name} {_core.format_bytes(size)}" for size, name in owners[:4]]
        parts += [f"{_core.format_bytes(swapped)} of this process in swap"] if swapped > 0 else []
        return (f"step {self.watch.steps}: {_core.format_bytes(held)} held ({', '.join(parts)}), "
                f"{_difference(held - self._first_bytes)} than at the start")

    def summary(self) -> list[str]:
        """Returns lines on the course of memory and the largest tensors, with or without a leak."""
        held = self.watch.held_bytes
        lines = [f"memory after {self.watch.steps} steps: {_core.format_bytes(held)} held, "
                 f"{_difference(held - self._first_bytes)} than at the start; most {_core.format_bytes(self._most_bytes)}",
                 f"verdict: {self.watch.verdict()}"]
        tensors = large_tensors()
        lines += [f"the {len(tensors)} largest tensors:"] if tensors else []
        return lines + [f"  {_core.format_bytes(size)}  {what}" for size, what in tensors]


def _difference(size: int) -> str:
    return f"{_core.format_bytes(abs(size))} {'more' if size >= 0 else 'less'}"


def _say(line: str) -> None:
    """Logs a line, or prints it where the log has no handler for it, as Trainers do."""
    if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
        _log.info(line)
    else:
        print(f"plimsoll: {line}", flush=True)


def large_tensors(most: int = _TENSORS_MOST) -> list[tuple[int, str]]:
    """Returns (bytes, description) of the largest tensors that Python can reach, from 1 MiB on. A storage counts once."""
    torch = _torch_gate.torch_if_imported()
    if torch is None:
        return []
    found: dict[int, tuple[int, str]] = {}
    for one in gc.get_objects():
        for tensor in (one, one.grad if one.is_leaf else None) if _is_tensor(torch, one) else ():
            if tensor is None:
                continue
            try:
                storage = tensor.untyped_storage()
                key, size = storage.data_ptr(), storage.nbytes()
            except (RuntimeError, NotImplementedError):  # Sparse, or without a storage.
                continue
            if size >= _LARGE_BYTES and key not in found:
                shape = "x".join(map(str, tensor.shape)) or "a number"
                found[key] = size, f"{str(tensor.dtype).removeprefix('torch.')} {shape} on {tensor.device}"
    return sorted(found.values(), reverse=True)[:most]


def _is_tensor(torch: Any, one: Any) -> bool:
    try:
        return issubclass(type(one), torch.Tensor)
    except TypeError:
        return False
