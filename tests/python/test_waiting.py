# SPDX-License-Identifier: Apache-2.0
"""Threads of a run do not spin for milliseconds, unless the user says so."""
import os
import re
import subprocess

import pytest

pytest.importorskip("torch")


def told(program, small_data, tmp_path, **variables) -> str:
    """What libgomp says of its settings as torch loads it, for a plan of a recipe."""
    environment = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | variables
    done = subprocess.run([program, "train", "cosir", "--data", small_data / "nowhere", "--out", tmp_path / "run"], text=True, capture_output=True,
                          env={**environment, "OMP_DISPLAY_ENV": "verbose"}, timeout=120, check=False)
    found = re.search(r"GOMP_SPINCOUNT = '(\d+|INFINITE)'", done.stderr)
    if found is None:
        pytest.skip("torch's OpenMP is another than libgomp")
    return found[1]


def test_a_run_waits_briefly_for_its_threads(program, small_data, tmp_path):
    assert told(program, small_data, tmp_path) == "1000"


def test_what_the_user_says_about_waiting_is_kept(program, small_data, tmp_path):
    assert told(program, small_data, tmp_path, GOMP_SPINCOUNT="77") == "77"
    assert told(program, small_data, tmp_path, OMP_WAIT_POLICY="active") != "1000"
