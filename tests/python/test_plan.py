# SPDX-License-Identifier: Apache-2.0
"""plan_batch: its answers are true of real steps, and measuring changes nothing."""
import contextlib
import copy
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import plimsoll
from plimsoll.core import _torch_gate
from plimsoll.training._plan_state import TrainingState

extension = _torch_gate.load_if_torch_imported()
if extension is None:
    pytest.skip("plimsoll was built without torch", allow_module_level=True)

F = torch.nn.functional
MIB = 1 << 20


@pytest.fixture
def governor():
    with plimsoll.Governor("3GiB") as one:
        yield one


class Training:
    """A small classifier with everything that a measured step could disturb."""

    def __init__(self, optimizer=torch.optim.AdamW, **options):
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(32, 128), torch.nn.BatchNorm1d(128), torch.nn.ReLU(),
            torch.nn.Dropout(0.2), torch.nn.Linear(128, 10))
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2, **options)

    def step(self, rows):
        self.model.train()
        self.optimizer.zero_grad()
        x = torch.randn(rows, 32)
        F.cross_entropy(self.model(x), torch.randint(10, (rows,))).backward()
        self.optimizer.step()

    def plan(self, **options):
        given = {"max_batch_size": 1 << 20, "available": "64MiB", **options}
        return plimsoll.plan_batch(self.step, model=self.model, optimizer=self.optimizer, **given)


def peak_of(step, rows):
    """(live, leased) peak of one more step, as the arena counts them."""
    extension.purge()
    extension.reset_peak()
    step(rows)
    stats = extension.arena_stats()
    return stats["live_peak_bytes"], stats["leased_peak_bytes"]


def bits_of(training):
    """Everything a step may change, as bytes."""
    model, optimizer = training.model, training.optimizer
    values = [(name, t.detach().numpy().tobytes()) for name, t in model.state_dict().items()]
    values += [(name, None if p.grad is None else p.grad.numpy().tobytes())
               for name, p in model.named_parameters()]
    for index, state in optimizer.state_dict()["state"].items():
        values += [((index, key), value.numpy().tobytes() if torch.is_tensor(value) else value)
                   for key, value in sorted(state.items())]
    values += list(optimizer.state_dict()["param_groups"])
    values += [part.training for part in model.modules()]
    values += [torch.get_rng_state().numpy().tobytes(), random.getstate(),
               np.random.get_state()[1].tobytes()]
    return values


