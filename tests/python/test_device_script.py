# SPDX-License-Identifier: Apache-2.0
"""tools/device_check.sh: all checks hold on the simulated device, and what does not hold, hangs or cannot run is told apart.

The faults that each check finds are planted in tests/device/check_script.py.
"""
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.support.on_device import run_checks, skip_without_torch

skip_without_torch()

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench import readme
from bench.device_check.__main__ import CHECKS, NAMES, Check, Outcome, run_one, status_of, table


def script(*words, **environment):
    done = subprocess.run([ROOT / "tools/device_check.sh", *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                          env={**os.environ, "PLIMSOLL_PYTHON": sys.executable, **environment})
    print(done.stdout)  # Which pytest shows where a test fails.
    return done.returncode, done.stdout


def test_all_checks_hold_on_the_simulated_device(tmp_path):
    status, told = script("--simulated", "--out", str(tmp_path))
    assert status == 0 and "MISSED" not in told
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert tuple(json.loads(line)["check"] for line in lines) == NAMES
    for one in map(json.loads, lines):
        assert one["pass"] and "simulated device" in one["card"] and one["command"] == f"tools/device_check.sh --only {one['check']}"
    assert (tmp_path / "table.txt").read_text().strip() in told
    assert "| `limit` | 1 (1) | 0 requests that differ" in readme.folder_figures([json.loads(line) for line in lines])


def test_each_check_finds_what_is_planted():
    run_checks("script")


@pytest.mark.slow
def test_what_only_a_card_runs_on_the_simulated_device():
    run_checks("script", which="slow")


@pytest.mark.parametrize("words", [("--everything",), ("--minutes", "soon"), ("--only",)])
def test_options_that_mean_nothing_run_nothing(words):
    status, told = script(*words)
    assert status == 2 and told.startswith("device_check: ") and len(told.splitlines()) == 1


def test_a_python_without_torch_is_named(tmp_path):
    (tmp_path / "bare").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bare").chmod(0o755)
    status, told = script(PLIMSOLL_PYTHON=str(tmp_path / "bare"))
    assert status == 2 and f"no torch in {tmp_path}/bare" in told


PROGRAM = """
import os, signal, sys
from bench.device_check.processes import called

def hangs():
    with open(sys.argv[1], "w") as file:
        file.write(str(os.getpid()))
    signal.pause()

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

def fails():
    raise KeyError("planted")

one = called(hangs, 1)
assert one.told is None and one.why == "not done after 1 s", one
assert not os.path.exists(f"/proc/{open(sys.argv[1]).read()}")
assert called(dies, 60).why == "its process ended with status -9"
assert "KeyError: 'planted'" in called(fails, 60).why
assert called(lambda: {"a": 1}, 60).told == {"a": 1}
"""


def test_a_check_that_hangs_is_ended_and_one_that_dies_or_fails_says_how(tmp_path):
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path / "pid"], cwd=ROOT, check=True, timeout=300)


def outcome(state, check=CHECKS[0], **told):
    return Outcome(check, state, {"value": 1, "unit": "", "bar": 0, "lines": [], **told} if told else {}, "why it is so" if not told else "")


@pytest.mark.parametrize(("states", "status"), [
    (["holds", "skipped"], 0), (["holds", "missed"], 1), (["holds", "broke"], 1), (["missed", "cannot run"], 1),
    (["holds", "cannot run"], 2), (["skipped"], 2), ([], 2)])
def test_the_exit_status_says_whether_all_that_ran_hold(states, status):
    assert status_of([outcome(one) for one in states]) == status


def test_a_check_that_could_outlast_the_time_is_skipped_with_its_reason():
    skipped = run_one(Check(1, "limit", "", 50), "cuda", 49)
    assert (skipped.state, skipped.why) == ("skipped", "it may take 50 s, and 49 are left")


def test_the_table_has_expected_beside_measured():
    lines = [{"what": "context", "expected": "450 to 650 MiB", "measured": "700 MiB", "holds": False},
             {"what": "the host's", "expected": "", "measured": "9 MiB", "holds": None}]
    drawn = table([outcome("missed", lines=lines), outcome("skipped", CHECKS[2])]).splitlines()
    assert drawn[2].split() == ["1", "limit", "context", "450", "to", "650", "MiB", "700", "MiB", "MISSED"]
    assert drawn[3].split() == ["the", "host's", "9", "MiB", "-"] and drawn[4].split()[-5:] == ["why", "it", "is", "so", "skipped"]
    assert len({line.index(word) for line, word in zip(drawn[2:4], ("700", "9 MiB"))}) == 1
