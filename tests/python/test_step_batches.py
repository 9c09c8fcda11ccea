# SPDX-License-Identifier: Apache-2.0
"""How a step cuts its batch, what its parts weigh, and what several batches, optimizers and a scaler make together."""
import collections
import collections.abc

import pytest

torch = pytest.importorskip("torch")

import plimsoll
from plimsoll.training._batch import Batch
from tests.support.refused_steps import FOR_EVER, WithRows, bits, collections_are_quick, every_fault, extension, governor  # noqa: F401  Fixtures.

F = torch.nn.functional


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


def test_a_rehearsal_is_no_batch_of_the_window():
    one = Accumulating()
    one.step.rehearse((one.batches[0],), one.loss)
    assert (one.step.state_dict()["batches"], one.step.steps, one.step.updated) == (0, 0, True)
    one.step((one.batches[1],), one.loss)
    assert not one.step.updated


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
