# SPDX-License-Identifier: Apache-2.0
"""Random runs whose memory grows until the limit: no kill, at most one step lost, the same bits when started again."""
import json
import pathlib
import subprocess
import sys

import pytest

from tests.budget.random_pressure import PLACES
from tests.support.cgroup import MemoryCgroup

ROOT = pathlib.Path(__file__).resolve().parents[2]


def random_pressure(folder: pathlib.Path, *words) -> list[dict]:
    MemoryCgroup.needed()
    pytest.importorskip("plimsoll._torch")
    lines = folder / "pressure.jsonl"
    done = subprocess.run([sys.executable, "-m", "tests.budget.random_pressure", "--work", str(folder), "--out", str(lines),
                           *map(str, words)], cwd=ROOT, text=True, capture_output=True, timeout=7200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return [json.loads(line) for line in lines.read_text().splitlines()]


def test_s02_at_the_limit_no_work_is_lost(tmp_path):
    told = random_pressure(tmp_path, "--seed", 44, "--count", len(PLACES), "--jobs", 2)
    assert {line["where"] for line in told} == set(PLACES)
    assert {line["outcome"] for line in told} >= {"pressure"} and max(line["lost"] for line in told) <= 1


@pytest.mark.slow
def test_s02_two_hundred_runs(tmp_path):
    told = random_pressure(tmp_path, "--seed", 1, "--count", 200, "--jobs", 2)
    assert len(told) == 200 and sum(line["outcome"] == "pressure" for line in told) >= 100
