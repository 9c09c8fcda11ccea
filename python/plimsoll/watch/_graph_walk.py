# SPDX-License-Identifier: Apache-2.0
"""GraphWalk: finds memory that autograd graphs keep, for a search for holders.

Autograd keeps saved tensors in C++, where no traversal of Python objects leads. A walk from a tensor through its graph
reads the addresses of saved tensors, and reports them to the search. Nothing is unpacked, so no hooks of the program
run.

Threads: with Python's lock.   Memory: a reference for each of 200,000 nodes at most, which keeps these nodes alive.
"""
from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections import deque
from typing import Any

from .. import _core

_NODES_MOST = 200_000
_BETWEEN_CLOCKS = 16  # Nodes.


class GraphWalk:
    """A walk through the autograd graphs of the tensors that a search has met."""

    def __init__(self, search: _core.HolderSearch) -> None:
        self._search, self._graphs = search, 0
        self._waiting: deque[tuple[int, Any]] = deque()  # The number of the tensor's node, and a node of its graph.
        self._seen: dict[int, Any] = {}  # By id; references, so that no id is used twice.

    def advance(self, seconds: float) -> bool:
        """Goes on for about `seconds`. Returns whether the walk is over: all graphs are done, or enough was found."""
        until = time.perf_counter() + seconds
        for number, tensor in self._search.graphs(self._graphs):
            self._graphs += 1
            self._wait(number, tensor.grad_fn)
        passed = 0
        while self._waiting and len(self._seen) < _NODES_MOST:
            number, node = self._waiting.popleft()
            if addresses := _kept_by(node):
                self._search.mark_graph(number, addresses)
                if self._search.enough:
                    return True
            for below, _ in node.next_functions:
                self._wait(number, below)
            passed += 1
            if passed % _BETWEEN_CLOCKS == 0 and time.perf_counter() > until:
                return False
        return True

    def clear(self) -> None:
        """Drops the references to nodes."""
        self._waiting.clear()
        self._seen.clear()

    def _wait(self, number: int, node: Any) -> None:
        if node is not None and id(node) not in self._seen:
            self._seen[id(node)] = node
            self._waiting.append((number, node))


def is_alive(node: Any, most: int = 16) -> bool:
    """Whether one of a graph's first `most` nodes still has the tensors it saved for backward."""
    nodes = [node]
    for node in nodes:
        kind: Any = type(node)
        for name in _saved(kind):
            with contextlib.suppress(RuntimeError):  # They were freed.
                if getattr(node, name) is not None:
                    return True
        nodes += [below for below, _ in node.next_functions if below is not None and len(nodes) < most]
    return False


def comes_from(node: Any, earlier: Any, most: int = 4096) -> bool:
    """Whether `earlier` is among the first `most` nodes below `node`, as the node of a sum is below that of the next sum."""
    nodes, seen = [node], {id(node)}
    for one in nodes:  # Held here, so that no id is used twice.
        if one is earlier:
            return True
        for below, _ in one.next_functions:
            if below is not None and id(below) not in seen and len(nodes) < most:
                seen.add(id(below))
                nodes.append(below)
    return False


def keeps_its_gradient(tensor: type) -> bool:
    """Whether some leaf has a gradient with a graph, as after backward(create_graph=True): each then keeps the other alive.

    Looks at all objects of the garbage collector, unreachable ones included.
    """
    for one in gc.get_objects():
        if issubclass(type(one), tensor):
            with contextlib.suppress(RuntimeError, AttributeError):
                if one.is_leaf and one.grad is not None and one.grad.grad_fn is not None:
                    return True
    return False


def _kept_by(node: Any) -> list[int]:
    """Returns the addresses of the memory that a node keeps: tensors saved for backward, and a Function's attributes."""
    kept: list[int] = []
    kind: Any = type(node)
    for name in _saved(kind):
        with contextlib.suppress(RuntimeError):  # They were freed.
            saved = getattr(node, name)
            for one in saved if isinstance(saved, (tuple, list)) else (saved,):
                _add_address(getattr(one, "data", None), kept)
    for value in list(getattr(node, "__dict__", {}).values()):
        _add_address(value, kept)
    return kept


def _add_address(tensor: Any, kept: list[int]) -> None:
    if hasattr(tensor, "untyped_storage"):
        with contextlib.suppress(RuntimeError, NotImplementedError):  # A tensor without storage.
            if tensor.device.type == "cpu" and (address := int(tensor.untyped_storage().data_ptr())):
                kept.append(address)


@functools.lru_cache(256)
def _saved(node: type) -> tuple[str, ...]:
    """Returns the names of a node's raw saved tensors. Unpacked ones are avoided: unpacking may run hooks of the program."""
    return tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
