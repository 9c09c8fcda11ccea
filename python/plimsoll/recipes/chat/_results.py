# SPDX-License-Identifier: Apache-2.0
"""What `plimsoll eval`, `export` and `plan` do for `chat`: beside a run, with a governor of their own.

Threads: the calling one.   Memory: as a run's.
"""
from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ... import _run_settings, _runs, _torch_gate
from ..._checkpoint import read
from ..._folders import replaced
from ..._memory import Governor
from ..._plan import plan_batch
from ..._token_set import TokenSet
from ...errors import NotFoundError
from ._choice import choose
from ._model import CHUNK, Tuned, libraries
from ._train import Sequences, check_data, evaluated, held_out_rows, largest_batch, optimizer_of

if TYPE_CHECKING:
    from . import Options


@contextlib.contextmanager
def _limited(options: Options) -> Iterator[Governor]:
    libraries()
    _run_settings.settle(options.seed, options.compute_threads, True)
    with Governor(options.memory_limit, foreign_bytes=options.foreign_bytes) as governor:
        yield governor


def _tuned(options: Options, governor: Governor) -> tuple[Tuned, dict[str, Any], int]:
    """(the model of a run's last commit, its notes, the step). Errors: NotFoundError; CorruptError."""
    step = int(_runs.status(options.out)["checkpoint_step"])
    if step < 0:
        raise NotFoundError(f"{options.out}: nothing is committed yet")
    parts = read(pathlib.Path(options.out) / "checkpoints" / f"step-{step:09}" / "parts.pt", step, mapped=True)["parts"]
    tuned = Tuned(options, choose(options, governor._left_for_tensors(), parts["notes"]["method"]))
    tuned.load_state_dict(parts["model"])
    return tuned, parts["notes"], step


def evaluate_run(options: Options) -> dict[str, Any]:
    """Loss and token accuracy of a run's last commit, on what was held out."""
    with _limited(options) as governor:
        if not options.eval_data and options.inbox:
            raise ValueError("eval_data: dropped files are gone; name a set with `plimsoll resume --eval-data`, or when the "
                             "run begins")
        tokens = TokenSet(options.eval_data or options.data)
        held_out = held_out_rows(tokens, options)
        if not held_out and not options.eval_data:
            raise ValueError("held_out: no row was held out, and no eval_data named")
        tuned, _, step = _tuned(options, governor)
        return {"step": step, **(evaluated(tuned, Sequences(tokens, options, held_out=held_out, evaluates=True)) or {})}


def export_run(options: Options, out: str, merge: bool) -> dict[str, Any]:
    """A run's last commit in a folder: adapters as peft has them, or a model as transformers has one."""
    folder = pathlib.Path(out)
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


def plan_run(options: Options, device: str, device_memory_limit: str) -> dict[str, Any]:
    """The most sequences of sequence_length tokens that a step may have, each full, and who holds what of it."""
    with _limited(options) as governor:
        odd = ""
        if options.data:
            with TokenSet(options.data) as tokens:
                odd = check_data(tokens, options)
        choice = choose(options, governor._left_for_tensors())
        tuned = Tuned(options, choice)
        optimizer = optimizer_of(tuned, options)

        def step(sequences: int, trained: int = CHUNK) -> None:
            if options.accumulate == 1:
                optimizer.zero_grad()
            batch = largest_batch(options, sequences, trained)
            tuned(*batch).backward()  # Of an accumulation: beside the gradients before it.
            if options.clip_norm:
                torch.nn.utils.clip_grad_norm_(tuned.trained(), options.clip_norm)
            optimizer.step()

        # Chunks of logits are as many as there are tokens that are trained on, and a trace is of the same blocks at each
        # size. So one chunk is, and a step on all tokens is run when the size is known.
        plan = plan_batch(step, model=tuned, optimizer=optimizer, governor=governor, device=device,
                          device_memory_limit=device_memory_limit)
        extension = _torch_gate.load()
        for _ in range(2):  # The second finds the optimizer's states.
            extension.reset_peak()
            step(plan.batch_size, 0)
        measured = extension.arena_stats()["live_peak_bytes"]
        if measured != plan.peak_bytes:  # By what there is for each token that is trained on.
            more = max(0, measured - plan.peak_bytes)
            plan = dataclasses.replace(plan, label="bounded", peak_bytes=plan.peak_bytes + more,
                                       leased_bytes=plan.leased_bytes + more)
        return {"profile": str(choice), **dataclasses.asdict(choice), **dataclasses.asdict(plan),
                "measured_bytes": measured, "sequence_length": options.sequence_length, "tokens_per_step": plan.batch_size * options.sequence_length,
                **({"data": odd} if odd else {})}
