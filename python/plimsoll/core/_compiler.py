# SPDX-License-Identifier: Apache-2.0
"""The compiler of torch and its symbolic shapes, imported when something is compiled.

Every step of an optimizer of torch's, every checkpoint, and every gradient of a tensor that is no number imports them, to serve a compiler
that may be tracing. That takes 100 MiB and 1.5 s of the processor in each process that trains, and recipes compile nothing. Modules of the same names stand in
for them: they answer those calls where nothing is traced, and import the real ones for anything else, torch.compile() included.

Threads: any; Python's import lock orders them.   Memory: a list of the functions that a compiler would skip.
"""
from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_COMPILER, _SHAPES = "torch._dynamo", "torch.fx.experimental.symbolic_shapes"
_CHECKPOINT, _UNUSED = "torch.utils.checkpoint", "error_on_nested_fx_trace"  # A setting that a checkpoint reads, and uses while it is traced.
_MARK = "__dynamo_disable"  # Where torch keeps what disable() returned, on the function.


def import_when_used() -> None:
    """Makes torch._dynamo and symbolic_shapes modules that are imported when they are used. One that is imported already stays."""
    for made in (_Compiler, _Shapes):
        if made.name not in sys.modules:
            module = sys.modules[made.name] = made()
            parent, _, own = made.name.rpartition(".")
            setattr(importlib.import_module(parent), own, module)


class _Later(ModuleType):
    """A module in place of another one, until that is imported."""

    name: str

    def __init__(self) -> None:
        super().__init__(self.name)
        self.__spec__ = importlib.util.find_spec(self.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Asked of every module: __path__ by `from … import`, __file__ by `inspect`.
            raise AttributeError(name)
        return getattr(self.imported(), name)

    def imported(self) -> Any:
        """Returns the real module."""
        if sys.modules.get(self.name) is self:
            del sys.modules[self.name]
        return importlib.import_module(self.name)


class _Compiler(_Later):
    """In place of torch._dynamo. No compiler traces until that is imported."""

    name = _COMPILER

    def __init__(self) -> None:
        super().__init__()
        assert self.__spec__ is not None
        self.__path__ = list(self.__spec__.submodule_search_locations or ())
        self._finder = _Submodules(self)
        sys.meta_path.insert(0, self._finder)
        self._skipped: list[Callable[..., Any]] = []
        self.config = _Config(self)

    def graph_break(self, msg: str = "") -> None:
        """Does nothing: nothing is traced."""

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """Returns a function that a compiler would skip, as it is, where torch asks again once the compiler is imported."""
        if fn is not None and fn.__module__ == _CHECKPOINT:  # It is made for one checkpoint.
            return fn
        if fn is None or options.get("wrapping", True):
            return self.imported().disable(fn, recursive, **options)
        self._skipped.append(fn)
        return fn

    def imported(self) -> Any:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        made = super().imported()
        while self._skipped:
            vars(self._skipped.pop()).pop(_MARK, None)
        return made


class _Submodules(importlib.abc.MetaPathFinder):
    """Finds a submodule of torch._dynamo by importing the package, which may import it as well."""

    def __init__(self, compiler: _Compiler) -> None:
        self._compiler = compiler

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{_COMPILER}."):
            return None
        self._compiler.imported()
        module = sys.modules.pop(fullname, None)  # The import system would load what is in there once more.
        return None if module is None else importlib.machinery.ModuleSpec(fullname, _Imported(module))


class _Imported(importlib.abc.Loader):
    """Gives a module that is imported already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Config:
    """In place of torch._dynamo.config."""

    def __init__(self, compiler: _Compiler) -> None:
        vars(self)["compiler"] = compiler

    def __getattr__(self, name: str) -> Any:
        return True if name == _UNUSED else getattr(vars(self)["compiler"].imported().config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["compiler"].imported().config, name, value)


class _Shapes(_Later):
    """In place of symbolic_shapes: shapes of numbers are compared as numbers."""

    name = _SHAPES

    def sym_eq(self, x: Any, y: Any) -> Any:
        """Returns whether two shapes are equal."""
        return tuple(x) == tuple(y) if _is_plain(x) and _is_plain(y) else self.imported().sym_eq(x, y)

    def expect_true(self, a: Any, skip: int = 0) -> bool:
        """Returns a truth value."""
        return a if isinstance(a, bool) else bool(self.imported().expect_true(a, skip + 1))


def _is_plain(shape: Any) -> bool:
    return isinstance(shape, Sequence) and all(type(one) is int for one in shape)
