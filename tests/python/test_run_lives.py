# SPDX-License-Identifier: Apache-2.0
"""plimsoll.Run where users stand: programs that are killed at any moment and started again end in the bits
of those that nobody disturbed."""
import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

import plimsoll
from tests.support.cgroup import MemoryCgroup
from tests.support.forked import first, first_of_loops, told  # noqa: F401  Fixtures.

pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "support" / "run_programs.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"}


@pytest.fixture
def lives(first_of_loops):
    return functools.partial(told, first_of_loops, PROGRAMS)


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind, workers", [pytest.param("pictures", 0, marks=pytest.mark.slow), ("pictures", 2), ("texts", 0), ("vectors", 0),
                                           ("on_device", 0)])
def test_killed_at_any_moment_a_run_ends_in_the_same_bits(kind, workers, kills, lives, tmp_path):
    seen = lives(tmp_path, kills, 7 * kills + workers, kind, workers)
    assert seen["digest"] == seen["undisturbed"] and seen["killed_at"]


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [0, 2])
def test_with_torchdata_and_a_part_of_distributed_checkpoint_it_ends_in_the_same_bits(workers, kills, lives, tmp_path):
    pytest.importorskip("torchdata")
    seen = lives(tmp_path, kills, 5 * kills + workers, "stateful", workers)
    assert seen["digest"] == seen["undisturbed"] and seen["killed_at"]


def test_killed_in_any_stage_of_a_commit_a_run_ends_in_the_same_bits(lives, tmp_path):
    seen = lives(tmp_path, "stages", 0, "vectors")
    assert seen["digest"] == seen["undisturbed"]
    # Each life commits once, and its second commit only counts when it was published.
    assert seen["killed_at"] == [5, 10, 15, 20, 25, 30, 35, 45]


def test_the_limit_and_the_workers_do_not_matter_to_the_bits(lives, tmp_path):
    digests = {lives(tmp_path / str(workers), 0, 0, "vectors", workers, limit)["digest"]
               for workers, limit in ((0, "2GiB"), (1, "1GiB"))}
    assert len(digests) == 1


