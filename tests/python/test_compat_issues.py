# SPDX-License-Identifier: Apache-2.0
"""One test for each mistake of the original's embedding and feature managers, named after it."""
import gc
import os
import threading
import time

import numpy as np
import pytest

import plimsoll
from plimsoll.compat import FeatureManager, TrainableEmbeddingManager
from tests.support.leases import leased_by_stores

torch = pytest.importorskip("torch")
MODES = pytest.mark.parametrize("mode", ["disk", "memory"])


def make(folder, ids, dim=16, mode="disk", **options):
    return TrainableEmbeddingManager(ids, dim, storage_mode=mode, embeddings_dir=folder / "run/e",
                                     **{"chunk_size": 100, "cache_l1_size_mb": 2,
                                        "cache_l2_size_mb": 2, **options})


def sparse_ids(count, seed):
    random = np.random.default_rng(seed)
    return [int(one) for one in random.choice(10**12, count, replace=False) - 10**11]


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@MODES
def test_c1_rows_come_back_in_request_order(governor, tmp_path, mode):
    ids = sparse_ids(500, 1)
    rows = np.random.default_rng(1).standard_normal((500, 16)).astype(np.float32)
    row_of = dict(zip(ids, rows))
    with make(tmp_path, ids, mode=mode) as manager:
        manager.update_embeddings(ids, rows)
        random = np.random.default_rng(2)
        for _ in range(20):
            wanted = [ids[at] for at in random.integers(0, 500, 64)]  # Over all five chunks, twice.
            found = manager.get_embeddings(wanted)
            for one, row in zip(wanted, found):
                assert np.array_equal(row, row_of[one])
            manager.update_embeddings(wanted, found)
        assert np.array_equal(manager.get_all_embeddings()[1], rows)


def test_c2_first_rows_are_all_there_after_reopening(governor, tmp_path):
    ids = sparse_ids(500, 3)
    random = np.random.default_rng(3)
    with FeatureManager(tmp_path / "f") as features:
        for chunk in range(5):
            images, texts = random.standard_normal((2, 100, 32)).astype(np.float32)
            features.add_features_chunk(chunk, images, texts, None, ids[chunk * 100:][:100])
        options = {"initialization_strategy": "imgtxt", "feature_manager": features,
                   "sync_batch_size": 100}
        manager = make(tmp_path, ids, **options)
        rows = manager.get_embeddings(ids)
        assert rows.any(dim=1).all()
        manager._table.commit_at_exit = False  # As a killed process: nothing more is written.
        manager.close()
        with make(tmp_path, ids, **options) as manager:
            assert torch.equal(manager.get_embeddings(ids), rows)
            manager.update_embeddings(ids[:9], rows[:9] + 1)
            manager.clear_chunk_cache()  # Clearing writes first.
            assert torch.equal(manager.get_embeddings(ids[:9]), rows[:9] + 1)


def test_c3_what_is_evicted_is_not_lost(governor, tmp_path):
    ids = list(range(20_000))
    rows = torch.randn(20_000, 64)
    options = {"dim": 64, "chunk_size": 10_000, "cache_l1_size_mb": 1, "cache_l2_size_mb": 1,
               "enable_l3_cache": False, "auto_sync": False}  # A chunk is 2.4 MiB.
    with make(tmp_path, ids, **options) as manager:
        for begin in range(0, 20_000, 500):
            manager.update_embeddings(ids[begin:begin + 500], rows[begin:begin + 500])
        assert manager.cache.get_cache_info()["stats"]["evictions"] > 100
        assert torch.equal(manager.get_embeddings(ids), rows)
        manager.sync_dirty_chunks_to_disk()
    with make(tmp_path, ids, **options) as manager:
        assert torch.equal(manager.get_embeddings(ids), rows)


