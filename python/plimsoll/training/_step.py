# SPDX-License-Identifier: Apache-2.0
"""TrainingStep: a training step as a transaction, for a loop of your own.

A refusal of memory in the middle of a step leaves gradients half added, batch statistics moved on,
random numbers drawn. Here the step either succeeds as if memory had never been refused, or is undone.

    _batch.py, _backward.py    a batch in parts, and its gradients
    _accumulation.py           gradients of several batches, then the step of _update.py
    _transaction.py            the state that a step changes, and how it is restored
    _retry.py                  the tries after a refusal
    _admission.py, _need.py    the memory of a step, reserved beforehand or named by a refusal
    _evaluation.py             evaluations

Reading order: _step_options.py says it; this file is last.
Threads: the thread that trains.
Memory:  during a step, copies of the model's buffers. While the optimizer writes, copies of parameters and
         optimizer states; none for a fused optimizer of torch's with one parameter group.
"""
from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..core import _torch_gate
from ..memory._memory import Governor
from ..rows._embedding import Rows
from ._accumulation import Accumulation
from ._admission import Admission
from ._backward import Backward
from ._batch import Batch
from ._evaluation import Evaluation
from ._need import Need
from ._retry import Retry
from ._step_events import Events
from ._step_options import Handed, Options, check, listed, refuse_closures, refuse_ranks
from ._transaction import CallsMade
from ._update import Update


