# SPDX-License-Identifier: Apache-2.0
"""FeatureStore and FeatureWriter, each call and its error."""
import json
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

import plimsoll

COLUMNS = {"image": ("float32", (4,)), "text": ("float16", (2, 3)), "label": ("int64", ())}


def arrays(n, seed=0):
    random = np.random.default_rng(seed)
    return {"image": random.standard_normal((n, 4)).astype(np.float32),
            "text": random.standard_normal((n, 2, 3)).astype(np.float16),
            "label": random.integers(-9, 9, n)}


@pytest.fixture
def items(governor, tmp_path):
    """500 records under sparse, shuffled ids, and what was written."""
    ids = np.random.default_rng(1).permutation(500).astype(np.int64) * 31 - 77
    data = arrays(500)
    with plimsoll.FeatureWriter(governor, tmp_path / "items", COLUMNS) as writer:
        for begin in range(0, 500, 120):
            part = slice(begin, begin + 120)
            writer.append(ids[part], {name: one[part] for name, one in data.items()})
        assert writer.rows == 500
    store = plimsoll.FeatureStore.open(governor, tmp_path / "items", cache_bytes="4MiB")
    return store, ids, data


def test_read_follows_the_request_with_duplicates(items):
    store, ids, data = items
    picks = np.array([3, 499, 3, 0, 250])
    batch = store.read(ids[picks])
    assert list(batch) == list(COLUMNS) and batch.ids.tolist() == ids[picks].tolist()
    for name, (dtype, shape) in COLUMNS.items():
        assert batch[name].dtype == dtype and batch[name].shape == (5, *shape)
        assert np.array_equal(batch[name], data[name][picks])


def test_the_plan_adds_up_to_the_slab(items, governor):
    store, _, _ = items
    plan = store.plan()
    parts = [plan.frame_bytes, plan.buffer_bytes, plan.table_bytes, plan.index_bytes, plan.slack_bytes]
    assert sum(parts) == plan.total_bytes <= 4 << 20
    assert plan.frame_bytes > 0 and plan.table_bytes > 0
    assert governor.ledger().pools["features"].leased_bytes >= plan.total_bytes


def test_columns_can_be_chosen_in_any_order(items):
    store, ids, data = items
    batch = store.read(ids[:2], columns=["label", "image"])
    assert list(batch) == ["label", "image"]
    assert np.array_equal(batch["label"], data["label"][:2])
    with pytest.raises(KeyError, match="sound"):
        store.read(ids[:2], columns=["sound"])
    with pytest.raises(ValueError, match="twice"):
        store.read(ids[:2], columns=["image", "image"])


def test_what_was_read_is_a_copy(items):
    store, ids, data = items
    first = store.read(ids[:3])
    first["image"][:] = 0
    assert np.array_equal(store.read(ids[:3])["image"], data["image"][:3])


def test_errors_of_reading(items, governor, tmp_path):
    store, ids, _ = items
    with pytest.raises(KeyError, match="123456789"):
        store.read([int(ids[0]), 123456789])
    with pytest.raises(ValueError, match="ids"):
        store.read(np.array([1.0]))
    with pytest.raises(KeyError):
        plimsoll.FeatureStore.open(governor, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="cache_bytes"):
        plimsoll.FeatureStore.open(governor, tmp_path / "items", cache_bytes="x")
    store.close()
    with governor.reserve(governor.ledger().free_bytes - 4096):
        with pytest.raises(plimsoll.BudgetExceeded) as caught:
            plimsoll.FeatureStore.open(governor, tmp_path / "items", cache_bytes="90GiB")
    assert caught.value.tag == "features"
    with pytest.raises(ValueError, match="closed"):
        store.read(ids[:1])


def test_it_describes_itself(items, tmp_path):
    store, ids, _ = items
    assert (len(store), store.rows) == (500, 500)
    assert store.columns == COLUMNS
    assert np.array_equal(store.ids(), ids)
    assert store.ids([2, 2]).tolist() == [ids[2], ids[2]]
    with pytest.raises(ValueError, match="500"):
        store.ids([500])
    info = plimsoll.info(tmp_path / "items")
    assert info["kind"] == "feature_store" and info["rows"] == 500
    assert info["columns"][1] == {"name": "text", "dtype": "float16", "shape": [2, 3]}
    assert info["record_bytes"] == 16 + 12 + 8
    assert store.info()["fingerprint"] == info["fingerprint"]
    store.read(ids)
    assert store.stats()["requests"] >= 500
    store.verify()


