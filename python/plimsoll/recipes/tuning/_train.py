# SPDX-License-Identifier: Apache-2.0
"""Training: trains a run from its first step, or from the one it resumes with, to its last.

Threads: the thread that trains.   Memory: a batch, beside the memory of _model.py.
"""
from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from ...core._folders import replaced
from ._choice import Choice, choose, room_of
from ._model import Tuned, libraries, made_within

if TYPE_CHECKING:
    from ...run._run import Run
    from . import TuningOptions
    from ._task import Sequences

_HELD_OUT_MOST, _HELD_OUT_SHARE = 100, 20
_COURSE = ("due", "best", "worse", "ended")  # The notes' entries on evaluations.


def held_out_rows(data: Any, options: TuningOptions) -> int:
    """Returns the number of held-out rows. Errors: ValueError where no row would be left to train on."""
    if options.eval_data:
        return 0
    rows = options.held_out if options.held_out >= 0 else min(_HELD_OUT_MOST, len(data) // _HELD_OUT_SHARE)
    if rows >= len(data):
        raise ValueError(f"held_out: {rows} of the {len(data)} rows of {data.path} leave none to train on")
    return rows


def must_be_noted(data: Any, notes: dict[str, Any], option: str, advice: str) -> None:
    """Checks that the data is the set that the run's notes name. Errors: ValueError naming the option if it is another."""
    noted = notes.get(option, "")
    if noted not in ("", data.fingerprint):
        raise ValueError(f"{option}: {data.path} is another set than the run began with ({data.fingerprint}, and was {noted}); "
                         f"{advice}")


def optimizer_of(tuned: Tuned, options: TuningOptions) -> Any:
    """Makes a fused AdamW with one group, which allocates all its memory before it writes."""
    return torch.optim.AdamW(tuned.trained(), lr=options.lr, weight_decay=options.weight_decay, fused=True)


def evaluated(tuned: Tuned, data: Sequences, asked: Any = lambda: False) -> dict[str, Any] | None:
    """Returns loss and token accuracy, NaN without tokens to train on; None where asked() returned True. The model does not change."""
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
    loss, accuracy = (loss / count, right / count) if count else (math.nan, math.nan)
    return {"held_out_loss": loss, "token_accuracy": accuracy, "held_out_tokens": count}


class Training:
    """The training between one start of a run and its end. A resumed run makes another."""

    def __init__(self, run: Run, options: TuningOptions) -> None:
        """Makes the model and optimizer. Errors: ValueError naming the option; BudgetExceeded; NotFoundError; CorruptError; OSError."""
        libraries()
        self.run, self.options, self.task = run, options, options.task()
        # State for a resumed run: the chosen method, the number of updates, the course of evaluations, the task's own.
        self.notes: dict[str, Any] = {"method": "", "updates": 0, "data": "", "best": math.inf, "worse": 0, "due": False,
                                      "ended": False, **self.task.notes()}
        run.track(notes=self.notes)
        self.choice: Choice = choose(options, run.group.least("the parts", room_of(run.governor, options)), self.notes["method"])
        self.notes["method"] = self.choice.method
        self.tuned = made_within(run.governor, options, self.choice, run.group.whole)
        self.optimizer = optimizer_of(self.tuned, options)
        self.said: dict[str, Any] = {}
        self._admitted = False
        self._eval_data = self.task.open(options.eval_data) if options.eval_data else None
        if self._eval_data is not None:
            self.task.check(self._eval_data, "eval_data")
            if options.patience:  # Its losses say when the run ends.
                self.must_be(self._eval_data, "eval_data")
        self._scheduler: Any = None
        self._evaluated_at = -1
        # Blocks that a refused step makes again, where that is left open and not done anyway.
        free = options.profile == "auto" or options.gradient_checkpointing == "auto"
        keeps = self.choice.weights == "resident" and not self.choice.recomputes
        self._again = self.tuned.blocks if free and keeps else []

    def whole(self) -> dict[str, Any]:
        """Trains to the end, and returns the entries for the run's summary."""
        run, options = self.run, self.options
        scheduler = self._schedule()
        run.track(model=self.tuned, optimizer=self.optimizer, **({"scheduler": scheduler} if scheduler else {}))
        self.tuned.must_be_noted(self.notes)
        self._scheduler = scheduler
        run.event("profile", **vars(self.choice), text=str(self.choice))
        self.task.train(self)
        if not run.stopped and self.tuned.frozen is not None and run.steps_made and run.is_writer:
            with replaced(run.path / "adapter") as partial:
                self.tuned.save(partial, options.model)
        return {"method": self.choice.method, "weights": self.choice.weights, "recomputes": self.choice.recomputes,
                "profile": str(self.choice), "trained_parameters": sum(one.numel() for one in self.tuned.trained()),
                "stall_seconds": self.tuned.frozen.stall_seconds if self.tuned.frozen else 0.0, **self.task.summary(self.notes), **self.said}

    def loop(self, data: Any) -> None:
        """Makes the remaining passes over a set."""
        run, options, notes, task = self.run, self.options, self.notes, self.task
        if odd := task.check(data):
            run.event("data", text=odd)
        held_out = held_out_rows(data, options)
        self._evaluation = functools.partial(self._evaluate, data, held_out)
        if options.eval_every_n_steps and not (held_out or self._eval_data):
            raise ValueError("eval_every_n_steps: no row is held out; name a set with --eval-data, or say how many with "
                             "held_out")
        course: dict[str, Any] = {}
        if notes["due"]:  # A stop had ended it; after a break the loop would have been over.
            self._evaluation(run.steps_made)
            course = {name: notes[name] for name in _COURSE}
            if notes["due"]:
                run.idle(0)  # Asked to stop again: no step is made before it.
        sequences = task.sequences(data, held_out=held_out)
        task.begun(sequences, notes)
        largest = None if self._admitted else task.largest(data, options.batch_size)
        batches = run.steps(sequences, epochs=options.epochs, largest=largest, cleanup_every_n_steps=options.cleanup_every_n_steps)
        for batch in () if course.get("ended") else batches:
            self._admitted, largest = True, None
            notes.update(course)  # The loop has put back what was committed.
            course = {}
            step = run.steps_made + 1
            loss = run.step(self.tuned, batch, **step_options(options), scheduler=self._scheduler, checkpoint=self._again)
            run.log(loss=loss, lr=self.optimizer.param_groups[0]["lr"], **task.told(sequences, notes))
            if options.eval_every_n_steps and step % options.eval_every_n_steps == 0:
                notes["due"] = True
                self._evaluation(step)
            task.preview(self, step)
            if notes["ended"] or self.leaves():
                break
        if not run.stopped:
            run.end_loop()
            self._evaluation(run.steps_made)
            task.preview(self, run.steps_made, at_end=True)
            if run.stop_asked:  # The interrupted evaluation is made after the resumption.
                run.idle(0)

    def leaves(self) -> bool:
        """Whether to leave the loop early. Inbox replaces this, to skip a file."""
        return False

    def must_be(self, data: Any, option: str = "data") -> None:
        """Checks that the data is the set that the run began with, or notes it. Errors: ValueError naming the option."""
        must_be_noted(data, self.notes, option, "the same bits need the same, or train anew in another folder")
        self.notes[option] = data.fingerprint

    def must_have_updated(self) -> None:
        """Checks that a finished run made an update. Errors: ValueError naming accumulate where it had too few steps for one."""
        steps, accumulate = self.run.steps_made, self.options.accumulate
        if not self.run.stopped and 0 < steps < accumulate:
            raise ValueError(f"accumulate: nothing was trained: the run has {steps} steps, and an update takes {accumulate}; train "
                             f"anew with --accumulate {steps} or less, or more --epochs")

    def _schedule(self) -> Any:
        options = self.options
        if options.schedule != "constant" and not self.notes["updates"]:
            with self.task.open(options.data) as data:
                batches = self.task.count(data, held_out_rows(data, options))
            steps = -(-batches // max(options.virtual_workers, 1))
            self.notes["updates"] = max(1, steps * options.epochs // options.accumulate)
        return scheduler_of(self.optimizer, options, self.notes["updates"])

    def _evaluate(self, data: Any, held_out: int, step: int) -> None:
        """Evaluates the model. Writes the result to the summary, the run's metrics, and `notes`."""
        notes = self.notes
        if (not held_out and self._eval_data is None) or self._evaluated_at == step:
            return
        rows = self.task.sequences(self._eval_data or data, held_out=held_out, evaluates=True)
        with self.run.phase("evaluate"):
            said = evaluated(self.tuned, rows, lambda: self.run.stop_asked)
        if said is None:
            return  # The evaluation stays due.
        self._evaluated_at = step
        self.said.update(said)
        self.run.log(held_out_loss=said["held_out_loss"], token_accuracy=said["token_accuracy"])
        if notes["due"]:
            lower = not said["held_out_loss"] >= notes["best"]  # NaN is no worse.
            notes.update(due=False, best=min(notes["best"], said["held_out_loss"]), worse=0 if lower else notes["worse"] + 1)
            notes["ended"] = 0 < self.options.patience <= notes["worse"]


def rate(schedule: str, warmup: int, updates: int, done: int) -> float:
    """Returns the factor of the learning rate for the next update, after `done` updates."""
    if done < warmup:
        return (done + 1) / warmup
    if schedule == "constant":
        return 1.0
    left = max(0.0, 1 - (done - warmup) / max(updates - warmup, 1))
    return left if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def step_options(options: TuningOptions) -> dict[str, Any]:
    """Returns the options of a step, for a run or a plan."""
    return {"loss": "mean", "weight": _weight, "accumulate": options.accumulate, "clip_norm": options.clip_norm or None}


def scheduler_of(optimizer: Any, options: TuningOptions, updates: int) -> Any:
    """Returns a scheduler of torch; None where the learning rate is constant."""
    if options.schedule == "constant" and not options.warmup_steps:
        return None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(rate, options.schedule, options.warmup_steps, updates))


def _weight(inputs: dict[str, Any], labels: Any) -> Any:
    return (labels[:, 1:] >= 0).sum()
