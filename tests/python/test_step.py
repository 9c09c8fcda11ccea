# SPDX-License-Identifier: Apache-2.0
"""TrainingStep: memory refused at any allocation of a step costs no bit, and leaves nothing behind."""
import gc
import json

import pytest

torch = pytest.importorskip("torch")

import plimsoll
from plimsoll.core import _torch_gate

extension = _torch_gate.load_if_torch_imported()
if extension is None:
    pytest.skip("plimsoll was built without torch", allow_module_level=True)

F = torch.nn.functional
FOR_EVER = 1 << 40


@pytest.fixture(autouse=True)
def governor():
    with plimsoll.Governor("3GiB") as one:
        yield one
        extension.refuse(0, 0)


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2),
                               torch.nn.Linear(32, 4)), (8, 16)


def convnet():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
                               torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
                               torch.nn.Linear(8, 4)), (8, 3, 8, 8)


def transformer():
    return torch.nn.Sequential(
        torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True),
        torch.nn.Flatten(), torch.nn.Linear(16 * 6, 4)), (4, 6, 16)


class Run:
    def __init__(self, make, **options):
        torch.manual_seed(9)
        self.model, shape = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.batches = [(torch.randn(shape), torch.randint(4, shape[:1])) for _ in range(4)]
        self.step = plimsoll.TrainingStep(self.model, self.optimizer, **options)

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def train(self, begin=0, end=4):
        for batch in self.batches[begin:end]:
            self.step(batch, self.loss)

    def bits(self):
        values = [t.numpy().tobytes() for t in self.model.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            values += [v.numpy().tobytes() for v in state.values()]
        return values + [torch.get_rng_state().numpy().tobytes()]


def allocations():
    return extension.arena_stats()["allocations"]


def live_bytes():
    """Bytes of tensors, without those in reference cycles, which a refusal collects too."""
    gc.collect()
    return extension.arena_stats()["live_bytes"]


EVERY = [(mlp, 5), (convnet, 5), (transformer, 17),
         *(pytest.param(make, 1, marks=pytest.mark.slow) for make in (mlp, convnet, transformer))]


@pytest.mark.parametrize("make, stride", EVERY)
def test_a_refusal_at_any_allocation_costs_no_bit(make, stride):
    undisturbed = Run(make)
    undisturbed.train()
    wanted = undisturbed.bits()
    fault, faults = 1 - stride, 0
    while True:
        fault += stride
        run = Run(make)
        run.train(0, 2)
        live = live_bytes()
        refusals = extension.arena_stats()["refusals"]
        extension.refuse(fault, 1)
        run.train(2, 3)
        extension.refuse(0, 0)
        if extension.arena_stats()["refusals"] == refusals:
            break  # The step has fewer allocations than that.
        faults += 1
        assert run.step.refusals == 1
        assert live_bytes() == live, f"fault {fault} left something"
        run.train(3, 4)
        assert run.bits() == wanted, f"fault {fault}"
    assert faults * stride > 20


# Each lasting refusal is followed by smaller parts and collections: about half a second.
LASTING = [(mlp, 9), (convnet, 17), (transformer, 61), *EVERY[3:]]


@pytest.mark.parametrize("make, stride", LASTING)
def test_a_lasting_refusal_leaves_the_state_before_the_step(make, stride):
    undisturbed = Run(make)
    undisturbed.train()
    wanted = undisturbed.bits()
    fault = 1 - stride
    while True:
        fault += stride
        run = Run(make)
        run.train(0, 2)
        before = run.bits()
        refusals = extension.arena_stats()["refusals"]
        extension.refuse(fault, FOR_EVER)
        try:
            run.train(2, 3)
        except plimsoll.BudgetExceeded as error:
            assert "step 3" in str(error) and "as before it" in str(error)
        extension.refuse(0, 0)
        if extension.arena_stats()["refusals"] == refusals:
            break
        assert run.bits() == before, f"fault {fault}"
        run.train(2, 4)  # What a resumed run does once there is memory again.
        assert run.bits() == wanted, f"fault {fault}"


def test_a_fused_optimizer_whose_step_was_replaced_is_copied_too():
    """torch's own takes its memory before it writes; what stands in its place may do as it likes."""
    run = Run(mlp)
    run.train(0, 1)
    before, plain = run.bits(), run.optimizer.step

    def step():
        plain()
        torch.empty(1 << 40)

    run.optimizer.step = step
    with pytest.raises(plimsoll.BudgetExceeded, match="as before it"):
        run.train(1, 2)
    assert run.bits() == before


def refused_above(rows, monkeypatch, run):
    """From now on a forward of more rows is refused by the arena itself."""
    plain = run.loss

    def loss(x, y):
        if len(x) > rows:
            torch.empty(1 << 40)
        return plain(x, y)

    monkeypatch.setattr(run, "loss", loss)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_is_cut_where_the_loss_adds_up(monkeypatch, tmp_path, reduction):
    def make():
        return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(),
                                   torch.nn.Linear(32, 4)), (8, 16)

    def with_reduction(run):
        run.loss = lambda x, y: F.cross_entropy(run.model(x), y, reduction=reduction)
        return run

    whole = with_reduction(Run(make))
    whole.train()
    cut = with_reduction(Run(make, loss=reduction, events=tmp_path / "events.jsonl"))
    refused_above(3, monkeypatch, cut)
    cut.train()
    assert cut.step.parts == 4 and cut.step.state_dict()["parts"] == 4
    for one, other in zip(whole.model.parameters(), cut.model.parameters()):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["next"] for event in told] == ["the same step again", "the batch in 2 parts",
                                                 "the batch in 4 parts"]
    resumed = with_reduction(Run(make, loss=reduction))
    resumed.step.load_state_dict({"parts": 4, "recomputes": False, "steps": 0})
    resumed.train()
    assert resumed.bits() == cut.bits()  # Once cut, always cut: the same bits again.


