# SPDX-License-Identifier: Apache-2.0
"""Frozen weights that stream to the simulated device: the bits of resident ones, the peak of a few blocks, and no wait missing."""
import contextlib
import gc
import threading

import pytest
import torch

import plimsoll

plimsoll.Governor("3GiB", foreign_bytes="1GiB").close()  # Before the first tensor of the device.

from plimsoll.memory import _pinned
from plimsoll.training import _device_ring, _weight_files
from tests import device
from tests.support.parts import HOW, bits_of, made
from tests.support.quick_collections import collections_are_quick, collections_are_whole_again  # noqa: F401  Fixtures.
from tests.support.waits import forget_frames, left_out

_pinned.DRIVERS["sim"] = device.host_driver
MIB = 1 << 20
BLOCKS = 8


class Block(torch.nn.Module):
    """A frozen map, and a trained one of rank 4 beside it."""

    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.base = torch.nn.Linear(width, width)
        self.a, self.b = torch.nn.Linear(width, 4, bias=False), torch.nn.Linear(4, width, bias=False)
        for part in (self.norm, self.base):
            part.requires_grad_(False)

    def forward(self, x):
        y = self.norm(x)
        return x + torch.nn.functional.dropout(self.base(y) + self.b(self.a(y)), 0.1, self.training)


class Net(torch.nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.first = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = torch.nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def card():
    device.configure(capacity=1 << 30, context=0, fraction=1.0, exact=False)
    yield
    while gc.collect():  # A thread that met an error lets go of what it had as its ring goes.
        pass
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() == 0


def trained(folder, weights, width=64, rows=8, steps=4, limit="900MiB", before_step=lambda number, made: None, **options):
    """(bits of losses and of trained weights, the device's peak, bytes of the device's slots at the end)."""
    gc.collect()  # A model is a circle.
    with plimsoll.Governor("3GiB", foreign_bytes="1GiB", devices={"sim": limit}) as governor:
        torch.manual_seed(3)
        model = Net(width, BLOCKS)
        made = plimsoll.stream_frozen(model, weights=weights, directory=folder, device="sim", **options)
        assert made.streamed == (weights == "streamed")
        assert {one.device.type for one in model.parameters()} == {"sim"}
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2, fused=True)
        step = plimsoll.TrainingStep(model, optimizer)
        batch, losses = torch.randn(rows, 8).to("sim"), []
        governor.devices["sim"].begin_peak()
        for number in range(steps):
            before_step(number, made)
            losses.append(step(batch, lambda x: model(x).square().mean()))
        bits = [torch.tensor(losses), *(one.detach().cpu() for one in model.parameters() if one.requires_grad)]
        peak = int(torch.sim.max_memory_allocated())
        held = made.device_bytes
        made.close()
        return bits, peak, held


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture(scope="module")
def resident(tmp_path_factory):
    device.configure(capacity=1 << 30, context=0, fraction=1.0)
    return trained(tmp_path_factory.mktemp("resident"), "resident")[0]


@pytest.mark.parametrize("slots", [2, 3, 20])
def test_streamed_weights_have_the_bits_of_resident_ones(slots, resident, tmp_path):
    with device.order_checked():
        assert same(trained(tmp_path, "streamed", slots=slots)[0], resident)


def test_kernels_and_copies_may_be_late(resident, tmp_path):
    with device.order_checked(), device.kernels_late():
        assert same(trained(tmp_path, "streamed")[0], resident)


def test_the_peak_is_that_of_two_blocks(tmp_path):
    """Weights of 8 blocks of 4 MiB, of which two are there at a time where the limit leaves no room for more."""
    device.configure(exact=True)
    block = 4 * 1024 * 1024 + 3 * 4096
    _, whole, _ = trained(tmp_path / "a", "resident", width=1024, rows=2)
    _, two, held = trained(tmp_path / "b", "streamed", width=1024, rows=2, limit=14 * MIB)
    assert whole - two > 5.5 * block and two <= 14 * MIB and 2 * block <= held < 2.1 * block, (whole, two, held, block)
    _, three, held = trained(tmp_path / "c", "streamed", width=1024, rows=2, limit=16 * MIB, slots=3)
    assert two <= three <= two + 1.2 * block and 3 * block <= held < 3.1 * block, (two, three, held)


def test_blocks_stay_on_the_device_as_far_as_its_limit_leaves_room(resident, tmp_path):
    seen = []
    bits = trained(tmp_path / "all", "streamed", before_step=lambda number, made: seen.append(made.device_bytes))[0]
    slot = seen[0] // 2
    assert same(bits, resident) and seen == [2 * slot, 2 * slot, 3 * slot, 4 * slot]


