# SPDX-License-Identifier: Apache-2.0
"""evaluate_run(), export_run() and plan_run(): the commands eval, export and plan, outside a run, each with a governor.

Threads: the calling one.   Memory: that of a run.
"""
from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...core import _torch_gate
from ...core._folders import replaced
from ...memory._memory import Governor, format_bytes
from ...ranks._virtual_workers import VirtualWorkers
from ...training._cross_entropy import one_chunk
from ...training._plan import plan_batch
from ...training._step import Handed, step_of_run
from .. import Told, committed, limited
from ._choice import choose, room_of
from ._model import Tuned, libraries, made_within
from ._train import evaluated, held_out_rows, must_be_noted, optimizer_of, scheduler_of, step_options

if TYPE_CHECKING:
    from . import TuningOptions


@contextlib.contextmanager
def _limited(options: TuningOptions) -> Iterator[Governor]:
    libraries()
    with limited(options) as governor:
        yield governor


def _tuned(options: TuningOptions, governor: Governor) -> tuple[Tuned, dict[str, Any], int]:
    """Returns (the model of a run's last commit, its notes, its step). Errors: NotFoundError; CorruptError."""
    step, parts = committed(options.out)
    tuned = made_within(governor, options, choose(options, room_of(governor, options), parts["notes"]["method"]))
    tuned.load_state_dict(parts["model"])
    tuned.must_be_noted(parts["notes"])
    return tuned, parts["notes"], step


def evaluate_run(options: TuningOptions) -> dict[str, Any]:
    """Returns loss and token accuracy of a run's last commit, on eval_data or the held-out rows."""
    with _limited(options) as governor:
        if not options.eval_data and not options.data:
            raise ValueError("eval_data: dropped files are gone; name a set with `plimsoll resume --eval-data`, or when the "
                             "run begins")
        task = options.task()
        data = task.open(options.eval_data or options.data)
        task.check(data, "eval_data" if options.eval_data else "data")
        held_out = held_out_rows(data, options)
        if not held_out and not options.eval_data:
            raise ValueError("held_out: no row was held out, and no eval_data named")
        tuned, notes, step = _tuned(options, governor)
        if not options.eval_data:
            must_be_noted(data, notes, "data", "put that one back: rows that are held out of another may have been trained on")
        return {"step": step, **(evaluated(tuned, task.sequences(data, held_out=held_out, evaluates=True)) or {})}


def export_run(options: TuningOptions, out: str, merge: bool) -> dict[str, Any]:
    """Exports a run's last commit to a folder: adapters in peft's format, or a model in transformers' format."""
    folder, options = pathlib.Path(out), dataclasses.replace(options, device="cpu")
    if folder.exists():
        raise ValueError(f"out: {folder} is there already")
    with _limited(options) as governor:
        tuned, notes, step = _tuned(options, governor)
        merges = merge and notes["method"] == "lora"
        save = tuned.save_merged if merges else tuned.save
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replaced(folder) as partial:
            save(partial, options.model)
        return {"step": step, "out": str(folder), "kind": "adapters" if notes["method"] == "lora" and not merge else "model",
                "bytes": sum(file.stat().st_size for file in folder.iterdir())}


def plan_run(options: TuningOptions, device: str, device_memory_limit: str) -> dict[str, Any]:
    """Plans the most full sequences of sequence_length tokens per step that fit, and returns each holder's bytes. The model is on the processor."""
    options = dataclasses.replace(options, device="cpu")
    with _limited(options) as governor:
        task = options.task()
        data = task.open(options.data) if options.data else None
        odd = task.check(data) if data else ""
        choice = choose(options, governor.tensor_room())
        tuned = made_within(governor, options, choice)
        optimizer = optimizer_of(tuned, options)
        scheduler = scheduler_of(optimizer, options, 1)
        workers = VirtualWorkers.dealt(options.virtual_workers, 0, 1, options.seed)
        step = step_of_run(Handed(workers=workers), tuned, optimizer, scheduler=scheduler, **step_options(options))

        def made(sequences: int) -> None:
            batch = task.largest(data, sequences)
            step.rehearse(batch if workers is None else workers.each(batch), tuned)

        # There are as many chunks of logits as tokens ask for, and a trace is of the same blocks at each size: so one is
        # made, and the step with all of them is run when the size is known.
        with one_chunk():
            plan = plan_batch(made, model=tuned, optimizer=optimizer, others=[scheduler] if scheduler else [], governor=governor,
                              device=device, device_memory_limit=device_memory_limit)
        extension = _torch_gate.load()
        for sequences in (1, plan.batch_size):  # The second finds gradients and the optimizer's states.
            extension.reset_peak()
            made(sequences)
        measured = extension.arena_stats()["live_peak_bytes"]
        if measured != plan.peak_bytes:
            more = max(0, measured - plan.peak_bytes)
            plan = dataclasses.replace(plan, label="bounded", peak_bytes=plan.peak_bytes + more,
                                       leased_bytes=plan.leased_bytes + more)
        tokens = plan.batch_size * options.sequence_length
        lines = [str(plan), f"  a step: {plan.batch_size} sequences of {options.sequence_length} tokens, {tokens:,} in all; one was "
                 f"made, and took {format_bytes(measured)}", f"  trained: {choice}", *([f"  data: {odd}"] if odd else [])]
        return Told({"profile": str(choice), **dataclasses.asdict(choice), **dataclasses.asdict(plan),
                     "measured_bytes": measured, "sequence_length": options.sequence_length, "tokens_per_step": tokens,
                     **({"data": odd} if odd else {})}, "\n".join(lines))