def test_c4_no_stale_rows_after_evicting_clearing_loading_and_reopening(governor, tmp_path):
    ids = list(range(20_000))
    options = {"dim": 64, "cache_l1_size_mb": 1, "cache_l2_size_mb": 1}
    with make(tmp_path, ids, **options) as manager:
        for value in (1.0, 2.0):
            manager.update_embeddings([7, 19_000], torch.full((2, 64), value))
            manager.get_embeddings(ids)  # Evicts it.
        manager.force_sync_all_chunks()
        manager.clear_chunk_cache()
        assert (manager.get_embeddings([7, 19_000]) == 2).all()
        manager.store_imgtxt_template()
        manager.update_embeddings([7], torch.full((1, 64), 3.0))
        manager.load_imgtxt_template()
        assert (manager.get_embeddings([7]) == 2).all()
        manager.update_embeddings([7], torch.full((1, 64), 4.0))
    with make(tmp_path, ids, **options) as manager:
        assert (manager.get_embeddings([7]) == 4).all()
        assert (manager.get_embeddings([19_000]) == 2).all()


def test_c5_accounted_bytes_are_what_is_resident_and_bounded(governor, tmp_path):
    ids = list(range(20_000))
    random = np.random.default_rng(5)
    with make(tmp_path, ids, dim=64, cache_l1_size_mb=1, cache_l2_size_mb=2) as manager:
        evicted = 0
        for _ in range(200):
            some = random.integers(0, 20_000, 64)
            if random.random() < 0.5:
                manager.update_embeddings(some, torch.randn(64, 64))
            else:
                manager.get_embeddings(some)
            info = manager.cache.get_cache_info()
            resident = manager._table.stats()["resident_pages"] * manager._table.page_bytes
            assert (info["l1_size_mb"] + info["l2_size_mb"]) * 2**20 == pytest.approx(resident)
            assert info["l1_size_mb"] <= 1 and info["l2_size_mb"] <= 2
            assert info["stats"]["evictions"] >= evicted
            evicted = info["stats"]["evictions"]
        assert evicted > 100 and manager.slab_bytes <= 3 << 20
        assert governor.ledger().pools["rows"].leased_bytes == manager.slab_bytes


@MODES
def test_c6_rows_are_copies_and_files_hold_rows_only(governor, tmp_path, mode):
    ids = list(range(2000))
    with make(tmp_path, ids, dim=128, mode=mode, chunk_size=1000) as manager:
        batch = torch.randn(512, 128)
        kept = batch.clone()
        manager.update_embeddings(ids[:512], batch)
        batch.zero_()
        assert torch.equal(manager.get_embeddings(ids[:512]), kept)
        folder = manager.save_final_embeddings(tmp_path / "saved")
        for chunk in range(2):
            size = os.path.getsize(f"{folder}/embeddings_chunk_{chunk}.pt")
            assert 0 <= size - 1000 * 128 * 4 < 120 * 1000  # Names and places, no second copy.


@MODES
def test_c6_resident_memory_is_what_is_accounted(governor, tmp_path, mode):
    with make(tmp_path, range(60_000), dim=128, mode=mode, cache_l1_size_mb=16,
              cache_l2_size_mb=16, auto_sync=False) as manager:
        random = np.random.default_rng(6)
        slab = manager.slab_bytes
        batch = torch.randn(256, 128)
        for _ in range(50):
            manager.update_embeddings(random.integers(0, 60_000, 256), batch)
        gc.collect()
        before = resident_bytes()
        for _ in range(300):
            manager.update_embeddings(random.integers(0, 60_000, 256), batch)
        assert resident_bytes() - before < 0.2 * slab  # The slab was resident from the start.


