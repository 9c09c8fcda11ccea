# SPDX-License-Identifier: Apache-2.0
"""The checked options of a TrainingStep, and the settings that a plimsoll.Run passes to it.

Reading order: this file, _step_events.py, _backward.py, _update.py, _accumulation.py, _need.py, _retry.py, _admission.py, _step.py.
Threads: the thread that trains.   Memory: none of its own.
"""
from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..core._numbers import real, whole
from ..ranks._group import Solo
from ..ranks._virtual_workers import VirtualWorkers

if TYPE_CHECKING:
    from ..ranks._group import Group
    from ..rows._rank_rows import DealtTable

_T = TypeVar("_T")
_WAYS = ("mean", "sum", "contrastive", None)
_OF_RANKS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


@dataclasses.dataclass(frozen=True)
class Handed:
    """The settings that a plimsoll.Run passes to its steps. The defaults are for steps without a run."""

    looks: bool = True
    """Whether the step looks at the memory. A run looks itself, where it can commit."""
    group: Group = Solo()
    """The ranks that make the same step."""
    workers: VirtualWorkers | None = None
    """The virtual workers that the batch is cut for; None: there are none."""
    tables: Sequence[DealtTable] = ()
    """Dealt tables whose rows the step looks up."""
    not_its_own: Sequence[Any] = ()
    """Parameters that another step trains. This step drops their gradients."""
    keeps_made: bool = False
    """Whether another step of the same batch may still fail, so that this one must stay undoable."""
    goes_on: bool = False
    """Whether an earlier start of the run was admitted."""
    interruptible: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """A context in which the watcher may raise a stop. Everything done inside is then undone."""


@dataclasses.dataclass
class Options:
    """The checked options of a TrainingStep, which documents them and alone writes them. extension: plimsoll._torch. scaler: None where disabled."""

    extension: Any
    models: list[Any]
    optimizers: list[Any]
    schedulers: list[Any]
    others: list[Any]
    checkpoint: list[Any]
    scaler: Any
    loss: str | None
    weight: Callable[..., Any] | None
    accumulate: int
    clip_norm: float | None
    before_update: Callable[[], Any] | None
    split: Callable[[Any, int], Sequence[Any]] | None
    allow_batchnorm: bool
    directory: str | os.PathLike[str] | None
    handed: Handed = Handed()

    def trained(self) -> list[Any]:
        """Returns the optimizers' parameters."""
        return [p for one in self.optimizers for group in one.param_groups for p in group["params"]]

    def batchnorms(self) -> list[str]:
        """Returns the names of the modules that compute statistics of the batch."""
        import torch

        return [name or type(part).__name__ for model in self.models
                for name, part in model.named_modules()
                if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.training]

    def agreed(self, work: Callable[[], _T]) -> _T:
        """Returns work(), which succeeds on all ranks or on none."""
        made: _T = self.handed.group.on_all("run.step()", work)
        return made


def check(loss: str | None, weight: Any, accumulate: int, clip_norm: float | None) -> None:
    """Checks the options' values and that they go together. Errors: ValueError."""
    if loss not in _WAYS:
        raise ValueError(f"loss: {loss!r} is none of {', '.join(map(repr, _WAYS))}")
    if whole("accumulate:", accumulate, 1) > 1 and loss is None:
        raise ValueError(f"accumulate: {accumulate}; it is 1 or more, and more than 1 wants "
                         "loss=\"mean\" or \"sum\", which says how batches add up")
    if weight is not None and loss != "mean":
        raise ValueError("weight: only the parts of a loss=\"mean\" are weighed")
    if clip_norm is not None:
        real("clip_norm:", clip_norm, 0)


def refuse_ranks(models: Iterable[Any]) -> None:
    """Refuses modules that are wrapped for several ranks. Errors: ValueError."""
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


def refuse_closures(optimizers: Iterable[Any]) -> None:
    """Refuses optimizers whose step() computes the loss. Errors: ValueError."""
    for one in optimizers:
        step = inspect.signature(type(one).step)
        needed = [name for name, given in step.parameters.items() if given.default is given.empty and given.kind in (
            given.POSITIONAL_ONLY, given.POSITIONAL_OR_KEYWORD, given.KEYWORD_ONLY)][1:]
        if needed:
            raise ValueError(
                f"optimizer: {type(one).__name__}.step() needs a {needed[0]}, which computes the loss as often as it likes, and a "
                f"step that may be put back has none. Call {type(one).__name__}.step({needed[0]}) yourself, in the body of "
                "`for batch in run.steps(…)`, or take an optimizer that steps by the gradients")


def listed(value: Any) -> list[Any]:
    """Returns `value` as a list: None as [], a single object as its only entry, a list or tuple as its entries."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
