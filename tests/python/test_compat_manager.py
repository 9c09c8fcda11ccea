# SPDX-License-Identifier: Apache-2.0
"""TrainableEmbeddingManager: the whole API in both storage modes, and a plain dict as oracle."""
import inspect
import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import plimsoll
from plimsoll.compat import PRESETS, FeatureManager, TrainableEmbeddingManager, preset
from tests.support.leases import leased_by_stores

torch = pytest.importorskip("torch")
MODES = pytest.mark.parametrize("mode", ["disk", "memory"])
IDS = [int(one) for one in np.random.default_rng(5).permutation(4000)[:600] - 300]


def make(folder, mode="disk", ids=IDS, dim=8, **options):
    return TrainableEmbeddingManager(ids, dim, storage_mode=mode, embeddings_dir=folder / "run/e",
                                     **{"chunk_size": 100, "cache_l1_size_mb": 2,
                                        "cache_l2_size_mb": 2, **options})


@pytest.fixture
def manager(governor, tmp_path, request):
    with make(tmp_path, getattr(request, "param", "disk")) as one:
        yield one


BOTH = pytest.mark.parametrize("manager", ["disk", "memory"], indirect=True)


def equal(one, other):
    return np.array_equal(np.asarray(one), np.asarray(other))


@BOTH
def test_rows_come_back_as_tensors_that_are_copies(manager):
    rows = manager.get_embeddings(IDS[:5])
    assert rows.dtype == torch.float32 and rows.shape == (5, 8) and not rows.requires_grad
    kept = rows.clone()
    rows.fill_(9)
    assert equal(manager.get_embeddings(IDS[:5]), kept)


@BOTH
@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor,
                                  lambda ids: torch.tensor(ids, dtype=torch.int32),
                                  lambda ids: [torch.tensor(one) for one in ids],
                                  lambda ids: dict.fromkeys(ids)])
def test_ids_may_come_in_any_form(manager, form):
    wanted = [IDS[7], IDS[500], IDS[3]]
    assert equal(manager.get_embeddings(form(wanted)), manager.get_embeddings(wanted))


@BOTH
@pytest.mark.parametrize("form", [
    lambda rows: rows, lambda rows: rows.double(), lambda rows: rows.numpy(),
    lambda rows: rows.numpy().astype(np.float64), lambda rows: rows.tolist(),
    lambda rows: torch.nn.Parameter(rows), lambda rows: rows.T.contiguous().T])
def test_rows_may_come_in_any_form(manager, form):
    rows = torch.arange(16, dtype=torch.float32).reshape(2, 8)
    manager.update_embeddings([IDS[1], IDS[599]], form(rows))
    assert equal(manager.get_embeddings([IDS[1], IDS[599]]), rows)


# Of ids 0 … N−1 in order, a list of ints and a plain tensor take a shorter way.
@pytest.mark.parametrize("mode", ["disk", "memory"])
def test_a_list_of_ints_and_a_tensor_do_what_every_other_form_does(tmp_path, governor, mode):
    random = np.random.default_rng(31)
    with (make(tmp_path / "a", mode, ids=range(600), auto_sync=False) as short,
          make(tmp_path / "b", mode, ids=range(600), auto_sync=False) as long):
        forms = [lambda rows: rows, lambda rows: rows.double(), lambda rows: rows.T.contiguous().T,
                 lambda rows: rows.clone().requires_grad_(), lambda rows: rows.numpy(),
                 lambda rows: torch.nn.Parameter(rows)]
        for step in range(60):
            ids = random.integers(600, size=random.integers(0, 40)).tolist()
            rows = forms[step % len(forms)](torch.from_numpy(
                random.standard_normal((len(ids), 8), dtype=np.float32)))
            short.update_embeddings(ids, rows)
            long.update_embeddings(tuple(ids), rows.detach().numpy()
                                   if isinstance(rows, torch.Tensor) else rows)
            assert equal(short.get_embeddings(ids), long.get_embeddings(tuple(ids)))
            assert equal(short._dirty, long._dirty) and (short._dirty.any() or not ids)
            if step % 20 == 19:
                short.force_sync_all_chunks()
                long.force_sync_all_chunks()
                assert not short._dirty.any()
            assert short.pending_updates_count == long.pending_updates_count
        assert equal(short.get_all_embeddings()[1], long.get_all_embeddings()[1])
        counts = [one.get_cache_performance() for one in (short, long)]
        assert counts[0] == counts[1]


