# SPDX-License-Identifier: Apache-2.0
"""What a run's folder promises, of both recipes: damage is noticed, what decides the bits is pinned or
part of the identity, two that make one folder, kills before the first checkpoint, status, exit statuses."""
import collections
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

import plimsoll

from tests.support.can_traffic import write_traffic
from tests.support.forked import PROGRAM, first, forked  # noqa: F401  Fixtures.
from tests.support.sealed import seal_toml

from test_cli import assert_refused, call, trains  # noqa: F401  Fixtures.

PAIRS = ["--epochs", "2", "--batch-size", "256", "--eval-pairs", "50", "--memory-limit", "512MiB",
         "--compute-threads", "2", "--tensorboard", "false", "--quiet", "--json"]
GRAPHS = ["--config", "small", "--max-epochs", "1", "--batch-size", "64", "--fusion-episodes", "4",
          "--min-steps-per-epoch", "2", "--memory-limit", "1GiB", "--compute-threads", "2",
          "--tensorboard", "false", "--quiet", "--json"]


def last_json(done) -> dict:
    assert done.status == 0, done.err
    return json.loads(done.out.splitlines()[-1])


def events(run: pathlib.Path, name: str) -> list[dict]:
    return [one for one in map(json.loads, (run / "events.jsonl").read_text().splitlines())
            if one["event"] == name]


@pytest.fixture(scope="module")
def runs(program, tmp_path_factory):
    """Data of both recipes, a finished run of each, and a can-kd run with its first stage done."""
    base = tmp_path_factory.mktemp("runs")

    def plimsoll_(*words):
        done = subprocess.run([program, *map(str, words)], text=True, capture_output=True, check=False)
        if "built without LibTorch" in done.stderr:
            pytest.skip("the program was built without LibTorch")
        assert done.returncode == 0, done.stderr
        return done.stdout

    plimsoll_("synth", "cosir", "--rows", 1500, "--image-dim", 16, "--text-dim", 16, "--out",
              base / "pairs")
    for name, seed in (("train_01_attack_free__a.csv", 1), ("train_02_with_attacks__flood.csv", 2)):
        write_traffic(base / "bus" / name, seed, 60 * 20 + 1, 100 * (seed - 1))
    plimsoll_("import", "can", base / "bus", "--out", base / "graphs", "--window", 20, "--stride", 20)
    plimsoll_("train", "cosir", "--data", base / "pairs", "--out", base / "cosir", *PAIRS)
    plimsoll_("train", "can-kd", "--data", base / "graphs", "--out", base / "half", "--stage",
              "autoencoder", "--model-size", "teacher", *GRAPHS)
    shutil.copytree(base / "half", base / "can-kd")
    plimsoll_("resume", base / "can-kd", "--stage", "normal", "--model-size", "teacher", "--quiet")
    return base


# ---- R64: every file that a run reads again has a checksum ----

# How a run is read again, and what of the answer must not change.
READINGS = {
    "cosir": [(["eval", "--json"], "recall"), (["resume", "--json", "--quiet"], "state_sha256")],
    "half": [(["resume", "--json", "--quiet", "--stage", "all", "--model-size", "teacher"],
              "state_sha256")],
    "can-kd": [(["eval", "--json"], "teacher")],
}


def answer(done, key):
    return json.loads(done.out.splitlines()[-1])[key] if done.status == 0 else None


def files_read_again(run: pathlib.Path) -> list[pathlib.Path]:
    """All but what only people and other programs read."""
    told = {"events.jsonl", "status.json", "evaluation.json", "evaluation.txt", ".lock"}
    return sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size > 0
                  and path.name not in told and path.parent.name != "metrics")


