# SPDX-License-Identifier: Apache-2.0
"""Loops of users, each in a cgroup of its limit: what grows where no lease is ends them, not the kernel.

The loops are in tests/support/loops.py. Each one but the last would go on until it is killed.
"""
import os
import pathlib
import signal
import sys

import pytest

from tests.support.cgroup import MemoryCgroup

pytest.importorskip("plimsoll")

MIB = 1 << 20
LOOPS = pathlib.Path(__file__).resolve().parents[1] / "support" / "loops.py"


@pytest.fixture(autouse=True)
def cgroup_allowed():
    MemoryCgroup.needed()


def run(name: str, limit_mib: int, *words) -> dict:
    with MemoryCgroup(limit_mib * MIB) as group:
        done = group.run([sys.executable, LOOPS, name, str(limit_mib), *words], timeout=240)
        for pid in (group.folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)  # A forked child that sleeps.
    assert done.returncode == 0, f"{done.returncode}, {done.oom_kills} kills: {done.stderr[-3000:]}"
    assert done.oom_kills == 0, done.stderr[-3000:]
    return done.last_json


def ended_by_us(told: dict, limit_mib: int, *texts: str) -> None:
    assert told["how"] == "pressure", told
    assert told["limit"] == limit_mib * MIB
    assert told["smallest"] > told["limit"]
    for text in ("nothing is left to give back", "(foreign_bytes)", "would do just now", *texts):
        assert text in told["text"], told["text"]


def test_r12_a_loop_that_knows_nothing_of_us_is_ended_before_the_kernel_does(tmp_path):
    told = run("numpy_alone", 256)
    ended_by_us(told, 256, "in arrays and objects of this process")
    assert told["steps"] > 100 and told["warned"] >= 1


def test_r14_shared_memory_counts():
    told = run("shared", 256)
    ended_by_us(told, 256, "in shared memory")


def test_r12_steps_are_boundaries():
    pytest.importorskip("torch")
    ended_by_us(run("numpy_and_steps", 700), 700, "in arrays and objects of this process")


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_r13_workers_count_against_the_limit_of_a_training_step(how):
    pytest.importorskip("torch")
    limit = 700 if how == "fork" else 1100
    ended_by_us(run("workers_and_steps", limit, how), limit, "child processes")


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_r13_workers_that_grow_while_a_loop_waits_for_them(how):
    pytest.importorskip("torch")
    limit = 700 if how == "fork" else 1100
    told = run("workers_between_steps", limit, how)
    ended_by_us(told, limit, "child processes")
    assert told["steps"] == 0


def test_r57_workers_count_in_a_loop_of_torch_alone():
    pytest.importorskip("torch")
    ended_by_us(run("workers_alone", 700, "fork"), 700, "child processes")


def test_r11_a_slab_is_not_doubled_by_a_forked_child_that_sleeps(tmp_path):
    told = run("sleeping_fork", 280, str(tmp_path / "table"))
    assert told["how"] == "finished" and told["steps"] == 99, told