class TrainingStep:
    """Runs training steps that survive a refusal of memory with the same bits, or leave no trace.

        step = plimsoll.TrainingStep(model, optimizer, loss="mean")
        for x, y in loader:
            value = step((x, y), lambda x, y: F.cross_entropy(model(x), y))

    A step zeroes the gradients, computes the loss `f(*batch)`, runs backward, and steps the optimizer. When memory
    is refused, the state is restored to the beginning of the step, and the step is tried again:

      1. unchanged, after the arena's cache was returned to the system;
      2. with the modules in `checkpoint` recomputed in backward: less memory, the same bits;
      3. with the batch cut in halves, again and again, if `loss` says how parts add up. This rounds
         differently. So the number of parts holds for all later steps, is logged in `events`, and is
         part of state_dict(): a resumed run cuts in the same way.

    When nothing helps, BudgetExceeded is raised. A checkpoint written then (by `commit`) resumes under a larger
    limit to the same bits. The exception names a sufficient limit (`smallest_limit_bytes`), found by tracing
    steps on parts of the batch. If not even parts can be traced, it names a limit to try, at least an eighth
    larger.

    Restored are parameters, optimizers and their states; buffers and attributes of modules; random states of
    torch, NumPy and Python; your own generators and modules that are reachable from `f`; gradients of all
    leaves that the loss depends on. They are restored after any other exception of `f`, too. Other objects that
    `f` changes are not restored: lists, counters and tensors that are in no module. A parameter without gradients
    that `f` writes in place (a momentum encoder's) is restored only if its module is in `others`; otherwise
    RuntimeError names it. Writes through .data go unnoticed, as torch does not count them.

    Each call is a step boundary of the governor (at most every 10 ms). Unleased memory beyond the allowance, in
    workers too, ends the loop with MemoryPressure between two steps, after `commit`.

    A batch may be a tensor or PackedSequence, or tuples, lists, named tuples, dataclasses and mappings of them
    in any depth. `f` gets the entries of a tuple or list one by one, and anything else as one argument. Rows of
    an EmbeddingStore in the batch reach `f` as their tensor. They are applied with the optimizer's step, all or
    nothing: `step((x, y, rows), f)`. If you pass rows.tensor instead, it only gets its gradient. A Run of several
    ranks or virtual workers refuses Rows: it takes its tables from run.embedding().

    model:      a torch.nn.Module (or several).
    optimizer:  a torch.optim.Optimizer (or several). A fused optimizer of torch's with a single parameter group
                allocates all its memory before it writes. For any other, parameters and states are copied
                during its step. This takes their memory, and one to two times the optimizer's own time.
    loss:       how the losses of parts, and of the batches in `accumulate`, add up: "mean", "sum",
                "contrastive" (see contrastive()); None: they do not, and no batch is cut.
    weight:     weight of a part in a mean: a function with the arguments of `f`, such as
                `lambda x, y: (y != -100).sum()`, or `lambda x, y: len(x)` for a mean over rows. Without it
                the loss must end in one of torch's own means, whose weight is known. Otherwise, and where
                rows of different parts count differently, no batch is cut.
    accumulate: number of batches whose gradients make one optimizer step. `updated` tells whether a call made it.
    clip_norm:  largest norm of the parameters' gradients (torch.nn.utils.clip_grad_norm_). Rows are not
                counted. `gradient_norm` is the norm before clipping.
    scaler:     a torch.amp.GradScaler. It decides for all optimizers and Rows at once.
    scheduler:  a learning rate scheduler (or several), stepped after each optimizer step.
    before_update: called once the gradients are complete, before they are clipped and used.
    split:      (batch, parts) -> a sequence of batches, for batches whose first dimension is not rows.
    others:     other objects that a step changes: generators, and objects with state_dict() and load_state_dict().
    checkpoint: modules to recompute in backward when memory is refused.
    allow_batchnorm_microbatch: cuts batches even though batch statistics are then computed per part.
    commit:     writes your checkpoint. Called when nothing helped, before BudgetExceeded or MemoryPressure
                is raised.
    directory:  folder on a disk where admit() keeps the state meanwhile: the run's folder. Default: the
                governor's `directory`, or another folder on a disk; never one in memory.
    events:     a file to which JSON lines are appended: admissions, refusals and their remedies, the stop, and
                the summary (at the end of the `with` block or at close()); or a function that is called
                with each event, a dict.
    Errors:     ValueError (options, a module wrapped for several ranks, a loss whose weight is unknown);
                BudgetExceeded as above; RuntimeError naming state that could not be restored.
    """

    def __init__(self, model: Any, optimizer: Any, *, loss: str | None = None,
                 weight: Callable[..., Any] | None = None, accumulate: int = 1,
                 clip_norm: float | None = None, scaler: Any = None, scheduler: Any = None,
                 before_update: Callable[[], Any] | None = None,
                 split: Callable[[Any, int], Sequence[Any]] | None = None,
                 others: Iterable[Any] = (), checkpoint: Iterable[Any] = (),
                 allow_batchnorm_microbatch: bool = False,
                 commit: Callable[[], Any] | None = None,
                 directory: str | os.PathLike[str] | None = None,
                 events: str | os.PathLike[str] | Callable[[dict[str, Any]], Any] | None = None) -> None:
        check(loss, weight, accumulate, clip_norm)
        extension = _torch_gate.load()
        models, optimizers = listed(model), listed(optimizer)
        refuse_closures(optimizers)
        refuse_ranks(models)
        self._options = Options(
            extension=extension, models=models, optimizers=optimizers, schedulers=listed(scheduler), others=list(others),
            checkpoint=list(checkpoint), scaler=scaler if scaler is not None and scaler.is_enabled() else None, loss=loss,
            weight=weight, accumulate=accumulate, clip_norm=clip_norm, before_update=before_update, split=split,
            allow_batchnorm=allow_batchnorm_microbatch, directory=directory)
        self._events = Events(events, commit)
        self._take(Handed())

    def _take(self, handed: Handed) -> None:
        self._options = options = dataclasses.replace(self._options, handed=handed)
        self._calls, self._backward, self._update = CallsMade(), Backward(options), Update(options)
        self._accumulation = Accumulation(options, self._backward, self._update)
        need = Need(options, self._accumulation)
        self._retry = Retry(options, self._accumulation, need, self._events, self._calls)
        self._admission = Admission(options, self._accumulation, need, self._retry, self._events)
        self._evaluation = Evaluation(options, need, self._retry)

    def _call_with(self, *, weight: Callable[..., Any] | None, before_update: Callable[[], Any] | None,
                  split: Callable[[Any, int], Sequence[Any]] | None) -> None:
        """Sets functions that a program may make anew for each call. For plimsoll.Run."""
        self._options.weight, self._options.before_update, self._options.split = weight, before_update, split

    def _rows_waiting(self) -> list[Rows]:
        """Returns the Rows whose gradients wait in `accumulate` for the optimizer's step. For plimsoll.Run."""
        return self._accumulation.rows_waiting

    def _wait_for(self, rows: list[Rows]) -> None:
        """Adds `rows` to those that wait in `accumulate`, as when the run last ended. For plimsoll.Run."""
        self._accumulation.wait_for(rows)

    # ---- How the steps went, and go on ----

    @property
    def parts(self) -> int:
        """The number of parts a batch is cut into. Settable: the next step starts with it."""
        return self._retry.parts

    @parts.setter
    def parts(self, parts: int) -> None:
        self._retry.begin_with(parts, self.recomputes)

    @property
    def recomputes(self) -> bool:
        """Whether the modules in `checkpoint` are recomputed in backward. Settable."""
        return self._retry.recomputes

    @recomputes.setter
    def recomputes(self, recomputes: bool) -> None:
        self._retry.begin_with(self.parts, recomputes)

    @property
    def accumulate(self) -> int:
        """Number of batches whose gradients make one optimizer step. Settable between two optimizer steps."""
        return self._options.accumulate

    @accumulate.setter
    def accumulate(self, accumulate: int) -> None:
        self._options.accumulate = accumulate

    @property
    def clip_norm(self) -> float | None:
        """The largest allowed norm of the parameters' gradients. Settable."""
        return self._options.clip_norm

    @clip_norm.setter
    def clip_norm(self, clip_norm: float | None) -> None:
        self._options.clip_norm = clip_norm

    @property
    def refusals(self) -> int:
        """Number of tries that memory refused."""
        return self._retry.refusals

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return self._accumulation.steps

    @property
    def updated(self) -> bool:
        """Whether the last call stepped the optimizer. False within `accumulate`, and where the scaler found an infinity."""
        return self._accumulation.updated

    @property
    def gradient_norm(self) -> float:
        """The norm of the last step's gradients before clipping; 0 without clip_norm."""
        return self._update.gradient_norm

    @property
    def admitted_bytes(self) -> int:
        """The bytes that admit() has reserved for tensors."""
        return self._admission.admitted_bytes

    def __enter__(self) -> TrainingStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Appends the summary to `events`. A second close does nothing."""
        self._events.close(self.summary)

    def summary(self) -> dict[str, Any]:
        """Returns how the steps went, sizes in bytes: status ("stopped" after a step that did not fit, else "ok"),
        steps, refusals, parts, recomputes, admitted_bytes, tensor_peak_bytes, limit_bytes. After a stop also
        stop_reason and smallest_limit_bytes (0: there is no governor)."""
        governor, stop = Governor.current(), self._events.stop
        ledger = governor.ledger() if governor is not None else None
        return {"status": "stopped" if stop else "ok", "steps": self.steps,
                "refusals": self.refusals, "parts": self.parts, "recomputes": self.recomputes,
                "admitted_bytes": self.admitted_bytes,
                "tensor_peak_bytes": ledger.pools["tensors"].peak_bytes if ledger else 0,
                "limit_bytes": ledger.limit_bytes if ledger else 0, **stop}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for load_state_dict(): how batches are cut, whether modules are recomputed, and within
        `accumulate` the gradients so far (not copied). Errors: RuntimeError while Rows wait in `accumulate`."""
        if self._rows_waiting():
            raise RuntimeError("Rows of batches in `accumulate` wait for the optimizer's step: take the "
                               "state_dict() after a call that `updated`")
        return self._state()

    def _state(self) -> dict[str, Any]:
        return {"parts": self.parts, "recomputes": self.recomputes, **self._accumulation.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the state that state_dict() returned. Errors: KeyError for any other dict."""
        self._retry.begin_with(int(state["parts"]), bool(state["recomputes"]))
        self._accumulation.load_state(state)

    # ---- Steps ----

    def __call__(self, batch: Any, f: Callable[..., Any]) -> float:
        """Makes one step on `batch` (see the class). Returns the loss, a mean or sum over the whole batch."""
        return self._retry.step(self._backward.work(batch, f))

    def contrastive(self, batch: Any, embed: Callable[..., Any],
                    loss: Callable[..., Any]) -> float:
        """Makes one step whose loss compares the rows of a batch. Returns the loss.

        embed: part -> embeddings of its rows, a tensor or a tuple of them, rows first.
        loss:  embeddings of the whole batch -> a scalar.
        A batch in parts is embedded without a graph, and the loss gives the embeddings' gradients. Then every
        part is embedded again, with the same random numbers, for backward. Source: Gao et al., "Scaling
        Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021), section 3.
        """
        return self._retry.step(self._backward.work(batch, embed, loss))

    def evaluate(self, batch: Any, f: Callable[..., Any]) -> Any:
        """Returns f(*batch) without gradients and in eval mode, in parts where memory is refused.

        The result of `f` for a row must depend on that row alone. Parts are joined: tensors (in tuples, lists and
        mappings too) end to end along the rows; scalars as `loss` says, a mean weighted by `weight` or by rows.
        Modes are put back; only random states change.
        Errors: BudgetExceeded where nothing helped. Random states are then as before.
        """
        return self._evaluation.make(Batch(batch, self._options.split), f)

    def admit(self, batch: Any, *functions: Callable[..., Any]) -> int:
        """Reserves the memory of a step on `batch`, the largest batch to come. Returns the reserved bytes.

        The step is made for real, optimizer included, and undone bit for bit. Its peak and a sixteenth more are
        reserved for tensors from now on. A resumed Run may have less of the sixteenth left, and reserves that.
        Rows are not applied.
        functions: arguments of the steps to come: `f`; or `embed` and `loss` of a contrastive step.
        Errors:    BudgetExceeded with a sufficient limit, everything as before; ValueError
                   without a governor that tensors are leased from.
        """
        return self._admission.of_step(self._backward.work(batch, *functions))

    def admit_evaluation(self, batch: Any, f: Callable[..., Any]) -> int:
        """Reserves the memory of evaluate(batch, f), as admit() does. No evaluation then ends a run that could finish its training."""
        given = Batch(batch, self._options.split)
        return self._admission.admit(f"an evaluation of {given.rows} rows", given.rows,
                                     lambda: self._evaluation.rehearsed(given, f), lambda: None)

    def rehearse(self, batch: Any, *functions: Callable[..., Any]) -> None:
        """Makes the step of `accumulate` that takes the most memory, its last, on `batch`. Undoes nothing. For plan_batch().

        From the second call on the gradients of earlier calls exist. Errors: BudgetExceeded.
        """
        self._admission.rehearse(self._backward.work(batch, *functions))

    def keep_made(self) -> None:
        """Makes the calls so far final: put_back_made() no longer undoes them."""
        self._calls.keep()

    def put_back_made(self) -> bool:
        """Undoes the calls since keep_made(). Returns False where it cannot: rows were written, or nothing was kept."""
        return self._calls.put_back() and self._options.handed.keeps_made


def step_of_run(handed: Handed, *given: Any, **options: Any) -> TrainingStep:
    """Returns a TrainingStep with the settings of a run. given, options: arguments of TrainingStep."""
    made = TrainingStep(*given, **options)
    made._take(handed)
    return made