def test_a_list_of_something_else_than_ints_is_looked_at_one_by_one(tmp_path, governor):
    with make(tmp_path, ids=range(600)) as manager:
        rows = torch.ones(2, 8)
        for ids in ([True, 7], [np.int64(1), 7], [torch.tensor(1), torch.tensor(7)]):
            manager.update_embeddings(ids, rows)
            assert equal(manager.get_embeddings(ids), manager.get_embeddings([1, 7]))
            rows = rows + 1
        assert equal(manager.get_embeddings([7, 1]), torch.full((2, 8), 3.0))
        for ids in ([1, 1 << 63], [1, 7.0], [1, "7"], [1, None]):
            with pytest.raises(ValueError, match="sample_ids"):
                manager.get_embeddings(ids)
            with pytest.raises(ValueError, match="sample_ids"):
                manager.update_embeddings(ids, rows)
        for ids in ([1, 600], [1, -1]):
            with pytest.raises(KeyError, match=str(ids[1])):
                manager.get_embeddings(ids)
            with pytest.raises(KeyError, match=str(ids[1])):
                manager.update_embeddings(ids, rows)
        assert equal(manager.get_embeddings([7, 1]), torch.full((2, 8), 3.0))


def test_frozen_rows_and_rows_an_optimizer_holds_keep_to_the_longer_way(tmp_path, governor):
    with make(tmp_path, ids=range(600)) as manager:
        before = manager.get_embeddings([3, 4]).clone()
        manager.freeze_embeddings([3])
        manager.update_embeddings([3, 4], torch.ones(2, 8))
        assert equal(manager.get_embeddings([3, 4]), torch.stack([before[0], torch.ones(8)]))
        [parameter] = manager.get_optimizer_params()
        with torch.no_grad():
            parameter[5] = 2.0
        assert equal(manager.get_embeddings([5, 4]), torch.stack([torch.full((8,), 2.0),
                                                                  torch.ones(8)]))


@BOTH
def test_wrong_arguments_are_named_and_change_nothing(manager):
    before = manager.get_all_embeddings()[1]
    rows = torch.ones(2, 8)
    with pytest.raises(KeyError, match="99999"):
        manager.update_embeddings([IDS[0], 99999], rows)
    with pytest.raises(KeyError, match="99999"):
        manager.get_embeddings([99999])
    for ids, values, name in (([IDS[0]], rows, "embeddings"), ([0.5, 1], rows, "sample_ids"),
                              (["a", "b"], rows, "sample_ids"), ("ab", rows, "sample_ids"),
                              (IDS[:2], rows.int(), "embeddings"),
                              (np.ones((2, 1), np.int64), rows, "sample_ids")):
        with pytest.raises(ValueError, match=name):
            manager.update_embeddings(ids, values)
    assert equal(manager.get_all_embeddings()[1], before)
    assert manager.pending_updates_count == 0


@BOTH
def test_all_and_by_index_follow_the_order_given(manager):
    ids, rows = manager.get_all_embeddings()
    assert ids == IDS == manager.sample_ids and len(manager) == 600
    assert equal(rows, manager.get_embeddings(IDS))
    assert equal(manager.get_embedding_by_index(599), rows[599])
    assert equal(manager.get_embedding_by_index(-600), rows[0])
    with pytest.raises(IndexError, match="600"):
        manager.get_embedding_by_index(600)


@BOTH
def test_chunks_are_consecutive_samples(manager):
    assert manager.num_chunks == 6
    ids, rows = manager.get_embeddings_by_chunk(2)
    assert ids == IDS[200:300] and equal(rows, manager.get_embeddings(ids))
    manager.update_embeddings_by_chunk(2, [IDS[250], IDS[201]], torch.ones(2, 8))
    now = manager.get_embeddings_by_chunk(2)[1]
    assert equal(now[50], torch.ones(8)) and equal(now[0], rows[0])
    with pytest.raises(ValueError, match=str(IDS[0])):
        manager.update_embeddings_by_chunk(2, [IDS[0]], torch.ones(1, 8))
    with pytest.raises(IndexError):
        manager.get_embeddings_by_chunk(6)
    manager.update_chunk_embeddings(5, {IDS[555]: torch.full((8,), 3.0)})
    held = manager.get_chunk_embeddings(5)
    assert list(held) == IDS[500:] and equal(held[IDS[555]], torch.full((8,), 3.0))
    manager.update_chunk_embeddings(5, torch.zeros(100, 8))
    assert not manager.get_embeddings(IDS[500:]).any()


