# SPDX-License-Identifier: Apache-2.0
"""run.embedding on the simulated device: the bits of the CPU, rows and gradients by pinned memory, and no wait for more than is needed."""
import contextlib
import gc
import mmap
import traceback

import numpy as np
import pytest
import torch

import plimsoll

plimsoll.Governor("3GiB", foreign_bytes="1GiB").close()  # Before the first tensor of the device.

from plimsoll.memory import _pinned
from plimsoll.rows import _device_rows
from tests import device
from tests.support.waits import Unordered, left_out

ROWS, DIM, BATCH = 60, 24, 16


@pytest.fixture(autouse=True)
def card():
    device.configure(capacity=1 << 30, context=0, fraction=1.0)
    yield
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() == 0 and plimsoll.Governor.current() is None


class Clicks:
    """Ids that come more than once in a batch."""

    def __len__(self):
        return 80

    def __getitem__(self, index):
        return {"item": torch.tensor([index % 40, (index * 7) % 40]), "y": float(index % 2)}


@contextlib.contextmanager
def opened(path):
    with plimsoll.Run(path, memory_limit="3GiB", foreign_bytes="1GiB", seed=5) as run:
        yield run


def tables(run):
    return (run.embedding("items", rows=ROWS, dim=DIM, optimizer=plimsoll.AdamW(lr=0.02)),
            run.embedding("users", rows=ROWS, dim=DIM, optimizer=plimsoll.Adagrad(lr=0.05)))


def trained(path, where, how, before=lambda run, step: None):
    """Bits of losses, weights and tables. how: options of run.step(), and "scaler", "own" (a backward of the program's own), "checkpoint"."""
    how = dict(how)
    scaled, own, again = (how.pop(name, False) for name in ("scaler", "own", "checkpoint"))
    with opened(path) as run:
        items, users = tables(run)
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(2 * DIM, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)).to(where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        parts = {"model": model, "optimizer": optimizer}
        if scaled:
            scaler = parts["scaler"] = torch.amp.GradScaler(where, init_scale=2.0 ** 12, growth_interval=3)
        run.track(**parts)

        def found(ids):
            return torch.cat([items(ids).sum(1), items(ids[:, 0]) * users(ids[:, 1] + 5)], 1)

        def loss(batch):
            x = torch.utils.checkpoint.checkpoint(found, batch["item"], use_reentrant=False) if again else found(batch["item"])
            return torch.nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), batch["y"].float())

        losses = []
        for batch in run.steps(run.loader(Clicks(), batch_size=BATCH, device=where), epochs=3, progress=False):
            before(run, len(losses))
            if own:
                value = loss(batch)
                optimizer.zero_grad()
                (scaler.scale(value) if scaled else value).backward()
                if scaled:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                items.step()
                users.step(rate_scale=0.5)
                losses.append(float(value.detach()))
            else:
                losses.append(run.step(loss, batch, **how))
        with torch.no_grad():
            kept = [items(torch.arange(ROWS)), users(torch.arange(ROWS))]
            assert torch.equal(items(torch.arange(ROWS, device=where)).cpu(), kept[0])
        return [torch.tensor(losses), *(one.detach().cpu() for one in [*model.parameters(), *kept])]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


WAYS = {"plain": {}, "parts": {"loss": "mean"}, "accumulated": {"loss": "mean", "accumulate": 2}, "summed": {"loss": "sum", "accumulate": 3},
        "clipped": {"clip_norm": 0.1}, "scaled": {"scaler": True}, "own": {"own": True}, "own, scaled": {"own": True, "scaler": True},
        "computed twice": {"checkpoint": True}}


@pytest.mark.parametrize("name", WAYS)
def test_the_bits_are_those_of_the_cpu_and_nothing_is_unordered(name, tmp_path):
    how = {key: value for key, value in WAYS[name].items() if key != "scaler"}
    late = contextlib.nullcontext() if name == "clipped" else device.kernels_late()  # Norms of late kernels round otherwise.
    with device.order_checked(), late:
        got = trained(tmp_path / "sim", "sim", WAYS[name])
    if "scaler" in WAYS[name]:  # That of the CPU is another program's: powers of two change no bits.
        assert all(torch.isfinite(one).all() for one in got)
    assert same(got, trained(tmp_path / "cpu", "cpu", how)), name


