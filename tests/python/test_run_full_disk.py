# SPDX-License-Identifier: Apache-2.0
"""A disk that is full ends no run: what it tells is left out, a commit waits for room and goes on by itself.

The program fills the disk in the body of a step; nothing here depends on when the next one comes.
"""
import json
import signal
import time

import pytest

import plimsoll
from tests.support import full_disk
from tests.support.forked import PROGRAM, first, first_of_loops, forked  # noqa: F401  Fixtures.

pytest.importorskip("torch")


@pytest.fixture
def disk(tmp_path):
    with full_disk.small_disk(tmp_path / "disk", 40) as folder:
        yield folder


def ended(process, code=0):
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return out, err


@pytest.fixture(scope="module")
def start(first_of_loops):
    """Starts the program."""
    def one(folder, kind, step=0):
        return first_of_loops.start(full_disk.__file__, folder, kind, step)
    return one


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    """What it prints when no disk is full."""
    printed = {}

    def of(kind):
        if kind not in printed:
            printed[kind] = ended(start(tmp_path_factory.mktemp("undisturbed"), kind))[0]
        return printed[kind]
    return of


def events_of(run):
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["dense", "rows", "own"])
def test_s04_a_commit_waits_for_room_and_ends_in_the_same_bits(kind, start, undisturbed, disk):
    run, process = disk / "run", start(disk, kind, step=6)
    said = full_disk.wait_until(run, process, "paused: disk full")
    assert said["checkpoint_step"] == 4 and "of room" in said["message"] and said["alive"]
    why = plimsoll.why(run)
    assert why["cause"] == "running" and "paused: disk full" in why["summary"]
    (disk / "filler").unlink()
    out, err = ended(process)
    assert "paused: disk full" in err and "has room again" in err
    assert out == undisturbed(kind)
    events = events_of(run)
    assert [event["step"] for event in events if event["event"] == "step"] == [*range(1, 1 + full_disk.STEPS)]  # None is left out.
    names = [event["event"] for event in events]
    assert names.index("disk_full") < names.index("disk_room")
    assert plimsoll.status(run)["status"] == "finished" and plimsoll.why(run)["cause"] == "finished"


@pytest.mark.parametrize("how", ["SIGINT", "stop"])
def test_s04_a_stop_ends_the_wait_and_says_what_is_not_committed(how, start, undisturbed, disk):
    run, process = disk / "run", start(disk, "dense", step=6)
    full_disk.wait_until(run, process, "paused: disk full")
    process.send_signal(signal.SIGINT) if how == "SIGINT" else plimsoll.stop(run)
    _, err = ended(process, 1)
    last = next(step for step in range(8, full_disk.STEPS) if f"steps 5 to {step} are not committed" in err)
    assert "the run was asked to stop" in err and "the commit of step 4 stands" in err and last <= 9
    (disk / "filler").unlink()
    why = plimsoll.why(run)
    assert why["cause"] == "disk" and "disk is full" in why["summary"] and why["checkpoint_step"] == 4
    out, err = ended(start(disk, "dense"))
    assert "goes on at step 4" in err and out == undisturbed("dense")


def test_s04_killed_while_it_waits_the_disk_is_named(start, undisturbed, disk):
    run, process = disk / "run", start(disk, "rows", step=6)
    full_disk.wait_until(run, process, "paused: disk full")
    process.kill()
    process.communicate()
    why = plimsoll.why(run)
    assert why["cause"] == "disk" and "while it was paused, as the disk is full" in why["summary"]
    (disk / "filler").unlink()
    assert ended(start(disk, "rows"))[0] == undisturbed("rows")


def test_s04_a_full_disk_between_two_commits_is_none_of_the_loops_business(start, undisturbed, disk):
    """It has room again before the next commit: what could not be told is told then."""
    run, process = disk / "run", start(disk, "dense", step=full_disk.STEPS)
    full_disk.wait_until(run, process, "paused: disk full")
    (disk / "filler").unlink()
    out, _ = ended(process)
    assert out == undisturbed("dense")
    assert [event["step"] for event in events_of(run) if event["event"] == "step"][-1] == full_disk.STEPS


def test_s04_a_recipe_waits_too(forked, first, disk, tmp_path):
    assert forked("synth", "cosir", "--rows", "2000", "--image-dim", "16", "--text-dim", "16", "--out", tmp_path / "data", "--seed", "0").status == 0

    def start(out):
        return first.start(PROGRAM, "train", "cosir", "--data", tmp_path / "data", "--out", out, "--memory-limit", "1GiB", "--epochs", "30",
                           "--batch-size", "128", "--eval-pairs", "100", "--checkpoint-every-n-steps", "5", "--quiet", "--json")

    run, process = disk / "run", start(disk / "run")
    while not (run / "checkpoints" / "manifest.json").exists():
        assert process.poll() is None, ended(process)
        time.sleep(0.002)
    process.send_signal(signal.SIGSTOP)  # It makes no commit, and no end, while the disk is filled.
    full_disk.fill(disk)
    process.send_signal(signal.SIGCONT)
    full_disk.wait_until(run, process, "paused: disk full")
    (disk / "filler").unlink()
    whole, _ = ended(start(tmp_path / "whole"))
    out, err = ended(process)
    assert "paused: disk full" in err and "has room again" in err
    assert json.loads(out.splitlines()[-1])["state_sha256"] == json.loads(whole.splitlines()[-1])["state_sha256"]
