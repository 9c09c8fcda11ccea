# SPDX-License-Identifier: Apache-2.0
"""TrainingStep: a training step as a transaction, for a loop of your own.

A refusal of memory in the middle of a step leaves gradients half added, batch statistics moved on,
random numbers drawn. Here the step either happens as if nothing had been, or not at all.

Reading order: _batch.py, _transaction.py, this file.
Threads: the thread that trains.
Memory:  during a step, copies of the model's buffers; while the optimizer writes, copies of parameters and
         optimizer states, except of torch's fused optimizers with one parameter group.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..core import _torch_gate
from ..core._numbers import loss_of, real, whole, with_graph
from ..core._random_states import RandomStates
from ..errors import BudgetExceeded, MemoryPressure, NotFoundError
from ..memory._memory import Governor, format_bytes, make_room, pressure_between_steps
from ..memory._refusal import Refusal, unless_refused
from ..memory._scratch import scratch_folder
from ..ranks._group import Solo
from ..ranks._messages import Unweighted
from ..ranks._virtual_workers import Buffers, Node, Tree, VirtualWorkers, WorkerBatches, shares_of
from ..rows._embedding import Rows
from . import _plan_static
from ._batch import Batch, Part, weight_of
from ._lookups import collected
from ._plan_state import TrainingState
from ._reach import is_generator, reached
from ._transaction import Before, Gradients, OptimizersBefore, Together, writes_at_the_end

if TYPE_CHECKING:
    from ..ranks._group import Group
    from ..rows._rank_rows import DealtTable, LookedUp, Owned

_MIB = 1 << 20
_WAYS = ("mean", "sum", "contrastive", None)
_OF_RANKS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


@dataclasses.dataclass(frozen=True)
class Handed:
    """What a plimsoll.Run hands to a step when it is made; without one it is as here."""

    looks: bool = True
    """Looks at the memory; a run does it itself, where it can commit."""
    group: Group = Solo()
    """Those that make the same step."""
    workers: VirtualWorkers | None = None
    """Those that the batch is cut for."""
    tables: Sequence[DealtTable] = ()
    """Whose rows these look up."""
    not_its_own: Sequence[Any] = ()
    """Parameters of other optimizers, whose steps are theirs."""
    keeps_made: bool = False
    """Another step of the same batch may fail."""
    goes_on: bool = False
    """An earlier life of the run was admitted."""
    interruptible: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Inside, a stop of the watcher may be raised. All that happens there is put back."""


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
        if loss not in _WAYS:
            raise ValueError(f"loss: {loss!r} is none of {', '.join(map(repr, _WAYS))}")
        if whole("accumulate:", accumulate, 1) > 1 and loss is None:
            raise ValueError(f"accumulate: {accumulate}; it is 1 or more, and more than 1 wants "
                             "loss=\"mean\" or \"sum\", which says how batches add up")
        if weight is not None and loss != "mean":
            raise ValueError("weight: only the parts of a loss=\"mean\" are weighed")
        if clip_norm is not None:
            real("clip_norm:", clip_norm, 0)
        self._extension = _torch_gate.load()
        self._models, self._optimizers = _listed(model), _listed(optimizer)
        _refuse_closures(self._optimizers)
        _refuse_ranks(self._models)
        self._loss, self._weight, self.accumulate = loss, weight, accumulate
        self.clip_norm, self._schedulers = clip_norm, _listed(scheduler)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._before_update, self._split, self._others = before_update, split, list(others)
        self._checkpoint = list(checkpoint)
        self._commit, self._events, self._directory = commit, events, directory
        self._stop: dict[str, Any] = {}
        self._closed = False
        self._take(Handed())
        self._made: list[Callable[[], Any]] | None = []  # Puts back the batch's calls, in reverse; None: that cannot be.
        self._made_now: list[Callable[[], Any]] = []  # The same of the call that is made.
        self._allow_batchnorm = allow_batchnorm_microbatch
        self._window = _Window()
        self.parts = 1
        """Into how many parts a batch is cut."""
        self.recomputes = False
        """Whether the modules in `checkpoint` are recomputed in backward."""
        self.refusals = 0
        """Steps that had to be tried again."""
        self.steps = 0
        """Steps of the optimizer."""
        self.updated = False
        """Whether the last call stepped the optimizer: not within `accumulate`, nor where the scaler
        found an infinity."""
        self.gradient_norm = 0.0
        """Of the last step's gradients, before they were clipped; 0 without clip_norm."""
        self.admitted_bytes = 0
        """What tensors were promised by admit()."""

    @classmethod
    def _of_run(cls, handed: Handed, *given: Any, **options: Any) -> TrainingStep:
        """For plimsoll.Run: a step with what the run hands to it. given, options: as TrainingStep's."""
        made = cls(*given, **options)
        made._take(handed)
        return made

    def _take(self, handed: Handed) -> None:
        self._looks, self._group, self._workers, self._tables = handed.looks, handed.group, handed.workers, list(handed.tables)
        self._not_its_own, self._keeps_made, self._goes_on = list(handed.not_its_own), handed.keeps_made, handed.goes_on
        self._interruptible = handed.interruptible

    def _call_with(self, *, weight: Callable[..., Any] | None, before_update: Callable[[], Any] | None,
                  split: Callable[[Any, int], Sequence[Any]] | None) -> None:
        """For plimsoll.Run, whose program may make these functions anew for each call."""
        self._weight, self._before_update, self._split = weight, before_update, split

    def _rows_waiting(self) -> list[Any]:
        """For plimsoll.Run: Rows whose gradients wait in `accumulate` for the optimizer's step."""
        return self._window.rows

    def __enter__(self) -> TrainingStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Appends the summary to `events`. A second close does nothing."""
        if not self._closed:
            self._closed = True
            self._append({"event": "summary", **self.summary()})

    def summary(self) -> dict[str, Any]:
        """How the steps went, sizes in bytes: status ("stopped" when one did not fit, else "ok"),
        steps, refusals, parts, recomputes, admitted_bytes, tensor_peak_bytes, limit_bytes, and after
        a stop stop_reason and smallest_limit_bytes (0: there is no governor)."""
        governor = Governor.current()
        ledger = governor.ledger() if governor is not None else None
        return {"status": "stopped" if self._stop else "ok", "steps": self.steps,
                "refusals": self.refusals, "parts": self.parts, "recomputes": self.recomputes,
                "admitted_bytes": self.admitted_bytes,
                "tensor_peak_bytes": ledger.pools["tensors"].peak_bytes if ledger else 0,
                "limit_bytes": ledger.limit_bytes if ledger else 0, **self._stop}

    def admit(self, batch: Any, *functions: Callable[..., Any]) -> int:
        """Promises tensors what a step on `batch` takes, the largest that will come; returns the bytes.

        The step is done for real, optimizer included, and everything is put back bit for bit. What it
        leased at its peak, and a sixteenth more, is kept for tensors from now on; where a Run goes on, what is left
        of the sixteenth: what was admitted once is again. Rows are not applied.
        functions: what the steps will be called with: f, or embed and loss of a contrastive one.
        Errors:    BudgetExceeded naming a limit that would do, with everything as before; ValueError
                   without a governor that tensors are leased from.
        """
        work = self._work(batch, *functions)

        def rehearsed() -> Refusal | None:
            refusal = None
            with self._rehearsal(work):
                # The last batch of a window, and again: then the optimizer's states are there, and gradients of those before it.
                # Rows that wait already are left out: their gradients are set aside.
                for _ in range(2 if self.accumulate > 1 or not all(one.state for one in self._optimizers) else 1):
                    if refusal is None:
                        self._window = self._last_of_window()
                        _, refusal = self._attempt(work, self.parts, self.recomputes, rehearsing=True)
            return refusal

        return self._admit(f"a step of {work.rows} rows", work.rows, rehearsed, lambda: self._need(work))

    def rehearse(self, batch: Any, *functions: Callable[..., Any]) -> None:
        """Makes the step of `accumulate` that takes the most, its last, on `batch`, and puts nothing back: for plan_batch().

        From the second call on it finds the gradients of those before it. Errors: BudgetExceeded.
        """
        work = self._work(batch, *functions)
        before = self._remember(work.rows, *reached([*work.functions, *self._models]))
        self._window = self._last_of_window()
        _, refusal = self._attempt(work, 1, False, rehearsing=True)
        if refusal is not None:
            before.put_back()
            raise BudgetExceeded(str(refusal), "tensors", 0, 0)

    def admit_evaluation(self, batch: Any, f: Callable[..., Any]) -> int:
        """As admit(), of evaluate(batch, f): so that no evaluation ends a run that training could finish."""
        given = Batch(batch, self._split)
        modules, generators = reached([f, *self._models])

        def rehearsed() -> Refusal | None:
            before = self._remember(given.rows, modules, generators)
            try:
                return unless_refused(lambda: self._evaluated(given, f, 1))[1]
            finally:
                before.put_back()

        return self._admit(f"an evaluation of {given.rows} rows", given.rows, rehearsed, lambda: None)

    def _admit(self, what: str, rows: int, rehearsed: Callable[[], Refusal | None],
               need: Callable[[], int | None]) -> int:
        governor = Governor.current()
        if governor is None or not governor.arena_attached:
            raise ValueError("admit: there is no Governor that tensors are leased from: make one "
                             "first, after importing torch: plimsoll.Governor(\"8GiB\")")
        make_room(self._extension)
        self._extension.reset_peak()
        refusal = rehearsed()
        peak = self._extension.arena_stats()["leased_peak_bytes"]
        self._extension.purge()

        def needed_of() -> int:
            needed, room = self._extension.with_margin(peak), governor._left_for_tensors()
            if self._goes_on and peak <= room:  # What is held before anything is leased varies from life to life.
                needed = min(needed, room)
            if refusal or needed > room:
                why = refusal or f"it needs {format_bytes(needed)}, and {format_bytes(room)} is left"
                whole = need() if refusal else self._extension.with_cache_and_margin(peak)
                raise self._refused(f"{what} is not admitted: {why}", whole, "")
            return int(needed)

        needed, promised = self._agreed(needed_of), governor.ledger().pools["tensors"].floor_bytes
        self._agreed(lambda: governor.promise(needed - promised, "tensors") if needed > promised else None)
        self.admitted_bytes = max(needed, promised)
        self._append({"event": "admitted", "rows": rows, "peak_bytes": peak,
                      "admitted_bytes": self.admitted_bytes, "limit_bytes": governor.limit_bytes})
        return self.admitted_bytes

    def __call__(self, batch: Any, f: Callable[..., Any]) -> float:
        """One step on `batch` (see the class); returns the loss, a mean or sum over the whole batch."""
        return self._run(self._work(batch, f))

    def contrastive(self, batch: Any, embed: Callable[..., Any],
                    loss: Callable[..., Any]) -> float:
        """One step whose loss compares the rows of a batch; returns the loss.

        embed: part -> embeddings of its rows, a tensor or a tuple of them, rows first.
        loss:  embeddings of the whole batch -> a scalar.
        In parts, embeddings are made without a graph, the loss gives their gradients, and every part
        is embedded again with its own random numbers to carry them on. Source: Gao et al., "Scaling
        Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021), section 3.
        """
        return self._run(self._work(batch, embed, loss))

    def evaluate(self, batch: Any, f: Callable[..., Any]) -> Any:
        """f(*batch) without gradients and in eval mode, in parts where memory is refused.

        What `f` returns for a row must depend on that row alone. Parts are put together: tensors (in
        tuples, lists and mappings too) end to end, rows first; scalars as `loss` says, a mean with
        `weight`, or else by rows. Modes are put back; nothing else is changed but random states.
        Errors: BudgetExceeded when nothing helped; random states are then as before.
        """
        given = Batch(batch, self._split)
        modules, generators = reached([f, *self._models])
        before = self._remember(given.rows, modules, generators)
        parts, tried_again = 1, False
        while True:
            value, refusal = unless_refused(functools.partial(self._evaluated, given, f, parts))
            if refusal is None:
                return value
            before.put_back()
            make_room(self._extension)
            self.refusals += 1
            if not tried_again:
                tried_again, helped = True, "the same evaluation again"
            elif not given.why_whole and parts < given.rows:
                parts = min(2 * parts, given.rows)
                helped = f"the evaluation in {parts} parts"
            else:
                raise self._refused(f"an evaluation of {given.rows} rows does not fit: {refusal}", None,
                                    f". {given.why_whole}" if given.why_whole else "")
            self._tell(refusal, helped)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must go on with: how batches are cut, what is recomputed, and within
        `accumulate` the gradients so far (not copied). Errors: RuntimeError while Rows wait there."""
        if self._window.rows:
            raise RuntimeError("Rows of batches in `accumulate` wait for the optimizer's step: take the "
                               "state_dict() after a call that `updated`")
        return self._state()

    def _last_of_window(self) -> _Window:
        """Before the last batch of `accumulate`."""
        return _Window(batches=self.accumulate - 1, weight=1.0, first=1.0) if self.accumulate > 1 else _Window()

    def _state(self) -> dict[str, Any]:
        gradients = [p.grad for p in self._trained()] if self._window.batches else []
        return {"parts": self.parts, "recomputes": self.recomputes, "steps": self.steps,
                "batches": self._window.batches, "weight": self._window.weight,
                "first": self._window.first, "gradients": gradients}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on as the run did whose state_dict() this is. Errors: KeyError for another's."""
        self.parts, self.recomputes = int(state["parts"]), bool(state["recomputes"])
        self.steps = int(state["steps"])
        self._window = _Window(batches=int(state.get("batches", 0)), weight=state.get("weight", 0.0),
                               first=state.get("first", 0.0))
        for parameter, gradient in zip(self._trained(), state.get("gradients", [])):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)  # It was read to the host.

    # ---- What a step does ----

    def _work(self, batch: Any, *functions: Callable[..., Any]) -> _Work:
        together = batch if isinstance(batch, WorkerBatches) else WorkerBatches([batch])
        given, absent = [Batch(one, self._split) for one in together], together.absent
        self._refuse_rows([rows for one in given for rows in one.handles])
        if len(functions) == 2:
            return _Work(given, functions, self._contrastive_gradients, absent)
        if len(functions) != 1:
            raise ValueError("a step is of one function of the batch, or of embed and loss")
        if self._loss == "contrastive":
            raise ValueError("a contrastive loss is of the whole batch: use contrastive()")
        return _Work(given, functions, self._gradients, absent)

    def _refuse_rows(self, handles: list[Rows]) -> None:
        """Errors: ValueError for Rows in a batch of several workers, which each would have gradients of alone; on all ranks."""
        workers, name = self._workers, os.path.basename(handles[0]._store.directory) if handles else ""
        if workers is None or not handles:
            return

        def refused() -> None:
            workers.refuse(f"step: Rows of the table {name!r} in a batch", f"use run.embedding({name!r}, …), and look ids up in the "
                           "step's function")

        self._group.alone(refused)

    def _gradients(self, batch: Batch, parts: int, tally: _Tally, f: Callable[..., Any]) -> float:
        total = 0.0
        for part in batch.cut(parts):
            value = loss_of(f(*part.arguments))
            weight = self._weigh(value, part, parts, tally)
            tally.gradients.watch_graph(value)
            if weight == 0:
                continue  # Nothing in it counts; its mean is no number.
            self._backward(value if tally.add(weight) == 1 else value * tally.factor)
            total += float(value.detach()) * (weight if self._loss == "mean" else 1)
        return total / tally.weight if self._loss == "mean" and tally.weight else total

    def _weigh(self, value: Any, part: Part, parts: int, tally: _Tally) -> float:
        """How much of a mean this part is. Errors: Unweighted."""
        if self._loss != "mean":
            return 1.0
        if self._weight is not None:
            return float(self._weight(*part.arguments))
        if parts == 1 and self.accumulate == 1 and self._workers is None:
            return 1.0
        weight, each = weight_of(value, part)
        if tally.each is not None and each is not None and tally.each != each:
            raise Unweighted(f"its loss is a mean of {tally.each:g} numbers a row in one part and of {each:g} "
                             "in another, so the whole batch's would be another mean; weight= would say "
                             "what a part counts")
        tally.each = each
        return weight

    def _backward(self, value: Any) -> None:
        import torch

        with_graph(value)
        (value if self._scaler is None else self._scaler.scale(value)).backward()
        torch.clear_autocast_cache()  # What it holds is of a graph that is gone.

    def _contrastive_gradients(self, batch: Batch, parts: int, tally: _Tally,
                               embed: Callable[..., Any], loss: Callable[..., Any]) -> float:
        import torch

        tally.add(1.0)
        if parts == 1:
            value = loss_of(loss(*_tuple(embed(*batch.arguments()))))
            tally.gradients.watch_graph(value)
            self._backward(value)
            return float(value.detach())
        states: list[RandomStates] = []
        made = []
        generators = [*reached([embed, loss, *self._models])[1], *filter(is_generator, self._others)]
        with torch.no_grad():
            for part in batch.cut(parts):
                states.append(RandomStates(generators, like=states[-1] if states else None))
                made.append(_tuple(embed(*part.arguments)))
        whole: list[Any] = [torch.cat(column).requires_grad_() for column in zip(*made)]
        sizes = [len(columns[0]) for columns in made]
        made.clear()
        value = loss_of(loss(*whole))
        self._backward(value)
        after, begin = RandomStates(generators), 0
        for part, state, size in zip(batch.cut(parts), states, sizes):
            state.put_back()
            again = _tuple(embed(*part.arguments))
            for one in again:
                tally.gradients.watch_graph(one)
            torch.autograd.backward(again, [one.grad[begin:begin + size] for one in whole])
            begin += size
        after.put_back()
        return float(value.detach())

    def _evaluated(self, batch: Batch, f: Callable[..., Any], parts: int) -> Any:
        import torch

        modes = [(part, part.training) for model in self._models for part in model.modules()]
        try:
            for model in self._models:
                model.eval()
            with torch.no_grad():
                made, weights = [], []
                for part in batch.cut(parts):
                    made.append(f(*part.arguments))
                    weights.append(float(self._weight(*part.arguments)) if self._weight else part.rows)
                return made[0] if parts == 1 else _joined(made, weights, self._loss == "sum")
        finally:
            for part, training in modes:
                part.training = training

    # ---- The transaction ----

    def _run(self, work: _Work) -> float:
        if self._looks and (pressure := pressure_between_steps()) is not None:
            raise self._stopped(pressure)
        modules, generators = reached([*work.functions, *self._models])
        _refuse_ranks(modules)
        remember = functools.partial(self._remember, work.rows, modules, generators)
        before = self._group.alone(remember)
        parts, recomputes, tried_again, uncut = self.parts, self.recomputes, False, ""
        last: Refusal | None = None
        while True:
            try:
                value, refusal = self._attempt(work, parts, recomputes)
            except Unweighted as why:
                before.put_back()
                if last is None or parts == 1:
                    raise
                refusal, parts, uncut = last, work.rows, str(why)
            except BaseException:
                before.put_back()
                raise
            if refusal is None:
                break
            before.put_back()
            make_room(self._extension)
            last = refusal
            if uncut:
                self._tell(refusal, "nothing helped: the step was not made")
                raise self._gives_up(refusal, work, uncut)
            self.refusals += 1
            if not tried_again:
                tried_again, helped = True, "the same step again"
            elif self._checkpoint and not recomputes:
                recomputes, helped = True, "recomputing modules in backward"
            elif self._group.all("run.step()", self._may_cut(work) and parts < work.rows):
                parts, helped = min(2 * parts, work.rows), f"the batch in {min(2 * parts, work.rows)} parts"
            else:
                self._tell(refusal, "nothing helped: the step was not made")
                raise self._gives_up(refusal, work)
            self._tell(refusal, helped)
        self.parts, self.recomputes = parts, recomputes
        if self._keeps_made and self._made == []:  # Of several calls of a batch the first one's.
            self._made = [*self._made_now, before.put_back]
        self._made_now = []
        return value

    def keep_made(self) -> None:
        """The calls so far are not to be put back any more."""
        self._made = []

    def put_back_made(self) -> bool:
        """Everything is as before the first call since keep_made(). False: it is not, as rows were written, or nothing was kept."""
        made, self._made = self._made, []
        for put_back in made or ():
            put_back()
        return self._keeps_made and made is not None

    def _remember(self, rows: int, modules: list[Any], generators: list[Any], kept: Sequence[Any] = ()) -> Before:
        """The state before the step; itself tried twice. kept: parameters whose values somebody else puts back."""
        for _ in range(2):
            before, refusal = unless_refused(
                lambda: Before(modules, generators, self._others, self._scaler, kept))
            if before is not None:
                return before
            self.refusals += 1
            make_room(self._extension)
        assert refusal is not None
        raise self._gives_up(refusal, rows)

    def _attempt(self, work: _Work, parts: int, recomputes: bool,
                 rehearsing: bool = False) -> tuple[float, Refusal | None]:
        """(loss, None) with the batch in its window, and at its end the optimizer's step made; or
        (0, why memory was refused) with gradients as before."""
        self._made_now = []
        if self._window.batches == 0:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
        window = dataclasses.replace(self._window, rows=[*self._window.rows, *work.batch.handles])
        whole = window.batches + 1 >= self.accumulate
        told = self._workers is not None and self._workers.told
        gradients = self._set_aside(work, window)
        dealt: list[LookedUp] = []

        def graded() -> tuple[float, float, float]:
            with (recomputed(self._checkpoint if recomputes else ()), collected(gradients) as looked_up,
                  self._interruptible()):
                tally = _Tally(gradients, 0.0 if told else window.first)
                value = (work.gradients(parts, tally) if self._workers is None
                         else self._of_workers(self._workers, work, parts, tally, window, looked_up))
            if self._workers is None:
                window.rows += [rows for rows in looked_up if rows.tensor.grad is not None]
            else:
                dealt.extend(rows for rows in looked_up if rows.gradient is not None)
            window.batches += 1
            if told:
                return value, tally.weight, tally.weight
            window.first = tally.first
            window.weight += tally.weight
            gradients.add_up(self._share(tally.first, tally.weight),
                             self._share(window.first, window.weight) if whole else None)
            weights = (tally.weight, window.weight) if self._loss == "mean" else (work.rows, work.rows)
            return value, *weights

        def made() -> tuple[float, bool]:
            sums = self._loss == "sum"
            node = self._group.gradients(graded, lambda: self._trained() if whole or told else [], self._models, sums)
            owned = [table.owned([rows for rows in dealt if rows.table is table],
                                 lambda rows: 1.0 if sums else rows.weight / node.weight) for table in self._tables]
            if told:  # A window has batches of all workers together, the same for any number of ranks.
                gradients.join(*shares_of(window.weight, node.weight, sums))
                window.weight += node.weight
            return node.loss, whole and self._update([*window.rows, *owned], rehearsing)

        try:
            done, refusal = unless_refused(made)
        except BaseException:
            gradients.put_back()
            raise
        if refusal is not None:
            gradients.put_back()
            return 0.0, refusal
        value, self.updated = done
        if rehearsing:
            return value, None
        if self._keeps_made:
            self._note_made(gradients, wrote_rows=whole and bool(window.rows or dealt))
        if whole:
            for rows in window.rows:
                rows._end()
            self.steps, window = self.steps + 1, _Window()
        self._window = window
        return value, None

    def _note_made(self, gradients: Gradients, wrote_rows: bool) -> None:
        """How the call is put back; the optimizers' part is there already."""
        steps, window = self.steps, self._window

        def forgotten() -> None:
            self.steps, self._window = steps, window

        self._made_now += [gradients.put_back, forgotten]
        if wrote_rows:
            self._made = None

    def _of_workers(self, workers: VirtualWorkers, work: _Work, parts: int, tally: _Tally, window: _Window,
                    looked_up: list[Any]) -> float:
        """The gradients of this process's virtual workers together, and what they weigh; returns their loss. Those of rows that they
        looked up stay each worker's."""
        step = self.steps * self.accumulate + window.batches
        if not workers.told:  # One, which may have batches before this one in its window.
            with workers.seeded(0, step):
                value = work.gradients(parts, tally)
            for rows in looked_up:
                rows.take(self._share(tally.first, tally.weight), tally.weight if self._loss == "mean" else float(work.rows))
            return value
        tree, buffers = Tree(self._loss == "sum"), Buffers(self._models if workers.own > 1 else ())
        for number, one in enumerate(work.each()):
            if one is None:
                tree.add(Node(0.0, 0.0, {}))
                continue
            buffers.turn(number)
            own, before = _Tally(tally.gradients, 0.0), len(looked_up)
            with workers.seeded(number, step):
                value = one.gradients(parts, own)
            weight = own.weight if self._loss == "mean" else float(one.rows)
            for rows in looked_up[before:]:
                rows.take(self._share(own.first, own.weight), weight)
            tree.add(Node(value, weight, tally.gradients.taken(self._share(own.first, own.weight))))
        buffers.end()
        whole = tree.whole()
        tally.gradients.give(whole.gradients)
        tally.first = tally.weight = whole.weight
        return whole.loss

    def _share(self, first: float, weight: float) -> float:
        return 1.0 if self._loss == "sum" or weight == 0 else first / weight

    def _set_aside(self, work: _Work, window: _Window) -> Gradients:
        together = [*self._trained(), *(rows.tensor for rows in window.rows)]
        others = [p for model in self._models for p in model.parameters()]
        return Gradients(together, [*others, *work.tensors()], self._not_its_own)

    def _trained(self) -> list[Any]:
        return [p for one in self._optimizers for group in one.param_groups for p in group["params"]]

    def _update(self, rows: list[Rows | Owned], rehearsing: bool) -> bool:
        """The step of optimizers, Rows and schedulers: of all or of none. False: the scaler skipped it."""
        together = Together(self._optimizers, rows)
        with contextlib.ExitStack() as undo:
            made: bool = self._agreed(lambda: self._updated(together, rehearsing, undo))
            written = self._group.write_last(together.apply_rows, undo) if made and rows else undo.pop_all()
        self._made_now = [written.close] if self._keeps_made and not rehearsing else []
        return made

    def _updated(self, together: Together, rehearsing: bool, undo: contextlib.ExitStack) -> bool:
        import torch

        if self._scaler is not None:
            together.unscale(self._scaler)
        if self._before_update is not None:
            self._before_update()
        if self.clip_norm is not None:
            self.gradient_norm = float(torch.nn.utils.clip_grad_norm_(self._trained(), self.clip_norm))
        together.prepare(check=self._scaler is None, applies=not rehearsing)
        undo.callback(OptimizersBefore(
            self._optimizers, self._schedulers,
            alone=self._scaler is None and not self._schedulers and not self._group.others_may_fail and not self._keeps_made).put_back)
        if self._scaler is None:
            made = together.step()
        else:
            made = bool(self._scaler.step(together))
            self._scaler.update()
        if made:
            for scheduler in self._schedulers:
                scheduler.step()
        return made

    def _agreed(self, work: Callable[[], Any]) -> Any:
        """work(), on all ranks or on none."""
        return self._group.on_all("run.step()", work)

    def _may_cut(self, work: _Work) -> bool:
        return (self._loss is not None and not work.batch.why_whole
                and (self._allow_batchnorm or not self._batchnorms()))

    def _batchnorms(self) -> list[str]:
        import torch

        return [name or type(part).__name__ for model in self._models
                for name, part in model.named_modules()
                if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.training]

    def _gives_up(self, refusal: Refusal, work: _Work | int, uncut: str = "") -> BudgetExceeded:
        advice = "a larger limit, or a smaller batch"
        rows, uncut = (work, uncut) if isinstance(work, int) else (work.rows, uncut or work.batch.why_whole)
        if self._loss is None:
            advice += "; the argument loss=\"mean\" (or \"sum\") of the step lets the batch be cut, where each row has its own share of the loss"
        if self._batchnorms() and not self._allow_batchnorm:
            advice += (f"; {self._batchnorms()[0]} has batch statistics, so the batch is cut only with "
                       "allow_batchnorm_microbatch=True")
        elif self._loss is not None and uncut:
            advice += f"; the batch was not cut: {uncut}"
        if not writes_at_the_end(self._optimizers):
            advice += "; an optimizer with fused=True and one parameter group, which is not copied"
        needed = None if isinstance(work, int) else self._need(work)
        error = self._refused(f"step {self.steps + 1} of {rows} rows does not fit and was not made: "
                              f"{refusal}. Everything is as before it", needed,
                              f". What would help: {advice}", self._need_of_update())
        return self._stopped(error)

    def _stopped(self, error: Any) -> Any:
        """`error`, with what a stop leaves behind: a checkpoint, an event."""
        self._stop = {"stop_reason": str(error), "smallest_limit_bytes": error.smallest_limit_bytes}
        if self._commit is not None:
            self._commit()
        self._append({"event": "stopped", "step": self.steps, **self._stop})
        return error

    def _refused(self, text: str, needed: int | None, advice: str, least: int = 0) -> BudgetExceeded:
        """The exception, with a limit in whole MiB under which `needed` bytes are left.

        needed: None when not even a part was small enough to tell; then one to try, with room to find out.
        least:  bytes that are needed in any case.
        """
        governor = Governor.current()
        if governor is None:
            return BudgetExceeded(text + advice, "tensors", 0, 0)
        self._extension.purge()
        left = governor._left_for_tensors()
        wanted = left + governor._room_to_try() if needed is None else needed
        wanted = max(wanted, least)
        limit = -(-(governor.limit_bytes + max(wanted - left, _MIB)) // _MIB) * _MIB
        limit = self._group.whole(limit)
        text += (f"; too little is left to tell what all of it takes: try a limit of {limit // _MIB} MiB"
                 if needed is None else f"; a limit of {limit // _MIB} MiB would do{governor._lasting(limit - governor.limit_bytes)}")
        error = governor._refusal("tensors", wanted, text + advice)
        error.smallest_limit_bytes = limit
        return error

    @contextlib.contextmanager
    def _rehearsal(self, work: _Work) -> Iterator[None]:
        """Inside, steps may be made; afterwards everything is as it was, on disk meanwhile."""
        modules, generators = reached([*work.functions, *self._models])
        with contextlib.ExitStack() as held:
            def remembered() -> tuple[Before, TrainingState]:
                folder = held.enter_context(tempfile.TemporaryDirectory(
                    prefix="plimsoll-", dir=scratch_folder(self._directory, "directory")))
                state = TrainingState(modules, self._optimizers, self._schedulers, folder)
                held.callback(state.close)
                return self._remember(work.rows, modules, generators, state.parameters), state

            (before, state), window = self._agreed(remembered), self._window
            state.leave_gradients()
            gradients = self._set_aside(work, window)  # Of Rows, and of what else the batch has.
            try:
                yield
            finally:
                gradients.put_back()
                state.put_back()
                before.put_back()
                self._window = window

    def _need(self, work: _Work) -> int | None:
        """About what the whole step leases, from traced gradients of parts of its batch; None: no telling.

        The optimizer is not stepped, so that nothing has to be put back but buffers and random states.
        """
        modules, generators = reached([*work.functions, *self._models])
        before, _ = unless_refused(lambda: Before(modules, generators, self._others, self._scaler))
        if before is None or Governor.current() is None or work.batch.why_whole or self._split or self._tables:
            return None  # Ranks that look rows up would have to make the same parts.
        traces = self._extension.StepTraces()
        last = 0
        for part in (16, 12, 8, 6, 4, 3, 2):
            rows = work.rows // part
            if rows <= last or (rows < 2 and (len(work.functions) == 2 or self._batchnorms())):
                continue
            last, few = rows, work.first(rows)

            def graded(few: _Work = few) -> None:
                gradients = self._set_aside(work, self._window)
                try:
                    with recomputed(self._checkpoint if self.recomputes else ()), collected(gradients):
                        few.gradients(1, _Tally(gradients, 0.0))
                finally:
                    gradients.put_back()

            try:
                traces.add((rows, 0, 0), lambda _, graded=graded: unless_refused(graded)[1])
            except MemoryPressure:
                raise
            except Exception:  # Of a part: so few rows may not be what `f` is for.
                break
            finally:
                before.put_back()
                self._extension.purge()
        try:
            needed = int(traces.predict((work.rows, 0, 0))["admit_bytes"])
        except NotFoundError:
            return None
        needed += self._gradients_that_wait() + self._made_by_first_step()
        return max(needed, self._need_of_update())

    def _gradients_that_wait(self) -> int:
        """What subtrees of this process's virtual workers hold while another worker has its turn."""
        own = 1 if self._workers is None else self._workers.own
        return (own.bit_length() - 1) * sum(p.numel() * p.element_size() for p in self._trained())

    def _made_by_first_step(self) -> int:
        return sum(_plan_static.states_of(one)[0] for one in self._optimizers if not one.state)

    def _need_of_update(self) -> int:
        """What is held while the optimizer writes: gradients, its copies, and a parameter's temporaries."""
        sizes = [p.numel() * p.element_size() for p in self._trained()]
        if not sizes:
            return 0
        moving = sum(sizes) + 2 * max(sizes) + self._made_by_first_step()
        if not writes_at_the_end(self._optimizers) or self._scaler is not None or self._schedulers:
            states = sum(_plan_static.states_of(one)[0] for one in self._optimizers if one.state)
            moving += sum(sizes) + states
        return int(self._extension.with_cache_and_margin(
            self._extension.arena_stats()["live_bytes"] + moving))

    def _tell(self, refusal: Refusal, helped: str) -> None:
        self._append({"event": "refusal", "step": self.steps + 1, "refusal": str(refusal),
                      "next": helped})

    def _append(self, event: dict[str, Any]) -> None:
        if callable(self._events):
            self._events(event)
        elif self._events is not None:
            with open(self._events, "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")


@dataclasses.dataclass
class _Window:
    """Batches since the optimizer's last step."""

    batches: int = 0
    weight: float = 0.0
    first: float = 0.0
    """The weight that others are multiples of: gradients stay of one size, and one batch's unchanged."""
    rows: list[Rows] = dataclasses.field(default_factory=list)


class _Tally:
    """Weights of a batch's parts, as multiples of the window's first."""

    def __init__(self, gradients: Gradients, first: float) -> None:
        self.gradients, self.first = gradients, first
        self.weight, self.factor = 0.0, 1.0
        self.each: float | None = None

    def add(self, weight: float) -> float:
        """What this part's loss is to be multiplied by."""
        self.first = self.first or weight
        self.weight += weight
        self.factor = weight / self.first
        return self.factor


class _Work:
    """A batch, or one for each virtual worker of this process, and how gradients are made."""

    def __init__(self, batches: list[Batch], functions: tuple, how: Callable[..., float], absent: int = 0) -> None:
        self._batches, self.functions, self._how, self._absent = batches, functions, how, absent
        self.batch = max(batches, key=lambda one: one.rows)  # Those of all workers are cut alike.
        self.rows = self.batch.rows

    def gradients(self, parts: int, tally: _Tally) -> float:
        """Adds up the gradients, the batch in so many parts; returns the loss."""
        return self._how(self.batch, 1 if self.batch.why_whole else min(parts, self.rows), tally, *self.functions)

    def each(self) -> Iterator[_Work | None]:
        """Of each batch by itself; None for workers that have none."""
        there = len(self._batches) - self._absent
        return (_Work([one], self.functions, self._how) if k < there else None for k, one in enumerate(self._batches))

    def tensors(self) -> Iterator[Any]:
        """Every tensor of the batches."""
        return (tensor for one in self._batches for tensor in one.tensors())

    def first(self, rows: int) -> _Work:
        """Of the first rows of one batch."""
        return _Work([self.batch.first(rows)], self.functions, self._how)


def _joined(made: list[Any], weights: list[float], sums: bool) -> Any:
    """What the parts of an evaluation gave, as one."""
    import torch

    first = made[0]
    if isinstance(first, dict):
        return {key: _joined([one[key] for one in made], weights, sums) for key in first}
    if isinstance(first, (tuple, list)):
        columns = [_joined(list(column), weights, sums) for column in zip(*made)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if isinstance(first, torch.Tensor) and first.dim() > 0:
        return torch.cat(made)
    if sums:
        return sum(made[1:], first)
    kept = [(one, weight) for one, weight in zip(made, weights) if weight]
    return sum(one * weight for one, weight in kept) / sum(weight for _, weight in kept)


def _refuse_ranks(models: Iterable[Any]) -> None:
    for model in models:
        for part in model.modules():
            wrapped = next((kind.__name__ for kind in type(part).__mro__
                            if kind.__name__ in _OF_RANKS and kind.__module__.startswith("torch.")), "")
            if wrapped:
                raise ValueError(
                    f"model: {wrapped} exchanges gradients in backward, and a step that one rank makes "
                    "again would leave the others waiting: give the module itself. A plimsoll.Run that "
                    "torchrun starts averages the gradients of its ranks; a TrainingStep alone is for one "
                    "process")


def _refuse_closures(optimizers: Iterable[Any]) -> None:
    for one in optimizers:
        step = inspect.signature(type(one).step)
        needed = [name for name, given in step.parameters.items() if given.default is given.empty and given.kind in (
            given.POSITIONAL_ONLY, given.POSITIONAL_OR_KEYWORD, given.KEYWORD_ONLY)][1:]
        if needed:
            raise ValueError(
                f"optimizer: {type(one).__name__}.step() needs a {needed[0]}, which computes the loss as often as it likes, and a "
                f"step that may be put back has none. Call {type(one).__name__}.step({needed[0]}) yourself, in the body of "
                "`for batch in run.steps(…)`, or take an optimizer that steps by the gradients")


@contextlib.contextmanager
def recomputed(modules: Iterable[Any]) -> Iterator[None]:
    """Inside, these modules keep no activations: backward runs their forward again, dropout and all."""
    from torch.utils.checkpoint import checkpoint

    patched = []
    try:
        for module in modules:
            patched.append((module, module.__dict__.get("forward")))
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
        yield
    finally:
        for module, own in patched:
            if own is None:
                del module.forward  # The class's is seen again.
            else:
                module.forward = own


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
