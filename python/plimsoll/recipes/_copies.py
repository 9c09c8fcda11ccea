# SPDX-License-Identifier: Apache-2.0
"""Copies of Plimsoll's recipes, to be changed: `plimsoll recipes copy NAME DIR`.

A copy is a package of its own: recipe.py with the options and RECIPE, the recipe's other files beside it under their names. What they
import from Plimsoll is written by its public name.

Threads: any.   Memory: the files' text.
"""
from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import pathlib
import re

from ..errors import NotFoundError

_PUBLIC = ("plimsoll", "plimsoll.errors", "plimsoll.kernels", "plimsoll.recipes")
_ROOM = "plimsoll.recipes"


def copy_recipe(name: str, folder: str | os.PathLike[str]) -> list[str]:
    """Copies a recipe of Plimsoll's into a new or empty folder. Returns the paths of the files.

    The copy's recipe is called my-NAME. `plimsoll train DIR/recipe.py` trains what `plimsoll train NAME` trains, to the same bits.
    Errors: NotFoundError (no such recipe in Python); ValueError (the folder is not empty); OSError.
    """
    package = f"{_ROOM}.{name.replace('-', '_')}"
    if not re.fullmatch("[a-z0-9-]+", name) or importlib.util.find_spec(package) is None or not hasattr(importlib.import_module(package), "RECIPE"):
        raise NotFoundError(f"{name!r} is no recipe of Plimsoll's in Python; `plimsoll recipes` lists those there are")
    out = pathlib.Path(folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: there is something already; name a new or empty folder")
    texts = _files_of(package)
    texts["recipe.py"] = _renamed(texts.pop("__init__.py"), name, os.fspath(out / "recipe.py"))
    texts["__init__.py"] = f"# SPDX-License-Identifier: Apache-2.0\n\"\"\"A copy of Plimsoll's recipe {name}; recipe.py has its options.\"\"\"\n"
    out.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        (out / file).parent.mkdir(exist_ok=True)
        (out / file).write_text(text, encoding="utf-8")
    return [str(out / file) for file in sorted(texts)]


def _files_of(package: str) -> dict[str, str]:
    """Returns the texts of a package's own files by name: those that its first file needs, with their imports rewritten."""
    folder = pathlib.Path(importlib.import_module(package).__path__[0])
    texts: dict[str, str] = {}
    waiting = ["__init__.py"]
    while waiting:
        file = waiting.pop()
        if file not in texts:
            texts[file], needed = _rewritten((folder / file).read_text(encoding="utf-8"), package, folder)
            waiting += needed
    return texts | {f"presets/{file.name}": file.read_text(encoding="utf-8") for file in folder.glob("presets/*.toml")}


def _rewritten(text: str, package: str, folder: pathlib.Path) -> tuple[str, list[str]]:
    """Returns a file's text with its imports as a copy has them, and the files beside it that it imports."""
    lines, needed = text.splitlines(keepends=True), []
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.level]
    for node in sorted(nodes, key=lambda one: -one.lineno):
        beside = [one.name for one in node.names if node.level == 1 and not node.module and (folder / f"{one.name}.py").is_file()]
        needed += [f"{one}.py" for one in beside or ([node.module] if node.level == 1 and node.module else [])]
        if beside or (node.level == 1 and node.module):
            continue
        assert node.end_lineno is not None and node.end_col_offset is not None
        after = lines[node.end_lineno - 1].encode()[node.end_col_offset:].decode()
        indent = " " * node.col_offset
        lines[node.lineno - 1:node.end_lineno] = [f"{indent}{made}\n" for made in _imports(node, package)]
        if after.strip():  # A comment.
            lines[node.lineno - 1] = lines[node.lineno - 1].rstrip("\n") + after
    return "".join(lines), needed


def _imports(node: ast.ImportFrom, package: str) -> list[str]:
    """Returns the statements that import the same by public names."""
    if node.level == 1:
        return [f"from .recipe import {', '.join(_as(one) for one in node.names)}"]
    module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    places: dict[str, list[str]] = {}
    for one in node.names:
        places.setdefault(_place(module, one.name), []).append(_as(one))
    return [f"from {place} import {', '.join(names)}" for place, names in sorted(places.items())]


def _as(name: ast.alias) -> str:
    return f"{name.name} as {name.asname}" if name.asname else name.name


def _place(module: str, name: str) -> str:
    """Returns the public module that has the same object, or else the module itself."""
    for public in _PUBLIC:
        if name in importlib.import_module(public).__all__ and _same(public, module, name):
            return public
    return module


def _same(public: str, module: str, name: str) -> bool:
    one, other = (getattr(importlib.import_module(place), name, None) for place in (public, module))
    return one is other and one is not None


def _renamed(text: str, name: str, file: str) -> str:
    """Returns the text of recipe.py: its RECIPE has another name, and its examples name the file."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Recipe"]
    [first] = [node.args[0] for node in calls]
    assert isinstance(first, ast.Constant) and first.value == name
    lines = text.splitlines(keepends=True)
    line = lines[first.lineno - 1].encode()
    lines[first.lineno - 1] = (line[:first.col_offset] + f'"my-{name}"'.encode() + line[first.end_col_offset:]).decode()
    shown = file if re.fullmatch(r"[\w./-]+", file) else "recipe.py"  # It is within texts of Python.
    return re.sub(rf"\bplimsoll (train|plan|config) {name}(?= )", lambda found: f"plimsoll {found[1]} {shown}", "".join(lines))