@pytest.fixture(scope="module")
def mortal(tmp_path_factory):
    """A program: RUN [STEP [STEPS]]; it kills itself at the step, and after so many steps of its life."""
    program = tmp_path_factory.mktemp("mortal") / "train.py"
    program.write_text(f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import plimsoll
from plimsoll.core import _compiler
from tests.support import run_programs

ends = [int(word) for word in sys.argv[2:]] + [-1, -1]
log, logged = plimsoll.Run.log, []
def kill(self, **values):
    logged.append(self.steps_made)
    if self.steps_made == ends[0] or len(logged) == ends[1]:
        self._life.end_writing()  # What was due is there.
        os.kill(os.getpid(), signal.SIGKILL)
    log(self, **values)
plimsoll.Run.log = kill
_compiler.import_when_used()  # Lives are many and short.
print(run_programs.main(sys.argv[1], "pictures", "1"))
""")
    return program


@pytest.fixture(scope="module")
def undisturbed(mortal, tmp_path_factory):
    """What the program prints when nobody ends it."""
    done = subprocess.run([sys.executable, mortal, tmp_path_factory.mktemp("undisturbed") / "run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_itself_is_killed_and_started_again(first_of_loops, mortal, undisturbed, tmp_path):
    assert first_of_loops.run(mortal, tmp_path / "run", "21").returncode == -9
    again = first_of_loops.run(mortal, tmp_path / "run")  # At once: nothing of the first life holds the folder.
    assert again.returncode == 0, again.stderr
    assert "goes on at step 20" in again.stderr and again.stdout == undisturbed


def test_a_run_is_started_again_until_it_gets_no_further(program, mortal, undisturbed, tmp_path):
    def start(run, *ends):
        return subprocess.run([program, "run", "--restarts", "9", "--", sys.executable, mortal, run, *ends],
                              capture_output=True, text=True)

    further = start(tmp_path / "b", "-1", "20")
    assert further.returncode == 0 and further.stdout == undisturbed, further.stderr
    assert "started again in 1 s (1 of 9), from " in further.stderr
    assert f"{tmp_path / 'b'}: step 16" in further.stderr and "step 32" in further.stderr
    stuck = start(tmp_path / "c", "33")
    assert stuck.returncode == 137 and stuck.stderr.count("started again in") == 1, stuck.stderr
    assert f"ended twice without getting further ({tmp_path / 'c'}: step 32)" in stuck.stderr


def test_a_run_that_is_ended_while_it_waits_for_workers_has_committed_every_step(first_of_loops, tmp_path):
    """And the next life, with workers that keep nothing, ends in the bits of one that nobody ended."""
    MemoryCgroup.needed()

    def start(group, run, workers):
        return group.run([sys.executable, str(PROGRAMS), str(tmp_path / run), "keeping", workers, "700MiB"],
                         env=ENVIRONMENT)

    undisturbed = first_of_loops.run(PROGRAMS, tmp_path / "a", "keeping", "0", "700MiB")
    with MemoryCgroup(700 << 20) as group:
        ended = start(group, "b", "1")
        again = start(group, "b", "0")
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert ended.returncode == 1 and "MemoryPressure: memory is short" in ended.stderr, ended.stderr
    assert "child process" in ended.stderr and ended.oom_kills == 0
    assert again.returncode == 0 and "goes on at step 4" in again.stderr, again.stderr
    assert again.stdout == undisturbed.stdout


def test_a_run_with_workers_stays_inside_its_limit(tmp_path):
    MemoryCgroup.needed()
    limit = 1 << 30
    with MemoryCgroup(limit) as group:
        done = group.run([sys.executable, str(PROGRAMS), str(tmp_path / "run"), "large", "2", "1GiB"],
                         env=ENVIRONMENT)
    assert done.returncode == 0 and done.oom_kills == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "20"
    assert done.tree_peak_bytes <= limit


ADMITTED = """
import sys
import plimsoll, torch
path, limit, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
with plimsoll.Run(path, memory_limit=limit, foreign_bytes="64MiB", compute_threads=1) as run:
    print(run.governor.ledger().baseline_bytes)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run.track(model=model, optimizer=optimizer)
    batches = [torch.full((1024, 512), float(k)) for k in range(9)]
    for batch in run.steps(batches, epochs=1, progress=False, largest=batches[0]):
        run.step(lambda x: model(x).square().mean(), batch, loss="mean", accumulate=3)
        if run.steps_made + 1 == steps:
            plimsoll.stop(path)
"""


@pytest.mark.parametrize("ends", [(2, 6, 10), pytest.param((2, 4, 6, 8, 10), marks=pytest.mark.slow)], ids=str)
def test_a_limit_that_the_first_life_was_given_is_enough_for_all_others(ends, first, tmp_path):
    """One that has room for what is admitted and 1 MiB; lives end within a window of `accumulate`, and after it."""
    (tmp_path / "admitted.py").write_text(ADMITTED)

    def life(folder, limit, steps):
        return first.run(tmp_path / "admitted.py", tmp_path / folder, limit, steps)

    calm = life("calm", "2GiB", 2)
    events = map(json.loads, (tmp_path / "calm" / "events.jsonl").read_text(encoding="utf-8").splitlines())
    admitted = next(one["admitted_bytes"] for one in events if one["event"] == "admitted")
    limit = str(int(calm.stdout) + (64 << 20) + (1 << 20) + admitted)
    for steps in ends:
        done = life("run", limit, steps)
        assert done.returncode == 0, f"{limit} bytes, {steps} steps: {done.stderr[-1000:]}"
    assert plimsoll.status(tmp_path / "run")["status"] == "finished"
