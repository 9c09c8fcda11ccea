# SPDX-License-Identifier: Apache-2.0
"""`plimsoll queue` as tests call it."""
import contextlib
import json
import os
import subprocess
import sys
import time


class Queue:
    """A queue of the program under test."""

    def __init__(self, program, folder):
        self.program, self.folder = os.path.abspath(program), folder

    def call(self, command, *words, status=0, **options):
        done = subprocess.run([self.program, "queue", command, self.folder, *map(str, words)], text=True,
                              capture_output=True, timeout=120, **options)
        assert done.returncode == status, (done.returncode, done.stderr)
        return done

    def add(self, script, *words, **options) -> int:
        """A job of a Python script."""
        done = self.call("add", "--memory-limit", "1GiB", "--json", *words, "--", sys.executable, "-c", script,
                         **options)
        return json.loads(done.stdout)["id"]

    def run(self, *words, status=0):
        return json.loads(self.call("run", "--json", *words, status=status).stdout.splitlines()[-1])

    def start(self, *words) -> subprocess.Popen:
        return subprocess.Popen([self.program, "queue", "run", self.folder, *map(str, words)], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def jobs(self) -> dict[int, dict]:
        return {job["id"]: job for job in json.loads(self.call("list", "--json").stdout)["jobs"]}

    def until(self, there, seconds=150):
        deadline = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < deadline, self.call("list").stdout
            time.sleep(0.02)


@contextlib.contextmanager
def running(runner):
    try:
        yield runner
    finally:
        runner.kill()
        print("the runner said:", *runner.communicate(), file=sys.stderr)
