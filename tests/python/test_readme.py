# SPDX-License-Identifier: Apache-2.0
"""The README's Python block, and those that docs/guide has of single pieces, as printed: the run and the loop of single pieces resume bit for bit wherever killed.

Method of the latter: the block runs in processes of their own. One runs undisturbed. The others are killed at a random one
of all their calls that read, change or save something, the saving ones' inner steps included, and started
again until they finish. Then the bits of model, optimizer, random state and rows are compared.
"""
import os
import pathlib
import random
import re
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import plimsoll

from tests.support.readme import (COMMIT_EVERY, PIECES, PIECES_BITS, PLANS, RUN, RUN_STEPS, bits_of,
                                  block, live)

# Kills the process before or after the call whose number is given; counts them all otherwise.
BEFORE = """
import os, signal, sys
import torch, plimsoll
calls, fatal = 0, int(sys.argv[1])
def count(*_):
    global calls
    calls += 1
    if calls == fatal:
        os.kill(os.getpid(), signal.SIGKILL)
def watched(real):
    def call(*arguments, **options):
        count()
        answer = real(*arguments, **options)
        count()
        return answer
    return call
for place, names in ((plimsoll.EmbeddingStore, "apply commit"), (torch.optim.AdamW, "step"), (torch, "save"),
                     (os, "fsync replace")):
    for name in names.split():
        setattr(place, name, watched(getattr(place, name)))
"""
AFTER = PIECES_BITS + "print('calls', calls)\n"


def start(folder: pathlib.Path, fatal: int = 0) -> subprocess.CompletedProcess:
    folder.mkdir(exist_ok=True)
    return subprocess.run([sys.executable, "-c", BEFORE + block(PIECES) + AFTER, str(fatal)], cwd=folder, text=True,
                          capture_output=True, timeout=300, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def finished(done: subprocess.CompletedProcess) -> tuple[int, str]:
    assert done.returncode == 0, done.stderr
    bits, calls = re.search(r"bits (\w+)\ncalls (\d+)", done.stdout).groups()
    return int(calls), bits


def steps(done: subprocess.CompletedProcess) -> list[int]:
    return [int(step) for step in re.findall(r"step (\d+): loss", done.stdout)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> subprocess.CompletedProcess:
    return start(tmp_path_factory.mktemp("undisturbed"))


def test_the_quick_start_runs_and_learns(undisturbed):
    finished(undisturbed)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", undisturbed.stdout)]
    assert steps(undisturbed) == [50, 100, 150, 200, 250, 300]
    assert losses[-1] < 0.75 * losses[0]
    assert "rows" in undisturbed.stdout  # The ledger names who holds what.


def test_r31_killed_anywhere_the_quick_start_goes_on_to_the_same_bits(undisturbed, tmp_path):
    calls, bits = finished(undisturbed)
    fatal = random.randrange(calls // 4, calls)
    print("killed at call", fatal)
    killed = start(tmp_path / "run", fatal)
    assert killed.returncode == -signal.SIGKILL
    again = start(tmp_path / "run")
    assert finished(again)[1] == bits
    assert steps(again)[0] > 50 and steps(again)[-1] == 300  # From the last commit, not from the beginning.
    third = start(tmp_path / "run")
    assert finished(third)[1] == bits and steps(third) == []  # Nothing is left to do.


@pytest.mark.slow
def test_r31_killed_again_and_again_it_ends_in_the_same_bits(undisturbed, tmp_path):
    calls, bits = finished(undisturbed)
    for seed in range(10):
        chosen, lives = random.Random(seed), 0
        while (done := start(tmp_path / str(seed), chosen.randrange(1, calls // 2))).returncode != 0:
            assert done.returncode == -signal.SIGKILL, done.stderr
            lives += 1
        assert lives > 0 and finished(done)[1] == bits, f"seed {seed}, {lives} kills"


@pytest.mark.slow
def test_r31_killed_at_every_call_of_a_commit_it_ends_in_the_same_bits(undisturbed, tmp_path):
    """The second checkpoint and commit: every call between the optimizer's step and the next batch."""
    _, bits = finished(undisturbed)
    a_step = 4  # Calls of one step: before and after each of the optimizer's step and apply().
    first = 100 * a_step
    for fatal in range(first, first + 40):
        folder = tmp_path / str(fatal)
        assert start(folder, fatal).returncode == -signal.SIGKILL
        assert finished(start(folder))[1] == bits, f"call {fatal}"


def done_block(of: tuple[str, int], folder: pathlib.Path) -> subprocess.CompletedProcess:
    """A block, as printed, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", block(of)], cwd=folder, text=True, capture_output=True,
                          timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done


ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> str:
    """The bits of the run that nobody disturbs."""
    return bits_of(live(tmp_path_factory.mktemp("calm") / "run", ONE_THREAD))


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_the_run_of_the_quick_start_is_killed_at_random_and_ends_in_the_same_bits(kills, calm, tmp_path):
    """A life is killed behind 1 to 20 steps, so that most of them, not all, get behind the next commit."""
    made, seed = 0, random.randrange(1 << 30)
    print("seed", seed)
    chosen = random.Random(seed)
    while made < kills:
        folder = tmp_path / str(made)
        while made < kills:
            done = live(folder, ONE_THREAD, chosen.randint(1, 20))
            if done.returncode == 0:
                break
            assert done.returncode == -signal.SIGKILL, done.stderr
            made += 1
        done = live(folder, ONE_THREAD)
        assert bits_of(done) == calm
        found = re.search(r"goes on at step (\d+)", done.stderr)
        assert found is None or int(found.group(1)) % COMMIT_EVERY == 0 or int(found.group(1)) == RUN_STEPS


def test_the_run_of_the_quick_start_runs_and_is_done(tmp_path):
    done_block(RUN, tmp_path)
    status = plimsoll.status(tmp_path / "quickstart" / "run")
    assert (status["status"], status["step"], status["checkpoint_step"]) == ("finished", RUN_STEPS, RUN_STEPS)


def test_r58_the_block_of_plans_runs_as_printed(tmp_path):
    done = done_block(PLANS, tmp_path)
    assert "batch size 1024" in done.stdout and "2 steps" in done.stdout
