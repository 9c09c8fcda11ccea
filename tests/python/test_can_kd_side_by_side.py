# SPDX-License-Identifier: Apache-2.0
"""can-kd beside figures of the recipe that was in C++: the same order and losses, equal figures, events alike; kills, limits, teachers."""
import dataclasses
import gc
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from tests.support.on_device import run_checks, skip_without_torch

skip_without_torch()

import plimsoll
from plimsoll.recipes.can_kd import RECIPE, _teacher_file
from plimsoll.recipes.can_kd._tasks import Data, Task
from plimsoll.recipes.can_kd._training import Training, norm_of
from tests.support.python_can_kd import NAME, SIZES, SMALL, events, make_set

ROOT = pathlib.Path(__file__).resolve().parents[2]
THEIRS = json.loads((ROOT / "tests/reference/can_kd.json").read_text())
TASKS = [f"{role}_{task}" for role in ("teacher", "student") for task in ("vgae", "gat_curriculum", "gat_normal", "fusion")]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    return make_set(tmp_path_factory.mktemp("bus"))


@pytest.fixture(scope="module")
def both(graphs, tmp_path_factory):
    """All stages: (what the recipe in C++ told of them, summary, folder)."""
    folder = tmp_path_factory.mktemp("both") / "run"
    return THEIRS["whole"], plimsoll.train(NAME, data=graphs, out=folder, **SMALL), folder


@pytest.fixture
def train(graphs, tmp_path):
    """Trains, and returns the summary."""
    def trained(name, **options):
        return plimsoll.train(NAME, data=graphs, out=tmp_path / name, **{**SMALL, **options})
    return trained


def losses(run, task):
    return [[one["graphs"], one["loss"]] for one in events(run, "step") if one["task"] == task]


# ---- Beside the recipe in C++ ----

def test_options_are_the_documented_ones():
    table = (ROOT / "docs/recipes/can-kd.md").read_text().split("<!-- options -->")[1]
    documented = {row[0]: row[1].strip("`") for row in re.findall(r"^\| `(\w+)` \| (.*?) \| ", table, re.M)}
    own = {field.name: field.default for field in dataclasses.fields(RECIPE.options)}
    assert documented.keys() <= own.keys()
    assert own.keys() - documented.keys() == {"device", "device_memory_limit"}
    common = {field.name for field in dataclasses.fields(RECIPE.options.__bases__[0])}
    for name in documented.keys() & own.keys() - common:
        default = own[name]
        assert documented[name] == (str(default).lower() if isinstance(default, bool) else str(default)), name


@pytest.mark.parametrize("task", TASKS)
def test_batches_and_losses_are_those_of_the_recipe_in_cpp(both, task):
    ours, theirs = losses(both[2], task), both[0]["losses"][task]
    assert [count for count, _ in ours] == [count for count, _ in theirs] and len(ours) > 2
    # A teacher's first epoch begins with the same weights; later steps and stages carry rounding on.
    near = 1e-6 if task in ("teacher_vgae", "teacher_gat_normal") else 1e-5
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=near, abs=1e-7)


def test_figures_are_those_of_the_recipe_in_cpp(both):
    theirs, ours, folder = both
    assert list(ours["models"]) == list(theirs["models"]) == TASKS
    for task, model in theirs["models"].items():
        assert ours["models"][task] == pytest.approx(model, rel=1e-4), task
    for role in ("teacher", "student"):
        for name, found in theirs["evaluation"][role].items():
            told = ours["evaluation"][role][name]
            assert told["parameters"] == found["parameters"] and sorted(told) == found["keys"]
            for of in ("f1", "auc"):
                assert told["test"]["all"][of] == pytest.approx(found[of], abs=0.02), (role, name, of)
    assert (folder / "evaluation.json").exists()


