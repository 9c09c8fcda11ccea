# SPDX-License-Identifier: Apache-2.0
"""Update: the optimizers' step with complete gradients, together with scaler, clipping, schedulers and Rows, all or none.

Reading order: _transaction.py, this file, _accumulation.py.
Threads: the thread that trains.
Memory:  that of OptimizersBefore, while the optimizer writes; until the batch's end for a call that may have to be undone.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..rows._embedding import Rows
from ._step_options import Options
from ._transaction import OptimizersBefore, Together

if TYPE_CHECKING:
    from ..rows._rank_rows import Owned


class Update:
    """The step of optimizers, Rows and schedulers, made as one."""

    def __init__(self, options: Options) -> None:
        self._options, self._group, self._keeps_made = options, options.handed.group, options.handed.keeps_made
        self.gradient_norm = 0.0
        """The norm of the last gradients before clipping; 0 without clip_norm."""

    def make(self, rows: list[Rows | Owned], rehearsing: bool) -> tuple[bool, list[Callable[[], Any]]]:
        """Returns (whether the optimizers stepped, functions that undo it where another call may fail). False: the scaler skipped the step.

        rehearsing: Rows are not applied.
        """
        together = Together(self._options.optimizers, rows)
        with contextlib.ExitStack() as undo:
            made = self._options.agreed(lambda: self._stepped(together, rehearsing, undo))
            written = self._group.write_last(together.apply_rows, undo) if made and rows else undo.pop_all()
        return made, [written.close] if self._keeps_made and not rehearsing else []

    def _stepped(self, together: Together, rehearsing: bool, undo: contextlib.ExitStack) -> bool:
        import torch

        options, scaler = self._options, self._options.scaler
        if scaler is not None:
            together.unscale(scaler)
        if options.before_update is not None:
            options.before_update()
        if options.clip_norm is not None:
            self.gradient_norm = float(torch.nn.utils.clip_grad_norm_(options.trained(), options.clip_norm))
        together.prepare(check=scaler is None, applies=not rehearsing)
        undo.callback(OptimizersBefore(
            options.optimizers, options.schedulers,
            alone=scaler is None and not options.schedulers and not self._group.others_may_fail and not self._keeps_made).put_back)
        if scaler is None:
            made = together.step()
        else:
            made = bool(scaler.step(together))
            scaler.update()
        if made:
            for scheduler in options.schedulers:
                scheduler.step()
        return made
