# SPDX-License-Identifier: Apache-2.0
"""EmbeddingStore: each call and its error, and a plain dict as oracle."""
import tempfile
import types

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import plimsoll


def reopen(governor, tmp_path, **options):
    return plimsoll.EmbeddingStore.open(governor, tmp_path / "table", store_bytes="8MiB", **options)


def test_gather_follows_the_request_with_duplicates(table):
    ids = np.array([7, 3, 999, 7, 0, 3], np.int64)
    rows = table.gather(ids)
    assert rows.array.shape == (6, 8) and rows.array.dtype == np.float32
    assert len(rows) == 6 and rows.ids.tolist() == ids.tolist()
    for position, one in enumerate(ids):
        assert np.array_equal(rows.array[position], table.gather([int(one)]).array[0])


def test_a_table_on_a_network_is_warned_about(governor, tmp_path, monkeypatch):
    opened = plimsoll.rows._embedding._core.EmbeddingStore.open

    class Remote:
        def __init__(self, core):
            self._core = core

        def slab_plan(self):
            return types.SimpleNamespace(network="NFS")

        def __getattr__(self, name):
            return getattr(self._core, name)

    monkeypatch.setattr(plimsoll.rows._embedding._core, "EmbeddingStore",
                        types.SimpleNamespace(open=lambda *asked: Remote(opened(*asked))))
    with pytest.warns(RuntimeWarning, match="on NFS: a commit is as durable as its server"):
        reopen(governor, tmp_path, rows=10, dim=4).close()


def test_rows_are_copies(table):
    rows = table.gather([1, 2])
    before = rows.array
    rows.array[:] = 9
    assert np.array_equal(rows.array, before)
    given_rows = np.ones((2, 8), np.float32)
    table.update([1, 2], given_rows)
    given_rows[:] = 5
    assert np.array_equal(table.gather([1, 2]).array, np.ones((2, 8), np.float32))


def test_ids_are_copied_from_the_caller(table):
    ids = np.array([4, 5], np.int64)
    rows = table.gather(ids)
    ids[:] = 0
    assert rows.ids.tolist() == [4, 5]


def test_update_the_last_of_a_duplicate_wins(table):
    table.update([5, 6, 5], np.arange(24, dtype=np.float32).reshape(3, 8))
    assert table.gather([5]).array.tolist() == [list(range(16, 24))]


@pytest.mark.parametrize("ids", [[3], (3,), range(3, 4), np.array([3]), memoryview(
    np.array([3], np.int64))])
def test_ids_come_from_any_sequence_of_integers(table, ids):
    assert np.array_equal(table.gather(ids).array, table.gather(np.array([3], np.int64)).array)


@pytest.mark.parametrize("ids, text", [
    (np.array([1], np.int32), "int32"), (np.array([1.0]), "float64"), ([1.5], "64-bit"),
    ([1 << 70], "64-bit"), (np.zeros((2, 2), np.int64), "shape"),
    (np.arange(8)[::2], "contiguous"), ("12", "str"), (7, "int"), (None, "NoneType")])
def test_bad_ids_are_a_value_error_that_names_them(table, ids, text):
    with pytest.raises(ValueError, match="ids.*" + text):
        table.gather(ids)


@pytest.mark.parametrize("values, text", [
    (np.zeros((2, 8)), "float64"), (np.zeros((2, 7), np.float32), "shape"),
    (np.zeros((3, 8), np.float32), "shape"), (np.zeros((2, 16), np.float32)[:, ::2], "contiguous"),
    ([[1.0]], "list")])
def test_bad_rows_and_gradients_are_a_value_error(table, values, text):
    with pytest.raises(ValueError, match="rows.*" + text):
        table.update([1, 2], values)
    with pytest.raises(ValueError, match="grads.*" + text):
        table.apply([1, 2], values)


def test_an_unknown_id_is_named_in_a_key_error(table):
    with pytest.raises(KeyError, match="1000") as caught:
        table.gather([1, 1000, 2])
    assert isinstance(caught.value, plimsoll.NotFoundError)
    assert not str(caught.value).startswith("'")


