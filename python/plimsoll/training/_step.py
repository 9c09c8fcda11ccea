# SPDX-License-Identifier: Apache-2.0
"""TrainingStep: a training step as a transaction, for a loop of your own.

A refusal of memory in the middle of a step leaves gradients half added, batch statistics moved on,
random numbers drawn. Here the step either happens as if nothing had been, or not at all.

    _batch.py, _backward.py    a batch in parts, and its gradients
    _accumulation.py           gradients of several batches, then the step of _update.py
    _transaction.py            what all that changes, and how it is put back
    _retry.py                  what is tried after a refusal
    _admission.py, _need.py    what a step takes, promised beforehand or named by a refusal
    _evaluation.py             evaluations

Reading order: _step_options.py says it; this file is last.
Threads: the thread that trains.
Memory:  during a step, copies of the model's buffers; while the optimizer writes, copies of parameters and
         optimizer states, except of torch's fused optimizers with one parameter group.
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

    A step: gradients are zeroed, `f(*batch)` gives the loss, backward, the optimizer's step. When memory is
    refused, everything is put back to the beginning of the step and it is tried again:

      1. as it was, after the arena's cache went back to the system;
      2. with the modules in `checkpoint` recomputed in backward: less memory, the same bits;
      3. with the batch cut in halves, again and again, where `loss` says how parts add up. This rounds
         differently, so it is kept for the steps that follow, told in `events`, and part of
         state_dict(): a resumed run goes on as this one did.

    When nothing helps, BudgetExceeded is raised, and a checkpoint written now (`commit` does it) resumes
    under a larger limit to the undisturbed bits. It names a limit under which the whole step fits
    (`smallest_limit_bytes`): steps on parts of the batch are traced, replayed at its size, and put back. Where
    not even parts can be traced it names one to try, larger by an eighth or more, under which they can.

    Put back are parameters, optimizers and their states; buffers and attributes of modules; random states
    of torch, NumPy and Python; those of generators of your own, and modules, that `f` can get at; gradients
    of every leaf that the loss depends on, wherever it is. So after any other exception of `f` too. Not put
    back is what `f` changes elsewhere: lists, counters and tensors of your own that are in no module. Nor is a
    parameter without gradients that `f` writes in place, as a momentum encoder's, unless its module is in `others`:
    RuntimeError names it, if it is not written through .data, which torch does not count.

    Each call is a step boundary of the governor (every 10 ms at most): memory that nobody leased, in
    workers too, ends the loop with MemoryPressure between two steps, after `commit`.

    A batch may be a tensor or PackedSequence, or tuples, lists, named tuples, dataclasses and mappings of
    them in any depth. `f` gets the entries of a tuple or list one by one, and anything else as one argument. Rows of
    an EmbeddingStore in the batch reach `f` as their tensor and are applied with the optimizer's step, all
    or nothing: `step((x, y, rows), f)`; a leaf of your own (rows.tensor) only gets its gradient. A Run of several
    ranks, or of virtual workers, refuses them: its tables are those of run.embedding().

    model:      a torch.nn.Module (or several).
    optimizer:  a torch.optim.Optimizer (or several). One of torch's with `fused=True` and a single parameter
                group takes all its memory before it writes. Of any other, parameters and states are copied
                while it steps, which takes their memory and as long as the optimizer itself, or twice that.
    loss:       how the losses of parts, and of the batches in `accumulate`, make that of the whole: "mean",
                "sum", "contrastive" (see contrastive()); None: not at all, so that nothing is cut.
    weight:     how much a part counts in a mean: a function of what `f` is a function of, such as
                `lambda x, y: (y != -100).sum()`, or `lambda x, y: len(x)` for a mean over rows. Without it
                the loss has to end in one of torch's own means, and says itself. Where it does not, or
                where rows of one part count more than those of another, no batch is cut.
    accumulate: batches whose gradients make one step of the optimizer. `updated` says whether a call made it.
    clip_norm:  most that the norm of the parameters' gradients may be (torch.nn.utils.clip_grad_norm_);
                Rows are not counted. `gradient_norm` is what it was before.
    scaler:     a torch.amp.GradScaler. It decides for all optimizers and Rows at once.
    scheduler:  a learning rate scheduler (or several), stepped after each step of the optimizer.
    before_update: called when the gradients are complete, before they are clipped and used.
    split:      (batch, parts) -> a sequence of batches, for batches that have no rows first.
    others:     what else a step changes: generators, and objects with state_dict() and load_state_dict().
    checkpoint: modules to recompute in backward when memory is refused.
    allow_batchnorm_microbatch: cut batches although batch statistics then are of the parts.
    commit:     called when nothing helped, before BudgetExceeded or MemoryPressure is raised: writes
                your checkpoint.
    directory:  where admit() keeps the state meanwhile, on a disk: the run's folder. Default: the
                governor's `directory`, or another folder on a disk; never one in memory.
    events:     a file to which admissions, refusals with what helped, the stop and, at the end of the
                `with` block or at close(), the summary are appended, a line of JSON each; or a function
                that is called with each of them, a dict.
    Errors:     ValueError (options, a module that is wrapped for several ranks, a loss that must be weighed
                and is not); BudgetExceeded as above; RuntimeError naming what could not be put back.
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
        """For plimsoll.Run, whose program may make these functions anew for each call."""
        self._options.weight, self._options.before_update, self._options.split = weight, before_update, split

    def _rows_waiting(self) -> list[Rows]:
        """For plimsoll.Run: Rows whose gradients wait in `accumulate` for the optimizer's step."""
        return self._accumulation.rows_waiting

    def _wait_for(self, rows: list[Rows]) -> None:
        """For plimsoll.Run: they wait in `accumulate`, as when the run's last life ended."""
        self._accumulation.wait_for(rows)

    # ---- How the steps went, and go on ----

    @property
    def parts(self) -> int:
        """Into how many parts a batch is cut. May be set: what the next step begins with."""
        return self._retry.parts

    @parts.setter
    def parts(self, parts: int) -> None:
        self._retry.begin_with(parts, self.recomputes)

    @property
    def recomputes(self) -> bool:
        """Whether the modules in `checkpoint` are recomputed in backward. May be set, too."""
        return self._retry.recomputes

    @recomputes.setter
    def recomputes(self, recomputes: bool) -> None:
        self._retry.begin_with(self.parts, recomputes)

    @property
    def accumulate(self) -> int:
        """Batches whose gradients make one step of the optimizer. May be set between two of its steps."""
        return self._options.accumulate

    @accumulate.setter
    def accumulate(self, accumulate: int) -> None:
        self._options.accumulate = accumulate

    @property
    def clip_norm(self) -> float | None:
        """Most that the norm of the parameters' gradients may be. May be set."""
        return self._options.clip_norm

    @clip_norm.setter
    def clip_norm(self, clip_norm: float | None) -> None:
        self._options.clip_norm = clip_norm

    @property
    def refusals(self) -> int:
        """Steps that had to be tried again."""
        return self._retry.refusals

    @property
    def steps(self) -> int:
        """Steps of the optimizer."""
        return self._accumulation.steps

    @property
    def updated(self) -> bool:
        """Whether the last call stepped the optimizer: not within `accumulate`, nor where the scaler
        found an infinity."""
        return self._accumulation.updated

    @property
    def gradient_norm(self) -> float:
        """The norm of the last step's gradients before clipping; 0 without clip_norm."""
        return self._update.gradient_norm

    @property
    def admitted_bytes(self) -> int:
        """Bytes that admit() has promised to tensors."""
        return self._admission.admitted_bytes

    def __enter__(self) -> TrainingStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Appends the summary to `events`. A second close does nothing."""
        self._events.close(self.summary)

    def summary(self) -> dict[str, Any]:
        """How the steps went, sizes in bytes: status ("stopped" when one did not fit, else "ok"),
        steps, refusals, parts, recomputes, admitted_bytes, tensor_peak_bytes, limit_bytes, and after
        a stop stop_reason and smallest_limit_bytes (0: there is no governor)."""
        governor, stop = Governor.current(), self._events.stop
        ledger = governor.ledger() if governor is not None else None
        return {"status": "stopped" if stop else "ok", "steps": self.steps,
                "refusals": self.refusals, "parts": self.parts, "recomputes": self.recomputes,
                "admitted_bytes": self.admitted_bytes,
                "tensor_peak_bytes": ledger.pools["tensors"].peak_bytes if ledger else 0,
                "limit_bytes": ledger.limit_bytes if ledger else 0, **stop}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs: how batches are cut, what is recomputed, and within
        `accumulate` the gradients so far (not copied). Errors: RuntimeError while Rows wait there."""
        if self._rows_waiting():
            raise RuntimeError("Rows of batches in `accumulate` wait for the optimizer's step: take the "
                               "state_dict() after a call that `updated`")
        return self._state()

    def _state(self) -> dict[str, Any]:
        return {"parts": self.parts, "recomputes": self.recomputes, **self._accumulation.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on as the run did whose state_dict() this is. Errors: KeyError for another's."""
        self._retry.begin_with(int(state["parts"]), bool(state["recomputes"]))
        self._accumulation.load_state(state)

    # ---- Steps ----

    def __call__(self, batch: Any, f: Callable[..., Any]) -> float:
        """One step on `batch` (see the class); returns the loss, a mean or sum over the whole batch."""
        return self._retry.step(self._backward.work(batch, f))

    def contrastive(self, batch: Any, embed: Callable[..., Any],
                    loss: Callable[..., Any]) -> float:
        """One step whose loss compares the rows of a batch; returns the loss.

        embed: part -> embeddings of its rows, a tensor or a tuple of them, rows first.
        loss:  embeddings of the whole batch -> a scalar.
        In parts, embeddings are made without a graph, the loss gives their gradients, and every part
        is embedded again with its own random numbers to carry them on. Source: Gao et al., "Scaling
        Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021), section 3.
        """
        return self._retry.step(self._backward.work(batch, embed, loss))

    def evaluate(self, batch: Any, f: Callable[..., Any]) -> Any:
        """f(*batch) without gradients and in eval mode, in parts where memory is refused.

        What `f` returns for a row must depend on that row alone. Parts are put together: tensors (in
        tuples, lists and mappings too) end to end, rows first; scalars as `loss` says, a mean with
        `weight`, or else by rows. Modes are put back; nothing else is changed but random states.
        Errors: BudgetExceeded when nothing helped; random states are then as before.
        """
        return self._evaluation.make(Batch(batch, self._options.split), f)

    def admit(self, batch: Any, *functions: Callable[..., Any]) -> int:
        """Promises tensors what a step on `batch` takes, the largest that will come; returns the bytes.

        The step is done for real, optimizer included, and everything is put back bit for bit. What it
        leased at its peak, and a sixteenth more, is kept for tensors from now on; where a Run goes on, what is left
        of the sixteenth: what was admitted once is again. Rows are not applied.
        functions: what the steps will be called with: f, or embed and loss of a contrastive one.
        Errors:    BudgetExceeded naming a limit that would do, with everything as before; ValueError
                   without a governor that tensors are leased from.
        """
        return self._admission.of_step(self._backward.work(batch, *functions))

    def admit_evaluation(self, batch: Any, f: Callable[..., Any]) -> int:
        """Does the same as admit() for evaluate(batch, f), so that no evaluation ends a run that training could finish."""
        given = Batch(batch, self._options.split)
        return self._admission.admit(f"an evaluation of {given.rows} rows", given.rows,
                                     lambda: self._evaluation.rehearsed(given, f), lambda: None)

    def rehearse(self, batch: Any, *functions: Callable[..., Any]) -> None:
        """Makes the step of `accumulate` that takes the most, its last, on `batch`, and puts nothing back: for plan_batch().

        From the second call on it finds the gradients of those before it. Errors: BudgetExceeded.
        """
        self._admission.rehearse(self._backward.work(batch, *functions))

    def keep_made(self) -> None:
        """The calls so far are not to be put back any more."""
        self._calls.keep()

    def put_back_made(self) -> bool:
        """Everything is as before the first call since keep_made(). False: it is not, as rows were written, or nothing was kept."""
        return self._calls.put_back() and self._options.handed.keeps_made


def step_of_run(handed: Handed, *given: Any, **options: Any) -> TrainingStep:
    """A step with what a run hands to it. given, options: as TrainingStep's."""
    made = TrainingStep(*given, **options)
    made._take(handed)
    return made
