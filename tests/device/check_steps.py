# SPDX-License-Identifier: Apache-2.0
"""plimsoll.TrainingStep on the simulated device: each allocation of a step refused in turn, and the bits of an undisturbed one.

Every step has dropout, so it draws from the device's generator: a try that starts from other random numbers ends in other bits.
"""
import gc
import itertools

import pytest
import torch
import torch.nn.functional as F

import plimsoll
from tests import device

GOVERNOR = plimsoll.Governor("3GiB", foreign_bytes="1GiB")
DEV = "sim"


@pytest.fixture(autouse=True, scope="module")
def collections_are_quick():
    """A refusal collects garbage; torch's own modules, which the first optimizer imports, need not be looked through each time."""
    Trained().act()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def memory_is_empty():
    gc.collect()
    device.configure(capacity=1 << 30, fraction=1.0)
    torch.accelerator.reset_peak_memory_stats()


class Trained:
    """A model on the device, and how a step is made of it."""

    options: dict = {"loss": "mean"}
    adamw: dict = {"foreach": False, "fused": False}

    def __init__(self):
        torch.manual_seed(0)
        self.model = self.model_of().to(DEV)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **self.adamw)
        self.step = plimsoll.TrainingStep(self.model, self.optimizer, **self.options, **self.more())
        self.batch = torch.randn(24, 16).to(DEV), torch.randint(0, 4, (24,)).to(DEV)
        torch.manual_seed(7)

    def model_of(self):
        return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(32),
                                   torch.nn.Linear(32, 4))

    def more(self):
        return {}

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def act(self):
        self.step(self.batch, self.loss)

    def bits(self):
        """Values of all that a step changes, and what the generators would give next."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        values = [*self.model.state_dict().values(), *states, *self.others(), torch.get_rng_state(), *device.get_rng_state_all()]
        return [value.detach().cpu().numpy().tobytes() for value in values]

    def others(self):
        return ()


class Fused(Trained):
    adamw = {"fused": True}


class Foreach(Trained):
    adamw = {"foreach": True}


class Recurrent(Trained):
    """An LSTM: refused within the CPU's graph, in forward and in backward."""

    adamw = {"fused": True}

    def model_of(self):
        self.lstm = torch.nn.LSTM(4, 8, num_layers=2, dropout=0.3, batch_first=True)
        return torch.nn.ModuleList([self.lstm, torch.nn.Linear(8, 4)])

    def loss(self, x, y):
        return F.cross_entropy(self.model[1](self.lstm(x.view(-1, 4, 4))[0][:, -1]), y)


class Scaled(Trained):
    """Half precision, and a GradScaler whose scale changes with each step."""

    def more(self):
        self.scaler = torch.amp.GradScaler(DEV, init_scale=2.0**8, growth_interval=1)
        return {"scaler": self.scaler}

    def loss(self, x, y):
        with torch.autocast(DEV, torch.float16):
            return F.cross_entropy(self.model(x), y)

    def others(self):
        return [torch.tensor([self.scaler.get_scale(), self.scaler._get_growth_tracker()])]


class Accumulated(Trained):
    adamw = {"fused": True}
    options = {"loss": "mean", "accumulate": 2}

    def act(self):
        for _ in range(2):
            self.step(self.batch, self.loss)


class Contrastive(Trained):
    """In two parts: rows are embedded twice, with the same random numbers."""

    adamw = {"fused": True}
    options = {"loss": "contrastive", "allow_batchnorm_microbatch": True}

    def act(self):
        self.step.parts = 2
        self.step.contrastive(self.batch[0], self.model, lambda rows: (rows @ rows.t()).logsumexp(1).mean())


class WithOthers(Trained):
    """A momentum encoder that the step writes in place, and a generator of the device's that it draws from."""

    def more(self):
        self.teacher = torch.nn.Linear(16, 4).to(DEV).requires_grad_(False)
        self.drawn = torch.Generator(DEV).manual_seed(5)
        return {"others": [self.teacher, self.drawn]}

    def loss(self, x, y):
        self.teacher.weight.mul_(0.9).add_(0.1)
        noise = torch.randn(x.shape, device=DEV, generator=self.drawn)
        return F.cross_entropy(self.model(x + 0.1 * noise) + self.teacher(x), y)

    def others(self):
        return [*self.teacher.state_dict().values(), self.drawn.get_state()]