def test_pinned_memory_is_two_lookups_and_the_gradients_of_a_step(tmp_path):
    seen = []
    trained(tmp_path / "run", "sim", {}, lambda run, step: seen.append(run.governor.ledger().pools["pinned"].leased_bytes))

    def pages(size):
        return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE

    def rows(count):
        return -(-count * DIM * 4 // 256) * 256

    batches = 2 * pages(_pinned.bytes_of([_pinned.Like.dense((BATCH, 2), torch.int64), _pinned.Like.dense((BATCH,), torch.float64)]))
    assert seen[-1] == batches + 2 * pages(rows(2 * BATCH)) + pages(rows(2 * BATCH) + 2 * rows(BATCH))


def test_a_step_waits_for_no_other_work_of_the_device(tmp_path):
    """A stream of somebody else stands still, and steps are made."""
    other = torch.Stream(device="sim")

    def before(run, step):
        if step == 2:
            with other:
                device.hold_stream()
        if step == 6:
            assert not other.query()
            device.open_gates()

    assert len(trained(tmp_path / "run", "sim", {}, before)[0]) == 15


@pytest.mark.parametrize("missing", ["compute waits for rows", "copies wait for gradients"])
def test_a_wait_that_is_missing_is_found(missing, tmp_path, monkeypatch):
    init = _pinned.FromDevice.__init__

    def unordered(self, *arguments):
        init(self, *arguments)
        self._copies._stream = Unordered(self._copies._stream)

    rows = missing == "compute waits for rows"
    if not rows:
        monkeypatch.setattr(_pinned.FromDevice, "__init__", unordered)
    with pytest.raises(RuntimeError, match="nothing orders them") as found:
        with device.order_checked(), left_out("compute waits" if rows else ""):
            trained(tmp_path / "run", "sim", WAYS["own"])  # In which the host waits for nothing else in between.
    traceback.clear_frames(found.tb)  # They have the model.


def test_gradients_that_are_not_waited_for_are_seen(tmp_path, monkeypatch):
    """Copies are held: what apply() would read has not come."""
    came = []
    copies = _pinned.CopyStream.copies

    def unwaited(self, targets, sources, after):
        event = copies(self, targets, sources, after)
        return type("Event", (), {"synchronize": lambda _: None})() if self is came[0] else event

    with opened(tmp_path / "run") as run:
        items, _ = tables(run)
        ids = torch.arange(8, device="sim")
        (items(ids) * 3).sum().backward()
        way = _device_rows.RowsWay.of(run.governor, ids.device)
        came.append(way._back._copies)
        (right,) = way.gradients(items._waiting)
        assert (right == 3).all()
        right[:] = 7
        monkeypatch.setattr(_pinned.CopyStream, "copies", unwaited)
        with device.copies_held():
            (wrong,) = way.gradients(items._waiting)
            assert (wrong == 7).all()
        torch.accelerator.synchronize()
        assert (wrong == 3).all()
        items._waiting.clear()


@pytest.mark.parametrize("place", ["host", "driver"])
def test_without_pinned_memory_the_bits_are_the_same(place, tmp_path, monkeypatch):
    wanted = trained(tmp_path / "a", "sim", WAYS["accumulated"])
    if place == "driver":
        monkeypatch.setattr(device.cudart, "cudaHostRegister", lambda *_: 2)
    else:
        def refused(governor, size, tag="other", reserve=plimsoll.Governor.reserve):
            if tag == "pinned":
                raise plimsoll.BudgetExceeded("planted", tag, size, 0, 1, {}, "")
            return reserve(governor, size, tag)
        monkeypatch.setattr(plimsoll.Governor, "reserve", refused)
    assert same(trained(tmp_path / "b", "sim", WAYS["accumulated"]), wanted)


def test_each_allocation_of_a_step_refused_in_turn_has_the_same_bits(tmp_path):
    """In the last step of a window of two, with rows that wait from the first."""
    wanted = trained(tmp_path / "whole", "sim", WAYS["accumulated"])
    for allocation in range(0, 40, 8):
        def before(run, step, allocation=allocation):
            device._sim.refuse_after(0, allocation, 1 if step == 5 else 0)

        assert same(trained(tmp_path / str(allocation), "sim", WAYS["accumulated"], before), wanted), allocation
        device._sim.refuse_after(0, 0, 0)


def test_unknown_ids_no_ids_and_rows_that_were_applied(tmp_path):
    with opened(tmp_path / "run") as run:
        items, _ = tables(run)
        assert items(torch.empty(0, 3, dtype=torch.int64, device="sim")).shape == (0, 3, DIM)
        with pytest.raises(plimsoll.NotFoundError):
            items(torch.tensor([1, ROWS], device="sim"))
        items._waiting.clear()
        way = _device_rows.RowsWay.of(run.governor, torch.device("sim", 0))
        rows = way.gather(items.store, np.array([3, 3, 5]))
        with pytest.raises(ValueError, match="no gradient"):
            items.store.apply(rows)
        before = rows.array
        (rows.tensor * torch.ones(3, DIM, device="sim")).sum().backward()
        items.store.apply(rows)
        with pytest.raises(ValueError, match="applied already"):
            rows.array
        assert (items.store.gather(np.array([3])).array != before[0]).all()
