# SPDX-License-Identifier: Apache-2.0
"""bench/w0_compat at smoke size: its answer is right and its last line is what bench/run expects."""
import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")
RUN = pathlib.Path(__file__).resolve().parents[2] / "bench" / "w0_compat" / "run.py"


def test_the_replay_gives_the_right_answer(tmp_path):
    done = subprocess.run([sys.executable, RUN, "--smoke", "--directory", str(tmp_path)], text=True,
                          capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["name"] == "w0_compat" and result["commits"] == 4 and result["hit_rate"] == 1.0
    assert set(result["peers"]) == {f"original_{name}_ms" for name in ("before", "after", "quick")}
