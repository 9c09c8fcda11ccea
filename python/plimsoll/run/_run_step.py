# SPDX-License-Identifier: Apache-2.0
"""The TrainingSteps of a run, made of its tracked parts, whose state is in the run's commits.

    run.step(f, batch)                      one step of all tracked optimizers
    run.step(f, batch, optimizer=D_opt)     one of the named optimizers, with its own loss and options; several calls per batch

Threads: the thread that trains.
Memory:  see _step.py; with several calls per batch, copies of what the earlier ones changed, until the batch's end.
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from ..training._fused import choose_fused
from ..training._step import Handed, TrainingStep, step_of_run

if TYPE_CHECKING:
    from ..ranks._group import Group
    from ..ranks._virtual_workers import VirtualWorkers
    from ._run_embedding import DealtVectors, Vectors
    from ._run_parts import Parts

_ALL = ""  # The name of the step of all optimizers.


class Steps:
    """The training steps of one start of a run. saved: an earlier state(); goes_on: there is a commit to resume from."""

    def __init__(self, parts: Parts, tables: dict[str, tuple[Vectors, Any]], saved: dict[str, Any] | None, goes_on: bool,
                 group: Group, workers: VirtualWorkers | None) -> None:
        self._parts, self._tables, self._goes_on = parts, tables, goes_on
        self._group, self._workers = group, workers
        self._saved: dict[str, Any] = {} if saved is None else saved["of"] if "of" in saved else {_ALL: saved}
        self._made: dict[str, tuple[TrainingStep, dict[str, Any]]] = {}
        self._calls: list[tuple[str, TrainingStep]] = []  # The calls in this batch so far.
        self.largest: Any = None
        """The largest batch that will come; each step admits it before its first batch."""
        self.placed: Callable[[Any], Any] = lambda batch: batch
        """Moves a batch to where the loop's batches are, and returns it."""
        self._admitted: set[str] = set()
        self.interruptible: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Makes a context in which the watcher may raise a stop."""

    def __bool__(self) -> bool:
        """Whether a step was made."""
        return bool(self._made)

    def begin_batch(self) -> None:
        """Ends the batch before: its calls cannot be undone any more."""
        for _, step in self._calls:
            step.keep_made()
        self._calls.clear()

    def of(self, optimizer: Any, same: dict[str, Any], functions: dict[str, Any], events: Callable[[dict[str, Any]], Any]) -> TrainingStep:
        """Returns the step for a call with these options, made at the first such call. same: options that must not change.

        Errors: ValueError.
        """
        name, optimizers = self._named(optimizer)
        self._check_call(name)
        if self._tables and self._workers is not None and (same["accumulate"] > 1 or self._parts.those(torch.amp.GradScaler)):
            self._workers.refuse("step: accumulate, or a GradScaler, beside run.embedding", "leave the one or the other out")
        if name not in self._made:
            self._made[name] = self._new(name, optimizers, {**same, **functions}, events), same
        step, before = self._made[name]
        if same != before:
            other = next(key for key in same if same[key] != before[key])
            raise ValueError(f"step: {other} was {before[other]!r} and is {same[other]!r}; the "
                             f"steps of {name or 'a run'} have the same options")
        step._call_with(**functions)
        return step

    def make(self, step: TrainingStep, batch: Any, f: Callable[..., Any]) -> float:
        """Makes the step and returns its loss. If it fails, the earlier calls of this batch are undone, too."""
        name = next(key for key, (one, _) in self._made.items() if one is step)
        try:
            if self.largest is not None and name not in self._admitted:
                self._admit(step, f)
                self._admitted.add(name)
            loss = step(batch, f)
        except BaseException:
            while self._calls and self._calls[-1][1].put_back_made():
                self._calls.pop()
            raise
        if all(one is not step for _, one in self._calls):
            self._calls.append((name, step))
        return loss

    def _admit(self, step: TrainingStep, f: Callable[..., Any]) -> None:
        largest = self.placed(self.largest)
        step.admit(largest if self._workers is None else self._workers.each(largest), f)

    @property
    def is_half_made(self) -> bool:
        """Whether this batch has calls that were made and not undone."""
        return bool(self._calls)

    def state(self) -> dict[str, Any] | None:
        """Returns the states of all steps for a commit; None if there are none."""
        states = {**self._saved, **{name: _state_of(step) for name, (step, _) in self._made.items()}}
        return states.get(_ALL) if not states.keys() - {_ALL} else {"of": states}

    def _named(self, optimizer: Any) -> tuple[str, list[Any]]:
        tracked = self._parts.named(torch.optim.Optimizer)
        if optimizer is None:
            return _ALL, [one for _, one in tracked]
        wanted = list(optimizer) if isinstance(optimizer, (tuple, list)) else [optimizer]
        there = [(name, one) for name, one in tracked if any(one is each for each in wanted)]
        if not wanted or len(there) != len(wanted):
            raise ValueError(f"step: optimizer={optimizer!r} is not tracked: run.track({'D' if tracked else 'optimizer'}_opt=…) names it")
        return _ALL if len(there) == len(tracked) == 1 else "+".join(name for name, _ in there), [one for _, one in there]

    def _check_call(self, name: str) -> None:
        """Raises ValueError if a call that steps all optimizers is not the only one in its batch."""
        tracked = [one for one, _ in self._parts.named(torch.optim.Optimizer)]
        if len(tracked) > 1 and self._calls and _ALL in (name, self._calls[0][0]):
            raise ValueError(f"step: called more than once in a batch, where a call without optimizer= steps all of {', '.join(tracked)} "
                             f"by its own loss: name those of each call, run.step(loss, batch, optimizer={tracked[0]})")

    def _new(self, name: str, optimizers: list[Any], options: dict[str, Any], events: Callable[[dict[str, Any]], Any]) -> TrainingStep:
        parts = self._parts
        models, scalers = parts.those(torch.nn.Module), parts.those(torch.amp.GradScaler)
        if not models or not (optimizers or self._tables) or len(scalers) > 1:
            raise ValueError("step: it is of tracked parts: run.track(model=…, optimizer=…), with one GradScaler "
                             "at most")
        if options["scheduler"] is not None and not parts.has(options["scheduler"]):
            raise ValueError("step: the scheduler is not tracked: run.track(scheduler=…)")
        others = [p for one in parts.those(torch.optim.Optimizer) if one not in optimizers
                  for group in one.param_groups for p in group["params"]]
        handed = Handed(
            looks=False, group=self._group, workers=self._workers, goes_on=self._goes_on, interruptible=lambda: self.interruptible(),
            tables=[cast("DealtVectors", one)._table for one, _ in self._tables.values()] if self._workers is not None else (),
            keeps_made=bool(name), not_its_own=others if name else ())
        made = step_of_run(handed, models, optimizers, scaler=scalers[0] if scalers else None,
                            others=parts.generators(), events=events, **options)
        saved = self._saved.pop(name, None)
        if saved is None and not name and not scalers and options["scheduler"] is None:
            choose_fused(parts.named(torch.optim.Optimizer), models, not self._group.others_may_fail, events)
        if saved is not None:
            made.load_state_dict(saved)
            for table, ids, grad in saved["rows"]:
                rows = self._tables[table][0].store.gather(ids.numpy())
                rows.tensor.grad = grad
                made._wait_for([rows])
        return made


def _state_of(step: TrainingStep) -> dict[str, Any]:
    """Returns the step's state_dict(), with the rows that wait in `accumulate` for the optimizer's step."""
    waiting = [(os.path.basename(rows._store.directory), torch.from_numpy(rows.ids), rows.tensor.grad)
               for rows in step._rows_waiting()]
    return {**step._state(), "rows": waiting}
