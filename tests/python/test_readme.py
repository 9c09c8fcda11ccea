# SPDX-License-Identifier: Apache-2.0
"""The README's first Python block runs as written, offline, in seconds; and again."""
import pathlib
import re
import subprocess
import sys

import pytest

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"


def snippet() -> str:
    found = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found, "README.md has no Python block"
    return found.group(1)


def losses(folder: pathlib.Path) -> list[tuple[int, float]]:
    done = subprocess.run([sys.executable, "-c", snippet()], cwd=folder, text=True,
                          capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "rows" in done.stdout  # The ledger names who holds what.
    return [(int(step), float(loss))
            for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", done.stdout)]


def test_the_quick_start_runs_and_learns(tmp_path):
    pytest.importorskip("torch")
    first = losses(tmp_path)
    assert [step for step, _ in first] == [100, 200, 300]
    assert first[-1][1] < 0.75 * first[0][1]
    assert [step for step, _ in losses(tmp_path)] == [400, 500, 600]  # It goes on.