def test_the_answer_is_exact_and_a_fifth_more_does_not_fit(governor):
    training = Training()
    plan = training.plan(available="256MiB")
    assert plan.label == "exact"
    training.step(8)  # Makes the states again.
    live, leased = peak_of(training.step, plan.batch_size)
    assert live == plan.peak_bytes
    assert leased <= plan.leased_bytes <= 256 * MIB
    assert peak_of(training.step, plan.batch_size * 6 // 5)[1] > 256 * MIB


def test_k1_the_peak_at_the_recommended_size_is_predicted(governor):
    """K1: activations of the whole batch are counted, not those of one sample."""
    training = Training()
    plan = training.plan(available="48MiB")
    training.step(8)
    live, _ = peak_of(training.step, plan.batch_size)
    assert abs(plan.peak_bytes - live) <= 0.15 * live
    assert peak_of(training.step, plan.batch_size * 6 // 5)[0] > plan.peak_bytes
    budget = plan.memory_budget()
    assert budget.recommended_batch_size == plan.batch_size
    assert budget.activation_mb > 0.5 * plan.peak_bytes / MIB
    assert "batch_size=" in str(budget)


def test_k2_fixed_costs_are_not_charged_to_every_row(governor):
    """K2: two sizes give a slope; what does not grow stays out of it."""
    training = Training()
    training.model[0] = torch.nn.Linear(32, 128)
    heavy = torch.nn.Linear(1024, 1024)  # 4 MiB that no row costs.

    def step(rows):
        training.step(rows)
        heavy(torch.ones(1, 1024)).sum().backward()

    plan = plimsoll.plan_batch(step, model=[training.model, heavy], optimizer=training.optimizer,
                               max_batch_size=1 << 20, available="64MiB")
    without = training.plan()
    assert plan.bytes_per_row == pytest.approx(without.bytes_per_row, rel=0.02)


def test_k5_the_teacher_and_the_whole_step_are_counted(governor):
    """K5: the real distillation step is what is measured, the teacher's part included."""
    training = Training()
    teacher = torch.nn.Sequential(torch.nn.Linear(32, 2048), torch.nn.ReLU(),
                                  torch.nn.Linear(2048, 10)).eval().requires_grad_(False)

    def step(rows):
        training.optimizer.zero_grad()
        x = torch.randn(rows, 32)
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        F.kl_div(training.model(x).log_softmax(1), wanted, reduction="batchmean").backward()
        training.optimizer.step()

    plan = plimsoll.plan_batch(step, model=training.model, optimizer=training.optimizer,
                               teacher=teacher, max_batch_size=1 << 20, available="64MiB")
    assert plan.label == "exact"
    assert plan.batch_size < training.plan().batch_size // 2
    assert plan.held["teacher"] >= 4 * sum(p.numel() for p in teacher.parameters())
    training.step(8)
    assert peak_of(step, plan.batch_size)[0] == plan.peak_bytes


@pytest.mark.parametrize("fresh", [True, False])
def test_k7_measuring_changes_nothing(governor, fresh):
    """K7: modes, parameters, buffers, gradients, states and random states, bit for bit."""
    training = Training()
    if not fresh:
        for _ in range(3):
            training.step(16)
        training.model.eval()
        training.model[1].train()
    before = bits_of(training)
    training.plan()
    assert bits_of(training) == before
    other = Training()
    if not fresh:
        for _ in range(3):
            other.step(16)
    for one in (training, other):
        torch.manual_seed(1)
        one.step(16)
    assert bits_of(training) == bits_of(other)


def test_measuring_that_fails_changes_nothing_either(governor):
    training = Training()
    training.step(16)
    calls = 0

    def step(rows):
        nonlocal calls
        calls += 1
        training.step(rows)
        if calls == 4:
            raise RuntimeError("the data ended")

    before = bits_of(training)
    with pytest.raises(RuntimeError, match="the data ended"):
        plimsoll.plan_batch(step, model=training.model, optimizer=training.optimizer)
    assert bits_of(training) == before


@contextlib.contextmanager
def kept_while(models, optimizers, directory, others=(), function=None):
    state = TrainingState(models, optimizers, others, directory, function)
    try:
        yield
    finally:
        state.put_back()
        state.close()


def test_a_moving_average_is_put_back(governor, tmp_path):
    training = Training()
    average = copy.deepcopy(training.model).requires_grad_(False)

    def step(rows):
        training.step(rows)
        for own, of in zip(average.parameters(), training.model.parameters()):
            own.data.mul_(0.9).add_(of.data, alpha=0.1)

    before = [value.clone() for value in average.state_dict().values()]
    with kept_while([training.model, average], [training.optimizer], tmp_path):
        step(8)
    assert all(map(torch.equal, before, average.state_dict().values()))
    with kept_while([training.model], [training.optimizer], tmp_path, function=step):  # As plan_batch() gives it.
        step(8)
    assert all(map(torch.equal, before, average.state_dict().values()))


def test_of_a_larger_frozen_model_what_cannot_be_put_back_is_named(governor, tmp_path):
    training = Training()
    frozen = torch.nn.Linear(256, 256).requires_grad_(False)

    def step(rows):
        training.step(rows)
        frozen.bias.add_(1)

    with pytest.raises(RuntimeError, match=r"Linear\.bias needs no gradient and was written in place .* others="):
        plimsoll.plan_batch(step, model=[training.model, frozen], optimizer=training.optimizer, max_batch_size=2)
    before = frozen.bias.clone()
    with kept_while([training.model], [training.optimizer], tmp_path, others=[frozen], function=step):
        step(8)
    assert torch.equal(frozen.bias, before)


def test_sparse_and_conjugate_gradients_and_buffers_are_put_back(governor, tmp_path):
    torch.manual_seed(2)
    table = torch.nn.Embedding(50, 4, sparse=True)
    waves = torch.nn.Module()
    waves.weight = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
    waves.register_buffer("phases", torch.randn(3, dtype=torch.complex64).conj())
    optimizers = [torch.optim.SparseAdam(table.parameters()), torch.optim.SGD(waves.parameters(), lr=0.1)]

    def gradients(rows):
        rows_of = table(torch.randint(50, (rows,))).to(torch.complex64)
        (rows_of @ waves.weight.conj() * waves.phases).abs().sum().backward()

    gradients(6)
    assert table.weight.grad.is_sparse and waves.weight.grad.is_conj()
    kept = [table.weight, table.weight.grad, waves.weight, waves.weight.grad, waves.phases]
    before = [one.detach().clone() for one in kept]
    with kept_while([table, waves], optimizers, tmp_path):
        for one in optimizers:
            one.step()
            one.zero_grad()
        gradients(8)
    after = [table.weight, table.weight.grad, waves.weight, waves.weight.grad, waves.phases]
    assert after[1].is_sparse and after[1].is_coalesced() == before[1].is_coalesced()
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(before, after))


def test_momentum_and_schedulers_are_put_back(governor):
    training = Training(torch.optim.SGD, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5)

    def step(rows):
        training.step(rows)
        scheduler.step()

    step(8)
    before = bits_of(training), scheduler.state_dict()
    plimsoll.plan_batch(step, model=training.model, optimizer=training.optimizer,
                        others=[scheduler], available="32MiB")
    assert (bits_of(training), scheduler.state_dict()) == before


K6 = textwrap.dedent("""
    import sys, torch, plimsoll
    torch.manual_seed(0)
    governor = plimsoll.Governor("4GiB")
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    steps = 0
    def step(rows):
        global steps
        steps += 1
        optimizer.zero_grad()
        model(torch.randn(rows, 64)).square().sum().backward()
        optimizer.step()
    plan = plimsoll.plan_batch(step, model=model, optimizer=optimizer, key=sys.argv[2],
                               available="40MiB", max_batch_size=1 << 20, directory=sys.argv[1])
    print(plan.batch_size, plan.from_cache, steps)
""")


def test_k6_a_second_process_finds_the_answer(tmp_path):
    """K6: the key is the same in every process, whatever its hash seed."""
    def ask(key, seed):
        done = subprocess.run([sys.executable, "-c", K6, str(tmp_path), key], text=True, check=True,
                              capture_output=True, env={**__import__("os").environ,
                                                        "PYTHONHASHSEED": seed})
        size, cached, steps = done.stdout.split()
        return int(size), cached == "True", int(steps)

    first = ask("set_01", "1")
    assert not first[1] and first[2] > 0
    assert ask("set_01", "2") == (first[0], True, 0)
    assert not ask("set_02", "3")[1]


def test_refuses_when_the_smallest_batch_does_not_fit(governor):
    training = Training()
    with pytest.raises(plimsoll.BudgetExceeded, match="a limit of"):
        training.plan(available="17MiB", min_batch_size=4096)


def test_a_refused_step_leaves_nothing_behind(governor):
    """The traceback's frames and autograd's queue are let go: the next attempt has all the room."""
    from plimsoll.training._plan import attempted

    layer = torch.nn.Linear(256, 256)

    def step(rows):
        hidden = layer(torch.ones(rows, 256))
        for _ in range(rows // 1000):
            hidden = hidden.tanh()
        hidden.sum().backward()

    attempt = attempted(step)
    assert attempt(10) is None
    layer.zero_grad()
    before = extension.arena_stats()["live_bytes"]
    assert "limit" in str(attempt(400_000))
    layer.zero_grad()
    assert extension.arena_stats()["live_bytes"] == before


def test_multiples_and_bounds_are_kept(governor):
    training = Training()
    assert training.plan(multiple_of=64).batch_size % 64 == 0
    assert training.plan(max_batch_size=200).batch_size == 200
    with pytest.raises(ValueError, match="no such size"):
        training.plan(min_batch_size=64, max_batch_size=8)


def test_static_mode_is_an_estimate_below_the_truth(governor):
    training = Training()
    told = plimsoll.plan_batch(model=training.model, optimizer=training.optimizer, mode="static",
                               sample=torch.randn(1, 32), available="64MiB",
                               max_batch_size=1 << 20)
    assert told.label == "estimate"
    true = training.plan().batch_size
    assert true / 8 < told.batch_size <= true


@pytest.mark.parametrize("sizes", [{"multiple_of": 0}, {"min_batch_size": 0}, {"min_batch_size": 9, "max_batch_size": 5}])
def test_static_mode_refuses_sizes_as_measured_mode_does(governor, sizes):
    with pytest.raises(ValueError, match="no such size: min_batch_size, max_batch_size"):
        plimsoll.plan_batch(model=torch.nn.Linear(4, 4), mode="static", sample=torch.ones(1, 4), **sizes)


def test_static_mode_names_a_layer_that_it_does_not_know(governor):
    class Odd(torch.nn.Module):
        def forward(self, x):
            return x[: int(x.sum())]  # A shape that depends on values.

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Odd())
    with pytest.raises(ValueError, match=r"1 \(Odd\)"):
        plimsoll.plan_batch(model=model, mode="static", sample=torch.randn(1, 4))


def test_without_a_governor_it_says_so():
    with pytest.raises(ValueError, match="Governor"):
        plimsoll.plan_batch(lambda rows: None)


def test_graphs_are_planned_in_graphs_nodes_and_edges(governor):
    torch.manual_seed(2)
    layer, head = torch.nn.Linear(8, 32), torch.nn.Linear(32, 2)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()])
    generator = np.random.default_rng(3)
    nodes = np.sort(generator.integers(5, 40, 4096))[::-1]  # The largest first.
    edges = nodes * 2 + generator.integers(0, 30, 4096)

    def extent(graphs):
        return int(nodes[:graphs].sum()), int(edges[:graphs].sum())

    def step(graphs):
        optimizer.zero_grad()
        n, e = extent(graphs)
        x = torch.ones(n, 8)
        source, target = torch.arange(e) % n, torch.arange(e) * 7 % n
        hidden = layer(x)
        hidden = torch.zeros(n, 32).index_add(0, target, hidden[source]).relu()
        graph = torch.repeat_interleave(torch.arange(graphs),
                                        torch.from_numpy(nodes[:graphs].copy()))
        pooled = torch.zeros(graphs, 32).index_add(0, graph, hidden)
        F.cross_entropy(head(pooled), torch.zeros(graphs, dtype=torch.long)).backward()
        optimizer.step()

    plan = plimsoll.plan_batch(step, model=[layer, head], optimizer=optimizer, extent=extent,
                               available="48MiB", max_batch_size=4096)
    step(8)
    live, leased = peak_of(step, plan.batch_size)
    assert plan.peak_bytes >= live and leased <= 48 * MIB
    assert plan.label != "exact" or plan.peak_bytes == live
    assert plan.batch_size > 500


