# SPDX-License-Identifier: Apache-2.0
"""What tests of several libraries' Trainers ask of a run; the programs are in trainer_programs.py."""
import os
import pathlib
import sys
import threading
import time

import plimsoll
from tests.support.cgroup import MemoryCgroup

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
