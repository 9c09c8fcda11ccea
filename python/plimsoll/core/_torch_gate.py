# SPDX-License-Identifier: Apache-2.0
"""The one place that loads torch and plimsoll._torch.

`import plimsoll` never imports torch. Once the program has imported it, a new Governor loads plimsoll._torch, if that
was built, and attaches the tensor arena. A Governor made earlier does so as soon as torch is imported.

plimsoll._torch loads only beside the minor version of torch that it was built for. Torch's C++ layout changes with
the version, and a library that loads by chance would misread torch's objects.

Threads: load() may be called from any thread; Python's import lock orders them.
"""
from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .. import _core
from ._not_built import NotBuilt


def torch_if_imported() -> Any | None:
    """Returns the torch module, or None if the program has not finished importing it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and hasattr(torch, "Tensor") else None


def load() -> ModuleType:
    """Imports torch, then plimsoll._torch, and returns plimsoll._torch.

    Errors: ImportError saying how to build plimsoll._torch, that torch is missing, or that it is
            not the torch that plimsoll._torch was built for, and what to install instead.
    """
    if importlib.util.find_spec("torch") is None:
        then = ("install torch, then rebuild with `pip install .` in Plimsoll's source folder"
                if not _core.torch_version else _how_to_install())
        raise ImportError(f"this part of plimsoll needs torch, which is not installed: {then}")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with contextlib.suppress(ImportError):  # Torch, and a run's first seed, import them; while they load, they swallow Ctrl-C.
            import numpy.random  # noqa: F401
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # Raises what came meanwhile.
    import torch  # Before plimsoll._torch, so that the one libtorch in the process is torch's own.

    if _core.torch_version and _minor(torch.__version__) != _minor(_core.torch_version):
        raise ImportError(_misfit(torch.__version__))
    try:
        import plimsoll._torch as extension
    except NotBuilt:
        raise
    except ImportError as error:
        raise ImportError(f"{_misfit(torch.__version__)} ({error})") from error
    return extension


def _minor(version: str) -> str:
    """Returns the minor version: "2.13" for "2.13.0+cpu"."""
    found = re.match(r"\d+\.\d+", version)
    return found.group() if found else version


def _how_to_install() -> str:
    return f'pip install "torch=={_minor(_core.torch_version)}.*"'


def _misfit(installed: str) -> str:
    return (f"plimsoll._torch was built for torch {_core.torch_version} and does not fit the installed torch "
            f"{installed}: {_how_to_install()}, or build Plimsoll for the torch that is there, with "
            "`pip install .` in its source folder")


def load_if_torch_imported() -> ModuleType | None:
    """Returns load(), or None if the program has not imported torch or plimsoll._torch was not built."""
    if torch_if_imported() is None:
        return None
    try:
        return load()
    except NotBuilt:
        return None


def loaded() -> ModuleType | None:
    """Returns plimsoll._torch if it has been loaded, else None."""
    module = sys.modules.get("plimsoll._torch")
    return module if hasattr(module, "attach") else None


def when_torch_comes(call: Callable[[], None]) -> None:
    """Calls `call` once torch has been imported, at the end of the statement that imports it.

    Does nothing if torch is imported already, or a call is waiting for it.
    """
    if "torch" not in sys.modules and not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder(call))


class _Finder(importlib.abc.MetaPathFinder):
    """The finder that gives torch a loader which reports when the import is done."""

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
    """A wrapper of torch's own loader, which is restored in the module after the import."""

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
