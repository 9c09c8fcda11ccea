# SPDX-License-Identifier: Apache-2.0
"""What a search for holders begins at, and the name of what it found.

Threads: with Python's lock.   Memory: a list of the modules; the local variables of running functions, for a search.
"""
from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import time
import types
from typing import Any

from . import _core

_OPTIMIZED = 1  # Of co_flags: locals are not a dict of their own.
_GRAPH_DEEP = 16
FEW = 0.3  # Share of what is looked for; where less is found, it may hang on graphs.
_LOCAL = threading.local


class Roots:
    """Where to begin: running functions and the program's modules, libraries' modules later.

    Of torch alone there are two thousand modules: prepare() looks at them in pieces, before begin() is called.
    """

    def __init__(self, skipped: list[Any]) -> None:
        self.first: list[Any] = []
        self.later: list[Any] = []
        self.skipped: list[Any] = skipped
        self._locals: dict[int, str] = {}
        from ._search import library_folders

        self._folders = tuple(library_folders())
        self._names, self._next = list(sys.modules), 0
        torch = sys.modules.get("torch")
        self.tensor: type | None = getattr(torch, "Tensor", None)
        if self.tensor is not None:
            self.look_at = functools.partial(_look_at, torch)

    def prepare(self, seconds: float) -> bool:
        """Looks at modules for so long; whether that were all there were."""
        until = time.perf_counter() + seconds
        while self._next < len(self._names) and time.perf_counter() < until:
            name = self._names[self._next]
            self._add(name, sys.modules.get(name))
            self._next += 1
        return self._next == len(self._names)

    def begin(self) -> None:
        """Adds what is running now, and modules that came since."""
        seen = set(self._names)
        self._names += [name for name in sys.modules if name not in seen]
        self.prepare(math.inf)
        self._frames()

    def name_of_locals(self, root: Any) -> str:
        """ "main" where `root` are local variables of main(); else ""."""
        return self._locals.get(id(root), "")

    def clear(self) -> None:
        self.first.clear()
        self.later.clear()
        self.skipped.clear()

    def _frames(self) -> None:
        for top in sys._current_frames().values():
            frame: types.FrameType | None = top
            while frame is not None:
                code = frame.f_code
                if code.co_flags & _OPTIMIZED and not code.co_filename.startswith(self._own):
                    seen = frame.f_locals
                    found = dict(seen)
                    if isinstance(seen, dict):  # Before 3.13 a copy, which the frame would keep.
                        seen.clear()
                    self._locals[id(found)] = code.co_name
                    self.first.append(found)
                frame = frame.f_back

    @property
    def _own(self) -> str:
        return __file__.rpartition("/")[0] + "/"

    def _add(self, name: str, module: Any) -> None:
        if not isinstance(module, types.ModuleType):
            return
        file = getattr(module, "__file__", None)
        if name == "__main__" or (file and not file.startswith(self._folders) and name != "builtins"):
            self.first.append(module)
        elif name.partition(".")[0] == "plimsoll":
            self.skipped += [module, vars(module)]
        else:
            self.later += [module, vars(module)]