@pytest.mark.parametrize("flips", [24, pytest.param(1000, marks=pytest.mark.slow)])
def test_r64_no_flipped_bit_of_a_run_is_silently_wrong(runs, forked, tmp_path, flips):
    seed = int(os.environ.get("PLIMSOLL_SEED", "7"))
    dice = random.Random(seed)
    outcomes = collections.Counter()
    right = {}
    for index in range(flips):
        name = list(READINGS)[index % len(READINGS)]
        words, key = dice.choice(READINGS[name])
        if (name, words[0]) not in right:
            shutil.copytree(runs / name, tmp_path / "sound")
            right[name, words[0]] = answer(forked(words[0], tmp_path / "sound", *words[1:]), key)
            assert right[name, words[0]] is not None
            shutil.rmtree(tmp_path / "sound")
        run = tmp_path / "run"
        shutil.copytree(runs / name, run)
        path = dice.choice(files_read_again(run))
        data = bytearray(path.read_bytes())
        bit = dice.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        done = forked(words[0], run, *words[1:])
        told = f"seed {seed}, flip {index}: bit {bit} of {name}/{path.relative_to(run)}, {words[0]}"
        assert done.status in (0, 1), (told, done)
        found = "noticed" if done.status else "harmless"
        assert done.status == 1 or answer(done, key) == right[name, words[0]], told
        outcomes[name, found] += 1
        shutil.rmtree(run)
    print(f"seed {seed}: {dict(outcomes)}")
    assert sum(count for (_, found), count in outcomes.items() if found == "noticed") > flips // 4


@pytest.mark.parametrize("stage", ["teacher_vgae", "teacher_gat_normal"])
def test_r64_a_damaged_model_is_named(runs, forked, tmp_path, stage):
    run = tmp_path / "run"
    shutil.copytree(runs / "can-kd", run)
    path = run / "models" / f"{stage}.safetensors"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    assert_refused(forked("eval", run), 1, path.name, "its checksum is")
    done = forked("resume", run, "--quiet")
    _, error, words = done.err.partition("plimsoll: error: ")  # What was admitted comes before it.
    assert_refused(dataclasses.replace(done, err=error + words), 1, path.name, "its checksum is")


