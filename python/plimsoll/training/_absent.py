# SPDX-License-Identifier: Apache-2.0
"""Absent: a parameter that has a shape and a dtype, and whose values are on disk.

Threads: any.   Memory: one number.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_METHODS = frozenset((
    "__hash__", "__len__", "_has_compatible_shallow_copy_type", "detach", "dim", "element_size", "get_device", "has_names", "is_complex", "is_contiguous",
    "is_floating_point", "is_inference", "is_pinned", "is_signed", "ndimension", "nelement", "numel", "requires_grad_",
    "size", "storage_offset", "stride"))
_VALUES = frozenset(("H", "T", "data", "imag", "mH", "mT", "real"))  # Attributes that return values.


class Absent(torch.nn.Parameter):
    """A parameter without values. Its shape and dtype can be read; an operation on its values raises RuntimeError with its name.

    In backward an operation is given the values: torch.utils.checkpoint runs a part of a block again there, when the block has run.
    """

    what: str
    bring: Callable[[], Any] | None = None
    """Returns the values."""

    @classmethod
    def like(cls, parameter: Any, what: str, device: torch.device | None = None) -> Absent:
        """Returns an Absent with the shape and dtype of `parameter`.

        what:   its name, for errors.
        device: where its block computes.
        """
        number = torch.zeros((), dtype=parameter.dtype, device=device)
        if parameter.dtype.is_floating_point:
            number.fill_(float("nan"))  # Shows in results, should an operation get past the errors.
        made: Absent = cls(number.expand(parameter.shape), requires_grad=False)
        made.what = what
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, own = func.__name__, args[0] if args else None
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if isinstance(own, cls):
            if name == "__get__" and owner not in _VALUES or name in _METHODS and name != "detach":
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            if name == "__set__" and owner in ("requires_grad", "grad"):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args)
            if name == "is_shared":
                return True  # So plimsoll.adopt() leaves it alone.
            if name == "__set__" and args[1] is own:
                return None  # torch keeps a returned object alive for ever.
            if name == "detach" or name == "copy_" and args[1] is own:
                return own
            if name == "to" and _stays(own, args[1:], kwargs or {}):
                return own
        if torch._C._current_graph_task_id() >= 0 and not _writes(name):
            args, kwargs = _there((args, kwargs or {}))
            return func(*args, **kwargs)
        what = next((one.what for one in _flat((args, kwargs)) if isinstance(one, cls)), "a weight")
        raise RuntimeError(f"{what} is on disk (plimsoll.stream_frozen) and in memory while its block runs alone: "
                           f"{owner or name} asked for its values outside")

    def __deepcopy__(self, _: Any) -> Any:
        raise RuntimeError(f"{self.what} is on disk (plimsoll.stream_frozen): a model whose weights stream cannot be "
                           "copied")

    def __reduce_ex__(self, _: Any) -> Any:
        raise RuntimeError(f"{self.what} is on disk (plimsoll.stream_frozen): a model whose weights stream cannot be "
                           "pickled; save its state_dict()")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{self.what}, on disk: {str(self.dtype).removeprefix('torch.')} {list(self.shape)}>"


def _stays(own: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    device, kind = torch._C._nn._parse_to(*args, **kwargs)[:2]
    return (device is None or device.type == own.device.type) and kind in (None, own.dtype) and not kwargs.get("copy")


def _writes(name: str) -> bool:
    return name in ("__set__", "__setitem__") or name.endswith("_") and not name.endswith("__")


def _there(value: Any) -> Any:
    """Returns the value with what is absent in it there."""
    if isinstance(value, Absent) and value.bring is not None:
        return value.bring()
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_there, value))
    return {key: _there(one) for key, one in value.items()} if isinstance(value, dict) else value


def _flat(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _flat(one)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value