def _look_at(torch: Any, tensor: Any) -> int:
    """Address of its storage; negative where a graph with saved tensors hangs on it."""
    if type(tensor).__module__.startswith("torch._subclasses") or tensor.layout is not torch.strided:
        return 0
    address = int(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else 0
    if tensor.grad_fn is not None and _alive(tensor.grad_fn):
        return -max(address, 1)
    return address


def _alive(node: Any) -> bool:
    """Whether a node near the end of a graph still has what it saved for backward."""
    nodes = [node]
    for node in nodes:
        for name in _saved(type(node)):
            with contextlib.suppress(RuntimeError):  # They were freed.
                if getattr(node, name) is not None:
                    return True
        nodes += [below for below, _ in node.next_functions if below is not None and len(nodes) < _GRAPH_DEEP]
    return False


@functools.lru_cache(256)
def _saved(node: type) -> tuple[str, ...]:
    """Raw ones: to unpack a saved tensor may run hooks of the program's."""
    return tuple(name for name in dir(node) if name.startswith("_raw_saved_"))


def name_of(search: _core.HolderSearch, roots: Roots) -> str:
    """Who holds what was found: "list `kept` in module __main__"; "" where nobody was."""
    found, wanted = search.found
    way = search.holder()
    graph, graphs = search.graphs()
    if graphs and found < FEW * wanted:
        name = _name(graph, roots)
        return f"autograd graph of {name}" if name else "autograd graph"
    below = [one[:len(one) - len(way)] for one in search.ways(8)]
    if name := _name(way, roots):
        return name + _told(way, *below)
    names = [name + _told(one) for one in search.ways(8) if (name := _name(one, roots))]
    return max(names, key=names.count) if names else ""


def name_of_grown(search: _core.HolderSearch, roots: Roots, steps: int) -> str:
    """The container that got more elements meanwhile, those of objects before those of numbers and texts."""
    grown = [(_bare(way[0]), -more, way) for more, way in search.grown() if more >= steps // 25]
    for _, _, way in sorted(grown, key=lambda one: one[:2]):
        if name := _name(way, roots):
            return name
    return ""


def _bare(container: Any) -> bool:
    """Whether its newest element is a number or a text."""
    try:
        newest = next(iter(reversed(container.values() if isinstance(container, dict) else container)), None)
    except (TypeError, RuntimeError):  # A set; a dict that changes.
        return False
    return isinstance(newest, (int, float, str, type(None)))


def _told(way: list[Any], *below: list[Any]) -> str:
    """What kind of holder it is, where its name does not say so."""
    if any(isinstance(one, _LOCAL) for one in way):
        return " (thread-local)"
    traced = [any(isinstance(one, types.TracebackType) for one in each) for each in (below or (way,))]
    return " (exception traceback)" if 2 * sum(traced) > len(traced) else ""


def _name(way: list[Any], roots: Roots) -> str:
    """The first name on the way from a holder up to its root."""
    return next((name for place, one in enumerate(way) if (name := _named(one, way[place + 1:], roots))), "")


def _named(one: Any, above: list[Any], roots: Roots) -> str:
    what = type(one).__name__
    if isinstance(one, types.ModuleType):
        return f"module {one.__name__}"
    if type(one).__name__ == "_lru_cache_wrapper":
        return f"functools.lru_cache of {getattr(one, '__qualname__', '?')}"
    if isinstance(one, type):
        return f"class {one.__qualname__}"
    if isinstance(one, types.FunctionType):
        return f"closure of {one.__qualname__}"
    if isinstance(one, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        return f"local variables of {one.__qualname__}()"
    if isinstance(one, types.FrameType):
        return f"local variables of {one.f_code.co_name}()"
    if roots.name_of_locals(one):
        return f"local variables of {roots.name_of_locals(one)}()"
    if not above:
        return ""
    holder = above[0]
    if isinstance(holder, types.CellType):
        for function in above[1:3]:
            if isinstance(function, types.FunctionType):
                names = [name for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())
                         if cell is holder]
                return f"{what} `{names[0] if names else '?'}` in closure of {function.__qualname__}"
        return ""
    if isinstance(holder, dict):
        key = next((key for key, value in list(holder.items()) if value is one and isinstance(key, str)), None)
        if key is None:
            return ""
        if function := roots.name_of_locals(holder):
            return f"{what} `{key}` in {function}()"
        over = above[1] if len(above) > 1 else None
        if isinstance(over, types.ModuleType) and vars(over) is holder:
            return f"{what} `{key}` in module {over.__name__}"
        if holder.get("__name__") in sys.modules and vars(sys.modules[holder["__name__"]]) is holder:
            return f"{what} `{key}` in module {holder['__name__']}"
        if isinstance(over, type):
            return f"attribute `{key}` of class {over.__qualname__}"
        if over is not None and getattr(over, "__dict__", None) is holder:
            return f"attribute `{key}` of {type(over).__name__}"
        return ""
    if isinstance(holder, types.FrameType) and not roots.name_of_locals(holder):
        return ""
    attributes = getattr(holder, "__dict__", None)
    if isinstance(attributes, dict):
        key = next((key for key, value in list(attributes.items()) if value is one), None)
        if key is not None:
            return f"attribute `{key}` of {type(holder).__name__}"
    return ""
