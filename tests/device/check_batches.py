# SPDX-License-Identifier: Apache-2.0
"""Batches that are brought to the simulated device one ahead of use: the bits of a plain loop, and no wait missing."""
import gc
import mmap

import numpy as np
import pytest
import torch

import plimsoll

plimsoll.Governor("3GiB", foreign_bytes="1GiB").close()  # Before the first tensor of the device.

from plimsoll.memory import _pinned
from tests import device
from tests.support.waits import forget_frames, left_out

MIB = 1 << 20
ROWS, WIDTH = 8, 3000  # 96,000 bytes a batch: no power of two.
PAGES = -(-(ROWS * WIDTH * 4 + 256) // mmap.PAGESIZE) * mmap.PAGESIZE


@pytest.fixture(autouse=True)
def card():
    device.configure(capacity=1 << 30, context=0, fraction=1.0)
    yield
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() == 0 and plimsoll.Governor.current() is None


class Numbers:
    """Augmented with random numbers. Later items may fail."""

    def __init__(self, count=40, fails_at=-1, width=WIDTH):
        self.count, self.fails_at, self.width = count, fails_at, width

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.fails_at:
            raise KeyError("planted")
        return {"x": torch.full((self.width,), float(index)) + 0.1 * torch.randn(self.width), "y": index % 3}


def opened(path, **options):
    return plimsoll.Run(path, memory_limit="3GiB", foreign_bytes="1GiB", seed=5, **options)


def trained(path, brought, workers=0, data=None, epochs=2, seen=lambda run: None, **options):
    """Bits of losses and weights. brought: by the loader; else by the loop."""
    with opened(path, **options) as run:
        torch.manual_seed(1)
        data = data or Numbers()
        model = torch.nn.Sequential(torch.nn.Linear(data.width, 16), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3)).to("sim")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        run.track(model=model, optimizer=optimizer)

        def loss(batch):
            return torch.nn.functional.cross_entropy(model(batch["x"].to("sim")), batch["y"].to("sim"))

        loader, losses = run.loader(data, batch_size=ROWS, workers=workers, device="sim" if brought else None), []
        for batch in run.steps(loader, epochs=epochs, progress=False):
            assert batch["x"].device.type == ("sim" if brought else "cpu")
            losses.append(run.step(loss, batch, loss="mean"))
            seen(run)
        return [torch.tensor(losses), *(one.detach().cpu() for one in model.parameters())]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain") / "run", False)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("late", [False, True])
def test_the_bits_are_those_of_a_plain_loop_and_nothing_is_unordered(workers, late, plain, tmp_path):
    with device.order_checked():
        if late:
            with device.kernels_late():
                assert same(trained(tmp_path / "run", True, workers), plain)
        else:
            assert same(trained(tmp_path / "run", True, workers), plain)


