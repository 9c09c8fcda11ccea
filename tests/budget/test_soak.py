# SPDX-License-Identifier: Apache-2.0
"""The soak of `make soak`, for some seconds, and that it sees what must not be."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.budget.soak import MIB, Soak, flat
from tests.support.cgroup import MemoryCgroup

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_soak_of_some_seconds(program, tmp_path):
    pytest.importorskip("torch")
    MemoryCgroup.needed()
    done = subprocess.run(
        [sys.executable, "-m", "tests.budget.soak", "--minutes", "0.2", "--ahead", "1", "--work", str(tmp_path)], cwd=ROOT, text=True,
        capture_output=True, timeout=540, env={**os.environ, "PLIMSOLL_PROGRAM": str(program)}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["runner killed"] >= 1 and told["train done"] >= 1 and told["wrong"] == []
    assert list(tmp_path.iterdir()) == []


def test_growth_is_seen():
    assert flat("it", [5 * MIB] * 20) == []
    assert flat("it", [5 * MIB, 9 * MIB] * 10) == []  # It comes and goes.
    assert flat("it", [5 * MIB + k * MIB // 10 for k in range(40)]) == ["it grew from 7065 to 9113 KiB"]


def test_a_runner_is_measured_from_its_first_job_on(program, tmp_path):
    """Not while Python loads."""
    soak = Soak(str(program), tmp_path, seed=1, minutes=0, ahead=0)
    for number in range(2):  # The log has words of the runner before.
        soak.call("queue", "add", soak.queue, "--memory-limit", "1GiB", "--", "true")
        runner = soak.start_runner()
        try:
            while not soak.runners[-1]:
                soak.look(runner, runner)
            words = pathlib.Path(f"/proc/{runner.pid}/cmdline").read_bytes().split(b"\0")
            assert b"plimsoll" in words and b"torch" not in pathlib.Path(f"/proc/{runner.pid}/maps").read_bytes()  # As python -m plimsoll.
        finally:
            runner.kill()
            runner.wait()
    assert all(0 < one < 60 * MIB for life in soak.runners for one in life)
