# SPDX-License-Identifier: Apache-2.0
"""Roots of a search for holders, and names of the objects found.

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
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from .. import _core
from ._graph_walk import comes_from, is_alive
from ._samples import library_folders

_OPTIMIZED = 1  # A flag of co_flags: the locals are no dict.
_HEAP_TYPE = 1 << 9  # A flag of types: a class of the program or of an extension.
_PATH_MOST = 6
_REPLACED_MOST = 32  # Tensors of a container that are looked through for one that was there before.
_SEEN = (int, float, complex, str, bytes, bytearray, type(None), type, types.FunctionType, types.ModuleType, weakref.ref)
FEW = 0.3  # Share of what is looked for; where less is found, nobody holds it.
_LOCAL = threading.local
# Where a program leaves what is its own in the standard library. All else there is caches of the library's.
_LEFT_IN = frozenset(("asyncio", "atexit", "builtins", "concurrent", "contextvars", "gc", "logging", "multiprocessing", "queue", "sched",
                      "selectors", "signal", "socketserver", "sys", "threading", "unittest", "weakref", "_threading_local"))
_NOBODYS = frozenset(("plimsoll", *(sys.stdlib_module_names - _LEFT_IN - {"__main__"})))


class Roots:
    """The objects from which a search starts: running functions and the program's modules, later the libraries' modules.

    torch alone has two thousand modules, so prepare() looks at them in pieces before begin().
    """

    def __init__(self, skipped: list[Any]) -> None:
        self.first: list[Any] = []
        self.later: list[Any] = []
        self.skipped: list[Any] = skipped
        self._locals: dict[int, tuple[str, int]] = {}  # By id of the variables: the function, and the id of its frame.
        self._folders = tuple(library_folders())
        self._names, self._next = list(sys.modules), 0
        torch = sys.modules.get("torch")
        self.tensor: Any = getattr(torch, "Tensor", None)
        if self.tensor is not None:
            self.look_at = functools.partial(_look_at, torch)

    def prepare(self, seconds: float) -> bool:
        """Looks at modules for `seconds`. Returns whether all were looked at."""
        until = time.perf_counter() + seconds
        while self._next < len(self._names) and time.perf_counter() < until:
            name = self._names[self._next]
            self._add(name, sys.modules.get(name))
            self._next += 1
        return self._next == len(self._names)

    def begin(self) -> None:
        """Adds the running functions, and modules that were loaded since prepare()."""
        seen = set(self._names)
        self._names += [name for name in sys.modules if name not in seen]
        self.prepare(math.inf)
        self._frames()

    def name_of_locals(self, root: Any) -> str:
        """Returns the name of the running function with the local variables `root`; "" where there is none."""
        name, frame = self._locals.get(id(root), ("", 0))
        return name if frame in (id(one) for one in _running()) else ""

    def clear(self) -> None:
        self.first.clear()
        self.later.clear()
        self.skipped.clear()

    def _frames(self) -> None:
        for frame in _running():
            code = frame.f_code
            if code.co_flags & _OPTIMIZED and not code.co_filename.startswith(self._own):
                seen = frame.f_locals
                found = dict(seen)
                if isinstance(seen, dict):  # Before 3.13 a copy, which the frame would keep.
                    seen.clear()
                self._locals[id(found)] = (code.co_name, id(frame))
                self.first.append(found)

    @property
    def _own(self) -> str:
        return __file__.rpartition("/watch/")[0] + "/"

    def _add(self, name: str, module: Any) -> None:
        if not isinstance(module, types.ModuleType):
            return
        file = getattr(module, "__file__", None)
        if name == "__main__" or (file and not file.startswith(self._folders) and name != "builtins"):
            self.first.append(module)
        elif name.partition(".")[0] in _NOBODYS:
            self.skipped += [module, vars(module)]
        else:
            self.later += [module, vars(module)]


def _running() -> Iterator[types.FrameType]:
    """Yields the frames of all running functions, in all threads."""
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            yield frame
            frame = frame.f_back


def _look_at(torch: Any, tensor: Any) -> int:
    """Returns the address of a tensor's storage; negative where a graph with saved tensors hangs on it."""
    if type(tensor).__module__.startswith("torch._subclasses") or tensor.layout is not torch.strided:
        return 0
    address = int(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else 0
    if tensor.grad_fn is not None and is_alive(tensor.grad_fn):
        return -max(address, 1)
    return address


def name_of(search: _core.HolderSearch, roots: Roots) -> str:
    """Returns the name of the holder that was found, such as "list `kept` in module __main__"; "" where there is none."""
    way = search.holder()
    ways = search.ways(8)
    below = [one[:len(one) - len(way)] for one in ways]
    if name := _name(way, roots):
        return _with_graph(name, way, *below, roots=roots) + _told(way, *below)
    names = [_with_graph(name, one, roots=roots) + _told(one) for one in ways if (name := _name(one, roots))]
    return max(names, key=names.count) if names else ""


def name_of_grown(search: _core.HolderSearch, roots: Roots, steps: int) -> str:
    """Returns the name of the container that gained most elements. Its memory must be of a kind that no search sees."""
    for more, way in search.grown():
        container = way[0]
        seen = isinstance(container, (dict, list, set, deque)) and not _is_opaque(_newest(container), roots)
        if more >= steps // 25 and not seen and (name := _name(way, roots)):
            return name
    return ""


def _with_graph(name: str, way: list[Any], *below: list[Any], roots: Roots) -> str:
    """Returns "autograd graph of" and `name` where tensors keep the memory by their graphs; a single tensor is named by its variable."""
    if roots.tensor is None:
        return name
    if isinstance(way[0], roots.tensor):
        return f"autograd graph of {_variable(way, roots) or name}"
    return f"autograd graph of {name}" if 2 * sum(bool(one) and isinstance(one[0], roots.tensor) for one in below) > len(below) else name


def _variable(way: list[Any], roots: Roots) -> str:
    """Returns a variable with the attributes and keys down to the found object, such as "Tensor `meter.sum` in main()"."""
    path = ""
    for place, one in enumerate(way[:_PATH_MOST]):
        name = _named(one, way[place + 1:], roots)
        variable = name.startswith(f"{type(one).__name__} `") and name.partition("`")[2].partition("`")[0]
        if variable:
            return f"{type(way[0]).__name__} `{variable}{path}`{name.rpartition('`')[2]}"
        if not way[place + 1:]:
            return ""
        step = _step_to(one, *way[place + 1:place + 3])
        if step is None:
            return ""
        path = step + path
    return ""


def _step_to(one: Any, holder: Any, over: Any = None) -> str | None:
    """Returns the step from `holder` to `one`: ".sum", "['loss']", "[0]"; "" from an object to its own dict. over: the holder's holder."""
    attributes = getattr(holder, "__dict__", None)
    if attributes is one:
        return ""
    if isinstance(holder, dict):
        key = _place_of(one, list(holder.items()))
        if key is None:
            return None
        return f".{key}" if getattr(over, "__dict__", None) is holder else f"[{key!r:.40}]"
    if isinstance(holder, (list, tuple)):
        at = _place_of(one, enumerate(list(holder)))
        return None if at is None else f"[{at}]"
    names = list(attributes or ()) + [name for kind in type(holder).__mro__ for name in vars(kind).get("__slots__", ())]
    with contextlib.suppress(Exception):  # A slot that is empty, a property that fails.
        name = _place_of(one, [(name, getattr(holder, name, None)) for name in names])
        return None if name is None else f".{name}"
    return None


def _place_of(one: Any, places: Iterable[tuple[Any, Any]]) -> Any:
    """Returns the key, index or name whose value is `one`. A tensor that was replaced during the search is found as the one made from it."""
    places = list(places)
    place = next((place for place, value in places if value is one), None)
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    node = one.grad_fn if place is None and isinstance(one, tensor) else None
    if node is None:
        return place
    later = [(place, value.grad_fn) for place, value in places if isinstance(value, tensor) and value.grad_fn is not None]
    return next((place for place, other in later[:_REPLACED_MOST] if comes_from(other, node)), None)


def _newest(container: Any) -> Any:
    """Returns a container's newest element, of a set any; None where it is unknown."""
    try:
        elements = container.values() if isinstance(container, dict) else container
        return next(iter(elements if isinstance(container, set) else reversed(elements)), None)
    except (TypeError, RuntimeError):  # It changes meanwhile.
        return None


def _is_opaque(one: Any, roots: Roots, deep: int = 3) -> bool:
    """Whether memory may hang on `one` that the search did not see: it sees numbers, texts, arrays and tensors."""
    if isinstance(one, _SEEN) or type(one).__module__ == "numpy":
        return False
    if roots.tensor is not None and isinstance(one, roots.tensor):
        return one.grad_fn is not None
    if isinstance(one, (dict, list, tuple, set, frozenset)):
        inside = list(one.values()) if isinstance(one, dict) else list(one)
        return deep > 0 and any(_is_opaque(value, roots, deep - 1) for value in inside[:8])
    attributes = getattr(one, "__dict__", None)
    if attributes is not None and type(one).__flags__ & _HEAP_TYPE and deep > 0:
        return any(_is_opaque(value, roots, deep - 1) for value in list(attributes.values())[:32])
    return True


def _told(way: list[Any], *below: list[Any]) -> str:
    """Returns the kind of holder where its name does not show it: " (thread-local)" or " (exception traceback)"."""
    if any(isinstance(one, _LOCAL) for one in way):
        return " (thread-local)"
    traced = [any(isinstance(one, types.TracebackType) for one in each) for each in (below or (way,))]
    return " (exception traceback)" if 2 * sum(traced) > len(traced) else ""


def _name(way: list[Any], roots: Roots) -> str:
    """Returns the first name on the way from a holder up to its root."""
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
        key = _place_of(one, [(key, value) for key, value in list(holder.items()) if isinstance(key, str)])
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
        key = _place_of(one, list(attributes.items()))
        if key is not None:
            return f"attribute `{key}` of {type(holder).__name__}"
    return ""
