# SPDX-License-Identifier: Apache-2.0
"""Thirty random runs, each in a cgroup of its limit: completed, or refused with a limit that does."""
import json
import pathlib
import subprocess
import sys

import pytest

from tests.support.cgroup import MemoryCgroup

SEED = 1
RUNS = 30
ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_random_runs_complete_or_are_refused_with_a_limit_that_does(program, tmp_path):
    reason = MemoryCgroup.why_not()
    if reason:
        pytest.skip(reason)
    # In a process of its own: a child's highest resident size begins with its parent's, and this one
    # may have torch loaded.
    lines = tmp_path / "runs.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "tests.budget.random_runs", "--program", str(program), "--runs",
         str(RUNS), "--seed", str(SEED), "--work", str(tmp_path), "--out", str(lines)],
        cwd=ROOT, text=True, capture_output=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(outcomes) == RUNS
    assert {line["outcome"] for line in outcomes} == {"finished", "refused"}
    assert all(len(line["limits"]) <= 2 for line in outcomes)  # The first limit named is enough.
