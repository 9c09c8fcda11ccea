# SPDX-License-Identifier: Apache-2.0
"""FeatureManager: adding, building, reading, the original's files."""
import collections
import os
import re
import types

import numpy as np
import pytest

import plimsoll
from plimsoll.compat import FeatureManager

torch = pytest.importorskip("torch")
SMALL = {"cache_l1_size_mb": 2, "cache_l2_size_mb": 2}


@pytest.fixture
def features(governor, tmp_path):
    with FeatureManager(tmp_path / "f", chunk_size=50, config=SMALL) as one:
        yield one


def add(features, chunk, ids, seed=0, **more):
    random = np.random.default_rng((seed, chunk))
    columns = {"img_features": torch.tensor(random.standard_normal((len(ids), 6)),
                                            dtype=torch.float32),
               "txt_features": torch.tensor(random.standard_normal((len(ids), 4)),
                                            dtype=torch.float16), "txt_full": None, **more}
    features.add_features_chunk(chunk, columns["img_features"], columns["txt_features"],
                                columns["txt_full"], ids)
    return columns


def test_chunks_come_back_as_they_were_added(features):
    held = {chunk: add(features, chunk, list(range(chunk * 40, chunk * 40 + 40)))
            for chunk in (2, 0, 1)}
    assert features.get_num_chunks() == 3 and features.load_features() == 120
    for chunk, columns in held.items():
        one = features.get_chunk(chunk)
        assert set(one) == {"sample_ids", "features", "chunk_id", "metadata"}
        assert one["chunk_id"] == chunk and one["metadata"]["num_samples"] == 40
        assert list(one["features"]) == ["img_features", "txt_features"]
        for name in one["features"]:
            assert torch.equal(one["features"][name], columns[name])
        part = features.get_features_by_chunk(chunk, ["txt_features"])
        assert list(part) == ["sample_ids", "txt_features"]
        assert features.chunk_ids(chunk).tolist() == one["sample_ids"]


def test_s47_an_unknown_string_is_named_and_not_its_hash(features):
    add(features, 0, ["a/b.jpg", "ü"])
    with pytest.raises(KeyError, match="there is no sample with id 'nobody'$"):
        features.get_features(["ü", "nobody"])


def test_a_chunk_added_later_or_again_is_read_too(features):
    first = add(features, 0, [1, 2, 3])
    assert torch.equal(features.get_features([3])["img_features"], first["img_features"][2:])
    second = add(features, 1, [10, 11])
    again = add(features, 0, [3, 4], seed=1)
    assert features.get_num_chunks() == 2
    assert torch.equal(features.get_features([11, 3])["img_features"],
                       torch.stack([second["img_features"][1], again["img_features"][0]]))
    with pytest.raises(KeyError, match="no sample with id 1"):
        features.get_features([1])
    stores = [name for name in os.listdir(features.features_dir) if name.startswith("store-")]
    assert len(stores) == 1 and not os.listdir(features.features_dir / "staged")


def test_an_added_chunk_is_durable_before_it_is_read(governor, tmp_path):
    first = FeatureManager(tmp_path / "f", config=SMALL)
    held = add(first, 0, [5, 6])
    del first  # Never closed, never built.
    with FeatureManager(tmp_path / "f", config=SMALL, preload_index=True) as second:
        assert torch.equal(second.get_features([6, 5])["txt_features"],
                           held["txt_features"].flip(0))
    with FeatureManager(tmp_path / "f", config=SMALL) as third:
        assert third.get_num_chunks() == 1
        assert torch.equal(third.get_features([5])["txt_features"], held["txt_features"][:1])


def test_string_ids_work_like_integers(features):
    held = add(features, 0, ["a/b.jpg", "ü"])
    assert torch.equal(features.get_features(["ü"])["img_features"], held["img_features"][1:])
    assert features.get_chunk(0)["sample_ids"] == ["a/b.jpg", "ü"]
    with pytest.raises(KeyError):
        features.get_features(["nobody"])
    with pytest.raises(ValueError, match="strings"):
        features.get_features([3])
    add(features, 1, ["c"])
    assert torch.equal(features.get_features(["ü"])["img_features"], held["img_features"][1:])


def test_wrong_chunks_are_refused_and_named(features):
    good = torch.zeros(2, 3)
    for arguments, name in (
            ((0, None, None, None, [1]), "all are None"), ((0, good, None, None, [1]), "img_fea"),
            ((-1, good, None, None, [1, 2]), "chunk_id"), ((0, good, None, None, []), "sample_ids"),
            ((0, torch.zeros(51, 3), None, None, range(51)), "chunk_size"),
            ((0, good.int(), None, None, [1, 2]), "floats"),
            ((0, None, good * float("nan"), None, [1, 2]), "txt_features: NaN")):
        with pytest.raises(ValueError, match=name):
            features.add_features_chunk(*arguments)
    assert features.get_num_chunks() == 0
    with pytest.raises(ValueError, match="no features"):
        features.load_features()


