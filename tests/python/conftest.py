# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the tests of the Python package. PYTHONPATH says which build (build/dev/python)."""
import importlib.util

import pytest

if importlib.util.find_spec("plimsoll") is None:
    pytest.skip("the Python modules are not built: run make dev", allow_module_level=True)


@pytest.fixture
def governor():
    """A governor of 2 GiB that ends with the test."""
    import plimsoll

    with plimsoll.Governor("2GiB") as one:
        yield one


@pytest.fixture
def table(governor, tmp_path):
    """1,000 dense rows of 8 floats, AdamW."""
    import plimsoll

    return plimsoll.EmbeddingStore.open(governor, tmp_path / "table", rows=1000, dim=8,
                                        init=plimsoll.Normal(std=0.5, seed=3), store="8MiB")
