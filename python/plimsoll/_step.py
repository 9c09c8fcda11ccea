# SPDX-License-Identifier: Apache-2.0
"""TrainingStep: a training step as a transaction, for a loop of your own.

A refusal of memory in the middle of a step leaves gradients half added, batch statistics moved on,
random numbers drawn. Here the step either happens as if nothing had been, or not at all.

Threads: the thread that trains.
Memory:  copies of the model's buffers, and of one number per optimizer state, during a step.
"""
from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import tempfile
import traceback
from typing import Any, Callable, Iterable, Iterator

from . import _plan_static, _torch_gate
from ._memory import Governor, format_bytes, pressure_between_steps
from ._plan_state import TrainingState
from ._random_states import RandomStates
from ._scratch import scratch_folder
from .errors import BudgetExceeded, NotFoundError

_MIB = 1 << 20
_WAYS = ("mean", "sum", "contrastive", None)


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

    When nothing helps, BudgetExceeded is raised: model, optimizer and random states are as before
    the step, so a checkpoint written now (`commit` does it) resumes under a larger limit to the
    undisturbed bits. It names a limit under which the whole step fits (`smallest_limit_bytes`): steps
    on parts of the batch are traced, replayed at its size, and put back.

    Each step is a step boundary of the governor (every 10 ms at most): memory that nobody leased, in
    workers too, ends the loop with MemoryPressure between two steps, after `commit`.

    admit() does the largest step that will come before the first one is trained, so that samples may
    grow to it: either the limit is enough, or you know now.

    model:      a torch.nn.Module (or several): whose buffers are put back.
    optimizer:  a torch.optim.Optimizer; `fused=True` where torch has it, so that it allocates nothing
                between its first write and its last.
    loss:       how the losses of parts make that of the batch: "mean" over rows, "sum", "contrastive"
                (see contrastive()); None: not at all, so that the batch is never cut.
    checkpoint: modules to recompute in backward when memory is refused.
    allow_batchnorm_microbatch: cut batches although batch statistics then are of the parts.
    commit:     called when nothing helped, before BudgetExceeded or MemoryPressure is raised: writes
                your checkpoint.
    directory:  where admit() keeps the state meanwhile, on a disk: the run's folder. Default: the
                governor's `directory`, or another folder on a disk; never one in memory.
    events:     a file to which admissions, refusals with what helped, the stop and, at the end of the
                `with` block or at close(), the summary are appended, a line of JSON each.
    Errors:     ValueError (options); BudgetExceeded as above; RuntimeError when the optimizer was
                refused half way, after it had written parameters.
    """

    def __init__(self, model: Any, optimizer: Any, *, loss: str | None = None,
                 checkpoint: Iterable[Any] = (), allow_batchnorm_microbatch: bool = False,
                 commit: Callable[[], Any] | None = None,
                 directory: str | os.PathLike[str] | None = None,
                 events: str | os.PathLike[str] | None = None) -> None:
        if loss not in _WAYS:
            raise ValueError(f"loss: {loss!r} is none of {', '.join(map(repr, _WAYS))}")
        self._extension = _torch_gate.load()
        self._models = list(model) if isinstance(model, (list, tuple)) else [model]
        self._optimizer, self._loss = optimizer, loss
        self._checkpoint = list(checkpoint)
        self._commit, self._events, self._directory = commit, events, directory
        self._stop: dict[str, Any] = {}
        self._closed = False
        self._allow_batchnorm = allow_batchnorm_microbatch
        self.parts = 1
        """Into how many parts a batch is cut."""
        self.recomputes = False
        """Whether the modules in `checkpoint` are recomputed in backward."""
        self.refusals = 0
        """Steps that had to be tried again."""
        self.steps = 0
        self.admitted_bytes = 0
        """What tensors were promised by admit()."""

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
        a stop stop_reason and smallest_limit_bytes (0: not known)."""
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
        leased at its peak, and a sixteenth more, is kept for tensors from now on.
        functions: what the steps will be called with: f, or embed and loss of a contrastive one.
        Errors:    BudgetExceeded naming a limit that would do, with everything as before; ValueError
                   without a governor that tensors are leased from.
        """
        governor = Governor.current()
        if governor is None or not governor.arena_attached:
            raise ValueError("admit: there is no Governor that tensors are leased from: make one "
                             "first, after importing torch: plimsoll.Governor(\"8GiB\")")
        work = self._work(batch, *functions)
        with self._rehearsal():
            self._extension.purge()
            self._extension.reset_peak()
            _, refusal = self._attempt(work.gradients, min(self.parts, work.rows), self.recomputes)
            peak = self._extension.arena_stats()["leased_peak_bytes"]
        self._extension.purge()
        needed, room = self._extension.with_margin(peak), governor._left_for_tensors()
        if refusal or needed > room:
            why = refusal or f"it needs {format_bytes(needed)}, and {format_bytes(room)} is left"
            needed = self._need(work) if refusal else self._extension.with_cache_and_margin(peak)
            raise self._refused(f"a step of {work.rows} rows is not admitted: {why}", needed, "")
        promised = governor.ledger().pools["tensors"].floor_bytes
        if needed > promised:
            governor.promise(needed - promised, "tensors")
        self.admitted_bytes = max(needed, promised)
        self._append({"event": "admitted", "rows": work.rows, "peak_bytes": peak,
                      "admitted_bytes": self.admitted_bytes, "limit_bytes": governor.limit_bytes})
        return self.admitted_bytes

    def __call__(self, batch: Any, f: Callable[..., Any]) -> float:
        """One step on `batch`, a tensor or a tuple of them, rows first; returns the loss."""
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

    # ---- What a step does ----

    def _work(self, batch: Any, *functions: Callable[..., Any]) -> _Work:
        batch = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        if len(functions) == 2:
            return _Work(batch, functions, self._contrastive_gradients)
        if len(functions) != 1:
            raise ValueError("a step is of one function of the batch, or of embed and loss")
        if self._loss == "contrastive":
            raise ValueError("a contrastive loss is of the whole batch: use contrastive()")
        return _Work(batch, functions, self._gradients)

    def _gradients(self, batch: tuple, parts: int, f: Callable[..., Any]) -> float:
        rows, total = len(batch[0]), 0.0
        for begin, end in _cuts(rows, parts):
            value = f(*(one[begin:end] for one in batch))
            if parts > 1 and self._loss == "mean":
                value = value * ((end - begin) / rows)
            value.backward()
            total += float(value.detach())
        return total

    def _contrastive_gradients(self, batch: tuple, parts: int, embed: Callable[..., Any],
                               loss: Callable[..., Any]) -> float:
        import torch

        if parts == 1:
            value = loss(*_tuple(embed(*batch)))
            value.backward()
            return float(value.detach())
        cuts, states, made = _cuts(len(batch[0]), parts), [], []
        with torch.no_grad():
            for begin, end in cuts:
                states.append(torch.get_rng_state())
                made.append(_tuple(embed(*(one[begin:end] for one in batch))))
        whole = [torch.cat(column).requires_grad_() for column in zip(*made)]
        made.clear()
        value = loss(*whole)
        value.backward()
        after = torch.get_rng_state()
        for (begin, end), state in zip(cuts, states):
            torch.set_rng_state(state)
            again = _tuple(embed(*(one[begin:end] for one in batch)))
            torch.autograd.backward(again, [column.grad[begin:end] for column in whole])
        torch.set_rng_state(after)
        return float(value.detach())

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must go on with: how batches are cut and what is recomputed."""
        return {"parts": self.parts, "recomputes": self.recomputes, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on as the run did whose state_dict() this is. Errors: KeyError for another's."""
        self.parts, self.recomputes = int(state["parts"]), bool(state["recomputes"])
        self.steps = int(state["steps"])

    # ---- The transaction ----

    def _run(self, work: _Work) -> float:
        if (pressure := pressure_between_steps()) is not None:
            raise self._stopped(pressure)
        rows, gradients = work.rows, work.gradients
        before = self._remember(rows)
        parts, recomputes, tried_again = self.parts, self.recomputes, False
        while True:
            value, refusal = self._attempt(gradients, min(parts, rows), recomputes)
            if not refusal:
                break
            before.put_back()
            self._optimizer.zero_grad()
            self._extension.purge()
            self.refusals += 1
            if not tried_again:
                tried_again, helped = True, "the same step again"
            elif self._checkpoint and not recomputes:
                recomputes, helped = True, "recomputing modules in backward"
            elif self._may_cut() and parts < rows:
                parts, helped = min(2 * parts, rows), f"the batch in {min(2 * parts, rows)} parts"
            else:
                self._tell(refusal, "nothing helped: the step was not made")
                raise self._gives_up(refusal, rows, work)
            self._tell(refusal, helped)
        self.parts, self.recomputes = parts, recomputes
        self.steps += 1
        return value

    def _remember(self, rows: int) -> _Before:
        """The state before the step; itself tried twice."""
        for _ in range(2):
            before, refusal = unless_refused(lambda: _Before(self._models))
            if before is not None:
                return before
            self.refusals += 1
            self._extension.purge()
        raise self._gives_up(refusal, rows)

    def _attempt(self, gradients: Callable[[int], float], parts: int,
                 recomputes: bool) -> tuple[float, str]:
        """(loss, "") with the optimizer's step made, or (0, why memory was refused)."""
        def work() -> float:
            self._optimizer.zero_grad()
            with recomputed(self._checkpoint if recomputes else ()):
                value = gradients(parts)
            self._optimize()
            return value

        value, refusal = unless_refused(work)
        return value or 0.0, refusal

    def _optimize(self) -> None:
        """The optimizer's step; refused, it goes through when nothing but step counts has moved."""
        import torch

        watched = [p for group in self._optimizer.param_groups for p in group["params"]]
        counts = []
        for state in self._optimizer.state.values():
            for name, entry in state.items():
                if name == "step" and isinstance(entry, torch.Tensor):
                    counts.append((entry, entry.item()))
                elif isinstance(entry, torch.Tensor):
                    watched.append(entry)
        versions = [(one, one._version) for one in watched]
        known = set(self._optimizer.state)
        try:
            self._optimizer.step()
        except (torch.OutOfMemoryError, BudgetExceeded) as error:
            if any(one._version != version for one, version in versions):
                raise RuntimeError(
                    f"memory was refused after {type(self._optimizer).__name__} had updated some "
                    "parameters and not others: go on from the last checkpoint, with fused=True or "
                    "a larger limit") from error
            for entry, count in counts:
                entry.fill_(count)
            for key in [key for key in self._optimizer.state if key not in known]:
                del self._optimizer.state[key]
            raise

    def _may_cut(self) -> bool:
        return self._loss is not None and (self._allow_batchnorm or not self._batchnorms())

    def _batchnorms(self) -> list[str]:
        import torch

        return [name or type(part).__name__ for model in self._models
                for name, part in model.named_modules()
                if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.training]

    def _gives_up(self, refusal: str, rows: int, work: _Work | None = None) -> BudgetExceeded:
        advice = "a larger limit, or a smaller batch"
        if self._loss is None:
            advice += "; with loss=\"mean\" or \"sum\" the batch may be cut"
        elif self._batchnorms() and not self._allow_batchnorm:
            advice += (f"; {self._batchnorms()[0]} has batch statistics, so the batch is cut only with "
                       "allow_batchnorm_microbatch=True")
        needed = self._need(work) if work is not None else 0
        error = self._refused(f"step {self.steps + 1} of {rows} rows does not fit and was not made: "
                              f"{refusal}. Everything is as before it", needed,
                              f". What would help: {advice}")
        return self._stopped(error)

    def _stopped(self, error: Any) -> Any:
        """`error`, with what a stop leaves behind: a checkpoint, an event."""
        self._stop = {"stop_reason": str(error), "smallest_limit_bytes": error.smallest_limit_bytes}
        if self._commit is not None:
            self._commit()
        self._append({"event": "stopped", "step": self.steps, **self._stop})
        return error

    def _refused(self, text: str, needed: int, advice: str) -> BudgetExceeded:
        """The exception, with a limit in whole MiB under which `needed` bytes are left; 0: unknown."""
        governor = Governor.current()
        if governor is None:
            return BudgetExceeded(text + advice, "tensors", 0, 0)
        self._extension.purge()
        limit = 0
        if needed:
            more = max(needed - governor._left_for_tensors(), _MIB)
            limit = -(-(governor.limit_bytes + more) // _MIB) * _MIB
            text += f"; a limit of {limit // _MIB} MiB would do"
        error = governor._refusal("tensors", needed, text + advice)
        error.smallest_limit_bytes = limit
        return error

    @contextlib.contextmanager
    def _rehearsal(self) -> Iterator[None]:
        """Inside, steps may be made; afterwards everything is as it was, on disk meanwhile."""
        with tempfile.TemporaryDirectory(
                prefix="plimsoll-", dir=scratch_folder(self._directory, "directory")) as folder:
            state = TrainingState(self._models, [self._optimizer], [], folder)
            try:
                yield
            finally:
                self._optimizer.zero_grad()
                state.put_back()
                state.close()

    def _need(self, work: _Work) -> int:
        """About what the whole step leases, from traced gradients of parts of its batch; 0: no telling.

        The optimizer is not stepped, so that nothing has to be put back but buffers and random states.
        """
        before, _ = unless_refused(lambda: _Before(self._models))
        if before is None or Governor.current() is None:
            return 0
        traces = self._extension.StepTraces()
        last = 0
        for part in (16, 12, 8, 6, 4, 3, 2):
            rows = work.rows // part
            if rows <= last or (len(work.functions) == 2 and rows < 2):
                continue
            last, few = rows, work.first(rows)

            def graded(few: _Work = few) -> None:
                self._optimizer.zero_grad()
                with recomputed(self._checkpoint if self.recomputes else ()):
                    few.gradients(1)

            try:
                traces.add((rows, 0, 0), lambda _, graded=graded: unless_refused(graded)[1])
            except BudgetExceeded:
                break
            finally:
                before.put_back()
                self._optimizer.zero_grad()
                self._extension.purge()
        try:
            needed = int(traces.predict((work.rows, 0, 0))["admit_bytes"])
        except NotFoundError:
            return 0
        # States that its first step will make.
        made = bool(self._optimizer.state)
        return needed + (0 if made else _plan_static.states_of(self._optimizer)[0])

    def _tell(self, refusal: str, helped: str) -> None:
        self._append({"event": "refusal", "step": self.steps + 1, "refusal": refusal, "next": helped})

    def _append(self, event: dict[str, Any]) -> None:
        if self._events is not None:
            with open(self._events, "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")


class _Work:
    """A batch, and how its gradients are made."""

    def __init__(self, batch: tuple, functions: tuple, how: Callable[..., float]) -> None:
        self.batch, self.functions, self._how = batch, functions, how
        self.rows = len(batch[0])

    def gradients(self, parts: int) -> float:
        """Adds up the gradients, the batch in so many parts; returns the loss."""
        return self._how(self.batch, parts, *self.functions)

    def first(self, rows: int) -> _Work:
        return _Work(tuple(one[:rows] for one in self.batch), self.functions, self._how)


class _Before:
    """Random states and buffers at the beginning of a step."""

    def __init__(self, models: list[Any]) -> None:
        self._random = RandomStates()
        self._buffers = [(buffer, buffer.clone()) for model in models
                         for buffer in model.buffers()]

    def put_back(self) -> None:
        import torch

        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        self._random.put_back()


def unless_refused(work: Callable[[], Any]) -> tuple[Any, str]:
    """(work(), ""); or (None, why memory was refused).

    Then nothing is left of it: what its frames held is let go, and what a backward that ended half way
    left in autograd's queue of this thread.
    """
    import torch

    refusal = ""
    try:
        return work(), ""
    except (torch.OutOfMemoryError, BudgetExceeded) as error:
        refusal = str(error)
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.ones((), requires_grad=True).mul(1).backward()
    gc.collect()
    return None, refusal


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


def _cuts(rows: int, parts: int) -> list[tuple[int, int]]:
    return [(rows * k // parts, rows * (k + 1) // parts) for k in range(parts)]


def _tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
