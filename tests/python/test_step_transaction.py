# SPDX-License-Identifier: Apache-2.0
"""What a refused step puts back, wherever it is: gradients of leaves, buffers, optimizers, generators."""
import collections
import copy
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import plimsoll
from tests.support.refused_steps import FOR_EVER, WithRows, bits, collections_are_quick, every_fault, extension, governor  # noqa: F401  Fixtures.

F = torch.nn.functional


# ---- Gradients (R52) ----


class WithLeaves:
    """Leaves in the batch and in a closure, one of which has a gradient already."""

    def __init__(self, **options):
        torch.manual_seed(1)
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.step = plimsoll.TrainingStep(self.model, self.optimizer, **options)
        self.x = torch.randn(8, 8)
        self.given = torch.randn(8, 8, requires_grad=True)
        self.given.grad = torch.ones(8, 8)
        self.mine = torch.randn(8, requires_grad=True)
        self.step((self.x,), lambda x: self.model(x).square().mean())

    def __call__(self):
        self.step((self.x, self.given), lambda x, v: self.model(x + v * self.mine).square().mean())

    def bits(self):
        return bits(self.model, self.optimizer, self.given.grad, self.mine.grad)


def test_r52_gradients_of_every_leaf_are_put_back():
    every_fault(WithLeaves, lambda one: one(), WithLeaves.bits, stride=5)


def test_r52_a_later_part_that_is_refused_leaves_no_gradient_of_the_earlier():
    """Four parts at last; rows of the first and second parts were added up twice before."""
    def gradient(refuses):
        one = WithLeaves(loss="mean")
        one.step.parts = 1 if refuses else 4
        calls = []

        def f(x, v):
            calls.append(len(x))
            if refuses and (len(x) == 8 or (len(x) == 4 and len(calls) > 3)):
                torch.empty(1 << 40)
            return one.model(x + v).square().mean()

        one.step((one.x, one.given), f)
        return one.given.grad, one.step, calls

    expected, step, _ = gradient(False)
    found, step, calls = gradient(True)
    assert step.parts == 4 and calls == [8, 8, 4, 4, 2, 2, 2, 2]  # The second half was refused.
    assert torch.equal(found, expected)
    one = WithLeaves()
    one.step((one.x, one.given), lambda x, v: one.model(x + v).square().mean())
    assert torch.allclose(found, one.given.grad, rtol=1e-5)


def test_r52_rows_in_the_batch_are_applied_with_the_step(governor, tmp_path):
    made = []

    def begin():
        for old in made:
            old.table.close()
        made[:] = [WithRows(governor, tmp_path)]
        return made[0]

    every_fault(begin, lambda one: one(), WithRows.bits, stride=7)
    one, other = begin(), WithRows(governor, tmp_path)
    one()
    with pytest.raises(ValueError, match="applied already"):
        one.rows.tensor
    by_hand = other.table.gather(other.ids)
    other.step((torch.ones(4, 8), by_hand.tensor), lambda x, v: other.model(x + v).square().mean())
    other.table.apply(by_hand)
    assert one.bits() == other.bits()


def test_r52_a_gradient_of_rows_that_is_no_number_changes_nothing(governor, tmp_path):
    one = WithRows(governor, tmp_path)
    before = one.bits()
    rows = one.table.gather(one.ids)
    with pytest.raises(ValueError, match="the gradient of id 3 is NaN"):
        one.step((rows,), lambda v: one.model(v).sum() * float("nan"))
    assert one.bits() == before and len(rows.tensor) == 4


# ---- Modules, generators (R18) ----


