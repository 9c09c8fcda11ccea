# SPDX-License-Identifier: Apache-2.0
"""What a refused step puts back, wherever it is: gradients of leaves, buffers, optimizers, generators."""
import collections
import collections.abc
import copy
import gc
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import plimsoll
from plimsoll.core import _torch_gate
from plimsoll.training._batch import Batch

extension = _torch_gate.load_if_torch_imported()
if extension is None:
    pytest.skip("plimsoll was built without torch", allow_module_level=True)

F = torch.nn.functional
FOR_EVER = 1 << 40


@pytest.fixture(autouse=True, scope="module")
def collections_are_quick():
    """A refusal collects garbage; torch's own modules need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def governor():
    with plimsoll.Governor("3GiB") as one:
        yield one
        extension.refuse(0, 0)


def bits(*parts):
    """Everything in modules, optimizers, tensors, generators, as bytes."""
    out = []
    for part in parts:
        if isinstance(part, torch.nn.Module):
            out += [(name, value.detach().numpy().tobytes()) for name, value in part.state_dict().items()]
        elif isinstance(part, torch.optim.Optimizer):
            for index, state in part.state_dict()["state"].items():
                out += [(index, name, v.numpy().tobytes() if torch.is_tensor(v) else v)
                        for name, v in sorted(state.items())]
        elif isinstance(part, torch.Generator):
            out.append(part.get_state().numpy().tobytes())
        else:
            out.append(None if part is None else part.detach().numpy().tobytes())
    return out


def every_fault(begin, act, look, *, stride=1, wanted=None):
    """A step refused at each of its allocations, for ever and then once.

    begin() -> state; act(state) makes the step; look(state) -> bits. Refused for ever the bits are as
    before; afterwards, and refused once, they are those of the undisturbed step.
    """
    undisturbed = begin()
    act(undisturbed)
    wanted = look(undisturbed)
    fault = 1 - stride
    tried = 0
    while True:
        fault += stride
        state = begin()
        before = look(state)
        refusals = extension.arena_stats()["refusals"]
        extension.refuse(fault, FOR_EVER)
        try:
            act(state)
        except plimsoll.BudgetExceeded:
            extension.refuse(0, 0)
            assert look(state) == before, f"fault {fault}"
        extension.refuse(0, 0)
        if extension.arena_stats()["refusals"] == refusals:
            assert tried > 2
            return
        tried += 1
        act(state)
        assert look(state) == wanted, f"fault {fault}, then in peace"
        state = begin()
        extension.refuse(fault, 1)
        act(state)
        extension.refuse(0, 0)
        assert look(state) == wanted, f"fault {fault}, once"


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


class WithRows:
    """The model and rows of a table, in one transaction."""

    def __init__(self, governor, folder, optimizer=torch.optim.AdamW):
        self.folder = folder / str(random.getrandbits(60))
        torch.manual_seed(2)
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2)
        self.table = plimsoll.EmbeddingStore.open(
            governor, self.folder, rows=50, dim=8, init=plimsoll.Normal(1.0), store_bytes="4MiB",
            optimizer=plimsoll.AdamW(lr=0.1))
        self.step = plimsoll.TrainingStep(self.model, self.optimizer, loss="mean")
        self.ids = np.array([3, 4, 4, 9])
        self.x, self.rows = torch.ones(4, 8), self.table.gather(self.ids)

    def __call__(self):
        self.step({"x": self.x, "rows": self.rows},
                  lambda batch: self.model(batch["x"] + batch["rows"]).square().mean())

    def bits(self):
        return bits(self.model, self.optimizer) + [self.table.gather(np.arange(12)).array.tobytes()]


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


# ---- Weights of parts (R20) ----


def token_batch():
    torch.manual_seed(0)
    table = torch.nn.Embedding(11, 11)
    x = torch.randint(11, (8, 16))
    y = x.roll(-1, 1).clone()
    y[:4, 2:] = -100
    y[:2] = -100  # Rows without any target: of the first part of four, the mean is no number.
    return table, x, y


def gradient_of(parts, f, **options):
    table, x, y = token_batch()
    step = plimsoll.TrainingStep(table, torch.optim.SGD(table.parameters(), lr=0.0), loss="mean",
                                 **options)
    step.parts = parts
    value = step((x, y), lambda x, y: f(table(x), y))
    return value, table.weight.grad


def cross_entropy(scores, y):
    return F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=-100)


def by_hand(scores, y):
    each = F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
    return each / (y != -100).sum().clamp(min=1)


@pytest.mark.parametrize("f, options", [
    (cross_entropy, {}), (by_hand, {"weight": lambda x, y: (y != -100).sum()})])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_r20_targets_that_are_ignored_weigh_nothing(parts, f, options):
    whole, wanted = gradient_of(1, f, **options)
    value, found = gradient_of(parts, f, **options)
    assert value == pytest.approx(whole, rel=1e-6)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-6


def test_r20_a_loss_that_does_not_say_its_weight_is_not_cut():
    with pytest.raises(ValueError, match="the loss ends in DivBackward0.*weight="):
        gradient_of(2, by_hand)
    table, x, y = token_batch()
    step = plimsoll.TrainingStep(table, torch.optim.SGD(table.parameters(), lr=1.0), loss="mean")
    before = bits(table)

    def f(x, y):
        if len(x) > 4:
            torch.empty(1 << 40)
        return by_hand(table(x), y)

    with pytest.raises(plimsoll.BudgetExceeded, match="the batch was not cut: the loss ends in DivB.*weight="):
        step((x, y), f)
    assert bits(table) == before and step.parts == 1


def test_r20_rows_that_are_padded_part_by_part_are_not_cut():
    """The mean of a padded batch is not that of parts which are padded less."""
    table, x, _ = token_batch()
    lengths = torch.tensor([2] * 4 + [16] * 4)
    step = plimsoll.TrainingStep(table, torch.optim.SGD(table.parameters(), lr=1.0), loss="mean")
    step.parts = 2
    with pytest.raises(ValueError, match="22 numbers a row in one part and of 176 in another"):
        step((x, lengths), lambda x, n: table(x[:, :int(n.max())]).mean())


# ---- Batches (R21) ----


Named = collections.namedtuple("Named", "x y")


class Own(collections.abc.MutableMapping):
    """A mapping of a program's own, over a dict."""

    def __init__(self, **held):
        self._held = held

    def __getitem__(self, key):
        return self._held[key]

    def __setitem__(self, key, value):
        self._held[key] = value

    def __delitem__(self, key):
        del self._held[key]

    def __iter__(self):
        return iter(self._held)

    def __len__(self):
        return len(self._held)

    x = property(lambda self: self["x"])


