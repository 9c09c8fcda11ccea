# SPDX-License-Identifier: Apache-2.0
"""Fixtures every Python test shares: the program under test, and small data made once."""
import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def program_path() -> pathlib.Path | None:
    candidates = [os.environ.get("PLIMSOLL_PROGRAM"), ROOT / "build/dev/bin/plimsoll",
                  ROOT / "build/release/bin/plimsoll"]
    return next((pathlib.Path(path) for path in candidates if path and pathlib.Path(path).exists()),
                None)


@pytest.fixture(scope="session")
def program() -> pathlib.Path:
    path = program_path()
    if path is None:
        pytest.skip("the program is not built: run make build")
    return path


@pytest.fixture(scope="session")
def run_program(program):
    """run_program(*arguments) → the last line of standard output, parsed. Fails on status ≠ 0."""
    def run(*arguments, **options) -> dict:
        done = subprocess.run([program, *map(str, arguments)], text=True, capture_output=True,
                              timeout=600, check=False, **options)
        assert done.returncode == 0, f"{arguments}: status {done.returncode}\n{done.stderr[-3000:]}"
        lines = done.stdout.strip().splitlines()
        return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    return run


@pytest.fixture(scope="session")
def small_data(run_program, tmp_path_factory) -> pathlib.Path:
    """6,000 synthetic pairs: 23 batches of 256."""
    folder = tmp_path_factory.mktemp("data") / "small"
    run_program("synth", "cosir", "--rows", 6000, "--out", folder)
    return folder
