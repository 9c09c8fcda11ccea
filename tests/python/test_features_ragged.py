# SPDX-License-Identifier: Apache-2.0
"""Ragged columns of a FeatureStore: records of any length, as arrays with offsets."""
import subprocess

import numpy as np
import pytest

import plimsoll

COLUMNS = {"tokens": ("int32", ()), "boxes": ("float32", (4,)), "label": ("int64", ())}
RAGGED = {"tokens": 3000, "boxes": 7}


def records(count, seed):
    random = np.random.default_rng(seed)
    return {"tokens": [random.integers(0, 9, random.integers(0, 3000)).astype(np.int32) for _ in range(count)],
            "boxes": [random.standard_normal((random.integers(0, 8), 4)).astype(np.float32) for _ in range(count)],
            "label": random.integers(-9, 9, count)}


@pytest.fixture
def samples(governor, tmp_path):
    """300 records under shuffled ids, in two parts, and what was written."""
    ids, data = np.random.default_rng(1).permutation(300) * 13 - 70, records(300, 2)
    with plimsoll.FeatureWriter(governor, tmp_path / "s", COLUMNS, ragged=RAGGED) as writer:
        for begin in range(0, 200, 70):
            part = slice(begin, min(200, begin + 70))
            writer.append(ids[part], {name: one[part] for name, one in data.items()})
    with plimsoll.FeatureWriter.extend(governor, tmp_path / "s") as writer:
        writer.append(ids[200:], {name: one[200:] for name, one in data.items()})
    return plimsoll.FeatureStore.open(governor, tmp_path / "s", cache_bytes="1MiB"), ids, data


def test_read_gives_flat_arrays_and_offsets(samples):
    store, ids, data = samples
    assert store.ragged == RAGGED and store.columns == COLUMNS
    picks = np.random.default_rng(3).integers(0, 300, 120)
    batch = store.read(ids[picks])
    assert list(batch) == list(COLUMNS) and set(batch.offsets) == set(RAGGED)
    assert np.array_equal(batch["label"], data["label"][picks])
    for name in RAGGED:
        wanted = [data[name][i] for i in picks]
        assert np.array_equal(batch[name], np.concatenate(wanted)) and batch[name].dtype == COLUMNS[name][0]
        offsets = batch.offsets[name]
        assert offsets.dtype == np.int64 and np.array_equal(np.diff(offsets), [len(one) for one in wanted])
        assert np.array_equal(store.lengths(ids[picks], name), np.diff(offsets))
    one = store.read(ids[picks], columns=["boxes"])
    assert list(one) == ["boxes"] and one["boxes"].shape[1:] == (4,)
    assert store.read([])["tokens"].shape == (0,)
    store.verify()


def test_what_was_read_can_be_written(samples, governor, program, tmp_path):
    store, ids, data = samples
    batch = store.read(ids)
    with plimsoll.FeatureWriter(governor, tmp_path / "again", COLUMNS, ragged=RAGGED) as writer:
        writer.append(ids, label=batch["label"], **{name: (batch[name], batch.offsets[name]) for name in RAGGED})
    with plimsoll.FeatureStore.open(governor, tmp_path / "again") as again:
        other = again.read(ids[::-1].copy())
        assert np.array_equal(other["tokens"], np.concatenate(data["tokens"][::-1]))
    subprocess.run([program, "store", "compact", tmp_path / "s"], check=True)
    joined, alone = plimsoll.info(tmp_path / "s"), plimsoll.info(tmp_path / "again")
    assert (joined["parts"], joined["fingerprint"]) == (1, alone["fingerprint"])
    assert joined["columns"][0] == {"name": "tokens", "dtype": "int32", "shape": [], "length_max": 3000}


def test_a_batch_is_leased_and_refused_where_it_does_not_fit(samples, governor):
    store, ids, _ = samples
    before = governor.ledger().leased_bytes
    batch = store.read(ids)
    assert governor.ledger().leased_bytes - before >= sum(one.nbytes for one in batch.values())
    del batch
    with governor.reserve(governor.ledger().free_bytes - (1 << 20)):
        with pytest.raises(plimsoll.BudgetExceeded):
            store.read(np.tile(ids, 50))
        store.read(ids[:5])


def test_tensors_become_a_nested_tensor(samples):
    torch = pytest.importorskip("torch")
    store, ids, data = samples
    batch = store.read(ids[:9])
    nested = torch.nested.nested_tensor_from_jagged(batch.tensor("boxes"), torch.from_numpy(batch.offsets["boxes"]))
    for got, wanted in zip(nested.unbind(), data["boxes"]):
        assert np.array_equal(got.numpy(), wanted)


@pytest.mark.parametrize("change, text", [
    ({"tokens": [np.zeros(3001, np.int32), np.zeros(1, np.int32)]}, r"id 1\), column \"tokens\": 3001 .* 0 to 3000"),
    ({"tokens": [np.zeros(2, np.int32)]}, "tokens: 2 records want a list of 2"),
    ({"tokens": np.zeros(2, np.int32)}, "tokens: 2 records want a list"),
    ({"tokens": [np.zeros(2, np.int32), np.zeros(2)]}, r"tokens\[1\]: float64"),
    ({"boxes": [np.zeros((2, 4), np.float32), np.zeros((2, 3), np.float32)]}, r"boxes\[1\]: shape"),
    ({"boxes": (np.zeros((3, 4), np.float32), np.array([0, 1, 2]))}, "boxes: offsets go from 0 to 2"),
    ({"boxes": (np.zeros((3, 4), np.float32), np.array([0, 4, 3]))}, r"id 2\), column \"boxes\": -1"),
    ({"boxes": [np.zeros((2, 4), np.float32), np.full((2, 4), np.nan, np.float32)]}, r"id 2\), column \"boxes\"")])
def test_append_names_what_is_wrong(governor, tmp_path, change, text):
    data = {"tokens": [np.zeros(2, np.int32)] * 2, "boxes": [np.zeros((1, 4), np.float32)] * 2,
            "label": np.zeros(2, np.int64), **change}
    with pytest.raises(ValueError, match=text):
        with plimsoll.FeatureWriter(governor, tmp_path / "f", COLUMNS, ragged=RAGGED) as writer:
            writer.append([1, 2], data)
    assert not (tmp_path / "f").exists()


def test_what_takes_fixed_shapes_says_so(samples, governor, program, tmp_path):
    store, ids, data = samples
    with pytest.raises(ValueError, match="tokens.* is ragged; a loader's batches"):
        plimsoll.Loader.open(governor, store, batch_rows=10, seed=1)
    with plimsoll.Loader.open(governor, store, columns=["label"], batch_rows=10, seed=1) as loader:
        batch = loader.next()
        assert np.array_equal(store.read(batch.ids, ["label"])["label"], batch["label"])
    export = [program, "store", "export", tmp_path / "s", "--out"]
    done = subprocess.run([*export, tmp_path / "out.safetensors"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "'tokens' is ragged, which no form of export holds" in done.stderr
    subprocess.run([*export, tmp_path / "label.npy", "--column", "label"], check=True)
    assert np.array_equal(np.load(tmp_path / "label.npy"), data["label"])
    with pytest.raises(ValueError, match="ragged columns have lengths"):
        store.lengths(ids[:1], "label")
    for wrong in ({"sound": 4}, {"tokens": 0}):
        with pytest.raises(ValueError, match="ragged: "):
            plimsoll.FeatureWriter(governor, tmp_path / "f", COLUMNS, ragged=wrong)