class Assigning(torch.nn.Module):
    """Everything that forward may do to its own attributes."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("later", None)
        self.calls, self.seen, self.generator = 0, [], torch.Generator().manual_seed(5)

    def forward(self, x):
        y = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.count = self.count + 1
        self.later = self.mean * 2
        self.calls += 1
        self.seen.append(len(x))
        self.last = y.detach()
        return y - self.mean + torch.randn(8, generator=self.generator)


class WithState:
    def __init__(self):
        torch.manual_seed(3)
        self.model = Assigning()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.step = plimsoll.TrainingStep(self.model, self.optimizer)
        self.noise = torch.Generator().manual_seed(4)
        self.drawn, self.dice = np.random.default_rng(6), random.Random(7)
        self.x = torch.randn(4, 8)

    def __call__(self):
        def noisy(x):
            return x + torch.randn(4, 8, generator=self.noise) + self.drawn.random() + self.dice.random()

        self.step((self.x,), lambda x: self.model(noisy(x)).square().mean())

    def bits(self):
        model = self.model
        return bits(model, self.optimizer, self.noise, model.generator) + [
            model.calls, list(model.seen), hasattr(model, "last"), model.later is None,
            self.drawn.bit_generator.state, self.dice.getstate(), random.getstate(),
            np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()]


def test_r18_reassigned_buffers_attributes_and_generators_are_put_back():
    every_fault(WithState, lambda one: one(), WithState.bits, stride=7)


def test_r18_plan_batch_and_admit_put_reassigned_buffers_back():
    one = WithState()
    one()
    before = one.bits()

    def step(rows):
        one.optimizer.zero_grad()
        one.model(torch.randn(rows, 8, generator=one.noise)).square().mean().backward()
        one.optimizer.step()

    plimsoll.plan_batch(step, model=one.model, optimizer=one.optimizer, available="32MiB",
                        max_batch_size=64)
    assert one.bits() == before
    one.step.admit((one.x,), lambda x: one.model(
        x + torch.randn(4, 8, generator=one.noise)).square().mean())
    assert one.bits() == before


def test_containers_of_modules_get_their_entries_back():
    model = torch.nn.Linear(4, 4)
    model.seen, model.last = [1], collections.deque([1, 2], maxlen=2)
    model.by_name, model.counts = collections.OrderedDict(a=1), collections.Counter("ab")
    model.sums = collections.defaultdict(int, a=1)
    parts = model.seen, model.last, model.by_name, model.counts, model.sums
    before = copy.deepcopy(parts)
    step = plimsoll.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def f(x):
        model.seen.append(2), model.last.append(3), model.by_name.update(b=2), model.counts.update("bc")
        model.sums["c"] += 1
        return model(x + torch.empty(1 << 40)).sum()

    with pytest.raises(plimsoll.BudgetExceeded):
        step((torch.ones(2, 4),), f)
    assert parts == before and parts == (model.seen, model.last, model.by_name, model.counts, model.sums)


def test_r18_a_tensor_that_cannot_be_put_back_is_named():
    model = torch.nn.Linear(4, 4)
    model.sums = torch.zeros(4)
    step = plimsoll.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def f(x):
        model.sums.add_(1)
        return model(x + torch.empty(1 << 40)).sum()

    with pytest.raises(RuntimeError, match=r"Linear.sums was written in place.*register_buffer"):
        step((torch.ones(2, 4),), f)


class Momentum(torch.nn.Module):
    """A second network without gradients follows the first in each forward."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(3)
        self.one, self.other, self.how = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).requires_grad_(False), how

    def forward(self, x):
        with torch.no_grad():
            for own, of in zip(self.other.parameters(), self.one.parameters()):
                if self.how == "assigned":
                    own.data = own.data * 0.9 + of.data * 0.1
                else:
                    own.lerp_(of, 0.1)
        return (self.one(x) * self.other(x + torch.zeros(4, 8))).sum()


@pytest.mark.parametrize("how", ["assigned", "in others"])
def test_parameters_without_gradients_are_put_back(how):
    def begin():
        model = Momentum(how)
        optimizer = torch.optim.SGD(model.one.parameters(), lr=0.1)
        others = [model.other] if how == "in others" else []
        return plimsoll.TrainingStep(model, optimizer, others=others), (torch.ones(4, 8),), model

    every_fault(begin, lambda one: one[0](*one[1:]), lambda one: bits(one[2]), stride=5)


def test_parameters_without_gradients_that_a_rehearsed_step_writes_are_put_back():
    """They are on disk meanwhile, where the parameters are that have gradients."""
    model = Momentum("in place")
    optimizer = torch.optim.SGD(model.one.parameters(), lr=0.1)
    before = bits(model)
    step = plimsoll.TrainingStep(model, optimizer)
    assert step.admit((torch.ones(4, 8),), model) > 0
    assert bits(model) == before
    step((torch.ones(4, 8),), model)
    assert bits(model) != before


