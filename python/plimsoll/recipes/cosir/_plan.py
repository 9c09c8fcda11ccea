# SPDX-License-Identifier: Apache-2.0
"""The plan of a `cosir` run: the largest batch that fits, found by steps that are traced and put back.

Threads: the calling one.   Memory: that of a run.
"""
from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from ...errors import BudgetExceeded
from ...memory._memory import format_bytes
from ...training._plan import BatchPlan, plan_batch
from ...training._step import TrainingStep
from .. import Told, entries_of, limited, tensor_bytes
from ._evaluate import FINAL_ANGLES, Evaluation
from ._model import Model, Shape
from ._pairs import Pairs
from ._phase2 import Classifier, Phase2
from ._settings import STORE_USUAL, loss_of, optimizer_of, table_place

if TYPE_CHECKING:
    from ...memory._memory import Governor
    from . import Options

_STEPS_LEAST, _ROWS_MOST, _MULTIPLE = 32, 8192, 16  # An epoch has as many steps: a batch of everything is no training.
_RING_BATCHES, _PINNED_BATCHES = 4, 2  # Read ahead; on their way to a device.
_RING_LEAST, _TENSORS_LEAST = 2, 3  # Batches of the smallest ring; tensors of a row's width that InfoNCE compares and differentiates.
_MIB = 1 << 20
_HOLDERS = {"eval_peak_bytes": ("evaluation", "tensors at its peak"), "store_bytes": ("rows", "in memory (store_bytes)"),
            "cache_bytes": ("features", "their cache (cache_bytes)"), "queue_bytes": ("ring", "batches ahead (queue_bytes)"), "pinned_bytes": ("pinned", "batches on their way to the device"),
            "foreign_bytes": ("foreign", "code and kernels' scratch (foreign_bytes)"), "baseline_bytes": ("baseline", "the process before the run")}