@pytest.mark.parametrize("change, text", [
    ({"image": np.zeros((2, 4))}, "image.*float64"),
    ({"image": np.zeros((2, 5), np.float32)}, "image.*shape"),
    ({"text": np.zeros((3, 2, 3), np.float16)}, "text.*shape"),
    ({"image": np.full((2, 4), np.nan, np.float32)}, "image"),
    ({"extra": np.zeros(2)}, "extra"), ({"label": None}, "label")])
def test_append_names_what_is_wrong(governor, tmp_path, change, text):
    data = {**arrays(2), **change}
    with pytest.raises(ValueError, match=text):
        with plimsoll.FeatureWriter(governor, tmp_path / "f", COLUMNS) as writer:
            writer.append([1, 2], data)
    assert not (tmp_path / "f").exists()


def test_columns_may_come_by_keyword(governor, tmp_path):
    with plimsoll.FeatureWriter(governor, tmp_path / "f", {"x": ("float32", [])}) as writer:
        writer.append([1, 2], x=np.array([5, 6], np.float32))
    with plimsoll.FeatureStore.open(governor, tmp_path / "f") as store:
        assert store.read([2, 1])["x"].tolist() == [6.0, 5.0]


def test_duplicate_ids_are_refused_and_leave_nothing(governor, tmp_path):
    with pytest.raises(ValueError, match="7"):
        with plimsoll.FeatureWriter(governor, tmp_path / "f", COLUMNS) as writer:
            writer.append([7, 7], arrays(2))
    assert not (tmp_path / "f").exists()


def test_groups_are_all_or_none(governor, tmp_path):
    columns = {"x": ("float32", ())}
    x = np.zeros(4, np.float32)
    with plimsoll.FeatureWriter(governor, tmp_path / "g", columns, grouped=True) as writer:
        with pytest.raises(ValueError, match="groups"):
            writer.append([1, 2, 3, 4], x=x)
        writer.append([1, 2, 3, 4], x=x, groups=[9, 9, 4, 4])
    assert plimsoll.info(tmp_path / "g")["groups"] == 2


def test_a_store_is_not_overwritten(items, governor, tmp_path):
    with pytest.raises(ValueError):
        plimsoll.FeatureWriter(governor, tmp_path / "items", COLUMNS)
    with pytest.raises(ValueError):
        plimsoll.FeatureWriter(governor, tmp_path / "other", {"Bad Name": ("float32", ())})
    with pytest.raises(ValueError):
        plimsoll.FeatureWriter(governor, tmp_path / "other", {"x": ("complex64", ())})


def test_compression_changes_the_disk_and_nothing_else(governor, tmp_path):
    ids = np.arange(4000)
    x = np.random.default_rng(3).standard_normal((4000, 64)).astype(np.float32)
    x[::2] = 0  # Of every two records one packs.
    for name in ("none", "lz4"):
        with plimsoll.FeatureWriter(governor, tmp_path / name, {"x": ("float32", (64,))},
                                    compression=name) as writer:
            writer.append(ids, x=x)
    plain, packed = plimsoll.info(tmp_path / "none"), plimsoll.info(tmp_path / "lz4")
    assert (plain["compression"], packed["compression"]) == ("none", "lz4")
    assert packed["fingerprint"] == plain["fingerprint"]
    assert packed["stored_bytes"] < plain["stored_bytes"] * 0.8
    assert plain["plain_blocks"] == plain["blocks"] == packed["blocks"] > packed["plain_blocks"]
    with plimsoll.FeatureStore.open(governor, tmp_path / "lz4", cache_bytes="2MiB") as store:
        assert np.array_equal(store.read(ids[::-1].copy())["x"], x[::-1])
        stats = store.stats()
        assert stats["bytes_read"] < stats["bytes_delivered"] == x.nbytes
        store.verify()
    with pytest.raises(ValueError, match="zip"):
        plimsoll.FeatureWriter(governor, tmp_path / "zip", {"x": ("float32", ())},
                               compression="zip")
    info = plimsoll.import_dataset({"x": x}, tmp_path / "set", governor=governor,
                                   compression="lz4")
    assert info["compression"] == "lz4" and info["stored_bytes"] == packed["stored_bytes"]