# ---- A device beside the process ----


def on_device(training, limit, **options):
    return training.plan(device="simulated", device_memory_limit=limit, **options)


def test_a_smaller_device_limit_gives_a_smaller_batch_and_is_told(governor):
    training = Training()
    host = training.plan()
    assert host.device is None
    sizes = []
    for limit in (8 * MIB, "48MiB", "8GiB"):  # Far apart: a block of 1 MiB buys 20, and half on top.
        plan = on_device(training, limit)
        on = plan.device
        assert plan.label == "bounded" and on["name"] == "simulated" and on["steady"]
        assert on["static_bytes"] <= on["reserved_bytes"] <= on["bound_bytes"] <= on["limit_bytes"]
        assert on["allocated_bytes"] + on["fragmentation_bytes"] >= on["reserved_bytes"] // 2
        assert "simulated: " in str(plan) and "fragments" in str(plan)
        sizes.append(plan.batch_size)
    assert sizes[0] < sizes[1] < sizes[2] == host.batch_size


def test_what_stays_is_placed_block_by_block_where_it_is_known(governor):
    """Parameters and states are listed: an unknown sum is counted at twice its size and more."""
    training = Training()
    training.model.append(torch.nn.Linear(10, 1 << 20))  # 44 MiB, and twice that of states.
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)

    def step(rows):
        training.optimizer.zero_grad()
        training.model[:-1](torch.randn(rows, 32)).sum().backward()
        training.model[-1].weight.sum().backward()
        training.optimizer.step()

    given = {"device": "simulated", "device_memory_limit": "4GiB", "max_batch_size": 64}
    known = plimsoll.plan_batch(step, model=training.model, optimizer=training.optimizer, **given)
    unknown = plimsoll.plan_batch(step, **given)
    assert known.device["static_bytes"] < unknown.device["static_bytes"] / 1.5
    assert known.device["static_bytes"] >= 2 * 44 * MIB


