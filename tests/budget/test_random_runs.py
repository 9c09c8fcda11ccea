# SPDX-License-Identifier: Apache-2.0
"""Random runs, each in a cgroup of its limit: completed, or refused with limits that lead to one that does."""
import json
import pathlib
import subprocess
import sys

import pytest

from tests.support.cgroup import MemoryCgroup

ROOT = pathlib.Path(__file__).resolve().parents[2]


def random_runs(program: pathlib.Path, folder: pathlib.Path, *, seed: int, runs: int,
                loops: int = 0) -> list[dict]:
    """Their lines of the record. In a process of its own: a child's highest resident size begins with
    its parent's, and this one may have torch loaded."""
    MemoryCgroup.needed()
    lines = folder / "runs.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "tests.budget.random_runs", "--program", str(program), "--runs",
         str(runs), "--seed", str(seed), "--loops", str(loops), "--work", str(folder), "--out",
         str(lines)], cwd=ROOT, text=True, capture_output=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(outcomes) == runs
    return outcomes


@pytest.mark.parametrize("runs", [10, pytest.param(30, marks=pytest.mark.slow)])
def test_random_runs_complete_or_are_refused_with_a_limit_that_does(program, tmp_path, runs):
    outcomes = random_runs(program, tmp_path, seed=1, runs=runs)
    assert {line["recipe"] for line in outcomes} == {"cosir", "can-kd"}
    assert {line["outcome"] for line in outcomes} == {"finished", "refused"}


def test_r12_loops_of_ones_own_stay_inside_the_limit_with_the_same_bits(program, tmp_path):
    pytest.importorskip("plimsoll._torch")
    # A seed whose six loops are short, of every model, data and table; one with spawned workers.
    outcomes = random_runs(program, tmp_path, seed=330, runs=6, loops=1)
    assert {line["kind"] for line in outcomes} == {"loop"}
    assert all(line["peak_mib"] <= line["limit_at_last_mib"] for line in outcomes)


@pytest.mark.slow
def test_r12_a_hundred_loops_of_ones_own(program, tmp_path):
    pytest.importorskip("plimsoll._torch")
    outcomes = random_runs(program, tmp_path, seed=12, runs=100, loops=1)
    assert {line["start"] for line in outcomes} == {"fork", "spawn"}
    assert sum(line["outcome"] != "finished" for line in outcomes) >= 5
