# SPDX-License-Identifier: Apache-2.0
"""Checks of numbers that a program passes, and of the loss of a step. Each error names the argument as the program does.

Threads: any.   Memory: none.
"""
from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any

_SHOWN = 60


def whole(name: str, value: Any, least: int) -> int:
    """Returns `value` as an int that is at least `least`. Errors: ValueError naming it."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{name} {_shown(value)} must be a whole number, {least} or more")
    if number < least:
        raise ValueError(f"{name} {number} must be {least} or more")
    return number


def real(name: str, value: Any, least: float) -> float:
    """Returns `value` as a float that is at least `least`. Errors: ValueError naming it."""
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if math.isnan(number):
        raise ValueError(f"{name} {_shown(value)} must be a number, {least:g} or more")
    if number < least:
        raise ValueError(f"{name} {value} must be {least:g} or more")
    return number


def number_of(name: str, value: Any) -> float:
    """Returns a metric as a float. `value` is a number, or a tensor or array of one number on any device, with or without a graph.

    Errors: ValueError naming the metric.
    """
    if isinstance(value, (str, bytes)):
        raise ValueError(f"{name}: {_shown(value)} is a text, and a metric is a number, or a tensor of one")
    if isinstance(getattr(value, "shape", None), tuple) and math.prod(value.shape) != 1:
        raise ValueError(f"{name}: its shape is {list(value.shape)}, and a metric is one number: take its mean() or sum()")
    try:
        return float(value.detach() if hasattr(value, "detach") else value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError(f"{name}: {_shown(value)} is not a number, nor a tensor of one") from None


def loss_of(value: Any) -> Any:
    """Returns `value`, the result of a step's function, if it can be a loss. Errors: ValueError saying what to return instead."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise ValueError(f"step: its function returned {_what(value)}, and a step needs the loss, a tensor of one number"
                         f"{_instead(value)}")
    if value.numel() != 1:
        raise ValueError(f"step: its function returned a tensor of shape {list(value.shape)}, and the loss is one number: return "
                         "its mean() or its sum()")
    if value.is_complex():
        raise ValueError("step: its function returned a complex number, and the loss is a real one: return its abs() or its real part")
    return value


def with_graph(value: Any) -> Any:
    """Returns the loss, if it has a gradient. Errors: ValueError for a loss that no parameter can learn from."""
    if not value.requires_grad:
        raise ValueError("step: the loss that its function returned has no gradient: nothing that it was computed from requires one. "
                         "Compute it of the tracked model's output, with parameters that are not frozen, and without torch.no_grad(), "
                         "detach() or item()")
    return value


def _what(value: Any) -> str:
    if value is None:
        return "nothing"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _instead(value: Any) -> str:
    import torch

    if value is None:
        return ": end it with `return loss`"
    if isinstance(value, Mapping):
        if isinstance(value.get("loss"), torch.Tensor):
            return ': return its entry "loss"'
        if value.get("loss", 0) is None:
            return ', and its entry "loss" is None: call the model with labels, and return that entry'
        return f", and its entries are {', '.join(map(str, list(value)[:8])) or 'none'}: return the one that is the loss"
    if isinstance(getattr(value, "loss", None), torch.Tensor):
        return ": return its attribute `loss`"
    if isinstance(value, (tuple, list)):
        return ": return the one of its entries that is the loss"
    if isinstance(value, numbers.Number) or hasattr(value, "__array__"):
        return ": return the tensor that it was read from, without item(), float() or numpy()"
    return ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " …"
