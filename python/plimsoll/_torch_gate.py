# SPDX-License-Identifier: Apache-2.0
"""The one way from the Python code to torch and to plimsoll._torch.

`import plimsoll` never imports torch. Once the user's program has imported it, a new Governor
loads plimsoll._torch, if it was built, and attaches the tensor arena; one that was made before is told
when torch comes.

Threads: load() may be called from any thread; Python's import lock orders them.
"""
from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class NotBuilt(ImportError):
    """plimsoll was built without its torch parts."""


def torch_if_imported() -> Any | None:
    """The torch module, if the program has finished importing it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and hasattr(torch, "Tensor") else None


def load() -> ModuleType:
    """Imports torch, then plimsoll._torch, and returns it.

    Errors: ImportError saying how to build plimsoll._torch, that torch is missing, or that it is
            not the torch that plimsoll._torch was built for.
    """
    if importlib.util.find_spec("torch") is None:
        raise ImportError(
            "this part of plimsoll needs torch, which is not installed: install torch, then "
            "rebuild with `pip install .` in Plimsoll's source folder")
    import torch  # noqa: F401  First, so that the one libtorch in the process is torch's own.

    try:
        import plimsoll._torch as extension
    except NotBuilt:
        raise
    except ImportError as error:
        raise ImportError(
            f"plimsoll._torch does not fit the installed torch {torch.__version__} ({error}): "
            "rebuild with `pip install .` in Plimsoll's source folder"
        ) from error
    return extension


def load_if_torch_imported() -> ModuleType | None:
    """load(), but None when the program has not imported torch or there is no plimsoll._torch."""
    if torch_if_imported() is None:
        return None
    try:
        return load()
    except NotBuilt:
        return None


def loaded() -> ModuleType | None:
    """plimsoll._torch, if it has been loaded."""
    module = sys.modules.get("plimsoll._torch")
    return module if hasattr(module, "attach") else None


def when_torch_comes(call: Callable[[], None]) -> None:
    """Has `call` called once torch has been imported, at the end of the statement that imports it.

    Does nothing when that is waited for already, or when torch is imported.
    """
    if "torch" not in sys.modules and not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder(call))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch as the finders after it do, with a loader that says when it is done."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._call)
        return spec


class _Loader(importlib.abc.Loader):
    """Torch's own loader; it stands in the module again once that is executed."""

    def __init__(self, own: Any, call: Callable[[], None]) -> None:
        self._own, self._call = own, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        self._call()
