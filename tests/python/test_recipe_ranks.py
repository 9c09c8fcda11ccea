# SPDX-License-Identifier: Apache-2.0
"""`plimsoll train cosir` and `can-kd` as several ranks, as torchrun starts them on one machine (decisions 0086 and 0087)."""
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from plimsoll.ranks._rank_watch import state_of
from tests.support.cgroup import MemoryCgroup
from test_can_kd import SMALL, traffic  # noqa: F401  A fixture.
from test_cli import call, trains  # noqa: F401  Fixtures.

pytest.importorskip("torch")

ROWS, EPOCHS, BATCH = 5300, 8, 2048  # Steps of four tiles and, at the end of an epoch, of two, the last not whole.
STEPS = 24


@pytest.fixture(scope="module")
def data(program, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "data"
    subprocess.run([program, "synth", "cosir", "--rows", str(ROWS), "--image-dim", "40", "--text-dim", "24", "--out", folder],
                   check=True, capture_output=True)
    return folder


@pytest.fixture
def start(program, trains, tmp_path):
    """Starts a command of the program as so many ranks; one that is left running is ended."""
    started = []

    def begin(ranks, *words, restarts=0):
        launcher = [] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python",
                                          "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        with open(tmp_path / f"told-{len(started)}", "w") as told:
            started.append(subprocess.Popen([*launcher, program, *map(str, words)], text=True, stdout=subprocess.PIPE, stderr=told))
        started[-1].told = tmp_path / f"told-{len(started) - 1}"
        return started[-1]

    yield begin
    for one in started:
        if one.poll() is None:
            one.kill()
            one.wait()


def ended(process):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, process.told.read_text()
    return json.loads(out.splitlines()[-1])


def words(data, out, **options):
    given = {"memory_limit": "4GiB", "epochs": EPOCHS, "batch_size": BATCH, "dim": 16, "eval_pairs": 100, "compute_threads": 1,
             "checkpoint_every_n_steps": 1, **options}
    return ["train", "cosir", "--data", data, "--out", out, "--quiet", "--json",
            *[word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]]


@pytest.fixture(scope="module")
def alone(trains, program, data, tmp_path_factory):
    """What one process ends with."""
    done = subprocess.run([program, *map(str, words(data, tmp_path_factory.mktemp("alone") / "run"))], text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("counts, options", [  # Plain ones of two ranks are those that torchrun starts again.
    ((1, 3), {"gradient_caching": "true", "projections": "false", "dim": 0, "epochs": 2, "phase2_epochs": 1}),
    pytest.param((1, 2, 4, 8), {}, marks=pytest.mark.slow)])
def test_any_number_of_ranks_ends_in_the_bits_of_one_process(start, data, program, tmp_path, counts, options):
    if options:  # Without projections both sides are of one width.
        data = tmp_path / "data"
        subprocess.run([program, "synth", "cosir", "--rows", str(ROWS), "--image-dim", "24", "--text-dim", "24", "--out", data],
                       check=True, capture_output=True)
    sums = [ended(start(ranks, *words(data, tmp_path / f"run-{ranks}", **options))) for ranks in counts]
    assert {one["step"] for one in sums} == {3 * (options.get("epochs", EPOCHS) + options.get("phase2_epochs", 0))}
    assert len({one["state_sha256"] for one in sums}) == 1
    assert len({one["loss"] for one in sums}) == 1


def events(run, name):
    lines = (run / "events.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == name]


def children(pid):
    try:
        return [int(one) for one in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def rank_of(pid):
    try:
        environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # It has ended.
        return None
    return next((int(one[5:]) for one in environment if one.startswith(b"RANK=")), None)


def step_of(run):
    manifest = run / "checkpoints" / "manifest.json"
    return json.loads(manifest.read_text())["step"] if manifest.exists() else -1


def end(pid, how=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)


def later(run, process, longer=0.0):
    """Until it has committed once more, and so many seconds longer."""
    began, until = step_of(run), time.monotonic() + 120
    while process.poll() is None and step_of(run) <= began and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(longer)


def can_words(data, out, *options):
    """Chunks of 32 graphs are answered by ranks: validation, difficulties, looks at the test file."""
    return ["train", "can-kd", "--data", data, "--out", out, "--memory-limit", "4GiB", *SMALL, "--compute-threads", "1",
            "--scoring-chunk", "32", "--test-every-n-epochs", "1", "--checkpoint-every-n-steps", "2", *options]


def going_on(run, words_):
    """The command that begins the run, or goes on with it."""
    if step_of(run) >= 0:
        return ["resume", run, "--quiet", "--json"]
    shutil.rmtree(run, ignore_errors=True)
    return words_


def command(data, run):
    return going_on(run, words(data, run))


def killed(start, ranks, run, words_, chance):
    """Any of them, or the launcher."""
    process = start(ranks, *going_on(run, words_))
    later(run, process, chance.uniform(0, 0.2))
    who, pids = chance.choice([*range(ranks), "launcher"]), children(process.pid)
    for pid in [process.pid] if who == "launcher" else [pid for pid in pids if rank_of(pid) == who]:
        end(pid)
    process.communicate(timeout=120)
    until = time.monotonic() + 60
    while any(state_of(pid) not in "ZX" for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)  # They end with their launcher.


def killed_and_ended(start, folder, words_of, steps, kills, seed, counts):
    """What a run ends with that so many ranks in turn began, were killed in, and another number of them ended."""
    chance, run, made = random.Random(seed), folder / "killed", 0
    while made < kills:
        killed(start, counts[made % len(counts)], run, words_of(run), chance)
        if step_of(run) < steps:
            made += 1
        else:  # Too late: anew.
            run = folder / f"killed-{made}-{time.monotonic_ns()}"
    return ended(start((*counts, 1)[made % (len(counts) + 1)], *going_on(run, words_of(run))))


@pytest.mark.parametrize("kills, seed, counts", [(1, 3, (3, 1)), pytest.param(30, 30, (4, 2, 8), marks=pytest.mark.slow)])
def test_killed_at_any_moment_another_number_of_ranks_goes_on_to_the_same_bits(start, data, tmp_path, alone, kills, seed, counts):
    """Seed 3 is rank 1's."""
    last = killed_and_ended(start, tmp_path, lambda run: words(data, run), STEPS, kills, seed, counts)
    assert last["state_sha256"] == alone["state_sha256"] and last["step"] == STEPS


STUDENT = ["--model-size", "student", "--use-kd", "false"]  # Half of the steps.


@pytest.mark.parametrize("counts, options", [
    ((1, 3), ["--use-vgae-mining", "false", "--difficulty-cache-update", "1", *STUDENT]), pytest.param((1, 2, 4, 8), [], marks=pytest.mark.slow)])
def test_any_number_of_ranks_of_can_kd_ends_in_the_bits_of_one_process(start, traffic, tmp_path, counts, options):
    """What teachers and autoencoders add is in test_can_kd_ranks.py."""
    sums = [ended(start(ranks, *can_words(traffic, tmp_path / f"run-{ranks}", *options))) for ranks in counts]
    assert len({one["state_sha256"] for one in sums}) == 1
    assert len({json.dumps(one["models"]) + json.dumps(one["evaluation"]) for one in sums}) == 1
    looks = [[(event["task"], event["held_out_loss"], event.get("test/auc")) for event in events(tmp_path / f"run-{ranks}", "epoch")]
             for ranks in counts]
    assert looks[0] and looks == [looks[0]] * len(counts)


@pytest.mark.parametrize("kills, seed, counts, options", [(1, 8, (3, 1), STUDENT), pytest.param(20, 20, (4, 2, 8), [], marks=pytest.mark.slow)])
def test_killed_at_any_moment_another_number_of_ranks_of_can_kd_goes_on_to_the_same_bits(start, traffic, tmp_path, kills, seed, counts, options):
    """Seed 8 is the launcher's."""
    alone = ended(start(1, *can_words(traffic, tmp_path / "alone", *options)))
    last = killed_and_ended(start, tmp_path, lambda run: can_words(traffic, run, *options), alone["step"], kills, seed, counts)
    assert last["state_sha256"] == alone["state_sha256"] and last["step"] == alone["step"]


def test_torchrun_starts_them_again_and_they_go_on(start, data, tmp_path, alone):
    """With the command that began the run: each rank is killed once."""
    run = tmp_path / "again"
    process = start(2, *words(data, run), restarts=2)
    for which in (1, 0):
        later(run, process)
        for pid in children(process.pid)[which:which + 1]:
            end(pid)
    last = ended(process)
    assert last["state_sha256"] == alone["state_sha256"] and last["step"] == STEPS


@pytest.mark.slow  # Half a minute of waiting.
def test_a_rank_that_is_stopped_is_ended_by_the_others(start, data, tmp_path, alone):
    run = tmp_path / "frozen"
    process = start(2, *command(data, run))
    later(run, process)
    [pid] = [pid for pid in children(process.pid) if rank_of(pid) == 1]
    end(pid, signal.SIGSTOP)
    process.communicate(timeout=120)
    assert process.returncode != 0 and step_of(run) < STEPS
    assert "rank 1 has been stopped (SIGSTOP) for 30 s" in process.told.read_text()
    assert ended(start(2, *command(data, run)))["state_sha256"] == alone["state_sha256"]


def test_a_stop_of_all_is_a_commit_and_two_ranks_go_on(start, data, tmp_path, alone):
    run = tmp_path / "stopped"
    process = start(3, *words(data, run))
    until = time.monotonic() + 120
    while step_of(run) < 1 and time.monotonic() < until:
        time.sleep(0.01)
    for pid in children(process.pid):  # As torchrun passes it on.
        end(pid, signal.SIGTERM)
    told = ended(process)
    assert told["status"] == "stopped" and told["stop_cause"] == "asked" and 1 <= told["step"] < STEPS
    last = ended(start(2, "resume", run, "--quiet", "--json"))
    assert last["state_sha256"] == alone["state_sha256"]


def test_a_limit_that_moves_is_for_all_of_them(start, call, data, tmp_path):
    run = tmp_path / "moved"
    process = start(2, *words(data, run, epochs=1000, memory_limit="2GiB"))
    later(run, process)
    for count, size in enumerate(("3GiB", "100MiB")):
        assert call("limit", run, size).status == 0
        until = time.monotonic() + 60
        while len(events(run, "limit")) <= count and time.monotonic() < until:
            time.sleep(0.05)
    for pid in children(process.pid):
        end(pid, signal.SIGTERM)
    told = ended(process)
    larger, smaller = events(run, "limit")
    gained = larger["limit_bytes"] - larger["before_bytes"]
    assert larger["asked"] == "3GiB" and gained == pytest.approx(1 << 30, abs=2)  # Shares are rounded down.
    assert told["limit_bytes"] == larger["limit_bytes"]
    assert smaller["asked"] == "100MiB" and "the run's other processes hold all of it" in smaller["message"]


def test_a_limit_that_is_too_small_for_one_of_them_names_ranks_and_share(start, data, tmp_path):
    process = start(2, *words(data, tmp_path / "small", memory_limit="300MiB"))
    process.communicate(timeout=300)
    told = process.told.read_text()
    assert process.returncode != 0 and not (tmp_path / "small").exists()
    assert "of 2" in told and "whose share of memory_limit is" in told, told


def test_a_batch_size_of_auto_is_refused_by_its_option(start, traffic, tmp_path):
    """As test_cosir_ranks.py has it of the other recipe."""
    process = start(2, *can_words(traffic, tmp_path / "auto", "--batch-size", "auto"))
    process.communicate(timeout=300)
    told = process.told.read_text()
    assert process.returncode != 0
    assert "batch_size = auto is planned for one process, and these are 2 ranks; give batch_size a number" in told, told


@pytest.mark.slow
@pytest.mark.parametrize("limit", [900, 1100, 1300])
def test_ranks_stay_within_one_limit_of_a_cgroup(program, data, tmp_path, alone, limit):
    MemoryCgroup.needed()
    with MemoryCgroup(limit << 20) as group:
        done = group.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2",
                          str(program), *map(str, words(data, tmp_path / "run", memory_limit=f"{limit}MiB"))])
    assert done.returncode == 0 and done.oom_kills == 0, done.stderr
    assert done.last_json["state_sha256"] == alone["state_sha256"]
