# SPDX-License-Identifier: Apache-2.0
"""OuterLoop: the loop of another program, such as a Trainer, as one of a run.

It says what was made; the run looks at the memory, obeys and commits, as between two batches of steps().
What a step consists of is done again where memory refused it.

Reading order: _run_life.py, _transaction.py, this file, integrations/.
Threads: the thread that trains.   Memory: what the step's own part of _transaction.py keeps.
"""
from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..core import _torch_gate
from ..errors import BudgetExceeded, MemoryPressure
from ..memory._memory import Governor, make_room, parse_bytes
from ..memory._refusal import unless_refused
from ._run_life import Where

if TYPE_CHECKING:
    from ._run import Run
    from ._run_life import Intervals


class OuterLoop:
    """One call of the other program's training loop: begin(), made() after each step, end()."""

    def __init__(self, run: Run, every: Intervals) -> None:
        if run._workers is not None and run._workers.told:
            run._workers.refuse("the loop of another program", "use run.steps(), or leave virtual_workers out")
        self._run, self._every = run, every
        self._held = contextlib.ExitStack()
        self._room = _Room()
        self._in_step = False  # One was begun, or whatever follows it, and not told.
        self._extension = _torch_gate.load()

    @property
    def goes_on(self) -> bool:
        """Whether there is a commit to go on from."""
        return self._run._life.saved_step >= 0

    def begin(self, data: dict[str, Any], *, batches: int, epochs: int, steps: int | None) -> None:
        """Begins the loop, once everything is tracked. data: settings that must be the same on resumption. batches: those of an
        epoch, as data's place counts them. steps: those of all epochs. Without an end epochs is 0 and steps None. Errors: as Run.steps()."""
        run = self._run
        life, at = run._life, run._life.at
        run._close_parts()
        run._parts.forget()
        if run._saved:
            run._must_have_begun_with(data)
        run._source = _Told(data, batches)
        self._batches = batches
        life.report.begin(quiet=True, step=at.step, steps_total=steps, epoch=at.epoch,
                          fraction=at.batch / batches, epochs=epochs)
        if self.goes_on:
            life.report.text(f"goes on at step {at.step}" if steps is None or at.step < steps else
                             f"finished at step {at.step}: of its {steps} steps none is left")
        self._held.enter_context(life.signals())
        life.begins()
        self._held.enter_context(life.at_place(Where.BODY))
        self._in_step = True

    def log(self, step: int, epoch: int, numbers: dict[str, float]) -> None:
        """Metrics of a step, by name."""
        self._run._life.report.log(step, epoch, numbers)

    def evaluated(self) -> None:
        """An evaluation has ended: what it left is let go."""
        life = self._run._life
        if not life.closed and life.governor.arena_attached:
            life.clean_up("evaluation")

    def put_back_random(self) -> None:
        """The random states of the commit, once."""
        self._run._put_back_random()

    def made(self, *, step: int, epoch: int, batch: int, rows: int, loss: float | None, evaluates: bool = False) -> bool:
        """`step` steps are done, and `batch` batches of `epoch`. True: the run was asked to stop and has
        committed; whatever comes after is not part of it. evaluates: an evaluation follows the next step.
        Errors: MemoryPressure; OSError."""
        run = self._run
        life, self._in_step = run._life, False
        with life.at_place(Where.BUSY):
            self.place(step=step, epoch=epoch, batch=batch)
            run._between_steps()
            life.report.step(step=step, epoch=epoch, fraction=batch / self._batches, rows=rows, loss=loss)
            stopped = life.boundary(self._every, precaution=evaluates and not self._room.is_known(self._run.governor))
            self._room.begin(self._run.governor) if evaluates else self._room.end()
            self._in_step = not stopped
            return stopped

    def place(self, *, step: int, epoch: int, batch: int) -> None:
        """Where the loop is, between two steps."""
        at = self._run._life.at
        at.step, at.epoch, at.batch = step, epoch, batch

    def agreed(self, work: Callable[[], Any], place: str = "run.step()") -> Any:
        """work(), on all ranks or on none. Errors: as Ranks.agreed()."""
        return self._run.group.on_all(place, work)

    def drawn(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Inside, a rank draws as it does for its batch `number` of the run; one process draws on."""
        workers = self._run._workers  # One of each rank, where there are several.
        return contextlib.nullcontext() if workers is None else workers.seeded(0, number)

    def average(self, parameters: Iterable[Any], models: list[Any]) -> None:
        """After a backward: the gradients that `parameters` have are the mean of those of all ranks, and buffers rank 0's, as
        DistributedDataParallel has it. parameters: none within a window.

        Errors: as Ranks.agreed(), of whatever another rank failed in before; ValueError for gradients that ranks cannot exchange.
        """
        self._run.group.gradients(lambda: (0.0, 1.0, 1.0), lambda: [*parameters], models, sums=False)

    def kept(self, remember: Callable[[], Any]) -> Any | None:
        """remember(), tried twice; None where memory refused it."""
        for _ in range(2):
            made, refusal = unless_refused(lambda: self.agreed(remember))
            if refusal is None:
                return made
            make_room(self._extension)
        return None

    def again(self, step: int, work: Callable[[], Any], remember: Callable[[], list[Any]]) -> Any:
        """work(), of `step`; where memory refused it once more, after everything was put back.

        remember: makes what has put_back().
        Errors: BudgetExceeded naming a limit to go on with; and what could not be put back, after which nothing is
                done again.
        """
        before: Any = None
        keeper = self._run._life.keeper
        live = keeper.is_live()

        def put_back() -> None:
            for one in before or ():
                one.put_back()
            if live:
                keeper.put_back()

        for following in ("the same once more", "nothing helped: the step was not made"):
            if before is None:
                before, refusal = unless_refused(lambda: self.agreed(remember))
            if before is not None:
                try:
                    done, refusal = unless_refused(lambda: self.agreed(work))
                except MemoryPressure:
                    with contextlib.suppress(RuntimeError):  # Then a copy of the boundary is needed.
                        put_back()
                    raise
                if refusal is None:
                    return done
                try:
                    put_back()
                except RuntimeError as why:
                    raise self._refused(step, refusal, f". It was not put back: {why}") from why
            make_room(self._extension)
            self._run._life.report.event_of_step({"event": "refusal", "step": step, "refusal": str(refusal),
                                                  "next": following})
        raise self._refused(step, refusal, ". Everything is as before it")

    def _refused(self, step: int, refusal: Any, became: str) -> BudgetExceeded:
        governor, text = self._run.governor, str(refusal)
        said = re.search(r"wanted ([\d.]+ \w+), ([\d.]+ \w+) free", text)
        missing = max(0, parse_bytes(said[1]) - parse_bytes(said[2])) if said else 0
        return governor.refusal("tensors", missing, f"step {step} does not fit and was not made: {text}{became}",
                                whole=self._run.group.whole)

    def ended_waiting(self, error: Exception, workers: int) -> bool:
        """Does the same as Life.ended_waiting(), once made() has reported the last step."""
        self._in_step = False
        with self._run._life.at_place(Where.BUSY):
            return self._run._life.ended_waiting(error, workers=workers > 0)

    def end(self) -> None:
        """The loop came to its end: what was made is committed."""
        life, self._in_step = self._run._life, False
        with life.at_place(Where.BUSY):
            self._run._put_back_random()
            life.commit()
            life.ended()

    def finished(self, *, step: int, epoch: int) -> None:
        """end(), with steps that were not told: `step` in all, and `epoch` whole epochs."""
        self.place(step=step, epoch=epoch, batch=0)
        self.end()

    def close(self) -> None:
        self._run._cut_off = self._in_step
        self._held.close()


class _Room:
    """With how little memory that was free evaluations have come to their end."""

    def __init__(self) -> None:
        self._least: int | None = None
        self._now: int | None = None  # Of one that has not.

    @staticmethod
    def _free(governor: Governor) -> int:
        ledger = governor.ledger()
        return min(ledger.free_bytes, ledger.limit_bytes - ledger.measured.held_bytes)

    def is_known(self, governor: Governor) -> bool:
        """Whether one that begins now has what was enough before."""
        return self._least is not None and self._free(governor) >= self._least

    def begin(self, governor: Governor) -> None:
        self.end()
        self._now = self._free(governor)

    def end(self) -> None:
        if self._now is not None:
            self._least = min(self._now, self._now if self._least is None else self._least)
            self._now = None


class _Told:
    """A source whose place somebody else knows."""

    num_workers, counts_on = 0, False

    def __init__(self, data: dict[str, Any], batches: int) -> None:
        self._data = data
        self.batches: int | None = batches

    def shape(self) -> dict[str, Any]:
        return self._data

    def start(self, epoch: int, batch: int, state: Any) -> Iterator[Any]:
        raise ValueError("steps: the loop of this run is another program's")

    def state(self) -> Any:
        return None

    def pass_over(self, state: Any, left: bool) -> None:
        pass
