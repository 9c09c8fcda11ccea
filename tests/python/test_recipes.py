# SPDX-License-Identifier: Apache-2.0
"""A recipe written in Python, brought by a package of its own: the program and plimsoll.train() treat it as theirs."""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import plimsoll
from plimsoll import recipes
from plimsoll.core import _torch_gate
from tests.support.forked import PROGRAM, First

if _torch_gate.load_if_torch_imported() is None:
    pytest.skip("plimsoll was built without torch", allow_module_level=True)

TOY = '''
import dataclasses, os
import torch
from plimsoll.recipes import Recipe, RunOptions, option

@dataclasses.dataclass(kw_only=True)
class Options(RunOptions):
    epochs: int = option(2, "Number of passes over the points", least=1, most=100)
    lr: float = option(0.1, "Learning rate", least=0.0)
    shape: str = option("flat", "Shape of the line", choices=("flat", "steep"))
    extra: str = option("", "A file that is read", path=True, decides_bits=False)
    buffer: int = option(1 << 20, "Memory of nothing", size=True, decides_bits=False)
    loud: bool = option(False, "Speaks of every epoch", decides_bits=False)

def train(run, options):
    if options.shape == "steep":
        raise {"value": ValueError("steep: no such line"), "bug": ZeroDivisionError("a fault")}[
            os.environ.get("TOY_RAISES", "value")]
    points = torch.arange(200.0)[:, None] / 200
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(torch.utils.data.TensorDataset(points, 2 * points), batch_size=16)
    for batch in run.steps(data, epochs=options.epochs):
        run.log(loss=run.step(lambda x, y: (model(x) - y).square().mean(), batch))
        if run.steps_made == int(os.environ.get("TOY_DIES_AT", "-1")):
            run._life.end_writing()  # What was due is there.
            os.kill(os.getpid(), 9)
    return {"weight": model.weight.item().hex(), "buffer": options.buffer, "data": options.data}

def evaluate(options):
    if "TOY_ASKED" in os.environ:
        os.kill(os.getpid(), 2)  # Ctrl-C, behind the last moment at which this could give up.
    nowhere = {"nowhere": [float("nan"), {"far": -float("inf")}]} if "TOY_NOWHERE" in os.environ else {}
    return {"evaluated": os.path.basename(options.out), "epochs": options.epochs, **nowhere}

RECIPE = Recipe("toy", "A line through points", Options, train, evaluate, unit="points",
                examples=("plimsoll train toy --data points/ --out run/ --memory-limit 1GiB",))
'''
LIMIT = ("--memory-limit", "2GiB", "--foreign-bytes", "64MiB")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder as a package's installation leaves it."""
    site = tmp_path_factory.mktemp("site")
    (site / "toy_recipe.py").write_text(TOY)
    info = site / "toy_recipe-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-recipe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[plimsoll.recipes]\ntoy = toy_recipe:RECIPE\n")
    return site


@pytest.fixture(scope="module")
def first(site):
    """Where the package is installed."""
    one = First(folders=[site], OMP_NUM_THREADS="1")
    yield one
    one.close()