def test_a_join_gap_reads_fewer_times_and_more_bytes(governor, tmp_path):
    with plimsoll.FeatureWriter(governor, tmp_path / "f", {"x": ("float32", (1024,))}) as writer:
        writer.append(np.arange(1000), x=np.zeros((1000, 1024), np.float32))
    seen = {}
    for gap in (0, "4KiB"):
        with plimsoll.FeatureStore.open(governor, tmp_path / "f", cache_bytes="8MiB",
                                        join_gap_bytes=gap) as store:
            store.read(np.arange(0, 1000, 2))
            seen[gap] = store.stats()
    assert seen["4KiB"]["reads"] * 4 < seen[0]["reads"] == 500
    assert seen["4KiB"]["bytes_read"] > seen[0]["bytes_read"] == 500 * 4096
    with pytest.raises(ValueError, match="join_gap"):
        plimsoll.FeatureStore.open(governor, tmp_path / "f", join_gap_bytes=-1)


def extended(governor, path, ids, data):
    with plimsoll.FeatureWriter.extend(governor, path) as writer:
        writer.append(ids, data)


def test_a_store_grows_by_parts_and_open_ones_go_on(items, governor, program, tmp_path):
    store, ids, data = items
    more, after = ids[:120] * 7 + 10**9, arrays(120, seed=2)
    extended(governor, tmp_path / "items", more[:50], {name: one[:50] for name, one in after.items()})
    extended(governor, tmp_path / "items", more[50:], {name: one[50:] for name, one in after.items()})
    assert (store.rows, store.parts) == (500, 1) and store.find(more[:2]).tolist() == [-1, -1]
    with plimsoll.FeatureStore.open(governor, tmp_path / "items") as now:
        assert (now.rows, now.parts, now.info()["parts"]) == (620, 3, 3)
        assert np.array_equal(now.ids(), np.concatenate([ids, more]))
        picks = np.random.default_rng(5).permutation(620)
        batch = now.read(now.ids()[picks])
        for name in COLUMNS:
            assert np.array_equal(batch[name], np.concatenate([data[name], after[name]])[picks])
        assert np.array_equal(now.find(now.ids(picks)), picks)
        now.verify()
        with plimsoll.Loader.open(governor, now, batch_rows=31, seed=1) as loader:
            seen = np.concatenate([loader.next().ids for _ in range(20)])
        assert np.array_equal(np.sort(seen), np.sort(now.ids()))
    with plimsoll.FeatureStore.open(governor, tmp_path / "items", parts=2) as then:
        assert then.rows == 550 and np.array_equal(then.ids(), np.concatenate([ids, more])[:550])
        assert (then.info()["rows"], then.info()["parts"]) == (550, 2)
        assert then.info()["fingerprint"] != store.info()["fingerprint"]
    with pytest.raises(KeyError, match="3 parts, not 4"):
        plimsoll.FeatureStore.open(governor, tmp_path / "items", parts=4)
    done = subprocess.run([program, "store", "compact", tmp_path / "items", "--json"], capture_output=True, text=True,
                          check=True)
    assert json.loads(done.stdout)["bytes"] < json.loads(done.stdout)["bytes_before"]
    assert plimsoll.info(tmp_path / "items")["parts"] == 1 and np.array_equal(store.read(ids)["label"], data["label"])
    with plimsoll.FeatureStore.open(governor, tmp_path / "items") as joined:
        assert np.array_equal(joined.read(more)["image"], after["image"])


