# SPDX-License-Identifier: Apache-2.0
"""Run.embedding(): rows of a table as a module, in a step's transaction."""
import copy

import numpy as np
import pytest

import plimsoll
from plimsoll.errors import BudgetExceeded, NotFoundError

torch = pytest.importorskip("torch")

IDS = [torch.tensor([[1, 2], [1, 1], [5, 2]]), torch.tensor([[3, 2], [1, 0], [5, 5]]),
       torch.tensor([[4, 4], [0, 0], [2, 1]]), torch.tensor([[9, 9], [9, 1], [7, 1]])]
INIT = plimsoll.Uniform(bound=0.5, seed=3)


@pytest.fixture
def run(tmp_path):
    with plimsoll.Run(tmp_path / "run", memory_limit="4GiB", seed=3) as one:
        yield one


def table(run, name="items", **options):
    return run.embedding(name, rows=10, dim=4, init=INIT, **{"optimizer": plimsoll.SGD(lr=0.5), **options})


def weights(vectors):
    with torch.no_grad():
        return vectors(torch.arange(10))


def expected(start, optimizer, epochs=1, accumulate=1):
    """The same with torch.nn.Embedding, dense."""
    plain = torch.nn.Embedding.from_pretrained(start.clone(), freeze=False)
    sgd = optimizer(plain.parameters())
    for k, ids in enumerate(IDS * epochs):
        (loss(plain, ids) / accumulate).backward()
        if (k + 1) % accumulate == 0:
            sgd.step()
            sgd.zero_grad()
    return plain.weight.detach()


def loss(vectors, ids):
    return (vectors(ids).sum(1).square().sum(1) + vectors(ids[:, 0]).sum(1)).mean()  # Two lookups.


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lookups_learn_as_torchs_embedding_does(run, accumulate):
    vectors = table(run)
    start = weights(vectors)
    assert vectors(IDS[0]).shape == (3, 2, 4) and vectors(torch.tensor(3)).shape == (4,)
    model = torch.nn.Linear(1, 1)  # A run may have no optimizer but the table's.
    run.track(model=model)
    for ids in run.steps(IDS, progress=False):
        run.step(lambda ids: loss(vectors, ids), ids, loss="mean", accumulate=accumulate)
    wanted = expected(start, lambda p: torch.optim.SGD(p, lr=0.5), accumulate=accumulate)
    assert torch.allclose(weights(vectors), wanted, atol=1e-6)
    assert torch.equal(weights(vectors)[8], start[8])  # Nobody asked for it.


def test_a_loop_with_its_own_backward_applies_them(run):
    vectors = table(run)
    start = weights(vectors)
    for ids in run.steps(IDS, progress=False):
        loss(vectors, ids).backward()
        vectors.step()
    assert torch.allclose(weights(vectors), expected(start, lambda p: torch.optim.SGD(p, lr=0.5)), atol=1e-6)


