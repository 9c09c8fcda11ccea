# SPDX-License-Identifier: Apache-2.0
"""The memory that a step needs, and the limit that a refusal names (decision 0015).

Reading order: _accumulation.py, this file, _retry.py.
Threads: the thread that trains.
Memory:  steps on small parts of a batch are traced, and put back.
"""
from __future__ import annotations

from typing import Any

from ..errors import BudgetExceeded, MemoryPressure, NotFoundError
from ..memory._memory import Governor
from ..memory._refusal import unless_refused
from . import _plan_static
from ._accumulation import Accumulation
from ._backward import Tally, Work, recomputed
from ._lookups import collected
from ._reach import reached
from ._step_options import Options
from ._transaction import Before, writes_at_the_end

_MIB = 1 << 20
_SPARE = 4 << 20  # Bytes of a named limit for what the next start may hold more: code, and pages of the arena.
_PARTS = (16, 12, 8, 6, 4, 3, 2)  # Shares of the batch to trace: a sixteenth, a twelfth, ….


def _predicted(traces: Any, traced: list[int], rows: int) -> int | None:
    """Returns the bytes that a step of `rows` rows leases, from traces of steps of `traced` rows; None: unknown.

    Where the largest parts did something else than the smaller ones, no formula holds for all: the two largest then say whether what moves grows
    as the rows do, or as their square.
    """
    try:
        said = traces.predict((rows, 0, 0))
        if said["rows_most"] == max(traced, default=0):
            return int(said["admit_bytes"])
    except NotFoundError:
        pass
    if len(traced) < 2:
        return None
    (small, _), (large, static) = ((one["admit_bytes"] - one["parts"]["static"], one["parts"]["static"])
                                   for one in (traces.predict((part, 0, 0)) for part in traced[-2:]))
    power = 2 if large / small > (traced[-1] / traced[-2]) ** 1.1 else 1
    return int(static + large * (rows / traced[-1]) ** power)


class Need:
    """An estimate of the memory that a step needs."""

    def __init__(self, options: Options, accumulation: Accumulation) -> None:
        self._options, self._accumulation = options, accumulation

    def of(self, work: Work, recomputes: bool) -> int | None:
        """Estimates the bytes that the whole step leases, from traced gradients of parts of its batch. None: unknown.

        The optimizer does not step, so only buffers and random states have to be put back.
        """
        options = self._options
        modules, generators = reached([*work.functions, *options.models])
        before, _ = unless_refused(lambda: Before(modules, generators, options.others, options.scaler))
        if before is None or Governor.current() is None or work.batch.why_whole or options.split or options.handed.tables:
            return None  # Ranks that look rows up would have to trace the same parts.
        traces = options.extension.StepTraces()
        last, traced = 0, []
        for part in _PARTS:
            rows = work.rows // part
            if rows <= last or (rows < 2 and (len(work.functions) == 2 or options.batchnorms())):
                continue
            last, few = rows, work.first(rows)

            def graded(few: Work = few) -> None:
                gradients = self._accumulation.set_aside(work)
                try:
                    with recomputed(options.checkpoint if recomputes else ()), collected(gradients):
                        few.gradients(1, Tally(gradients, 0.0))
                finally:
                    gradients.put_back()

            try:
                traces.add((rows, 0, 0), lambda _, graded=graded: unless_refused(graded)[1])
                traced.append(rows)
            except MemoryPressure:
                raise
            except Exception:  # `f` may not accept so few rows.
                break
            finally:
                before.put_back()
                options.extension.purge()
        needed = _predicted(traces, traced, work.rows)
        if needed is None:
            return None
        needed += self._gradients_that_wait() + self._made_by_first_step()
        return max(needed, self.of_update())

    def of_update(self) -> int:
        """Returns the bytes held while the optimizer writes: live tensors, gradients, its copies, and temporaries of one parameter."""
        options = self._options
        sizes = [p.numel() * p.element_size() for p in options.trained()]
        if not sizes:
            return 0
        moving = sum(sizes) + 2 * max(sizes) + self._made_by_first_step()
        if not writes_at_the_end(options.optimizers) or options.scaler is not None or options.schedulers:
            states = sum(_plan_static.states_of(one)[0] for one in options.optimizers if one.state)
            moving += sum(sizes) + states
        return int(options.extension.with_cache_and_margin(
            options.extension.arena_stats()["live_bytes"] + moving))

    def refused(self, text: str, needed: int | None, advice: str, least: int = 0, of_device: bool = False) -> BudgetExceeded:
        """Returns the exception, with a limit in whole MiB that leaves `needed` bytes.

        needed:    None where not even the smallest part could be traced. The exception then suggests a larger limit to try.
        least:     bytes that are needed in any case.
        of_device: a device refused the memory. The limit is then the device's, and a suggestion.
        """
        governor = Governor.current()
        if of_device:
            if governor is None or not governor.devices:
                return BudgetExceeded(text + advice, "device", 0, 0)
            error = governor.device_refusal(text)
            error.args = (str(error) + advice, *error.args[1:])
            return error
        if governor is None:
            return BudgetExceeded(text + advice, "tensors", 0, 0)
        self._options.extension.purge()
        left = governor.tensor_room()
        wanted = left + governor._room_to_try() if needed is None else needed
        wanted = max(wanted, least)
        limit = -(-(governor.limit_bytes + max(wanted - left, _MIB)) // _MIB) * _MIB + _SPARE
        limit = self._options.handed.group.whole(limit)
        text += (f"; too little is left to tell what all of it takes: try a limit of {limit // _MIB} MiB"
                 if needed is None else f"; a limit of {limit // _MIB} MiB would do{governor._lasting(limit - governor.limit_bytes)}")
        return governor.refusal("tensors", wanted, text + advice, limit_bytes=limit)

    def _gradients_that_wait(self) -> int:
        """Returns the bytes of gradients that wait while another virtual worker has its turn."""
        workers = self._options.handed.workers
        own = 1 if workers is None else workers.own
        return (own.bit_length() - 1) * sum(p.numel() * p.element_size() for p in self._options.trained())

    def _made_by_first_step(self) -> int:
        """Returns the bytes of the optimizer states that do not exist yet."""
        return sum(_plan_static.states_of(one)[0] for one in self._options.optimizers if not one.state)
