# SPDX-License-Identifier: Apache-2.0
"""The program that a build makes, and the package beside it: one command line, whichever of both is started."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import plimsoll

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = os.environ.get("PLIMSOLL_PROGRAM", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="PLIMSOLL_PROGRAM names no program")
INSTALL = "no Python here has the package plimsoll; `pip install '.[chat,vision,pairs]'` in Plimsoll's source folder installs it"


def started(*words, program=None, **environment):
    """The program in a shell that knows nothing of this build."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run([program or PROGRAM, *map(str, words)], text=True, capture_output=True, timeout=300, check=False,
                          env={**clean, **environment})


def module(*words, **options):
    """python -m plimsoll."""
    return subprocess.run([sys.executable, "-m", "plimsoll", *map(str, words)], text=True, capture_output=True, timeout=300,
                          check=False, **options)


@pytest.fixture
def alone(tmp_path):
    """The program without a package beside it, and a PATH without any that is installed."""
    pytest.importorskip("torch")
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin/plimsoll"
    shutil.copy(PROGRAM, path)
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("python3", "python"):
        (empty / name).write_text("#!/bin/sh\nexit 1\n")
        (empty / name).chmod(0o755)
    return lambda *words, **more: started(*words, program=path, **{"PATH": f"{empty}:/usr/bin:/bin", **more})


@pytest.mark.parametrize("recipe", ["cosir", "can-kd", "chat", "vision"])
def test_s34_the_built_program_knows_the_recipes_that_are_in_python(recipe):
    done = started("train", recipe, "--help")
    assert done.returncode == 0 and f"Usage: plimsoll train {recipe}" in done.stdout and "--batch-size" in done.stdout, done.stderr
    done = started("config", recipe)
    assert done.returncode == 0 and f"`plimsoll train {recipe} --config FILE`" in done.stdout


def test_s34_every_list_of_recipes_has_them():
    assert [line.split("\t")[0] for line in started("recipes").stdout.splitlines()] == ["cosir", "can-kd", "chat", "vision"]
    assert re.search(r"^  chat  ", started("train", "--help").stdout, re.M)
    done = started("train", "visoin")
    assert done.returncode == 2 and "did you mean vision?" in done.stderr


@pytest.fixture
def told(alone, tmp_path):
    """What a Python is started with that has the package, a word a line; None where the program does the command itself."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "python3").write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\nprintf "%s\\n" "$@" > "$TOLD"\n')
    (site / "python3").chmod(0o755)

    def words_of(*words):
        into = tmp_path / "told"
        into.unlink(missing_ok=True)
        alone(*words, PATH=f"{site}:/usr/bin:/bin", TOLD=str(into))
        return into.read_text().splitlines() if into.exists() else None

    return words_of


def test_s34_what_only_python_has_is_handed_over_word_by_word(told, tmp_path):
    runs = {}
    for recipe in ("chat", "of-a-package", "cosir", "python"):
        runs[recipe] = str(tmp_path / recipe)
        plimsoll._core.RunFolder.create(runs[recipe], f'recipe = "{recipe}"\n').close()
    path = "it's a \"chat\" ü.jsonl"
    for words in (["resume", "--quiet", runs["chat"]], ["eval", runs["chat"], "--json"], ["eval", runs["of-a-package"]],
                  ["export", runs["chat"], "--out", "x"], ["import", "chat", path, "--out", ""], ["import", "pairs"],
                  ["import", "vision", "--help"], ["recipes"], ["resume", "--help"], ["plan", "vision", "--data", "*"],
                  ["eval", runs["cosir"]], ["resume", runs["python"]], ["train"], ["eval", "nowhere"],
                  ["queue", "list", path, "--json"], ["queue"], ["import", "can", "a/processed_graphs.pt", "--out", path],
                  ["store", "import", "a/embeddings_chunk_0.pt", "--out", path], ["store", "import", path, "--format", "pt"]):
        assert told(*words) == ["-m", "plimsoll", *words]
    for words in (["status", runs["chat"]], ["import", "can", path], ["store", "import", path], ["store", "info", "a.pt"], ["import", "--help"], ["run", "--", "train", "chat"], ["--help"],
                  ["synth", "cosir", "--help"], ["import"], []):
        assert told(*words) is None, words


def test_s34_a_module_in_the_present_folder_is_not_taken_for_the_package(tmp_path, monkeypatch):
    for name in ("plimsoll", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')\n")
    monkeypatch.chdir(tmp_path)
    assert "Usage: plimsoll train chat" in started("train", "chat", "--help").stdout


def test_s34_what_the_built_program_does_itself_starts_no_python(alone):
    done = alone("store", "--help")
    assert done.returncode == 0 and "Usage: plimsoll store" in done.stdout and not done.stderr


def test_s34_an_installed_package_is_found_where_none_was_built_beside(alone, tmp_path):
    package = str(pathlib.Path(plimsoll.__file__).parents[1])
    site = tmp_path / "site/bin"
    site.mkdir(parents=True)
    (site / "python3").write_text(f"#!/bin/sh\nPYTHONPATH={package} exec {sys.executable} \"$@\"\n")
    (site / "python3").chmod(0o755)
    done = alone("config", "chat", PATH=f"{site}:/usr/bin:/bin")
    assert done.returncode == 0 and "`plimsoll train chat --config FILE`" in done.stdout, done.stderr


# The Python that the program was built for is looked at last, and has no package of its own.
@pytest.mark.skipif(subprocess.run([sys.executable, "-I", "-c", "import plimsoll"], capture_output=True, check=False).returncode == 0,
                    reason="the package is installed in this Python")
def test_s34_without_a_package_it_says_what_to_do(alone):
    for words in (("train", "cosir"), ("config", "vision"), ("plan", "chat", "--data", "x"), ("recipes",), ("queue", "list"),
                  ("import", "chat", "x"), ("import", "can", "x.pt"), ("store", "import", "x.pt")):
        done = alone(*words)
        named = " ".join(words[:2]) if words[0] in ("import", "store") else words[0]
        assert done.returncode == 1 and f"error: {named} is done in Python" in done.stderr and INSTALL in done.stderr, done.stderr


def test_s34_python_m_plimsoll_is_the_program(tmp_path):
    assert module("--version").stdout == started("--version").stdout
    done = module("train", "chatt")
    assert done.returncode == 2 and "did you mean chat?" in done.stderr and "pip install" not in done.stderr
    done = module("synth", "cosir", "--rows", 100, "--out", tmp_path / "data", "--json")
    assert done.returncode == 0 and json.loads(done.stdout), done.stderr


# ---- S38 ----

def test_s38_one_way_to_install_is_named_everywhere():
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1], re.M))
    files = [ROOT / "README.md", *(path for folder in ("docs", "python", "cli", "src", "tools") for path in (ROOT / folder).rglob("*")
                                  if path.suffix in (".md", ".py", ".cpp", ".h", ".sh") and "decisions" not in path.parts)]
    named = set()
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install ['\"]?plimsoll\b|plimsoll\[[a-z,]+\]['\"`]", text), path
        named.update(one for said in re.findall(r"pip install '\.\[([\w,]+)\]'", text) for one in said.split(","))
    assert {"transformers", "lightning", "accelerate", "chat", "vision"} <= named <= extras


def test_s34_the_readme_says_where_the_program_is():
    text = (ROOT / "README.md").read_text()
    assert "build/release/bin/plimsoll" in text and "python -m plimsoll" in text
    makefile = (ROOT / "Makefile").read_text()
    assert "build: setup-build\n\t@cmake --preset release -DPLIMSOLL_PYTHON=ON" in makefile and "demo: build\n" in makefile
