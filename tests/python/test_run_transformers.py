# SPDX-License-Identifier: Apache-2.0
"""plimsoll.integrations.transformers: the real Trainer as the loop of a run."""
import json
import os
import signal
import time

import pytest

import plimsoll
from tests.support.forked import COMPILER, held, told

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support import trainer_programs
from tests.support.trainers import (
    PROGRAMS, STEPS, Ends, Grows, Pause, all_that_is_left, assert_limit_held, events, refused_once)


class At(transformers.TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step, do):
        self.step, self.do, self.seen = step, do, []

    def on_step_end(self, args, state, control, **_):
        self.seen.append(state.global_step)
        if state.global_step == self.step:
            self.do()


def live(path, callback=None, limit="4GiB", prepare=lambda trainer: None, **changes):
    """One life of a run: (run, trainer), closed."""
    with plimsoll.Run(path, memory_limit=limit, seed=3) as run:
        trainer = trainer_programs.make(run, callbacks=[callback] if callback else (), **changes)
        prepare(trainer)
        trainer.train()
    return run, trainer


def weights(trainer):
    return torch.cat([one.reshape(-1) for one in trainer.model.state_dict().values()])


@pytest.fixture(scope="module")
def first():
    """That programs are forked from."""
    yield from held(COMPILER, "transformers.models.gpt2.modeling_gpt2", "plimsoll.integrations.transformers")


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_killed_at_any_moment_a_trainer_ends_in_the_same_bits(workers, kills, first, tmp_path):
    seen = told(first, PROGRAMS, tmp_path, kills, kills + workers, "hugging_face", workers)
    assert seen["digest"] == seen["undisturbed"] and seen["killed_at"]


