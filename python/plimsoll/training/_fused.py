# SPDX-License-Identifier: Apache-2.0
"""The kernel of a run's optimizer: torch's fused one where there is one, as its steps can be undone without copies.

Threads: the thread that trains.   Memory: none.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..memory._memory import format_bytes
from . import _plan_static
from ._transaction import writes_at_the_end

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_DEVICES = ("cpu", "cuda")


def choose_fused(optimizers: list[tuple[str, Any]], models: list[Any], alone: bool, events: Callable[[dict[str, Any]], Any]) -> None:
    """Switches the optimizer to torch's fused kernel where it can, before the first step of a run. An optimizer that has stepped
    keeps its kernel: another one rounds otherwise.

    alone:  no other rank takes part in the step. It affects the report, never the kernel: any number of ranks has the same bits.
    events: is called with the choice and the bytes that each step copies.
    """
    fused = len(optimizers) == 1 and _may_be_fused(optimizers[0][1], models)
    if fused:
        group, defaults = optimizers[0][1].param_groups[0], optimizers[0][1].defaults
        group["fused"] = defaults["fused"] = True
    copied = 0
    if not (alone and writes_at_the_end([one for _, one in optimizers])):
        copied = sum(p.nbytes for _, one in optimizers for group in one.param_groups for p in group["params"])
        copied += sum(_plan_static.states_of(one)[0] for _, one in optimizers)
    names = ", ".join(name for name, _ in optimizers)
    copies = f"each step copies parameters and states while it writes them, {format_bytes(copied)}, to put them back where memory is refused"
    if fused:
        why = f"; with other ranks {copies}" if copied else ", so that no step copies it"
        message = (f"{names}: {type(optimizers[0][1]).__name__} steps with torch's fused kernel{why}; it rounds otherwise than the "
                   "default, which fused=False keeps")
    elif copied and alone:
        message = f"{names}: {copies}; one optimizer of one group with fused=True is not copied"
    else:
        return
    events({"event": "optimizer", "part": names, "fused": fused, "copied_bytes": copied, "message": message})


def _may_be_fused(one: Any, models: list[Any]) -> bool:
    if type(one) not in _FUSED or len(one.param_groups) != 1 or one.state:
        return False
    group = one.param_groups[0]
    if any(group.get(name) is not None for name in ("fused", "foreach")) or group.get("differentiable") or group.get("capturable"):
        return False
    if isinstance(group["lr"], torch.Tensor):
        return False
    sparse = any(getattr(part, "sparse", False) for model in models for part in model.modules())
    kinds = {(p.dtype, p.device, p.layout) for p in group["params"]}
    return not sparse and len(kinds) == 1 and all(
        p.is_floating_point() and p.device.type in _DEVICES and p.layout == torch.strided for p in group["params"])
