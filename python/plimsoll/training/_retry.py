# SPDX-License-Identifier: Apache-2.0
"""Retries after memory was refused: the step is undone and made again with less memory, until nothing is left to try.

Reading order: _accumulation.py, _need.py, this file, _admission.py.
Threads: the thread that trains.
Memory:  during a step or an evaluation, copies of the model's buffers (Before of _transaction.py).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import BudgetExceeded
from ..memory._memory import make_room, pressure_between_steps
from ..memory._refusal import Refusal, unless_refused
from ..ranks._messages import Unweighted
from ._accumulation import Accumulation, Made
from ._backward import Work
from ._need import Need
from ._reach import reached
from ._step_events import Events
from ._step_options import Options, refuse_ranks
from ._transaction import Before, CallsMade, writes_at_the_end


class Ladder:
    """The tries after refusals: the same again, then with modules recomputed, then in twice as many parts.

    name, what: names of the repeated work and of the cut batch, for the events.
    cuttable:   (whether enough rows are left) -> whether more parts may be made; the same on all ranks.
    """

    def __init__(self, name: str, what: str, rows: int, cuttable: Callable[[bool], bool], *, parts: int = 1,
                 recomputes: bool = False, recomputable: bool = False) -> None:
        self._name, self._what, self._rows, self._cuttable, self._recomputable = name, what, rows, cuttable, recomputable
        self.parts, self.recomputes = parts, recomputes
        self._last: Refusal | None = None
        self.uncut = ""
        """The reason why parts cannot be weighed; "": none. With a reason nothing is left to try."""

    def next(self, refusal: Refusal) -> str:
        """Moves to the next try. Returns its name; "": there is none."""
        first, self._last = self._last is None, refusal
        if self.uncut:
            return ""
        if first:
            return f"the same {self._name} again"
        if self._recomputable and not self.recomputes:
            self.recomputes = True
            return "recomputing modules in backward"
        if self._cuttable(self.parts < self._rows):
            self.parts = min(2 * self.parts, self._rows)
            return f"the {self._what} in {self.parts} parts"
        return ""

    def end(self, why: Unweighted) -> Refusal | None:
        """Ends the cutting, as parts cannot be weighed. Returns the refusal that led to parts; None where no refusal did."""
        if self._last is not None and self.parts > 1:
            self.uncut = str(why)
            return self._last
        return None


class Retry:
    """Makes steps and evaluations, and tries again after refusals."""

    def __init__(self, options: Options, accumulation: Accumulation, need: Need, events: Events, calls: CallsMade) -> None:
        self._options, self._accumulation, self._need, self._events, self._calls = options, accumulation, need, events, calls
        self._group = options.handed.group
        self.parts = 1
        """The number of parts a batch is cut into."""
        self.recomputes = False
        """Whether modules are recomputed in backward."""
        self.refusals = 0
        """Number of tries that memory refused."""

    def begin_with(self, parts: int, recomputes: bool) -> None:
        """Sets the number of parts, and whether modules are recomputed, for the next step's first try."""
        self.parts, self.recomputes = parts, recomputes

    def step(self, work: Work) -> float:
        """Makes the step; returns the loss. Errors: BudgetExceeded; MemoryPressure; errors of the functions. The state is then as before."""
        options = self._options
        if options.handed.looks and (pressure := pressure_between_steps()) is not None:
            raise self._events.stopped(self._accumulation.steps, pressure)
        modules, generators = reached([*work.functions, *options.models])
        refuse_ranks(modules)
        before = self._group.alone(lambda: self.remember(work.rows, modules, generators))
        ladder = Ladder("step", "batch", work.rows, lambda left: self._group.all("run.step()", self._may_cut(work) and left),
                        parts=self.parts, recomputes=self.recomputes, recomputable=bool(options.checkpoint))

        def attempt() -> tuple[Made | None, Refusal | None]:
            try:
                return self._accumulation.attempt(work, ladder.parts, ladder.recomputes)
            except BaseException as error:
                refusal = ladder.end(error) if isinstance(error, Unweighted) else None
                if refusal is None:
                    before.put_back()
                    raise
                return None, refusal

        def given_up(refusal: Refusal) -> BudgetExceeded:
            self._events.refusal(self._accumulation.steps + 1, refusal, "nothing helped: the step was not made")
            needed = None if refusal.of_device else self._need.of(work, self.recomputes)
            return self._given_up(refusal, work.rows, needed, ladder.uncut or work.batch.why_whole)

        made: Made = self.until_made(attempt, before, ladder, given_up)
        self.parts, self.recomputes = ladder.parts, ladder.recomputes
        if options.handed.keeps_made:
            self._calls.add(made.undo, before)
        return made.loss

    def until_made(self, attempt: Callable[[], tuple[Any, Refusal | None]], before: Before, ladder: Ladder,
                   given_up: Callable[[Refusal], BudgetExceeded]) -> Any:
        """Calls attempt() until it succeeds, with the next try of `ladder` and the state of `before` each time. Errors: given_up() where no try
        is left."""
        while True:
            made, refusal = attempt()
            if refusal is None:
                return made
            before.put_back()
            make_room(self._options.extension)
            if not ladder.uncut:
                self.refusals += 1
            helped = ladder.next(refusal)
            if not helped:
                raise given_up(refusal)
            self._events.refusal(self._accumulation.steps + 1, refusal, helped)

    def remember(self, rows: int, modules: list[Any], generators: list[Any], kept: Sequence[Any] = ()) -> Before:
        """Returns the state before the step. Tries twice where memory is refused. kept: parameters that the caller puts back."""
        for _ in range(2):
            before, refusal = unless_refused(
                lambda: Before(modules, generators, self._options.others, self._options.scaler, kept))
            if before is not None:
                return before
            self.refusals += 1
            make_room(self._options.extension)
        assert refusal is not None
        raise self._given_up(refusal, rows, None, "")

    def _may_cut(self, work: Work) -> bool:
        return (self._options.loss is not None and not work.batch.why_whole
                and (self._options.allow_batchnorm or not self._options.batchnorms()))

    def _given_up(self, refusal: Refusal, rows: int, needed: int | None, uncut: str) -> BudgetExceeded:
        options, advice = self._options, "a larger limit, or a smaller batch"
        if options.loss is None:
            advice += "; the argument loss=\"mean\" (or \"sum\") of the step lets the batch be cut, where each row has its own share of the loss"
        if options.batchnorms() and not options.allow_batchnorm:
            advice += (f"; {options.batchnorms()[0]} has batch statistics, so the batch is cut only with "
                       "allow_batchnorm_microbatch=True")
        elif options.loss is not None and uncut:
            advice += f"; the batch was not cut: {uncut}"
        if not writes_at_the_end(options.optimizers):
            advice += "; an optimizer with fused=True and one parameter group, which is not copied"
        steps = self._accumulation.steps
        error = self._need.refused(f"step {steps + 1} of {rows} rows does not fit and was not made: "
                                   f"{refusal}. Everything is as before it", needed,
                                   f". What would help: {advice}", 0 if refusal.of_device else self._need.of_update(), refusal.of_device)
        return self._events.stopped(steps, error)
