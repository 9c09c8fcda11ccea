# SPDX-License-Identifier: Apache-2.0
"""Tables and feature stores where users stand: in DataLoader workers, forked and spawned, in a second
process, and in a notebook's cell that is run twice."""
import gc
import os
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import plimsoll

torch = pytest.importorskip("torch")

ROWS, DIM = 2000, 8


def open_table(governor, path, **options):
    return plimsoll.EmbeddingStore.open(governor, path, rows=ROWS, dim=DIM, init=plimsoll.Zeros(),
                                        optimizer=plimsoll.SGD(lr=1.0), store_bytes="2MiB",
                                        batch_rows=512, **options)


def fill(table, value, ids=None):
    ids = np.arange(ROWS) if ids is None else ids
    for begin in range(0, len(ids), 512):
        some = ids[begin:begin + 512]
        table.update(some, np.full((len(some), DIM), value, np.float32))


def loader(dataset, context):
    return torch.utils.data.DataLoader(dataset, batch_size=200, num_workers=2, timeout=60,
                                       multiprocessing_context=context)


def in_child(asked):
    """What a forked child's call returned, as text; "hung" when it did not end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        import signal

        signal.alarm(30)
        try:
            said = repr(asked())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text or "hung"


class Pinned(torch.utils.data.Dataset):
    """Rows of one commit, read by a table that each worker opens for itself."""

    def __init__(self, path, step):
        self.path, self.step, self.table = str(path), step, None

    def __len__(self):
        return ROWS

    def __getitems__(self, ids):
        if self.table is None:
            self.governor = plimsoll.Governor("4GiB")
            self.table = plimsoll.EmbeddingStore.open(self.governor, self.path, store_bytes="2MiB",
                                                      pinned=True, at_step=self.step)
        return list(zip(ids, self.table.gather(np.array(ids)).tensor.detach().clone()))


class Inherited(Pinned):
    """The mistake: rows read through the trainer's own table."""

    def __init__(self, table):
        self.table = table


