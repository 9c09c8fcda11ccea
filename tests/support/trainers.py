# SPDX-License-Identifier: Apache-2.0
"""What tests of several libraries' Trainers ask of a run; the programs are in trainer_programs.py."""
import gc
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import time

import torch

import plimsoll
from plimsoll.core import _torch_gate
from plimsoll.run._run_outer import OuterLoop
from tests.support.cgroup import MemoryCgroup
from tests.support.trainer_programs import Lines

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "support" / "trainer_programs.py"
STEPS = 12  # 46 lines, four a batch, two batches a step: six steps an epoch, of two.


def environment():
    """For a program of PROGRAMS."""
    return {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"}


class Pause:
    """Called, it asks the run for a pause and a limit of 3 GiB; a thread looks, and has it go on."""

    def __init__(self, path):
        self.path, self.seen = path, []

    def __call__(self):
        plimsoll.pause(self.path)
        plimsoll.limit(self.path, "3GiB")
        threading.Thread(target=self._look).start()

    def _look(self):
        for _ in range(1000):
            status = plimsoll.status(self.path)
            if status["status"] == "paused":
                self.seen.append((status["checkpoint_step"], status["limit_bytes"]))
                if status["limit_bytes"] == 3 << 30:
                    break
            time.sleep(0.01)
        plimsoll.continue_run(self.path)


def assert_limit_held(kind, path):
    """A program of `kind`, with two workers, inside a cgroup of its limit."""
    MemoryCgroup.needed()
    limit = 1 << 30
    with MemoryCgroup(limit) as group:
        done = group.run([sys.executable, PROGRAMS, path, kind, "2", "1GiB"], env=environment())
    assert done.returncode == 0 and done.oom_kills == 0, done.stderr
    assert done.tree_peak_bytes <= limit


def refused_once(monkeypatch, stride, first):
    """Each part of a step is refused one allocation of its own, once: the first, then a later one each time.

    Gives the list of parts that were refused, one more entry for each.
    """
    extension, real, refused, fault = _torch_gate.load(), OuterLoop.again, [], [first]
    gc.collect()
    gc.freeze()  # A refusal collects garbage, and need not look through the modules of libraries.

    def again(self, *arguments, **options):
        before = extension.arena_stats()["refusals"]
        extension.refuse(fault[0], 1)
        try:
            return real(self, *arguments, **options)
        finally:
            extension.refuse(0, 0)
            if extension.arena_stats()["refusals"] > before:
                refused.append(fault[0])
                fault[0] += stride
            else:
                fault[0] = 1

    monkeypatch.setattr(OuterLoop, "again", again)
    return refused


class Grows:
    """Before the forward of a step's first batch, memory is taken for it: `size` bytes, from step `step` on.

    meanwhile: called before the n-th time; what it gives is held until the next.
    """

    def __init__(self, module, size, step, meanwhile=lambda n: None):
        self.batch, self.first, self.size, self.meanwhile, self.times = 0, 2 * step - 1, size, meanwhile, 0
        self.held = None
        module.register_forward_pre_hook(self)

    def __call__(self, *_):
        if not torch.is_grad_enabled():
            return
        self.batch += 1
        if self.batch >= self.first:
            self.times += 1
            self.held = self.meanwhile(self.times)
            torch.empty(self.size, dtype=torch.uint8)


def all_that_is_left(n):
    """For Grows: taken the first time, and given back before the second."""
    governor = plimsoll.Governor.current()
    return governor.reserve(governor.ledger().free_bytes) if n == 1 else None


class Ends(Lines):
    """Whose item ends the wait for it: "memory" as the watcher does, "signal" as one that reaches a worker too."""

    def __init__(self, at, how):
        super().__init__(46)
        self.at, self.how = at, how
        self.given = multiprocessing.Value("q", 0)  # Of all epochs, each of which has workers of its own.

    def __getitem__(self, index):
        self.given.value += 1
        if self.given.value == self.at and self.how == "memory":
            raise plimsoll.MemoryPressure("memory is short")
        if self.given.value == self.at:
            time.sleep(1.5)  # The loop waits for this item by now.
            os.kill(os.getppid(), signal.SIGTERM)
            raise RuntimeError("the worker ended")
        return super().__getitem__(index)


def events(path, name):
    lines = (pathlib.Path(path) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]
