# SPDX-License-Identifier: Apache-2.0
"""`import plimsoll` never needs torch, and never imports it."""
import subprocess
import sys

WITHOUT = "import sys; sys.modules['torch'] = None\n"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120,
                          check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_does_not_import_torch():
    run_python("import sys, plimsoll; assert 'torch' not in sys.modules")


def test_rows_and_features_work_without_torch(tmp_path):
    run_python(WITHOUT + f"""
import numpy as np, plimsoll
with plimsoll.Governor("1GiB") as governor:
    assert not governor.arena_attached
    table = plimsoll.EmbeddingStore.open(governor, {str(tmp_path / "t")!r}, rows=9, dim=2)
    rows = table.gather([1, 2])
    table.apply(rows.ids, np.ones((2, 2), np.float32))
    table.commit(1)
    plimsoll.import_dataset([1.0, 2.0], {str(tmp_path / "f")!r}, governor=governor)
    batch = plimsoll.FeatureStore.open(governor, {str(tmp_path / "f")!r}).read([1])
    assert batch["value"].tolist() == [2.0]
    for touch in (lambda: rows.tensor, lambda: batch.tensor("value"),
                  lambda: plimsoll.train("cosir", data="x", out="y")):
        try:
            touch()
        except ImportError as error:
            assert "torch" in str(error)
        else:
            raise SystemExit("no ImportError")
""")


def test_the_script_says_what_is_missing():
    code = WITHOUT + "import plimsoll.cli._program as p; raise SystemExit(p.main(['train', 'cosir']))"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60,
                          check=False)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "plimsoll: error:" in done.stderr