@BOTH
def test_commits_come_every_sync_batch_size_updates(manager):
    manager.sync_batch_size = 4
    for _ in range(7):
        manager.update_embeddings(IDS[:3], torch.randn(3, 8))
    info = manager.get_disk_usage_info()
    assert info["performance_stats"]["sync_operations"] == 1
    assert info["pending_updates_count"] == 3 and info["dirty_chunks_count"] == 1
    manager.sync_dirty_chunks_to_disk()
    manager.force_sync_all_chunks()  # Nothing is left: no commit.
    info = manager.get_disk_usage_info()
    assert info["performance_stats"]["sync_operations"] == 2
    assert info["pending_updates_count"] == info["dirty_chunks_count"] == 0
    manager.enable_auto_sync(False)
    for _ in range(20):
        manager.update_embeddings(IDS[::150], torch.randn(4, 8))
    info = manager.get_disk_usage_info()
    assert info["auto_sync"] is False and info["pending_updates_count"] == 20
    assert info["performance_stats"]["sync_operations"] == 2
    assert info["dirty_chunks_count"] == 4


@BOTH
def test_every_statistics_key_is_there_and_adds_up(manager):
    manager.get_embeddings(IDS[:50])
    manager.get_all_embeddings()  # The manager's own reading is no request.
    performance = manager.get_cache_performance()
    assert set(performance) == {"cache_hit_rate", "total_requests", "disk_load_ratio",
                                "sync_operations", "l1_usage_percent", "l2_usage_percent"}
    assert performance["total_requests"] == 50
    info = manager.get_disk_usage_info()
    assert set(info) == {"embeddings_dir", "total_size_mb", "num_chunks", "chunk_details",
                         "storage_mode", "auto_sync", "sync_batch_size", "cache_info",
                         "performance_stats", "dirty_chunks_count", "pending_updates_count"}
    assert set(info["performance_stats"]) == {"cache_hits", "cache_misses", "disk_loads",
                                              "sync_operations"}
    stats = info["performance_stats"]
    assert stats["cache_hits"] + stats["cache_misses"] == 50
    assert performance["cache_hit_rate"] == stats["cache_hits"] / 50
    assert list(info["chunk_details"]) == list(range(6))
    for detail in info["chunk_details"].values():
        assert set(detail) == {"file", "size_mb", "sample_count"} and detail["sample_count"] == 100
    assert info["total_size_mb"] > 0 and info["embeddings_dir"].endswith("run/e")
    cache = info["cache_info"]
    assert set(cache) == {"l1_items", "l1_size_mb", "l1_max_mb", "l2_items", "l2_size_mb",
                          "l2_max_mb", "l3_enabled", "stats", "hit_rate"}
    assert set(cache["stats"]) == {"hits", "misses", "evictions"}
    assert cache == manager.cache.get_cache_info() and cache["l3_enabled"] is True
    assert cache["l1_items"] + cache["l2_items"] == 600  # A small table is in memory at once.


@BOTH
def test_clearing_and_eviction_lose_nothing_and_counters_go_on(manager, monkeypatch):
    rows = torch.randn(600, 8)
    manager.update_embeddings(IDS, rows)
    manager.clear_chunk_cache()
    assert manager.pending_updates_count == 0
    assert equal(manager.get_embeddings(IDS), rows)
    manager.cache.clear_cache()
    assert manager.get_cache_performance()["total_requests"] == 1200
    monkeypatch.setattr("plimsoll.compat._reports.system_memory", lambda: (10.0, 50.0))
    assert manager.cache.adaptive_eviction() is False
    monkeypatch.setattr("plimsoll.compat._reports.system_memory", lambda: (99.0, 0.1))
    before = manager.slab_bytes
    manager.update_embeddings(IDS[:9], rows[:9] + 1)
    rows[:9] += 1
    if manager.cache.adaptive_eviction():
        assert manager.slab_bytes < before
    assert equal(manager.get_embeddings(IDS), rows)
    manager.clear_chunk_cache()
    assert manager.slab_bytes == before


@BOTH
@pytest.mark.parametrize("batch_size, expected", [(4, 5), (32, 8), (64, 16), (4096, 20)])
def test_optimize_cache_settings_follows_the_formula(manager, batch_size, expected):
    manager.optimize_cache_settings(batch_size)
    assert manager.sync_batch_size == expected


@BOTH
def test_frozen_rows_stay(manager):
    before = manager.get_embeddings(IDS[:4])
    manager.freeze_embeddings([IDS[1], IDS[3]])
    manager.update_embeddings(IDS[:4], torch.ones(4, 8))
    now = manager.get_embeddings(IDS[:4])
    assert equal(now[[1, 3]], before[[1, 3]]) and equal(now[[0, 2]], torch.ones(2, 8))
    manager.unfreeze_embeddings([IDS[1]])
    manager.freeze_embeddings()
    manager.update_embeddings(IDS[:4], torch.zeros(4, 8))
    assert equal(manager.get_embeddings(IDS[:4]), now)
    with pytest.raises(ValueError, match="frozen"):
        manager.unfreeze_embeddings([IDS[0]])
    manager.unfreeze_embeddings()
    manager.update_embeddings(IDS[:4], torch.zeros(4, 8))
    assert not manager.get_embeddings(IDS[:4]).any()
    with pytest.raises(KeyError, match="99999"):
        manager.freeze_embeddings([99999])