@pytest.mark.parametrize("updates", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_c7_memory_is_flat_with_sync_off(governor, tmp_path, updates):
    with make(tmp_path, range(5_000), auto_sync=False) as manager:
        manager.enable_auto_sync(False)
        rows, ids = torch.randn(4, 16, requires_grad=True), [1, 70, 3000, 4999]
        for _ in range(1000):
            manager.update_embeddings(ids, rows)
        gc.collect()
        before = resident_bytes()
        for _ in range(updates):
            manager.update_embeddings(ids, rows)
        assert resident_bytes() - before < 4 << 20
        assert manager.pending_updates_count == updates + 1000
        assert torch.equal(manager.get_embeddings(ids), rows.detach())


@MODES
def test_c8_every_update_of_a_batch_of_updates_is_kept(governor, tmp_path, mode):
    ids = list(range(90))
    rows = torch.randn(90, 16)
    manager = make(tmp_path, ids, mode=mode, sync_batch_size=10)
    for begin in range(0, 90, 10):  # Nine updates: one short of a sync.
        manager.update_embeddings(ids[begin:begin + 10], rows[begin:begin + 10])
    manager.force_sync_all_chunks()
    manager._table.commit_at_exit = False
    manager.close()
    with make(tmp_path, ids, mode=mode) as manager:
        assert torch.equal(manager.get_embeddings(ids), rows)


@MODES
def test_c9_what_is_saved_is_what_is_live(governor, tmp_path, mode):
    ids = sparse_ids(250, 9)
    with make(tmp_path, ids, mode=mode, auto_sync=False) as manager:
        manager.update_embeddings(ids[::3], torch.ones(len(ids[::3]), 16))
        live = manager.get_embeddings(ids)
        manager.save_final_embeddings(tmp_path / "final")
        held = {}
        for chunk in range(3):
            held.update(torch.load(tmp_path / f"final/embeddings_chunk_{chunk}.pt",
                                   weights_only=True))
        assert list(held) == ids and torch.equal(torch.stack(list(held.values())), live)
        # It went on where it was: a later update is in its own folder, not in the copy.
        assert manager.embeddings_dir == tmp_path / "run/e"
        manager.update_embeddings(ids[:1], torch.zeros(1, 16))
        manager.force_sync_all_chunks()
        again = torch.load(tmp_path / "final/embeddings_chunk_0.pt", weights_only=True)
        assert torch.equal(again[ids[0]], live[0])


@MODES
def test_c10_nothing_is_missing_in_either_mode(governor, tmp_path, mode):
    ids = sparse_ids(250, 10)
    with make(tmp_path, ids, mode=mode) as manager:
        manager.force_sync_all_chunks()
        assert manager.get_disk_usage_info()["dirty_chunks_count"] == 0
        with pytest.raises(KeyError):
            manager.update_embeddings([ids[0], 5], torch.ones(2, 16))
        before = manager.get_all_embeddings()[1]
        manager.update_chunk_embeddings(1, {ids[150]: torch.ones(16)})
        after = manager.get_all_embeddings()[1]
        changed = (after != before).any(dim=1).nonzero().flatten().tolist()
        assert changed == [150]
        manager.get_embedding_by_index(3)
        manager.create_checkpoint(tmp_path / "checkpoint")
        manager.get_optimizer_params()
        manager.freeze_embeddings(ids[:2])


@MODES
def test_c11_features_and_rows_pair_by_id(governor, tmp_path, mode):
    ids = sparse_ids(300, 11)
    random = np.random.default_rng(11)
    arrival = [int(one) for one in random.permutation(ids)]
    with FeatureManager(tmp_path / "f") as features:
        for chunk in range(3):
            part = arrival[chunk * 100:][:100]
            marks = (np.array(part) % 9973).astype(np.float32)[:, None]
            features.add_features_chunk(chunk, marks, -marks, None, part)
        with make(tmp_path, ids, mode=mode, feature_manager=features) as manager:
            for one in arrival:
                manager.update_embeddings([one], torch.full((1, 16), float(one % 9973)))
            for _ in range(10):
                wanted = [ids[at] for at in random.integers(0, 300, 64)]
                left = manager.get_embeddings(wanted)[:, 3]
                assert torch.equal(left, features.get_features(wanted)["img_features"][:, 0])
            for chunk in range(3):
                its, rows = manager.get_embeddings_by_chunk(chunk)
                held = features.get_features_by_chunk(chunk)
                assert its == held["sample_ids"]
                assert torch.equal(rows[:, 0], held["img_features"][:, 0])
            for position in (0, 150, 299):
                assert manager.get_embedding_by_index(position)[0] == ids[position] % 9973


@pytest.mark.parametrize("change", [{"ids": list(range(1, 201))}, {"dim": 8}, {"seed": 1},
                                    {"initialization_strategy": "uniform"}, {"factor": 2.0}])
def test_c12_what_belongs_to_another_table_is_refused(governor, tmp_path, change):
    asked = {"ids": list(range(200)), "dim": 16, **change}
    name = {"ids": "sample_ids", "dim": "embedding_dim"}.get(next(iter(change)), next(iter(change)))
    with make(tmp_path, list(range(200))) as manager:
        manager.store_imgtxt_template()
        manager.create_checkpoint(tmp_path / "checkpoint")
        rows = manager.get_embeddings(range(200))
    with pytest.raises(ValueError, match=name):
        make(tmp_path, **asked)  # The table itself.
    (tmp_path / "run/e").rename(tmp_path / "run/moved")
    with make(tmp_path, **asked) as manager:
        with pytest.raises(ValueError, match=name):
            manager.load_imgtxt_template()
        with pytest.raises(ValueError, match=name):
            manager.load_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "run/moved").rename(tmp_path / "run/back")
    with TrainableEmbeddingManager(range(200), 16, storage_mode="disk",
                                   embeddings_dir=tmp_path / "run/back") as manager:
        assert torch.equal(manager.get_embeddings(range(200)), rows)


