# SPDX-License-Identifier: Apache-2.0
"""SampleOrder, Split and Loader."""
import time

import numpy as np
import pytest

import plimsoll


@pytest.fixture
def store(governor, tmp_path):
    """203 records; x of id i is i, three records a group."""
    ids = np.arange(203, dtype=np.int64)[::-1].copy()
    with plimsoll.FeatureWriter(governor, tmp_path / "d", {
            "x": ("float32", (2,)), "y": ("int32", ())}, grouped=True) as writer:
        writer.append(ids, x=np.stack([ids, ids], 1).astype(np.float32), y=ids.astype(np.int32),
                      groups=np.arange(203, dtype=np.int64) // 3)
    return plimsoll.FeatureStore.open(governor, tmp_path / "d", cache_bytes="4MiB")


def ids_of(batches):
    return [batch.ids.tolist() for batch in batches]


def test_sample_order_is_a_permutation_and_has_an_inverse():
    order = plimsoll.SampleOrder(1000, seed=5, epoch=2)
    positions = np.arange(1000)
    samples = order.at(positions)
    assert sorted(samples.tolist()) == positions.tolist() and len(order) == 1000
    assert order.position_of(samples).tolist() == positions.tolist()
    assert order.at(17) == samples[17] and order.position_of(order.at(17)) == 17
    assert list(order) == samples.tolist()
    assert not np.array_equal(plimsoll.SampleOrder(1000, seed=5, epoch=3).at(positions), samples)


@pytest.mark.parametrize("call", [
    lambda o: o.at(10), lambda o: o.at(-1), lambda o: o.at([3, 10]), lambda o: o.position_of(10),
    lambda o: plimsoll.SampleOrder(-1), lambda o: o.at("x"), lambda o: o.at([0.5])])
def test_sample_order_checks_its_range(call):
    with pytest.raises(ValueError):
        call(plimsoll.SampleOrder(10))


def test_an_epoch_holds_every_record_once(governor, store):
    loader = plimsoll.Loader.open(governor, store, batch_rows=20, queue_bytes="1MiB", seed=7)
    batches = list(loader.epoch(0))
    assert [len(batch.ids) for batch in batches] == [20] * 10 + [3]
    assert sorted(sum(ids_of(batches), [])) == list(range(203))
    assert [batch.ends_epoch for batch in batches] == [False] * 10 + [True]
    assert [batch.position for batch in batches] == list(range(0, 203, 20))
    assert len(loader) == 11
    for batch in batches:  # Kept batches hold their own copies.
        assert np.array_equal(batch["x"][:, 0], batch.ids.astype(np.float32))
        assert np.array_equal(batch["y"], batch.ids)
        assert batch.groups.shape == batch.ids.shape


def test_batches_do_not_depend_on_threads(governor, store):
    def epochs(threads):
        with plimsoll.Loader.open(governor, store, batch_rows=16, seed=3, loader_threads=threads) as one:
            return [ids_of(one.epoch(epoch)) for epoch in range(2)]

    first = epochs(1)
    assert first == epochs(3)
    assert first[0] != first[1]


def test_plain_iteration_goes_on_with_the_next_epoch(governor, store):
    loader = plimsoll.Loader.open(governor, store, batch_rows=50, seed=3)
    first, second = list(loader), list(loader)
    assert [batch.epoch for batch in first + second] == [0] * 5 + [1] * 5
    assert ids_of(loader.epoch(0)) == ids_of(first)
    assert ids_of(loader) == ids_of(second)


def test_state_and_seek_resume_exactly(governor, store, tmp_path):
    loader = plimsoll.Loader.open(governor, store, batch_rows=32, seed=3)
    assert loader.state == plimsoll.LoaderState(3, 0, 0)
    loader.next(), loader.next()
    state = loader.state
    rest = ids_of(loader)
    loader.seek(state)
    assert ids_of(loader) == rest
    loader.close()
    with plimsoll.Loader.open(governor, tmp_path / "d", batch_rows=32, state=tuple(state),
                              cache_bytes="4MiB") as again:
        assert ids_of(again) == rest
    with pytest.raises(ValueError, match="closed"):
        loader.next()


def test_r33_drop_last_columns_and_upcoming_ids(governor, store):
    loader = plimsoll.Loader.open(governor, store, batch_rows=20, seed=1, drop_last=True,
                                  columns=["y"])
    batch = loader.next()
    assert list(batch) == ["y"]
    assert loader.upcoming_ids().tolist() == loader.next().ids.tolist()
    assert [len(ids) for ids in ids_of(loader.epoch(4))] == [20] * 10
    began = time.perf_counter_ns()
    with plimsoll.Loader.open(governor, store, batch_rows=20, columns=["y"],
                              queue_bytes=3 * loader.slot_bytes) as small:
        assert small.slots == 3 and small.slot_bytes == loader.slot_bytes >= 20 * 4
        assert small.stall_ns == 0 and len(list(small)) == 11
        assert 0 < small.stall_ns <= time.perf_counter_ns() - began


def test_a_split_holds_out_whole_groups(governor, store):
    split = plimsoll.Split(governor, store, held_out_groups=10, seed=4)
    held, train = split.held_out_ids(), split.train_ids()
    assert sorted([*held.tolist(), *train.tolist()]) == list(range(203))
    assert (split.held_out_groups, split.held_out_rows, split.train_rows) == (
        10, len(held), len(train))
    groups = (202 - held) // 3
    assert len(set(groups.tolist())) == 10
    loader = plimsoll.Loader.open(governor, store, batch_rows=32, split=split)
    assert sorted(sum(ids_of(loader), [])) == sorted(train.tolist())


def test_a_split_tells_ids_at_ranks_and_the_groups_of_ids(governor, tmp_path):
    ids, groups = np.array([9, 4, 30, 2, 8, 1]), np.array([70, 70, 5, 5, 5, 6])
    with plimsoll.FeatureWriter(governor, tmp_path / "grouped", {"x": ("float32", (1,))}, grouped=True) as writer:
        writer.append(ids, x=np.zeros((6, 1), np.float32), groups=groups)
    with plimsoll.FeatureStore.open(governor, tmp_path / "grouped") as features:
        split = plimsoll.Split(governor, features, held_out_groups=1, seed=2)
        assert sorted([*split.train_ids(), *split.held_out_ids()]) == sorted(ids)
        ranks = np.array([split.train_rows - 1, 0])
        assert split.train_ids(ranks).tolist() == split.train_ids()[ranks].tolist()
        assert split.held_out_ids(np.array([0])).tolist() == split.held_out_ids()[:1].tolist()
        assert split.groups_of(ids).tolist() == [0, 0, 1, 1, 1, 2] and split.groups_of(ids[:0]).tolist() == []
        assert len(set(split.groups_of(split.held_out_ids()))) == 1
        for call in (lambda: split.train_ids(np.array([6])), lambda: split.groups_of(np.array([3]))):
            with pytest.raises(ValueError, match="rank|ordinal"):
                call()
        split.close()


@pytest.mark.parametrize("options, error", [
    ({"batch_rows": 0}, ValueError), ({"batch_rows": 8, "columns": ["z"]}, KeyError),
    ({"batch_rows": 8, "queue_bytes": "x"}, ValueError), ({"batch_rows": 8, "loader_threads": 0}, ValueError),
    ({"batch_rows": 200, "queue_bytes": 64}, plimsoll.BudgetExceeded),
    ({"batch_rows": 8, "state": (0, 0, 99999)}, ValueError)])
def test_open_checks_its_options(governor, store, options, error):
    with pytest.raises(error):
        plimsoll.Loader.open(governor, store, **options)


def test_opening_what_is_not_there_is_a_key_error(governor, tmp_path):
    with pytest.raises(KeyError):
        plimsoll.Loader.open(governor, tmp_path / "nothing", batch_rows=8)


def test_sweeps_change_no_batch(governor, tmp_path):
    x = np.random.default_rng(5).standard_normal((2000, 1024)).astype(np.float32)
    with plimsoll.FeatureWriter(governor, tmp_path / "f", {"x": ("float32", (1024,))}) as writer:
        writer.append(np.arange(2000), x=x)
    reads = {}
    for sweep_batches in (1, 8):
        with plimsoll.FeatureStore.open(governor, tmp_path / "f", cache_bytes="16MiB") as store:
            loader = plimsoll.Loader.open(governor, store, batch_rows=50, seed=3,
                                          sweep_batches=sweep_batches)
            ids = np.concatenate([batch.ids for batch in loader.epoch(0)])
            loader.close()
            reads[sweep_batches] = (ids.tolist(), store.stats()["reads"])
    assert reads[1][0] == reads[8][0] and sorted(reads[8][0]) == list(range(2000))
    assert reads[8][1] < reads[1][1]
    with pytest.raises(ValueError, match="sweep_batches"):
        plimsoll.Loader.open(governor, tmp_path / "f", batch_rows=50, sweep_batches=0)
