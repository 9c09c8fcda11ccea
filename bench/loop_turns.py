# SPDX-License-Identifier: Apache-2.0
"""Loops in processes of their own that take turns, or run side by side on a core each, so that all see the same
machine: of benchmarks that compare a loop with the same loop and something beside it.

In the loop's process Turns counts steps; in the benchmark's each Loop is such a process.
"""
import json
import math
import os
import statistics
import subprocess
import sys
import time

# One-sided 95 % quantiles of Student's t, by degrees of freedom.
T95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 7: 1.895, 9: 1.833, 11: 1.796, 15: 1.753, 19: 1.729,
       29: 1.699}


class Turns:
    """Counts steps, and waits for the next turn where one has ended."""

    def __init__(self, steps: int) -> None:
        """steps: of a turn."""
        self._steps, self._seconds = steps, []
        print("[]", flush=True)  # It could begin.
        sys.stdin.readline()
        self._last = time.perf_counter()

    def made(self) -> None:
        now = time.perf_counter()
        self._seconds.append(now - self._last)
        if len(self._seconds) == self._steps:
            print(json.dumps(self._seconds), flush=True)
            self._seconds.clear()
            sys.stdin.readline()
            now = time.perf_counter()
        self._last = now


class Loop:
    """A process that makes a turn of steps when it is asked to, and whose last line is JSON."""

    def __init__(self, *command, core: int | None = None) -> None:
        """core: on which it stays; None: on any."""
        self._command = [str(word) for word in command]
        self._process = subprocess.Popen([sys.executable, *self._command], text=True, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE)
        if core is not None:
            os.sched_setaffinity(self._process.pid, {core})  # Before it has threads.
        self._told()

    def _told(self):
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(self._command)}: status {self._process.wait()}")
        return json.loads(line)

    def begin(self) -> None:
        """Lets it make a turn."""
        print(file=self._process.stdin, flush=True)

    def seconds(self) -> list[float]:
        """Of each step of that turn, when it is over."""
        return self._told()

    def turn(self) -> list[float]:
        """Both."""
        self.begin()
        return self.seconds()

    def end(self):
        """Its last line."""
        self.begin()
        last = self._told()
        if self._process.wait():
            sys.exit(f"{' '.join(self._command)}: status {self._process.returncode}")
        return last


def ratio_and_bound(logs: list[float]) -> tuple[float, float]:
    """The mean ratio, and its upper bound of 95 % (Student's t), by logarithms of ratios, a pair of processes each."""
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.mean(logs)
    return math.exp(mean), math.exp(mean + T95[len(logs) - 1] * error)
