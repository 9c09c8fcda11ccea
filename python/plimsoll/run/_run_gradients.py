# SPDX-License-Identifier: Apache-2.0
"""Gradients that wait for their optimizer's step in a loop without run.step(): part of a commit.

Threads: the thread that trains.
Memory:  none of its own. A commit streams the gradients in place; those of a resumed commit stay until they are restored.
"""
from __future__ import annotations

from typing import Any

import torch

from ._run_parts import Parts

_USED = "_plimsoll_used"  # Attribute of a gradient: its version when a step used it.


class Gradients:
    """The waiting gradients of tracked torch optimizers, from watch() to leave()."""

    def __init__(self, saved: dict[str, list[torch.Tensor | None]] | None) -> None:
        """Takes the gradients to restore. saved: state() of the commit that the run resumes from; None: a new run."""
        self._saved = saved
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._hooks: list[Any] = []

    def watch(self, parts: Parts) -> None:
        """Observes the steps of the tracked optimizers from now on; a second call does nothing. Wrappers such as accelerate's are left out: they
        keep an accumulation window themselves.
        """
        if not self._optimizers:
            self._optimizers = {name: one for name, one in parts.named(torch.optim.Optimizer) if hasattr(one, "_optimizer_step_post_hooks")}
            self._hooks = [one.register_step_post_hook(_used) for one in self._optimizers.values()]

    def leave(self) -> None:
        """Ends the observation: run.step() manages gradients itself."""
        for hook in self._hooks:
            hook.remove()
        self._optimizers, self._hooks = {}, []

    def state(self) -> dict[str, list[torch.Tensor | None]]:
        """Returns the gradients that no step has used, by optimizer and parameter; {} for none."""
        waiting = {name: [_waiting(one.grad) for one in _parameters(optimizer)] for name, optimizer in self._optimizers.items()}
        return {name: grads for name, grads in waiting.items() if any(grad is not None for grad in grads)}

    def put_back(self) -> None:
        """Restores the commit's gradients, once, when the loop resumes. Gradients that the program made meanwhile are replaced."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        for name, optimizer in self._optimizers.items():
            parameters = _parameters(optimizer)
            for one, grad in zip(parameters, saved.get(name, [None] * len(parameters)), strict=True):
                one.grad = None if grad is None else grad.to(one.device)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _used(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for one in _parameters(optimizer):
        if one.grad is not None:
            setattr(one.grad, _USED, one.grad._version)


def _waiting(grad: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the gradient, or None if a step used it or it was zeroed since."""
    if grad is None or getattr(grad, _USED, -1) == grad._version or not grad.is_sparse and not grad.any():
        return None
    return grad
