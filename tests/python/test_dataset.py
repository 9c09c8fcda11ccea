# SPDX-License-Identifier: Apache-2.0
"""import_dataset: every kind of dataset, and items that do not fit."""
import collections

import numpy as np
import pytest

import plimsoll


class MapStyle:
    """As torch's map-style Dataset: it never raises IndexError."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"image": np.full((2, 3), i, np.float32), "label": i % 5}


def columns_of(info):
    return {one["name"]: (one["dtype"], one["shape"]) for one in info["columns"]}


def read_all(governor, path):
    with plimsoll.FeatureStore.open(governor, path) as store:
        return store.read(store.ids())


def test_a_map_style_dataset(governor, tmp_path):
    info = plimsoll.import_dataset(MapStyle(50), tmp_path / "out", governor=governor)
    assert info["rows"] == 50 and info["dense_ids"]
    assert columns_of(info) == {"image": ("float32", [2, 3]), "label": ("int64", [])}
    batch = read_all(governor, tmp_path / "out")
    assert batch.ids.tolist() == list(range(50))
    assert batch["image"][:, 1, 2].tolist() == list(range(50))
    assert batch["label"].tolist() == [i % 5 for i in range(50)]


def test_a_generator_of_tuples_without_a_governor(tmp_path):
    info = plimsoll.import_dataset(((np.arange(3), 0.5 * i) for i in range(7)), tmp_path / "out")
    assert columns_of(info) == {"c0": ("int64", [3]), "c1": ("float32", [])}
    with plimsoll.Governor("4GiB") as governor:
        assert read_all(governor, tmp_path / "out")["c1"].tolist() == [0.5 * i for i in range(7)]


def test_an_array_a_dict_of_arrays_and_named_tuples(governor, tmp_path):
    data = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    plimsoll.import_dataset(data, tmp_path / "a", governor=governor)
    assert np.array_equal(read_all(governor, tmp_path / "a")["value"], data)
    plimsoll.import_dataset({"x": data, "y": np.arange(9)}, tmp_path / "b", governor=governor)
    assert read_all(governor, tmp_path / "b")["y"].tolist() == list(range(9))
    pair = collections.namedtuple("pair", "left right")
    plimsoll.import_dataset([pair(1, True), pair(2, False)], tmp_path / "c", governor=governor)
    assert read_all(governor, tmp_path / "c")["right"].tolist() == [1, 0]


def test_ids_and_groups_come_from_keys_or_beside_the_items(governor, tmp_path):
    items = [{"id": 100 - i, "g": i // 2, "x": float(i)} for i in range(6)]
    plimsoll.import_dataset(items, tmp_path / "a", governor=governor, groups="g")
    batch = read_all(governor, tmp_path / "a")
    assert batch.ids.tolist() == [100 - i for i in range(6)] and list(batch) == ["x"]
    assert plimsoll.info(tmp_path / "a")["groups"] == 3
    plimsoll.import_dataset([1.0, 2.0], tmp_path / "c", governor=governor, ids=[8, -8])
    assert read_all(governor, tmp_path / "c").ids.tolist() == [8, -8]


def test_float16_halves_the_bytes(governor, tmp_path):
    info = plimsoll.import_dataset(MapStyle(4), tmp_path / "a", governor=governor, dtype="float16")
    assert columns_of(info) == {"image": ("float16", [2, 3]), "label": ("int64", [])}
    info = plimsoll.import_dataset(MapStyle(4), tmp_path / "b", governor=governor,
                                   dtype={"label": "int32"})
    assert columns_of(info)["label"] == ("int32", [])


def test_many_chunks_keep_their_order(governor, tmp_path):
    wide = (np.full(4096, i, np.float32) for i in range(700))  # 256 items to a chunk.
    plimsoll.import_dataset(wide, tmp_path / "out", governor=governor)
    with plimsoll.FeatureStore.open(governor, tmp_path / "out") as store:
        for i in (0, 255, 256, 699):
            assert store.read([i])["value"][0, 4095] == i


def test_torch_datasets_and_tensors(governor, tmp_path):
    torch = pytest.importorskip("torch")
    x = torch.arange(12.0).reshape(6, 2)
    dataset = torch.utils.data.TensorDataset(x, torch.arange(6))
    plimsoll.import_dataset(dataset, tmp_path / "a", governor=governor)
    batch = read_all(governor, tmp_path / "a")
    assert torch.equal(batch.tensor("c0"), x) and batch["c1"].tolist() == list(range(6))

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from ({"x": row.to(torch.bfloat16)} for row in x)

        def __len__(self):  # As DataLoader asks for it; [i] is inherited, and raises.
            return len(x)

    plimsoll.import_dataset(Stream(), tmp_path / "b", governor=governor)
    assert torch.equal(read_all(governor, tmp_path / "b").tensor("x"), x)


GOOD = {"x": np.zeros(3, np.float32), "y": 1}


@pytest.mark.parametrize("bad, text", [
    ({"x": np.zeros(4, np.float32), "y": 1}, "item 2, column 'x': shape"),
    ({"x": np.zeros(3), "y": 1}, "item 2, column 'x': float64"),
    ({"x": np.zeros(3, np.float32)}, "item 2: it has x where item 0 had x, y"),
    ({**GOOD, "z": 1}, "item 2"), ({**GOOD, "x": "cat"}, "item 2, column 'x': str"),
    ({**GOOD, "x": None}, "item 2, column 'x'"), (None, "item 2: it is None"),
    ({**GOOD, "x": np.array([0, np.inf, 0], np.float32)}, "x")])
def test_a_bad_item_is_named_and_leaves_nothing(governor, tmp_path, bad, text):
    with pytest.raises(ValueError, match=text):
        plimsoll.import_dataset([GOOD, GOOD, bad, GOOD], tmp_path / "out", governor=governor)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dataset, options, text", [
    ([], {}, "no items"), (7, {}, "neither"), ([{"id": 1}], {}, "nothing but"),
    ([{"Bad": 1}], {}, "Bad"), ([1, 2], {"ids": [5]}, "only 1"),
    ([1, 2], {"ids": [5, 6, 7]}, "more"), ([1, 2], {"ids": [5, 5]}, "5"),
    ([1, 2], {"ids": [5, "a"]}, "item 1"), ([1, 2], {"ids": np.array([0.0, 1.5])}, "item 1, 'ids': .*1.5"),
    ([{"x": 1, "g": np.float32(0.5)}], {"groups": "g"}, "item 0, 'g': .*0.5"), ([1], {"ids": "k"}, "'k'"),
    ({"a": [1], "b": [1, 2]}, {}, "lengths"), ([1.5], {"dtype": "int32"}, "int32"),
    ([np.zeros(2, np.complex64)], {}, "complex64|array"),
    ([1], {"dtype": {"value": "int8"}}, "int8"),
    ([1, 300], {"dtype": {"value": "uint8"}}, "item 1, column 'value': a whole number that is not one of uint8"),
    ([1, 1 << 40], {"dtype": {"value": "int32"}}, "item 1, .* int32"),
    ([1, (1 << 24) + 1], {"dtype": {"value": "float32"}}, "item 1, .* float32"),
    ([1.5], {"dtype": {"valeu": "float16"}}, "dtype: there is no column 'valeu'; there are value")])
def test_what_cannot_be_imported_says_why(governor, tmp_path, dataset, options, text):
    with pytest.raises(ValueError, match=text):
        plimsoll.import_dataset(dataset, tmp_path / "out", governor=governor, **options)
    assert not (tmp_path / "out").exists()


def test_a_governor_that_is_there_must_be_passed_on(governor, tmp_path):
    with pytest.raises(ValueError, match="governor="):
        plimsoll.import_dataset([1, 2], tmp_path / "out")


def test_an_exception_of_the_dataset_passes_through(governor, tmp_path):
    def broken():
        yield 1
        raise RuntimeError("their disk is gone")

    with pytest.raises(RuntimeError, match="their disk"):
        plimsoll.import_dataset(broken(), tmp_path / "out", governor=governor)
    assert not (tmp_path / "out").exists()
