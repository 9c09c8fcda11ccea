# SPDX-License-Identifier: Apache-2.0
"""Modules and random generators that are reachable from a step's functions.

The search follows closures, defaults, bound objects, partials, the globals that a function names, and their
attributes and containers. It does not enter the code of torch and NumPy or containers of more than 1,000
entries, and ends after 10,000 objects. Objects out of its reach belong in `others`.

Threads: the thread that trains.   Memory: a list of objects.
"""
from __future__ import annotations

import functools
import random
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

_OBJECTS_MAX = 10_000
_ENTRIES_MAX = 1_000
_PLAIN = (int, float, complex, bool, str, bytes, type(None), type, types.BuiltinFunctionType)
_NEVER = frozenset((*_PLAIN, dict, list, tuple, set, OrderedDict, types.FunctionType))
_CLOSED = ("torch", "numpy", "plimsoll")


def reached(roots: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Returns (modules, generators) that are reachable from `roots`, each once.

    A generator is a torch.Generator, a numpy.random.Generator or RandomState, or a random.Random.
    """
    import torch

    modules, generators = [], []
    seen: set[int] = set()
    waiting = deque(roots)
    keep = []  # Keeps the objects alive, so that no id is reused.
    while waiting and len(seen) < _OBJECTS_MAX:
        one = waiting.popleft()
        if isinstance(one, (*_PLAIN, torch.Tensor)) or id(one) in seen:
            continue
        seen.add(id(one))
        keep.append(one)
        if is_generator(one):
            generators.append(one)
        elif isinstance(one, torch.nn.Module):
            modules.append(one)
            for part in one.modules():
                waiting.extend(value for value in vars(part).values() if is_generator(value))
        else:
            waiting.extend(_inside(one))
    return modules, generators


def is_generator(value: Any) -> bool:
    """Whether `value` is a random generator whose state can be read and set."""
    kind = type(value)
    if kind in _NEVER:  # Fast path: nearly all attributes of modules.
        return False
    import torch

    if isinstance(value, (torch.Generator, random.Random)):
        return True
    return kind.__module__.startswith("numpy.random") and kind.__name__ in ("Generator", "RandomState")


def _inside(one: Any) -> Iterator[Any]:
    if isinstance(one, types.FunctionType):
        yield from _of_function(one)
    elif isinstance(one, types.MethodType):
        yield from (one.__self__, one.__func__)
    elif isinstance(one, functools.partial):
        yield from (one.func, one.args, one.keywords)
    elif isinstance(one, dict):
        if len(one) <= _ENTRIES_MAX:
            yield from list(one.values())
    elif isinstance(one, (list, tuple, set, frozenset, deque)):
        if len(one) <= _ENTRIES_MAX:
            yield from list(one)
    elif not isinstance(one, types.ModuleType) and not _closed(type(one).__module__):
        yield from list(getattr(one, "__dict__", {}).values())


def _of_function(one: types.FunctionType) -> Iterator[Any]:
    if _closed(one.__module__):
        return
    for cell in one.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            pass  # Nothing was assigned yet.
    yield from one.__defaults__ or ()
    yield from (one.__kwdefaults__ or {}).values()
    names = set(_names(one.__code__))
    for name in names & one.__globals__.keys():
        value = one.__globals__[name]
        if isinstance(value, types.ModuleType):  # helpers.loss(x): its named attributes are followed.
            if not _closed(value.__name__):
                yield from (vars(value)[inner] for inner in names & vars(value).keys())
        else:
            yield value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _closed(module: str | None) -> bool:
    return (module or "").split(".")[0] in _CLOSED