def test_events_and_summary_are_those_of_the_recipe_in_cpp(both):
    theirs, summary, folder = both
    for name in ("step", "epoch", "eval"):
        ours, (count, keys) = events(folder, name), theirs["events"][name]
        assert len(ours) == count > 0 and set(keys) - set().union(*ours) <= {"resident_bytes"}, name
    for name, keys in (("task", ("task", "parameters", "step")), ("task_done", ("task", "parameters", "step")),
                       ("teacher", ("asked", "cached", "loads", "parameters"))):
        ours = events(folder, name)
        assert [[one[key] for key in keys] for one in ours] == [[one[key] for key in keys] for one in theirs["events"][name]]
        assert all(one.keys() - mine.keys() <= {"resident_bytes"} for one, mine in zip(theirs["events"][name], ours))
    assert set(theirs["keys"]) - summary.keys() <= {"limit_source", "leased_peak_bytes"}


def test_the_norm_of_gradients_is_the_same_with_any_number_of_threads():
    random = torch.Generator().manual_seed(3)
    gradients = [torch.randn(shape, generator=random) for shape in ((700, 1100), (4096, 3), (5,), ())]
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.add(norm_of(gradients))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1 and found.pop() == pytest.approx(math.sqrt(sum(float(one.double().square().sum()) for one in gradients)), rel=1e-12)


