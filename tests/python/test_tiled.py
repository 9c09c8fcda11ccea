# SPDX-License-Identifier: Apache-2.0
"""plimsoll.Tiled: a module applied to tiles of a batch, by one process and by several ranks (decision 0086)."""
import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from plimsoll.core import _torch_gate

if _torch_gate.load_if_torch_imported() is None:
    pytest.skip("plimsoll was built without torch", allow_module_level=True)

import plimsoll


class Pair(torch.nn.Module):
    """Two outputs of two arguments; `idle` is in neither."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.idle = torch.nn.Linear(5, 3), torch.nn.Linear(2, 3), torch.nn.Linear(1, 1)
        self.rows = []  # Of each call.

    def forward(self, x, y):
        self.rows.append(len(x))
        return self.one(x).tanh() * self.other(y), self.one(x)


def batch(rows, seed=1):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=draws), torch.randn(rows, 2, generator=draws).requires_grad_()


def compared(one, other):
    return (one @ other.T).logsumexp(1).mean() + one.square().mean()


def graded(encode, model, rows):
    """The gradients of the parameters and of the argument that wants one, with a loss that compares all rows."""
    x, y = batch(rows)
    model.zero_grad()
    loss = compared(*encode(x, y))
    loss.backward()
    return [loss.detach(), y.grad, *(one.grad for one in model.parameters())]


def same(ours, theirs):
    return all(one is other is None or torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("rows", [1, 4, 5, 23])
def test_gradients_are_those_of_the_whole_module(rows):
    model = Pair().double()
    x, y = (one.detach().double() for one in batch(rows))
    wanted = []
    for encode in (model, plimsoll.Tiled(model, 4)):
        y = y.detach().requires_grad_()
        model.zero_grad()
        compared(*encode(x, y)).backward()
        wanted.append([y.grad, *(one.grad for one in model.parameters())])
    for one, other in zip(*wanted, strict=True):
        assert one is other is None or torch.allclose(one, other, rtol=1e-12, atol=1e-14)
    assert model.idle.weight.grad is None  # As without tiles.


def test_a_tile_that_is_computed_again_has_the_same_bits():
    model = Pair()
    kept = graded(plimsoll.Tiled(model, 4), model, 23)
    assert model.rows == [4] * 5 + [3]
    model.rows.clear()
    again = graded(plimsoll.Tiled(model, 4, recompute=True), model, 23)
    assert model.rows == ([4] * 5 + [3]) * 2 and same(kept, again)


def test_gradients_are_added_in_the_order_of_tiles():
    model = Pair()
    made = graded(plimsoll.Tiled(model, 4), model, 11)
    x, y = batch(11)
    outputs = [[one.detach().requires_grad_() for one in model(*tile)] for tile in zip(x.split(4), y.split(4))]
    whole = [torch.cat(parts) for parts in zip(*outputs)]
    compared(*whole).backward()
    sums = None
    for (inner, other), tile in zip(zip(x.split(4), y.split(4)), outputs):
        own = torch.autograd.grad(model(inner, other.detach()), model.one.weight, [one.grad for one in tile])[0]
        sums = own if sums is None else sums + own
    assert torch.equal(sums, made[2])


def test_without_gradients_there_is_no_graph():
    model = Pair()
    x, y = batch(9)
    with torch.no_grad():
        one, other = plimsoll.Tiled(model, 4)(x, y)
    assert not one.requires_grad and torch.equal(other, torch.cat([model(*tile)[1] for tile in zip(x.split(4), y.split(4))]))
    model.requires_grad_(False)
    assert not plimsoll.Tiled(model, 4)(x, y.detach())[0].requires_grad


def test_what_does_not_fit_is_named():
    model = Pair()
    with pytest.raises(ValueError, match="rows 0 must be at least 1"):
        plimsoll.Tiled(model, 0)
    with pytest.raises(ValueError, match=r"arguments of \[3, 4\] rows"):
        plimsoll.Tiled(model, 4)(batch(3)[0], batch(4)[1])


def test_tiles_that_use_different_parameters_are_refused():
    class Odd(Pair):
        def forward(self, x, y):
            made = super().forward(x, y)
            return made if len(x) == 4 else (self.idle(made[0][:, :1]).expand(-1, 3), made[1])

    model = Odd()
    with pytest.raises(ValueError, match="two tiles use different parameters"):
        graded(plimsoll.Tiled(model, 4), model, 9)


# ---- Ranks ----

@pytest.fixture(scope="module")
def crews():
    """In one process, which imports torch once."""
    done = subprocess.run([sys.executable, "-m", "tests.support.crew_programs"], cwd=pathlib.Path(__file__).resolve().parents[2], text=True,
                          capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_ranks_that_share_tiles_have_the_bits_of_one_process(crews):
    alone, calls = crews["alone"]
    assert alone["kept"] == alone["again"] and len({alone[name] for name in ("kept", "after", "short", "short again")}) == 3
    for name, ((first, own, limit), *others) in ((name, one) for name, one in crews.items() if name != "alone"):
        assert {way: first[way] for way in alone if way not in ("short", "wrong")} == \
            {way: one for way, one in alone.items() if way not in ("short", "wrong")}, name
        ranks = 1 + len(others)
        assert [rank for _, rank in others] == [str(rank) for rank in range(1, ranks)]
        # Six tiles: kept, again twice, without gradients, once more.
        assert own == sum(5 for tile in range(6) if tile % ranks == 0) and calls == 5 * 6
        assert all(bool(there) == (rank < 6) for rank, (there, _) in enumerate(others, 1)), name
        assert limit <= (8 << 30) // ranks


def test_a_refusal_and_an_error_of_another_rank_are_those_of_the_first(crews):
    for name, (first, *_) in crews.items():
        if name != "alone":
            assert first[0]["short"].startswith("BudgetExceeded: rank 1: OutOfMemoryError: refused for the test"), name
            assert first[0]["wrong"] == "ValueError: rank 1: ValueError: wrong for the test", name
