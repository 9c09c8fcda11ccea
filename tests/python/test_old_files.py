# SPDX-License-Identifier: Apache-2.0
"""Tables and feature stores that earlier versions wrote: opened, trained on, and verified.

tests/old_files/README.md says which version wrote which.
"""
import pathlib
import shutil
import sys

import numpy as np
import pytest

import plimsoll

OLD = pathlib.Path(__file__).resolve().parents[1] / "old_files"
sys.path.insert(0, str(OLD))
import make

VERSIONS = sorted(path.parent.name for path in OLD.glob("*/expected.npz"))


def copied(version: str, name: str, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(OLD / version / name, tmp_path / name))


def expect(table, expected, when: str) -> None:
    for key, value in make.content(table).items():
        assert np.array_equal(value, expected[f"{when}.{key}"]), (when, key)


def test_there_are_files_of_an_earlier_version():
    assert VERSIONS == ["3209e20", "f4e8a06"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", make.TABLES)
def test_a_table_opens_and_goes_on_with_the_same_bits(governor, tmp_path, version, name):
    expected = np.load(OLD / version / "expected.npz")
    path = copied(version, f"table-{name}", tmp_path)
    with make.open_table(governor, path) as table:
        assert table.last_commit == 4
        expect(table, expected, f"{name}.before")
        make.train(table, expected[f"{name}.ids"], 5)
        expect(table, expected, f"{name}.after")
        table.verify()
    with make.open_table(governor, path, at_step=4) as table:
        expect(table, expected, f"{name}.before")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_a_feature_store_opens(governor, tmp_path, version, compression):
    expected = np.load(OLD / version / "expected.npz")
    path = copied(version, f"features-{compression}", tmp_path)
    with plimsoll.FeatureStore.open(governor, path) as store:
        store.verify()
        batch = store.read(expected["features.ids"])
        assert np.array_equal(batch["x"], expected["features.x"]) and np.array_equal(batch["y"], expected["features.y"])
        assert np.array_equal(store.ids(), expected["features.ids"])
        assert store.info()["groups"] == 6


@pytest.mark.parametrize("version", [one for one in VERSIONS if one != "3209e20"])  # Which knew no ragged columns.
def test_a_ragged_feature_store_opens_and_grows(governor, tmp_path, version):
    """f4e8a06 left gaps elsewhere than they are left today."""
    path = copied(version, "features-ragged", tmp_path)
    kinds = [make.ragged_records(), make.ragged_records(100)]
    with plimsoll.FeatureWriter.extend(governor, path) as writer:
        writer.append(*kinds[1])
    with plimsoll.FeatureStore.open(governor, path) as store:
        store.verify()
        for ids, columns in kinds:
            order = np.random.default_rng(3).permutation(len(ids))
            batch = store.read(ids[order])
            for name, records in columns.items():
                elements, offsets = batch[name], batch.offsets[name]
                for place, k in enumerate(order):
                    assert np.array_equal(elements[offsets[place]:offsets[place + 1]], records[k]), (name, k)
