# SPDX-License-Identifier: Apache-2.0
"""Accumulation: adds up the gradients of `accumulate` batches, then steps the optimizers, all or nothing.

Reading order: _backward.py, _update.py, this file, _retry.py.
Threads: the thread that trains.
Memory:  while a batch is added, the gradients there were (see Gradients of _transaction.py).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..memory._refusal import Refusal, unless_refused
from ..ranks._virtual_workers import shares_of
from ..rows._embedding import Rows
from ._backward import Backward, Tally, Work, recomputed
from ._lookups import collected
from ._step_options import Options
from ._transaction import Gradients
from ._update import Update

if TYPE_CHECKING:
    from ..rows._rank_rows import LookedUp


@dataclasses.dataclass
class _Window:
    """The batches since the optimizer's last step: how many, their weight, their Rows."""

    batches: int = 0
    weight: float = 0.0
    first: float = 0.0
    """The unit of weights: that of the window's first part. So the gradients of a single batch are unchanged."""
    rows: list[Rows] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Attempt:
    """One try to add a batch to the window."""

    work: Work
    parts: int
    recomputes: bool
    rehearsing: bool
    window: _Window
    """The window, this batch included."""
    whole: bool
    """Whether this batch fills the window."""
    gradients: Gradients
    dealt: list[LookedUp] = dataclasses.field(default_factory=list)
    """Rows of other ranks, with gradients."""


@dataclasses.dataclass(frozen=True)
class Made:
    """The result of adding a batch: its loss, and whether the optimizers stepped."""

    loss: float
    undo: list[Callable[[], Any]] | None
    """Functions that undo the call, where another call of the batch may fail; None: rows were written, and it cannot be undone."""


