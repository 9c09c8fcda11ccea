# SPDX-License-Identifier: Apache-2.0
"""The TrainingStep of a run: of its parts, and with its state in the run's commits.

Threads: the thread that trains.   Memory: see _step.py.
"""
from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._step import TrainingStep

if TYPE_CHECKING:
    from ._run_embedding import Vectors
    from ._run_parts import Parts


def make(parts: Parts, tables: dict[str, Vectors], options: dict[str, Any], saved: dict[str, Any] | None,
         folder: pathlib.Path, events: Callable[[dict[str, Any]], Any]) -> TrainingStep:
    """A step of everything that is tracked, gone on with from what state_of() gave.

    Errors: ValueError where nothing is tracked that a step could be of.
    """
    import torch

    models, optimizers = parts.those(torch.nn.Module), parts.those(torch.optim.Optimizer)
    scalers = parts.those(torch.amp.GradScaler)
    if not models or not (optimizers or tables) or len(scalers) > 1:
        raise ValueError("step: it is of tracked parts: run.track(model=…, optimizer=…), with one GradScaler "
                         "at most")
    if options["scheduler"] is not None and not parts.has(options["scheduler"]):
        raise ValueError("step: the scheduler is not tracked: run.track(scheduler=…)")
    made = TrainingStep(models, optimizers, scaler=scalers[0] if scalers else None,
                        others=parts.generators(), directory=folder, events=events, **options)
    made._looks = False  # The run looks at the memory, between two steps, where it can commit.
    if saved is not None:
        made.load_state_dict(saved)
        for name, ids, grad in saved["rows"]:
            rows = tables[name].store.gather(ids.numpy())
            rows.tensor.grad = grad
            made._window.rows.append(rows)
    return made


def state_of(step: TrainingStep) -> dict[str, Any]:
    """What state_dict() says, and the rows that wait in `accumulate` for the optimizer's step."""
    import torch

    waiting = [(os.path.basename(rows._store.directory), torch.from_numpy(rows.ids), rows.tensor.grad)
               for rows in step._window.rows]
    return {**step._state(), "rows": waiting}
