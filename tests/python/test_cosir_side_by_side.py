# SPDX-License-Identifier: Apache-2.0
"""The recipe `cosir` beside figures of the one that was in C++: the same order, losses, recall, events and summary; killed, it goes on to the same bits."""
import json
import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from plimsoll.core import _torch_gate

if _torch_gate.load_if_torch_imported() is None:
    pytest.skip("plimsoll was built without torch", allow_module_level=True)

from tests.support.killed_recipes import killed
from tests.support.on_device import run_checks

NAME, SUPPORT = "cosir", "tests.support.cosir_python"
REFERENCE = pathlib.Path(__file__).parents[1] / "reference"
THEIRS = json.loads((REFERENCE / "cosir.json").read_text())
QUICK = {"memory_limit": "2GiB", "foreign_bytes": "512MiB", "compute_threads": 1, "progress": False, "eval_pairs": 300, "seed": 11,
         "metrics_every_n_steps": 1, "batch_size": 200, "epochs": 2}
ALL = {"label_dim": 5, "loss_boundary": 0.4, "label_schedule": "cosine", "phase2_epochs": 1, "phase2_lr": 1e-3, "lr": 1e-3}


def told(*jobs):
    done = subprocess.run([sys.executable, "-m", SUPPORT, json.dumps(jobs, default=str)], text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs of several texts an image, whose ids are in no order."""
    folder = tmp_path_factory.mktemp("pairs") / "data"
    done = subprocess.run([sys.executable, "-c", f"from {SUPPORT} import make_pairs; make_pairs({str(folder)!r})"], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def both(data, tmp_path_factory):
    """Trains with every term, schedule and phase: (folder, what the recipe in C++ told of it, summary)."""
    folder = tmp_path_factory.mktemp("both")
    return folder, THEIRS["whole"], told(["train", [NAME], {**QUICK, **ALL, "data": data, "out": folder / NAME}])[0]


def events(folder, name):
    return [one for one in map(json.loads, (folder / "events.jsonl").read_text().splitlines()) if one["event"] == name]


def figures(value, before=""):
    """By path: every number of a nested dict."""
    if not isinstance(value, dict):
        return {before: value}
    return {name: one for key, inner in value.items() for name, one in figures(inner, f"{before}/{key}").items()}


# ---- Side by side ----

def test_steps_have_the_same_rows_and_losses(both):
    folder, theirs, ours = both
    steps = events(folder / NAME, "step")
    assert len(steps) == len(theirs["steps"]) == ours["step"] == theirs["summary"]["step"] > 10
    for one, other in zip(theirs["steps"], steps):
        assert one.keys() == other.keys() - {"time", "event"}
        assert (one["step"], one["epoch"], one["rows"]) == (other["step"], other["epoch"], other["rows"])
        for name in one.keys() - {"step", "epoch", "rows"}:
            # After an epoch a rounding of a weight may have moved a row to the other side of a neighbour: 1e-5 was seen.
            assert other[name] == pytest.approx(one[name], rel=1e-6 if one["epoch"] == 0 else 1e-3, abs=1e-6), (name, one["step"])


def test_evaluations_are_the_same(both):
    folder, theirs, ours = both
    for name in ("recall_before", "recall", "phase2"):
        one, other = figures(theirs["summary"][name]), figures(ours[name])
        assert one.keys() == other.keys() and one
        # A pair of equally similar items may change places: less than one in a hundred of the queries.
        assert other == pytest.approx(one, rel=1e-6 if name == "recall_before" else 1e-2, abs=1e-6 if name == "recall_before" else 0.4)
    assert ours["recall"]["pairs"] > 50 and ours["recall"]["raw"]["t2i"]["r10"] > 10
    assert [[one["step"], one["when"], sorted(one)] for one in events(folder / NAME, "eval")] == theirs["evals"]
    epochs = events(folder / NAME, "epoch")
    assert [one["epoch"] for one in epochs] == theirs["epochs"] == [0, 1, 2] and sorted(epochs[0]) == theirs["epoch_keys"]


def test_summaries_have_the_same_keys_and_runs_the_same_events(both):
    folder, theirs, ours = both
    assert sorted(ours) == theirs["keys"]
    for name in ("status", "step", "epoch", "rows_skipped", "limit_bytes"):
        assert ours[name] == theirs["summary"][name], name
    kinds = {one["event"] for one in map(json.loads, (folder / NAME / "events.jsonl").read_text().splitlines())}
    assert set(theirs["kinds"]) - kinds <= {"start", "memory"}, kinds


def test_options_have_the_defaults_of_the_recipe_in_cpp(program):
    """As a run of it noted them; its statistics of the cache are no option any more."""
    noted = re.findall(r"(?m)^(\w+) = (.*?) +# from (.+)$", (REFERENCE / "cosir_run/run.toml").read_text())
    ours = dict(re.findall(r"(?m)^(?:# )?(\w+) = (.*)$", subprocess.run([program, "config", NAME], text=True, capture_output=True, check=True).stdout))
    assert {key for key, _, _ in noted} - ours.keys() == {"stats_every_n_epochs"}
    assert ours.keys() - {key for key, _, _ in noted} == {"device", "device_memory_limit"}
    defaults = {key: value for key, value, source in noted if source == "default" and key in ours}
    assert len(defaults) > 35 and {key: ours[key] for key in defaults} == defaults


# ---- Bits ----

def test_killed_it_goes_on_to_the_same_bits_and_is_evaluated(both, data, tmp_path):
    folder, _, ours = both
    given = {**QUICK, **ALL, "data": data, "checkpoint_every_n_steps": 2}
    for at, out in ((3, "early"), (ours["step"] - 1, "in phase 2")):
        killed(NAME, at, **given, out=tmp_path / out)
    early, late, evaluated = told(["resume", [tmp_path / "early"], {"progress": False}], ["resume", [tmp_path / "in phase 2"], {"progress": False}],
                                  ["evaluate", [folder / NAME], {}])
    assert early["state_sha256"] == late["state_sha256"] == ours["state_sha256"]
    assert early["recall"] == ours["recall"] and early["recall_before"] == ours["recall_before"] and late["phase2"] == ours["phase2"]
    assert evaluated["recall"] == ours["recall"] and evaluated["step"] == ours["step"]


def test_where_rows_lie_and_what_is_made_twice_changes_no_bit(data, tmp_path):
    given = {**QUICK, "data": data, "batch_size": 700, "epochs": 2, "eval_every_n_epochs": 0, "eval_pairs": 0}
    ways = [{}, {"gradient_caching": True}, {"label_layout": "sample_order", "store_bytes": "64MiB"}, {"memory_limit": "4GiB", "loader_threads": 1}]
    made = told(*(["train", [NAME], {**given, **way, "out": tmp_path / str(k)}] for k, way in enumerate(ways)))
    assert all(one["status"] == "finished" for one in made), made
    assert len({one["state_sha256"] for one in made}) == 1
    other = told(["train", [NAME], {**given, "seed": 12, "out": tmp_path / "other"}])[0]
    assert other["state_sha256"] != made[0]["state_sha256"]


@pytest.mark.parametrize("case, options", list(enumerate([
    {"label_optimizer": "adamw_fresh", "label_dtype": "bfloat16"},
    {"label_optimizer": "adagrad", "label_init": "uniform", "drop_last": True, "dim": 16, "projections": "true"},
    {"label_init": "zeros", "holdout": 0, "loss_radius": 0.0, "loss_infonce": 0.0}])), ids=str)
def test_other_rows_train_alike(data, tmp_path, case, options):
    theirs, ours = THEIRS["others"][case], told(["train", [NAME], {**QUICK, **options, "data": data, "epochs": 1, "out": tmp_path / NAME}])[0]
    assert [one["loss"] for one in events(tmp_path / NAME, "step")] == pytest.approx(theirs["losses"], rel=1e-6, abs=1e-6)
    assert figures(ours["recall"]) == pytest.approx(figures(theirs["recall"]), rel=1e-2, abs=0.4)


def test_a_lone_row_is_skipped(data, tmp_path):
    rows = json.loads(subprocess.run([sys.executable, "-c", f"""
import json, plimsoll
with plimsoll.Governor("1GiB") as governor, plimsoll.FeatureStore.open(governor, {str(data)!r}) as features:
    print(json.dumps(len(features)))
"""], text=True, capture_output=True, check=True).stdout)
    given = {**QUICK, "data": data, "holdout": 0, "batch_size": rows - 1, "epochs": 2, "eval_pairs": 0}
    theirs, ours = THEIRS["lone"], told(["train", [NAME], {**given, "out": tmp_path / NAME}])[0]
    assert ours["rows_skipped"] == theirs["rows_skipped"] == 2 and ours["step"] == theirs["step"] == 4
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


# ---- Limits ----

def test_a_limit_that_is_too_small_is_refused_and_names_one(data, tmp_path):
    small, named = told(["train", [NAME], {**QUICK, "data": data, "out": tmp_path / "small", "memory_limit": "64MiB"}],
                        ["plan", [NAME], {"data": data, "memory_limit": "64MiB", "foreign_bytes": "64MiB"}])
    assert small[0] == named[0] == "BudgetExceeded" and "MiB" in small[1]
    assert not (tmp_path / "small" / "checkpoints" / "manifest.json").exists()


def test_a_planned_batch_is_found_once_and_trains_inside_the_limit(data, tmp_path):
    given = {**QUICK, "data": data, "epochs": 1, "batch_size": "auto", "memory_limit": "1GiB"}
    planned, made, again = told(["plan", [NAME], {"data": data, "memory_limit": "1GiB", "foreign_bytes": "512MiB"}],
                                ["train", [NAME], {**given, "out": tmp_path / "run"}], ["resume", [tmp_path / "run"], {"progress": False}])
    assert planned["batch_size"] % 16 == 0 and planned["steps_per_epoch"] >= 32 and planned["label"] in ("exact", "bounded")
    assert events(tmp_path / "run", "planned")[0]["batch_size"] == planned["batch_size"]
    assert made["status"] == "finished" and made["peak_resident_bytes"] <= made["limit_bytes"] == 1 << 30
    assert again["state_sha256"] == made["state_sha256"]


def test_a_plan_counts_the_evaluation(data):
    given = {"data": data, "memory_limit": "1GiB", "foreign_bytes": "512MiB"}
    few, many, none = told(*(["plan", [NAME], {**given, "eval_pairs": pairs}] for pairs in (20, 300, 0)))
    assert many["eval_peak_bytes"] > few["eval_peak_bytes"] > none["eval_peak_bytes"] == 0
    code = f"""
from plimsoll.errors import BudgetExceeded
from plimsoll.recipes import cosir, limited
from plimsoll.recipes.cosir import _model, _pairs, _plan
options = cosir.Options(data={str(data)!r}, memory_limit="1GiB", eval_pairs=300, compute_threads=1)
with limited(options) as governor:
    pairs = _pairs.Pairs(governor, options, "cpu")
    model = _model.Model(_model.Shape.of(options, *pairs.widths), 0)
    try:
        _plan.evaluation_bytes(governor, options, pairs, model, 64, 1 << 20)
    except BudgetExceeded as error:
        print(error)
        print(error.smallest_limit_bytes)
    pairs.close()
"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    *_, limit = done.stdout.split()
    assert "an evaluation of " in done.stdout and "eval_pairs" in done.stdout
    assert (1 << 30) + many["eval_peak_bytes"] - (2 << 20) < int(limit) < 2 << 30


@pytest.mark.parametrize("options, text", [
    ({"temperature": 0.01}, "temperature"), ({"label_dim": 300}, "label_dim"), ({"projections": "false"}, "projections"),
    ({"batch_size": 1}, "batch_size"), ({"label_optimizer": "sgd"}, "adamw, adamw_fresh, adagrad")], ids=lambda one: str(one))
def test_what_does_not_fit_is_named(data, tmp_path, options, text):
    error = told(["train", [NAME], {**QUICK, **options, "data": data, "out": tmp_path / "run"}])[0]
    assert error[0] == "ValueError" and text in error[1]


# ---- A device ----

def test_cosir_on_a_device():
    run_checks("cosir")