def planned(governor: Governor, options: Options, pairs: Pairs, model: Model, optimizer: torch.optim.Optimizer, device: str = "cpu",
            device_memory_limit: str = "") -> BatchPlan:
    """Plans the largest multiple of 16 up to 8,192 pairs that fits beside the table of conditions and the loader's ring.

    Errors: BudgetExceeded when not even two pairs fit.
    """
    loss, room = loss_of(model, options), governor.tensor_room() - _table_bytes(options, pairs, governor)
    phase2 = None
    if options.phase2_epochs:
        classifier = Classifier(model.shape.dim, options.seed).to(pairs.device)
        phase2 = TrainingStep(classifier, torch.optim.AdamW(classifier.parameters(), lr=0.0, fused=True)), Phase2(
            model, classifier, options.temperature, options.seed, 1.0, pairs.device)
    step, pinned = TrainingStep(model, optimizer), 0 if device == "cpu" else _PINNED_BATCHES

    def made(rows: int) -> None:
        batch = pairs.first(min(rows, pairs.rows))
        batches = (0 if options.queue_bytes else _RING_BATCHES) + pinned
        ring = torch.empty(batches * sum(one.nbytes for one in batch[:2]), dtype=torch.uint8)
        step.rehearse((*batch, torch.zeros(len(batch[0]), options.label_dim, device=pairs.device).requires_grad_()), loss)
        if phase2 is not None:
            phase2[0].rehearse(batch, phase2[1].loss)
        del ring

    most = max(min(_ROWS_MOST, pairs.rows // _STEPS_LEAST) // _MULTIPLE * _MULTIPLE, min(_MULTIPLE, pairs.rows))
    left = room - options.queue_bytes
    try:
        return plan_batch(made, model=model, optimizer=optimizer, others=[phase2[1].classifier] if phase2 else [], governor=governor,
                          available=max(left, 1), min_batch_size=2, max_batch_size=most, multiple_of=_MULTIPLE if most >= _MULTIPLE else 1,
                          device=device, device_memory_limit=device_memory_limit)
    except BudgetExceeded as error:
        named = error.smallest_limit_bytes
        if error.tag != "tensors" or not named:
            raise
        limit = enough_for(governor, named - governor.limit_bytes + max(1 - left, 0))
        text = str(error).replace(f"a limit of {named // _MIB} MiB", f"a limit of {limit // _MIB} MiB")
        raise governor.refusal("tensors", error.requested_bytes, text, limit_bytes=limit) from None


def check_room(governor: Governor, options: Options, pairs: Pairs, dim: int, batch_size: int) -> None:
    """Checks that the least is free that batches of this size take. Errors: BudgetExceeded naming a limit to try."""
    rows = min(batch_size, pairs.rows)
    least = options.queue_bytes or _RING_LEAST * rows * sum(one.nbytes for one in pairs.first(1)[:2])
    if pairs.device == "cpu":  # Compared rows, and the matrix of their products.
        least += 4 * rows * (_TENSORS_LEAST * dim + (rows if options.loss_infonce else 0))
    free = governor.ledger().free_bytes
    if least > free:
        limit = enough_for(governor, least - free)
        raise governor.refusal("tensors", least, f"batches of {rows} pairs take more than {format_bytes(least)}, and {format_bytes(free)} is free; "
                               f"try a limit of {limit // _MIB} MiB, or a smaller batch_size (--batch-size)", limit_bytes=limit)


def enough_for(governor: Governor, short_bytes: int) -> int:
    """Returns a limit with so much more room for tensors: the caches of rows and features take their shares of what a limit adds."""
    return -(-(governor.limit_bytes + 2 * short_bytes) // _MIB) * _MIB


def evaluation_bytes(governor: Governor, options: Options, pairs: Pairs, model: Model, batch_size: int, room: int) -> int:
    """Evaluates as a run does, with conditions of zeros. Returns the most bytes of its tensors, the model's among them; 0: nothing is held out.

    room: bytes that a run of this batch size leaves for tensors. Errors: BudgetExceeded where they are too few.
    """
    if not options.eval_pairs or not pairs.split.held_out_rows:
        return 0
    evaluation = Evaluation(model, pairs, lambda ids: torch.zeros(len(ids), options.label_dim), batch_size=batch_size, eval_pairs=options.eval_pairs)
    peak, needed = tensor_bytes(lambda: evaluation.make(FINAL_ANGLES))
    if needed > room:
        limit = enough_for(governor, needed - room)
        raise governor.refusal("tensors", needed, f"an evaluation of {min(options.eval_pairs, pairs.split.held_out_rows)} held-out pairs does not fit "
                               f"beside batches of {batch_size}: {format_bytes(needed)} of {format_bytes(room)} for tensors; a limit of "
                               f"{limit // _MIB} MiB would do, or fewer pairs (eval_pairs)", limit_bytes=limit)
    return peak


def plan_run(options: Options, device: str, device_memory_limit: str) -> dict[str, Any]:
    """Plans a run of the options, and returns each holder's bytes. The model is on the processor."""
    options = dataclasses.replace(options, device="cpu")
    with limited(options) as governor:
        pairs = Pairs(governor, options, "cpu")
        model = Model(Shape.of(options, *pairs.widths), options.seed)
        plan = planned(governor, options, pairs, model, optimizer_of(model, options), device, device_memory_limit)
        batch = plan.batch_size * sum(one.nbytes for one in pairs.first(1)[:2])
        ring, pinned = options.queue_bytes or _RING_BATCHES * batch, _PINNED_BATCHES * batch if plan.device else 0
        evaluated = evaluation_bytes(governor, options, pairs, model, plan.batch_size,
                                     governor.tensor_room() - _table_bytes(options, pairs, governor) - ring - pinned)
        steps, limit = -(-pairs.rows // plan.batch_size), governor.limit_bytes
        more = {"eval_peak_bytes": evaluated, "store_bytes": _table_bytes(options, pairs, governor), "cache_bytes": pairs.features.plan().total_bytes,
                "queue_bytes": ring, **({"pinned_bytes": pinned} if plan.device else {}), "foreign_bytes": options.foreign_bytes, "baseline_bytes": governor.ledger().baseline_bytes}
        pairs.close()
        lines = [f"batch_size = {plan.batch_size}, {steps} steps an epoch, under a limit of {format_bytes(limit)}", str(plan)]
        lines += [f"  {_HOLDERS[name][0]:<14}{format_bytes(size):>12}  {_HOLDERS[name][1]}" for name, size in more.items() if size]
        return Told({**entries_of(plan), **more, "limit_bytes": limit, "steps_per_epoch": steps}, "\n".join(lines))


def _table_bytes(options: Options, pairs: Pairs, governor: Governor) -> int:
    return table_place(options, pairs.rows, governor)["store_bytes"] or STORE_USUAL
