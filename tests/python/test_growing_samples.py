# SPDX-License-Identifier: Apache-2.0
"""A run whose samples grow eightfold: admitted for them, or stopped at a commit and resumed."""
import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.support.cgroup import MemoryCgroup
from tests.support.growing_run import LENGTHS

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20


def run(out: pathlib.Path, limit_mib: int, *options, status: int = 0) -> dict:
    """The run's last line; in a cgroup of its limit where one may be made."""
    command = [sys.executable, "-m", "tests.support.growing_run", "--memory-limit",
               f"{limit_mib}MiB", "--out", str(out), *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"}
    if MemoryCgroup.noted():
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    else:
        with MemoryCgroup(limit_mib * MIB) as group, contextlib.chdir(ROOT):
            done = group.run(command, env=environment)
        assert done.oom_kills == 0
    assert done.returncode == status, done.stderr
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said["resident_peak_bytes"] <= limit_mib * MIB
    return said


def events(out: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def mib(summary: dict) -> int:
    assert summary["smallest_limit_bytes"] % MIB == 0
    return summary["smallest_limit_bytes"] // MIB


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("undisturbed"), 4096)


@pytest.fixture(scope="module")
def scarce(undisturbed, tmp_path_factory):
    """A limit, in MiB, under which samples of half the longest length are admitted."""
    refused = run(tmp_path_factory.mktemp("scarce"), undisturbed["begins_bytes"] // MIB + 60,
                  "--admit", LENGTHS[-1] // 2, status=3)
    assert "is not admitted" in refused["why"] and refused["steps"] == 0
    return mib(refused)


def test_a_run_admitted_for_its_longest_samples_survives_their_growth(undisturbed, scarce, tmp_path):
    refused = run(tmp_path / "refused", scarce, "--admit", LENGTHS[-1], status=3)
    assert refused["steps"] == 0 and not (tmp_path / "refused/commit.pt").exists()
    limit = mib(refused)
    assert limit > scarce and f"a limit of {limit} MiB would do" in refused["why"]

    summary = run(tmp_path / "run", limit, "--admit", LENGTHS[-1])
    assert summary["sha256"] == undisturbed["sha256"]
    assert (summary["status"], summary["steps"], summary["refusals"]) == ("ok", len(LENGTHS), 0)
    told = events(tmp_path / "run")
    assert [one["event"] for one in told] == ["admitted", "summary"]
    assert told[0]["peak_bytes"] < told[0]["admitted_bytes"] == summary["admitted_bytes"]
    assert summary["tensor_peak_bytes"] <= summary["admitted_bytes"]
    assert limit * MIB - scarce * MIB < 2 * summary["admitted_bytes"]  # Not just any large number.


def test_a_run_not_admitted_for_them_stops_at_a_commit_and_names_a_limit(undisturbed, scarce,
                                                                         tmp_path):
    stopped = run(tmp_path / "run", scarce, "--admit", LENGTHS[-1] // 2, status=3)
    assert (stopped["status"], stopped["steps"]) == ("stopped", LENGTHS.index(LENGTHS[-1]))
    limit = mib(stopped)
    assert limit > scarce and f"a limit of {limit} MiB would do" in stopped["why"]
    told = events(tmp_path / "run")
    kinds = [one["event"] for one in told]
    assert kinds == ["admitted", *["refusal"] * stopped["refusals"], "stopped", "summary"]
    for one in told[-2:]:
        assert one["smallest_limit_bytes"] == limit * MIB and "does not fit" in one["stop_reason"]

    resumed = run(tmp_path / "run", limit)
    assert resumed["sha256"] == undisturbed["sha256"]
    assert (resumed["status"], resumed["steps"], resumed["refusals"]) == ("ok", len(LENGTHS), 0)