@pytest.fixture
def program(first, tmp_path):
    """The program there."""
    def start(*words, **more):
        return first.run(PROGRAM, *words, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1", **more})
    return start


def said(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_listed_explained_and_written_out(program):
    listed = program("recipes").stdout.splitlines()
    assert [line.split("\t")[0] for line in listed] == ["cosir", "can-kd", "chat", "vision", "toy"]
    assert listed[-1] == "toy\tA line through points"
    help_text = " ".join(program("train", "toy", "--help").stdout.split())
    for words in ("--epochs Number of passes over the points [2]", '--shape Shape of the line: flat|steep ["flat"]',
                  "--memory-limit", "--checkpoint-every-n-steps", "plimsoll train toy --data points/"):
        assert words in help_text, help_text
    assert ("# Shape of the line: flat|steep; decides the bits.\n# Accepts one of flat, steep.\nshape = \"flat\"\n"
            in program("config", "toy").stdout)
    wrong = program("train", "toy", "--data", "d", "--out", "o", "--epochs", "0")
    assert wrong.returncode == 2 and "--epochs: epochs must be a whole number from 1 to 100, not '0'" in wrong.stderr
    assert program("train", "toy", "--lrr", "1").returncode == 2
    assert program("plan", "toy").returncode == 2  # It has no plan, and says so as for any unknown word.


def test_killed_and_resumed_it_has_the_same_bits(program, tmp_path):
    options = ("--data", "points", "--lr", "0.3", "--seed", "4", *LIMIT, "--json")
    whole = said(program("train", "toy", "--out", "whole", *options))
    assert whole["status"] == "finished" and whole["step"] == 26 and whole["epoch"] == 2
    assert whole["data"] == str(tmp_path / "points") and whole["limit_bytes"] == 2 << 30
    assert 0 < whole["peak_resident_bytes"] <= 2 << 30
    killed = program("train", "toy", "--out", "killed", *options, "--checkpoint-every-n-steps", "7",
                     TOY_DIES_AT="17")
    assert killed.returncode == -9
    status = json.loads(program("status", "killed", "--json").stdout)
    assert (status["recipe"], status["checkpoint_step"], status["alive"]) == ("toy", 14, False)
    assert "points/s" in program("status", "killed").stdout
    again = program("train", "toy", "--out", "killed", *options)
    assert again.returncode == 1 and "it is a run already; `plimsoll resume" in again.stderr
    other = program("resume", "killed", "--set", "lr=0.4")
    assert other.returncode == 2 and "lr is part of this run's identity (0.3) and cannot become 0.4" in other.stderr
    resumed = program("resume", "killed", "--memory-limit", "3GiB", "--set", "buffer=2MiB", "--json")
    assert "goes on at step 14" in resumed.stderr
    summary = said(resumed)
    assert (summary["weight"], summary["step"]) == (whole["weight"], 26)
    assert summary["buffer"] == 2 << 20 and summary["limit_bytes"] == 3 << 30
    assert said(program("eval", "killed", "--json")) == {"evaluated": "killed", "epochs": 2}
    nowhere = program("eval", "killed", "--json", TOY_NOWHERE="1")
    assert json.loads(nowhere.stdout, parse_constant=pytest.fail)["nowhere"] == [None, {"far": None}]
    quiet = program("resume", "killed", "--quiet")
    assert quiet.returncode == 0 and "weight" in quiet.stdout
    assert quiet.stderr == "finished at step 26: of its 2 epochs none is left\n"


def test_its_own_errors_are_told_and_its_faults_shown(program):
    options = ("--data", "p", "--out", "o", *LIMIT)
    told = program("train", "toy", *options, "--shape", "steep")
    assert told.returncode == 1 and told.stderr == "plimsoll: error: steep: no such line\n"
    fault = program("train", "toy", "--data", "p", "--out", "fault", *LIMIT, "--shape", "steep", TOY_RAISES="bug")
    assert fault.returncode == 1 and "ZeroDivisionError: a fault" in fault.stderr and "toy_recipe.py" in fault.stderr
    small = program("train", "toy", "--data", "p", "--out", "small", "--memory-limit", "64MiB")
    assert small.returncode == 1 and "64.0 MiB" in small.stderr, small.stderr


def test_python_starts_it_too(site, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    import toy_recipe

    recipes.add(toy_recipe.RECIPE)
    given = {"lr": 0.3, "seed": 4, "compute_threads": 1, "memory_limit": "4GiB", "foreign_bytes": "64MiB",
             "progress": False}
    first = plimsoll.train("toy", data="points", out=tmp_path / "run", **given)
    assert first["status"] == "finished" and first["step"] == 26
    assert plimsoll.resume(tmp_path / "run", progress=False)["weight"] == first["weight"]
    assert plimsoll.evaluate(tmp_path / "run") == {"evaluated": "run", "epochs": 2}
    with pytest.raises(ValueError, match="unknown key 'lrr'; did you mean 'lr'"):
        plimsoll.train("toy", data="points", out=tmp_path / "other", lrr=1)
    with pytest.raises(ValueError, match="the recipe toy has no plan"):
        plimsoll.plan("toy", data="points")
    with pytest.raises(ValueError, match='there is no recipe "toys"; there are "cosir", "can-kd", "chat", "vision"'):
        plimsoll.train("toys", data="points", out=tmp_path / "other")


def test_a_name_that_no_recipe_has_is_told_with_those_there_are(site, tmp_path):
    """In a process of its own: a recipe that another test added stays."""
    done = subprocess.run([sys.executable, "-c", f"import plimsoll\nplimsoll.train('toys', data='points', out={str(tmp_path / 'other')!r})"],
                          text=True, capture_output=True, timeout=300, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ["PYTHONPATH"]])})
    assert 'ValueError: there is no recipe "toys"; there are "cosir", "can-kd", "chat", "vision", "toy"' in done.stderr