def test_a_sample_in_two_chunks_and_chunks_of_two_shapes_are_refused(governor, tmp_path):
    with FeatureManager(tmp_path / "twice", config=SMALL) as features:
        add(features, 0, [1, 2])
        assert features.load_features() == 2
        add(features, 1, [2, 3])
        with pytest.raises(ValueError, match="2 is given twice"):
            features.get_features([1])
        add(features, 1, [3, 4])  # Put right, it goes on.
        assert features.get_features([1, 4])["img_features"].shape == (2, 6)
    with FeatureManager(tmp_path / "shapes", config=SMALL) as features:
        add(features, 0, [1, 2])
        add(features, 1, [3], img_features=torch.zeros(1, 7))
        with pytest.raises(ValueError, match="chunk 1"):
            features.get_features([1])


def test_the_originals_chunks_are_taken_over(governor, tmp_path):
    images = torch.randn(4, 5)
    for chunk in range(2):
        torch.save({"sample_ids": [chunk * 10, chunk * 10 + 1], "chunk_id": chunk, "metadata": {},
                    "features": {"img_features": images[chunk * 2:chunk * 2 + 2].clone()}},
                   tmp_path / f"chunk_{chunk}.pt")
    with FeatureManager(tmp_path, config=SMALL) as features:
        assert features.get_num_chunks() == 2
        assert torch.equal(features.get_features([11, 0])["img_features"], images[[3, 0]])
        assert (tmp_path / "chunk_0.pt").exists()
        add_ids = [99]
        features.add_features_chunk(2, torch.ones(1, 5), None, None, add_ids)
        assert torch.equal(features.get_features([99, 10])["img_features"][1], images[2])


def test_a_damaged_original_is_named(governor, tmp_path):
    torch.save({"sample_ids": [1, 2], "features": [3]}, tmp_path / "chunk_0.pt")
    with FeatureManager(tmp_path) as features, pytest.raises(
            plimsoll.CorruptError, match="chunk_0.pt"):
        features.load_features()


def test_debug_print_and_statistics_say_what_is_so(features, capsys):
    features.debug_print()
    assert "0 chunks" in capsys.readouterr().out
    add(features, 0, list(range(20)))
    features.get_features([1, 5, 5])
    features.debug_print()
    text = capsys.readouterr().out
    assert "1 chunks" in text and "samples: 20" in text and "img_features: float32[6]" in text
    performance = features.get_cache_performance()
    assert performance["total_requests"] == 3 and 0 <= performance["cache_hit_rate"] <= 1


def test_patterns_are_told_apart(features):
    add(features, 0, list(range(50)))
    for begin in range(0, 50, 5):
        features.get_features(range(begin, begin + 5))
    assert features.access_pattern() == "sequential"
    random = np.random.default_rng(1)
    for _ in range(20):
        features.get_features(random.choice(50, 3, replace=False))
    assert features.access_pattern() == "random"


def test_the_config_may_be_an_object_and_bounds_the_slab(governor, tmp_path):
    class Config:
        cache_l1_size_mb = 3
        cache_l2_size_mb = 1

    with FeatureManager(tmp_path, config=Config()) as features:
        add(features, 0, list(range(9)))
        before = governor.ledger().pools["features"].leased_bytes
        features.load_features()
        assert 0 < governor.ledger().pools["features"].leased_bytes - before <= 4 << 20
    with pytest.raises(ValueError, match="chunk_size"):
        FeatureManager(tmp_path, chunk_size=0)


@pytest.mark.parametrize("kind", [dict, lambda **given: types.SimpleNamespace(**given),
                                  lambda **given: collections.namedtuple("Config", given)(**given),
                                  lambda **given: type("Config", (), given)()],
                         ids=["mapping", "namespace", "named tuple", "class"])
def test_s41_a_config_is_heeded_and_its_unknown_keys_are_refused(governor, tmp_path, kind):
    with FeatureManager(tmp_path / "f", config=kind(cache_size_mb=1, chunk_size=20_000, batch_size=256, num_workers=4,
                                                    compression=None)) as features:
        features.add_features_chunk(0, torch.randn(20_000, 64), None, None, range(20_000))  # 4.9 MiB.
        before = governor.ledger().pools["features"].leased_bytes
        features.load_features()
        assert 0 < governor.ledger().pools["features"].leased_bytes - before <= 1 << 20
        with pytest.raises(ValueError, match="20001 samples"):
            features.add_features_chunk(1, torch.randn(20_001, 64), None, None, range(20_001))
    for wrong, text in (({"cache_sizemb": 1}, "'cache_sizemb'; did you mean 'cache_size_mb'"),
                        ({"learning_rate": 0.1}, "'learning_rate'; it has cache_size_mb, cache_l1_size_mb"),
                        ({"cache_size_mb": "1"}, "cache_size_mb is '1'"), ({"cache_l2_size_mb": -1}, "is -1"),
                        ({"cache_size_mb": 4, "cache_l1_size_mb": 4}, "bounds the whole slab")):
        with pytest.raises(ValueError, match=re.escape(text)):
            FeatureManager(tmp_path / "wrong", config=kind(**wrong))
    assert not (tmp_path / "wrong").exists()