def test_blocks_stay_until_the_limit_has_no_room_for_two_more(tmp_path):
    device.configure(exact=True)
    seen = []
    _, peak, held = trained(tmp_path / "some", "streamed", width=1024, rows=2, steps=10, limit=34 * MIB,
                            before_step=lambda number, made: seen.append(made.device_bytes))
    assert peak <= 34 * MIB and seen == sorted(seen) and 4 <= round(held / (4.01 * MIB)) < 2 + BLOCKS, (peak, seen)


@pytest.mark.parametrize("late", [False, True])
def test_blocks_that_stay_go_where_a_step_is_refused_and_come_again(late, resident, tmp_path):
    whole = trained(tmp_path / "whole", "resident", steps=12)[0]
    assert same(whole[1:1], []) and not same(whole, resident)
    for allocation in (0, 3, 7, 12, 21, 33):
        seen = []

        def before(number, made):
            seen.append(made.device_bytes)
            if number == 5:
                refused.__enter__()

        refused = device.refusing(allocation)
        with device.kernels_late() if late else device.order_checked():
            assert same(trained(tmp_path / f"{allocation}", "streamed", steps=12, before_step=before)[0], whole)
        refused.__exit__(None, None, None)
        counts = [one // (seen[0] // 2) - 2 for one in seen]
        assert counts[:6] == [0, 0, 1, 2, 3, 4] and counts[6] == 0 and counts[-1] == 2, counts


def test_blocks_are_kept_in_memory_of_the_host(resident, tmp_path, monkeypatch):
    reads = []
    read = _weight_files.WeightReader.read
    monkeypatch.setattr(_weight_files.WeightReader, "read", lambda self, place, *more: reads.append(place.name) or read(self, place, *more))
    kept = []
    with device.order_checked():
        bits = trained(tmp_path, "streamed", limit=3 * MIB, before_step=lambda number, made: kept.append(made.kept_bytes))[0]
    assert same(bits, resident) and all(one > 0 for one in kept)
    assert len(reads) == len(set(reads)) == 4 * BLOCKS  # Each weight once in four steps.


@pytest.mark.parametrize("weights", ["streamed", "resident"])
def test_a_model_that_does_not_fit_is_refused_with_a_limit_that_would_do_and_nothing_is_left(weights, tmp_path):
    def model():
        made = Net(64, BLOCKS)
        made.head = torch.nn.Linear(64, 1 << 16)
        return made

    with plimsoll.Governor("3GiB", foreign_bytes="1GiB", devices={"sim": 8 * MIB}) as governor:
        with pytest.raises(plimsoll.BudgetExceeded, match=r"the model takes 1\d.0 MiB of sim, .*device_memory_limit left 8.0 MiB") as refused:
            plimsoll.stream_frozen(model(), weights=weights, directory=tmp_path, device="sim")
        least = refused.value.smallest_limit_bytes
        assert refused.value.tag == "sim" and 16 * MIB < least <= 20 * MIB
        forget_frames(refused.value)
        assert not [one.name for one in threading.enumerate() if "weights" in one.name]
        assert governor.ledger().pools["weights"].leased_bytes == 0
    del refused
    gc.collect()
    torch.accelerator.empty_cache()
    with plimsoll.Governor("3GiB", foreign_bytes="1GiB", devices={"sim": least}), torch.no_grad():
        plimsoll.stream_frozen(whole := model(), weights=weights, directory=tmp_path, device="sim").close()
        whole.head(torch.zeros(1, 64, device="sim"))


@pytest.mark.parametrize("missing", ["copies wait", "compute waits"])
def test_a_wait_that_is_missing_is_found(missing, tmp_path, monkeypatch):
    close = _device_ring.DeviceRing.close
    monkeypatch.setattr(_device_ring.DeviceRing, "close", lambda self: device.let_copies_go() or close(self))  # It waits for them.
    # Nor does a copy end before the kernel begins that should have waited for it.
    held = device.copies_held() if missing == "compute waits" else contextlib.nullcontext()
    with pytest.raises(RuntimeError, match="nothing orders them") as found:
        with device.order_checked(), held, left_out(missing):
            trained(tmp_path, "streamed")
    forget_frames(found.value)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("parts", HOW)
def test_parts_of_blocks_that_run_again_have_the_same_bits(parts, reentrant, tmp_path):
    with plimsoll.Governor("3GiB", foreign_bytes="1GiB", devices={"sim": "900MiB"}):
        expected = bits_of(made(parts).to("sim"), device="sim")
        with device.order_checked():
            streamed = plimsoll.stream_frozen(model := made(parts, reentrant), weights="streamed", directory=tmp_path, device="sim")
            seen = streamed.device_bytes
            assert same(bits_of(model, device="sim"), expected)
            assert streamed.device_bytes == seen * 2  # Two blocks more stay, as after three steps of any model.
        streamed.close()
        del model, streamed