@BOTH
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_on_the_parameter_moves_the_rows(manager, optimizer):
    manager.freeze_embeddings([IDS[2]])
    frozen = manager.get_embeddings([IDS[2]])
    (parameter,) = manager.get_optimizer_params()
    assert manager.get_optimizer_params()[0] is parameter
    assert equal(parameter.detach(), manager.get_all_embeddings()[1])
    steps = optimizer([parameter], lr=0.1)
    for _ in range(3):
        steps.zero_grad()
        (parameter ** 2).sum().backward()
        steps.step()
    assert equal(manager.get_embeddings(IDS[3:]), parameter.detach()[3:])
    assert equal(manager.get_embeddings([IDS[2]]), frozen)
    manager.update_embeddings(IDS[:1], torch.full((1, 8), 7.0))  # Seen by the parameter too.
    assert equal(parameter.detach()[0], torch.full((8,), 7.0))
    manager.force_sync_all_chunks()
    expected = manager.get_all_embeddings()[1]
    manager.release_optimizer_params()
    assert equal(manager.get_all_embeddings()[1], expected)
    assert equal(manager.get_embeddings([IDS[2]]), frozen)


@BOTH
def test_neighbours_similarities_and_statistics_match_numpy(manager):
    random = np.random.default_rng(8)
    rows = random.standard_normal((600, 8)).astype(np.float32)
    rows[5] = 0
    manager.update_embeddings(IDS, rows)
    unit = rows.astype(np.float64) / np.maximum(np.linalg.norm(rows, axis=1), 1e-30)[:, None]
    cosines = unit @ unit.T
    assert np.allclose(manager.get_similarity_matrix(), cosines, atol=1e-5)
    part = manager.get_similarity_matrix(IDS[10:20])
    assert np.allclose(part, cosines[10:20, 10:20], atol=1e-5)
    found = manager.get_nearest_neighbors(IDS[40], k=7)
    others = np.delete(np.arange(600), 40)
    best = others[np.argsort(-cosines[40, others], kind="stable")][:7]
    assert [one for one, _ in found] == [IDS[at] for at in best]
    assert np.allclose([value for _, value in found], cosines[40, best])
    assert len(manager.get_nearest_neighbors(IDS[0], k=5000)) == 599
    facts = manager.get_embedding_statistics()
    assert facts["num_embeddings"] == 600 and facts["embedding_dim"] == 8
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    for name, value in (("mean", rows.mean()), ("std", rows.std()), ("min", rows.min()),
                        ("max", rows.max()), ("mean_norm", norms.mean()),
                        ("std_norm", norms.std()), ("min_norm", 0.0), ("max_norm", norms.max())):
        assert facts[name] == pytest.approx(value, abs=1e-6), name


@MODES
def test_everything_is_there_after_reopening(governor, tmp_path, mode):
    rows = torch.randn(600, 8)
    with make(tmp_path, mode, sync_batch_size=1000) as manager:
        manager.update_embeddings(IDS, rows)
    with make(tmp_path, mode, chunk_size=7) as manager:  # close() syncs with auto_sync.
        assert equal(manager.get_embeddings(IDS), rows) and manager.num_chunks == 86
        manager.enable_auto_sync(False)
        manager.update_embeddings(IDS[:1], torch.zeros(1, 8))
    other_order = IDS[::-1]
    with make(tmp_path, mode, ids=other_order) as manager:  # Without it, what was synced.
        assert equal(manager.get_embeddings(IDS), rows)
        assert manager.sample_ids == other_order
        assert equal(manager.get_embedding_by_index(0), rows[-1])
        assert equal(manager.get_all_embeddings()[1], rows.flip(0))


@MODES
def test_s47_an_unknown_string_is_named_and_not_its_hash(governor, tmp_path, mode):
    names = [f"COCO_{at}" for at in range(10)]
    with make(tmp_path, mode, ids=names) as manager:
        for work in (lambda: manager.get_embeddings(["COCO_1", "nobody", "no one"]),
                     lambda: manager.get_embeddings(np.array(["COCO_1", "nobody"])),
                     lambda: manager.update_embeddings(["nobody"], torch.zeros(1, 8)),
                     lambda: manager.update_embeddings_by_chunk(0, ["nobody"], torch.zeros(1, 8)),
                     lambda: manager.freeze_embeddings(["nobody"]), lambda: manager.unfreeze_embeddings(["nobody"]),
                     lambda: manager.get_nearest_neighbors("nobody"), lambda: manager.get_similarity_matrix(["nobody"])):
            with pytest.raises(KeyError, match="there is no sample with id 'nobody'$"):
                work()


