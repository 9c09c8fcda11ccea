# SPDX-License-Identifier: Apache-2.0
"""ruff on all Python of the project, with the rules of pyproject.toml; and that it finds what it is for."""
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = ("bench", "docs", "python", "tests", "tools")


def ruff(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", *arguments], cwd=ROOT,
                          text=True, capture_output=True, check=False, **options)


@pytest.fixture(scope="module", autouse=True)
def installed():
    pytest.importorskip("ruff")


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