class Features(torch.utils.data.Dataset):
    def __init__(self, path):
        self.path, self.store = str(path), None

    def __len__(self):
        return ROWS

    def __getitems__(self, ids):
        if self.store is None:
            self.governor = plimsoll.Governor("4GiB")
            self.store = plimsoll.FeatureStore.open(self.governor, self.path, cache_bytes="2MiB")
        return list(zip(ids, self.store.read(np.array(ids)).tensor("x").clone()))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_r03_workers_read_a_pinned_commit_beside_training(governor, tmp_path, context):
    table = open_table(governor, tmp_path / "table")
    fill(table, 1.0)
    table.commit(1)
    seen = 0
    for ids, rows in loader(Pinned(tmp_path / "table", 1), context):
        assert torch.equal(rows, torch.ones(len(ids), DIM))
        fill(table, float(seen + 2), ids[:20].numpy())
        if seen < 2:
            table.commit(seen + 2)
        seen += 1
    assert seen == ROWS // 200
    table.commit(100)
    table.verify()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_r03_workers_read_a_table_in_sample_order_at_rest(governor, tmp_path, context):
    with open_table(governor, tmp_path / "table", layout="sample_order") as table:
        fill(table, 1.0)
        table.commit(1)
    assert sum(len(ids) for ids, rows in loader(Pinned(tmp_path / "table", 1), context)
               if torch.equal(rows, torch.ones(len(ids), DIM))) == ROWS


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_r03_workers_read_features(governor, tmp_path, context):
    values = np.arange(ROWS, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    with plimsoll.FeatureWriter(governor, tmp_path / "features",
                                {"x": ("float32", (3,))}) as writer:
        writer.append(np.arange(ROWS), {"x": values})
    for ids, x in loader(Features(tmp_path / "features"), context):
        assert np.array_equal(x.numpy(), values[ids.numpy()])


@pytest.mark.parametrize("layout", ["any_order", "sample_order"])
def test_r03_a_worker_that_reads_through_the_trainers_table_is_refused(governor, tmp_path, layout):
    table = open_table(governor, tmp_path / "table", layout=layout)
    fill(table, 1.0)
    table.commit(1)
    fill(table, 2.0)  # Not committed: a worker must not write it.
    with pytest.raises(ValueError, match="forked after it was opened.*worker_init_fn.*pinned=True"):
        next(iter(loader(Inherited(table), "fork")))
    table.commit(2)
    table.verify()
    assert table.gather([7]).array[0, 0] == 2.0


@pytest.mark.parametrize("opened", ["table", "pinned", "features"])
def test_r03_a_spawned_worker_is_told_to_open_for_itself(governor, tmp_path, opened):
    if opened == "features":
        with plimsoll.FeatureWriter(governor, tmp_path / "features",
                                    {"x": ("float32", (3,))}) as writer:
            writer.append([1], {"x": np.zeros((1, 3), np.float32)})
        one = plimsoll.FeatureStore.open(governor, tmp_path / "features")
    else:
        one = open_table(governor, tmp_path / "table")
        one.commit(1)
        if opened == "pinned":
            one.close()
            one = plimsoll.EmbeddingStore.open(governor, tmp_path / "table", pinned=True)
    with pytest.raises(TypeError, match=f"{type(one).__name__}: belongs to the process that opened "
                                        "it.*a Governor of its own"):
        pickle.dumps(one)


def test_r03_every_handle_from_before_a_fork_refuses(governor, tmp_path):
    table = open_table(governor, tmp_path / "table")
    table.commit(1)
    reader = plimsoll.EmbeddingStore.open(governor, tmp_path / "table", pinned=True, store_bytes="2MiB")
    writer = plimsoll.FeatureWriter(governor, tmp_path / "features",
                                    {"x": ("float32", (3,))})
    writer.append(np.arange(ROWS), {"x": np.zeros((ROWS, 3), np.float32)})
    for call in (lambda: table.gather([1]), lambda: table.stats(), lambda: table.commit(2),
                 lambda: table.rows, lambda: reader.gather([1]),
                 lambda: writer.append([1], {"x": np.zeros((1, 3), np.float32)})):
        assert "forked after it was opened" in in_child(call), in_child(call)
    for call in (table.close, reader.close, writer.close):
        assert in_child(call) == "None"  # Does nothing there.
    writer.finish()
    store = plimsoll.FeatureStore.open(governor, tmp_path / "features", cache_bytes="2MiB")
    batches = plimsoll.Loader.open(governor, store, batch_rows=100, seed=1)
    for call in (lambda: store.read([1]), lambda: store.ids([1]),
                 lambda: next(iter(batches.epoch(0)))):
        assert "forked after it was opened" in in_child(call), in_child(call)
    assert table.gather([1]).array.shape == (1, DIM)
    table.commit(3)
    table.verify()
    assert store.read([1])["x"].shape == (1, 3)
    assert sum(len(batch.ids) for batch in batches.epoch(0)) == ROWS


def test_a_governor_from_before_a_fork_refuses_and_changes_nothing(governor, tmp_path):
    table = open_table(governor, tmp_path / "table")
    fill(table, 1.0)
    lease = governor.reserve("1MiB")
    before, files = str(governor.ledger()), sorted(os.listdir(tmp_path / "table"))
    for call in (lambda: governor.reserve("1MiB"), lambda: governor.promise("1MiB"),
                 lambda: governor.set_limit("1GiB"), governor.step_boundary, governor.rebaseline,
                 lambda: lease.grow("2MiB"), lambda: open_table(governor, tmp_path / "other")):
        said = in_child(call)
        assert said.startswith(("ValueError: Governor: ", "ValueError: Lease")), said
        assert "forked after it was opened" in said and "make a Governor in this process" in said
    assert not (tmp_path / "other").exists()
    for read in (lambda: governor.limit_bytes, lambda: governor.limit.explain(),
                 lambda: governor.ledger().leased_bytes, lambda: governor.disk_limit_bytes,
                 lambda: lease.bytes):
        assert in_child(read) == repr(read())
    assert in_child(lambda: (plimsoll.Governor.current(), governor.arena_attached)) == "(None, False)"
    assert "none are in a forked process" in in_child(governor.clean_up)

    def leave():
        with governor:  # As when a child falls out of its parent's block.
            lease.close()
        governor.close()
        with plimsoll.Governor("4GiB") as own:
            own.reserve("1MiB").close()
            open_table(own, tmp_path / "own").close()
            return open_table(own, tmp_path / "table")

    assert f"process {os.getpid()} has this table open" in in_child(leave)
    assert sorted(os.listdir(tmp_path / "table")) == files
    assert str(governor.ledger()).splitlines()[:4] == before.splitlines()[:4] and lease.bytes == 1 << 20
    table.commit(1)
    table.verify()


def test_a_child_that_ends_as_programs_do_leaves_its_parents_governor_alone(tmp_path):
    code = textwrap.dedent(f"""
        import multiprocessing, os, sys, torch
        import plimsoll
        governor = plimsoll.Governor("4GiB")
        table = plimsoll.EmbeddingStore.open(governor, {str(tmp_path / "table")!r}, rows=100, dim=4)
        lease, tensor = governor.reserve("1MiB"), torch.ones(1 << 20)
        worker = multiprocessing.get_context("fork").Process(target=str)
        worker.start()
        worker.join(30)
        child = os.fork()
        if child == 0:
            sys.exit(7)  # Through atexit and every finalizer.
        print(worker.exitcode, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        table.commit(1)
        table.verify()
        governor.step_boundary()
        print(governor.ledger().pools["other"].leased_bytes, governor.arena_attached)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 7\n1048576 True\n", "")


def test_r03_a_set_of_graphs_from_before_a_fork_refuses(governor, tmp_path):
    rows = ["Timestamp,arbitration_id,data_field,attack"]
    rows += [f"{0.001 * frame:.4f},{0x100 + frame % 4:03X},{frame & 255:02X}00,0"
             for frame in range(640)]
    (tmp_path / "train_1.csv").write_text("\n".join(rows) + "\n")
    plimsoll.import_can(tmp_path / "train_1.csv", tmp_path / "set", governor=governor)
    graphs = plimsoll.GraphSet.open(governor, tmp_path / "set")
    for call in (lambda: graphs.read([0]), lambda: len(graphs), graphs.verify):
        assert "forked after it was opened" in in_child(call), in_child(call)
    assert in_child(graphs.close) == "None"
    assert len(graphs.read([0]).graphs) == 1


def test_r53_a_cell_that_is_run_twice_is_refused(governor, tmp_path):
    first = open_table(governor, tmp_path / "table")
    fill(first, 1.0)
    first.commit(1)
    with pytest.raises(ValueError, match=rf"this process \({os.getpid()}\) has this table open to "
                                         r"change it: close it there, or open it to be read"):
        open_table(governor, tmp_path / "table")
    first.commit(2)
    first.close()
    with open_table(governor, tmp_path / "table") as second:
        fill(second, 3.0)
        second.commit(3)
    third = open_table(governor, tmp_path / "table")
    assert third.last_commit == 3
    del third
    gc.collect()
    fourth = open_table(governor, tmp_path / "table")
    assert fourth.gather([0]).array[0, 0] == 3.0
    fourth.verify()


def test_r01_a_second_process_is_refused(governor, tmp_path):
    table = open_table(governor, tmp_path / "table")
    fill(table, 1.0)
    table.commit(1)
    code = textwrap.dedent(f"""
        import plimsoll
        governor = plimsoll.Governor("4GiB")
        path = {str(tmp_path / "table")!r}
        with plimsoll.EmbeddingStore.open(governor, path, pinned=True) as reader:
            print(reader.last_commit, reader.gather([3]).array[0, 0])
        plimsoll.EmbeddingStore.open(governor, path)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == "1 1.0\n"
    assert f"process {os.getpid()} has this table open to change it" in done.stderr
    table.commit(2)
    table.verify()


def test_r04_a_pinned_table_is_only_read(governor, tmp_path):
    with pytest.raises(plimsoll.NotFoundError, match="no table"):
        plimsoll.EmbeddingStore.open(governor, tmp_path / "none", pinned=True)
    assert not (tmp_path / "none").exists()
    with open_table(governor, tmp_path / "table") as table:
        table.commit(1)
    reader = plimsoll.EmbeddingStore.open(governor, tmp_path / "table", pinned=True)
    with pytest.raises(ValueError, match="opened to be read"):
        reader.update([1], np.zeros((1, DIM), np.float32))
    with pytest.raises(ValueError, match="opened to be read"):
        reader.commit(2)