def test_apply_is_adamw_with_its_own_step_count(governor, tmp_path):
    optimizer = plimsoll.AdamW(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    table = plimsoll.EmbeddingStore.open(governor, tmp_path / "t", rows=4, dim=3,
                                         optimizer=optimizer, init=plimsoll.Normal(std=1.0))
    weights = table.gather([2]).array.astype(np.float64)
    m, v = np.zeros((1, 3)), np.zeros((1, 3))
    for step in range(1, 6):
        grad = np.array([[0.5, -1.0, 0.25 * step]])
        table.apply([2], grad.astype(np.float32))
        m, v = 0.8 * m + 0.2 * grad, 0.9 * v + 0.1 * grad**2
        weights *= 1 - 0.1 * 0.2
        weights -= 0.1 * (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.9**step)) + 1e-6)
        np.testing.assert_allclose(table.gather([2]).array, weights, rtol=1e-5)


def test_apply_is_adagrad_and_sums_duplicates(governor, tmp_path):
    table = plimsoll.EmbeddingStore.open(governor, tmp_path / "t", rows=4, dim=2,
                                         optimizer=plimsoll.Adagrad(lr=0.5), init=plimsoll.Zeros())
    table.apply([1, 1], np.array([[1, 2], [3, -2]], np.float32))
    np.testing.assert_allclose(table.gather([1]).array, [[-0.5, 0.0]], rtol=1e-6)


def test_rate_scale_multiplies_the_learning_rate(governor, tmp_path):
    table = plimsoll.EmbeddingStore.open(governor, tmp_path / "t", rows=4, dim=1,
                                         optimizer=plimsoll.Adagrad(lr=0.5), init=plimsoll.Zeros())
    table.apply([0], np.ones((1, 1), np.float32), rate_scale=0.5)
    np.testing.assert_allclose(table.gather([0]).array, [[-0.25]], rtol=1e-6)
    table.set_optimizer(plimsoll.Adagrad(lr=0.1))
    table.apply([1], np.ones((1, 1), np.float32))
    np.testing.assert_allclose(table.gather([1]).array, [[-0.1]], rtol=1e-6)


def test_a_fresh_adamw_forgets(governor, tmp_path):
    table = plimsoll.EmbeddingStore.open(governor, tmp_path / "t", rows=1, dim=1,
                                         optimizer=plimsoll.AdamWFresh(lr=0.5),
                                         init=plimsoll.Zeros())
    for step in range(1, 4):
        table.apply([0], np.array([[10.0 ** -step]], np.float32))
        np.testing.assert_allclose(table.gather([0]).array, [[-0.5 * step]], rtol=0.1)


def test_a_nan_gradient_names_its_id_and_changes_nothing(table):
    before = table.gather([1, 2]).array
    with pytest.raises(ValueError, match="2"):
        table.apply([1, 2], np.array([[0.0] * 8, [np.nan] * 8], np.float32))
    assert np.array_equal(table.gather([1, 2]).array, before)


def test_apply_checks_how_it_is_called(table):
    with pytest.raises(ValueError, match="grads"):
        table.apply([1])
    rows = table.gather([1])
    with pytest.raises(ValueError, match="gradient"):
        table.apply(rows)
    with pytest.raises(ValueError, match="rows.ids"):
        table.apply(rows, np.zeros((1, 8), np.float32))


def test_commits_survive_reopening_and_the_rest_does_not(governor, tmp_path, table):
    assert table.last_commit == -1
    ones, twos = np.ones((2, 8), np.float32), np.full((2, 8), 2, np.float32)
    table.update([10, 20], ones)
    table.commit(5)
    table.update([10, 20], twos)
    table.commit(9)
    table.update([10, 20], np.zeros((2, 8), np.float32))
    assert table.last_commit == 9
    with pytest.raises(ValueError):
        table.commit(9)
    table.close()

    with reopen(governor, tmp_path) as again:
        assert (again.rows, again.dim, again.last_commit) == (1000, 8, 9)
        assert np.array_equal(again.gather([10, 20]).array, twos)
        again.verify()
    with reopen(governor, tmp_path, at_step=5) as again:
        assert np.array_equal(again.gather([10, 20]).array, ones)
    with pytest.raises(KeyError, match="9"):
        reopen(governor, tmp_path, at_step=7)


