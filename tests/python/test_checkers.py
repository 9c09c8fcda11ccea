# SPDX-License-Identifier: Apache-2.0
"""ruff on all Python of the project, and mypy on the package, with the rules of pyproject.toml; and that both find what
they are for."""
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = ("bench", "docs", "python", "tests", "tools")


def ruff(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", *arguments], cwd=ROOT,
                          text=True, capture_output=True, check=False, **options)


def test_ruff_finds_nothing():
    done = ruff(*PYTHON)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("code", "planted"), [
    ("F401", "import json\n"),
    ("F821", "def f():\n    return nothing\n"),
    ("F841", "def f():\n    x = 1\n"),
    ("B006", "def f(x=[]):\n    return x\n"),
    ("B023", "def f():\n    return [lambda: one for one in range(2)]\n"),
    ("E722", "try:\n    f = 1\nexcept:\n    pass\n"),
])
def test_ruff_finds_what_was_planted(code, planted):
    done = ruff("--stdin-filename", "python/plimsoll/planted.py", "-", input=planted)
    assert done.returncode == 1 and f" {code} " in done.stdout, done.stdout + done.stderr


def mypy(*arguments):
    return subprocess.run([sys.executable, "-m", "mypy", "--no-error-summary", *arguments], cwd=ROOT, text=True, capture_output=True,
                          check=False)


def test_mypy_finds_nothing():
    pytest.importorskip("transformers")  # Among others whose types the package's are held to.
    done = mypy()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("code", "planted"), [
    ("return-value", "def f() -> str:\n    return 1\n"),
    ("arg-type", "def f(x: int) -> None:\n    f('text')\n"),
    ("unused-ignore", "x = 1  # type: ignore\n"),
    ("arg-type", "from plimsoll import _core\n_core.format_bytes('text')\n"),  # By a stub that the build made.
])
def test_mypy_finds_what_was_planted(tmp_path, code, planted):
    (tmp_path / "planted.py").write_text(planted)
    done = mypy("--config-file", "pyproject.toml", str(tmp_path / "planted.py"))
    assert done.returncode == 1 and f"[{code}]" in done.stdout, done.stdout + done.stderr