def test_c12_a_damaged_template_changes_nothing(governor, tmp_path):
    with make(tmp_path, list(range(200))) as manager:
        folder = manager.store_imgtxt_template()
        file = next(path for path in os.listdir(folder) if path.startswith("rows"))
        with open(f"{folder}/{file}", "r+b") as damaged:
            damaged.seek(5000)
            damaged.write(b"?")
        manager.update_embeddings([3], torch.ones(1, 16))
        before = manager.get_all_embeddings()[1]
        with pytest.raises(plimsoll.CorruptError, match=file):
            manager.load_imgtxt_template()
        assert torch.equal(manager.get_all_embeddings()[1], before)


def test_c13_features_follow_the_request_and_missing_ones_are_errors(governor, tmp_path):
    ids = sparse_ids(200, 13)
    values = torch.randn(200, 4)
    with FeatureManager(tmp_path) as features:
        features.add_features_chunk(0, values[:100], None, None, ids[:100])
        features.add_features_chunk(1, values[100:], None, None, ids[100:])
        row_of = dict(zip(ids, values))
        first = [ids[at] for at in (150, 3, 3, 99, 100)]
        for wanted in (first, first[::-1], sorted(first)):  # The same set in three orders.
            found = features.get_features(wanted, ["img_features"], async_prefetch=True)
            assert torch.equal(found["img_features"], torch.stack([row_of[one] for one in wanted]))
        with pytest.raises(KeyError, match="12345"):
            features.get_features([ids[0], 12345])
        with pytest.raises(KeyError, match="txt_features"):
            features.get_features(ids[:1], ["txt_features"])
    with pytest.raises(ValueError, match="compression"):
        FeatureManager(tmp_path, config={"compression": "zip"})
    with FeatureManager(tmp_path / "packed", config={"compression": "lz4"}) as features:
        features.add_features_chunk(0, torch.ones(100, 512), None, None, range(100))
        found = features.get_features([7, 3], ["img_features"])
        assert torch.equal(found["img_features"], torch.ones(2, 512))
        stored = next((tmp_path / "packed").glob("store-*"))
        assert plimsoll.info(stored)["compression"] == "lz4"


def test_c13_reading_ahead_is_bounded_and_changes_no_answer(governor, tmp_path):
    values = torch.randn(3000, 64)
    with FeatureManager(tmp_path, config={"cache_l1_size_mb": 1, "cache_l2_size_mb": 1}) as features:
        features.add_features_chunk(0, values, None, None, range(3000))
        features.load_features()
        before, threads = leased_by_stores(governor), threading.active_count()
        answers = [features.prefetch(range(3000)) for _ in range(200)]
        assert answers.count(False) > 0 and threading.active_count() - threads <= 2
        for begin in range(0, 3000, 100):
            found = features.get_features(range(begin, begin + 100), async_prefetch=True)
            assert torch.equal(found["img_features"], values[begin:begin + 100])
        assert features.access_pattern() == "sequential"
        del found
        while features._under_way and not all(one.done() for one in features._under_way):
            time.sleep(0.01)
        gc.collect()
        assert leased_by_stores(governor) == before


