# SPDX-License-Identifier: Apache-2.0
"""What every recipe in Python has: kept checkpoints, TensorBoard's files, presets, and choices that a plan weighs."""
import json
import pathlib
import re
import shutil
import sys

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import plimsoll
from plimsoll.cli._program import main
from plimsoll.core._torch_settings import torch_settings
from plimsoll.recipes._choices import table_of, weigh
from tests.support.on_device import skip_without_torch
from tests.support.quick_collections import collections_are_quick, collections_are_whole_again  # noqa: F401  Fixtures.

skip_without_torch()

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "recipe.py"
GIVEN = {"memory_limit": "4GiB", "foreign_bytes": "512MiB", "compute_threads": 1, "progress": False}  # Beside what other tests left.
PLANNED = '''
import dataclasses, pathlib
from plimsoll.errors import BudgetExceeded
from plimsoll.recipes import Recipe, RunOptions, option

@dataclasses.dataclass(kw_only=True)
class Options(RunOptions):
    caching: bool = option(False, "Less memory", decides_bits=False)
    precision: str = option("32", "Numbers", choices=("32", "16", "8"))
    every: int = option(1, "Batches of a step", least=1)
    sizes: str = option("8,4", "Widths of the layers", widths=True, least=1, most=64)

def plan(options, device, device_memory_limit):
    size = (100 if options.caching else 40) * (2 if options.precision == "16" else 1) // (1 if options.every == 1 else 2)
    if options.precision == "8":
        raise BudgetExceeded("no room", "tensors", 2, 1)
    return {"batch_size": size, "peak_bytes": 1000 * size, "bytes_per_row": 1000, "step_seconds": size / (50 if options.caching else 80)}

RECIPE = Recipe("planned", "Nothing", Options, print, plan=plan, unit="cells", presets=pathlib.Path(__file__).with_name("presets"),
                choices={"caching": (True, False), "precision": ("16", "8")}, accumulates="every")
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "planned.py").write_text(PLANNED)
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "small.toml").write_text("# Small.\nsizes = [2, 3]\nevery = 7\n")
    yield tmp_path
    for name in ("planned", "kept"):
        sys.modules.pop(name, None)


@pytest.fixture
def program(folder, capfd):
    def start(*words):
        capfd.readouterr()
        with torch_settings():
            status = main(list(map(str, words)))
        return status, *capfd.readouterr()
    return start


def test_checkpoints_are_kept_and_tensorboard_is_left_out_as_asked(folder):
    np.save(folder / "table.npy", np.random.default_rng(1).standard_normal((400, 5)).astype(np.float32))
    shutil.copy(EXAMPLE, folder / "kept.py")
    given = {**GIVEN, "data": folder / "table.npy", "checkpoint_every_n_steps": 5}
    usual = plimsoll.train(folder / "kept.py", out=folder / "usual", **given)
    more = plimsoll.train(folder / "kept.py", out=folder / "more", **given, keep_checkpoints=4, tensorboard=False)
    one = plimsoll.train(folder / "kept.py", out=folder / "one", **given, keep_checkpoints=1)
    assert usual["weights"] == more["weights"] == one["weights"]
    for name, steps in (("usual", [35, 39]), ("more", [25, 30, 35, 39]), ("one", [39])):
        assert sorted(int(path.name[5:]) for path in (folder / name / "checkpoints").glob("step-*")) == steps
    assert list((folder / "usual" / "metrics").glob("events.out.tfevents.*")) and not list(folder.glob("more/metrics/*"))
    assert plimsoll.resume(folder / "one", progress=False)["weights"] == one["weights"]


def values(text):
    return dict(re.findall(r"^(?:# )?(\w+) = (.*)$", text, re.M))


def test_presets_are_files_beside_the_recipe(program):
    status, text, _ = program("config", "planned.py", "--config", "small")
    assert status == 0 and values(text)["sizes"] == '"2,3"' and values(text)["every"] == "7" and values(text)["precision"] == '"32"'
    assert "or a preset: small" in program("config", "planned.py", "--help")[1]
    status, _, told = program("config", "planned.py", "--config", "tiny")
    assert status == 2 and "no preset of planned: small" in told
    status, _, told = program("plan", "planned.py", "--data", "x", "--sizes", "80")
    assert status == 2 and "sizes must be 2 to 8 whole numbers from 1 to 64, such as 80,40,16, not '80'" in told
    assert "`plimsoll train " in program("plan", "planned.py", "--data", "x", "--set", "size=1")[2]


@pytest.mark.parametrize("preset, also", [("small", {"max_epochs", "patience", "student_gat_patience", "batch_size"}), ("large", set())])
def test_presets_of_can_kd_have_the_sizes_of_its_page(program, preset, also):
    page = (EXAMPLE.parents[1] / "docs/recipes/can-kd.md").read_text()
    sizes = {}
    for role, autoencoder, classifier in re.findall(rf"\| (teacher|student) of `--config {preset}` \| (.*?) \| (.*?) \|", page):
        sizes |= dict(zip((f"{role}_vgae_{name}" for name in ("hidden_dims", "heads", "embedding_dim")), autoencoder.split("; ")))
        sizes |= dict(zip((f"{role}_gat_{name}" for name in ("hidden", "layers", "heads", "embedding_dim", "fc_layers")), classifier.split(", ")))
    usual, told = (values(program("config", "can-kd", *words)[1]) for words in ((), ("--config", preset)))
    assert sizes and {name: told[name].strip('"') for name in sizes} == sizes
    assert also <= {name for name in told if told[name] != usual[name]} <= sizes.keys() | also


def test_choices_are_planned_and_those_that_fit_are_listed(program):
    plan = ("plan", "planned.py", "--data", "x")
    status, text, told = program(*plan, "--choices", "--json")
    assert status == 0, told
    found = json.loads(text)
    assert found["batch_size"] == 40
    assert [(one["options"], one["batch_size"], one["configured"]) for one in found["choices"]] == [
        ("caching = false, precision = 16", 80, False), ("caching = false, precision = 32", 40, True),
        ("caching = true, precision = 16", 200, False), ("caching = true, precision = 32", 100, False)]
    assert found["choices"][0] == {"options": "caching = false, precision = 16", "batch_size": 80, "peak_bytes": 80_000, "bytes_per_cell": 1000,
                                   "cells_per_second": pytest.approx(80), "configured": False}
    table = program(*plan, "--choices")[1]
    assert "choices for a step" in table and table.count("(as configured)") == 1 and "cells/s" in table
    assert "choices" not in json.loads(program(*plan, "--json")[1])
    found = json.loads(program(*plan, "--choices", "--effective-batch", "90", "--json")[1])["choices"]
    assert {one["options"] for one in found} == {
        "caching = false, precision = 16, batch_size = 30, every = 3", "caching = false, precision = 32, batch_size = 18, every = 5",
        "caching = true, precision = 16, batch_size = 90, every = 1", "caching = true, precision = 32, batch_size = 90, every = 1"}
    assert program(*plan, "--effective-batch", "90")[0] == 2
    assert len(plimsoll.plan("planned.py", data="x", choices=True)["choices"]) == 4
    with pytest.raises(ValueError, match="effective_batch: it needs choices"):
        plimsoll.plan("planned.py", data="x", effective_batch=90)
    with pytest.raises(ValueError, match="choices: the recipe table has none"):
        plimsoll.plan(EXAMPLE, data="x", choices=True)


def test_a_choice_that_nothing_fits_is_left_out():
    def refused(options):
        raise plimsoll.errors.BudgetExceeded("no room", "tensors", 2, 1)

    from plimsoll.recipes.cosir import Options

    assert weigh(refused, Options(data="x"), {"gradient_caching": (True, False)}, 0, "", "rows") == []
    assert table_of([], "a step", "rows").splitlines()[1] == "choices for a step"


def test_gradient_caching_is_weighed_for_cosir(tmp_path):
    from tests.support.cosir_python import NAME, make_pairs

    make_pairs(tmp_path / "data", groups=300)
    given = {name: value for name, value in GIVEN.items() if name != "progress"}
    found = plimsoll.plan(NAME, data=tmp_path / "data", **given, choices=True, dim=256, projections="true")
    by_option = {one["options"]: one for one in found["choices"]}
    assert set(by_option) == {"gradient_caching = true", "gradient_caching = false"}
    assert by_option["gradient_caching = false"]["configured"] and not by_option["gradient_caching = true"]["configured"]
    assert by_option["gradient_caching = false"]["batch_size"] == found["batch_size"]
    speeds = [one["rows_per_second"] for one in found["choices"]]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] > 0


@pytest.mark.parametrize("role, count", [("teacher", 4), pytest.param("student", 8, marks=pytest.mark.slow)])
def test_choices_of_can_kd_are_those_of_its_tightest_task(role, count, tmp_path):
    """A teacher asks no teacher, which is where the third choice is."""
    from tests.support.python_can_kd import NAME, SMALL, make_set

    given = {name: value for name, value in SMALL.items() if name not in ("progress", "batch_size")}
    found = plimsoll.plan(NAME, data=make_set(tmp_path), **given, stage="normal", model_size=role, choices=True, effective_batch=150)
    assert found["task"] == f"{role}_gat_normal" and len(found["choices"]) == count
    for one in found["choices"]:
        size, batches = map(int, re.search(r"batch_size = (\d+), accumulate_grad_batches = (\d+)", one["options"]).groups())
        assert size == one["batch_size"] and size * (batches - 1) < 150 <= size * batches
    [asked] = [one for one in found["choices"] if one["configured"]]
    assert asked["options"].startswith("gradient_checkpointing = true, precision = 32, ")
    assert ("offload_teacher_to_cpu = false" in asked["options"]) == (role == "student")
