# SPDX-License-Identifier: Apache-2.0
"""Steps whose frozen weights stream to the simulated device: each allocation refused in turn, and the bits of an undisturbed step.

A refused allocation is a slot, a block that was to stay, or any other tensor. Every step has dropout.
"""
import contextlib
import gc
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import plimsoll

plimsoll.Governor("3GiB", foreign_bytes="1GiB").close()  # Before the first tensor of the device.

from plimsoll.memory import _pinned
from tests import device

_pinned.DRIVERS["sim"] = device.host_driver
WIDTH, BLOCKS = 16, 3
BEGUN = 2  # Steps, after which a block stays, and the others are in slots or on their way.


@pytest.fixture(autouse=True, scope="module")
def collections_are_quick():
    """A refusal collects garbage; torch's own modules, which the first optimizer imports, need not be looked through each time."""
    torch.optim.AdamW([torch.ones(1, requires_grad=True)], fused=True)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Block(torch.nn.Module):
    """A frozen map, and a trained one of rank 4 beside it."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = torch.nn.Linear(WIDTH, 4, bias=False), torch.nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.nn.functional.dropout(torch.tanh(self.base(x) + self.b(self.a(x))), 0.1, self.training)


class Adapted:
    """A model, and how a step is made of it."""

    def __init__(self, folder, weights="streamed"):
        torch.manual_seed(3)
        self.model = torch.nn.Module()
        self.model.first, self.model.blocks = torch.nn.Linear(8, WIDTH), torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.weights = plimsoll.stream_frozen(self.model, weights=weights, directory=folder, device="sim")
        self.slots_bytes = self.weights.device_bytes
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
        self.step = plimsoll.TrainingStep(self.model, self.optimizer)
        self.batch = torch.randn(6, 8).to("sim")
        torch.manual_seed(7)

    def run(self, x):
        x = self.model.first(x)
        for block in self.model.blocks:
            x = block(x)
        return x

    def loss(self, x):
        return self.run(x).square().mean()

    def act(self):
        self.step(self.batch, self.loss)

    def staying(self):
        """How many blocks stay on the device."""
        return 2 * self.weights.device_bytes // self.slots_bytes - 2

    def bits(self):
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        trained = [one for one in self.model.parameters() if one.requires_grad]
        return [one.detach().cpu().numpy().tobytes() for one in (*trained, *states, torch.get_rng_state(), *device.get_rng_state_all())]


class Around(Adapted):
    """Blocks run again in backward by the loop's own asking, too, as with gradient checkpointing of transformers."""

    def run(self, x):
        x = self.model.first(x)
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Kept(Adapted):
    """A graph that is kept, and gone back over twice."""

    def loss(self, x):
        x = x.detach().requires_grad_()
        loss = self.run(x).square().mean()
        gradient, = torch.autograd.grad(loss, x, retain_graph=True)
        return loss * (1 + gradient.square().sum().item())


@contextlib.contextmanager
def limited():
    device.configure(capacity=1 << 30, context=0, fraction=1.0)
    with plimsoll.Governor("3GiB", foreign_bytes="1GiB", devices={"sim": "900MiB"}) as governor:
        yield governor
        while gc.collect():
            pass


def begun(kind, steps, folder, weights="streamed"):
    """It after so many steps."""
    one = kind(folder, weights)
    for _ in range(steps):
        one.act()
    torch.accelerator.synchronize()
    return one


@pytest.mark.parametrize("kind", [Adapted, Around, Kept])
def test_each_allocation_of_a_streamed_step_refused_in_turn_ends_in_the_same_bits(kind, tmp_path):
    with limited():
        one = begun(kind, BEGUN + 1, tmp_path, "resident")
        wanted = one.bits()
        for _ in range(2):
            one.act()
        later = one.bits()
        del one
    refused = 0
    for allocation in itertools.count():
        with limited():
            one = begun(kind, BEGUN, tmp_path)
            stayed, ooms = one.staying(), torch.sim.memory_stats()["num_ooms"]
            assert 1 <= stayed < BLOCKS
            with device.refusing(allocation):
                one.act()
                ended = torch.sim.memory_stats()["num_ooms"] == ooms
            assert one.bits() == wanted and one.step.refusals <= 1, f"allocation {allocation}"
            refused += one.step.refusals
            for _ in range(2):
                one.act()
            assert one.bits() == later, f"allocation {allocation}"
            # Half as many stay as there were, where a step was refused; not one less else.
            assert one.staying() >= (stayed // 2 if one.step.refusals else stayed), f"allocation {allocation}: {one.staying()} blocks"
            one.weights.close()
            del one
        assert torch.accelerator.memory_allocated() == 0, f"allocation {allocation}"
        if ended:
            break
    print(kind.__name__, allocation, "allocations,", refused, "of them refused a step")
    assert allocation > 20 and refused > 10
