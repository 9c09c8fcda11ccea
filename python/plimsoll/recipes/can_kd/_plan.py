# SPDX-License-Identifier: Apache-2.0
"""Plans: the largest batch that each task's step fits with, teacher and the largest evaluation included.

Threads: the calling one.   Memory: that of plan_batch(), and one task's.
"""
from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

from ...memory._memory import format_bytes
from ...training._plan import BatchPlan, plan_batch
from ...training._step import TrainingStep
from .. import Told, entries_of, limited
from ._tasks import Data, fits, wanted_tasks
from ._teacher import Teacher
from ._teacher_file import find_teacher
from ._training import Training, is_taught, optimizer_of

if TYPE_CHECKING:
    from ...memory._memory import Governor
    from . import Options


def plan_tasks(options: Options, data: Data, governor: Governor, **device: Any) -> dict[str, BatchPlan]:
    """Returns the plan of each task that `stage` and `model_size` choose and that trains a model of graphs, by its name.

    Errors: BudgetExceeded where not even one graph fits; ValueError where no task is left; Stopped.
    """
    plans = {}
    most = min(options.batch_size_max, len(data.train))
    for task in wanted_tasks(options):
        if task.stage in ("fusion", "evaluation"):
            continue
        with fits(task, options, data, governor):
            teacher = None
            if is_taught(options, task):
                named = f"teacher_{'vgae' if task.stage == 'autoencoder' else f'gat_{task.stage}'}"
                weights = find_teacher(options.teacher_path, named) if options.teacher_path else None
                teacher = Teacher(options, data, task, weights, governor, None)
            work = Training(options, data, task, pathlib.Path(options.out), teacher)
            optimizer = optimizer_of(work.trained())
        step = TrainingStep(work.module, optimizer, before_update=work.clip)

        def rehearsed(graphs: int, step: TrainingStep = step, work: Training = work) -> None:
            data.look()
            step.rehearse(work.largest(graphs), work.loss)

        with fits(task, options, data, governor):
            plans[task.name] = plan_batch(rehearsed, model=work.module, optimizer=optimizer, governor=governor, max_batch_size=most,
                                          extent=work.extent, **device)
    if not plans:
        raise ValueError(f"stage = {options.stage} of model_size = {options.model_size} has no step to plan")
    return plans


def tightest(plans: dict[str, BatchPlan]) -> str:
    """Returns the task whose batch is the smallest."""
    return min(plans, key=lambda name: plans[name].batch_size)


def plan_run(options: Options, device: str, device_memory_limit: str) -> Told:
    """Plans a run, and tells who holds what. The models are on the processor."""
    options = dataclasses.replace(options, device="cpu")
    with limited(options) as governor:
        data = Data(governor, options)
        plans = plan_tasks(options, data, governor, device=device, device_memory_limit=device_memory_limit)
        task = tightest(plans)
        size, ledger = plans[task].batch_size, governor.ledger()
        steps = -(-len(data.train) // size)
        tight = {name: getattr(plans[task], name) for name in ("peak_bytes", "bytes_per_row", "step_seconds")}
        entries = {"batch_size": size, "task": task, **tight, "limit_bytes": ledger.limit_bytes, "baseline_bytes": ledger.baseline_bytes,
                   "foreign_bytes": options.foreign_bytes, "set_bytes": ledger.pools["loader"].leased_bytes, "set_cached": data.set.cached,
                   "steps_per_epoch": steps, "tasks": {name: entries_of(plan) for name, plan in plans.items()}}
        lines = [f"batch_size = {size}, held there by {task}; {steps} steps an epoch", f"under a limit of {format_bytes(ledger.limit_bytes)}"]
        lines += [f"  {name:<22}{plan.batch_size:>6}  {plan.label:<8}{format_bytes(plan.peak_bytes):>11} at {plan.operator} in {plan.phase}"
                  for name, plan in plans.items()]
        lines += [f"  {plans[task].device_text()}"] if plans[task].device else []
        lines += [f"  {name:<14}{format_bytes(of):>12}   {what}" for name, of, what in (
            ("graphs", ledger.pools["loader"].leased_bytes, "the whole set (cache_bytes)" if data.set.cached else "offsets (cache_bytes)"),
            ("foreign", options.foreign_bytes, "code and kernels' scratch (foreign_bytes)"),
            ("baseline", ledger.baseline_bytes, "the process before the run"))]
        most = plans[task]
        lines += ["memory would take more: auto keeps to batch_size_max, and to the graphs of the set" if most.at_most_rows else
                  f"a fifth more, {most.larger_rows} graphs, would lease {format_bytes(most.larger_leased_bytes)}"]
        lines += [most.advice] if most.advice else []
        data.close()
    return Told(entries, "\n".join(lines))