@MODES
def test_string_ids_work_like_integers(governor, tmp_path, mode):
    names = [f"COCO_val_{at:06d}é" for at in range(300)] + ["", "x\ny"]
    options = {"ids": names, "mode": mode}
    rows = torch.randn(302, 8)
    with make(tmp_path, **options) as manager:
        begin = manager.get_embeddings(names)
        manager.update_embeddings(names[::-1], rows.flip(0))
        assert manager.sample_ids == names
        ids, chunk = manager.get_embeddings_by_chunk(3)
        assert ids == names[300:] and equal(chunk, rows[300:])
        assert manager.get_nearest_neighbors("x\ny", k=1)[0][0] in names
        with pytest.raises(KeyError):
            manager.get_embeddings(["nobody"])
        with pytest.raises(ValueError, match="strings"):
            manager.get_embeddings([3])
        saved = manager.save_final_embeddings(tmp_path / "saved")
    with make(tmp_path, **options) as manager:
        assert equal(manager.get_embeddings(names), rows)
    held = torch.load(f"{saved}/embeddings_chunk_3.pt", weights_only=True)
    assert list(held) == names[300:]
    shuffled = names[::-1]
    with make(tmp_path / "other", mode, ids=shuffled) as manager:
        assert equal(manager.get_embeddings(names), begin)  # Seeded by the name, not by order.


@pytest.mark.parametrize("strategy, scale", [("zeros", 0), ("normal", 0.01), ("uniform", 0.01),
                                             ("xavier", (6 / 65) ** 0.5),
                                             ("kaiming", (6 / 64) ** 0.5)])
def test_rows_begin_by_seed_and_id_alone(governor, tmp_path, strategy, scale):
    def begin(folder, ids, seed=1):
        with make(tmp_path / folder, ids=ids, dim=64, initialization_strategy=strategy,
                  seed=seed) as manager:
            return np.asarray(manager.get_embeddings(IDS))

    rows = begin("a", IDS)
    assert equal(rows, begin("b", sorted(IDS) + [10**6]))
    if strategy == "zeros":
        assert not rows.any()
        return
    assert not equal(rows, begin("c", IDS, seed=2))
    if strategy == "normal":
        assert rows.std() == pytest.approx(scale, rel=0.02)
    else:
        assert np.abs(rows).max() <= scale and rows.std() == pytest.approx(
            scale / 3 ** 0.5, rel=0.02)


@MODES
def test_a_template_and_a_checkpoint_bring_rows_back(governor, tmp_path, mode):
    rows = torch.randn(600, 8)
    with make(tmp_path, mode) as manager:
        manager.update_embeddings(IDS, rows)
        folder = manager.store_imgtxt_template()
        assert folder == str(tmp_path / "template_embeddings/imgtxt")
        manager.freeze_embeddings(IDS[:3])
        manager.sync_batch_size = 77
        manager.create_checkpoint(tmp_path / "checkpoint")
        manager.create_checkpoint(tmp_path / "checkpoint")  # Replaced, not mixed.
        assert len(list((tmp_path / "checkpoint").iterdir())) == 3
        manager.unfreeze_embeddings()
        manager.sync_batch_size = 5
        manager.update_embeddings(IDS, torch.zeros(600, 8))
        manager.load_imgtxt_template()
        assert equal(manager.get_embeddings(IDS), rows)
        manager.update_embeddings(IDS, torch.zeros(600, 8))
        manager.load_checkpoint(tmp_path / "checkpoint")
        assert equal(manager.get_embeddings(IDS), rows) and manager.sync_batch_size == 77
        manager.update_embeddings(IDS[:6], torch.zeros(6, 8))
        assert equal(manager.get_embeddings(IDS[:3]), rows[:3])
        assert not manager.get_embeddings(IDS[3:6]).any()
        with pytest.raises(ValueError, match="template"):
            manager.load_checkpoint(folder)
        with pytest.raises(KeyError, match="nowhere"):
            manager.load_checkpoint(tmp_path / "nowhere")