def test_a_wrong_description_is_refused_by_name():
    import dataclasses

    @dataclasses.dataclass(kw_only=True)
    class Options(recipes.RunOptions):
        rate: float = recipes.option(1, "A number of another type")

    with pytest.raises(ValueError, match="recipe odd: rate must be an option"):
        recipes.add(recipes.Recipe("odd", "Odd", Options, print))
    with pytest.raises(ValueError, match="'Odd' is no name of a recipe"):
        recipes.add(recipes.Recipe("Odd", "Odd", recipes.RunOptions, print))


def test_a_package_that_does_not_load_is_named(tmp_path):
    """By the console script."""
    broken = tmp_path / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[plimsoll.recipes]\nbroken = no_such_module:RECIPE\n")
    done = subprocess.run([sys.executable, "-c", "import sys; from plimsoll.cli._program import main; sys.exit(main())", "recipes"],
                          text=True, capture_output=True, timeout=300, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])})
    assert done.returncode == 1
    assert "the recipe 'broken' (no_such_module:RECIPE) cannot be loaded" in done.stderr


def test_t8_a_ctrl_c_behind_the_last_moment_of_an_evaluation_is_not_lost(first, program, tmp_path):
    said(program("train", "toy", "--data", tmp_path, "--out", "run", "--json", *LIMIT))
    (tmp_path / "asks.py").write_text(
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # A background shell ignores it.
        "import plimsoll\n"
        "try:\n    plimsoll.evaluate('run')\nexcept KeyboardInterrupt:\n    print('asked')\n"
        "print('goes on')\n")
    done = first.run(tmp_path / "asks.py", cwd=tmp_path, env={**os.environ, "TOY_ASKED": "1"})
    assert done.stdout.splitlines() == ["asked", "goes on"], done.stderr


@pytest.mark.parametrize("command", ["resume", "eval"])
def test_a_run_that_was_trained_in_cpp_is_refused_by_name(program, tmp_path, command):
    run = shutil.copytree(pathlib.Path(__file__).parents[1] / "reference/cosir_run", tmp_path / "run")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    done = program(command, run)
    assert done.returncode == 1 and f"{run}: a run of the recipe cosir that was trained in C++" in done.stderr, done.stderr
    assert "the version of Plimsoll that made it" in done.stderr
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_recipe_has_its_own_defaults_of_options_that_every_run_has(program):
    told = {name: program("config", name).stdout for name in ("cosir", "can-kd")}
    for name, seed, every in (("cosir", 0, 500), ("can-kd", 42, 200)):
        assert f"\nseed = {seed}\n" in told[name] and f"\ncheckpoint_every_n_steps = {every}\n" in told[name]
    with pytest.raises(ValueError, match="compute_threads: a recipe has no default of its own"):
        plimsoll._core.add_recipe(name="threads", about="", unit="rows", examples="", data_help="", data_advice="", keys_advice="", data_or="",
                                  plan_example="", choices="", effective_batch=False, presets={}, threads_decide_bits=True,
                                  common={"compute_threads": 3}, fields=[], work="")