def test_pinned_memory_is_two_batches_in_whole_pages_and_goes_back(tmp_path):
    with plimsoll.Governor("3GiB", foreign_bytes="1GiB") as governor:
        seen, before = [], governor.ledger().orphan_bytes  # Other tests keep what they compare with.
    size = Numbers().width * ROWS * 4
    like = [_pinned.Like.dense((ROWS, WIDTH), torch.float32), _pinned.Like.dense((ROWS,), torch.int64)]
    assert PAGES == -(-_pinned.bytes_of(like) // mmap.PAGESIZE) * mmap.PAGESIZE and size < PAGES < 1 << 17  # Which a pool would take.
    trained(tmp_path / "run", True, seen=lambda run: seen.append(run.governor.ledger().pools["pinned"].leased_bytes))
    assert set(seen) == {2 * PAGES}
    torch.accelerator.synchronize()
    gc.collect()
    with plimsoll.Governor("3GiB", foreign_bytes="1GiB") as governor:
        assert governor.ledger().orphan_bytes == before


def test_without_a_device_nothing_is_pinned(tmp_path):
    seen = []
    trained(tmp_path / "run", False, seen=lambda run: seen.append(run.governor.ledger().pools["pinned"].leased_bytes))
    assert set(seen) == {0}


def summed(path):
    """A loop in which the host waits for nothing; returns a sum over all batches."""
    with opened(path) as run:
        total = torch.zeros(WIDTH, device="sim")
        for batch in run.loader(Numbers(), batch_size=ROWS, device="sim"):
            total = total * 0.9 + batch["x"].sum(0)
        return total.cpu()


def test_a_loop_that_waits_for_nothing_is_ordered_by_events(tmp_path):
    wanted = summed(tmp_path / "a")
    with device.order_checked(), device.kernels_late():
        assert torch.equal(summed(tmp_path / "b"), wanted)


@pytest.mark.parametrize("missing", ["copies wait", "compute waits"])
def test_a_wait_that_is_missing_is_found(missing, tmp_path):
    with pytest.raises(RuntimeError, match="nothing orders them") as found:
        with device.order_checked(), left_out(missing):
            summed(tmp_path / "run")
    forget_frames(found.value)


@pytest.mark.parametrize("waits", [True, False])
def test_a_slot_is_written_again_after_its_copy_alone(waits, tmp_path, monkeypatch):
    """Copies are held until the third batch wants the first one's slot."""
    if not waits:
        monkeypatch.setattr(_pinned._Slot, "wait", lambda self: None)
    with opened(tmp_path / "run") as run:
        loader = run.loader(Numbers(), batch_size=ROWS, device="sim", shuffle=False)
        wanted = [batch["x"].clone() for batch in run.loader(Numbers(), batch_size=ROWS, shuffle=False)]
        with device.copies_held():
            batches = iter(loader)
            got = [next(batches), next(batches)]
            if not waits:
                loader._device._slots._sent().begun()  # The third one lies in the first one's slot.
        got += batches
        torch.accelerator.synchronize()
        assert all(torch.equal(one["x"].cpu(), other) for one, other in zip(got, wanted, strict=True)) == waits
        del got, batches


ODD = {"channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "cut": torch.randn(4, 6)[:, ::2], "turned": torch.randn(4, 6).T,
       "flags": torch.tensor([True, False]), "half": torch.randn(5).bfloat16(), "complex": torch.randn(3, dtype=torch.complex64), "number": torch.tensor(7),
       "none": torch.empty(0, 3), "spread": torch.ones(1).expand(4), "sparse": torch.eye(3).to_sparse(), "grad": torch.ones(2, requires_grad=True),
       "conjugate": torch.randn(3, dtype=torch.complex64).conj(), "array": np.ones(3), "name": "a", "deep": [(torch.arange(3), {"z": torch.ones(1)}), None],
       "packed": torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])}
ON_SIM = {"sparse"}  # The simulated device has no sparse tensors.


def test_each_kind_of_batch_is_as_its_tensors_moved_one_by_one(tmp_path):
    batches = [{name: one for name, one in ODD.items() if name not in ON_SIM}]
    with opened(tmp_path / "run") as run:
        loader = run.loader(batches, batch_size=1, collate_fn=lambda items: items[0], device="sim")
        (got,) = loader
        for name, one in batches[0].items():
            if isinstance(one, torch.Tensor):
                want = one.to("sim")
                assert got[name].device == want.device and got[name].stride() == want.stride() and got[name].dtype == want.dtype, name
                assert torch.equal(got[name].resolve_conj().cpu(), one.detach().resolve_conj()), name
        assert got["array"] is ODD["array"] and got["name"] == "a" and got["deep"][1] is None
        assert got["deep"][0][1]["z"].device.type == "sim" and got["packed"].data.device.type == "sim" and got["packed"].batch_sizes.device.type == "cpu"
        del got, want


def nothing_pinned(monkeypatch):
    def refused(governor, size, tag="other", reserve=plimsoll.Governor.reserve):
        if tag == "pinned":
            raise plimsoll.BudgetExceeded("planted", tag, size, 0, 1, {}, "")
        return reserve(governor, size, tag)

    monkeypatch.setattr(plimsoll.Governor, "reserve", refused)


@pytest.mark.parametrize("place", ["host", "device", "driver"])
def test_where_no_room_is_left_for_the_next_batch_it_comes_when_it_is_needed(place, plain, tmp_path, monkeypatch):
    if place == "host":
        nothing_pinned(monkeypatch)
    elif place == "driver":
        monkeypatch.setattr(device.cudart, "cudaHostRegister", lambda *_: 2)
    else:
        def refused(*_, **__):
            raise torch.OutOfMemoryError("planted")
        monkeypatch.setattr(torch, "empty_strided", refused)
    assert same(trained(tmp_path / "run", True), plain)


