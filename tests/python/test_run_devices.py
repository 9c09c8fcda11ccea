# SPDX-License-Identifier: Apache-2.0
"""Random generators of a device that is not CUDA: what a step that is made again, or in parts, draws on it.

The device is a module as torch looks for it, with generators and nothing else.
"""
import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROGRAM = """
import sys, types
import torch
import plimsoll

torch.utils.rename_privateuse1_backend("stand_in")
generators = [torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)]

class Module(types.ModuleType):
    is_initialized = is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    get_rng_state_all = staticmethod(lambda: [one.get_state() for one in generators])
    set_rng_state_all = staticmethod(lambda states: [one.set_state(state) for one, state in zip(generators, states)])
    get_rng_state = staticmethod(lambda device=0: generators[0].get_state())
    set_rng_state = staticmethod(lambda state, device=0: generators[0].set_state(state))
    drawn = staticmethod(lambda: float(sum(torch.rand(1, generator=one) for one in generators)))
    manual_seed_all = staticmethod(lambda seed: [one.manual_seed(seed) for one in generators])

torch._register_device_module("stand_in", Module("torch.stand_in"))
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = []

def drawn():
    return torch.stand_in.drawn()  # As a kernel draws: no generator is in sight.

def refused():
    step = plimsoll.TrainingStep(model, optimizer)

    def loss(x):
        seen.append(drawn())
        if len(seen) % 2:
            raise torch.OutOfMemoryError("refused")
        return (model(x) * seen[-1]).mean()

    for _ in range(3):
        step(torch.ones(2, 4), loss)
    assert step.refusals == 3 and seen[0::2] == seen[1::2] and len(set(seen)) == 3, seen

def contrastive():
    step = plimsoll.TrainingStep(model, optimizer, loss="contrastive")
    step.parts = 2

    def embed(x):
        seen.append(drawn())
        return model(x) * seen[-1]

    step.contrastive(torch.ones(4, 4), embed, lambda e: (e @ e.t()).logsumexp(1).mean())
    after = drawn()
    assert len(seen) == 4 and seen[:2] == seen[2:] and seen[0] != seen[1] != after, (seen, after)

def checkpoint():
    plimsoll.save_checkpoint("there", 1, model=model)
    one = drawn(), drawn()
    plimsoll.load_checkpoint("there", model=model)
    assert (drawn(), drawn()) == one and one[0] != one[1]

globals()[sys.argv[1]]()
"""


@pytest.mark.parametrize("what", ["refused", "checkpoint"])
def test_s11_a_step_made_again_draws_the_same_on_any_device(what, tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, what], cwd=tmp_path, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_s12_parts_of_a_contrastive_step_draw_the_same_the_second_time(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, "contrastive"], cwd=tmp_path, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