def test_losses_come_to_tensorboard_every_so_many_steps(train, tmp_path):
    """And to events.jsonl at each."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train("run", stage="normal", model_size="teacher", log_every_n_steps=3)
    told = {one["step"]: one for one in events(tmp_path / "run", "step")}
    assert list(told) == list(range(1, len(told) + 1)) and all(one["task"] == "teacher_gat_normal" for one in told.values())
    reader = accumulator.EventAccumulator(str(tmp_path / "run/metrics"))
    reader.Reload()
    found = reader.Scalars("teacher_gat_normal/loss")
    assert [one.step for one in found] == [step for step in told if step % 3 == 0] and len(found) > 2
    assert [one.value for one in found] == pytest.approx([told[one.step]["loss"] for one in found])
    assert len(reader.Scalars("teacher_gat_normal/held_out_loss")) == 2 and reader.Scalars("memory/resident_bytes")


# ---- What a run keeps ----

@pytest.mark.parametrize("at", [2, 7, 12, 21, 40])
def test_a_killed_run_ends_in_the_same_bits(both, graphs, tmp_path, at):
    """In the middle of an epoch, at its end, in another task, within the fusion."""
    given = {**SMALL, "data": str(graphs), "out": str(tmp_path / "run"), "checkpoint_every_n_steps": 3}
    program = f"import plimsoll, tests.support.python_can_kd\nplimsoll.train({NAME!r}, **{given!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, timeout=300,
                          env={**os.environ, "CAN_KD_DIES_AT": str(at)})
    assert done.returncode == -9, done.stderr
    again = plimsoll.resume(tmp_path / "run", progress=False)
    assert again["state_sha256"] == both[1]["state_sha256"] and again["evaluation"] == both[1]["evaluation"]


def test_a_stage_at_a_time_ends_in_the_bits_of_all_at_once(both, train, tmp_path):
    first, *stages = ("autoencoder", "curriculum", "normal", "fusion", "evaluation")
    for role in ("teacher", "student"):
        for stage in (first, *stages[:3]):
            if (tmp_path / "run").exists():
                last = plimsoll.resume(tmp_path / "run", progress=False, stage=stage, model_size=role)
            else:
                last = train("run", stage=stage, model_size=role)
    whole = both[1]
    assert last["state_sha256"] == whole["state_sha256"]
    assert plimsoll.resume(tmp_path / "run", progress=False, stage="evaluation")["evaluation"] == whole["evaluation"]
    assert plimsoll.evaluate(tmp_path / "run") == whole["evaluation"]


def test_a_teacher_resident_released_or_cached_teaches_the_same_bits(train, tmp_path):
    states = set()
    for cached in (True, False):
        for released in (True, False):
            name = f"{cached}_{released}"
            states.add(train(name, stage="autoencoder", use_teacher_cache=cached, offload_teacher_to_cpu=released)["state_sha256"])
            [told] = events(tmp_path / name, "teacher")
            assert told["cached"] == (told["asked"] // 2 if cached else 0)
            assert (told["weight_bytes"] == 0) == released
    assert len(states) == 1


def test_a_released_teacher_of_another_format_is_parsed_once(train, tmp_path, monkeypatch):
    from safetensors.torch import load_file

    given = {"stage": "autoencoder", "max_epochs": 1}
    train("teacher", model_size="teacher", **given)
    torch.save(load_file(tmp_path / "teacher/models/teacher_vgae.safetensors"), tmp_path / "teacher_vgae.pt")
    parsed, read = [], _teacher_file._state_of
    monkeypatch.setattr(_teacher_file, "_state_of", lambda path: parsed.append(path) or read(path))
    states = {train(name, model_size="student", offload_teacher_to_cpu=name == "released", use_teacher_cache=False,
                    teacher_path=str(tmp_path / "teacher_vgae.pt"), **given)["state_sha256"] for name in ("released", "resident")}
    assert len(states) == 1 and len(parsed) == 2  # Once each.
    [told] = events(tmp_path / "released", "teacher")
    assert told["loads"] > 2 and os.listdir(tmp_path / "released/cache") == []


@pytest.mark.parametrize("stage", ["curriculum", "normal"])
def test_a_stop_ends_a_validation_which_is_made_again(train, tmp_path, monkeypatch, stage):
    """While difficulties are scored, while an epoch is validated, and again when the resumed run looks back at it; at last that of the last epoch."""
    given = {"stage": stage, "model_size": "teacher", "use_vgae_mining": False, "difficulty_cache_update": 1, "max_epochs": 3, "test_every_n_epochs": 1}
    whole, run = train("whole", **given), tmp_path / "run"
    score, calls, made = Data.score, [], []

    def asked(self, *arguments):
        calls.append(arguments)
        if made and len(calls) == made[-1]:
            (run / ".stop").touch()
        return score(self, *arguments)

    monkeypatch.setattr(Data, "score", asked)
    scores = 3 if stage == "curriculum" else 2  # Of an epoch: validation, a look at the test file, difficulties.
    stops = [*([1] if stage == "curriculum" else []), 4, 1, 2, scores + 1, 1]
    for at in stops:
        made.append(at)
        calls.clear()
        told = plimsoll.resume(run, progress=False) if (run / "run.toml").exists() else train("run", **given)
        assert (told["status"], told["stop_reason"], len(calls)) == ("stopped", ".stop", at)
    made.append(0)
    last = plimsoll.resume(run, progress=False)
    assert (last["status"], last["step"], last["state_sha256"]) == ("finished", whole["step"], whole["state_sha256"])
    looks = [[(one["step"], one["epoch"], one["held_out_loss"], one["graphs"], one.get("curriculum/threshold")) for one in events(where, "epoch")]
             for where in (run, tmp_path / "whole")]
    assert looks[0] == looks[1] and len(looks[0]) == 3


def test_checkpointing_the_scoring_chunk_and_the_cache_change_no_bit(train):
    plain = train("plain", model_size="teacher", run_test=False)["state_sha256"]
    for name, options in (("all", {"gradient_checkpointing": False}), ("chunk", {"scoring_chunk": 7}), ("read", {"cache_bytes": 0})):
        assert train(name, model_size="teacher", run_test=False, **options)["state_sha256"] == plain, name


@pytest.mark.parametrize("case, options", list(enumerate([
    {"accumulate_grad_batches": 2}, {"gat_jk": "lstm"}, {"precision": "bf16-mixed"}, {"batch_nodes": 300},
    {"use_scheduler": True, "scheduler_t_max": 2}, {"gradient_clip": 0.01}])), ids=str)
def test_an_option_does_what_it_did_in_cpp(train, tmp_path, case, options):
    train("ours", stage="normal", model_size="teacher", **options)
    ours, theirs = losses(tmp_path / "ours", "teacher_gat_normal"), THEIRS["options"][case]
    assert [count for count, _ in ours] == [count for count, _ in theirs]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-5)


def refused(graphs, out, **options):
    """Trains in a process of its own, whose memory is that of no other test. Returns the refusal and the limit that it names; ("", 0) without one."""
    given = {**SMALL, "data": str(graphs), "out": str(out), **options}
    program = (f"import plimsoll\nfrom tests.support.python_can_kd import NAME\ntry:\n    plimsoll.train(NAME, **{given!r})\n"
               "except plimsoll.BudgetExceeded as error:\n    print(error.smallest_limit_bytes, str(error).splitlines()[0])")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, timeout=300, check=True)
    named, _, why = (done.stdout.splitlines() or ["0 "])[-1].partition(" ")
    return why, int(named)


@pytest.mark.parametrize("hidden, room, what", [(128, 72 << 20, "its model does not fit"), (48, 52 << 20, "a step of")],
                         ids=["the model alone", "a step"])
def test_a_limit_that_is_too_small_is_refused_with_one_that_does(graphs, tmp_path, hidden, room, what):
    given = {"stage": "normal", "model_size": "teacher", "teacher_gat_hidden": hidden, "teacher_gat_heads": 16, "teacher_gat_layers": 3,
             "max_epochs": 1}
    _, least = refused(graphs, tmp_path / "none", memory_limit="150MiB", **given)  # With which nothing but the process fits.
    why, named = refused(graphs, tmp_path / "small", memory_limit=least + room, **given)
    assert what in why and "limit of" in why and named > least + room and not (tmp_path / "small").exists()
    assert refused(graphs, tmp_path / "large", memory_limit=named, **given) == ("", 0)


def test_a_later_task_that_does_not_fit_is_refused_before_the_first_step(graphs, tmp_path):
    given = {"stage": "normal", "student_gat_hidden": 128, "student_gat_heads": 16, "student_gat_layers": 3, "max_epochs": 1, "use_kd": False}
    _, least = refused(graphs, tmp_path / "none", memory_limit="150MiB", **given)
    why, named = refused(graphs, tmp_path / "small", memory_limit=least + (72 << 20), **given)
    assert "student_gat_normal: its model does not fit" in why and named > least + (72 << 20)
    assert not (tmp_path / "small").exists()


def test_a_plan_names_the_batch_that_auto_chooses(graphs, train, tmp_path):
    given = {"stage": "normal", "batch_size_max": 128}
    plan = plimsoll.plan(NAME, data=graphs, **{key: value for key, value in {**SMALL, **given}.items() if key != "progress"})
    assert list(plan["tasks"]) == ["teacher_gat_normal", "student_gat_normal"]
    assert plan["batch_size"] == plan["tasks"][plan["task"]]["batch_size"] == 128 and plan["tasks"][plan["task"]]["label"] in ("exact", "bounded")
    auto, named = train("auto", batch_size="auto", **given), train("named", batch_size=128, **given)
    assert auto["state_sha256"] == named["state_sha256"]
    assert [one["batch_size"] for one in events(tmp_path / "auto", "batch_size")] == [128]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", ["autoencoder", "normal"])
def test_a_step_leaves_no_tensor_behind(graphs, tmp_path, stage, accumulate):
    def tensors():
        gc.collect()
        return sum(type(one) in (torch.Tensor, torch.nn.Parameter) for one in gc.get_objects())

    options = RECIPE.options(data=str(graphs), **SIZES, batch_size=16, accumulate_grad_batches=accumulate)
    with plimsoll.Governor("4GiB") as governor:
        data = Data(governor, options)
        training = Training(options, data, Task("teacher", stage), tmp_path)
        steps, counts = training.batches(0, 0), []
        for _ in range(4):
            training.loss(next(steps)).backward()
            counts.append(tensors())
        steps.close()
        data.close()
    assert counts[1:] == counts[1:2] * 3


def test_what_a_stage_lacks_is_named_before_anything_is_trained(train, tmp_path):
    with pytest.raises(plimsoll.NotFoundError, match=r"teacher_fusion needs teacher_vgae.*--stage autoencoder --model-size teacher"):
        train("run", stage="fusion", model_size="teacher")
    with pytest.raises(plimsoll.NotFoundError, match=r"student_gat_normal needs teacher_gat_normal.*--use-kd false"):
        train("other", stage="normal", model_size="student")


@pytest.mark.parametrize("options, local, why", [
    ({}, "1", "its ranks are processes of one machine"), ({"batch_size": "auto"}, "2", "batch_size = auto is planned for one process, and these are 2"),
    ({"device": "cuda"}, "2", "ranks train on the processor, or --device cpu")])
def test_what_ranks_cannot_have_is_refused_before_they_meet(train, tmp_path, monkeypatch, options, local, why):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=why):
        train("run", **options)
    assert not (tmp_path / "run").exists()


def test_it_trains_on_a_device():
    run_checks("can_kd")