@pytest.mark.parametrize("wrap, f", [
    (lambda x, y: {"x": x, "deep": [{"y": y}, None], "name": "text", "k": 2},
     lambda m, b: F.cross_entropy(m(b["x"]) * b["k"], b["deep"][0]["y"])),
    (lambda x, y: Named(x, y), lambda m, b: F.cross_entropy(m(b.x) * 2, b.y)),
    (lambda x, y: collections.UserDict(x=x, y=y), lambda m, b: F.cross_entropy(m(b["x"]) * 2, b["y"])),
    (lambda x, y: Own(x=x, y=y), lambda m, b: F.cross_entropy(m(b.x) * 2, b["y"])),
    (lambda x, y: {"x": x.numpy(), "y": y.tolist()},
     lambda m, b: F.cross_entropy(m(torch.as_tensor(b["x"])) * 2, torch.tensor(b["y"]))),
], ids=["dict", "namedtuple", "userdict", "own", "arrays_and_lists"])
def test_r21_batches_of_any_structure_are_cut(wrap, f):
    def trained(parts):
        torch.manual_seed(5)
        model = torch.nn.Linear(8, 3)
        step = plimsoll.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss="mean")
        step.parts = parts
        x, y = torch.randn(6, 8), torch.randint(3, (6,))
        value = step(wrap(x, y), lambda batch: f(model, batch))
        return value, model.weight.detach()

    assert trained(3)[0] == pytest.approx(trained(1)[0], rel=1e-6)
    assert torch.allclose(trained(3)[1], trained(1)[1], rtol=1e-5)