KINDS = [Trained, Fused, Foreach, Recurrent, Scaled, Accumulated, Contrastive, WithOthers]


def refused(kind, begun, allocation, count):
    """(the step's object, its bits before the step, whether the step was given up). begun: steps before it."""
    one = kind()
    for _ in range(begun):
        one.act()
    before = one.bits()
    with device.refusing(allocation, count):
        try:
            one.act()
        except plimsoll.BudgetExceeded:
            return one, before, True
    return one, before, False


@pytest.mark.parametrize("begun", [0, 1])  # The first step makes the optimizer's states.
@pytest.mark.parametrize("kind", KINDS)
def test_each_allocation_refused_in_turn_ends_in_the_same_bits(kind, begun):
    undisturbed, _, _ = refused(kind, begun, 0, 0)
    assert undisturbed.step.refusals == 0
    wanted = undisturbed.bits()
    for allocation in itertools.count():
        one, _, given_up = refused(kind, begun, allocation, 1)
        if one.step.refusals == 0:
            break
        assert not given_up and one.step.refusals == 1 and one.bits() == wanted, f"allocation {allocation}"
    print(kind.__name__, begun, allocation, "allocations")
    assert allocation > 20


@pytest.mark.parametrize("kind", KINDS)
def test_refused_for_ever_a_step_leaves_everything_as_before(kind):
    """From each of its allocations on. With memory again, the step is made."""
    undisturbed, _, _ = refused(kind, 1, 0, 0)
    wanted = undisturbed.bits()
    for allocation in itertools.count():
        one, before, given_up = refused(kind, 1, allocation, device.FOR_EVER)
        if one.step.refusals == 0:
            break
        if given_up:
            if isinstance(one, Accumulated) and one.step._accumulation._window.batches:
                continue  # The first of its two batches was made.
            assert one.bits() == before, f"allocation {allocation}"
            one.act()
        assert one.bits() == wanted, f"allocation {allocation}"
    assert allocation > 20


def test_parts_of_a_contrastive_step_are_embedded_twice_with_the_same_random_numbers():
    one, seen = Contrastive(), []
    one.step.parts = 2

    def embed(x):
        seen.append(F.dropout(x, 0.5))
        return one.model(seen[-1])

    one.step.contrastive(one.batch[0], embed, lambda rows: (rows @ rows.t()).logsumexp(1).mean())
    assert len(seen) == 4 and torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0] == 0, seen[1] == 0)


def test_a_refusal_empties_the_cache_before_the_next_try():
    one = Fused()
    one.act()
    held = torch.empty(30 << 20, dtype=torch.uint8, device=DEV)
    del held
    cached = torch.accelerator.memory_reserved()
    seen = []

    def loss(x, y):
        seen.append(torch.accelerator.memory_reserved())
        return one.loss(x, y)

    with device.refusing(15):
        one.step(one.batch, loss)
    assert seen[0] == cached and seen[1] <= cached - (30 << 20) and one.step.refusals == 1


def test_a_batch_that_does_not_fit_is_cut():
    torch.manual_seed(1)
    x, y = torch.randn(4096, 64), torch.randint(0, 4, (4096,))

    def made(where, parts):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 512), torch.nn.GELU(),
                                    torch.nn.Linear(512, 4)).to(where)
        step = plimsoll.TrainingStep(model, torch.optim.AdamW(model.parameters(), fused=True), loss="mean")
        step.parts = parts
        for _ in range(3):
            step((x.to(where), y.to(where)), lambda a, b: F.cross_entropy(model(a), b))
        return step, [one.detach().cpu() for one in model.parameters()]

    device.configure(capacity=44 << 20)
    cut, weights = made(DEV, 1)
    assert cut.parts > 1 and cut.refusals > 0
    assert all(torch.equal(a, b) for a, b in zip(weights, made("cpu", cut.parts)[1]))
