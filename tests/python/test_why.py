# SPDX-License-Identifier: Apache-2.0
"""`plimsoll why`: how runs and commands ended, as they really do."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.support.cgroup import MemoryCgroup
from tests.support.ended_runs import RUN, python_run


def why(program, folder) -> dict:
    done = subprocess.run([program, "why", folder, "--json"], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    text = subprocess.run([program, "why", folder], text=True, capture_output=True, check=True).stdout
    assert told["cause"] == "running" or text.splitlines()[0] == told["summary"]
    return told


def test_m8_t10_a_run_killed_by_hand_is_no_matter_of_memory_and_one_that_runs_runs(program, tmp_path):
    run = python_run(tmp_path / "run", "4GiB", 0)
    assert any(line == "8\n" for line in run.stdout)
    told = why(program, tmp_path / "run")
    assert told["cause"] == "running" and not told["incident"]
    time.sleep(1.2)
    run.kill()
    run.communicate()
    told = why(program, tmp_path / "run")
    assert told["cause"] == "killed" and told["incident"] and not told["memory"], told
    assert "committed: step" in " ".join(told["evidence"])
    assert told["held_bytes"] > 50 << 20 and told["limit_bytes"] == 4 << 30


@pytest.mark.parametrize(("words", "cause", "incident", "memory"), [
    ([], "finished", False, False),
    (["boom"], "failed", True, False),
    (["refuse"], "refused", True, True),
])
def test_t10_a_run_tells_its_own_end(program, tmp_path, words, cause, incident, memory):
    run = python_run(tmp_path / "run", "4GiB", 0, *words, STEPS="8")
    run.communicate(timeout=120)
    told = why(program, tmp_path / "run")
    assert (told["cause"], told["incident"], told["memory"]) == (cause, incident, memory), told
    assert (tmp_path / "run" / "looks.bin").stat().st_size == 256 << 10


def test_a_run_that_is_stopped_by_hand(program, tmp_path):
    run = python_run(tmp_path / "run", "4GiB", 0)
    assert any(line == "3\n" for line in run.stdout)
    run.send_signal(signal.SIGTERM)
    assert run.communicate(timeout=60) and run.returncode == 0
    told = why(program, tmp_path / "run")
    assert told["cause"] == "asked" and "by hand" in told["summary"] and "SIGTERM" in told["summary"]


def test_t10_the_worker_that_the_kernel_killed_is_named(program, tmp_path):
    """It takes more at once than is left: the run may see it coming, or the kernel is quicker."""
    MemoryCgroup.needed()
    with MemoryCgroup(1200 << 20) as group:
        done = group.start([sys.executable, "-c", RUN, tmp_path / "run", "1GiB", "1", "leak"], text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        done.communicate(timeout=120)
        told = why(program, tmp_path / "run")
    assert done.returncode != 0
    assert told["cause"] in ("killed_in_cgroup", "pressure") and told["memory"], told
    if told["cause"] == "killed_in_cgroup":
        assert "the cgroup of the job (limit 1.2 GiB), not this run's limit of 1.0 GiB" in told["summary"]
    assert told["grower"]["worker"] and told["grower"]["grown_bytes"] > 100 << 20, told
    assert "a worker, PID" in told["summary"] and "in epoch 1 " in told["summary"]


def test_t10_a_command_that_the_kernel_killed_is_an_incident_and_a_classroom_is_none(program, tmp_path):
    MemoryCgroup.needed()
    leak = "import time\nkept = []\nwhile True: kept.append(bytearray(4 << 20)); time.sleep(.02)"
    done = subprocess.run([program, "run", "--memory-limit", "256MiB", "--record", tmp_path / "killed", "--",
                           sys.executable, "-c", leak], capture_output=True, text=True, check=False)
    assert done.returncode == 137
    told = why(program, tmp_path / "killed")
    assert told["cause"] == "killed_at_limit" and told["incident"] and told["memory"]
    assert told["status"] == 137 and told["oom_kills"] == 1
    assert "the process itself, PID" in told["summary"] and told["grower"]["grown_bytes"] > 32 << 20
    assert "training" not in told["summary"], "it is no run"
    subprocess.run([program, "run", "--memory-limit", "256MiB", "--record", tmp_path / "fine", "--", sys.executable, "-c",
                    "print('OOM in the classroom: Killed process 12 (python), out of memory')"], check=True,
                   capture_output=True)
    told = why(program, tmp_path / "fine")
    assert told["cause"] == "finished" and not told["incident"] and not told["memory"]


def test_the_guard_leaves_its_word_in_the_folder_of_the_run_it_started(program, tmp_path):
    done = subprocess.run([program, "run", "--alert", "8GiB", "--", sys.executable, "-c",
                           RUN + "\nos.kill(os.getpid(), 9)", tmp_path / "run", "4GiB", "0"],
                          capture_output=True, text=True, check=False, env={**os.environ, "STEPS": "4"})
    assert done.returncode == 137
    told = why(program, tmp_path / "run")
    assert told["cause"] == "finished"  # Its own last word came first.
    assert json.loads((tmp_path / "run" / "ending.json").read_text())["ending"] == "killed"
    again = python_run(tmp_path / "run", "4GiB", 0, STEPS="4")
    again.communicate(timeout=60)
    assert not (tmp_path / "run" / "ending.json").exists()


def test_what_is_no_run_is_refused_by_name(program, tmp_path):
    done = subprocess.run([program, "why", tmp_path], text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert f"{tmp_path}: neither a run nor a folder of `plimsoll run --record`" in done.stderr


def test_in_python(program, tmp_path):
    import plimsoll

    run = python_run(tmp_path / "run", "4GiB", 0, STEPS="3")
    run.communicate(timeout=60)
    assert plimsoll.why(tmp_path / "run") == why(program, tmp_path / "run")
    with pytest.raises(plimsoll.NotFoundError):
        plimsoll.why(pathlib.Path("nowhere"))