def test_an_existing_table_is_compared_with_what_is_asked(governor, tmp_path, table):
    table.commit(1)
    table.close()
    for wrong in ({"dim": 9}, {"optimizer": plimsoll.Adagrad()}, {"rows": 999},
                  {"init": plimsoll.Zeros()}, {"ids": np.array([4], np.int64)}):
        with pytest.raises(ValueError):
            reopen(governor, tmp_path, **wrong)
    with reopen(governor, tmp_path, dim=8, optimizer=plimsoll.AdamW(lr=7.0), rows=1000) as again:
        assert again.rows == 1000


def test_open_checks_its_arguments(governor, tmp_path):
    open_table = plimsoll.EmbeddingStore.open
    with pytest.raises(ValueError, match="dim"):
        open_table(governor, tmp_path / "new", rows=10)
    with pytest.raises(ValueError, match="store_bytes"):
        open_table(governor, tmp_path / "new", rows=10, dim=4, store_bytes="16 stones")
    with pytest.raises(ValueError, match="optimizer"):
        open_table(governor, tmp_path / "new", rows=10, dim=4, optimizer="adam")
    with pytest.raises(ValueError, match="init"):
        open_table(governor, tmp_path / "new", rows=10, dim=4, init=0)
    with pytest.raises(ValueError, match="3"):
        open_table(governor, tmp_path / "new", ids=[3, 4, 3], dim=4)
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())


def test_a_slab_that_does_not_fit_is_refused(governor, tmp_path):
    with pytest.raises(plimsoll.BudgetExceeded) as caught:
        plimsoll.EmbeddingStore.open(governor, tmp_path / "t", rows=10**9, dim=64, store_bytes="50GiB")
    assert caught.value.tag == "rows" and caught.value.limit_bytes == governor.limit_bytes
    with pytest.raises(plimsoll.BudgetExceeded) as caught:
        plimsoll.EmbeddingStore.open(governor, tmp_path / "t", rows=10, dim=4, store_bytes=1024)
    assert caught.value.requested_bytes > 1024


def test_the_plan_adds_up(table):
    plan = table.plan()
    assert plan.total_bytes <= 8 << 20
    assert plan.frame_bytes + plan.index_bytes + plan.buffer_bytes + plan.queue_bytes <= (
        plan.total_bytes)
    assert 0 < plan.floor_bytes <= plan.total_bytes
    assert plan.disk_cap_bytes > 0
    assert str(plan)


def test_prefetch_takes_any_ids_and_counts(table):
    table.prefetch([1, 2, 10**12])
    table.gather([1, 2])
    stats = table.stats()
    assert stats["requests"] == 2
    assert 0.0 <= stats["hit_rate"] <= 1.0
    with pytest.raises(ValueError, match="ids"):
        table.prefetch(np.zeros(2, np.float32))


def test_scan_visits_every_row_once(governor, tmp_path):
    ids = np.array([50, -3, 1 << 40, 8], np.int64)
    table = plimsoll.EmbeddingStore.open(governor, tmp_path / "t", ids=ids, dim=2)
    table.apply([8], np.ones((1, 2), np.float32))
    seen = []
    table.scan(lambda i, s, v: seen.append((i, s, v)))
    assert np.concatenate([i for i, _, _ in seen]).tolist() == ids.tolist()
    assert np.concatenate([s for _, s, _ in seen]).tolist() == [0, 0, 0, 1]
    values = np.concatenate([v for _, _, v in seen])
    assert values.shape == (4, 6)
    assert np.array_equal(values[:, :2], table.gather(ids).array)


def test_scan_passes_the_visitors_exception_on(table):
    class Stop(Exception):
        pass

    def visit(*_):
        raise Stop("enough")

    with pytest.raises(Stop, match="enough"):
        table.scan(visit)
    with pytest.raises(ValueError, match="callback"):
        table.scan(lambda *_: table.gather([1]))
    assert len(table.gather([1])) == 1


def test_export_writes_npy_files(governor, tmp_path, table):
    table.update([3], np.full((1, 8), 3, np.float32))
    assert table.export(tmp_path / "out", slots=True) == 1000
    ids = np.load(tmp_path / "out/ids.npy")
    rows = np.load(tmp_path / "out/rows.npy")
    slots = np.load(tmp_path / "out/slots.npy")
    assert ids.tolist() == list(range(1000)) and slots.shape == (1000, 16)
    assert np.array_equal(rows, table.gather(ids).array)
    with pytest.raises(FileExistsError):
        table.export(tmp_path / "out")
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == [
        "ids.npy", "rows.npy", "slots.npy"]