@MODES
def test_the_originals_chunk_files_are_taken_over(governor, tmp_path, mode):
    rows = torch.randn(600, 8)
    folder = tmp_path / "run/e"
    folder.mkdir(parents=True)
    for chunk in range(12):
        part = slice(chunk * 50, chunk * 50 + 50)
        torch.save({one: row.clone() for one, row in zip(IDS[part], rows[part])},
                   folder / f"embeddings_chunk_{chunk}.pt")
    with make(tmp_path, mode) as manager:
        assert equal(manager.get_embeddings(IDS), rows)
        manager.update_embeddings(IDS[:1], torch.zeros(1, 8))
    with make(tmp_path, mode) as manager:  # Once: the table is what counts now.
        assert not manager.get_embeddings(IDS[:1]).any()
        manager.load_phase_1_template(folder)
        assert equal(manager.get_embeddings(IDS), rows)
        manager.update_embeddings(IDS, torch.zeros(600, 8))
        with pytest.raises(ValueError, match="embeddings_chunk_0.pt"):
            torch.save({77777: torch.zeros(8)}, folder / "embeddings_chunk_0.pt")
            manager.load_phase_1_template(folder)
        with pytest.raises(ValueError, match="no chunk file holds"):
            (folder / "embeddings_chunk_0.pt").unlink()
            manager.load_phase_1_template(folder)
        assert not manager.get_embeddings(IDS).any()  # All is looked at before a row changes.


class Evil:
    def __reduce__(self):
        return os.mkdir, (Evil.target,)


def test_a_chunk_file_runs_no_code(governor, tmp_path):
    folder = tmp_path / "run/e"
    folder.mkdir(parents=True)
    Evil.target = str(tmp_path / "was-run")
    torch.save({0: Evil()}, folder / "embeddings_chunk_0.pt")
    with pytest.raises(plimsoll.CorruptError, match="embeddings_chunk_0.pt"):
        make(tmp_path)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_open_and_hold_what_they_promise(governor, tmp_path, name):
    table = {"quick_fix": (128, 256, False, False, 1), "balanced": (256, 512, True, True, 10),
             "high": (512, 1024, True, True, 20), "low": (64, 128, True, True, 5),
             "debug": (128, 256, True, True, 5), "small": (32, 64, False, True, 1),
             "large": (1024, 2048, True, True, 50)}
    with TrainableEmbeddingManager.from_preset(name, IDS, 8, storage_mode="disk") as manager:
        assert (manager.cache_l1_size_mb, manager.cache_l2_size_mb, manager.enable_l3_cache,
                manager.auto_sync, manager.sync_batch_size) == table[name]
        assert manager.chunk_size == (50 if name == "small" else 600)
    assert preset(name, chunk_size=9)["chunk_size"] == 9
    with pytest.raises(ValueError, match="quick_fix"):
        preset("fast")


def test_constructor_and_methods_are_the_originals():
    names = list(inspect.signature(TrainableEmbeddingManager).parameters)
    assert names[:13] == [
        "sample_ids", "embedding_dim", "device", "initialization_strategy", "storage_mode",
        "embeddings_dir", "chunk_size", "feature_manager", "auto_sync", "cache_l1_size_mb",
        "cache_l2_size_mb", "enable_l3_cache", "sync_batch_size"]
    for name in """get_embeddings get_embedding_by_index get_all_embeddings update_embeddings
            get_embeddings_by_chunk update_embeddings_by_chunk get_chunk_embeddings
            update_chunk_embeddings sync_dirty_chunks_to_disk force_sync_all_chunks enable_auto_sync
            clear_chunk_cache optimize_cache_settings get_cache_performance get_disk_usage_info
            save_final_embeddings save_embeddings_to_new_folder store_imgtxt_template
            load_imgtxt_template load_phase_1_template get_similarity_matrix get_nearest_neighbors
            get_embedding_statistics create_checkpoint load_checkpoint get_optimizer_params
            freeze_embeddings unfreeze_embeddings""".split():
        assert callable(getattr(TrainableEmbeddingManager, name)), name


@pytest.mark.parametrize("wrong", [
    {"sample_ids": []}, {"sample_ids": [1, 2, 1]}, {"sample_ids": ["a", "b", "a"]},
    {"sample_ids": ["a", 1]}, {"sample_ids": 7}, {"embedding_dim": 0}, {"storage_mode": "cloud"},
    {"initialization_strategy": "magic"}, {"chunk_size": 0}, {"batch_size": 0}, {"seed": -1},
    {"cache_l1_size_mb": -1}, {"sync_batch_size": 0}, {"initialization_strategy": "imgtxt"}])
def test_wrong_constructor_arguments_are_named(governor, tmp_path, wrong):
    with pytest.raises(ValueError, match="feature_manager" if "imgtxt" in wrong.values()
                       else next(iter(wrong))):
        TrainableEmbeddingManager(**{"sample_ids": IDS, "embedding_dim": 8,
                                     "embeddings_dir": tmp_path / "e", **wrong})


