# SPDX-License-Identifier: Apache-2.0
"""Imports within python/plimsoll point down from room to room, and modules import each other in no circle.

Goal:   a file can be read with what stands below it alone (decision 0070).
Method: tools/tidy.py draws the graph of imports, those within functions too; faults are planted in a copy of the package.
"""
import importlib.util
import pathlib
import shutil

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load_tidy():
    spec = importlib.util.spec_from_file_location("tidy", ROOT / "tools" / "tidy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TIDY = load_tidy()


def problems(root):
    return [f"{name}:{line}: {what}" for check in (TIDY.check_rooms, TIDY.check_privacy) for name, line, what in check(root)]


@pytest.fixture
def planted(tmp_path):
    """Adds a line to a file of a copy of the package, and says what is found there."""
    def plant(file, line):
        shutil.rmtree(tmp_path / "tree", ignore_errors=True)
        shutil.copytree(ROOT / TIDY.PACKAGE, tmp_path / "tree" / TIDY.PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        path = tmp_path / "tree" / TIDY.PACKAGE / file
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as out:
            out.write(f"\n{line}\n")
        return problems(tmp_path / "tree")

    return plant


def test_the_package_has_no_circle_and_no_arrow_upward():
    assert problems(ROOT) == []


def test_each_room_is_there_and_its_imports_are_seen():
    modules = TIDY.python_modules(ROOT)
    arrows = {(name, target) for name, path in modules.items()
              for _, target, _ in TIDY.python_imports(name, path, modules)}
    assert len(modules) > 100 and len(arrows) > 300
    assert ("plimsoll.run._run_life", "plimsoll.ranks._messages") in arrows  # At the top of a file.
    assert ("plimsoll.run._run", "plimsoll.ranks._ranks") in arrows  # Within a function.
    assert ("plimsoll.recipes.chat._task", "plimsoll.data._token_set") in arrows  # Over three levels.
    assert ("plimsoll.memory._memory", "plimsoll._core") in arrows
    for room in (one for rooms in TIDY.ROOMS for one in rooms):
        assert f"plimsoll.{room}" in modules


@pytest.mark.parametrize("file, line, found", [
    ("core/_room.py", "from ..memory._memory import Governor", "core may not import plimsoll.memory._memory"),
    ("ranks/_ranks.py", "def f():\n    from ..rows import _rank_rows", "ranks may not import plimsoll.rows._rank_rows"),
    ("run/_run.py", "import plimsoll.cli._program", "run may not import plimsoll.cli._program"),
    ("data/_data.py", "from ..ranks._messages import Boundary", "data may not import plimsoll.ranks._messages"),
    ("ranks/_ranks.py", "if TYPE_CHECKING:\n    from ..run._run_parts import Parts", "ranks may not import plimsoll.run"),
    ("recipes/chat/_task.py", "def f():\n    from ...integrations import lightning", "recipes may not import"),
    ("rows/_embedding.py", "from .. import Run", "whole package"),
    ("recipes/chat/_task.py", "def f(run):\n    return run._life", "uses _life, which is private"),
    ("integrations/lightning.py", "def f(run):\n    run._close_parts()", "uses _close_parts, which is private"),
    ("helpers/_any.py", "import os", "no room"),
    ("watch/_samples.py", "def f():\n    from ._search import Search", "a circle: plimsoll.watch._"),
    ("core/_folders.py", "from . import _folders", "a circle: plimsoll.core._folders → plimsoll.core._folders"),
])
def test_a_planted_fault_is_found(planted, file, line, found):
    assert any(found in one for one in planted(file, line)), planted(file, line)


def test_types_of_the_same_room_may_go_in_circles(planted):
    assert planted("watch/_samples.py", "if TYPE_CHECKING:\n    from ._search import Search") == []


def test_a_downward_import_within_a_function_is_no_fault(planted):
    assert planted("cli/_program.py", "def f():\n    from ..run import _run\n    from ..core import _folders") == []
