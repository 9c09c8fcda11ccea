# SPDX-License-Identifier: Apache-2.0
"""What one of several ranks is disturbed in, all of them hear: the scenarios of tests/support/rank_agreement.py."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"}


def seen_in(folder, name):
    (folder / name).mkdir()
    done = subprocess.run([sys.executable, "-m", "tests.support.rank_agreement", folder, name], cwd=ROOT, text=True,
                          env=ENVIRONMENT, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])[name]


def test_a_step_that_is_committed_again_is_never_without_its_checkpoint(tmp_path):
    """Each rank in turn is killed before and after it writes, or its disk is full; so is one of a finished run that is started again."""
    seen = seen_in(tmp_path, "moved")
    (undisturbed,) = seen.pop("undisturbed")
    assert [began for began, _ in undisturbed] == [0, 0]
    for name, (disturbed, ranks) in seen.items():
        assert disturbed, name
        assert [began for began, _ in ranks] == [6, 6], name
        assert [digest for _, digest in ranks] == [digest for _, digest in undisturbed], name