def test_a_slab_too_small_is_refused_with_the_option_to_raise(governor, tmp_path):
    with pytest.raises(plimsoll.BudgetExceeded, match="cache_l1_size_mb") as caught:
        make(tmp_path, cache_l1_size_mb=0.1, cache_l2_size_mb=0)
    assert caught.value.requested_bytes > 1 << 17
    with pytest.raises(plimsoll.BudgetExceeded, match="storage_mode='disk'"):
        make(tmp_path / "large", "memory", ids=range(3_000_000), dim=512)


def test_the_blocks_it_prints_say_what_is_so(governor, tmp_path, capsys):
    with make(tmp_path, chunk_size=None, batch_size=64, verbose=True, sync_batch_size=2) as manager:
        text = capsys.readouterr().out
        for line in ("Auto-optimized embedding chunk size: 256 (4x batch_size)", "L1 cache: 2MB",
                     "L2 cache: 2MB", "L3 cache: enabled", "Sync batch size: 2", "Chunk size: 256",
                     "Memory usage before training: "):
            assert line in text
        manager.get_embeddings(IDS[:64])
        manager.print_performance(4)
        assert capsys.readouterr().out == ""
        manager.print_performance(5)
        text = capsys.readouterr().out
        for line in ("=== Embedding Cache Performance (Epoch 5) ===", "Cache hit rate: 100.0%",
                     "Total cache requests: 64", "Disk load ratio: 0.0%", "Sync operations: 0",
                     "L1 cache usage: ", "L2 cache usage: ", "Disk usage: ",
                     "Memory usage after epoch 5: ", "sync_batch_size is 2"):
            assert line in text
        manager.enable_auto_sync(False)
        manager.update_embeddings(IDS[:1], torch.zeros(1, 8))
        assert any("force_sync_all_chunks" in one for one in manager.advice())


def test_advice_names_the_cache_that_would_do(governor, tmp_path):
    ids = range(40_000)
    with make(tmp_path, ids=ids, dim=64, cache_l1_size_mb=1, cache_l2_size_mb=1) as manager:
        random = np.random.default_rng(2)
        for _ in range(20):
            manager.get_embeddings(random.integers(0, 40_000, 500))
        words = "\n".join(manager.advice())
        assert "cache_l1_size_mb + cache_l2_size_mb = " in words
        wanted = float(words.split("cache_l2_size_mb = ")[1].split()[0])
    with make(tmp_path, ids=ids, dim=64, cache_l1_size_mb=wanted, cache_l2_size_mb=1) as manager:
        manager.get_embeddings(range(40_000))
        assert manager.get_cache_performance()["cache_hit_rate"] == 1.0


def test_without_a_folder_it_cleans_up_after_itself(governor):
    manager = TrainableEmbeddingManager(IDS, 8)
    folder = manager.embeddings_dir
    manager.store_imgtxt_template()
    manager.load_imgtxt_template()
    assert folder.exists() and manager.template_dir.is_relative_to(folder.parent.parent)
    manager.close()
    manager.close()
    assert not folder.parent.parent.exists()
    with pytest.raises(ValueError, match="closed"):
        manager.get_embeddings(IDS[:1])


def test_a_forgotten_manager_syncs_and_gives_its_slab_back(governor, tmp_path):
    before = leased_by_stores(governor)
    manager = make(tmp_path)
    manager.update_embeddings(IDS[:2], torch.ones(2, 8))
    del manager
    assert leased_by_stores(governor) == before
    with make(tmp_path) as manager:
        assert equal(manager.get_embeddings(IDS[:2]), torch.ones(2, 8))


def test_a_program_without_a_governor_gets_one(tmp_path):
    assert plimsoll.Governor.current() is None
    with make(tmp_path) as first:
        one = plimsoll.Governor.current()
        assert one is first._governor
        with make(tmp_path / "second") as second:
            assert second._governor is one


