# SPDX-License-Identifier: Apache-2.0
"""Evaluations of a batch: without gradients, in eval mode, in parts where memory is refused.

Reading order: _batch.py, _retry.py, this file, _step.py.
Threads: the thread that trains.   Memory: copies of the model's buffers, and the results of the parts.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import BudgetExceeded
from ..memory._refusal import Refusal, unless_refused
from ._batch import Batch
from ._need import Need
from ._reach import reached
from ._retry import Ladder, Retry
from ._step_options import Options
from ._transaction import Before


class Evaluation:
    """Evaluates batches with a step's models, and joins the parts' results."""

    def __init__(self, options: Options, need: Need, retry: Retry) -> None:
        self._options, self._need, self._retry = options, need, retry

    def make(self, given: Batch, f: Callable[..., Any]) -> Any:
        """Returns f(*given), evaluated in parts where memory is refused. Errors: BudgetExceeded where nothing helped."""
        ladder = Ladder("evaluation", "evaluation", given.rows, lambda left: left and not given.why_whole)

        def given_up(refusal: Refusal) -> BudgetExceeded:
            return self._need.refused(f"an evaluation of {given.rows} rows does not fit: {refusal}", None,
                                      f". {given.why_whole}" if given.why_whole else "")

        return self._retry.until_made(lambda: unless_refused(lambda: self._made(given, f, ladder.parts)),
                                      self._remembered(given, f), ladder, given_up)

    def rehearsed(self, given: Batch, f: Callable[..., Any]) -> Refusal | None:
        """Evaluates the whole batch once, and restores the state. Returns the refusal of memory, or None."""
        before = self._remembered(given, f)
        try:
            return unless_refused(lambda: self._made(given, f, 1))[1]
        finally:
            before.put_back()

    def _remembered(self, given: Batch, f: Callable[..., Any]) -> Before:
        return self._retry.remember(given.rows, *reached([f, *self._options.models]))

    def _made(self, batch: Batch, f: Callable[..., Any], parts: int) -> Any:
        import torch

        models, weight = self._options.models, self._options.weight
        modes = [(part, part.training) for model in models for part in model.modules()]
        try:
            for model in models:
                model.eval()
            with torch.no_grad():
                made, weights = [], []
                for part in batch.cut(parts):
                    made.append(f(*part.arguments))
                    weights.append(float(weight(*part.arguments)) if weight else part.rows)
                return made[0] if parts == 1 else _joined(made, weights, self._options.loss == "sum")
        finally:
            for part, training in modes:
                part.training = training


def _joined(made: list[Any], weights: list[float], sums: bool) -> Any:
    """Joins the results of an evaluation's parts into one."""
    import torch

    first = made[0]
    if isinstance(first, dict):
        return {key: _joined([one[key] for one in made], weights, sums) for key in first}
    if isinstance(first, (tuple, list)):
        columns = [_joined(list(column), weights, sums) for column in zip(*made)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if isinstance(first, torch.Tensor) and first.dim() > 0:
        return torch.cat(made)
    if sums:
        return sum(made[1:], first)
    kept = [(one, weight) for one, weight in zip(made, weights) if weight]
    return sum(one * weight for one, weight in kept) / sum(weight for _, weight in kept)
