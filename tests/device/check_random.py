# SPDX-License-Identifier: Apache-2.0
"""Random models, steps and limits of the device: refused before the first step, or made to the end within the limit, to the same bits."""
import collections
import contextlib
import gc
import os
import random

import pytest
import torch

import plimsoll

plimsoll.Governor("3GiB", foreign_bytes="1GiB").close()  # Before the first tensor of the device.

from tests import device
from tests.support.quick_collections import collections_are_quick, collections_are_whole_again  # noqa: F401  Fixtures.

MIB = 1 << 20
CONTEXT = 64 * MIB
RUNS = int(os.environ.get("PLIMSOLL_RANDOM_RUNS", "16"))
SEED = int(os.environ.get("PLIMSOLL_RANDOM_SEED", "46"))
STEPS = 3


class Training:
    """A model and its step, as the dice say; the same dice make the same."""

    def __init__(self, dice):
        torch.manual_seed(dice.randrange(1 << 30))
        self.rows, width = int(2 ** dice.uniform(2, 10.5)), int(2 ** dice.uniform(5, 9.2))
        layers = [torch.nn.Sequential(torch.nn.Linear(width, width), dice.choice([torch.nn.GELU, torch.nn.ReLU])(),
                                      torch.nn.Dropout(dice.choice([0.0, 0.2])), torch.nn.LayerNorm(width))
                  for _ in range(dice.randint(1, 6))]
        self.model = torch.nn.Sequential(*layers).to("sim")
        kind, options = dice.choice([(torch.optim.AdamW, {"fused": True}), (torch.optim.AdamW, {"foreach": True}), (torch.optim.AdamW, {}),
                                     (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {})])
        self.half, self.accumulate = dice.random() < 0.4, dice.choice([1, 1, 2, 3])
        clip = dice.choice([None, 1.0])
        self.step = plimsoll.TrainingStep(self.model, kind(self.model.parameters(), lr=1e-2, **options), loss="mean", accumulate=self.accumulate,
                                          clip_norm=clip, checkpoint=layers if dice.random() < 0.3 else ())
        self.batch = torch.randn(self.rows, width)
        self.where = dice.choice(["given", "brought"])  # Whether the batch is on the device before the step.
        if self.where == "given":
            self.batch = self.batch.to("sim")

    def loss(self, x):
        with torch.autocast("sim", torch.bfloat16, enabled=self.half):
            return self.model(x.to("sim")).float().square().mean()

    def made(self):
        """Admits the step, makes some, and returns the bits."""
        self.step.admit(self.batch, self.loss)
        for _ in range(STEPS * self.accumulate):
            self.step(self.batch, self.loss)
        return [one.detach().cpu() for one in self.model.state_dict().values()]


@contextlib.contextmanager
def limited(limit):
    with plimsoll.Governor("3GiB", foreign_bytes="1GiB", devices={"sim": limit}) as governor:
        yield governor.devices["sim"]
    gc.collect()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() == 0


def outcome(seed):
    """Of one model under a limit: "refused" before its first step, or "made"."""
    with limited("900MiB") as line:
        bits = (training := Training(random.Random(seed))).made()
        peak = line.held()["peak_bytes"] - CONTEXT
        del training
        gc.collect()
    limit = CONTEXT + max(4 * MIB, int(peak * random.Random(f"limit of {seed}").uniform(0.3, 1.4)))
    with limited(limit) as line:
        training = None
        try:
            training = Training(random.Random(seed))
            again = training.made()
        except (torch.OutOfMemoryError, plimsoll.BudgetExceeded) as refused:
            admitted = training is not None and training.step.admitted_bytes
            assert not admitted, (seed, refused)
            return "refused"
        else:
            assert training.step.refusals == 0 and all(map(torch.equal, bits, again)), seed
            return "made"
        finally:
            assert line.held()["peak_bytes"] <= limit, seed
            training = None
            gc.collect()


def test_random_models_are_refused_before_the_first_step_or_keep_the_limit():
    device.configure(capacity=1 << 30, context=CONTEXT, fraction=1.0)
    outcomes = collections.Counter(outcome(SEED * 1_000_000 + run) for run in range(RUNS))
    print(dict(outcomes))
    assert sum(outcomes.values()) == RUNS and min(outcomes["made"], outcomes["refused"]) > RUNS / 10


def test_a_step_that_fits_only_as_its_blocks_lay_once_is_refused_before_the_first():
    """Its limit has room for two segments, which its second update filled otherwise than the rehearsal: 1 of 1,000 models."""
    device.configure(capacity=1 << 30, context=CONTEXT, fraction=1.0)
    assert outcome(1_130_000_500) == "refused"


def test_a_step_that_passes_the_limit_is_found(monkeypatch):
    """Were the limit not imposed, the test above would see it."""
    device.configure(capacity=1 << 30, context=CONTEXT, fraction=1.0)
    monkeypatch.setattr(device, "set_per_process_memory_fraction", lambda *_: None)
    with pytest.raises(AssertionError):
        for run in range(20):
            outcome(SEED * 1_000_000 + run)
