# SPDX-License-Identifier: Apache-2.0
"""tools/quick.py: what it finds changed, which tests it chooses, and that it fails when one of them does."""
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FILES = {
    ".gitignore": "__pycache__/\n",
    "tools/tidy.py": "import pathlib, sys\nsys.exit('bad' in pathlib.Path('src/store/pages.cpp').read_text())\n",
    "src/store/pages.cpp": "int f();\n",
    "src/store/pages.h": "int f();\n",
    "src/data/loader_test.cpp": '#include "store/pages.h"\n',
    "src/data/loader.cpp": "int g();\n",
    "src/os/file_test.cpp": '#include "os/file.h"\n',
    "python/plimsoll/run/_signs.py": "x = 1\n",
    "tests/python/test_signs.py": "def test_a():\n    f()\n",
    "tests/python/test_pages.py": "from plimsoll.run import _signs\n",
    "tests/python/test_steps.py": "import torch\nfrom plimsoll.run import _signs\n",
    "tests/python/test_other.py": "import plimsoll\n",
}


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """The tool in a repository of its own, with one commit."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in ("init -q -b main", "add .", "-c user.name=A -c user.email=a@example.org commit -qm one"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    spec = importlib.util.spec_from_file_location("quick", ROOT / "tools/quick.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    return tool


def commit(tool):
    for command in ("checkout -q -b change", "add .", "-c user.name=A -c user.email=a@example.org commit -qm two"):
        subprocess.run(["git", *command.split()], cwd=tool.ROOT, check=True)


def test_new_files_and_edits_and_commits_since_main_are_a_change(quick):
    (quick.ROOT / "src/store/pages.cpp").write_text("int f() { return 1; }\n")
    commit(quick)
    (quick.ROOT / "src/data/loader.cpp").write_text("int h();\n")
    (quick.ROOT / "new.md").write_text("New.\n")
    assert sorted(quick.changed_since("")) == ["new.md", "src/data/loader.cpp", "src/store/pages.cpp"]
    assert sorted(quick.changed_since("HEAD")) == ["new.md", "src/data/loader.cpp"]


def test_without_a_change_the_last_commit_is_one(quick):
    (quick.ROOT / "src/data/loader.cpp").write_text("int h();\n")
    commit(quick)
    subprocess.run("git checkout -q main && git merge -q change", shell=True, cwd=quick.ROOT, check=True)
    assert quick.changed_since("") == ["src/data/loader.cpp"]


def test_tests_of_a_folder_and_those_that_include_a_header_are_chosen(quick):
    assert quick.cpp_tests(["src/store/pages.cpp"]) == ["store"]
    assert quick.cpp_tests(["src/store/pages.h"]) == ["data", "store"]
    assert quick.cpp_tests(["docs/a.md", "python/plimsoll/run/_signs.py"]) == []


def test_tests_that_name_a_module_are_chosen_and_those_with_torch_counted(quick):
    files, others = quick.python_tests(["python/plimsoll/run/_signs.py"])
    assert files == sorted([*quick.ALWAYS, "tests/python/test_pages.py", "tests/python/test_signs.py"]) and others == 1
    assert quick.python_tests(["tests/python/test_other.py"]) == (["tests/python/test_other.py"], 0)


def test_a_broken_rule_fails_it_and_what_the_time_did_not_allow_is_said(quick, monkeypatch, capfd):
    (quick.ROOT / "docs.md").write_text("New.\n")
    monkeypatch.setattr(sys, "argv", ["quick"])
    assert quick.main() == 0 and "quick: passed." in capfd.readouterr().out
    (quick.ROOT / "src/store/pages.cpp").write_text("bad\n")
    monkeypatch.setattr(quick, "SECONDS", 0)
    assert quick.main() == 0
    assert "left out: house rules, configure" in capfd.readouterr().out
    monkeypatch.setattr(quick, "SECONDS", 60)
    monkeypatch.setattr(quick, "cpp_tests", lambda changed: [])
    assert quick.main() == 1 and "FAILED: house rules" in capfd.readouterr().out


def test_what_the_time_ends_leaves_no_child(quick, monkeypatch, tmp_path):
    """A build's compilers are children of a child. Here one holds a pipe, which ends with the last of them."""
    os.mkfifo(tmp_path / "pipe")
    pipe, waits = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), subprocess.Popen.wait
    os.set_blocking(pipe, True)

    def over(self, timeout=None):
        if timeout is None:
            return waits(self)
        with open(tmp_path / "begun", "rb") as begun:  # Opened once the child writes to it.
            assert begun.read() == b"sleeps\n"
        raise subprocess.TimeoutExpired("sh", timeout)

    os.mkfifo(tmp_path / "begun")
    monkeypatch.setattr(subprocess.Popen, "wait", over)
    assert quick.ended_within(1, ("sh", "-c", f"sleep 1000 > {tmp_path}/pipe & echo sleeps > {tmp_path}/begun; wait")) is None
    assert os.read(pipe, 1) == b""
    os.close(pipe)
