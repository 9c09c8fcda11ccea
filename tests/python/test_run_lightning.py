# SPDX-License-Identifier: Apache-2.0
"""plimsoll.integrations.lightning: the real Trainer as the loop of a run."""
import os
import signal

import pytest

import plimsoll
from tests.support.lives import told

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning")

from tests.support import trainer_programs
from tests.support.trainers import (
    PROGRAMS, STEPS, Ends, Grows, Pause, all_that_is_left, assert_limit_held, events, refused_once)


class At(lightning.Callback):
    """Does something after an optimizer step, before the run hears of it."""

    def __init__(self, step, do):
        self.step, self.do, self.seen, self.validated = step, do, [], []

    def on_validation_end(self, trainer, *_):
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)

    def on_train_batch_end(self, trainer, *_):
        if not trainer.fit_loop._should_accumulate():
            self.seen.append(trainer.global_step)
            if trainer.global_step == self.step:
                self.do()


def live(path, *callbacks, limit="4GiB", **changes):
    """One life of a run: (run, module), closed."""
    with plimsoll.Run(path, memory_limit=limit, seed=3) as run:
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


class Logs(lightning.Callback):
    """What the module logged of each epoch."""

    def __init__(self):
        self.losses = []

    def on_train_epoch_end(self, trainer, *_):
        self.losses.append(float(trainer.callback_metrics["loss"]))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    logs = Logs()
    return weights(live(tmp_path_factory.mktemp("undisturbed") / "run", logs)[1]), logs.losses


def test_m06_cleaning_up_between_steps_changes_no_bit_of_an_accumulation(undisturbed, tmp_path):
    """Steps 3, 6, 9 and 12 are followed by a validation, and the run looks one step later."""
    _, module = live(tmp_path / "run", cleanup_every_n_steps=3)
    assert torch.equal(weights(module), undisturbed[0])
    cleaned = events(tmp_path / "run", "cleanup")
    assert [one["step"] for one in cleaned if one["when"] == "step"] == [4, 7, 10]
    assert {one["when"] for one in cleaned} == {"step", "evaluation"}


@pytest.mark.parametrize("every, made", [(3, [4, 7, 10, 12]), (6, [7, 12]), (5, [5, 10, 12])])
def test_a_commit_that_falls_on_an_epochs_end_or_a_validation_is_made_a_step_later(every, made, tmp_path):
    """Validations follow steps 3 and 9; 6 and 12 end an epoch, and are validated. Before a step that one follows, it is
    committed as well, until one has gone well with as little memory."""
    live(tmp_path / "run", commit_every_steps=every)
    seen = [one["step"] for one in events(tmp_path / "run", "commit")]
    assert seen == sorted({*seen, *made}) and set(seen) - set(made) <= {2, 5, 8, 11}


