# SPDX-License-Identifier: Apache-2.0
"""Frozen weights that stream to the simulated device: the bits of resident ones, the peak of a few blocks, and no wait missing."""
import gc

import pytest
import torch

import plimsoll

plimsoll.Governor("3GiB", foreign_bytes="1GiB").close()  # Before the first tensor of the device.

from plimsoll.training import _device_ring
from tests import device

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
    device.configure(capacity=1 << 30, context=0, fraction=1.0)
    yield
    while gc.collect():  # A thread that met an error lets go of what it had as its ring goes.
        pass
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() == 0


def trained(folder, weights, width=64, rows=8, steps=4, **options):
    """(bits of losses and of trained weights, the device's peak, the weights)."""
    with plimsoll.Governor("3GiB", foreign_bytes="1GiB", devices={"sim": "900MiB"}) as governor:
        torch.manual_seed(3)
        model = Net(width, BLOCKS)
        made = plimsoll.stream_frozen(model, weights=weights, directory=folder, device="sim", **options)
        assert made.streamed == (weights == "streamed")
        assert {one.device.type for one in model.parameters()} == {"sim"}
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2, fused=True)
        step = plimsoll.TrainingStep(model, optimizer)
        batch, losses = torch.randn(rows, 8).to("sim"), []
        governor.devices["sim"].begin_peak()
        for _ in range(steps):
            losses.append(step(batch, lambda x: model(x).square().mean()))
        bits = [torch.tensor(losses), *(one.detach().cpu() for one in model.parameters() if one.requires_grad)]
        peak = int(torch.sim.max_memory_allocated())
        stalls = made.stall_seconds
        made.close()
        del model, optimizer, step, made, batch
        gc.collect()
        return bits, peak, stalls


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
    """Weights of 8 blocks of 4 MiB, of which two are there at a time."""
    _, whole, _ = trained(tmp_path / "a", "resident", width=1024, rows=2)
    _, two, _ = trained(tmp_path / "b", "streamed", width=1024, rows=2)
    _, three, _ = trained(tmp_path / "c", "streamed", width=1024, rows=2, slots=3)
    block = 4 * 1024 * 1024 + 3 * 4096
    assert whole - two > 5.5 * block and two <= three <= two + 1.2 * block, (whole, two, three, block)


class Unordered:
    """A stream that does not wait where it is told to."""

    def __init__(self, stream):
        self._stream = stream

    def wait_event(self, event):
        pass

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def __enter__(self):
        return self._stream.__enter__()

    def __exit__(self, *what):
        return self._stream.__exit__(*what)


@pytest.mark.parametrize("missing", ["copies wait", "compute waits"])
def test_a_wait_that_is_missing_is_found(missing, tmp_path, monkeypatch):
    if missing == "compute waits":
        compute = _device_ring.DeviceRing.compute
        monkeypatch.setattr(_device_ring.DeviceRing, "compute", lambda self: Unordered(compute(self)))
    else:
        init = _device_ring.DeviceRing.__init__

        def unordered(self, *arguments):
            init(self, *arguments)
            self._copies = Unordered(self._copies)

        monkeypatch.setattr(_device_ring.DeviceRing, "__init__", unordered)
    with pytest.raises(RuntimeError, match="nothing orders them") as found:
        with device.order_checked():
            trained(tmp_path, "streamed")
    error = found.value
    while error is not None:  # Frames have the model.
        error.__traceback__, error = None, error.__context__