def test_r64_half_a_run_toml_is_noticed(runs, forked, tmp_path):
    for name in ("cosir", "can-kd"):
        run = tmp_path / name
        shutil.copytree(runs / name, run)
        text = (run / "run.toml").read_text()
        (run / "run.toml").write_text(text[:len(text) // 2])
        for command in ("eval", "resume"):
            assert_refused(forked(command, run), 1, "run.toml", "cut short", "run format 1")
        (run / "run.toml").write_text(text.replace("seed = ", "seed = 1"))
        assert_refused(forked("resume", run), 1, "edited by hand", "--set key=value")


# ---- R47: eval compares the data with what the run was trained on ----

def test_r47_eval_refuses_other_data_with_the_same_ids(runs, forked, tmp_path):
    other = tmp_path / "other"
    assert forked("synth", "cosir", "--rows", 1500, "--image-dim", 16, "--text-dim", 16, "--seed", 9,
                "--out", other).status == 0
    run = tmp_path / "run"
    shutil.copytree(runs / "cosir", run)
    text = re.sub(r'(?m)^data = "[^"]*"', f'data = "{other}"', (run / "run.toml").read_text())
    seal_toml(run / "run.toml", text)
    assert_refused(forked("eval", run), 1, "is another set than the run began with", str(other))
    # In a process of its own: this one's may hold more than the run's limit by now.
    done = subprocess.run([sys.executable, "-c", f"import plimsoll; plimsoll.evaluate({str(run)!r})"],
                          text=True, capture_output=True, check=False)
    assert done.returncode == 1 and "ValueError: " in done.stderr, done.stderr
    assert "is another set than the run began with" in done.stderr


# ---- R42, R37: what decides the bits is pinned, or part of the identity ----

def with_env(**more) -> dict:
    return {**os.environ, **more}


@pytest.mark.parametrize("variable", ["OMP_DYNAMIC=true", "OMP_MAX_ACTIVE_LEVELS=0",
                                      "OMP_NUM_THREADS=1", "OMP_SCHEDULE=dynamic,1"])
def test_r42_openmps_variables_change_no_bit(runs, call, forked, tmp_path, variable):
    name, value = variable.split("=")
    made = last_json(call("train", "cosir", "--data", runs / "pairs", "--out", tmp_path / "run", *PAIRS,
                          env=with_env(**{name: value})))
    there = last_json(forked("resume", runs / "cosir", "--quiet", "--json"))
    assert made["state_sha256"] == there["state_sha256"]


def test_r42_fewer_threads_than_the_run_has_are_refused_by_name(runs, call):
    done = call("resume", runs / "cosir", "--quiet", env=with_env(OMP_THREAD_LIMIT="1"))
    assert_refused(done, 1, "compute_threads is 2, but OpenMP makes a team of 1 (OMP_THREAD_LIMIT is 1)")


def test_r42_r37_other_kernels_are_refused_by_name_unless_accepted(runs, call, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "cosir", run)
    env = with_env(ATEN_CPU_CAPABILITY="default")
    was = json.loads((run / "identity.json").read_text())["ATEN_CPU_CAPABILITY"]
    if was == "DEFAULT":
        pytest.skip("this processor has only torch's default kernels")
    assert_refused(call("resume", run, "--quiet", env=env), 1,
                   f"ATEN_CPU_CAPABILITY was {was} and is DEFAULT", "--accept-other-processor")
    assert events(run, "identity") == []
    done = call("resume", run, "--quiet", "--accept-other-processor", env=env)
    assert done.status == 0, done.err
    changes = [(one["key"], one["was"], one["is"]) for one in events(run, "identity")]
    assert changes == [("ATEN_CPU_CAPABILITY", was, "DEFAULT")]
    assert call("resume", run, "--quiet", env=env).status == 0  # It belongs there now.
    assert_refused(call("resume", run, "--quiet"), 1, f"ATEN_CPU_CAPABILITY was DEFAULT and is {was}")


def test_r42_a_library_that_is_told_to_compute_otherwise_is_another_identity(runs, call):
    done = call("resume", runs / "cosir", "--quiet", env=with_env(ONEDNN_DEFAULT_FPMATH_MODE="BF16"))
    assert_refused(done, 1, "ONEDNN_DEFAULT_FPMATH_MODE was unset and is BF16")


def test_r37_can_kd_computes_the_same_bits_with_any_number_of_threads(runs, forked, tmp_path):
    # Of the large preset tensors of more than 32,768 numbers, which torch sums in parallel.
    states = set()
    for threads in ("1", "2", "5"):
        run = tmp_path / threads
        last_json(forked("train", "can-kd", "--data", runs / "graphs", "--out", run, *GRAPHS[2:], "--config",
                       "large", "--stage", "autoencoder", "--model-size", "teacher",
                       "--compute-threads", threads))
        states.add(last_json(forked("resume", run, "--quiet", "--json", "--stage", "normal",
                                  "--compute-threads", "3"))["state_sha256"])
    assert len(states) == 1


# ---- R45, R46, R36: making a run ----

def test_r45_of_two_that_train_into_one_new_folder_one_wins(runs, first, tmp_path):
    dice = random.Random(5)
    for attempt in range(4):
        run = tmp_path / "run"
        children = []
        for _ in range(2):
            children.append(first.start(PROGRAM, "train", "cosir", "--data", runs / "pairs", "--out", run, *PAIRS))
            time.sleep(dice.random() / 100)
        ended = [(child.communicate(timeout=120)[1], child.returncode) for child in children]
        assert sorted(status for _, status in ended) == [0, 1], (attempt, ended)
        told = next(err for err, status in ended if status == 1)
        assert re.search("another process trains|is a run already|is not empty", told), told
        assert (run / "run.toml").exists() and (run / "checkpoints/manifest.json").exists()
        shutil.rmtree(run)


@pytest.mark.parametrize("recipe, options", [("cosir", PAIRS),
                                             ("can-kd", [*GRAPHS, "--stage", "normal",
                                                         "--model-size", "teacher"])])
def test_r46_killed_before_its_first_checkpoint_a_run_begins_again(runs, forked, tmp_path, recipe, options):
    data = runs / ("pairs" if recipe == "cosir" else "graphs")
    train = ["train", recipe, "--data", data, *options]
    whole = last_json(forked(*train, "--out", tmp_path / "whole"))
    killed = 0
    for passage in range(5, 1000, 15):
        run = tmp_path / str(passage)
        done = forked(*train, "--out", run, env=with_env(PLIMSOLL_CRASH=f"*:{passage}"))
        assert done.status == -signal.SIGKILL, (passage, done)
        if (run / "checkpoints/manifest.json").exists():
            break
        again = [*train, "--out", run]
        if (run / "run.toml").exists():
            killed += 1
            assert_refused(forked(*again), 1, "is a run already", "plimsoll resume")
            again = ["resume", run, "--quiet", "--json"]
        assert last_json(forked(*again))["state_sha256"] == whole["state_sha256"], passage
    assert killed > 1 and (run / "checkpoints/manifest.json").exists()


def test_r36_train_refuses_a_folder_that_is_a_run_whatever_its_recipe(runs, forked):
    for recipe, run, options in (("cosir", "cosir", PAIRS), ("can-kd", "can-kd", GRAPHS)):
        data = runs / ("pairs" if recipe == "cosir" else "graphs")
        assert_refused(forked("train", recipe, "--data", data, "--out", runs / run, *options), 1,
                       "is a run already", f"`plimsoll resume {runs / run}`", "--out")
        with pytest.raises(ValueError, match="is a run already"):
            plimsoll.train(recipe, data=data, out=runs / run, memory_limit="512MiB", progress=False)


# ---- R54: what status says of a run that was resumed ----

@pytest.mark.parametrize("name", ["cosir", "can-kd"])
def test_r54_status_of_a_finished_run_that_was_resumed(runs, forked, tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(runs / name, run)
    step = last_json(forked("resume", run, "--quiet", "--json"))["step"]
    shown = json.loads(forked("status", run, "--json").out)
    assert step > 0
    assert (shown["status"], shown["step"], shown["checkpoint_step"]) == ("finished", step, step)
    assert f"resumable from step {step}" in forked("status", run).out


def test_r54_status_of_a_resumed_run_that_was_killed_before_its_next_commit(runs, forked, tmp_path):
    manifest = (runs / "half/checkpoints/manifest.json").read_bytes()
    for passage in range(10, 1000, 10):  # The first of these after a step and its status.
        run = tmp_path / str(passage)
        shutil.copytree(runs / "half", run)
        steps = len(events(run, "step"))
        done = forked("resume", run, "--quiet", "--stage", "normal",
                    env=with_env(PLIMSOLL_CRASH=f"*:{passage}"))
        assert done.status == -signal.SIGKILL
        assert (run / "checkpoints/manifest.json").read_bytes() == manifest
        if len(events(run, "step")) > steps + 1:
            break
    step = json.loads(manifest)["step"]
    shown = json.loads(forked("status", run, "--json").out)
    assert shown["status"] == "interrupted" and shown["checkpoint_step"] == step > 0
    assert f"resumable from step {step}" in forked("status", run).out


# ---- R63: more epochs ----

def test_r63_a_finished_run_is_given_more_epochs_of_its_second_phase(runs, forked, tmp_path):
    def train(name, epochs):
        return last_json(forked("train", "cosir", "--data", runs / "pairs", "--out", tmp_path / name, *PAIRS,
                              "--epochs", "1", "--phase2-epochs", epochs))
    whole = train("whole", 3)
    assert train("run", 1)["state_sha256"] != whole["state_sha256"]
    more = last_json(forked("resume", tmp_path / "run", "--phase2-epochs", "3", "--quiet", "--json"))
    assert more["epoch"] == 4 and more["state_sha256"] == whole["state_sha256"]
    assert [(one["key"], one["was"], one["is"]) for one in events(tmp_path / "run", "identity")] == \
        [("options.phase2_epochs", "1", "3")]
    assert_refused(forked("resume", tmp_path / "run", "--phase2-epochs", "2"), 2, "longer, not shorter")


def test_r63_more_epochs_of_a_run_are_refused_with_the_reason(runs, forked):
    for run, option, reason in (
            ("cosir", "epochs", "a cosine that ends with the last epoch"),
            ("cosir", "phase2_epochs", "a run has its classifier of conditions from the first step on"),
            ("can-kd", "max_epochs", "keeps its model and not its optimizer")):
        assert_refused(forked("resume", runs / run, f"--{option.replace('_', '-')}", "9"), 2,
                       f"{option} is part of this run's identity", "cannot become 9", reason)
        with pytest.raises(ValueError, match=reason):
            plimsoll.resume(runs / run, progress=False, **{option: 9})
