# SPDX-License-Identifier: Apache-2.0
"""Gradients of a loop of a program's own that wait for their optimizer's step: part of a commit.

Threads: the thread that trains.
Memory:  none of its own; a commit streams gradients from where they are, and what it held is there until it is put back.
"""
from __future__ import annotations

from typing import Any

import torch

from ._run_parts import Parts

_USED = "_plimsoll_used"  # Of a gradient: its version when a step had used it.


class Gradients:
    """Gradients of the tracked torch optimizers, from watch() to leave()."""

    def __init__(self, saved: dict[str, list[torch.Tensor | None]] | None) -> None:
        """saved: state() of the commit that the run goes on from; None: a new run."""
        self._saved = saved
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._hooks: list[Any] = []

    def watch(self, parts: Parts) -> None:
        """Sees the steps of its optimizers from now on; once is enough. Others that wrap one, as accelerate's, keep a window themselves."""
        if not self._optimizers:
            self._optimizers = {name: one for name, one in parts.named(torch.optim.Optimizer) if hasattr(one, "_optimizer_step_post_hooks")}
            self._hooks = [one.register_step_post_hook(_used) for one in self._optimizers.values()]

    def leave(self) -> None:
        """Another looks after gradients."""
        for hook in self._hooks:
            hook.remove()
        self._optimizers, self._hooks = {}, []

    def state(self) -> dict[str, list[torch.Tensor | None]]:
        """Returns the gradients that no step has used, by optimizer and parameter; {}: there are none."""
        waiting = {name: [_waiting(one.grad) for one in _parameters(optimizer)] for name, optimizer in self._optimizers.items()}
        return {name: grads for name, grads in waiting.items() if any(grad is not None for grad in grads)}

    def put_back(self) -> None:
        """Once, where the loop goes on: what the program has made meanwhile was used before the commit."""
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
    """Not what was used, nor what was zeroed since."""
    if grad is None or getattr(grad, _USED, -1) == grad._version or not grad.is_sparse and not grad.any():
        return None
    return grad