def test_a_parameter_without_gradients_that_cannot_be_put_back_is_named():
    model = Momentum("in place")
    step = plimsoll.TrainingStep(model, torch.optim.SGD(model.one.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"Linear\.weight needs no gradient and was written in place .* others="):
        step((torch.ones(4, 8),), lambda x: model(x) + torch.empty(1 << 40).sum())


def test_r18_any_other_exception_puts_everything_back():
    one = WithState()
    one()
    before = one.bits()

    def f(x):
        one.model(x).square().mean()
        raise KeyError("a bad sample")

    with pytest.raises(KeyError, match="a bad sample"):
        one.step((one.x,), f)
    assert one.bits() == before


# ---- Optimizers (R19) ----


class Lookback(torch.optim.Optimizer):
    """A user's own: moves parameters to where they were four steps ago, with lists in its state."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        for group in self.param_groups:
            group["seen"] = self.count
            for p in group["params"]:
                kept = self.state[p].setdefault("kept", [])
                kept.append(p.clone())
                p.sub_(p.grad * group["lr"] + 0.01 * (p - kept[-4:][0]))


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2), "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p), "rmsprop": lambda p: torch.optim.RMSprop(p),
    "own": lambda p: Lookback(p, lr=1e-2),
    "groups": lambda p: torch.optim.AdamW([{"params": [one]} for one in p], fused=True),
}


class WithOptimizer:
    def __init__(self, make, steps=1, **options):
        torch.manual_seed(8)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
        self.optimizer = make(list(self.model.parameters()))
        self.step = plimsoll.TrainingStep(self.model, self.optimizer, **options)
        self.x = torch.randn(4, 4)
        for _ in range(steps):
            self()

    def __call__(self):
        self.step((self.x,), lambda x: self.model(x).square().mean())

    def bits(self):
        if isinstance(self.optimizer, Lookback):
            kept = [t.numpy().tobytes() for state in self.optimizer.state.values()
                    for t in state.get("kept", [])]
            return bits(self.model) + kept + [self.optimizer.count]
        return bits(self.model, self.optimizer)


@pytest.mark.parametrize("name, steps, stride", [
    *((name, 1, 9) for name in OPTIMIZERS), ("adamw", 0, 9),
    *(pytest.param(name, steps, 1, marks=pytest.mark.slow) for name in OPTIMIZERS for steps in (0, 1))])
def test_r19_no_optimizer_is_left_half_way(name, steps, stride):
    every_fault(lambda: WithOptimizer(OPTIMIZERS[name], steps), lambda one: one(), WithOptimizer.bits,
                stride=stride)


def test_r19_what_the_copies_take_is_admitted():
    def admitted(**options):
        model = torch.nn.Linear(1024, 1024)
        step = plimsoll.TrainingStep(model, torch.optim.AdamW(model.parameters(), **options))
        step((torch.ones(2, 1024),), lambda x: model(x).mean())
        extension.purge()
        before = extension.arena_stats()["live_bytes"]
        bytes_ = step.admit((torch.ones(2, 1024),), lambda x: model(x).mean())
        return bytes_ - before

    fused = admitted(fused=True)  # First: what was promised is not taken back.
    assert admitted() > fused + 2.5 * (4 << 20)  # The parameters and two states.


def test_r19_a_refused_copy_says_which_optimizer_needs_none():
    one = WithOptimizer(OPTIMIZERS["adamw"])
    extension.refuse(1, FOR_EVER)
    with pytest.raises(plimsoll.BudgetExceeded, match="fused=True and one parameter group"):
        one()


@pytest.mark.parametrize("why_whole", [False, True])
def test_r41_a_step_of_which_no_part_can_be_tried_names_a_limit_to_try(why_whole):
    model, x = torch.nn.Linear(64, 64), torch.ones(32, 64)
    step = plimsoll.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss="mean",
                                 split=(lambda batch, parts: [batch]) if why_whole else None)
    extension.refuse(1, FOR_EVER)
    with pytest.raises(plimsoll.BudgetExceeded) as caught:
        step((x,), lambda x: model(x).mean())
    limit = caught.value.smallest_limit_bytes
    assert f"try a limit of {limit >> 20} MiB" in str(caught.value)
    assert limit >= caught.value.limit_bytes * 9 // 8


# ---- Ranks (R22), evaluation (R58) ----


def test_r22_a_module_of_several_ranks_is_refused_by_name(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0,
                                         world_size=1)
    try:
        model = torch.nn.Linear(2, 2)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="DistributedDataParallel exchanges gradients"):
            plimsoll.TrainingStep(wrapped, optimizer)
        step = plimsoll.TrainingStep(model, optimizer)  # And where only the function has it.
        with pytest.raises(ValueError, match="DistributedDataParallel exchanges gradients"):
            step(torch.ones(2, 2), lambda x: wrapped(x).sum())
    finally:
        torch.distributed.destroy_process_group()


def test_r58_an_evaluation_is_made_in_parts_rather_than_refused():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    step = plimsoll.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss="mean")
    x = torch.randn(8, 4)
    calls = []

    def f(x):
        calls.append(len(x))
        if len(x) > 2:
            torch.empty(1 << 40)
        out = model(x)
        assert not torch.is_grad_enabled() and not model.training
        return {"out": out, "mean": out.mean()}

    before = torch.get_rng_state()
    found = step.evaluate((x,), f)
    assert calls == [8, 8, 4, 2, 2, 2, 2] and model.training
    assert torch.allclose(found["out"], model[0](x))
    assert float(found["mean"]) == pytest.approx(float(model[0](x).mean()), rel=1e-5)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(plimsoll.BudgetExceeded, match="an evaluation of 8 rows does not fit"):
        step.evaluate((x,), lambda x: torch.empty(1 << 40))


def test_r58_an_evaluation_is_admitted_before_training(governor):
    model = torch.nn.Linear(64, 64)
    step = plimsoll.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    small = step.admit((torch.ones(4, 64),), lambda x: model(x).sum())
    large = step.admit_evaluation((torch.ones(20_000, 64),), model)
    assert large >= small + 20_000 * 64 * 4
    assert governor.ledger().pools["tensors"].floor_bytes >= large
    with pytest.raises(plimsoll.BudgetExceeded, match="an evaluation of 4 rows is not admitted"):
        step.admit_evaluation((torch.ones(4, 64),), lambda x: torch.empty(1 << 40))
