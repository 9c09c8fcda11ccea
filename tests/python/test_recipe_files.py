# SPDX-License-Identifier: Apache-2.0
"""`plimsoll train ./mine.py`: a recipe in a file of its own, which its runs remember. The file is examples/recipe.py, as a stranger writes it."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")

import plimsoll
from plimsoll.cli._program import main
from plimsoll.core import _torch_gate
from plimsoll.core._torch_settings import torch_settings
from plimsoll.errors import NotFoundError
from tests.support.killed_recipes import killed
from tests.support.on_device import run_checks

if _torch_gate.load_if_torch_imported() is None:
    pytest.skip("plimsoll was built without torch", allow_module_level=True)

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "recipe.py"
LIMIT = ("--memory-limit", "2GiB", "--foreign-bytes", "256MiB", "--compute-threads", "1")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with the file and its data, which the program is started in."""
    rows = np.random.default_rng(1).standard_normal((400, 5)).astype(np.float32)
    rows[:, 4] = rows[:, 0] * rows[:, 1]
    np.save(tmp_path / "table.npy", rows)
    shutil.copy(EXAMPLE, tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if name not in before and str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def program(mine, capfd):
    """The program in this process: torch is imported once."""
    def start(*words):
        capfd.readouterr()
        with torch_settings():  # A process of its own would leave them.
            status = main(list(map(str, words)))
        return Done(status, *capfd.readouterr())
    return start


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def said(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def events(run, name="recipe"):
    return [one for one in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if one["event"] == name]


def test_a_file_of_sixty_lines_is_planned_trained_killed_and_resumed_to_the_same_bits(program, mine):
    assert len(EXAMPLE.read_text().splitlines()) <= 60 and "._" not in EXAMPLE.read_text()  # By public names alone.
    assert "--width" in program("train", "./mine.py", "--help").stdout
    assert "width = 64" in program("config", "./mine.py").stdout
    assert 1 <= said(program("plan", "./mine.py", "--data", "table.npy", *LIMIT, "--json"))["batch_size"] <= 400
    given = ("--data", "table.npy", "--epochs", "4", *LIMIT, "--json", "--quiet")
    whole = said(program("train", "./mine.py", "--out", "whole", *given))
    assert whole["status"] == "finished" and whole["step"] == 52
    options = {"data": mine / "table.npy", "epochs": 4, "memory_limit": "4GiB", "foreign_bytes": "256MiB", "compute_threads": 1,
               "checkpoint_every_n_steps": 7, "progress": False}
    killed(str(mine / "mine.py"), 30, out=mine / "run", **options)
    status = json.loads(program("status", "run", "--json").stdout)
    assert (status["recipe"], status["checkpoint_step"], status["alive"]) == ("table", 28, False)
    again = program("train", "./mine.py", "--out", "run", *given)
    assert again.returncode == 1 and "it is a run already; `plimsoll resume" in again.stderr
    other = program("resume", "run", "--set", "width=8")
    assert other.returncode == 2 and "width is part of this run's identity (64) and cannot become 8" in other.stderr
    resumed = program("resume", "run", "--json", "--quiet")
    assert (said(resumed)["weights"], said(resumed)["step"]) == (whole["weights"], 52) and "has changed" not in resumed.stderr
    assert said(program("eval", "run", "--json")) == said(program("eval", "whole", "--json")) == {"step": 52, "loss": pytest.approx(0.6, abs=0.6)}
    assert (mine / "run" / "report.html").is_file() and program("report", "run").returncode == 0
    assert "the recipe table has no export" in program("export", "run", "--out", "x").stderr
    assert [(one["step"], one["changed"]) for one in events(mine / "run")] == [(0, False), (28, False)]
    assert events(mine / "run")[0]["file"] == str(mine / "mine.py")


def test_several_ranks_train_it(mine):
    def ranks(*words):
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "plimsoll", *words],
                              text=True, capture_output=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        (told,) = (line for line in done.stdout.splitlines() if line.startswith("{"))  # The first rank tells, and it alone.
        return json.loads(told)
    first = ranks("train", "./mine.py", "--data", "table.npy", "--out", "run", *LIMIT, "--json", "--quiet")
    assert first["status"] == "finished" and first["step"] == 3 * 7  # 64 rows a step.
    again = ranks("resume", "run", "--json", "--quiet")
    assert again["weights"] == first["weights"] and len(events(mine / "run")) == 2


def test_it_trains_on_a_device():
    run_checks("recipe_file")


def test_a_changed_file_is_told_and_a_moved_one_is_asked_for(program, mine):
    given = ("--data", "table.npy", "--out", "run", *LIMIT, "--quiet", "--json")
    said(program("train", "mine.py", *given))
    (mine / "mine.py").write_text(EXAMPLE.read_text().replace('return {"weights"', 'return {"changed": True, "weights"'))
    resumed = program("resume", "run", "--json", "--quiet")
    assert said(resumed)["changed"] is True
    assert f"plimsoll: {mine / 'mine.py'} has changed since this run last started; steps after 39 are made by" in resumed.stderr
    assert [one["changed"] for one in events(mine / "run")] == [False, True]
    (mine / "mine.py").rename(mine / "moved.py")
    for words in (("resume", "run"), ("eval", "run"), ("export", "run", "--out", "x")):
        done = program(*words)
        assert done.returncode == 2 and f"read from {mine / 'mine.py'}, which is not there now; say where it is with --recipe-file FILE" in done.stderr
    assert said(program("eval", "run", "--recipe-file", "moved.py", "--json"))["step"] == 39
    resumed = program("resume", "run", "--recipe-file=moved.py", "--quiet")
    assert resumed.returncode == 0 and "has changed" not in resumed.stderr
    assert said(program("eval", "run", "--json"))["step"] == 39  # It is noted anew.
    (mine / "moved.py").write_text(EXAMPLE.read_text().replace('Recipe("table"', 'Recipe("chart"'))
    assert "its recipe is 'chart', and run is a run of 'table'" in program("resume", "run").stderr
    (mine / "moved.py").unlink()
    with pytest.raises(NotFoundError, match="--recipe-file"):
        plimsoll.resume(mine / "run")


def test_python_starts_it_and_reads_it_again_when_it_has_changed(mine):
    given = {"data": mine / "table.npy", "memory_limit": "4GiB", "foreign_bytes": "256MiB", "compute_threads": 1, "progress": False}
    first = plimsoll.train(mine / "mine.py", out=mine / "run", **given)
    assert plimsoll.plan(str(mine / "mine.py"), data=mine / "table.npy", memory_limit="4GiB", foreign_bytes="256MiB")["batch_size"] > 0
    (mine / "mine.py").write_text(EXAMPLE.read_text().replace('return {"weights"', 'return {"changed": True, "weights"'))
    other = plimsoll.train(mine / "mine.py", out=mine / "other", **given)
    assert other["changed"] is True and other["weights"] == first["weights"]
    assert plimsoll.resume(mine / "run", progress=False)["changed"] is True
    (mine / "mine.py").rename(mine / "moved.py")
    assert plimsoll.evaluate(mine / "run", recipe_file=mine / "moved.py")["step"] == 39
    (mine / "named").mkdir()
    (mine / "named" / "run.toml").write_text('recipe = "chat"\n')
    with pytest.raises(ValueError, match="its recipe was not read from a file"):
        plimsoll.evaluate(mine / "named", recipe_file=mine / "moved.py")
    with pytest.raises(ValueError, match="name the file in its place"):  # By its name a run would not remember it.
        plimsoll.train("table", out=mine / "third", **given)


def test_neighbours_are_found_in_a_folder_and_in_a_package(program, mine):
    """A changed neighbour of a package is a changed recipe."""
    for folder, how in (("plain", "from rows import WIDTH"), ("package", "from .rows import WIDTH")):
        (mine / folder).mkdir()
        (mine / folder / "rows.py").write_text("WIDTH = 16\n")
        (mine / folder / "mine.py").write_text(EXAMPLE.read_text().replace("import plimsoll\n", f"import plimsoll\n{how}\n", 1).replace(
            "option(64,", "option(WIDTH,").replace('"table"', f'"{folder}"'))
    (mine / "package" / "__init__.py").touch()
    for folder in ("plain", "package"):
        assert "width = 16\n" in program("config", f"{folder}/mine.py").stdout
    given = ("--data", "table.npy", "--out", "run", *LIMIT, "--quiet", "--json")
    said(program("train", "package/mine.py", *given))
    (mine / "package" / "rows.py").write_text("WIDTH = 8\n")
    resumed = program("resume", "run", "--quiet")
    assert resumed.returncode == 0 and "has changed since" in resumed.stderr


@pytest.mark.parametrize("text, told", [
    ("x = 1\n", "it has no RECIPE = plimsoll.recipes.Recipe(...)"), ("import plimsoll\nRECIPE = 1\n", "it has no RECIPE"),
    ("import no_such_module\n", "No module named 'no_such_module'"),
    (EXAMPLE.read_text().replace('Recipe("table"', 'Recipe("cosir"'), "its recipe is called 'cosir', as one of Plimsoll's own"),
    (EXAMPLE.read_text().replace('Recipe("table"', 'Recipe("Table"'), "'Table' is no name of a recipe")])
def test_a_file_without_a_recipe_is_told(program, mine, text, told):
    (mine / "wrong.py").write_text(text)
    done = program("train", "wrong.py", "--data", "table.npy", "--out", "run")
    assert done.returncode == 2 and done.stderr.startswith("plimsoll: error: ") and told in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_names_that_are_taken_and_faults_of_the_file(program, mine):
    shutil.copy(mine / "mine.py", mine / "json.py")
    done = program("config", "json.py")
    assert done.returncode == 2 and "there is a module 'json' already" in done.stderr
    assert "no such file" in program("train", "nowhere.py").stderr
    (mine / "fault.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):  # Its traceback is what helps.
        program("train", "fault.py")
