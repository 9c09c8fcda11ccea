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
import traceback
from typing import Any, Callable, Iterable, Iterator

from . import _torch_gate
from ._memory import Governor
from ._random_states import RandomStates
from .errors import BudgetExceeded

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
    the step, so a checkpoint written now resumes under a larger limit to the undisturbed bits.

    model:      a torch.nn.Module (or several): whose buffers are put back.
    optimizer:  a torch.optim.Optimizer; `fused=True` where torch has it, so that it allocates nothing
                between its first write and its last.
    loss:       how the losses of parts make that of the batch: "mean" over rows, "sum", "contrastive"
                (see contrastive()); None: not at all, so that the batch is never cut.
    checkpoint: modules to recompute in backward when memory is refused.
    allow_batchnorm_microbatch: cut batches although batch statistics then are of the parts.
    events:     a file to which refusals and what helped are appended, a line of JSON each.
    Errors:     ValueError (options); BudgetExceeded as above; RuntimeError when the optimizer was
                refused half way, after it had written parameters.
    """

    def __init__(self, model: Any, optimizer: Any, *, loss: str | None = None,
                 checkpoint: Iterable[Any] = (), allow_batchnorm_microbatch: bool = False,
                 events: str | os.PathLike[str] | None = None) -> None:
        if loss not in _WAYS:
            raise ValueError(f"loss: {loss!r} is none of {', '.join(map(repr, _WAYS))}")
        self._extension = _torch_gate.load()
        self._models = list(model) if isinstance(model, (list, tuple)) else [model]
        self._optimizer, self._loss = optimizer, loss
        self._checkpoint = list(checkpoint)
        self._events = events
        self._allow_batchnorm = allow_batchnorm_microbatch
        self.parts = 1
        """Into how many parts a batch is cut."""
        self.recomputes = False
        """Whether the modules in `checkpoint` are recomputed in backward."""
        self.refusals = 0
        """Steps that had to be tried again."""
        self.steps = 0

    def __call__(self, batch: Any, f: Callable[..., Any]) -> float:
        """One step on `batch`, a tensor or a tuple of them, rows first; returns the loss."""
        if self._loss == "contrastive":
            raise ValueError("a contrastive loss is of the whole batch: use contrastive()")
        batch = batch if isinstance(batch, (tuple, list)) else (batch,)
        rows = len(batch[0])

        def gradients(parts: int) -> float:
            total = 0.0
            for begin, end in _cuts(rows, parts):
                value = f(*(one[begin:end] for one in batch))
                if parts > 1 and self._loss == "mean":
                    value = value * ((end - begin) / rows)
                value.backward()
                total += float(value.detach())
            return total

        return self._run(rows, gradients)

    def contrastive(self, batch: Any, embed: Callable[..., Any],
                    loss: Callable[..., Any]) -> float:
        """One step whose loss compares the rows of a batch; returns the loss.

        embed: part -> embeddings of its rows, a tensor or a tuple of them, rows first.
        loss:  embeddings of the whole batch -> a scalar.
        In parts, embeddings are made without a graph, the loss gives their gradients, and every part
        is embedded again with its own random numbers to carry them on. Source: Gao et al., "Scaling
        Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021), section 3.
        """
        batch = batch if isinstance(batch, (tuple, list)) else (batch,)
        rows = len(batch[0])

        def gradients(parts: int) -> float:
            import torch

            if parts == 1:
                value = loss(*_tuple(embed(*batch)))
                value.backward()
                return float(value.detach())
            cuts, states, made = _cuts(rows, parts), [], []
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

        return self._run(rows, gradients)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must go on with: how batches are cut and what is recomputed."""
        return {"parts": self.parts, "recomputes": self.recomputes, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on as the run did whose state_dict() this is. Errors: KeyError for another's."""
        self.parts, self.recomputes = int(state["parts"]), bool(state["recomputes"])
        self.steps = int(state["steps"])

    # ---- The transaction ----

    def _run(self, rows: int, gradients: Callable[[int], float]) -> float:
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
                raise self._gives_up(refusal, rows)
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

    def _gives_up(self, refusal: str, rows: int) -> BudgetExceeded:
        advice = "a larger limit, or a smaller batch"
        if self._loss is None:
            advice += "; with loss=\"mean\" or \"sum\" the batch may be cut"
        elif self._batchnorms() and not self._allow_batchnorm:
            advice += (f"; {self._batchnorms()[0]} has batch statistics, so the batch is cut only with "
                       "allow_batchnorm_microbatch=True")
        governor = Governor.current()
        text = (f"step {self.steps + 1} of {rows} rows does not fit and was not made: {refusal}. "
                f"Everything is as before it. What would help: {advice}")
        if governor is None:
            return BudgetExceeded(text, "tensors", 0, 0)
        return governor._refusal("tensors", 0, text)

    def _tell(self, refusal: str, helped: str) -> None:
        if self._events is not None:
            with open(self._events, "a", encoding="utf-8") as file:
                file.write(json.dumps({"event": "refusal", "step": self.steps + 1,
                                       "refusal": refusal, "next": helped}) + "\n")


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