def test_batch_statistics_are_not_cut_silently(monkeypatch):
    run = Run(convnet, loss="mean")
    refused_above(4, monkeypatch, run)
    with pytest.raises(plimsoll.BudgetExceeded, match="allow_batchnorm_microbatch=True"):
        run.train()
    run = Run(convnet, loss="mean", allow_batchnorm_microbatch=True)
    refused_above(4, monkeypatch, run)
    run.train()
    assert run.step.parts == 2


def test_without_a_declared_loss_nothing_is_cut(monkeypatch):
    run = Run(mlp)
    refused_above(4, monkeypatch, run)
    with pytest.raises(plimsoll.BudgetExceeded, match='loss="mean"'):
        run.train()


def test_modules_are_recomputed_before_anything_is_cut():
    """Recomputing changes no bit, dropout and all, and lowers the peak."""
    def make():
        blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(),
                                      torch.nn.Dropout(0.3)) for _ in range(6)]
        return torch.nn.Sequential(*blocks, torch.nn.Linear(64, 4)), (512, 64)

    peaks = {}
    bits = {}
    for recomputes in (False, True):
        run = Run(make, loss="mean")
        run.step = plimsoll.TrainingStep(run.model, run.optimizer, checkpoint=run.model[:6])
        run.step.recomputes = recomputes
        run.train(0, 1)
        extension.reset_peak()
        run.train(1, 4)
        peaks[recomputes], bits[recomputes] = extension.arena_stats()["live_peak_bytes"], run.bits()
    assert bits[True] == bits[False]
    assert peaks[True] < peaks[False]
    run = Run(make)
    run.step = plimsoll.TrainingStep(run.model, run.optimizer, checkpoint=run.model[:6])
    run.train(0, 1)
    before = allocations()
    run.train(1, 2)
    middle = (allocations() - before) // 2
    extension.refuse(middle, 2)  # The step, and the same again a little later.
    run.train(2, 4)
    assert run.bits() == bits[False]


def test_gradient_caching_of_a_contrastive_loss_agrees_with_the_whole_batch():
    """Losses of cut batches stay within 1e-6 of the whole's; dropout is drawn once a row."""
    def losses(parts):
        torch.manual_seed(4)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(),
                                    torch.nn.Linear(64, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        step = plimsoll.TrainingStep(model, optimizer, loss="contrastive")
        step.parts = parts
        data = torch.randn(20, 24, 32)

        def compared(out):
            out = F.normalize(out, dim=1)
            return F.cross_entropy(out @ out.roll(1, 0).T / 0.2, torch.arange(len(out)))

        return [step.contrastive(batch, model, compared) for batch in data]

    whole = losses(1)
    for parts in (2, 3):
        assert losses(parts) == pytest.approx(whole, rel=1e-6)
    assert whole[-1] != whole[0]


def test_options_are_checked():
    run = Run(mlp)
    with pytest.raises(ValueError, match="loss: 'average'"):
        plimsoll.TrainingStep(run.model, run.optimizer, loss="average")
    with pytest.raises(ValueError, match="contrastive"):
        plimsoll.TrainingStep(run.model, run.optimizer, loss="contrastive")(run.batches[0], run.loss)