def test_extending_refuses_what_does_not_fit(items, governor, tmp_path):
    _, ids, data = items
    with pytest.raises(ValueError, match=f"has id {ids[3]} already, as record 3"):
        extended(governor, tmp_path / "items", ids[3:4], {name: one[:1] for name, one in data.items()})
    with pytest.raises(ValueError, match="missing .*'text'"):
        extended(governor, tmp_path / "items", [10**12], {"image": data["image"][:1]})
    with pytest.raises(ValueError, match="groups"):
        with plimsoll.FeatureWriter.extend(governor, tmp_path / "items") as writer:
            writer.append([10**12], {name: one[:1] for name, one in data.items()}, groups=[1])
    with plimsoll.FeatureWriter.extend(governor, tmp_path / "items") as writer:
        assert writer.columns == COLUMNS and not writer.grouped and writer.rows == 0
        with pytest.raises(ValueError, match="another process is writing there"):
            plimsoll.FeatureWriter.extend(governor, tmp_path / "items")
    with pytest.raises(KeyError):
        plimsoll.FeatureWriter.extend(governor, tmp_path / "nowhere")
    assert plimsoll.info(tmp_path / "items")["parts"] == 1


GROW = """
import sys, numpy as np, plimsoll
print("ready", flush=True)
while True:
    rows = plimsoll.info(sys.argv[1])["rows"]
    ids = np.arange(rows, rows + 997)
    with plimsoll.Governor("1GiB") as governor, plimsoll.FeatureWriter.extend(governor, sys.argv[1]) as writer:
        for part in np.array_split(ids, 9):
            writer.append(part, x=np.repeat(part.astype(np.float32)[:, None], 64, 1))
    if plimsoll.info(sys.argv[1])["parts"] > 10:
        plimsoll.store.compact(sys.argv[1])
"""


def test_kill_9_while_appending_leaves_whole_parts_beside_readers(governor, tmp_path):
    path = tmp_path / "f"
    with plimsoll.FeatureWriter(governor, path, {"x": ("float32", (64,))}) as writer:
        writer.append(np.arange(997), x=np.repeat(np.arange(997, dtype=np.float32)[:, None], 64, 1))
    random, rows, exchanges, parts_seen = np.random.default_rng(8), 997, 0, set()
    for _ in range(12):
        child = subprocess.Popen([sys.executable, "-c", GROW, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "ready\n"
        until = time.monotonic() + random.uniform(0.02, 0.6)
        while time.monotonic() < until:  # A reader beside the writer.
            try:
                store = plimsoll.FeatureStore.open(governor, path)
            except (plimsoll.CorruptError, OSError, KeyError):
                exchanges += 1  # Between its header and its files: it is opened again.
                continue
            with store:
                assert store.rows >= rows and store.rows % 997 == 0
                rows, some = store.rows, random.integers(0, store.rows, 50)
                assert np.array_equal(store.read(some)["x"][:, 63], some.astype(np.float32))
        child.kill()
        child.communicate()
        with plimsoll.FeatureStore.open(governor, path) as store:
            store.verify()
            assert store.rows >= rows and store.rows % 997 == 0
            rows = store.rows
            parts_seen.add(store.parts)
        shutil.rmtree(tmp_path / "f.joined", ignore_errors=True)
    assert rows > 3 * 997 and len(parts_seen) > 1 and exchanges < 20


def test_a_dataset_is_added_to_a_store(governor, tmp_path):
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    plimsoll.import_dataset({"x": x[:4]}, tmp_path / "d", governor=governor, compression="lz4")
    info = plimsoll.import_dataset({"x": x[4:]}, tmp_path / "d", governor=governor, append=True)
    assert (info["rows"], info["parts"], info["compression"]) == (6, 2, "lz4")
    with plimsoll.FeatureStore.open(governor, tmp_path / "d") as store:
        assert np.array_equal(store.read(np.arange(6))["x"], x)
    with pytest.raises(ValueError, match="it has columns .*'x'.* where the items have .*'y'"):
        plimsoll.import_dataset({"y": x}, tmp_path / "d", governor=governor, append=True)
    assert plimsoll.info(tmp_path / "d")["parts"] == 2


def test_an_unwritable_place_is_an_os_error_with_errno(governor):
    with pytest.raises(OSError) as caught:
        plimsoll.FeatureWriter(governor, "/proc/plimsoll-cannot-be-here", COLUMNS)
    assert caught.value.errno


def test_info_of_nothing_is_a_key_error(tmp_path):
    with pytest.raises(KeyError, match="nothing"):
        plimsoll.info(tmp_path)
