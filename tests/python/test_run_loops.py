# SPDX-License-Identifier: Apache-2.0
"""plimsoll.Run with a loop for each epoch: resumed at any commit it goes on as one that nobody disturbed.

A life ends by an exception in its body, after which nothing is committed: as by a kill.
"""
import pytest

import plimsoll

torch = pytest.importorskip("torch")


class Killed(Exception):
    pass


def lives(life, path, kills):
    """What life(run's folder, the step it is killed in) gives, killed in these steps, one after another, and not at all."""
    undisturbed = life(path / "undisturbed", -1)
    for step in kills:
        with pytest.raises(Killed):
            life(path / "run", step)
    return undisturbed, life(path / "run", -1)


# ---- Data that has an order of its own for each epoch ----


@pytest.mark.parametrize("every, workers", [(1, 0), (4, 0), (3, 0), (12, 0), (4, 1)])
@pytest.mark.parametrize("per_loop, leaves", [(1, 0), (2, 0), (1, 3)])
def test_a_stateful_loader_keeps_its_order_over_the_end_of_an_epoch_and_of_a_loop(every, per_loop, leaves, workers, tmp_path):
    """Commits come at the end of an epoch (4 batches), within it, or of a loop. leaves: a loop after so many batches."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def life(path, killed_in):
        with plimsoll.Run(path, memory_limit="2GiB", seed=5) as run:
            order = {"seen": []}
            run.track(order=order)
            data = torchdata.StatefulDataLoader(range(8), batch_size=2, shuffle=True, num_workers=workers)
            for _ in range(6 // per_loop):
                for batch in run.steps(data, epochs=per_loop, commit_every_steps=every, progress=False):
                    if run.steps_made + 1 == killed_in:
                        run._life.end_writing()
                        raise Killed
                    order["seen"] = [*order["seen"], (*batch.tolist(), torch.rand(1).item())]
                    if leaves and len(order["seen"]) % leaves == 0:
                        break
            return order["seen"]

    steps = 18 if leaves else 24
    undisturbed, resumed = lives(life, tmp_path, [5, 7, 9, 12, steps - 1])
    assert len(undisturbed) == steps and len({tuple(one[:2]) for one in undisturbed}) > 8
    assert resumed == undisturbed


def test_more_epochs_of_a_loop_with_an_order_of_its_own_are_gone_on_with(tmp_path):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def life(path, epochs):
        with plimsoll.Run(path, memory_limit="2GiB", seed=5) as run:
            order = {"seen": []}
            run.track(order=order)
            data = torchdata.StatefulDataLoader(range(8), batch_size=2, shuffle=True)
            for batch in run.steps(data, epochs=epochs, progress=False):
                order["seen"] = [*order["seen"], (*batch.tolist(), torch.rand(1).item())]
            return order["seen"], torch.rand(1).item()

    life(tmp_path / "run", 2)
    assert life(tmp_path / "run", 4) == life(tmp_path / "other", 4)


class Wrapping:
    """Its state after the last batch is that of the next epoch, as before the first."""

    def __init__(self):
        self.next = 0

    def __len__(self):
        return 3

    def __iter__(self):
        for k in range(self.next % 3, 3):
            self.next += 1
            yield self.next - 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_an_epoch_that_a_state_says_is_over_is_not_read_again(tmp_path):
    def life(path, killed_in):
        with plimsoll.Run(path, memory_limit="2GiB") as run:
            order = {"seen": []}
            run.track(order=order)
            for one in run.steps(Wrapping(), epochs=3, commit_every_steps=3, progress=False):
                if run.steps_made + 1 == killed_in:
                    run._life.end_writing()
                    raise Killed
                order["seen"] = [*order["seen"], one]
            return order["seen"]

    undisturbed, resumed = lives(life, tmp_path, [4, 8])
    assert undisturbed == [*range(9)] == resumed