def test_a_step_that_is_refused_gets_the_memory_of_the_next_batch(tmp_path, monkeypatch):
    """The second step is refused once, with the third batch there: that goes back, and comes again to the same bits."""
    wanted, given, refused = trained(tmp_path / "a", True), [], []
    make_room, give_back = plimsoll.training._retry.make_room, _pinned.Sent.give_back

    def gave(sent):
        before = torch.accelerator.memory_allocated()
        give_back(sent)
        given.append(before - torch.accelerator.memory_allocated())

    monkeypatch.setattr(_pinned.Sent, "give_back", gave)

    def retried(extension):
        refused.append(len(given))
        make_room(extension)

    monkeypatch.setattr(plimsoll.training._retry, "make_room", retried)

    real = plimsoll.Run.step

    def step(run, f, batch, **options):
        if run.steps_made == 1:
            with device.refusing(3):
                return real(run, f, batch, **options)
        return real(run, f, batch, **options)

    monkeypatch.setattr(plimsoll.Run, "step", step)
    assert same(trained(tmp_path / "b", True), wanted)
    assert refused == [0] and given[0] >= ROWS * WIDTH * 4


def test_a_batch_that_the_device_has_no_room_for_names_it_and_a_limit(tmp_path):
    with opened(tmp_path / "run", device_memory_limit="24MiB") as run:
        loader = run.loader(Numbers(width=1 << 21), batch_size=ROWS, device="sim")
        with pytest.raises(plimsoll.BudgetExceeded, match="loader: the device has no room for a batch.*try a limit of .* for sim") as refused:
            next(iter(loader))
        assert refused.value.tag == "sim"


def test_an_error_of_the_data_comes_in_its_turn(tmp_path):
    made = []
    with opened(tmp_path / "run") as run:
        loader = run.loader(Numbers(fails_at=20), batch_size=ROWS, shuffle=False, device="sim")
        with pytest.raises(KeyError, match="planted"):
            for batch in loader:
                made.append(batch["y"].tolist())
        assert len(made) == 2
        batch = None


def test_a_loop_within_a_loop_of_the_same_loader_has_its_own_place(tmp_path):
    with opened(tmp_path / "run") as run:
        loader = run.loader(Numbers(), batch_size=ROWS, shuffle=False, device="sim")
        outer, inner = [], []
        for one in loader.start(0, 0):
            outer.append(one["x"].cpu())
            inner.append([two["x"].cpu() for two in loader.start(0, 0)])
        assert len(outer) == 5 and all(same(one, outer) for one in inner)
        one = None


@pytest.mark.parametrize(("name", "text"), [("tpu", "'tpu' is no device of torch's"), ("meta", "nothing is computed on 'meta'"),
                                            ("sim:4", "'sim:4' is not there")])
def test_a_device_that_is_none_is_refused(name, text, tmp_path):
    with opened(tmp_path / "run") as run:
        with pytest.raises(ValueError, match=f"loader: device: {text}"):
            run.loader(Numbers(), batch_size=ROWS, device=name)
        assert run.loader(Numbers(), batch_size=ROWS, device="cpu")._device is None


def test_the_largest_batch_is_admitted_where_batches_are(tmp_path):
    with opened(tmp_path / "run", device_memory_limit="200MiB") as run:
        model = torch.nn.Linear(WIDTH, 3).to("sim")
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        largest = {"x": torch.zeros(ROWS, WIDTH), "y": torch.zeros(ROWS, dtype=torch.int64)}
        for batch in run.steps(run.loader(Numbers(), batch_size=ROWS, device="sim"), largest=largest, progress=False):
            run.step(lambda one: torch.nn.functional.cross_entropy(model(one["x"]), one["y"]), batch)
        batch = None


def shared(path, brought):
    """Bits of a run of two virtual workers, which have a batch each."""
    with opened(path, virtual_workers=2) as run:
        torch.manual_seed(1)
        model = torch.nn.Linear(WIDTH, 3).to("sim")
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.steps(run.loader(Numbers(), batch_size=4, device="sim" if brought else None), progress=False):
            assert [one["x"].device.type for one in batch] == ["sim" if brought else "cpu"] * 2
            run.step(lambda one: torch.nn.functional.cross_entropy(model(one["x"].to("sim")), one["y"].to("sim")), batch, loss="mean")
        return [one.detach().cpu() for one in model.parameters()]


def test_each_virtual_worker_has_its_batch_there(tmp_path):
    assert same(shared(tmp_path / "a", True), shared(tmp_path / "b", False))


# ---- plimsoll.Loader ----

@pytest.fixture
def items(tmp_path):
    path = tmp_path / "items"
    with plimsoll.Governor("3GiB", foreign_bytes="1GiB") as governor:
        schema = {"image": ("float32", (50,)), "half": ("bfloat16", (7,)), "label": ("int64", ())}
        with plimsoll.FeatureWriter(governor, path, schema) as writer:
            ids = np.arange(100)
            writer.append(ids, image=np.arange(5000, dtype=np.float32).reshape(100, 50), label=ids * 3,
                          half=np.arange(700, dtype=np.uint16).reshape(100, 7))
    return path


