# SPDX-License-Identifier: Apache-2.0
"""Random programs under `plimsoll run --signal`: ended before the kernel does, and told how."""
import json
import pathlib
import subprocess
import sys

import pytest

from tests.budget.random_programs import KINDS
from tests.support.cgroup import MemoryCgroup

ROOT = pathlib.Path(__file__).resolve().parents[2]


def random_programs(program: pathlib.Path, folder: pathlib.Path, *words) -> list[dict]:
    MemoryCgroup.needed()
    lines = folder / "programs.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "tests.budget.random_programs", "--program", str(program), "--work", str(folder), "--out",
         str(lines), *map(str, words)], cwd=ROOT, text=True, capture_output=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in lines.read_text().splitlines()]


def test_t9_programs_end_by_the_signal_before_the_kernel_kills(program, tmp_path):
    told = random_programs(program, tmp_path, "--seed", 1, "--count", 4, "--jobs", 2)
    assert {line["outcome"] for line in told} >= {"stopped"}


@pytest.mark.slow
def test_t9_forty_programs_of_every_kind(program, tmp_path):
    pytest.importorskip("plimsoll._torch")
    told = random_programs(program, tmp_path, "--seed", 1, "--count", 40)
    assert len(told) == 40 and {line["kind"] for line in told} == set(KINDS)