@pytest.mark.parametrize("workers", [0, 4, 8])
def test_c14_workers_share_one_slab(governor, tmp_path, workers):
    values = np.random.default_rng(14).standard_normal((4000, 512)).astype(np.float32)
    with FeatureManager(tmp_path / "f", config={"cache_l1_size_mb": 2, "cache_l2_size_mb": 2}) as (
            features), make(tmp_path, range(4000), dim=512, cache_l1_size_mb=3,
                            cache_l2_size_mb=2) as manager:
        features.add_features_chunk(0, values, None, None, range(4000))
        features.load_features()
        leased = leased_by_stores(governor)
        wrong = []

        def work(seed):
            random = np.random.default_rng(seed)
            for _ in range(40):
                ids = random.integers(0, 4000, 32)
                found = features.get_features(ids)["img_features"]
                if not np.array_equal(found, values[ids]) or len(manager.get_embeddings(ids)) != 32:
                    wrong.append(seed)

        work(99)
        before = resident_bytes()
        crew = [threading.Thread(target=work, args=(seed,)) for seed in range(workers)]
        for one in crew:
            one.start()
        for one in crew:
            one.join()
        gc.collect()
        assert not wrong and leased_by_stores(governor) == leased
        # 9 MiB of slabs for any number of workers; a worker is a stack and a batch.
        assert resident_bytes() - before < (1 << 20) * (2 + workers)


def test_c15_features_that_nobody_asked_for_are_not_held(governor, tmp_path):
    count = 512
    with FeatureManager(tmp_path, config={"cache_l1_size_mb": 2, "cache_l2_size_mb": 2}) as features:
        features.add_features_chunk(
            0, np.ones((count, 64), np.float32), np.ones((count, 64), np.float32),
            np.ones((count, 77, 64), np.float32), range(count))  # 9.6 MiB of txt_full.
        features.load_features()
        gc.collect()
        before = governor.ledger().leased_bytes
        found = features.get_features(range(count), ["img_features", "txt_features"])
        assert list(found) == ["img_features", "txt_features"]
        assert governor.ledger().leased_bytes - before <= 2 * count * 64 * 4 + 4096
        assert before < 8 << 20


def test_c16_chunks_are_read_at_random(governor, tmp_path):
    with FeatureManager(tmp_path) as features:
        for chunk in (7, 2, 5):
            features.add_features_chunk(chunk, np.full((10, 2), chunk, np.float32), None, None,
                                        range(chunk * 10, chunk * 10 + 10))
        for chunk in (5, 2, 7, 5):
            held = features.get_chunk(chunk)
            assert held["sample_ids"] == list(range(chunk * 10, chunk * 10 + 10))
            assert (held["features"]["img_features"] == chunk).all()
        assert torch.equal(features.get_features([71, 20, 55])["img_features"][:, 0],
                           torch.tensor([7.0, 2.0, 5.0]))
        with pytest.raises(KeyError, match="chunk 3"):
            features.get_chunk(3)


def test_c17_a_million_ids_open_in_seconds(governor, tmp_path):
    ids = np.random.default_rng(17).permutation(4_000_000)[:1_000_000]
    for _ in range(2):  # Made, then opened again.
        begin = time.perf_counter()
        with make(tmp_path, ids, dim=2, cache_l1_size_mb=16, cache_l2_size_mb=16) as manager:
            assert manager.get_embeddings(ids[-3:]).shape == (3, 2)
        assert time.perf_counter() - begin < 20


def test_c17_a_sync_batch_size_of_zero_is_refused(governor, tmp_path):
    with pytest.raises(ValueError, match="1 syncs after every update"):
        make(tmp_path, [1, 2, 3], sync_batch_size=0)