@pytest.mark.parametrize("first, stride", [(1, 7), (2, 5), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_a_step_that_memory_refuses_once_is_done_again_to_the_same_bits(first, stride, undisturbed, tmp_path,
                                                                       monkeypatch):
    refused, logs = refused_once(monkeypatch, stride, first), Logs()
    _, module = live(tmp_path / "run", logs)
    assert torch.equal(weights(module), undisturbed[0]) and logs.losses == undisturbed[1]
    # Where copies for the optimizer's step are refused, nothing is done again.
    assert len(refused) > 10 and len(events(tmp_path / "run", "refusal")) > 0.7 * len(refused)


def test_memory_that_is_there_again_the_second_time_is_no_failure(undisturbed, tmp_path):
    _, module = live(tmp_path / "run", prepare=lambda module: Grows(module.net, 256 << 20, 5, all_that_is_left))
    refusal, = events(tmp_path / "run", "refusal")
    assert refusal["step"] == 5 and refusal["next"] == "the same once more"
    assert torch.equal(weights(module), undisturbed[0])


def test_a_step_that_does_not_fit_names_the_limit_to_go_on_with(undisturbed, tmp_path):
    path, first, again = tmp_path / "run", At(-1, None), At(-1, None)
    with pytest.raises(plimsoll.BudgetExceeded, match="step 9 does not fit and was not made: .* Everything is as "
                                                      "before it; try a limit of") as told:
        live(path, first, prepare=lambda module: Grows(module.net, 4400 << 20, 9))
    status = plimsoll.status(path)
    assert (status["status"], status["checkpoint_step"], first.seen[-1]) == ("stopped", 8, 8)
    limit = told.value.smallest_limit_bytes
    _, module = live(path, again, limit=limit, prepare=lambda module: Grows(module.net, 4400 << 20, 1))
    assert again.seen[0] == 9 and torch.equal(weights(module), undisturbed[0])


def test_what_cannot_be_put_back_is_not_done_again(tmp_path):
    def prepare(module):
        def counted(*_):
            module.count += 1
            if torch.is_grad_enabled() and module.count > 8:
                torch.empty(5 << 30, dtype=torch.uint8)

        module.count = torch.zeros(1)  # No buffer.
        module.net.register_forward_pre_hook(counted)

    with pytest.raises(plimsoll.BudgetExceeded, match=r"not put back: Module\.count was written in place .* try a "
                                                      "limit of"):
        live(tmp_path / "run", prepare=prepare)


@pytest.mark.parametrize("step", [0, 1, 3, 6, 11])
def test_short_memory_while_it_waits_for_a_batch_finds_every_step_committed(step, undisturbed, tmp_path):
    """The first epoch has 46 items; step 3 was validated, step 6 was the epoch's last."""
    path, first, again = tmp_path / "run", At(-1, None), At(-1, None)
    with pytest.raises(plimsoll.MemoryPressure):
        live(path, first, data=Ends(8 * step + 1 - 2 * (step >= 6), "memory"), commit_every_steps=0)
    assert plimsoll.status(path)["checkpoint_step"] == step
    _, module = live(path, again)
    assert again.seen[0] == step + 1 and torch.equal(weights(module), undisturbed[0])
    assert first.validated + again.validated == [3, 6, 9, 12]


def test_within_a_step_the_last_commit_stands(undisturbed, tmp_path):
    with pytest.raises(plimsoll.MemoryPressure):
        live(tmp_path / "run", data=Ends(8 * 4 + 5, "memory"))  # For the second batch of step 5.
    assert plimsoll.status(tmp_path / "run")["checkpoint_step"] == 4
    assert torch.equal(weights(live(tmp_path / "run")[1]), undisturbed[0])


@pytest.mark.parametrize("step", [2, 6])
def test_a_worker_that_the_same_signal_ended_is_no_failure(step, undisturbed, tmp_path):
    path, first, again = tmp_path / "run", At(-1, None), At(-1, None)
    run, _ = live(path, first, data=Ends(8 * step + 1 - 2 * (step >= 6), "signal"), workers=1)
    assert run.stopped == "SIGTERM" and first.seen[-1] == plimsoll.status(path)["checkpoint_step"] == step
    _, module = live(path, again)
    assert again.seen[0] == step + 1 and torch.equal(weights(module), undisturbed[0])


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


def test_s35_without_an_end_status_makes_no_total_up(tmp_path):
    live(tmp_path / "run", At(4, lambda: plimsoll.stop(tmp_path / "run")), max_epochs=-1)
    status = plimsoll.status(tmp_path / "run")
    assert (status["step"], status["steps_total"], status["seconds_left"], status["epochs"]) == (4, None, 0, 0)


def test_without_an_end_it_goes_on_where_it_was(tmp_path):
    for step in (4, 7):
        run, _ = live(tmp_path / "run", At(step, lambda: plimsoll.stop(tmp_path / "run")), max_epochs=-1)
        assert run.steps_made == step


def test_other_data_than_the_run_began_with_is_refused(tmp_path):
    live(tmp_path / "run", At(4, lambda: plimsoll.stop(tmp_path / "run")))
    with pytest.raises(ValueError, match="batch_size was 4 and is 2"):
        live(tmp_path / "run", batch_size=2)


def test_what_it_cannot_do_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="reload_dataloaders_every_n_epochs"):
        live(tmp_path / "run", reload_dataloaders_every_n_epochs=1)
    from lightning.pytorch.demos.boring_classes import BoringModel

    from plimsoll.integrations.lightning import RunCallback

    with plimsoll.Run(tmp_path / "other", memory_limit="4GiB") as run:
        trainer = lightning.Trainer(callbacks=[RunCallback(run)], accelerator="cpu", logger=False,
                                    enable_checkpointing=False, max_epochs=1)
        with pytest.raises(ValueError, match="run.loader"):
            trainer.fit(BoringModel())


def test_the_limit_is_held_with_workers(tmp_path):
    assert_limit_held("lightning", tmp_path / "run")
