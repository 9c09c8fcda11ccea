# SPDX-License-Identifier: Apache-2.0
"""Steps that are refused memory at each of their allocations, and what is bit for bit as before."""
import gc
import random

import numpy as np
import pytest
import torch

import plimsoll
from plimsoll.core import _torch_gate

extension = _torch_gate.load_if_torch_imported()
if extension is None:
    pytest.skip("plimsoll was built without torch", allow_module_level=True)

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
