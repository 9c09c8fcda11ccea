# SPDX-License-Identifier: Apache-2.0
"""The one way from the Python code to torch and to plimsoll._torch.

`import plimsoll` never imports torch. Once the user's program has imported it, a new Governor
loads plimsoll._torch, if it was built, and attaches the tensor arena.

Threads: load() may be called from any thread; Python's import lock orders them.
"""
from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

_EXTENSION_MISSING = "plimsoll was built without"


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
    except ImportError as error:
        if _EXTENSION_MISSING in str(error):
            raise
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
    except ImportError as error:
        if _EXTENSION_MISSING in str(error):
            return None
        raise


def loaded() -> ModuleType | None:
    """plimsoll._torch, if it has been loaded."""
    module = sys.modules.get("plimsoll._torch")
    return module if hasattr(module, "attach") else None
