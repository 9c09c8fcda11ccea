# SPDX-License-Identifier: Apache-2.0
"""OuterLoop: the training loop of another program, such as a Trainer, as a loop of a run.

The other program reports its steps. After each one the run checks the memory, obeys requests and commits, as between two
batches of steps(). The work of a step is repeated if memory refused it.

Reading order: _run_life.py, _transaction.py, this file, integrations/.
Threads: the thread that trains.   Memory: the copies that _transaction.py makes for a step.
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
        self._in_step = False  # Whether work has begun since the last step that made() reported.
        self._extension = _torch_gate.load()

    @property
    def goes_on(self) -> bool:
        """Whether there is a commit to resume from."""
        return self._run._life.saved_step >= 0

    def begin(self, data: dict[str, Any], *, batches: int, epochs: int, steps: int | None) -> None:
        """Begins the loop, once everything is tracked. data: settings that must be the same on resumption. batches: number per epoch, in the
        same units as made()'s. steps: number over all epochs. Without an end, epochs is 0 and steps None. Errors: those of Run.steps().
        """
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
        """Writes metrics of a step, by name."""
        self._run._life.report.log(step, epoch, numbers)

    def evaluated(self) -> None:
        """Frees unused memory after an evaluation."""
        life = self._run._life
        if not life.closed and life.governor.arena_attached:
            life.clean_up("evaluation")

    def put_back_random(self) -> None:
        """Restores the random states of the commit, once."""
        self._run._put_back_random()

    def made(self, *, step: int, epoch: int, batch: int, rows: int, loss: float | None, evaluates: bool = False) -> bool:
        """Reports that `step` steps are done, and `batch` batches of `epoch`. Returns True if the run was asked to stop and has
        committed; later work is not part of it. evaluates: an evaluation follows the next step.

        Errors: MemoryPressure; OSError.
        """
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
        """Sets the position of the loop between two steps."""
        at = self._run._life.at
        at.step, at.epoch, at.batch = step, epoch, batch

    def agreed(self, work: Callable[[], Any], place: str = "run.step()") -> Any:
        """Returns work(), done on all ranks or on none. Errors: those of Ranks.agreed()."""
        return self._run.group.on_all(place, work)

    def drawn(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Seeds a rank's generators for its batch `number` of the run, inside the block. A single process draws on."""
        workers = self._run._workers  # One per rank; None for a single process.
        return contextlib.nullcontext() if workers is None else workers.seeded(0, number)

    def average(self, parameters: Iterable[Any], models: list[Any]) -> None:
        """Averages the gradients of `parameters` over all ranks after a backward, and copies rank 0's buffers to all, as
        DistributedDataParallel does. parameters: none within an accumulation window.

        Errors: those of Ranks.agreed(), including earlier failures of other ranks; ValueError for gradients that ranks cannot exchange.
        """
        self._run.group.gradients(lambda: (0.0, 1.0, 1.0), lambda: [*parameters], models, sums=False)

    def kept(self, remember: Callable[[], Any]) -> Any | None:
        """Returns remember(), which is tried twice; None if memory refused it."""
        for _ in range(2):
            made, refusal = unless_refused(lambda: self.agreed(remember))
            if refusal is None:
                return made
            make_room(self._extension)
        return None

    def again(self, step: int, work: Callable[[], Any], remember: Callable[[], list[Any]]) -> Any:
        """Returns work(), for step `step`. If memory refuses it, everything is restored and it is tried once more.

        remember: makes the objects whose put_back() restores the state.
        Errors: BudgetExceeded naming a limit to try. If the state could not be restored, it says so, and nothing is
                tried again.
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
                    with contextlib.suppress(RuntimeError):  # The commit then needs a copy of the boundary.
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
        """Returns Life.ended_waiting() for an exception that came after made() reported the last step."""
        self._in_step = False
        with self._run._life.at_place(Where.BUSY):
            return self._run._life.ended_waiting(error, workers=workers > 0)

    def end(self) -> None:
        """Commits the last step of a loop that has ended."""
        life, self._in_step = self._run._life, False
        with life.at_place(Where.BUSY):
            self._run._put_back_random()
            life.commit()
            life.ended()

    def finished(self, *, step: int, epoch: int) -> None:
        """Ends the loop at `step` steps and `epoch` whole epochs, even if made() has not reported the last ones."""
        self.place(step=step, epoch=epoch, batch=0)
        self.end()

    def close(self) -> None:
        self._run._cut_off = self._in_step
        self._held.close()


class _Room:
    """The least free memory with which an evaluation has succeeded."""

    def __init__(self) -> None:
        self._least: int | None = None
        self._now: int | None = None  # Free bytes when the running evaluation began.

    @staticmethod
    def _free(governor: Governor) -> int:
        ledger = governor.ledger()
        return min(ledger.free_bytes, ledger.limit_bytes - ledger.measured.held_bytes)

    def is_known(self, governor: Governor) -> bool:
        """Whether an evaluation that begins now has as much free memory as one that succeeded."""
        return self._least is not None and self._free(governor) >= self._least

    def begin(self, governor: Governor) -> None:
        self.end()
        self._now = self._free(governor)

    def end(self) -> None:
        if self._now is not None:
            self._least = min(self._now, self._now if self._least is None else self._least)
            self._now = None


class _Told:
    """A source whose position the other program knows."""

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
