# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the tests of the Python package. PYTHONPATH says which build (build/dev/python)."""
import importlib.util
import os
import sys

import pytest

# Before torch multiplies: a run that this process goes on with was begun in a process of its own, which a Run had fixed
# MKL's kernels of, and on some processors they are others.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

# Without the modules (run make dev) only the tests of the program are left in this folder.
if importlib.util.find_spec("plimsoll") is None:
    collect_ignore = [f"test_{name}.py" for name in (
        "benches", "compat_features", "compat_issues", "compat_manager", "compat_parts", "data",
        "dataset", "device_checks", "device_limit", "device_recipes", "device_run", "device_script", "device_steps", "embedding", "features", "import_saved_graphs", "import_saved_rows",
        "kernels_contrast", "kernels_device", "kernels_graphs", "kernels_layers", "memory", "old_files",
        "plan", "program", "readme", "row_optimizers", "run", "run_embedding", "run_lives",
        "run_loader", "step", "stubs", "torch", "watch", "without_torch", "wheel")]


@pytest.fixture
def governor():
    """A governor that ends with the test. A process of many tests grows by what each is the first to import."""
    import plimsoll

    with plimsoll.Governor("3GiB", foreign_bytes="512MiB") as one:
        yield one


@pytest.fixture
def table(governor, tmp_path):
    """1,000 dense rows of 8 floats, AdamW."""
    import plimsoll

    return plimsoll.EmbeddingStore.open(governor, tmp_path / "table", rows=1000, dim=8,
                                        init=plimsoll.Normal(std=0.5, seed=3), store_bytes="8MiB")


@pytest.fixture
def rows(tmp_path):
    """500 rows as .npy with ids beside them; returns (file, ids, values)."""
    import numpy as np

    rng = np.random.default_rng(7)
    ids = rng.permutation(10_000)[:500].astype(np.int64)
    values = rng.normal(size=(500, 6)).astype(np.float32)
    np.save(tmp_path / "rows.npy", values)
    np.save(tmp_path / "rows.ids.npy", ids)
    return tmp_path / "rows.npy", ids, values


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_the_module_before():
    """Its models and trainers hold memory in reference cycles; they would go in the middle of a test that counts bytes."""
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def _determinism_is_left_as_it_was():
    """A later test of another file asks for it: whoever leaves it on is told, and not that one."""
    def on():
        return "torch" in sys.modules and sys.modules["torch"].are_deterministic_algorithms_enabled()
    before = on()
    yield
    if on() and not before:
        sys.modules["torch"].use_deterministic_algorithms(False)
        pytest.fail("torch's deterministic algorithms are on after this test, and were not before it")
