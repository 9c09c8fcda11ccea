# SPDX-License-Identifier: Apache-2.0
"""Tests on the simulated device (tests/device), which torch has until its process ends: a pytest of their own runs them."""
import pathlib
import subprocess
import sys

import pytest

from plimsoll.core import _torch_gate

ROOT = pathlib.Path(__file__).resolve().parents[2]


def skip_without_torch():
    """Skips the whole file where there is no torch, or plimsoll was built without it."""
    pytest.importorskip("torch")
    if _torch_gate.load_if_torch_imported() is None:
        pytest.skip("plimsoll was built without torch", allow_module_level=True)


def run_checks(*names, which="not slow", seconds=500):
    """Runs tests/device/check_NAME.py for each of the names, those tests that `which` takes of pytest's marks. Fails with their report,
    or where they take longer than `seconds`."""
    files = [f"tests/device/check_{name}.py" for name in names]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", which, *files], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds)
    assert done.returncode == 0, done.stdout[-20_000:]
