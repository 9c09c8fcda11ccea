# SPDX-License-Identifier: Apache-2.0
"""Recipes in files of your own: the file's module, its digest, and what a run's run.toml notes of it.

A file is imported as `python mine.py` would import it: modules beside it are found first. In a package, a folder with an __init__.py,
it may import its neighbours relatively.

Threads: the main one.   Memory: that of the module.
"""
from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import pathlib
import re
import sys
import types
from typing import NamedTuple

from ..errors import NotFoundError

_NOTED = re.compile(r'^(recipe|recipe_file|recipe_sha256) = ("(?:[^"\\]|\\.)*")', re.M)


class Source(NamedTuple):
    """The file that a recipe was read from."""

    path: str
    """Absolute; "": none."""
    sha256: str
    """Digest of the file; in a package, of all its Python files."""


def is_file(word: str | os.PathLike[str]) -> bool:
    """Whether a word names a recipe's file, and not a recipe."""
    return os.fspath(word).endswith(".py")


def noted(run: str) -> dict[str, str]:
    """Returns what a run.toml notes: recipe, recipe_file and recipe_sha256, each "" where it is not there."""
    try:
        text = (pathlib.Path(run) / "run.toml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return {"recipe": "", "recipe_file": "", "recipe_sha256": ""} | {name: json.loads(value) for name, value in _NOTED.findall(text)}


def read(file: str | os.PathLike[str]) -> tuple[types.ModuleType, Source]:
    """Imports a file, again only if it has changed.

    Errors: NotFoundError where there is none; ValueError where a module of another file has its name; whatever the file raises.
    """
    path = pathlib.Path(os.path.abspath(file))
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file")
    folder, names = path.parent, [] if path.stem == "__init__" else [path.stem]
    while (folder / "__init__.py").is_file():
        folder, names = folder.parent, [folder.name, *names]
    name = ".".join(names)
    text = path.read_bytes()
    source = Source(str(path), _digest(path, text))
    known = sys.modules.get(name)
    if known is not None:
        _must_be_of(path, known)
        if getattr(known, "__plimsoll_source__", None) == source:
            return known, source
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # It may have been written just now.
    if len(names) > 1:
        _must_be_of(path.parent / "__init__.py", importlib.import_module(name.rpartition(".")[0]))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)  # The bytes of the digest, not those of a cache.
    except BaseException:
        sys.modules.pop(name, None)
        raise
    module.__plimsoll_source__ = source  # type: ignore[attr-defined]
    return module, source


def _must_be_of(path: pathlib.Path, module: types.ModuleType) -> None:
    of = getattr(module, "__file__", None)
    if of is None or not path.samefile(of):
        raise ValueError(f"{path}: there is a module {module.__name__!r} already ({of or 'part of Python'}); rename the file or its folder")


def _digest(path: pathlib.Path, text: bytes) -> str:
    if not (path.parent / "__init__.py").is_file():
        return hashlib.sha256(text).hexdigest()
    digests = [[one.relative_to(path.parent).as_posix(), hashlib.sha256(one.read_bytes()).hexdigest()] for one in path.parent.rglob("*.py")]
    return hashlib.sha256(json.dumps(sorted(digests)).encode()).hexdigest()
