# SPDX-License-Identifier: Apache-2.0
"""`plimsoll plan cosir` and `--batch-size auto`: the planned batch really trains inside the limit."""
import functools
import json
import math
import re
import subprocess
import sys

import pytest

from test_cli import assert_refused, call, trains  # noqa: F401  Fixtures.
from tests.support.named_limits import until_it_does

MIB = 1 << 20
OPTIONS = ("--foreign-bytes", "64MiB", "--eval-pairs", "200")


@pytest.fixture(scope="module")
def data(program, tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned") / "data"
    subprocess.run([program, "synth", "cosir", "--rows", "20000", "--out", folder, "--seed", "0"],
                   check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def above(program, data):
    """A limit of so many MiB more than the process holds and sets aside: how many pages of its libraries are
    resident when it starts depends on how the kernel keeps their files."""
    refused = subprocess.run([program, "plan", "cosir", "--data", data, "--memory-limit", "8MiB", *OPTIONS],
                             text=True, capture_output=True)
    held = float(re.search(r"([\d.]+) MiB are held before anything is leased", refused.stderr)[1])
    return lambda mib: f"{math.ceil(held) + 64 + mib}MiB"


@pytest.fixture(scope="module")
def planned(trains, call, data):
    """The plan under a limit, by the program. What is asked for again is planned once."""
    @functools.cache
    def plan(limit, *more):
        done = call("plan", "cosir", "--data", data, "--memory-limit", limit, "--json", *OPTIONS, *more)
        assert done.status == 0, done.err
        return json.loads(done.out.splitlines()[-1])
    return plan


def test_the_batch_grows_with_the_limit_up_to_enough_steps_an_epoch(planned, above):
    sizes = [planned(above(mib))["batch_size"] for mib in (110, 125, 420)]
    assert sizes[0] < sizes[1] < sizes[2]
    assert planned(above(420))["steps_per_epoch"] >= 32
    assert sizes[2] % 16 == 0
    wide = planned(above(125), "--label-dim", "256")
    assert wide["batch_size"] < sizes[1]  # Longer vectors leave less room.


def test_auto_is_resolved_once_and_trains_inside_the_limit(call, data, planned, above, tmp_path):
    run, limit = tmp_path / "run", above(125)
    done = call("train", "cosir", "--data", data, "--out", run, "--memory-limit", limit,
                "--batch-size", "auto", "--epochs", "1", "--quiet", "--json", *OPTIONS)
    assert done.status == 0, done.err
    summary = json.loads(done.out.splitlines()[-1])
    assert summary["status"] == "finished"
    assert summary["peak_resident_bytes"] <= int(limit[:-3]) * MIB
    [found] = [one for one in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if one["event"] == "planned"]
    # What the process begins with differs by some hundred KiB from start to start.
    assert found["label"] in ("exact", "bounded") and found["batch_size"] == pytest.approx(planned(limit)["batch_size"], rel=0.2)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # Nothing of the planning is left.
    resumed = call("resume", run, "--quiet", "--json")  # The number stands, whatever the limit is.
    assert json.loads(resumed.out.splitlines()[-1])["state_sha256"] == summary["state_sha256"]


def test_gradient_caching_is_weighed_and_fits_a_larger_batch(planned, above):
    found = planned(above(150), "--choices", "--dim", "1024")
    assert "choices" not in planned(above(125))
    by_option = {choice["options"]: choice for choice in found["choices"]}
    assert set(by_option) == {"gradient_caching = true", "gradient_caching = false"}
    kept, cached = by_option["gradient_caching = false"], by_option["gradient_caching = true"]
    assert kept["configured"] and not cached["configured"]
    assert kept["batch_size"] == pytest.approx(found["batch_size"], rel=0.1)  # What the process holds differs a little from plan to plan.
    assert cached["batch_size"] > kept["batch_size"] or \
        (cached["batch_size"] == kept["batch_size"] and cached["peak_bytes"] < kept["peak_bytes"])
    speeds = [choice["rows_per_second"] for choice in found["choices"]]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] > 0


def test_the_table_says_who_holds_the_limit_and_has_the_choices(trains, call, data, above):
    done = call("plan", "cosir", "--data", data, "--memory-limit", above(125), "--choices", *OPTIONS)
    assert done.status == 0, done.err
    for word in ("batch_size =", "activations", "evaluation", "ring", "baseline", "one row more", "choices for a step"):
        assert word in done.out, done.out
    assert done.out.count("(as configured)") == 1


def test_a_limit_for_no_batch_names_one_that_would_do(trains, call, data):
    done = call("plan", "cosir", "--data", data, "--memory-limit", "150MiB", *OPTIONS)
    assert_refused(done, 1, "MiB")


def test_phase_2_is_admitted_before_the_first_step_of_phase_1(trains, call, small_data, tmp_path):
    """Its step takes more than that of phase 1, whose tiles are encoded again in backward."""
    run = tmp_path / "run"

    def train(limit):
        done = call("train", "cosir", "--data", small_data, "--out", run, "--batch-size", "1024", "--gradient-caching", "true", "--epochs", "1",
                    "--phase2-epochs", "1", "--eval-pairs", "0", "--foreign-bytes", "64MiB", "--memory-limit", f"{limit}MiB")
        if done.status != 0 and (run / "events.jsonl").exists():
            assert "step" not in names(run), (limit, done.err)
        return done

    until_it_does(train, 330)
    assert names(run).index("rehearsed") < names(run).index("step") and names(run).count("step") == 10


def test_phase_2_is_rehearsed_beside_what_is_there_when_it_begins(trains, call, small_data, tmp_path):
    """With few rows a step, the classifier's weights and what is kept of them count."""
    done = call("train", "cosir", "--data", small_data, "--out", tmp_path / "run", "--batch-size", "200", "--gradient-caching", "true", "--epochs", "1",
                "--phase2-epochs", "1", "--eval-pairs", "0", "--memory-limit", "2GiB")
    assert done.status == 0, done.err
    rehearsed, _, again = (one for one in events(tmp_path / "run") if one["event"] in ("rehearsed", "admitted"))
    assert again["peak_bytes"] <= rehearsed["admitted_bytes"]


def events(run):
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def names(run):
    """The names of a run's events."""
    return [one["event"] for one in events(run)]


def planned_in_python(*plans):
    """By plimsoll.plan() of such options, one after the other, in a process of its own, which does not hold what the tests before it left."""
    program = "import json, sys, plimsoll; print(json.dumps([plimsoll.plan('cosir', **one) for one in json.loads(sys.argv[1])]))"
    done = subprocess.run([sys.executable, "-c", program, json.dumps(plans, default=str)], text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_python_plans_the_same(planned, data):
    plimsoll = pytest.importorskip("plimsoll")
    pytest.importorskip("torch")
    [told] = planned_in_python({"data": data, "memory_limit": "1GiB", "eval_pairs": 200})
    assert told["batch_size"] == planned("1GiB")["batch_size"]
    with pytest.raises(ValueError, match="batch_sizes"):
        plimsoll.plan("cosir", data=data, batch_sizes=3)