def test_r21_numbers_and_none_beside_tensors_and_a_split_of_ones_own():
    model = torch.nn.Linear(8, 2)
    step = plimsoll.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.0), loss="mean")
    assert step((torch.ones(4, 8), 3, None), lambda x, k, _: model(x).mean() * k) != 0
    uneven = (torch.ones(4, 8), torch.ones(3, 8))
    with pytest.raises(plimsoll.BudgetExceeded, match="have 3 and 4 rows; split="):
        step(uneven, lambda x, y: torch.empty(1 << 40))
    step = plimsoll.TrainingStep(
        model, torch.optim.SGD(model.parameters(), lr=0.0), loss="mean",
        split=lambda batch, parts: [(one, batch[1]) for one in batch[0].chunk(parts)])
    step.parts = 2
    seen = []
    step(uneven, lambda x, y: seen.append((len(x), len(y))) or model(x).mean())
    assert seen == [(2, 3), (2, 3)]


class WithNext(collections.namedtuple("WithNext", "x y")):
    """With a constructor of its own."""

    def __new__(cls, x):
        return super().__new__(cls, x, x + 1)


def test_named_tuples_and_sizes_with_constructors_of_their_own_are_batches():
    x = torch.arange(8.0).reshape(4, 2)
    batch = Batch((WithNext(x), x.shape, 3))
    assert batch.rows == 4 and [len(one) for one in batch.tensors()] == [4, 4]
    (first, size, _), (second, _, _) = (part.arguments for part in batch.cut(2))
    assert size == (4, 2) and type(size) is torch.Size and type(first) is WithNext
    assert torch.equal(first.y, x[:2] + 1) and torch.equal(second.x, x[2:])


def test_a_packed_sequence_is_a_batch_that_is_not_cut():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(k, 8) for k in (1, 3, 2, 1)], enforce_sorted=False)
    batch = Batch((packed, torch.ones(4)))
    assert batch.rows == 4 and "PackedSequence" in batch.why_whole and len(list(batch.tensors())) == 2
    assert batch.arguments()[0] is packed
    one = Batch(torch.nn.utils.rnn.pack_sequence([torch.ones(6, 8)]))  # As many times as it has numbers in a row.
    assert one.rows == 1 and one.why_whole
    model = torch.nn.LSTM(8, 2)
    step = plimsoll.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss="mean")
    assert step((packed, torch.ones(4, 2)), lambda x, y: (model(x)[1][0][0] - y).square().mean()) > 0
    step.parts = 2
    assert step(packed, lambda x: model(x)[0].data.mean()) != 0
    with pytest.raises(plimsoll.BudgetExceeded, match="the batch was not cut: a PackedSequence .*; split="):
        step(packed, lambda x: torch.empty(1 << 40))