def test_info_describes_the_table(tmp_path, table):
    table.commit(1)
    info = plimsoll.info(tmp_path / "table")
    assert (info["kind"], info["rows"], info["dim"], info["optimizer"]) == (
        "embedding_store", 1000, 8, "adamw")
    assert info["commit_steps"][0] == 1


def test_a_damaged_file_is_a_corrupt_error(tmp_path, table):
    table.update(np.arange(1000), np.ones((1000, 8), np.float32))
    table.commit(1)
    table.close()
    largest = max((one for one in (tmp_path / "table").rglob("*") if one.is_file()),
                  key=lambda one: one.stat().st_size)
    content = bytearray(largest.read_bytes())
    for position in range(0, len(content), 512):
        content[position] ^= 0xFF
    largest.write_bytes(content)
    from plimsoll import _core

    with pytest.raises(plimsoll.CorruptError):
        _core.embedding_verify(str(tmp_path / "table"))


def test_calls_from_many_threads_queue_up(table):
    from concurrent.futures import ThreadPoolExecutor

    def add(thread):
        for k in range(50):
            one = np.array([thread * 50 + k], np.int64)
            table.update(one, np.full((1, 8), thread, np.float32))
            assert table.gather(one).array[0, 0] == thread

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))


IDS = st.lists(st.integers(0, 39), min_size=1, max_size=12)
ACTIONS = st.lists(st.one_of(
    st.tuples(st.just("update"), IDS), st.tuples(st.just("gather"), IDS),
    st.tuples(st.just("prefetch"), IDS), st.just(("commit", [])), st.just(("reopen", []))),
    max_size=25)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=ACTIONS, seed=st.integers(0, 2**32 - 1))
def test_any_order_of_calls_agrees_with_a_dict(actions, seed):
    """Ids are sparse and shuffled; reopening goes back to the last commit."""
    random = np.random.default_rng(seed)
    names = random.permutation(40).astype(np.int64) * 7919 - 5
    with tempfile.TemporaryDirectory() as folder, plimsoll.Governor("4GiB") as governor:
        def open_table():
            return plimsoll.EmbeddingStore.open(
                governor, folder + "/t", ids=names, dim=3, init=plimsoll.Normal(seed=1),
                optimizer=plimsoll.AdamW(), store_bytes="4MiB", batch_rows=64)

        table = open_table()
        table.commit(0)
        model = dict(zip(names.tolist(), table.gather(names).array, strict=True))
        durable, step = dict(model), 0
        for action, picks in actions:
            ids = names[np.array(picks, np.int64)] if picks else names[:0]
            if action == "update":
                values = random.standard_normal((len(ids), 3)).astype(np.float32)
                table.update(ids, values)
                model.update(zip(ids.tolist(), values, strict=True))
            elif action == "gather":
                want = np.stack([model[one] for one in ids.tolist()])
                assert np.array_equal(table.gather(ids).array, want)
            elif action == "prefetch":
                table.prefetch(ids)
            elif action == "commit":
                step += 1
                table.commit(step)
                durable = dict(model)
            else:
                table.close()
                table, model = open_table(), dict(durable)
        want = np.stack([model[one] for one in names.tolist()])
        assert np.array_equal(table.gather(names).array, want)


def test_both_layouts_hold_the_same_rows(governor, tmp_path):
    tables = [plimsoll.EmbeddingStore.open(governor, tmp_path / layout, rows=5000, dim=8,
                                           layout=layout, order_seed=3, store_bytes="4MiB")
              for layout in ("any_order", "sample_order")]
    for epoch in range(3):
        order = plimsoll.SampleOrder(5000, 3, epoch)
        for table in tables:
            table.begin_epoch(epoch)
        for begin in range(0, 4700 if epoch == 1 else 5000, 512):  # One epoch ends early.
            ids = order.at(np.arange(begin, min(begin + 512, 5000)))
            first, second = (table.gather(ids).array for table in tables)
            assert np.array_equal(first, second)
            for table in tables:
                table.apply(ids, np.sin(first + epoch))
        for table in tables:
            table.commit(epoch + 1)
    expected = tables[0].gather(np.arange(5000)).array
    for table in tables:
        table.close()
    assert plimsoll.info(tmp_path / "sample_order")["layout"] == "sample_order"
    # The layout belongs to the table: it need not be said again, and cannot be another.
    again = plimsoll.EmbeddingStore.open(governor, tmp_path / "sample_order", store_bytes="4MiB")
    assert np.array_equal(again.gather(np.arange(5000)).array, expected)
    with pytest.raises(ValueError, match="layout"):
        plimsoll.EmbeddingStore.open(governor, tmp_path / "sample_order", layout="any_order")