def test_a_forked_child_is_told_to_open_its_own(manager):
    child = os.fork()
    if child == 0:
        try:
            manager.get_embeddings(IDS[:1])
        except RuntimeError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_chunks_are_the_features_chunks_when_they_hold_the_same_samples(governor, tmp_path):
    random = np.random.default_rng(4)
    arrival = [int(one) for one in random.permutation(IDS)]
    with FeatureManager(tmp_path / "f", governor=governor) as features:
        for chunk in range(3):
            part = arrival[chunk * 200:chunk * 200 + 200]
            features.add_features_chunk(chunk, np.array(part, np.float32)[:, None], None, None, part)
        with make(tmp_path, feature_manager=features) as manager:
            assert manager.num_chunks == 3
            ids, _ = manager.get_embeddings_by_chunk(1)
            assert ids == arrival[200:400] == features.get_chunk(1)["sample_ids"]
            manager.update_embeddings_by_chunk(1, ids[:3], torch.ones(3, 8))
            info = manager.get_disk_usage_info()
            assert info["dirty_chunks_count"] == 1
            assert [one["sample_count"] for one in info["chunk_details"].values()] == [200] * 3
            manager.save_final_embeddings(tmp_path / "saved")
            held = torch.load(tmp_path / "saved/embeddings_chunk_1.pt", weights_only=True)
            assert list(held) == ids
        with make(tmp_path / "other", ids=IDS[:500], feature_manager=features) as manager:
            assert manager.num_chunks == 5  # Other samples: its own chunks.


def test_without_torch_rows_are_numpy_arrays(tmp_path):
    code = f"""
import sys
sys.modules["torch"] = None
import numpy as np
from plimsoll.compat import EmbeddingScheduler, FeatureManager, TrainableEmbeddingManager
with FeatureManager({str(tmp_path / "f")!r}) as features:
    features.add_features_chunk(0, np.ones((9, 4), np.float32), None, None, range(9))
    with TrainableEmbeddingManager(range(9), 4, initialization_strategy="img", seed=3,
                                   feature_manager=features) as manager:
        rows = manager.get_embeddings([3, 4])
        assert type(rows) is np.ndarray and rows.any()
        manager.update_embeddings([3], rows[:1] + 1)
        assert np.array_equal(manager.get_embeddings([3]), rows[:1] + 1)
        scheduler = EmbeddingScheduler(manager)
        scheduler.add_regularizer("l2", weight=1.0)
        scheduler.apply(range(9), 0.1)
        for call in (manager.get_optimizer_params,
                     lambda: manager.save_final_embeddings({str(tmp_path / "s")!r})):
            try:
                call()
            except ImportError as error:
                print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("needs torch") == 2


IDS_DRAWN = st.lists(st.sampled_from(IDS[:40]), min_size=0, max_size=6)
STEPS = st.lists(st.one_of(
    st.tuples(st.just("update"), IDS_DRAWN), st.tuples(st.just("get"), IDS_DRAWN),
    st.tuples(st.just("chunk"), st.integers(0, 3)), st.tuples(st.just("freeze"), IDS_DRAWN),
    st.tuples(st.just("unfreeze"), IDS_DRAWN), st.tuples(st.just("sync"), st.none()),
    st.tuples(st.just("clear"), st.none()), st.tuples(st.just("reopen"), st.none()),
    st.tuples(st.just("all"), st.none())), max_size=25)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.integers(0, 2**32 - 1), st.sampled_from(["disk", "memory"]), st.integers(1, 5))
def test_any_sequence_of_calls_is_like_a_dict(governor, steps, seed, mode, sync):
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        def fresh():
            return TrainableEmbeddingManager(
                IDS[:40], 4, storage_mode=mode, embeddings_dir=folder, chunk_size=11,
                cache_l1_size_mb=1, cache_l2_size_mb=1, sync_batch_size=sync,
                initialization_strategy="zeros", governor=governor)

        manager, frozen = fresh(), set()
        oracle = {one: np.zeros(4, np.float32) for one in IDS[:40]}
        try:
            for step, argument in steps:
                if step in ("update", "chunk"):
                    ids = argument if step == "update" else IDS[:40][argument * 11:argument * 11 + 11]
                    rows = random.standard_normal((len(ids), 4)).astype(np.float32)
                    if step == "update":
                        manager.update_embeddings(ids, rows)
                    else:
                        manager.update_chunk_embeddings(argument, rows)
                    for one, row in zip(ids, rows):
                        if one not in frozen:
                            oracle[one] = row
                elif step == "get":
                    for one, row in zip(argument, manager.get_embeddings(argument)):
                        assert equal(row, oracle[one])
                elif step in ("freeze", "unfreeze"):
                    getattr(manager, f"{step}_embeddings")(argument)
                    frozen = frozen | set(argument) if step == "freeze" else frozen - set(argument)
                elif step == "sync":
                    manager.sync_dirty_chunks_to_disk()
                elif step == "clear":
                    manager.clear_chunk_cache()
                elif step == "reopen":
                    manager.close()
                    manager, frozen = fresh(), set()
                else:
                    assert equal(manager.get_all_embeddings()[1], np.stack(list(oracle.values())))
            assert equal(manager.get_all_embeddings()[1], np.stack(list(oracle.values())))
        finally:
            manager.close()