class Accumulation:
    """The window of batches before an optimizer step. Steps the optimizers when the window is full."""

    def __init__(self, options: Options, backward: Backward, update: Update) -> None:
        self._options, self._backward, self._update = options, backward, update
        self._group, self._workers = options.handed.group, options.handed.workers
        self._told = self._workers is not None and self._workers.told
        self._window = _Window()
        self.steps = 0
        """Steps of the optimizer."""
        self.updated = False
        """Whether the last batch stepped the optimizers."""

    @property
    def rows_waiting(self) -> list[Rows]:
        """Rows whose gradients wait for the optimizer's step."""
        return self._window.rows

    def wait_for(self, rows: list[Rows]) -> None:
        """Adds `rows` to the Rows whose gradients wait for the optimizer's step."""
        self._window.rows += rows

    def state(self) -> dict[str, Any]:
        """Returns the state for load_state(). Waiting Rows are not in it."""
        window = self._window
        gradients = [p.grad for p in self._options.trained()] if window.batches else []
        return {"steps": self.steps, "batches": window.batches, "weight": window.weight, "first": window.first,
                "gradients": gradients}

    def load_state(self, state: dict[str, Any]) -> None:
        """Sets steps, window and gradients from `state`. Errors: KeyError where `state` is not from state()."""
        self.steps = int(state["steps"])
        self._window = _Window(batches=int(state.get("batches", 0)), weight=state.get("weight", 0.0),
                               first=state.get("first", 0.0))
        for parameter, gradient in zip(self._options.trained(), state.get("gradients", [])):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)  # A checkpoint is read into host memory.

    def set_aside(self, work: Work, rows: list[Rows] | None = None) -> Gradients:
        """Sets aside the gradients of parameters, `rows` and the batch's tensors. rows: default the waiting Rows."""
        rows = self.rows_waiting if rows is None else rows
        together = [*self._options.trained(), *(one.tensor for one in rows)]
        others = [p for model in self._options.models for p in model.parameters()]
        return Gradients(together, [*others, *work.tensors()], self._options.handed.not_its_own)

    def attempt(self, work: Work, parts: int, recomputes: bool, rehearsing: bool = False) -> tuple[Made | None, Refusal | None]:
        """Adds the batch to its window, and steps the optimizers at the window's end. Returns (made, None); or (None, the refusal of
        memory), with gradients as before.

        rehearsing: treats the batch as the last of a window. The real window is not changed.
        """
        options, begun = self._options, self._last_of_window() if rehearsing else self._window
        if begun.batches == 0:
            for optimizer in options.optimizers:
                optimizer.zero_grad()
        window = dataclasses.replace(begun, rows=[*begun.rows, *work.batch.handles])
        one = _Attempt(work, parts, recomputes, rehearsing, window, window.batches + 1 >= options.accumulate,
                       self.set_aside(work, window.rows))
        try:
            done, refusal = unless_refused(lambda: self._added(one))
        except BaseException:
            one.gradients.put_back()
            raise
        if refusal is not None:
            one.gradients.put_back()
            return None, refusal
        loss, self.updated, undo = done
        if rehearsing:
            return Made(loss, []), None
        made = Made(loss, self._undone(one, undo) if options.handed.keeps_made else [])
        if one.whole:
            for rows in window.rows:
                rows._end()
            self.steps, window = self.steps + 1, _Window()
        self._window = window
        return made, None

    def _last_of_window(self) -> _Window:
        """Returns a window of `accumulate` − 1 batches: the next batch is its last."""
        accumulate = self._options.accumulate
        return _Window(batches=accumulate - 1, weight=1.0, first=1.0) if accumulate > 1 else _Window()

    def _added(self, one: _Attempt) -> tuple[float, bool, list[Callable[[], Any]]]:
        """Returns (loss, whether the optimizers stepped, functions that undo the step)."""
        options, window, sums = self._options, one.window, self._options.loss == "sum"
        node = self._group.gradients(lambda: self._graded(one), lambda: options.trained() if one.whole or self._told else [],
                                     options.models, sums)
        owned = [table.owned([rows for rows in one.dealt if rows.table is table],
                             lambda rows: 1.0 if sums else rows.weight / node.weight) for table in options.handed.tables]
        if self._told:  # A window holds the sums over all workers, the same for any number of ranks.
            one.gradients.join(*shares_of(window.weight, node.weight, sums))
            window.weight += node.weight
        if not one.whole:
            return node.loss, False, []
        return (node.loss, *self._update.make([*window.rows, *owned], one.rehearsing))

    def _graded(self, one: _Attempt) -> tuple[float, float, float]:
        """Adds up the batch's gradients. Returns (loss, weight of the batch, weight of the window)."""
        options, window, gradients = self._options, one.window, one.gradients
        with (recomputed(options.checkpoint if one.recomputes else ()), collected(gradients) as looked_up,
              options.handed.interruptible()):
            tally = Tally(gradients, 0.0 if self._told else window.first)
            loss = self._backward.make(one.work, one.parts, tally, self.steps * options.accumulate + window.batches, looked_up)
        if self._workers is None:
            window.rows += [rows for rows in looked_up if rows.tensor.grad is not None]
        else:
            one.dealt.extend(rows for rows in looked_up if rows.gradient is not None)
        window.batches += 1
        if self._told:
            return loss, tally.weight, tally.weight
        window.first = tally.first
        window.weight += tally.weight
        share = self._backward.share
        gradients.add_up(share(tally.first, tally.weight), share(window.first, window.weight) if one.whole else None)
        weight = self._backward.weight
        return loss, weight(one.work, tally.weight), weight(one.work, window.weight)

    def _undone(self, one: _Attempt, undo: list[Callable[[], Any]]) -> list[Callable[[], Any]] | None:
        """Returns the functions that undo a call, those in `undo` included. None: rows were written and cannot be put back."""
        steps, window = self.steps, self._window

        def forgotten() -> None:
            self.steps, self._window = steps, window

        return None if one.whole and (one.window.rows or one.dealt) else [*undo, one.gradients.put_back, forgotten]
