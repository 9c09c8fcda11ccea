# SPDX-License-Identifier: Apache-2.0
"""plimsoll.integrations.lightning: the real Trainer as the loop of a run."""
import os
import signal

import pytest

import plimsoll
from tests.support.lives import told

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning")

from tests.support import trainer_programs  # noqa: E402
from tests.support.trainers import PROGRAMS, STEPS, Pause, assert_limit_held  # noqa: E402


class At(lightning.Callback):
    """Does something after an optimizer step, before the run hears of it."""

    def __init__(self, step, do):
        self.step, self.do, self.seen = step, do, []

    def on_train_batch_end(self, trainer, *_):
        if not trainer.fit_loop._should_accumulate():
            self.seen.append(trainer.global_step)
            if trainer.global_step == self.step:
                self.do()


def live(path, *callbacks, **changes):
    """One life of a run: (run, module), closed."""
    with plimsoll.Run(path, memory_limit="2GiB", seed=3) as run:
        module, _, _ = trainer_programs.fit(run, callbacks=callbacks, **changes)
    return run, module


def weights(module):
    return torch.cat([one.reshape(-1) for one in module.state_dict().values()])


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_killed_at_any_moment_a_trainer_ends_in_the_same_bits(workers, kills, tmp_path):
    seen = told(PROGRAMS, tmp_path, kills, kills + workers, "lightning", workers)
    assert seen["digest"] == seen["undisturbed"] and seen["killed_at"]


def test_a_finished_fit_makes_no_step_more(tmp_path):
    first, again = At(-1, None), At(-1, None)
    _, before = live(tmp_path / "run", first)
    drawn = torch.rand(4)
    run, after = live(tmp_path / "run", again)
    assert torch.equal(torch.rand(4), drawn)  # What the program draws next.
    assert first.seen == list(range(1, STEPS + 1)) and again.seen == []
    assert torch.equal(weights(before), weights(after)) and run.steps_made == STEPS
    assert plimsoll.status(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize("step", [1, 2, 4, 5, 6, 7, 11])
def test_stopped_after_any_step_it_goes_on_to_the_same_bits(step, tmp_path):
    path = tmp_path / "run"
    first, again = At(step, lambda: plimsoll.stop(path)), At(-1, None)
    run, _ = live(path, first)
    committed = plimsoll.status(path)["checkpoint_step"]
    # Validations follow steps 3, 9 and the epochs' last, 6 and 12: asked there, it commits a step later.
    assert run.stopped == ".stop" and committed == first.seen[-1] == step + (step == 6)
    _, module = live(path, again)
    _, undisturbed = live(tmp_path / "undisturbed")
    assert again.seen == list(range(committed + 1, STEPS + 1))
    assert torch.equal(weights(module), weights(undisturbed))


def test_a_signal_stops_it(tmp_path):
    run, _ = live(tmp_path / "run", At(4, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert run.stopped == "SIGTERM" and plimsoll.status(tmp_path / "run")["checkpoint_step"] == 4


def test_it_pauses_at_a_commit_and_obeys_a_limit(tmp_path):
    pause = Pause(tmp_path / "run")
    callback = At(2, pause)
    live(tmp_path / "run", callback)
    assert callback.seen == list(range(1, STEPS + 1)) and pause.seen[-1] == (2, 3 << 30)


def test_max_steps_ends_it_and_is_what_status_counts(tmp_path):
    run, _ = live(tmp_path / "run", max_epochs=-1, max_steps=8)
    status = plimsoll.status(tmp_path / "run")
    assert run.steps_made == 8 and (status["steps_total"], status["epochs"]) == (8, 2)


def test_other_data_than_the_run_began_with_is_refused(tmp_path):
    live(tmp_path / "run", At(4, lambda: plimsoll.stop(tmp_path / "run")))
    with pytest.raises(ValueError, match="batch_size was 4 and is 2"):
        live(tmp_path / "run", batch_size=2)


def test_what_it_cannot_do_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="reload_dataloaders_every_n_epochs"):
        live(tmp_path / "run", reload_dataloaders_every_n_epochs=1)
    from lightning.pytorch.demos.boring_classes import BoringModel

    from plimsoll.integrations.lightning import RunCallback

    with plimsoll.Run(tmp_path / "other", memory_limit="2GiB") as run:
        trainer = lightning.Trainer(callbacks=[RunCallback(run)], accelerator="cpu", logger=False,
                                    enable_checkpointing=False, max_epochs=1)
        with pytest.raises(ValueError, match="run.loader"):
            trainer.fit(BoringModel())


def test_the_limit_is_held_with_workers(tmp_path):
    assert_limit_held("lightning", tmp_path / "run")
