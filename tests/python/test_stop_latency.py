# SPDX-License-Identifier: Apache-2.0
"""Asked to stop, whatever it is doing ends within two seconds or one step (T8): one test for each phase.

A phase is told by what it leaves on disk; the time runs from the request to the end of the process. Time in which a thread
was ready and had no processor, since the machine was busy with others, does not count.
"""
import contextlib
import gzip
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from test_can_kd import SMALL, traffic  # noqa: F401  A fixture.
from test_cli import call, start, trains, wait_for_steps  # noqa: F401  Fixtures.
from tests.support import chats

LATENCY = 2.0
BUSY = 2.0  # Times as long: others use the disk, too.


def begun(program, *words, **options) -> subprocess.Popen:
    return subprocess.Popen([program, *map(str, words)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            **options)


class Queued:
    """The longest that one thread of a process was ready and had no processor, in seconds; sampled until the process has ended."""

    def __init__(self, pid):
        self._pid, self._first, self._last = pid, self._read(pid), {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    @staticmethod
    def _read(pid) -> dict[str, int]:
        found = {}
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/schedstat") as file:
                    found[task] = int(file.read().split()[1])
        return found

    def _sample(self):
        while not self._over.wait(0.005):
            self._last.update(self._read(self._pid))

    def seconds(self) -> float:
        self._over.set()
        self._thread.join()
        return max((last - self._first.get(task, 0) for task, last in self._last.items()), default=0) / 1e9


@contextlib.contextmanager
def ends_in_time(child):
    """In it the child is asked to end; `child.told` is what it said."""
    assert child.poll() is None, child.communicate()[1][-2000:]
    its, ours = Queued(child.pid), Queued(os.getpid())
    began = time.monotonic()
    try:
        yield
        child.told = child.communicate(timeout=60)
    finally:
        child.kill()
        took, queued = time.monotonic() - began, its.seconds() + ours.seconds()
    assert took - queued <= LATENCY * BUSY, f"{took:.1f} s, {queued:.1f} s of it without a processor: {child.told[1][-2000:]}"


def wait_for(there, child, seconds=60):
    deadline = time.monotonic() + seconds
    while not there():
        assert child.poll() is None, child.communicate()[1][-2000:]
        assert time.monotonic() < deadline, "the phase did not begin"
        time.sleep(0.01)


def has_open(child, path) -> bool:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{child.pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{child.pid}/fd/{name}") == str(path):
                    return True
    return False


def told_of(run) -> dict:
    """status.json, or {} before there is one."""
    try:
        return json.loads((run / "status.json").read_text())
    except (OSError, ValueError):
        return {}


def zeros(path: pathlib.Path, rows: int, dim: int) -> pathlib.Path:
    """An array of zeros that takes no disk."""
    header = np.lib.format.header_data_from_array_1_0(np.empty((0, dim), np.float32)) | {"shape": (rows, dim)}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 4 * rows * dim)
    return path


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_t8_an_import_of_pairs(program, tmp_path, how):
    image, text = zeros(tmp_path / "image.npy", 400_000, 512), zeros(tmp_path / "text.npy", 400_000, 512)
    child = begun(program, "import", "cosir", "--image-features", image, "--text-features", text, "--out",
                  tmp_path / "set", "--quiet")
    wait_for(lambda: list(tmp_path.glob("set.*")), child)
    with ends_in_time(child):
        child.send_signal(how)
    assert child.returncode == 1 and "import cancelled" in child.told[1]
    assert not list(tmp_path.glob("set*"))


def test_t8_an_import_of_traffic(program, tmp_path):
    line = "1.0,123,00,0\n"
    with open(tmp_path / "bus.csv", "w", encoding="utf-8") as file:
        file.write("timestamp,arbitration_id,data_field,attack\n" + line * 4_000_000)
    child = begun(program, "import", "can", tmp_path / "bus.csv", "--out", tmp_path / "set", "--quiet")
    wait_for(lambda: list(tmp_path.glob("set*")), child)
    with ends_in_time(child):
        child.send_signal(signal.SIGINT)
    assert child.returncode == 1 and "import cancelled" in child.told[1]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_t8_tokenizing(tmp_path, how):
    """It goes on where it was: what is made after a stop has the bytes of an import that nobody stopped."""
    pytest.importorskip("plimsoll")
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    folder = chats.make_tokenizer(tmp_path / "tokenizer")
    numbers = random.Random(3)
    part = "".join(json.dumps({"messages": chats.chat(numbers)}) + "\n" for _ in range(500))
    (tmp_path / "rows.jsonl").write_text(part * 16)
    words = [sys.executable, "-c", "import sys, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
             "from plimsoll.cli import _program; sys.exit(_program.main())", "import", "chat",
             str(tmp_path / "rows.jsonl"), "--tokenizer", str(folder), "--quiet", "--out"]
    child = subprocess.Popen([*words, str(tmp_path / "set")], text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
    wait_for(lambda: any(path.stat().st_size > 0 for path in tmp_path.glob("set*")), child)
    with ends_in_time(child):
        child.send_signal(how)
    assert child.returncode == (1 if how == signal.SIGINT else -how), child.told[1]
    assert not (tmp_path / "set").exists()
    if how == signal.SIGTERM:
        return
    assert "stopped; the same command goes on" in child.told[1]
    for out in ("set", "undisturbed"):
        subprocess.run([*words, str(tmp_path / out)], check=True, capture_output=True)
    assert (tmp_path / "set").read_bytes() == (tmp_path / "undisturbed").read_bytes()


@pytest.mark.parametrize("phase", ["checksum", "lines"])
def test_t8_reading_chats_that_have_none(tmp_path, phase):
    """Ctrl-C comes through while files are read without Python's lock: of a large one its checksum first, and then
    lines of which none is a chat."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    folder = chats.make_tokenizer(tmp_path / "tokenizer")
    rows = tmp_path / "rows.jsonl"
    if phase == "checksum":
        with open(rows, "wb") as file:
            file.truncate(64 << 30)  # Zeros that take no disk.
    else:
        rows = tmp_path / "rows.jsonl.gz"
        rows.write_bytes(gzip.compress(b"\n" * (64 << 20), 9) * 400)  # 25 GiB.
    code = ("import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from plimsoll.cli import _program\nprint('imports', flush=True)\nsys.exit(_program.main())")
    child = begun(sys.executable, "-c", code, "import", "chat", rows, "--tokenizer", folder, "--quiet", "--out",
                  tmp_path / "set")
    assert child.stdout.readline() == "imports\n"
    wait_for(lambda: (phase == "checksum" or list(tmp_path.glob("set*"))) and has_open(child, rows), child)
    time.sleep(0.3)
    with ends_in_time(child):
        child.send_signal(signal.SIGINT)
    assert child.returncode == 1 and "stopped; the same command goes on" in child.told[1]


def test_t8_a_ctrl_c_while_numpy_loads_is_not_lost():
    """NumPy's compiled modules swallow it."""
    code = ("import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "sys.addaudithook(lambda event, of: event == 'import' and of[0] == 'numpy.random._generator' and os.kill(os.getpid(), signal.SIGINT))\n"
            "from plimsoll.core import _torch_gate\n"
            "try:\n    _torch_gate.load()\nexcept KeyboardInterrupt:\n    print('asked', 'numpy.random' in sys.modules, 'torch' in sys.modules)\n")
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120, check=False)
    assert done.stdout == "asked True False\n", done.stderr


def test_t8_planning_of_pairs(trains, program, small_data, tmp_path):
    child = begun(program, "train", "cosir", "--data", small_data, "--memory-limit", "2GiB", "--out", tmp_path / "run",
                  "--batch-size", "auto")
    wait_for((tmp_path / "run" / "run.toml").exists, child)
    with ends_in_time(child):
        child.send_signal(signal.SIGINT)
    assert child.returncode == 1 and "train was given up, as asked" in child.told[1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, "stop"])
def test_t8_planning_of_traffic(trains, call, program, traffic, tmp_path, how):
    run = tmp_path / "run"
    child = begun(program, "train", "can-kd", "--data", traffic, "--out", run, "--memory-limit", "1GiB",
                  "--batch-size", "auto")
    wait_for((run / "run.toml").exists, child)
    time.sleep(0.3)
    with ends_in_time(child):
        if how == "stop":
            assert call("stop", run).status == 0
        else:
            child.send_signal(how)
    assert child.returncode == (0 if how == "stop" else -how), child.told[1]
    assert how != "stop" or told_of(run)["status"] == "stopped"
    assert not (run / "checkpoints" / "manifest.json").exists()  # Nothing is committed, and a resumption begins anew.


@pytest.fixture(scope="module")
def many_pairs(run_program, tmp_path_factory):
    """20,000 pairs, of which half are held out: looking for each among them takes many seconds."""
    folder = tmp_path_factory.mktemp("data") / "many"
    run_program("synth", "cosir", "--rows", 20_000, "--image-dim", 64, "--text-dim", 64, "--out", folder)
    return folder


def evaluating(program, data, run, *more):
    return begun(program, "train", "cosir", "--data", data, "--out", run, "--memory-limit", "2GiB", "--batch-size",
                 "2000", "--epochs", "3", "--set", "holdout=10000", "--json", "--quiet", *more)


def test_t8_evaluating_before_the_first_step(trains, program, many_pairs, tmp_path):
    run = tmp_path / "run"
    child = evaluating(program, many_pairs, run, "--set", "eval_pairs=10000")
    wait_for(lambda: told_of(run).get("status") == "evaluating", child)
    time.sleep(0.2)
    with ends_in_time(child):
        child.send_signal(signal.SIGINT)
    assert child.returncode == 1 and "train was given up, as asked" in child.told[1], child.told
    assert not run.exists()


@pytest.mark.parametrize(("how", "epochs", "every"), [
    ("stop", "2", "1"), pytest.param(signal.SIGINT, "1", "0", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_t8_evaluating_later(trains, call, program, many_pairs, tmp_path, how, epochs, every):
    """After an epoch, and at the end: what was trained is committed, and the run goes on to the same figures."""
    run, more = tmp_path / "run", ["--set", "eval_pairs=10000", "--set", f"eval_every_n_epochs={every}",
                                   "--epochs", epochs]
    child = evaluating(program, many_pairs, run, *more)
    wait_for(lambda: told_of(run).get("status") == "evaluating" and told_of(run).get("step", 0) > 0, child)
    with ends_in_time(child):
        if how == "stop":
            (run / ".stop").touch()  # What `plimsoll stop` does, which may take longer than an evaluation.
        else:
            child.send_signal(how)
    assert child.returncode == 0, child.told[1]
    summary = json.loads(child.told[0].splitlines()[-1])
    assert (summary["status"], summary["stop_reason"]) == ("stopped", ".stop" if how == "stop" else "SIGINT")
    assert told_of(run)["step"] == summary["step"] == 5
    resumed = call("resume", run, "--json", "--quiet")
    assert resumed.status == 0, resumed.err
    whole = evaluating(program, many_pairs, tmp_path / "whole", *more)
    last = json.loads(whole.communicate(timeout=120)[0].splitlines()[-1])
    again = json.loads(resumed.out.splitlines()[-1])
    assert again["status"] == last["status"] == "finished"
    assert (again["state_sha256"], again["recall"]) == (last["state_sha256"], last["recall"])


@pytest.mark.slow
def test_t8_validating(trains, call, program, tmp_path):
    """Of graphs, between two epochs: it ends there, and goes on to the same bits."""
    from tests.support.can_traffic import write_traffic

    write_traffic(tmp_path / "train_01_a.csv", 5, 4001, 100)
    data = tmp_path / "set"
    made = call("import", "can", tmp_path / "train_01_a.csv", "--out", data, "--window", 20, "--stride", 1,
                "--validation", 0.95)
    assert made.status == 0, made.err
    words = ["--data", data, "--memory-limit", "1GiB", *SMALL, "--stage", "normal", "--model-size", "teacher",
             "--max-epochs", "3", "--scoring-chunk", "16"]

    def last(done):
        assert done.status == 0, done.err
        return json.loads(done.out.splitlines()[-1])

    whole = last(call("train", "can-kd", "--out", tmp_path / "whole", *words))
    run, stops, dice = tmp_path / "run", 0, random.Random(1)
    command = ["train", "can-kd", "--out", run, *words]
    for _ in range(6):
        child = begun(program, *command)
        wait_for(lambda: told_of(run).get("pid") == child.pid and told_of(run).get("step", 0) > 0, child)
        time.sleep(dice.uniform(0.1, 0.8))
        if child.poll() is None:
            with ends_in_time(child):
                child.send_signal(signal.SIGTERM)
            # Nothing is told of a run that was still being opened, and given up.
            stops += child.returncode == 0 and json.loads(child.told[0].splitlines()[-1])["status"] == "stopped"
        else:
            child.communicate()
        command = ["resume", run, "--quiet", "--json"]
    done = last(call(*command))
    assert stops >= 1
    assert (done["status"], done["state_sha256"]) == ("finished", whole["state_sha256"])


SLOW_COMMIT = """
import os, signal, sys, time
import torch
import plimsoll

class Slow:
    def state_dict(self):
        if run.steps_made == 2 and WAITS:
            print("commits", flush=True)
            while not os.path.exists(sys.argv[1] + ".asked"):
                time.sleep(0.01)
        return {"a": 1}
    def load_state_dict(self, state):
        pass

with plimsoll.Run(sys.argv[1], memory_limit="4GiB") as run:
    run.track(slow=Slow())
    for batch in run.steps([torch.ones(2)] * STEPS, epochs=1, commit_every_steps=EVERY, progress=False):
        time.sleep(SLOW)
print(run.stopped, run.steps_made)
"""


def slow_commit(waits=True, step_s=0.05, every=2):
    """waits: in the commit of step 2, for the file RUN.asked."""
    return SLOW_COMMIT.replace("WAITS", str(waits)).replace("STEPS", "6000").replace("SLOW", str(step_s)).replace("EVERY", str(every))


@pytest.mark.parametrize("how", [signal.SIGTERM, "stop"])
def test_t8_committing(call, tmp_path, how):
    pytest.importorskip("torch")
    run = tmp_path / "run"
    child = begun(sys.executable, "-c", slow_commit(), run)
    assert child.stdout.readline() == "commits\n"
    with ends_in_time(child):
        if how == "stop":
            assert call("stop", run).status == 0
        else:
            child.send_signal(how)
        (tmp_path / "run.asked").touch()
    assert child.returncode == 0, child.told[1]
    why, steps = child.told[0].split()
    assert why == (".stop" if how == "stop" else "SIGTERM") and int(steps) == 3  # The step that was next.
    assert told_of(run)["status"] == "stopped"
    assert json.loads((run / "checkpoints" / "manifest.json").read_text())["step"] == 3


def paused_cosir(program, small_data, run):
    return start(program, small_data, run)


def paused_loop(program, small_data, run):
    pytest.importorskip("torch")
    return begun(sys.executable, "-c", slow_commit(waits=False, every=1000), run)


@pytest.mark.parametrize(("begin", "how"), [(paused_cosir, "stop"), (paused_cosir, signal.SIGINT),
                                            (paused_loop, "stop"), (paused_loop, signal.SIGTERM)])
def test_t8_while_paused(trains, call, program, small_data, tmp_path, begin, how):
    run = tmp_path / "run"
    child = begin(program, small_data, run)
    wait_for(lambda: told_of(run).get("step", 0) >= 2, child)
    assert call("pause", run).status == 0
    wait_for(lambda: told_of(run).get("status") == "paused", child)
    with ends_in_time(child):
        if how == "stop":
            assert call("stop", run).status == 0
        else:
            child.send_signal(how)
    assert child.returncode == 0, child.told[1]
    assert told_of(run)["status"] == "stopped"


@pytest.mark.parametrize("begin", [paused_cosir, paused_loop])
def test_t8_an_early_continue_does_not_cancel_the_next_pause(trains, call, program, small_data, tmp_path, begin):
    run = tmp_path / "run"
    child = begin(program, small_data, run)
    wait_for(lambda: told_of(run).get("step", 0) >= 2, child)
    for _ in range(3):
        assert call("continue", run).status == 0
    assert call("pause", run).status == 0
    wait_for(lambda: told_of(run).get("status") == "paused", child)
    step = told_of(run)["step"]
    time.sleep(1)
    assert told_of(run)["status"] == "paused" and told_of(run)["step"] == step
    with ends_in_time(child):
        assert call("stop", run).status == 0
    assert not (run / ".pause").exists() or child.returncode == 0


def test_t8_a_pause_that_was_left_does_not_hold_the_next_life(call, tmp_path):
    """Killed while it was paused, a run goes on when it is started again."""
    pytest.importorskip("torch")
    run = tmp_path / "run"
    child = paused_loop(None, None, run)
    wait_for(lambda: told_of(run).get("step", 0) >= 2, child)
    assert call("pause", run).status == 0
    wait_for(lambda: told_of(run).get("status") == "paused", child)
    child.kill()
    child.communicate()
    again = begun(sys.executable, "-c", slow_commit(waits=False, step_s=0, every=1000), run)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0 and out.split()[-1] == "6000", err


def test_t8_ctrl_c_in_python_while_a_recipe_plans_and_evaluates(trains, program, small_data, tmp_path):
    """plimsoll.plan() and evaluate() run without Python's lock: KeyboardInterrupt comes all the same, and at once."""
    pytest.importorskip("plimsoll._torch")
    code = ("import signal, sys, threading, time, os; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "import plimsoll\n"
            "threading.Timer(0.5, lambda: (print(time.monotonic(), flush=True), os.kill(os.getpid(), signal.SIGINT))).start()\n"
            "try:\n"
            "    while True: plimsoll.plan('cosir', data=sys.argv[1], memory_limit='2GiB')\n"
            "except KeyboardInterrupt:\n"
            "    print(time.monotonic())\n")
    done = subprocess.run([sys.executable, "-c", code, str(small_data)], text=True, capture_output=True, timeout=120,
                          cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "2"})
    asked, ended = map(float, done.stdout.split())
    assert ended - asked <= LATENCY * BUSY, done.stderr


def test_t8_between_two_starts_of_a_command(program, tmp_path):
    """`plimsoll run --restarts` waits up to a minute before it starts a command again."""
    child = begun(program, "run", "--restarts", 9, "--", "sh", "-c", "exit 1")
    for line in child.stderr:
        if "started again in 2 s" in line:
            break
    with ends_in_time(child):
        child.send_signal(signal.SIGTERM)
    assert child.returncode == -signal.SIGTERM
