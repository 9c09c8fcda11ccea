# SPDX-License-Identifier: Apache-2.0
"""Recipes that are ended in the middle of a step, for tests of what they go on to."""
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = """
import importlib, os, signal, sys
import plimsoll
for name in sys.argv[4:]:
    importlib.import_module(name)
log, at = plimsoll.Run.log, int(sys.argv[1])
def kill(self, **values):
    if self.steps_made == at:
        self._life.end_writing()  # What was due is there.
        os.kill(os.getpid(), signal.SIGKILL)
    log(self, **values)
plimsoll.Run.log = kill
plimsoll.train(sys.argv[2], **eval(sys.argv[3]))
"""


def killed(recipe, at, *, modules=(), **options):
    """Trains in a process that ends itself with kill -9 in a step. modules: what it imports before."""
    given = {name: str(value) if isinstance(value, pathlib.Path) else value for name, value in options.items()}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(at), recipe, repr(given), *modules], capture_output=True, text=True,
                          cwd=ROOT, timeout=300)
    assert done.returncode == -9, done.stderr
