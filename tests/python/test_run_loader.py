# SPDX-License-Identifier: Apache-2.0
"""plimsoll.Run.loader(): the same items for any number of workers and from any place."""
import os
import random

import numpy as np
import pytest

import plimsoll
from plimsoll.run._run_loader import _begin_worker

torch = pytest.importorskip("torch")


class Augmented:
    """Items of every kind of random number, as a picture's transforms draw them."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return {"index": index, "torch": torch.randn(3), "numpy": np.random.rand(2), "python": random.random(),
                "mean": torch.rand(1 << 16).mean()}  # A sum over threads.


def ragged(items):
    """Of other lengths, and with a choice of its own."""
    return [torch.arange(item["index"] + 1) for item in items], random.random()


@pytest.fixture
def run(tmp_path):
    with plimsoll.Run(tmp_path / "run", memory_limit="4GiB", seed=3) as one:
        yield one


def batches(run, epoch=0, first=0, dataset=None, **options):
    loader = run.loader(Augmented() if dataset is None else dataset, batch_size=5, **options)
    try:
        return list(loader.start(epoch, first))
    finally:
        loader.close()


def same(one, other):
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(one, other))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 2}, {"workers": 4, "prefetch": 1}])
def test_the_items_are_the_same_for_any_number_of_workers(options, run):
    alone = batches(run, epoch=1)
    assert same(batches(run, epoch=1, **options), alone)
    assert same(batches(run, epoch=1, first=3, **options), alone[3:])


def test_the_items_are_the_same_in_a_spawned_worker(run):
    assert same(batches(run, first=2, workers=1, start_method="spawn"), batches(run, first=2))


@pytest.mark.parametrize("parent, status", [(os.getppid(), 1), (None, 0), (0, 0)])
def test_a_worker_whose_parent_was_killed_before_it_looked_ends(parent, status):
    me = os.getpid()
    child = os.fork()
    if child == 0:
        _begin_worker(False, me if parent is None else parent, 0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status


def test_the_order_is_sample_order_and_items_differ_between_epochs(run):
    first, second = batches(run, 0), batches(run, 1)
    seen = torch.cat([batch["index"] for batch in first]).tolist()
    assert seen == list(plimsoll.SampleOrder(22, 3, 0)) and [len(b["index"]) for b in first] == [5, 5, 5, 5, 2]
    drawn = {int(i): float(x) for batch in first for i, x in zip(batch["index"], batch["python"])}
    again = {int(i): float(x) for batch in second for i, x in zip(batch["index"], batch["python"])}
    assert drawn.keys() == again.keys() and not any(drawn[i] == again[i] for i in drawn)


def test_the_states_of_the_loop_are_left_alone(run):
    for workers in (0, 1):
        torch.manual_seed(1), np.random.seed(2), random.seed(3)
        loader = run.loader(Augmented(), batch_size=5, workers=workers)
        next(loader.start(0, 0))
        drawn = float(torch.rand(1)), float(np.random.rand()), random.random()
        loader.close()
        torch.manual_seed(1), np.random.seed(2), random.seed(3)
        assert drawn == (float(torch.rand(1)), float(np.random.rand()), random.random())


def test_an_epoch_that_was_left_does_not_come_back(run):
    loader = run.loader(Augmented(), batch_size=5, workers=2)
    next(loader.start(0, 0))
    assert same(list(loader.start(1, 0)), batches(run, 1))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_on_the_data_within_its_loop_ends_no_epoch(workers, run):
    loader = run.loader(Augmented(), batch_size=5, workers=workers)
    epoch_of = []
    for batch in run.steps(loader, epochs=2, progress=False):
        epoch_of.append(run.epoch)
        if run.steps_made % 5 == 1:
            assert sorted(torch.cat([one["index"] for one in loader]).tolist()) == list(range(22))
    assert epoch_of == [0] * 5 + [1] * 5


def test_spawned_workers_tell_a_loop_that_another_one_took_them(run):
    loader = run.loader(Augmented(), batch_size=5, workers=1, start_method="spawn")
    first = loader.start(0, 0)
    next(first)
    assert same(list(loader.start(1, 2)), batches(run, 1, 2))
    with pytest.raises(ValueError, match="another loop has begun with this loader, whose spawned workers serve one at a "
                                         "time: give it a loader of its own, or use start_method="):
        next(first)
    assert same(list(loader.start(1, 3)), batches(run, 1, 3))


class Resized(Augmented):
    size = 1

    def __getitem__(self, index):
        return index, torch.rand(self.size)


def trained(path, workers, sizes, fail=-1):
    """What each step saw of a dataset that changes between epochs."""
    dataset, seen = Resized(), {}
    with plimsoll.Run(path, memory_limit="4GiB", seed=3) as run:
        loader = run.loader(dataset, batch_size=5, workers=workers)
        for dataset.size in sizes:
            for _, numbers in run.steps(loader, progress=False, commit_every_steps=1):
                if run.steps_made == fail:
                    raise RuntimeError
                seen[run.steps_made] = numbers
    return seen


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_changes_between_epochs_is_seen_by_workers(workers, tmp_path):
    sizes = (2, 3, 4)
    alone = trained(tmp_path / "alone", 0, sizes)
    assert [numbers.shape[1] for numbers in alone.values()] == [2] * 5 + [3] * 5 + [4] * 5
    whole = trained(tmp_path / "whole", workers, sizes)
    with pytest.raises(RuntimeError):
        trained(tmp_path / "run", workers, sizes, fail=7)
    rest = trained(tmp_path / "run", workers, sizes)
    assert list(rest) == list(range(7, 15))
    for seen in (whole, {**whole, **rest}):
        assert seen.keys() == alone.keys() and all(torch.equal(seen[step], alone[step]) for step in alone)


def test_ragged_items_collate_and_drop_last(run):
    alone = batches(run, collate_fn=ragged, drop_last=True, shuffle=False)
    assert len(alone) == 4 and [len(x) for x in alone[3][0]] == [16, 17, 18, 19, 20]
    parallel = batches(run, collate_fn=ragged, drop_last=True, shuffle=False, workers=2)
    assert [chance for _, chance in parallel] == [chance for _, chance in alone]
    assert len({chance for _, chance in alone}) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_packed_sequences_are_batches_of_a_loop(workers, run):
    rnn = torch.nn.utils.rnn
    loader = run.loader([torch.full((k % 4 + 1, 2), float(k)) for k in range(8)], batch_size=4, workers=workers,
                        collate_fn=lambda items: rnn.pack_sequence(items, enforce_sorted=False))
    model = torch.nn.GRU(2, 3)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for batch in run.steps(loader, epochs=2, progress=False):
        run.step(lambda some: model(some)[1].square().mean(), batch)
        seen += rnn.pad_packed_sequence(batch)[0][0, :, 0].tolist()
    assert sorted(seen) == sorted(2 * [float(k) for k in range(8)])


def test_tuples_arrays_and_pictures(run):
    class Items:
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return np.full((2, 2), index, np.float32), index

    x, y = batches(run, dataset=Items(), shuffle=False)[0]
    assert x.shape == (5, 2, 2) and torch.equal(x[:, 0, 0].long(), y)
    image = pytest.importorskip("PIL.Image")

    class Pictures(Items):
        def __getitem__(self, index):
            return image.new("L", (4, 4), index)

    whole = batches(run, dataset=Pictures(), shuffle=False, collate_fn=list, workers=1)
    assert [one.getpixel((0, 0)) for one in whole[0]] == [0, 1, 2, 3, 4]


def test_a_dataset_of_the_datasets_library(run):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[float(k), -float(k)] for k in range(22)],
                                       "name": [f"n{k}" for k in range(22)]})
    table = rows.with_format("torch").map(lambda row: {"twice": 2 * row["x"]})
    alone = batches(run, dataset=table, epoch=1)
    assert [len(batch["name"]) for batch in alone] == [5, 5, 5, 5, 2]
    assert [int(x) for batch in alone for x in batch["x"][:, 0]] == list(plimsoll.SampleOrder(22, 3, 1))
    for batch, other in zip(alone, batches(run, dataset=table, epoch=1, workers=2)):
        assert torch.equal(batch["twice"], 2 * batch["x"]) and torch.equal(batch["x"], other["x"])
        assert batch["name"] == other["name"]
    with pytest.raises(ValueError, match="loader: IterableDataset has no __getitem__ and __len__"):
        run.loader(rows.to_iterable_dataset(), batch_size=5)


def test_what_is_no_dataset_is_refused(run):
    with pytest.raises(ValueError, match="loader: list_iterator has no __getitem__ and __len__: a dataset that "
                                         "can only be iterated is given to steps"):
        run.loader(iter([1]), batch_size=2)
    with pytest.raises(ValueError, match="the 3 items make 0 batches"):
        run.loader([1, 2, 3], batch_size=4, drop_last=True)
    with pytest.raises(ValueError, match="batch_size 0 and prefetch 2 must be 1 or more"):
        run.loader([1, 2, 3], batch_size=0)
    with pytest.raises(ValueError, match="steps: int is no iterable of batches"):
        run.steps(3)


def test_an_items_error_reaches_the_loop(run):
    class Broken(Augmented):
        def __getitem__(self, index):
            raise LookupError(f"no picture {index}")

    for workers in (0, 1):
        with pytest.raises(LookupError, match="no picture"):
            batches(run, dataset=Broken(), workers=workers)


def test_a_plimsoll_loader_goes_on_from_its_position(tmp_path):
    def life(fail):
        seen = []
        with plimsoll.Run(tmp_path / "run", memory_limit="4GiB", seed=4) as one:
            store = tmp_path / "features"
            if not store.exists():
                plimsoll.import_dataset([{"x": np.float32([k])} for k in range(10)], store,
                                        governor=one.governor)
            data = plimsoll.Loader.open(one.governor, store, batch_rows=4)
            count = {"n": 0}
            one.track(count=count)
            for batch in one.steps(data, epochs=2, commit_every_steps=1, progress=False):
                count["n"] += 1
                seen.append(batch.tensor("x").flatten().tolist())
                if count["n"] == fail:
                    raise RuntimeError
        return seen

    with pytest.raises(RuntimeError):
        life(5)
    rest = life(0)
    order = list(plimsoll.SampleOrder(10, 4, 1))
    assert rest == [[float(k) for k in order[4:8]], [float(k) for k in order[8:]]]