def test_a_finished_trainer_trains_no_step_more(tmp_path):
    first, again = At(-1, None), At(-1, None)
    _, before = live(tmp_path / "run", first)
    drawn = torch.rand(4)
    run, after = live(tmp_path / "run", again)
    assert torch.equal(torch.rand(4), drawn)  # What the program draws next.
    assert first.seen == list(range(1, STEPS + 1)) and again.seen == []
    assert torch.equal(weights(before), weights(after)) and run.steps_made == STEPS
    assert plimsoll.status(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize("how", ["SIGTERM", ".stop"])
def test_asked_to_stop_it_commits_within_a_step_and_goes_on_from_there(how, tmp_path):
    path = tmp_path / "run"
    ask = {"SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM), ".stop": lambda: plimsoll.stop(path)}[how]
    first = At(5, ask)
    run, _ = live(path, first)
    status = plimsoll.status(path)
    assert run.stopped == how and first.seen == [1, 2, 3, 4, 5]
    assert (status["status"], status["message"], status["checkpoint_step"]) == ("stopped", how, 5)
    again = At(-1, None)
    _, trainer = live(path, again)
    _, undisturbed = live(tmp_path / "undisturbed")
    assert again.seen == list(range(6, STEPS + 1))
    assert torch.equal(weights(trainer), weights(undisturbed))
    logged = [[line.get("loss", line.get("eval_loss")) for line in one.state.log_history if "train_loss" not in line]
              for one in (trainer, undisturbed)]  # The log of step 6 has the loss of step 5.
    assert logged[0] == logged[1] and len(logged[0]) == STEPS // 3 + STEPS // 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return weights(live(tmp_path_factory.mktemp("undisturbed") / "run")[1])


@pytest.mark.parametrize("first, stride", [(1, 41), (20, 53), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_a_step_that_memory_refuses_once_is_done_again_to_the_same_bits(first, stride, undisturbed, tmp_path,
                                                                       monkeypatch):
    refused = refused_once(monkeypatch, stride, first)
    _, trainer = live(tmp_path / "run")
    assert torch.equal(weights(trainer), undisturbed)
    assert len(refused) > 20 and len(events(tmp_path / "run", "refusal")) == len(refused)


def test_m06_cleaning_up_between_steps_changes_no_bit_of_an_accumulation(undisturbed, tmp_path):
    _, trainer = live(tmp_path / "run", cleanup_every_n_steps=5)
    assert torch.equal(weights(trainer), undisturbed)
    cleaned = events(tmp_path / "run", "cleanup")
    assert [one["step"] for one in cleaned if one["when"] == "step"] == [5, 10]
    assert {one["when"] for one in cleaned} == {"step", "evaluation"}


def test_memory_that_is_there_again_the_second_time_is_no_failure(undisturbed, tmp_path):
    _, trainer = live(tmp_path / "run", prepare=lambda trainer: Grows(trainer.model, 256 << 20, 5, all_that_is_left))
    refusal, = events(tmp_path / "run", "refusal")
    assert refusal["step"] == 5 and refusal["next"] == "the same once more"
    assert torch.equal(weights(trainer), undisturbed)


def test_a_step_that_does_not_fit_names_the_limit_to_go_on_with(undisturbed, tmp_path):
    path, first, again = tmp_path / "run", At(-1, None), At(-1, None)
    with pytest.raises(plimsoll.BudgetExceeded, match="step 8 does not fit and was not made: .* Everything is as "
                                                      "before it; try a limit of") as told:
        live(path, first, prepare=lambda trainer: Grows(trainer.model, 4400 << 20, 8))
    status = plimsoll.status(path)
    assert (status["status"], status["checkpoint_step"], first.seen[-1]) == ("stopped", 7, 7)
    assert [one["next"] for one in events(path, "refusal")] == ["the same once more",
                                                                "nothing helped: the step was not made"]
    limit = told.value.smallest_limit_bytes
    _, trainer = live(path, again, limit=limit, prepare=lambda trainer: Grows(trainer.model, 4400 << 20, 2))
    assert again.seen[0] == 8 and torch.equal(weights(trainer), undisturbed)


@pytest.mark.parametrize("step", [0, 3, 6, 11])
def test_short_memory_while_it_waits_for_a_batch_finds_every_step_committed(step, undisturbed, tmp_path):
    """The first epoch has 46 items; step 3 was evaluated, step 6 was the epoch's last."""
    path, again = tmp_path / "run", At(-1, None)
    with pytest.raises(plimsoll.MemoryPressure):
        live(path, data=Ends(8 * step + 1 - 2 * (step >= 6), "memory"), commit_every_steps=0)
    assert plimsoll.status(path)["checkpoint_step"] == step
    _, trainer = live(path, again)
    assert again.seen[0] == step + 1 and torch.equal(weights(trainer), undisturbed)


@pytest.mark.parametrize("step", [2, 6])
def test_a_worker_that_the_same_signal_ended_is_no_failure(step, undisturbed, tmp_path):
    path, first, again = tmp_path / "run", At(-1, None), At(-1, None)
    run, _ = live(path, first, data=Ends(8 * step + 1 - 2 * (step >= 6), "signal"), workers=1)
    assert run.stopped == "SIGTERM" and first.seen[-1] == plimsoll.status(path)["checkpoint_step"] == step
    _, trainer = live(path, again)  # Whose evaluations have no worker either, and draw otherwise.
    assert again.seen[0] == step + 1 and torch.equal(weights(trainer), undisturbed)


def test_a_dataset_of_the_datasets_library_has_the_same_bits_after_a_stop(tmp_path):
    datasets = pytest.importorskip("datasets")
    lines = datasets.Dataset.from_dict({"input_ids": [[(k * w) % 29 + 1 for w in range(10)] for k in range(46)],
                                        "labels": [[(k * w) % 29 + 1 for w in range(10)] for k in range(46)],
                                        "text": [str(k) for k in range(46)]})  # Which the model does not take.
    _, whole = live(tmp_path / "whole", data=lines)
    live(tmp_path / "run", At(5, lambda: plimsoll.stop(tmp_path / "run")), data=lines, workers=2)
    _, trainer = live(tmp_path / "run", data=lines)
    assert torch.equal(weights(trainer), weights(whole))


class Refuses(transformers.TrainerCallback):
    """Memory refuses what an evaluation keeps, the n-th time."""

    def __init__(self, time):
        self.left = time

    def on_evaluate(self, args, state, control, **_):
        self.left -= 1
        if self.left == 0:
            torch.empty(1 << 40, dtype=torch.uint8)


@pytest.mark.parametrize("time", [1, 3])
def test_s03_an_evaluation_that_is_refused_loses_its_step_at_most(time, undisturbed, tmp_path, monkeypatch):
    if time == 1:  # No copy of a boundary: the commit is made before it, as its need is unknown.
        monkeypatch.setattr(plimsoll.run._run_kept, "_NOTHING_SECONDS", -1.0)
        monkeypatch.setattr(plimsoll.run._run_kept, "_TIMES", 0)
    with pytest.raises(torch.OutOfMemoryError):
        live(tmp_path / "run", Refuses(time))
    status = plimsoll.status(tmp_path / "run")
    assert (status["step"], status["checkpoint_step"], status["cause"]) == (3 * time, 3 * time - 1, "refused")
    _, trainer = live(tmp_path / "run")
    assert torch.equal(weights(trainer), undisturbed)


def test_it_pauses_at_a_commit_and_obeys_a_limit(tmp_path):
    pause = Pause(tmp_path / "run")
    callback = At(3, pause)
    live(tmp_path / "run", callback)
    assert callback.seen == list(range(1, STEPS + 1)) and pause.seen[-1] == (3, 3 << 30)


def test_logs_and_metrics_are_the_run_s_too(tmp_path):
    _, trainer = live(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    logged = {event["step"]: event["loss"] for event in lines if event["event"] == "step" and "loss" in event}
    assert logged == {line["step"]: pytest.approx(line["loss"])
                      for line in trainer.state.log_history if "loss" in line} and len(logged) == STEPS // 2


def test_callbacks_go_on_with_their_state(tmp_path):
    class Counts(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
        def __init__(self):
            self.evaluated = 0

        def on_evaluate(self, args, state, control, **_):
            self.evaluated += 1

        def state(self):
            return {"args": {}, "attributes": {"evaluated": self.evaluated}}

    def life(callback):
        counts = Counts()
        with plimsoll.Run(tmp_path / "run", memory_limit="4GiB", seed=3) as run:
            trainer = trainer_programs.make(run, callbacks=[counts, callback],
                                            restore_callback_states_from_checkpoint=True)
            trainer.train()
        return next(one for one in trainer.callback_handler.callbacks if type(one).__name__ == "Counts")

    life(At(7, lambda: plimsoll.stop(tmp_path / "run")))
    assert life(At(-1, None)).evaluated == STEPS // 3


def test_other_data_than_the_run_began_with_is_refused(tmp_path):
    live(tmp_path / "run", At(5, lambda: plimsoll.stop(tmp_path / "run")))
    with pytest.raises(ValueError, match="batch_size was 4 and is 2"):
        live(tmp_path / "run", per_device_train_batch_size=2)
    with pytest.raises(ValueError, match="accumulate was 2 and is 1"):
        live(tmp_path / "run", gradient_accumulation_steps=1)


@pytest.mark.parametrize("changes, words", [
    ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ({"ignore_data_skip": True}, "ignore_data_skip"),
    ({"train_sampling_strategy": "group_by_length"}, "group_by_length"),
    ({"optim": "adalomo"}, "optim='adalomo'"),
])
def test_what_it_cannot_do_is_refused_by_name(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        live(tmp_path / "run", **changes)


def test_it_trains_once_and_goes_on_from_the_run_alone(tmp_path):
    with plimsoll.Run(tmp_path / "run", memory_limit="4GiB", seed=3) as run:
        trainer = trainer_programs.make(run, max_steps=2)
        with pytest.raises(ValueError, match="from its own last commit"):
            trainer.train(resume_from_checkpoint=str(tmp_path))
        trainer.train()
        with pytest.raises(ValueError, match="trains once"):
            trainer.train()


def test_the_limit_is_held_with_workers(tmp_path):
    assert_limit_held("hugging_face", tmp_path / "run")


def test_the_program_itself_ended_by_a_signal_goes_on(first, tmp_path):
    child = first.start(PROGRAMS, tmp_path / "run", "hugging_face")
    while not (tmp_path / "run" / "checkpoints" / "manifest.json").exists():
        assert child.poll() is None
        time.sleep(0.02)
    child.kill()
    child.communicate()
    done = [first.run(PROGRAMS, tmp_path / run, "hugging_face") for run in ("run", "undisturbed")]
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    assert done[0].stdout.splitlines()[-1] == done[1].stdout.splitlines()[-1]


def test_s17_an_evaluation_that_memory_refuses_is_no_matter_of_the_batch(tmp_path):
    phases = []

    def metrics(prediction):
        phases.append(run._phase)
        return {"size": float(torch.ones(3 << 29).sum())}

    with pytest.raises((torch.OutOfMemoryError, plimsoll.BudgetExceeded)) as refused:
        with plimsoll.Run(tmp_path / "run", memory_limit="4GiB", seed=3) as run:
            trainer = trainer_programs.make(run)
            trainer.compute_metrics = metrics
            trainer.train()
    assert "batch_size" not in str(refused.value)
    for text in (str(refused.value), " ".join(plimsoll.why(tmp_path / "run")["advice"])):
        for option in ("preprocess_logits_for_metrics", "prediction_loss_only", "batch_eval_metrics", "eval_accumulation_steps"):
            assert option in text, text
    assert phases == ["evaluation"] and run._phase == ""