def of(batch):
    return [*batch.ids.tolist()], [*batch.groups.tolist()], {name: one.cpu() for name, one in batch.tensors().items()}, batch.state_after, batch.ends_epoch


def equal(one, other):
    return one[:2] == other[:2] and one[3:] == other[3:] and all(torch.equal(one[2][name], other[2][name]) for name in one[2]) and len(one[2]) == 3


def test_batches_of_features_come_to_the_device(items):
    with plimsoll.Governor("3GiB", foreign_bytes="1GiB") as governor, device.order_checked():
        with plimsoll.Loader.open(governor, items, batch_rows=30, seed=2) as loader:
            wanted = [of(loader.next()) for _ in range(9)]
        with plimsoll.Loader.open(governor, items, batch_rows=30, seed=2, device="sim") as loader:
            assert governor.ledger().pools["pinned"].leased_bytes == 2 * 2 * mmap.PAGESIZE
            batch = loader.next()
            assert all(one.device.type == "sim" for one in batch.values()) and batch["image"] is batch.tensor("image")
            got = [of(batch)]
            for number in range(1, 9):
                assert loader.upcoming_ids().tolist() == wanted[number][0]
                assert loader.state == wanted[number - 1][3]
                got.append(of(loader.next()))
            assert all(map(equal, got, wanted))
            loader.seek(loader.state)
            loader.seek(wanted[3][3])
            assert equal(of(loader.next()), wanted[4]) and [equal(of(one), wanted[4 + k]) for k, one in enumerate(loader.epoch(1))] == [True] * 4
            del batch
        assert governor.ledger().pools["pinned"].leased_bytes == 0


def learnt(path, items, where, until):
    """Ids of the steps that are made now, and bits; a run is left after `until` steps."""
    with opened(path) as run:
        torch.manual_seed(1)
        model = torch.nn.Linear(50, 1).to("sim")
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-6))
        loader, ids = plimsoll.Loader.open(run.governor, items, batch_rows=30, seed=2, device=where), []
        for batch in run.steps(loader, epochs=2, commit_every_steps=1, progress=False):
            ids.append(batch.ids.tolist())
            run.step(lambda _, one=batch: model(one.tensor("image").to("sim")).square().mean(), batch.ids)
            if run.steps_made + 1 == until:
                raise KeyboardInterrupt
        return ids, [one.detach().cpu() for one in model.parameters()]


def test_a_run_goes_on_with_the_batch_after_its_last_though_another_was_on_its_way(items, tmp_path):
    ids, bits = learnt(tmp_path / "whole", items, None, 0)
    with pytest.raises(KeyboardInterrupt) as left:
        learnt(tmp_path / "run", items, "sim", 3)
    left.value.__traceback__ = left.value.__context__ = None
    again, same_bits = learnt(tmp_path / "run", items, "sim", 0)
    assert again == ids[-len(again):] and len(again) in (6, 7) and same(bits, same_bits)


@pytest.mark.parametrize("place", ["host", "device", "driver"])
def test_features_come_when_they_are_needed_where_no_room_is_left(place, items, monkeypatch):
    with plimsoll.Governor("3GiB", foreign_bytes="1GiB") as governor:
        with plimsoll.Loader.open(governor, items, batch_rows=30, seed=2) as loader:
            wanted = [of(loader.next()) for _ in range(6)]
        if place == "driver":
            monkeypatch.setattr(device.cudart, "cudaHostRegister", lambda *_: 2)
        with plimsoll.Loader.open(governor, items, batch_rows=30, seed=2, device="sim") as loader:
            def refused(*_, **__):
                raise (plimsoll.BudgetExceeded("planted", "pinned", 1, 0, 1, {}, "") if place == "host" else torch.OutOfMemoryError("planted"))
            if place != "driver":
                monkeypatch.setattr(_pinned.HostSlots, "send", refused)
            for one in wanted:
                assert loader.upcoming_ids().tolist() == one[0] and equal(of(loader.next()), one)


def test_slots_that_do_not_fit_are_refused_when_a_loader_opens(items, monkeypatch):
    nothing_pinned(monkeypatch)
    with plimsoll.Governor("3GiB", foreign_bytes="1GiB") as governor:
        with pytest.raises(plimsoll.BudgetExceeded, match="planted") as refused:
            plimsoll.Loader.open(governor, items, batch_rows=30, device="sim")
        assert refused.value.requested_bytes == 2 * mmap.PAGESIZE
