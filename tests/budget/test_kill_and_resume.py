# SPDX-License-Identifier: Apache-2.0
"""kill -9 at any point, then `plimsoll resume`: the same bits as the run nobody disturbed.

Kills come in two kinds: from outside, once the run has passed a step drawn from a seed, and from
inside, at named points of the commit (PLIMSOLL_CRASH, see src/os/crash_point.h).
"""
import json
import os
import pathlib
import random
import signal
import subprocess
import time

import pytest

COMMIT_POINTS = ["store.commit.pages", "store.commit.map", "store.commit.superblock.before",
                 "store.commit.superblock.after", "file.rename.before", "file.sync.after"]
OPTIONS = ["--epochs", "3", "--batch-size", "256", "--seed", "11", "--json",
           "--set", "checkpoint_every_n_steps=4", "--set", "eval_pairs=200"]
LIMIT = "768MiB"


def steps_done(run: pathlib.Path) -> int:
    """The last step in events.jsonl; 0 when there is none yet."""
    try:
        lines = (run / "events.jsonl").read_bytes().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue  # The line a kill cut short.
        if event.get("event") == "step":
            return event["step"]
    return 0


def kill_from_outside(command, run: pathlib.Path, at_step: int) -> bool:
    """Starts `command` and kills it once it has passed `at_step`. False: it ended before."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while child.poll() is None:
        if steps_done(run) >= at_step:
            child.send_signal(signal.SIGKILL)
            child.wait()
            child.stderr.close()
            return True
        time.sleep(0.005)
    assert child.returncode == 0, child.stderr.read()[-3000:]
    return False


def kill_from_inside(command, point: str, passage: int) -> bool:
    """Runs `command` until it kills itself at the given passage of `point`."""
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          env=dict(os.environ, PLIMSOLL_CRASH=f"{point}:{passage}"), check=False)
    if done.returncode == 0:
        return False
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    return True


def torture(program, data, out: pathlib.Path, kills: int, seed: int) -> tuple[int, int]:
    """Kills one run `kills` times, a third of them inside a commit. → (outside, inside)."""
    choose = random.Random(seed)
    train = [program, "train", "cosir", "--data", data, "--out", out,
             "--memory-limit", LIMIT, *OPTIONS]
    resume = [program, "resume", out, "--json"]
    total_steps = 3 * 19  # 6,000 pairs less the held-out fifth, in batches of 256.
    outside = inside = 0
    command = train
    for kill in range(kills):
        if kill % 3 == 2:
            point = choose.choice(COMMIT_POINTS)
            killed = kill_from_inside(command, point, choose.randint(1, 3))
            inside += killed
        else:
            goal = max(1, round(total_steps * (kill + 1) / (kills + 1)))
            killed = kill_from_outside(command, out, goal)
            outside += killed
        # A kill before the first checkpoint leaves nothing to resume: the run starts over.
        manifest = out / "checkpoints" / "manifest.json"
        command = resume if manifest.exists() else train
        if command is train and out.exists():
            subprocess.run(["rm", "-rf", out], check=True)
    return outside, inside


def finish(program, out, run_program) -> dict:
    return run_program("resume", out, "--json")


def undisturbed(run_program, data, out, *more, limit=LIMIT) -> str:
    summary = run_program("train", "cosir", "--data", data, "--out", out,
                          "--memory-limit", limit, *OPTIONS, *more)
    assert summary["status"] == "finished"
    return summary["state_sha256"]


def test_killed_runs_resume_to_the_same_bits(program, run_program, small_data, tmp_path):
    expected = undisturbed(run_program, small_data, tmp_path / "calm")
    outside, inside = torture(program, small_data, tmp_path / "killed", kills=6, seed=5)
    assert outside >= 2 and inside >= 1
    assert finish(program, tmp_path / "killed", run_program)["state_sha256"] == expected


@pytest.mark.slow
def test_twenty_kills_three_limits_and_thread_counts_give_one_state(
        program, run_program, small_data, tmp_path):
    expected = undisturbed(run_program, small_data, tmp_path / "calm")
    outside, inside = torture(program, small_data, tmp_path / "killed", kills=26, seed=7)
    assert outside + inside >= 20 and inside >= 3, (outside, inside)
    assert finish(program, tmp_path / "killed", run_program)["state_sha256"] == expected
    assert states_elsewhere(run_program, small_data, tmp_path) == {expected}


def states_elsewhere(run_program, data, folder) -> set[str]:
    """The final states of the same run with other threads and three times the limit."""
    return {undisturbed(run_program, data, folder / "one", "--set", "loader_threads=1"),
            undisturbed(run_program, data, folder / "two", "--set", "loader_threads=2"),
            undisturbed(run_program, data, folder / "wide", limit="2304MiB")}


def test_limits_and_loader_threads_do_not_change_the_bits(run_program, small_data, tmp_path):
    assert len(states_elsewhere(run_program, small_data, tmp_path)) == 1
