# SPDX-License-Identifier: Apache-2.0
"""plimsoll.integrations.accelerate: what a real Accelerator holds, as parts of a run."""
import pytest

import plimsoll
from tests.support.lives import told

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")

from plimsoll.integrations.accelerate import parts
from tests.support.trainer_programs import Average, Lines
from tests.support.trainers import PROGRAMS


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_killed_at_any_moment_a_loop_with_an_accelerator_ends_in_the_same_bits(workers, kills, tmp_path):
    """Commits come after two batches, the optimizer's steps after three: gradients wait in a commit."""
    seen = told(PROGRAMS, tmp_path, kills, kills + workers, "accelerate", workers)
    assert seen["digest"] == seen["undisturbed"] and seen["killed_at"]


def test_it_names_what_was_prepared_and_registered():
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(ValueError, match="nothing was prepared"):
        parts(accelerator)
    nets = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    prepared = accelerator.prepare(*nets, *optimizers)
    average = Average(nets[0])
    accelerator.register_for_checkpointing(average)
    named = parts(accelerator)
    assert list(named) == ["model", "model_1", "optimizer", "optimizer_1", "registered", "accelerator"]
    assert list(named.values())[:5] == [*prepared, average]


def test_gradients_of_a_window_go_to_where_the_parameters_are():
    """A checkpoint is read to the host. The device "meta" refuses a gradient of the host, as "cuda" does."""
    accelerator = accelerate.Accelerator(cpu=True)
    net = accelerator.prepare(torch.nn.Linear(2, 2))
    window = parts(accelerator)["accelerator"]
    net.weight.grad = torch.ones(2, 2)
    state = window.state_dict()
    net.zero_grad()
    window.load_state_dict(state)
    assert net.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]] and net.bias.grad is None
    net.to("meta")
    window.load_state_dict(state)
    assert net.weight.grad.device.type == "meta" and net.bias.grad is None


def test_a_loader_that_was_prepared_is_refused(tmp_path):
    loader = accelerate.Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(Lines(8), batch_size=2))
    with plimsoll.Run(tmp_path / "run", memory_limit="4GiB") as run:
        with pytest.raises(ValueError, match="accelerate prepared has no position: give run.loader"):
            next(run.steps(loader))