class Accumulating:
    """Windows of three batches, clipped; by hand or by the step."""

    def __init__(self, **options):
        torch.manual_seed(6)
        self.model = torch.nn.Linear(8, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.batches = [torch.randn(4, 8) * 3 for _ in range(6)]
        self.step = plimsoll.TrainingStep(self.model, self.optimizer, loss="mean", accumulate=3,
                                          clip_norm=0.5, scheduler=self.scheduler, **options)

    def loss(self, x):
        return self.model(x).square().mean()

    def by_hand(self):
        for k, x in enumerate(self.batches):
            self.loss(x).backward()
            if k % 3 == 2:
                for p in self.model.parameters():
                    p.grad.mul_(1 / 3)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def bits(self):
        return bits(self.model, self.optimizer) + [self.scheduler.get_last_lr()]


def test_r21_accumulation_clipping_and_a_scheduler_do_as_by_hand():
    one, other = Accumulating(), Accumulating()
    updated = []
    for x in one.batches:
        one.step((x,), one.loss)
        updated.append(one.step.updated)
    other.by_hand()
    assert one.bits() == other.bits()
    assert updated == [False, False, True] * 2 and one.step.steps == 2
    assert one.step.gradient_norm > 0.5


@pytest.mark.parametrize("at", [1, 2])
def test_r21_a_refusal_within_a_window_costs_no_bit(at):
    def begin():
        one = Accumulating()
        for x in one.batches[:at]:
            one.step((x,), one.loss)
        return one

    def look(one):
        return one.bits() + bits(*(p.grad for p in one.model.parameters()))

    every_fault(begin, lambda one: one.step((one.batches[at],), one.loss), look, stride=9)


def test_r21_a_window_goes_on_after_a_checkpoint():
    whole, first, then = Accumulating(), Accumulating(), Accumulating()
    for x in whole.batches:
        whole.step((x,), whole.loss)
    for x in first.batches[:4]:
        first.step((x,), first.loss)
    then.model.load_state_dict(first.model.state_dict())
    then.optimizer.load_state_dict(first.optimizer.state_dict())
    then.scheduler.load_state_dict(first.scheduler.state_dict())
    then.step.load_state_dict(first.step.state_dict())
    for x in then.batches[4:]:
        then.step((x,), then.loss)
    assert then.bits() == whole.bits() and then.step.steps == 2


def test_gradients_of_a_window_go_to_where_the_parameters_are():
    """A checkpoint is read to the host. The device "meta" refuses a gradient of the host, as "cuda" does."""
    first = Accumulating()
    first.step((first.batches[0],), first.loss)
    elsewhere = torch.nn.Linear(8, 2, device="meta")
    step = plimsoll.TrainingStep(elsewhere, torch.optim.SGD(elsewhere.parameters()), loss="mean", accumulate=3)
    step.load_state_dict(first.step.state_dict())
    assert {p.grad.device.type for p in elsewhere.parameters()} == {"meta"}


def test_r21_several_optimizers_and_a_hook_before_the_update():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))

    def doubled():
        for p in model.parameters():
            p.grad.mul_(0)

    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in model]
    before = bits(model)
    plimsoll.TrainingStep(model, optimizers, before_update=doubled)(
        torch.ones(2, 4), lambda x: model(x).sum())
    assert bits(model) == before
    plimsoll.TrainingStep(model, optimizers)(torch.ones(2, 4), lambda x: model(x).sum())
    after = bits(model)
    assert all(one != other for one, other in zip(before, after))

    def begin():
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        parts = [torch.optim.AdamW(part.parameters(), fused=True) for part in net]
        return net, parts, plimsoll.TrainingStep(net, parts)

    x = torch.ones(2, 4)
    every_fault(begin, lambda one: one[2](x, lambda x: one[0](x).sum()),
                lambda one: bits(one[0], *one[1]), stride=11)


def test_r21_a_scaler_decides_for_optimizer_and_rows(governor, tmp_path):
    def trained(factor, fault=0):
        one = WithRows(governor, tmp_path)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        one.step = plimsoll.TrainingStep(one.model, one.optimizer, scaler=scaler)
        extension.refuse(fault, 1)
        with torch.autocast("cpu", torch.bfloat16):
            one.step((one.x, one.rows), lambda x, v: one.model(x + v).float().square().mean() * factor)
        extension.refuse(0, 0)
        found = one.bits() + [scaler.state_dict()]
        one.table.close()
        return found, one.step, scaler

    plain, step, _ = trained(1.0)
    assert step.updated
    for fault in range(1, 60, 20):
        assert trained(1.0, fault)[0] == plain, f"fault {fault}"
    skipped, step, scaler = trained(float("inf"))
    assert not step.updated and scaler.get_scale() == 512.0
    untouched = WithRows(governor, tmp_path)
    assert skipped[:2] == untouched.bits()[:2] and skipped[-2] == untouched.bits()[-1]


def test_r21_options_that_need_each_other_say_so():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match='accumulate: 2.*loss="mean"'):
        plimsoll.TrainingStep(model, optimizer, accumulate=2)
    with pytest.raises(ValueError, match="weight: only"):
        plimsoll.TrainingStep(model, optimizer, loss="sum", weight=len)


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
