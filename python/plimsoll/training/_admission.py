# SPDX-License-Identifier: Apache-2.0
"""Admission: makes a step or an evaluation, undoes it, and reserves the memory it leased for tensors.

Reading order: _accumulation.py, _retry.py, this file, _step.py.
Threads: the thread that trains.
Memory:  what a step takes; meanwhile the state before it is on a disk.
"""
from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator

from ..errors import BudgetExceeded
from ..memory._memory import Governor, format_bytes, make_room
from ..memory._refusal import Refusal
from ..memory._scratch import scratch_folder
from ._accumulation import Accumulation
from ._backward import Work
from ._need import Need
from ._plan_state import TrainingState
from ._reach import reached
from ._retry import Retry
from ._step_events import Events
from ._step_options import Options
from ._transaction import Before


class Admission:
    """Rehearses steps and evaluations, and reserves the memory they take for tensors."""

    def __init__(self, options: Options, accumulation: Accumulation, need: Need, retry: Retry, events: Events) -> None:
        self._options, self._accumulation, self._need, self._retry, self._events = options, accumulation, need, retry, events
        self.admitted_bytes = 0
        """The bytes reserved for tensors."""

    def of_step(self, work: Work) -> int:
        """Reserves the memory of a step on `work` for tensors. Returns the reserved bytes. Errors: as admit()."""
        def rehearsed() -> Refusal | None:
            options = self._options
            refusal: Refusal | None = None
            with self._put_back_after(work):
                # The last batch of a window, twice: the second one finds the optimizer's states and earlier gradients.
                # Waiting Rows are left out: their gradients are set aside.
                for _ in range(2 if options.accumulate > 1 or not all(one.state for one in options.optimizers) else 1):
                    if refusal is None:
                        _, refusal = self._accumulation.attempt(work, self._retry.parts, self._retry.recomputes, rehearsing=True)
            return refusal

        return self.admit(f"a step of {work.rows} rows", work.rows, rehearsed, lambda: self._need.of(work, self._retry.recomputes))

    def rehearse(self, work: Work) -> None:
        """Makes a step on `work`. Its effects are undone only where memory is refused. Errors: BudgetExceeded."""
        before = self._retry.remember(work.rows, *reached([*work.functions, *self._options.models]))
        _, refusal = self._accumulation.attempt(work, 1, False, rehearsing=True)
        if refusal is not None:
            before.put_back()
            raise BudgetExceeded(str(refusal), "tensors", 0, 0)

    def admit(self, what: str, rows: int, rehearsed: Callable[[], Refusal | None], need: Callable[[], int | None]) -> int:
        """Reserves the memory that rehearsed() leases for tensors. Returns the reserved bytes.

        need:   returns the bytes needed, where rehearsed() was refused memory.
        Errors: BudgetExceeded with a sufficient limit; ValueError without a governor that tensors are leased from.
        """
        extension, governor = self._options.extension, Governor.current()
        if governor is None or not governor.arena_attached:
            raise ValueError("admit: there is no Governor that tensors are leased from: make one "
                             "first, after importing torch: plimsoll.Governor(\"8GiB\")")
        make_room(extension)
        extension.reset_peak()
        for device in governor.devices.values():
            device.begin_peak()
        refusal = rehearsed()
        peak = extension.arena_stats()["leased_peak_bytes"]
        peaks = {name: device.peak_bytes() for name, device in governor.devices.items()}
        extension.purge()

        def needed_of() -> int:
            if refusal is not None and refusal.of_device:
                raise self._need.refused(f"{what} is not admitted: {refusal}", None, "", of_device=True)
            for name, device in governor.devices.items():
                if refusal is None and peaks[name] > device.room_bytes:
                    raise device.refusal(f"{what} is not admitted", peaks[name])
            needed, room = extension.with_margin(peak), governor.tensor_room()
            # What is promised already is not refused for its margin: memory without a lease varies from start to start, and grows a little.
            if (self._options.handed.goes_on or peak <= promised) and peak <= room:
                needed = min(needed, room)
            if refusal or needed > room:
                why = refusal or f"it needs {format_bytes(needed)}, and {format_bytes(room)} is left"
                whole = need() if refusal else extension.with_cache_and_margin(peak)
                raise self._need.refused(f"{what} is not admitted: {why}", whole, "")
            return int(needed)

        agreed, promised = self._options.agreed, governor.ledger().pools["tensors"].floor_bytes
        needed = agreed(needed_of)
        agreed(lambda: governor.promise(needed - promised, "tensors") if needed > promised else None)
        self.admitted_bytes = max(needed, promised)
        self._events.append({"event": "admitted", "rows": rows, "peak_bytes": peak,
                             "admitted_bytes": self.admitted_bytes, "limit_bytes": governor.limit_bytes,
                             **{f"{name}/peak_bytes": most for name, most in peaks.items()}})
        return self.admitted_bytes

    @contextlib.contextmanager
    def _put_back_after(self, work: Work) -> Iterator[None]:
        """Restores the training state at the end of the `with` block. Meanwhile the state is kept on disk."""
        options = self._options
        modules, generators = reached([*work.functions, *options.models])
        with contextlib.ExitStack() as held:
            def remembered() -> tuple[Before, TrainingState]:
                folder = held.enter_context(tempfile.TemporaryDirectory(
                    prefix="plimsoll-", dir=scratch_folder(options.directory, "directory")))
                state = TrainingState(modules, options.optimizers, options.schedulers, folder)
                held.callback(state.close)
                return self._retry.remember(work.rows, modules, generators, state.parameters), state

            before, state = options.agreed(remembered)
            state.leave_gradients()
            gradients = self._accumulation.set_aside(work)
            try:
                yield
            finally:
                gradients.put_back()
                state.put_back()
                before.put_back()
