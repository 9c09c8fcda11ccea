# SPDX-License-Identifier: Apache-2.0
"""The training of a run of `chat`, from its first step, or the one it goes on with, to its last.

Threads: the thread that trains.   Memory: a batch beside what _model.py says.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..._folders import replaced
from ..._token_set import TokenSet
from ._choice import Choice, choose
from ._model import Tuned, config_of, libraries

if TYPE_CHECKING:
    from ..._run import Run
    from . import Options

_HELD_OUT_MOST, _HELD_OUT_SHARE = 100, 20
_TRIMMED_TO = 64  # Tokens: without packing sequences end where the longest of the batch does, rounded up to this.


class Sequences:
    """Batches of a token set for run.steps(): (input_ids, labels, position_ids), each int64 [sequences, tokens]."""

    def __init__(self, tokens: TokenSet, options: Options, *, held_out: int = 0, evaluates: bool = False) -> None:
        """held_out: rows left out; `evaluates`: only these rows, or of 0 all, in their order."""
        self._packing = options.packing
        self._batches = tokens.batches(
            options.batch_size, options.sequence_length, packing=options.packing, shuffle=not evaluates,
            seed=options.seed, held_out=held_out, only_held_out=evaluates and held_out > 0)
        self.seek = self._batches.seek

    @property
    def place(self) -> tuple[int, int, int]:
        """Where seek() goes on."""
        return self._batches.place

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        """The rest of the epoch it is in."""
        for batch in self._batches:
            tensors = tuple(batch.tensors().values())
            if not self._packing:
                longest = int((batch.documents >= 0).sum(1).max())
                tensors = tuple(one[:, :-(-longest // _TRIMMED_TO) * _TRIMMED_TO] for one in tensors)
            yield tensors  # type: ignore[misc]


def largest_batch(options: Options, sequences: int, trained: int = 0) -> tuple[Any, Any, Any]:
    """As large as any that will come: positions begin again within a sequence, at a document or at padding, so that there is a
    mask of all pairs; and every token is trained on.

    trained: only so many.
    """
    shape = (sequences, options.sequence_length)
    labels = torch.zeros(shape, dtype=torch.int64)
    if trained:
        labels[:, 1:].masked_fill_(torch.arange(shape[0] * (shape[1] - 1)).view(shape[0], -1) >= trained, -100)
    positions = torch.arange(shape[1]) % -(-shape[1] // 2)
    return torch.zeros(shape, dtype=torch.int64), labels, positions.repeat(shape[0], 1)


def held_out_rows(tokens: TokenSet, options: Options) -> int:
    """How many are. Errors: ValueError where none would be left."""
    if options.eval_data:
        return 0
    rows = options.held_out if options.held_out >= 0 else min(_HELD_OUT_MOST, len(tokens) // _HELD_OUT_SHARE)
    if rows >= len(tokens):
        raise ValueError(f"held_out: {rows} of the {len(tokens)} rows of {tokens.path} leave none to train on")
    return rows


def check_data(tokens: TokenSet, options: Options) -> str:
    """What is odd about the data for this model, in words. Errors: ValueError for what cannot be trained on."""
    text = config_of(options.model).get_text_config()
    if tokens.vocabulary > text.vocab_size:
        raise ValueError(f"data: {tokens.path} has ids of a vocabulary of {tokens.vocabulary}, and the model's is of "
                         f"{text.vocab_size}: import it again with --tokenizer {options.model}")
    longest = getattr(text, "max_position_embeddings", None)
    if longest and options.sequence_length > longest:
        raise ValueError(f"sequence_length: {options.sequence_length}, and the model knows {longest} positions")
    if tokens.longest_row <= options.sequence_length:
        return ""
    step = max(1, len(tokens) // 10_000)
    lengths = sorted(tokens.length(row) for row in range(0, len(tokens), step))
    longer = sum(one > options.sequence_length for one in lengths) / len(lengths)
    return (f"{100 * longer:.1f} % of the rows are longer than {options.sequence_length} tokens and are cut (half have up to "
            f"{lengths[len(lengths) // 2]}, 95 % up to {lengths[len(lengths) * 95 // 100]}, the longest {tokens.longest_row})")


def optimizer_of(tuned: Tuned, options: Options) -> Any:
    """One group and fused: it takes all its memory before it writes."""
    return torch.optim.AdamW(tuned.trained(), lr=options.lr, weight_decay=options.weight_decay, fused=True)


def evaluated(tuned: Tuned, data: Sequences, asked: Any = lambda: False) -> dict[str, Any] | None:
    """Loss and token accuracy; nothing of the model has changed. None: it was asked to end."""
    loss, right, count = 0.0, 0, 0
    tuned.eval()
    try:
        for batch in data:
            if asked():
                return None
            sums = tuned.scores(*batch)
            loss, right, count = loss + sums[0], right + sums[1], count + sums[2]
    finally:
        tuned.train()
    return {"held_out_loss": loss / max(count, 1), "token_accuracy": right / max(count, 1), "held_out_tokens": count}


class Training:
    """One life of a run."""

    def __init__(self, run: Run, options: Options) -> None:
        """Errors: ValueError naming the option; BudgetExceeded; NotFoundError; CorruptError; OSError."""
        libraries()
        self.run, self.options = run, options
        # What must be known again: the method that was chosen, updates in all, the course of evaluations, dropped files.
        self.notes: dict[str, Any] = {"method": "", "updates": 0, "data": "", "best": math.inf, "worse": 0, "due": False,
                                      "ended": False, "number": 0, "file": "", "stamp": [], "trained": 0, "failed": 0,
                                      "skipped": 0}
        run.track(notes=self.notes)
        self.choice: Choice = choose(options, run.governor._left_for_tensors(), self.notes["method"])
        self.notes["method"] = self.choice.method
        self.tuned = Tuned(options, self.choice)
        self.optimizer = optimizer_of(self.tuned, options)
        self.said: dict[str, Any] = {}
        self._largest: Any = largest_batch(options, options.batch_size)
        self._eval_tokens = TokenSet(options.eval_data) if options.eval_data else None
        self._scheduler: Any = None
        self._evaluated_at = -1
        # Blocks that a refused step makes again, where that is left open and not done anyway.
        free = options.profile == "auto" or options.gradient_checkpointing == "auto"
        keeps = self.choice.weights == "resident" and not self.choice.recomputes
        self._again = self.tuned.blocks if free and keeps else []

    def whole(self) -> dict[str, Any]:
        """All of it; what the summary says."""
        run, options = self.run, self.options
        tokens = None if options.inbox else TokenSet(options.data)
        scheduler = self._schedule(tokens)
        run.track(model=self.tuned, optimizer=self.optimizer, **({"scheduler": scheduler} if scheduler else {}))
        self._scheduler = scheduler
        run._life.report.event("profile", {**vars(self.choice), "text": str(self.choice)})
        if tokens is None:
            from ._inbox import Inbox

            Inbox(self).train()
        else:
            self._must_be(tokens)
            self.loop(tokens)
        if not run.stopped and self.tuned.frozen is not None and run.steps_made:
            with replaced(run.path / "adapter") as partial:
                self.tuned.save(partial, options.model)
        return {"method": self.choice.method, "weights": self.choice.weights, "recomputes": self.choice.recomputes,
                "profile": str(self.choice), "trained_parameters": sum(one.numel() for one in self.tuned.trained()),
                "stall_seconds": self.tuned.frozen.stall_seconds if self.tuned.frozen else 0.0, **self.said}

    def loop(self, tokens: TokenSet) -> None:
        """The passes over a token set: those that are left."""
        run, options, notes = self.run, self.options, self.notes
        if odd := check_data(tokens, options):
            run._life.report.event("data", {"text": odd})
        held_out = held_out_rows(tokens, options)
        self._evaluation = functools.partial(self._evaluate, tokens, held_out)
        if options.eval_every_n_steps and not (held_out or self._eval_tokens):
            raise ValueError("eval_every_n_steps: no row is held out; name a set with --eval-data, or say how many with "
                             "held_out")
        if notes["due"]:  # A stop had ended it; after a break the loop would have been over.
            self._evaluation(run.steps_made)
        data = Sequences(tokens, options, held_out=held_out)
        for batch in run.steps(data, epochs=options.epochs, largest=self._largest):
            self._largest = None
            step = run.steps_made + 1
            loss = run.step(self.tuned, batch, loss="mean", weight=_weight, accumulate=options.accumulate,
                            clip_norm=options.clip_norm or None, scheduler=self._scheduler, checkpoint=self._again)
            run.log(loss=loss, lr=self.optimizer.param_groups[0]["lr"])
            if options.eval_every_n_steps and step % options.eval_every_n_steps == 0:
                notes["due"] = True
                self._evaluation(step)
            if options.previews_every_n_steps and step % options.previews_every_n_steps == 0:
                self._preview(step)
            if notes["ended"] or self.leaves():
                break
        if not run.stopped:
            run._end_left_loop()
            self._evaluation(run.steps_made)
            self._preview(run.steps_made)

    def leaves(self) -> bool:
        """Whether the loop is to be left; of dropped files (see Inbox)."""
        return False

    def _must_be(self, tokens: TokenSet) -> None:
        if self.notes["data"] not in ("", tokens.fingerprint):
            raise ValueError(f"data: {tokens.path} is another set than the run began with ({tokens.fingerprint}, and was "
                             f"{self.notes['data']}); the same bits need the same, or train anew in another folder")
        self.notes["data"] = tokens.fingerprint

    def _schedule(self, tokens: TokenSet | None) -> Any:
        """torch's, or None where the rate stays what it is."""
        options = self.options
        if options.schedule == "constant" and not options.warmup_steps:
            return None
        if options.schedule != "constant" and not self.notes["updates"]:
            assert tokens is not None
            batches = sum(1 for _ in Sequences(tokens, options, held_out=held_out_rows(tokens, options)))
            self.notes["updates"] = max(1, batches * options.epochs // options.accumulate)
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, functools.partial(
            rate, options.schedule, options.warmup_steps, self.notes["updates"]))

    def _evaluate(self, tokens: TokenSet, held_out: int, step: int) -> None:
        """What it came to is in the summary, the run's metrics, and `notes`."""
        notes, options = self.notes, self.options
        if (not held_out and self._eval_tokens is None) or self._evaluated_at == step:
            return
        data = Sequences(self._eval_tokens or tokens, options, held_out=held_out, evaluates=True)
        with self.run.phase("evaluate"):
            said = evaluated(self.tuned, data, lambda: self.run.stop_asked)
        if said is None:
            return  # It stays due.
        self._evaluated_at = step
        self.said.update(said)
        self.run.log(held_out_loss=said["held_out_loss"], token_accuracy=said["token_accuracy"])
        if notes["due"]:
            lower = said["held_out_loss"] < notes["best"]
            notes.update(due=False, best=min(notes["best"], said["held_out_loss"]), worse=0 if lower else notes["worse"] + 1)
            notes["ended"] = 0 < options.patience <= notes["worse"]

    def _preview(self, step: int) -> None:
        if self.options.previews:
            from ._previews import preview

            with self.run.phase("preview"):
                self.said.update(preview(self.tuned, self.options, self.run, step))


def rate(schedule: str, warmup: int, updates: int, done: int) -> float:
    """Of the learning rate, before the update after `done` others."""
    if done < warmup:
        return (done + 1) / warmup
    if schedule == "constant":
        return 1.0
    left = max(0.0, 1 - (done - warmup) / max(updates - warmup, 1))
    return left if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def _weight(input_ids: Any, labels: Any, position_ids: Any) -> Any:
    return (labels[:, 1:] >= 0).sum()