@pytest.mark.parametrize("updated_first", [False, True])
def test_a_loop_with_its_own_scaler_applies_what_torchs_embedding_learns(run, updated_first):
    """The scale moves after each step, and one loss is infinite: nothing learns from it."""
    vectors, other = table(run), torch.nn.Parameter(torch.ones(1))
    start, sgd = weights(vectors), torch.optim.SGD([other], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    run.track(scaler=scaler)
    scales, good = [], [IDS[0], IDS[2], IDS[3]]
    for step, ids in enumerate(run.steps(IDS, progress=False)):
        made = loss(vectors, ids) + other.sum()
        scaler.scale(made * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(sgd)
        if updated_first:
            scaler.update()
        vectors.step()
        if not updated_first:
            scaler.update()
        sgd.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [2048.0, 1024.0, 2048.0, 4096.0]
    plain = torch.nn.Embedding.from_pretrained(start.clone(), freeze=False)
    dense = torch.optim.SGD(plain.parameters(), lr=0.5)
    for ids in good:
        loss(plain, ids).backward()
        dense.step()
        dense.zero_grad()
    assert torch.allclose(weights(vectors), plain.weight.detach(), atol=1e-6)


@pytest.mark.parametrize("whose", ["rows", "the optimizer"])
def test_what_is_not_finite_for_rows_or_for_the_optimizer_is_skipped_by_a_scaler(run, whose):
    vectors, other = table(run), torch.nn.Parameter(torch.ones(1))
    start, sgd = weights(vectors), torch.optim.SGD([other], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run.track(scaler=scaler)
    for ids in run.steps(IDS[:1], progress=False):
        scaler.scale(loss(vectors, ids) * (float("inf") if whose == "rows" else 1.0)
                     + other.sum() * (1.0 if whose == "rows" else float("inf"))).backward()
        scaler.step(sgd)
        vectors.step()
        scaler.update()
    assert scaler.get_scale() == 512.0
    assert torch.equal(weights(vectors), start)


def test_a_scaler_that_is_off_or_has_scaled_nothing_changes_nothing(run):
    vectors = table(run)
    start = weights(vectors)
    run.track(scaler=torch.amp.GradScaler("cpu", enabled=False), other=torch.amp.GradScaler("cpu"))
    for ids in run.steps(IDS, progress=False):
        loss(vectors, ids).backward()
        vectors.step()
    assert torch.allclose(weights(vectors), expected(start, lambda p: torch.optim.SGD(p, lr=0.5)), atol=1e-6)


def test_gradients_that_nobody_applies_are_an_error(run):
    vectors = table(run)
    with pytest.raises(RuntimeError, match=r"items: gradients of 9 looked-up rows were not applied: use "
                                           r"run.step\(\), or call items.step\(\)"):
        for ids in run.steps(IDS, progress=False):
            loss(vectors, ids).backward()


def test_lookups_without_a_gradient_only_read(run):
    vectors = table(run)
    start = weights(vectors)
    run.track(model=torch.nn.Linear(1, 1))

    def partly(ids):
        vectors(ids + 1)  # Not in the loss.
        with torch.no_grad():
            known = vectors(ids)
        return vectors(ids).square().mean() + known.sum() * 0

    for ids in run.steps(IDS[:1], progress=False):
        vectors(ids)
        run.step(partly, ids)
    now = weights(vectors)
    assert [bool(torch.equal(now[k], start[k])) for k in range(7)] == [True, False, False, True, True, False, True]


def refusing(vectors, times):
    """A table whose gather() refuses so often, and then no more."""
    real, left = vectors.store.gather, [times]

    def gather(ids):
        if left[0] > 0 and len(ids) == 6:
            left[0] -= 1
            raise BudgetExceeded("no room for rows", "rows", 1, 0)
        return real(ids)

    vectors.store.gather = gather


@pytest.mark.parametrize("times, close", [(1, True), (2, False)])
def test_a_refused_lookup_is_tried_again_and_then_cut(run, times, close):
    vectors = table(run)
    start = weights(vectors)
    run.track(model=torch.nn.Linear(1, 1))
    refusing(vectors, times)
    for ids in run.steps(IDS, progress=False):
        run.step(lambda ids: loss(vectors, ids), ids, loss="mean")
    wanted = expected(start, lambda p: torch.optim.SGD(p, lr=0.5))
    assert torch.allclose(weights(vectors), wanted, atol=1e-6)
    step = run._steps._made[""][0]
    assert step.refusals == times and step.parts == (1 if times == 1 else 2)


def test_a_step_that_fails_leaves_the_rows(run):
    vectors = table(run)
    model = torch.nn.Linear(4, 1)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    start = weights(vectors)
    ids = next(batches := run.steps(IDS, progress=False))
    with pytest.raises(ValueError, match="the gradient of id 1 is NaN or infinite"):
        run.step(lambda ids: (model(vectors(ids)) * float("nan")).sum(), ids)
    assert torch.equal(weights(vectors), start)
    batches.close()


def test_half_an_accumulated_window_survives_a_restart(tmp_path):
    def life(path, stop_at):
        with plimsoll.Run(path, memory_limit="4GiB", seed=3) as run:
            vectors, model = table(run), torch.nn.Linear(4, 1)
            run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            for ids in run.steps(IDS, epochs=3, largest=IDS[0].repeat(20, 1), progress=False):
                run.step(lambda ids: model(vectors(ids)).square().mean(), ids, loss="mean", accumulate=4)
                if run.steps_made == stop_at:
                    plimsoll.stop(path)
            return torch.cat([weights(vectors).flatten(), model.weight.detach().flatten()])

    undisturbed = life(tmp_path / "a", -1)
    for stop_at in (1, 4, 9):
        life(tmp_path / "b", stop_at)
    assert torch.equal(life(tmp_path / "b", -1), undisturbed)


def test_another_table_is_refused_with_both_values(tmp_path):
    def life(**options):
        with plimsoll.Run(tmp_path / "run", memory_limit="4GiB") as run:
            vectors = table(run, **options) if options.pop("open", True) else None
            run.track(model=torch.nn.Linear(1, 1))
            for ids in run.steps(IDS, progress=False):
                run.step(lambda ids: loss(vectors, ids), ids)

    life()
    with pytest.raises(ValueError, match=r"embedding 'items' is another than the run began with: optimizer was "
                                         r"SGD\(lr=0.5, .*\) and is SGD\(lr=0.25,"):
        life(optimizer=plimsoll.SGD(lr=0.25))
    with pytest.raises(ValueError, match=r"tables that this program does not open: run.embedding\('items', …\)"):
        life(open=False)
    with pytest.raises(ValueError, match="embedding 'others' is not in the commit"):
        life(name="others")


def test_what_cannot_be_looked_up(run):
    vectors = table(run)
    with pytest.raises(NotFoundError, match="10"):
        vectors(torch.tensor([10]))
    with pytest.raises(ValueError, match="items: ids are int64, not torch.float32: use ids.long"):
        vectors(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="'items' must be a new name"):
        table(run)


def test_a_copy_of_a_model_looks_up_in_the_same_table(run):
    vectors = table(run)
    model = torch.nn.Sequential(vectors, torch.nn.Linear(4, 1))
    assert "0" not in "".join(name.split(".")[0] for name in model.state_dict())
    assert torch.equal(weights(copy.deepcopy(model)[0]), weights(vectors))


def test_a_table_of_any_ids_lies_in_the_order_of_its_samples(tmp_path):
    ids, asked = np.array([70, 3, 41, 9, 12]), []

    def made():
        asked.append(True)
        return ids

    def train(out, epochs=1, **options):
        with plimsoll.Run(tmp_path / out, memory_limit="4GiB", seed=3) as run:
            vectors = run.embedding("items", rows=5, dim=4, init=INIT, optimizer=plimsoll.SGD(lr=0.5), ids=made, **options)
            run.track(model=torch.nn.Linear(1, 1))
            for batch in run.steps([torch.tensor([70, 9]), torch.tensor([12, 3])], epochs=epochs, progress=False):
                run.step(lambda rows: vectors(rows).square().sum(), batch)
            with torch.no_grad():
                return vectors(torch.from_numpy(ids)), plimsoll.info(vectors.store.directory)["layout"]

    (rows, layout), (ordered, other) = train("any"), train("ordered", layout="sample_order", order_seed=8, io_threads=2)
    assert torch.equal(rows, ordered) and layout.startswith("any") and other.startswith("sample")
    assert torch.equal(train("ordered", epochs=2)[0], train("any", epochs=2)[0])  # It stays where it was made.
    assert len(asked) == 2  # For a new table alone.
    with pytest.raises(ValueError, match="ids of 'items'.*virtual workers cannot have it"):
        with plimsoll.Run(tmp_path / "several", memory_limit="4GiB", virtual_workers=2) as run:
            run.embedding("items", rows=5, dim=4, ids=made)
