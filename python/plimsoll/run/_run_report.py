# SPDX-License-Identifier: Apache-2.0
"""Reports of a run: status.json, events.jsonl, metrics for TensorBoard, the bar.

Threads: the thread that trains.   Memory: fixed.
"""
from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

from .. import _core
from .._core import PressureReport
from ..memory._memory import Governor, format_bytes

_STATUS_EVERY = 0.5  # Seconds.
_BAR_EVERY = 0.1
_UNKNOWN_STEPS = -1


class Report:
    """Writes the reports of one run. Its files are in docs/formats/run.md."""

    def __init__(self, folder: _core.RunFolder, governor: Governor, metrics: str | None, step: int) -> None:
        """Opens the metrics, and writes the first status. metrics: their folder; "": no files; None: this rank shows nothing. step: that of the commit to resume
        from; −1: a new run.
        """
        self._folder, self._governor = folder, governor
        self._metrics = _core.Metrics.open(metrics, step) if metrics is not None else None
        self._progress: _core.Progress | None = None
        self._began = self._training = time.monotonic()
        self._rows = 0
        self._next_status = self._next_bar = 0.0
        self._fraction = self._started = 0.0  # Share of the epoch done; epochs done when this loop began.
        self._epoch = 0  # The epoch of the last step.
        self._status = _core.RunStatus()
        self._status.step = max(step, 0)
        self._status.checkpoint_step = step
        self._write()

    def begin(self, *, quiet: bool, step: int, steps_total: int | None, epoch: int, fraction: float,
              epochs: int) -> None:
        """Reports that a loop begins, with `fraction` of its epoch done. steps_total: None where the data has no length."""
        status = self._status
        status.status, status.step = "running", step
        status.steps_total = _UNKNOWN_STEPS if steps_total is None else steps_total
        status.epoch, status.epochs, status.seconds_left = epoch, epochs, math.nan
        self._epoch = epoch
        self._progress = _core.Progress(quiet) if self._metrics is not None else None
        self._training, self._rows = time.monotonic(), 0
        self._started = epoch + fraction
        self._write()

    def step(self, *, step: int, epoch: int, fraction: float, rows: int, loss: float | None) -> None:
        """Reports a step, after which `fraction` of its epoch is done."""
        self._rows += rows
        self._epoch = epoch
        now = time.monotonic()
        if now < min(self._next_status, self._next_bar):
            return
        status = self._status
        status.step, status.epoch, self._fraction = step, epoch, fraction
        if loss is not None:
            status.loss = loss
        spent = max(now - self._training, 1e-9)
        status.rows_per_second, status.seconds = self._rows / spent, now - self._began
        done = epoch + fraction - self._started
        known = status.steps_total != _UNKNOWN_STEPS and done > 0
        status.seconds_left = spent * (status.epochs - epoch - fraction) / done if known else math.nan
        if now >= self._next_status:
            self._write()
        if self._progress is not None and now >= self._next_bar:
            self._next_bar = now + _BAR_EVERY
            self._progress.update(status, fraction)

    def log(self, step: int, epoch: int, values: dict[str, float]) -> None:
        """Writes metrics of the current step: an event, and scalars for TensorBoard."""
        self.event("step", {"step": step, "epoch": epoch, **values})
        self.scalars(step, {f"train/{name}": value for name, value in values.items()})

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Writes scalars for TensorBoard by their tags."""
        if self._metrics is not None:
            for name, value in values.items():
                self._metrics.scalar(name, value, step)

    def event(self, name: str, values: dict[str, Any]) -> None:
        self._folder.event(name, values)

    def event_of_step(self, event: dict[str, Any]) -> None:
        """Records an event of a TrainingStep."""
        plain = {key: value for key, value in event.items() if key != "event"}
        if event["event"] == "admitted":
            plain["table"] = str(self._governor.ledger())
        self.event(event["event"], plain)
        if event["event"] == "refusal":
            self.text(f"step {event['step']}: refused memory: {event['refusal']}; next: {event['next']}")
        elif event["event"] == "optimizer":
            self.text(event["message"])

    def flush(self) -> None:
        """Flushes the metrics to their file. Errors: OSError, the first since the last call."""
        if self._metrics is not None:
            self._metrics.flush()

    def commit(self, step: int, seconds: float, stall_seconds: float, size: int) -> None:
        """Records a commit, and the memory held. stall_seconds: the part of `seconds` that the loop waited."""
        self._held(step)
        self._status.step, self._status.checkpoint_step = max(self._status.step, step), step
        self.event("commit", {"step": step, "seconds": seconds, "stall_seconds": stall_seconds, "bytes": size})

    def _held(self, step: int) -> None:
        held = {f"{device.name}/{name}": value for device in self._governor.devices.values() for name, value in device.held().items()}
        if held:
            self.event("device", {"step": step, **held})
        ledger, resident = self._governor.ledger(), _core.resident()
        self.scalars(step, {"memory/limit_bytes": ledger.limit_bytes, "memory/leased_bytes": ledger.leased_bytes,
                             "memory/resident_bytes": resident.total,
                             **{f"memory/leased/{name}": pool.leased_bytes for name, pool in ledger.pools.items()},
                             **{f"device/{name}": value for name, value in held.items()}})

    def cleanup(self, step: int, done: dict[str, Any], when: str = "step") -> None:
        """Records the result of Governor.clean_up(). when: after a "step" or an "evaluation"."""
        self.event("cleanup", {"step": step, "when": when, **done})

    def _evictions(self, step: int, seen: PressureReport | _core.LimitChange) -> None:
        for one in seen.evictions:
            self.event("evict", {"step": step, "owner": one.owner, "move": one.move,
                                 "wanted_bytes": one.wanted_bytes, "given_bytes": one.given_bytes,
                                 "before_bytes": one.before_bytes, "after_bytes": one.after_bytes,
                                 "freed_bytes": one.freed_bytes})

    def pressure(self, step: int, seen: PressureReport) -> None:
        self._evictions(step, seen)
        if seen.pressure or seen.stop or seen.evictions:
            self.event("reclaim", {"step": step, "resident_bytes": seen.resident.total,
                                   "unexplained_bytes": seen.unexplained_bytes,
                                   "kernel": seen.kernel != "", "purged_bytes": seen.purged_bytes,
                                   "shrunk_bytes": seen.shrunk_bytes, "stop": seen.stop,
                                   "needed_bytes": seen.needed_bytes})

    def limit(self, step: int, asked: str, change: _core.LimitChange | None, why: str) -> None:
        """Reports the outcome of `plimsoll limit`. change: None if the limit stays, with the reason in `why`."""
        if change is None:
            self.text(f"step {step}: the limit stays: {why}")
            self.event("limit", {"step": step, "asked": asked, "message": why})
            return
        self.text(f"step {step}: memory limit {format_bytes(change.limit_bytes)}, was "
                  f"{format_bytes(change.before_bytes)}; resident {format_bytes(change.resident.total)}")
        self._evictions(step, change)
        self.event("limit", {"step": step, "asked": asked, "before_bytes": change.before_bytes,
                             "asked_bytes": change.asked_bytes, "limit_bytes": change.limit_bytes,
                             "settled": change.settled, "purged_bytes": change.purged_bytes,
                             "shrunk_bytes": change.shrunk_bytes, "grown_bytes": change.grown_bytes,
                             "resident_bytes": change.resident.total})
        self._write()

    def device_limit(self, step: int, asked: str, device: str, before_bytes: int, limit_bytes: int) -> None:
        """Reports that `plimsoll limit` changed the limit of a device."""
        self.text(f"step {step}: memory limit of {device} {format_bytes(limit_bytes)}, was {format_bytes(before_bytes)}")
        self.event("limit", {"step": step, "asked": asked, "device": device, "before_bytes": before_bytes, "limit_bytes": limit_bytes})
        self._write()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Excludes the time of the block from rows per second."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._training += time.monotonic() - began

    def phase(self, name: str) -> None:
        """Shows another phase than training, such as "paused", in status.json and on the bar; "": none."""
        before, self._status.status = self._status.status, name or self._status.status
        self._write()
        if self._progress is not None:
            self._progress.update(self._status, self._fraction)
        self._status.status = before

    def text(self, message: str) -> None:
        if self._progress is not None:
            self._progress.text(message)

    def clear(self) -> None:
        """Removes the bar."""
        if self._progress is not None:
            self._progress.clear()

    def end(self, status: str, step: int, epoch: int | None, message: str, cause: str) -> None:
        """Writes the last status and event: "finished", "stopped" or "failed". cause: from _cause_of().

        epoch: None: that of the last step.
        """
        self.clear()
        self._status.cause = cause
        self._status.status, self._status.message, self._status.step = status, message, step
        self._status.epoch = self._epoch if epoch is None else epoch
        self._status.seconds, self._status.seconds_left = time.monotonic() - self._began, 0.0
        self.event("end", {"status": status, "step": step, "checkpoint_step": self._status.checkpoint_step, "cause": cause,
                           "message": message})
        self._write()
        self.flush()

    def _write(self) -> None:
        self._next_status = time.monotonic() + _STATUS_EVERY
        if self._governor._core.valid:
            self._status.read_memory(self._governor._core)
            self._status.devices = [one.status() for one in self._governor.devices.values()]
        self._folder.write_status(self._status, True)
