# SPDX-License-Identifier: Apache-2.0
"""Threads of a run do not spin for milliseconds, unless the user says so."""
import os
import pathlib
import subprocess
import time


def started_with(program, data, out, **variables) -> dict[str, str]:
    """The environment that a run really has, read while it trains."""
    environment = {key: value for key, value in os.environ.items()
                   if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | variables
    run = subprocess.Popen([program, "train", "cosir", "--data", data, "--out", out, "--epochs",
                            "50", "--memory-limit", "512MiB", "--set", "holdout=0"],
                           env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not (out / "status.json").exists() and time.monotonic() < end:
            assert run.poll() is None, "the run ended before it wrote its status"
            time.sleep(0.02)
        text = pathlib.Path(f"/proc/{run.pid}/environ").read_bytes().decode()
        return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
    finally:
        run.kill()
        run.wait()


def test_a_run_waits_briefly_for_its_threads(program, small_data, tmp_path):
    assert started_with(program, small_data, tmp_path / "run")["GOMP_SPINCOUNT"] == "1000"


def test_what_the_user_says_about_waiting_is_kept(program, small_data, tmp_path):
    mine = started_with(program, small_data, tmp_path / "a", GOMP_SPINCOUNT="77")
    assert mine["GOMP_SPINCOUNT"] == "77"
    policy = started_with(program, small_data, tmp_path / "b", OMP_WAIT_POLICY="active")
    assert "GOMP_SPINCOUNT" not in policy