def test_bfloat16_rows_are_kept_in_half_the_bytes(governor, tmp_path):
    ids = np.arange(50)
    rows = np.random.default_rng(1).normal(size=(50, 8)).astype(np.float32)
    with plimsoll.EmbeddingStore.open(governor, tmp_path / "half", rows=50, dim=8, store_bytes="4MiB",
                                      dtype="bfloat16", optimizer=plimsoll.SGD(lr=0.5)) as table:
        table.update(ids, rows)
        got = table.gather(ids).array.copy()
        assert got.dtype == np.float32
        assert np.all(got.view(np.uint32) % 65536 == 0)
        assert np.all(np.abs(got - rows) <= np.abs(rows) / 256)
        table.apply(ids, np.ones((50, 8), np.float32))
        assert np.all(np.abs(table.gather(ids).array - (got - 0.5)) <= 2**-7 * (np.abs(got) + 0.5))
        table.commit(1)
    info = plimsoll.info(tmp_path / "half")
    assert (info["dtype"], info["record_bytes"]) == ("bfloat16", 32)
    # The type belongs to the table: it need not be said again, and cannot be another.
    plimsoll.EmbeddingStore.open(governor, tmp_path / "half", store_bytes="4MiB").close()
    with pytest.raises(ValueError, match="dtype is bfloat16, but float32 was asked for"):
        plimsoll.EmbeddingStore.open(governor, tmp_path / "half", store_bytes="4MiB", dtype="float32")
    with pytest.raises(ValueError, match="dtype: 'float16' is not one of float32, bfloat16"):
        plimsoll.EmbeddingStore.open(governor, tmp_path / "other", rows=5, dim=8, dtype="float16")


def test_an_unknown_layout_is_named(governor, tmp_path):
    with pytest.raises(ValueError, match="layout: 'zigzag' is not one of any_order, sample_order"):
        plimsoll.EmbeddingStore.open(governor, tmp_path / "t", rows=3, dim=2, layout="zigzag")


def test_dirty_rows_are_bounded_as_asked(governor, tmp_path):
    table = plimsoll.EmbeddingStore.open(governor, tmp_path / "t", rows=60_000, dim=16,
                                         store_bytes="3MiB", dirty_bytes="256KiB", batch_rows=128)
    ids = np.random.default_rng(1).permutation(60_000)
    for begin in range(0, 12_800, 64):
        table.apply(ids[begin:begin + 64], np.ones((64, 16), np.float32))
    # A request may go beyond the bound by the pages it changes itself.
    assert 0 < table.stats()["dirty_bytes_max"] <= (256 << 10) + 64 * 4096


def growing(governor, tmp_path, **options):
    options = {"rows_max": 50, "dim": 4, "store_bytes": "4MiB"} | options
    return plimsoll.EmbeddingStore.open(governor, tmp_path / "growing",
                                        init=plimsoll.Normal(seed=2), **options)


def test_ids_come_and_go(governor, tmp_path):
    table = growing(governor, tmp_path)
    assert (table.rows, table.rows_max, table.plan().rows_max) == (0, 50, 50)
    assert table.insert([10, -3, 10]) == 2 and table.insert([10, 7]) == 1
    fresh = table.gather([10]).array
    table.update([10], np.ones((1, 4), np.float32))
    table.commit(1)
    table.erase([10, -3])
    assert table.rows == 1
    with pytest.raises(plimsoll.NotFoundError, match="no row with id 10"):
        table.gather([10])
    with pytest.raises(plimsoll.NotFoundError, match="-3"):
        table.erase([7, -3])
    assert table.insert([10]) == 1  # As it began, not as it was.
    assert np.array_equal(table.gather([10]).array, fresh)
    table.close()
    again = growing(governor, tmp_path, rows_max=None)  # Of the commit: nothing was erased.
    seen = []
    again.scan(lambda ids, sequences, values: seen.extend(ids.tolist()))
    assert sorted(seen) == [-3, 7, 10]
    assert np.array_equal(again.gather([10]).array, np.ones((1, 4), np.float32))
    assert again.export(tmp_path / "out") == 3
    info = plimsoll.info(tmp_path / "growing")
    assert (info["rows"], info["rows_max"]) == (3, 50)