def test_a_device_that_is_too_small_is_refused_with_a_limit_that_is_enough(governor):
    training = Training()
    with pytest.raises(plimsoll.BudgetExceeded, match="device_memory_limit") as refused:
        on_device(training, "4MiB", min_batch_size=4096)
    needed = refused.value.requested_bytes
    assert needed > refused.value.available_bytes == 4 * MIB
    assert on_device(training, needed, min_batch_size=4096).batch_size >= 4096


@pytest.mark.parametrize("options, words", [
    ({"device_memory_limit": "8GiB"}, "there is no device"),
    ({"device": "simulated"}, "--device-memory-limit"),
    ({"device": "tpu"}, "no such device"),
    ({"device": "simulated", "device_memory_limit": "8GiB", "mode": "static"}, "static"),
])
def test_wrong_devices_are_refused_before_a_step_runs(governor, options, words):
    with pytest.raises(ValueError, match=words):
        plimsoll.plan_batch(lambda rows: pytest.fail("a step ran"), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_cuda_says_what_to_install(governor):
    with pytest.raises(ValueError, match="has no CUDA.*install.*simulated"):
        Training().plan(device="cuda")


def test_an_answer_kept_on_disk_is_of_its_device(governor, tmp_path):
    training = Training()
    kept = {"key": "net", "directory": tmp_path}
    plain = training.plan(**kept)
    small = on_device(training, "40MiB", **kept)
    assert not small.from_cache and small.batch_size < plain.batch_size
    again = on_device(training, "40MiB", **kept)
    assert again.from_cache and again.device == small.device
    assert not on_device(training, "30MiB", **kept).from_cache