def test_a_full_table_names_rows_max(governor, tmp_path):
    table = growing(governor, tmp_path, rows=48)
    with pytest.raises(ValueError, match="rows_max is 50, 48 rows are there"):
        table.insert([100, 101, 102])
    assert table.insert([100, 101]) == 2 and table.rows == 50


def test_a_table_of_fixed_rows_does_not_grow(governor, table, tmp_path):
    for change in (table.insert, table.erase):
        with pytest.raises(ValueError, match="made without rows_max"):
            change([1])


def test_rows_in_sample_order_come_and_stay(governor, tmp_path):
    options = {"rows": 30, "layout": "sample_order", "order_seed": 3}
    table = growing(governor, tmp_path, **options)
    for epoch in range(4):  # Each epoch in the order of the rows that are there when it begins.
        table.begin_epoch(epoch)
        order = plimsoll.SampleOrder(table.rows, 3, epoch)
        ids = np.array([order.at(place) for place in range(table.rows)])
        table.update(ids, np.full((len(ids), 4), epoch, np.float32))
        assert table.insert(np.arange(30 + 5 * epoch)) == (5 if epoch else 0)
    table.commit(1)
    with pytest.raises(ValueError, match="come and stay"):
        table.erase([1])
    with pytest.raises(ValueError, match="rows_max is 50, 45 rows are there"):
        table.insert(np.arange(51))
    table.close()
    again = growing(governor, tmp_path, **options)
    assert again.rows == plimsoll.info(tmp_path / "growing")["rows"] == 45
    assert (again.gather(np.arange(40)).array == 3).all()
    assert (again.gather(np.arange(40, 45)).array != 3).all()
    assert again.export(tmp_path / "out") == 45


SOME = st.lists(st.integers(0, 39), max_size=12)
CHANGES = st.lists(st.one_of(
    st.tuples(st.just("insert"), SOME), st.tuples(st.just("erase"), SOME),
    st.tuples(st.just("update"), SOME), st.just(("commit", [])), st.just(("reopen", []))),
    max_size=30)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=CHANGES, made=st.integers(0, 20), seed=st.integers(0, 2**32 - 1))
def test_a_table_that_grows_agrees_with_a_dict(changes, made, seed):
    random = np.random.default_rng(seed)
    names = random.permutation(40).astype(np.int64) * 7919 - 5
    with tempfile.TemporaryDirectory() as folder, plimsoll.Governor("4GiB") as governor:
        def open_table():
            return plimsoll.EmbeddingStore.open(
                governor, folder + "/t", ids=names[:made], rows_max=made + 40, dim=3,
                init=plimsoll.Zeros(), store_bytes="4MiB", batch_rows=64)

        def rows_of(table):
            rows = {}
            table.scan(lambda ids, sequences, values: rows.update(
                zip(ids.tolist(), values[:, :3].tolist(), strict=True)))
            return rows

        table = open_table()
        table.commit(0)
        model = {one: [0.0] * 3 for one in names[:made].tolist()}
        durable, step = dict(model), 0
        for change, picks in changes:
            ids = names[np.array(picks, np.int64)].tolist() if picks else []
            if change == "insert":
                assert table.insert(ids) == len(set(ids) - set(model))
                model = {one: [0.0] * 3 for one in ids} | model
            elif change == "erase":
                ids = [one for one in ids if one in model]
                table.erase(ids)
                model = {one: row for one, row in model.items() if one not in ids}
            elif change == "update":
                ids = [one for one in ids if one in model]
                values = random.standard_normal((len(ids), 3)).astype(np.float32)
                table.update(ids, values)
                model.update(zip(ids, values.tolist(), strict=True))
            elif change == "commit":
                step += 1
                table.commit(step)
                durable = dict(model)
            else:
                table.close()
                table, model = open_table(), dict(durable)
        assert rows_of(table) == model
