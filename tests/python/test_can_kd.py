# SPDX-License-Identifier: Apache-2.0
"""The recipe can-kd: what each option does, what changes bits and what does not (K8, K9, K13, K18),
and what a run leaves behind. Traffic is made here: a bus of periodic messages, and floods on it."""
import json
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import subprocess
import time

import pytest

import plimsoll

from plimsoll.training._checkpoint import read
from tests.support.can_traffic import write_traffic
from tests.support.forked import first, forked  # noqa: F401  Fixtures.
from tests.support.named_limits import named_in, until_it_does
from tests.support.sealed import seal_toml

from test_cli import assert_refused, call, trains  # noqa: F401  Fixtures.

WINDOW = 20
TASKS = ["vgae", "gat_curriculum", "gat_normal", "fusion"]
SMALL = ["--config", "small", "--max-epochs", "2", "--batch-size", "64", "--fusion-episodes", "20",
         "--min-steps-per-epoch", "2", "--compute-threads", "2", "--quiet", "--json"]


@pytest.fixture(scope="session")
def traffic(tmp_path_factory, program):
    """A graph set of about 500 windows; the test file is of a known vehicle and attack."""
    bus = tmp_path_factory.mktemp("bus")
    for name, seed, windows, block in [("train_01_attack_free__a.csv", 1, 160, 0),
                                       ("train_02_with_attacks__flood.csv", 2, 200, 5 * WINDOW),
                                       ("test_01_known_vehicle_known_attack__flood.csv", 3, 120,
                                        5 * WINDOW)]:
        write_traffic(bus / name, seed, windows * WINDOW + 1, block)
    out = bus / "set"
    subprocess.run([program, "import", "can", str(bus), "--out", str(out), "--window", str(WINDOW),
                    "--stride", str(WINDOW)], check=True, capture_output=True)
    return out


@pytest.fixture
def train(forked, traffic, tmp_path):
    """Trains into tmp_path/NAME, or goes on there, and returns the summary; options come last."""
    def run(name, *options, data=traffic, limit="1GiB"):
        if (tmp_path / name / "run.toml").exists():
            pairs = [word for flag, value in zip(options[::2], options[1::2])
                     for word in ("--set", f"{flag.removeprefix('--').replace('-', '_')}={value}")]
            done = forked("resume", tmp_path / name, "--memory-limit", limit, "--quiet", "--json", *pairs)
        else:
            done = forked("train", "can-kd", "--data", data, "--out", tmp_path / name, "--memory-limit", limit, *SMALL, *options)
        assert done.status == 0, done.err
        return json.loads(done.out.splitlines()[-1])
    return run


def events(run, name):
    lines = (run / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == name]


def tensor_names(path):
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        return sorted(k for k in json.loads(file.read(size)) if k != "__metadata__")


def test_one_command_trains_both_and_the_student_finds_the_known_attack(train, tmp_path):
    summary = train("run", "--max-epochs", "60", "--patience", "60", "--student-gat-patience", "60",
                    "--gat-lr", "0.01", "--batch-size", "32", "--fusion-episodes", "200")
    assert summary["status"] == "finished"
    assert list(summary["models"]) == [f"{role}_{task}" for role in ("teacher", "student")
                                       for task in TASKS]
    for role in ("teacher", "student"):
        for name in ("gat_curriculum", "gat_normal", "fusion"):
            found = summary["evaluation"][role][name]["test"]
            assert found["kinds"]["known vehicle, known attack"]["f1"] >= 0.95, (role, name)
            assert found["all"]["graphs"] == 120
    run = tmp_path / "run"
    told = json.loads((run / "evaluation.json").read_text())
    curves = told.pop("curves")
    assert told == summary["evaluation"]
    for role in ("teacher", "student"):
        assert curves[role].keys() == told[role].keys()
        for name, of in curves[role].items():
            at_threshold = told[role][name]["test"]["all"]
            assert_curves_are_of(of, at_threshold)
    assert not any((run / "cache").iterdir())


def test_s49_an_evaluation_says_where_the_fusion_is_worse_than_a_part(train, call, tmp_path):
    """Of models that have hardly learnt: some fusion is."""
    def rows(model):
        return {"all": model["test"]["all"], **model["test"]["kinds"], **model["test"]["files"]}

    evaluation, told = train("run")["evaluation"], 0
    for role in ("teacher", "student"):
        fusion, parts = rows(evaluation[role]["fusion"]), [rows(evaluation[role][name]) for name in ("vgae", "gat_curriculum")]
        worse = [name for name, scores in fusion.items() if scores["auc"] < max(part[name]["auc"] for part in parts) - 0.02]
        warnings = evaluation[role]["fusion"]["warnings"]
        assert [one.split(": AUC ")[0] for one in warnings] == worse
        assert not any("warnings" in evaluation[role][name] for name in ("vgae", "gat_curriculum", "gat_normal"))
        told += len(warnings)
    text = call("eval", tmp_path / "run").out
    assert text.count("warning: ") == told and ("Elsewhere use a part alone" in text) == (told > 0)


def assert_curves_are_of(curves, scores):
    """Areas under the points are the figures beside them: there are fewer graphs than points."""
    roc, pr = curves["roc"], curves["precision_recall"]
    assert len({len(values) for values in roc.values()}) == len({len(values) for values in pr.values()}) == 1
    assert (roc["fpr"][0], roc["recall"][0], roc["threshold"][0]) == (0, 0, None)  # No alarms: infinite.
    assert (roc["fpr"][-1], roc["recall"][-1]) == (1, 1)
    pairs = list(zip(zip(roc["fpr"], roc["recall"]), zip(roc["fpr"][1:], roc["recall"][1:])))
    assert scores["auc"] == pytest.approx(sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairs))
    steps = zip([0, *pr["recall"]], pr["recall"], pr["precision"])
    assert scores["pr_auc"] == pytest.approx(sum((now - before) * precision for before, now, precision in steps))
    threshold = float("inf") if scores["threshold"] is None else scores["threshold"]
    cut = [at for at, value in enumerate(roc["threshold"]) if value is None or value >= threshold][-1]
    assert roc["recall"][cut] == scores["recall"] and roc["fpr"][cut] == scores["fpr"]


def test_plots_are_drawn_from_what_a_run_left(train, tmp_path):
    pytest.importorskip("matplotlib")
    from plimsoll import plots

    train("run", "--model-size", "teacher")
    run = tmp_path / "run"
    assert not (run / "plots").exists()  # Nobody asked.
    names = ["roc", "precision_recall", *(f"confusion_teacher_{task}" for task in TASKS),
             "difficulty_teacher_gat_curriculum"]
    assert plots.can_kd(run) == [run / "plots" / f"{name}.svg" for name in names]
    assert sorted(path.name for path in (run / "plots").iterdir()) == sorted(f"{name}.svg" for name in names)


def test_jumping_knowledge_of_one_layer_trains_with_checkpointing_and_without(train):
    same = [train(f"run_{flag}", "--stage", "normal", "--model-size", "teacher", "--max-epochs", "1",
                  "--teacher-gat-layers", "1", "--gat-jk", "lstm", "--gradient-checkpointing", flag)
            for flag in ("true", "false")]
    assert same[0]["state_sha256"] == same[1]["state_sha256"]


def test_k18_the_student_has_a_few_per_cent_of_the_teachers_parameters(train, tmp_path, call):
    summary = train("run", "--max-epochs", "1", "--stage", "normal")
    models = summary["models"]
    assert models["student_gat_normal"]["parameters"] * 10 <= models["teacher_gat_normal"]["parameters"]
    counts = {e["task"]: e["parameters"] for e in events(tmp_path / "run", "task")}
    assert counts == {name: one["parameters"] for name, one in models.items()}


def test_a_stage_at_a_time_ends_in_the_bits_of_all_at_once(train, tmp_path):
    whole = train("whole")
    for role in ("teacher", "student"):
        for stage in ("autoencoder", "curriculum", "normal", "fusion"):
            last = train("parts", "--stage", stage, "--model-size", role)
    parts = train("parts", "--stage", "evaluation")
    assert last["state_sha256"] == whole["state_sha256"] == parts["state_sha256"]
    assert parts["evaluation"] == whole["evaluation"]


def test_k8_k9_a_teacher_resident_released_or_cached_teaches_the_same_bits(train, tmp_path):
    states = {}
    for cached in ("true", "false"):
        for released in ("true", "false"):
            name = f"c{cached}r{released}"
            states[name] = train(name, "--stage", "autoencoder", "--use-teacher-cache", cached,
                                 "--offload-teacher-to-cpu", released)["state_sha256"]
            [told] = list(events(tmp_path / name, "teacher"))
            steps = [e for e in events(tmp_path / name, "step") if e["task"] == "student_vgae"]
            assert told["asked"] == sum(e["graphs"] for e in steps)
            # Of two epochs the second is answered from the file; weights are read once, or a step.
            assert told["cached"] == (told["asked"] // 2 if cached == "true" else 0)
            asked = len(steps) // (2 if cached == "true" else 1)
            assert told["loads"] == (asked if released == "true" else 1)
            assert (told["weight_bytes"] == 0) == (released == "true")  # Between two steps.
    assert len(set(states.values())) == 1, states


def test_k8_no_checkpoint_and_no_student_holds_the_teacher(train, tmp_path):
    train("run", "--stage", "autoencoder", "--model-size", "teacher")
    train("run", "--stage", "autoencoder", "--model-size", "student", "--checkpoint-every-n-steps",
          "1", "--keep-checkpoints", "100")
    teacher = tensor_names(tmp_path / "run/models/teacher_vgae.safetensors")
    student = tensor_names(tmp_path / "run/models/student_vgae.safetensors")
    assert teacher == student  # The same architecture; smaller.
    size = (tmp_path / "run/models/teacher_vgae.safetensors").stat().st_size
    folders = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    assert len(folders) > 4
    for folder in folders:
        parts = read(folder / "parts.pt", int(folder.name.removeprefix("step-")))["parts"]
        assert not [name for name in parts["model"] if "teacher" in name]
        if parts["notes"]["task"] == "student_vgae":
            assert (folder / "parts.pt").stat().st_size < size


def test_clearing_the_cache_every_n_steps_is_counted_and_changes_nothing(train, tmp_path):
    often = train("often", "--stage", "normal", "--clear-cache-every-n", "2")
    never = train("never", "--stage", "normal", "--clear-cache-every-n", "0")
    assert often["state_sha256"] == never["state_sha256"]
    [told] = events(tmp_path / "often", "teacher")
    steps = [e for e in events(tmp_path / "often", "step") if e["task"] == "student_gat_normal"]
    assert told["cleared"] >= len(steps) // 2 > 0
    assert events(tmp_path / "never", "teacher")[0]["cleared"] == 0


def test_k13_the_curriculum_takes_new_graphs_each_epoch_as_the_schedule_says(train, tmp_path):
    for stage in ("autoencoder", "curriculum"):
        train("run", "--max-epochs", "4", "--model-size", "teacher", "--stage", stage,
              "--curriculum-start-ratio", "0.5", "--curriculum-end-ratio", "2")
    told = events(tmp_path / "run", "epoch")[-4:]
    attacks = told[0]["curriculum/attacks"]
    assert [e["curriculum/attacks"] for e in told] == [attacks] * 4
    assert [e["curriculum/normals"] for e in told] == [int(attacks * r + 0.5)
                                                        for r in (0.5, 1, 1.5, 2)]
    assert told[0]["curriculum/threshold"] <= told[-1]["curriculum/threshold"]
    for epoch in told:  # The threshold begins at the 75th percentile and ends at the 95th.
        of = [epoch[f"curriculum/difficulty_{percent}"] for percent in (5, 25, 50, 75, 95)]
        assert of == sorted(of) and of[0] > 0
    assert told[0]["curriculum/threshold"] == told[0]["curriculum/difficulty_75"]
    assert told[-1]["curriculum/threshold"] == told[-1]["curriculum/difficulty_95"]


def test_scores_and_bits_do_not_depend_on_the_scoring_chunk(train):
    small = train("small", "--model-size", "teacher", "--scoring-chunk", "7")
    large = train("large", "--model-size", "teacher", "--scoring-chunk", "500")
    assert small["state_sha256"] == large["state_sha256"]
    assert small["evaluation"] == large["evaluation"]


def test_the_limit_and_what_is_cached_change_no_bit(train):
    runs = [train("wide", "--stage", "normal", limit="2GiB"),
            train("narrow", "--stage", "normal", "--cache-bytes", "0", limit="700MiB"),
            train("again", "--stage", "normal", "--checkpoint-every-n-steps", "1",
                  "--cleanup-every-n-steps", "1")]
    assert len({run["state_sha256"] for run in runs}) == 1


IDENTITY = [  # (stage, options that must change the bits)
    ("normal", ["--seed", "7"]), ("normal", ["--gat-lr", "0.01"]),
    ("normal", ["--weight-decay", "0.1"]), ("normal", ["--gradient-clip", "0.01"]),
    ("normal", ["--batch-size", "32"]), ("normal", ["--batch-nodes", "300"]),
    ("normal", ["--batch-edges", "300"]), ("normal", ["--min-steps-per-epoch", "9"]),
    ("normal", ["--accumulate-grad-batches", "2"]), ("normal", ["--gat-dropout", "0.5"]),
    ("normal", ["--gat-jk", "lstm"]), ("normal", ["--precision", "16-mixed"]),
    ("normal", ["--max-epochs", "3"]), ("normal", ["--teacher-gat-hidden", "20"]),
    ("normal", ["--teacher-gat-layers", "2"]), ("normal", ["--teacher-gat-heads", "2"]),
    ("normal", ["--teacher-gat-embedding-dim", "3"]), ("normal", ["--teacher-gat-fc-layers", "1"]),
    ("normal", ["--use-scheduler", "true", "--scheduler-type", "step", "--scheduler-step-size", "1"]),
    ("normal", ["--use-scheduler", "true", "--scheduler-type", "exponential"]),
    ("normal", ["--use-scheduler", "true", "--scheduler-t-max", "2"]),
    ("autoencoder", ["--vgae-lr", "0.01"]), ("autoencoder", ["--vgae-dropout", "0.5"]),
    ("autoencoder", ["--teacher-vgae-hidden-dims", "40,16"]),
    ("autoencoder", ["--teacher-vgae-heads", "1"]),
    ("autoencoder", ["--teacher-vgae-embedding-dim", "5"]),
]


@pytest.fixture(scope="module")
def plain(forked, traffic, tmp_path_factory):
    """state_sha256 of one untouched run of a stage."""
    known = {}

    def state(stage, *options, role="teacher"):
        key = (stage, role, options)
        if key not in known:
            done = forked("train", "can-kd", "--data", traffic, "--out", tmp_path_factory.mktemp("plain") / "run", "--memory-limit", "1GiB",
                          *SMALL, "--stage", stage, "--model-size", role, *options)
            assert done.status == 0, done.err
            known[key] = json.loads(done.out.splitlines()[-1])["state_sha256"]
        return known[key]
    return state


@pytest.mark.parametrize("stage, options", IDENTITY, ids=lambda v: v if isinstance(v, str) else v[-2])
def test_an_option_that_decides_the_bits_changes_them(plain, stage, options):
    assert plain(stage, *options) != plain(stage)


def test_checkpointing_layers_changes_no_bit(plain):
    for stage in ("normal", "autoencoder"):
        assert plain(stage, "--gradient-checkpointing", "false") == plain(stage)


DISTILLED = [("normal", ["--kd-alpha", "0.2"]), ("normal", ["--kd-temperature", "1"]),
             ("normal", ["--use-kd", "false"]),
             ("autoencoder", ["--kd-vgae-latent-weight", "0.1"]),
             ("autoencoder", ["--kd-vgae-recon-weight", "0.1"])]


@pytest.mark.parametrize("stage, options", DISTILLED, ids=lambda v: v if isinstance(v, str) else v[-2])
def test_an_option_of_distillation_changes_the_student(plain, stage, options):
    assert plain(stage, *options, role="both") != plain(stage, role="both")


def test_a_teacher_of_another_run_may_be_named(train, tmp_path):
    first = train("first", "--stage", "normal", "--model-size", "teacher")
    both = train("both", "--stage", "normal")
    for path in ("first", "first/models", "first/models/teacher_gat_normal.safetensors"):
        name = "by_" + str(len(path))
        train(name, "--stage", "normal", "--model-size", "student", "--teacher-path", tmp_path / path)
        assert (tmp_path / name / "models/student_gat_normal.safetensors").read_bytes() == \
            (tmp_path / "both/models/student_gat_normal.safetensors").read_bytes()
    assert first["state_sha256"] != both["state_sha256"]


def test_a_resumed_student_asks_the_teacher_it_began_with(train, program, call, traffic, tmp_path):
    for name, seed in (("first", "1"), ("second", "2")):
        train(name, "--stage", "normal", "--model-size", "teacher", "--seed", seed)
    run = tmp_path / "run"
    child = subprocess.Popen([program, "train", "can-kd", "--data", str(traffic), "--out", str(run),
                              "--memory-limit", "1GiB", *SMALL, "--stage", "normal", "--model-size",
                              "student", "--max-epochs", "40", "--checkpoint-every-n-steps", "1",
                              "--teacher-path", str(tmp_path / "first")],
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and steps_done(run) < 5:
        time.sleep(0.003)
    child.kill()
    child.wait()
    done = call("resume", run, "--teacher-path", tmp_path / "second", "--quiet")
    assert done.status == 1, done.err
    assert "student_gat_normal was begun with another teacher" in done.err and "--teacher-path" in done.err
    done = call("resume", run, "--teacher-path", tmp_path / "first", "--quiet")
    assert done.status == 0, done.err


def test_difficulty_may_come_from_the_classifier_itself(train, tmp_path):
    run = lambda name, *more: train(name, "--stage", "curriculum", "--model-size", "teacher",  # noqa: E731
                                    "--max-epochs", "4", "--use-vgae-mining", "false", "--save-top-k", "0",
                                    "--curriculum-start-ratio", "0.2", "--curriculum-end-ratio",
                                    "0.4", *more)
    often, once = run("often", "--difficulty-cache-update", "1"), \
        run("once", "--difficulty-cache-update", "0")
    assert often["state_sha256"] != once["state_sha256"]
    thresholds = [e["curriculum/threshold"] for e in events(tmp_path / "often", "epoch")]
    assert len(set(thresholds)) == 4


def test_patience_ends_a_stage_and_the_best_epoch_is_kept(train, tmp_path):
    run = lambda name, *more: train(name, "--stage", "normal", "--model-size", "teacher",  # noqa: E731
                                    "--max-epochs", "30", "--gat-lr", "0.5", *more)
    patient = run("patient", "--patience", "2")
    told = events(tmp_path / "patient", "epoch")
    assert patient["models"]["teacher_gat_normal"]["epochs"] == len(told) < 30
    best = min(told, key=lambda e: e["held_out_loss"])
    assert len(told) - 1 - best["epoch"] == 2
    assert patient["models"]["teacher_gat_normal"]["held_out_loss"] == best["held_out_loss"]
    last = run("last", "--patience", "2", "--save-top-k", "0")
    assert (tmp_path / "last/models/teacher_gat_normal.safetensors").read_bytes() != \
        (tmp_path / "patient/models/teacher_gat_normal.safetensors").read_bytes()
    assert last["models"]["teacher_gat_normal"]["epochs"] == len(told)


FUSION = [["--fusion-lr", "0.01"], ["--fusion-hidden", "32"], ["--fusion-batch", "64"],
          ["--fusion-replay", "150"], ["--fusion-gamma", "0.5"], ["--fusion-epsilon", "0.9"],
          ["--fusion-epsilon-decay", "0.5"], ["--fusion-epsilon-min", "0.2"],
          ["--fusion-episodes", "21"], ["--fusion-gat", "normal"],
          ["--fusion-gamma", "0.5", "--fusion-target-update", "3"]]


def test_every_option_of_fusion_changes_it(train, tmp_path):
    for stage in ("autoencoder", "curriculum", "normal"):
        train("base", "--stage", stage, "--model-size", "teacher")
    seen = {}
    for options in [[], *FUSION]:
        name = "_".join(options) or "plain"
        # Another fusion of the same models: everything else of the run is as it was.
        shutil.copytree(tmp_path / "base", tmp_path / name)
        (tmp_path / name / "identity.json").unlink()
        settings = (tmp_path / name / "run.toml").read_text()
        for flag, value in zip(options[::2], options[1::2]):
            key = flag.removeprefix("--").replace("-", "_")
            literal = f'"{value}"' if key == "fusion_gat" else value
            settings, found = re.subn(rf"(?m)^{key} = .*$", f"{key} = {literal}", settings)
            assert found == 1, key
        seal_toml(tmp_path / name / "run.toml", settings)
        train(name, "--stage", "fusion", "--model-size", "teacher", *options)
        seen[name] = (tmp_path / name / "models/teacher_fusion.safetensors").read_bytes()
    assert len(set(seen.values())) == len(seen), seen.keys()


def test_what_a_stage_lacks_is_named_before_anything_is_trained(trains, call, traffic, tmp_path):
    base = ["train", "can-kd", "--data", traffic, "--out", tmp_path / "run", "--memory-limit", "1GiB",
            *SMALL]
    assert_refused(call(*base, "--stage", "fusion", "--model-size", "teacher"), 1,
                   "teacher_fusion needs teacher_vgae", "--stage autoencoder --model-size teacher")
    assert_refused(call(*base, "--stage", "normal", "--model-size", "student"), 1,
                   "student_gat_normal needs teacher_gat_normal", "--teacher-path", "--use-kd false")
    assert_refused(call(*base, "--stage", "normal", "--model-size", "student", "--teacher-path",
                        tmp_path), 1, "teacher_path", "teacher_gat_normal.safetensors")
    assert not (tmp_path / "run").exists()


def test_another_seed_does_not_go_on_with_a_run(train, call, traffic, tmp_path):
    train("run", "--stage", "normal", "--model-size", "teacher")
    done = call("resume", tmp_path / "run", "--stage", "autoencoder", "--set", "seed=9")
    assert_refused(done, 2, "seed is part of this run's identity (42)")


def test_a_limit_that_is_too_small_is_refused_with_one_that_does(trains, call, traffic, tmp_path):
    base = ["train", "can-kd", "--data", traffic, "--out", tmp_path / "run", *SMALL, "--stage",
            "normal", "--model-size", "teacher", "--teacher-gat-hidden", "64", "--max-epochs", "1",
            "--min-steps-per-epoch", "1", "--batch-size", "4096"]
    begins = 128 + float(re.search(r"([\d.]+) MiB are held", call(*base, "--memory-limit", "64MiB").err).group(1))
    refused = call(*base, "--memory-limit", f"{int(begins) + 6}MiB")
    assert_refused(refused, 1, "a limit of", "batch_size")
    assert not (tmp_path / "run").exists()
    named, _ = until_it_does(lambda limit: call(*base, "--memory-limit", f"{limit}MiB"), named_in(refused.err)[0])
    assert begins < named < begins + 100


def test_graphs_that_grow_eightfold_are_admitted_at_their_largest(trains, call, tmp_path):
    """Four ids on the bus, then 32: what the largest step takes is known before the first."""
    rows = ["timestamp,arbitration_id,data_field,attack"]
    for frame in range(400 * 64):
        ids = 4 if frame < 200 * 64 else 32
        rows.append(f"{0.001 * frame:.4f},{0x100 + frame % ids:03X},{frame & 255:02X}00,0")
    (tmp_path / "bus").mkdir()
    (tmp_path / "bus/train_01.csv").write_text("\n".join(rows) + "\n")
    grows, out = tmp_path / "grows", tmp_path / "run"
    made = call("import", "can", tmp_path / "bus", "--out", grows, "--window", 64, "--stride", 64)
    assert made.status == 0, made.err
    with plimsoll.Governor("4GiB") as governor, plimsoll.GraphSet.open(governor, grows) as graphs:
        nodes = graphs.describe()["nodes"]
        assert nodes.max() >= 8 * nodes.min()

    def train(limit_mib):
        return call("train", "can-kd", "--data", grows, "--out", out, *SMALL, "--stage", "normal",
                    "--model-size", "teacher", "--memory-limit", f"{limit_mib}MiB")

    begins_mib = 128 + float(re.search(r"([\d.]+) MiB are held", train(64).err).group(1))
    refused = train(int(begins_mib) + 6)
    assert_refused(refused, 1, "a limit of")
    assert not out.exists()
    limit, done = until_it_does(train, named_in(refused.err)[0])
    summary = json.loads(done.out.splitlines()[-1])
    assert summary["status"] == "finished"
    assert summary["peak_resident_bytes"] <= summary["limit_bytes"] == limit * 2**20
    [admitted] = events(out, "admitted")
    assert 0 < admitted["peak_bytes"] <= admitted["admitted_bytes"]
    assert not events(out, "refusal")


@pytest.mark.parametrize("batch", ["64", "auto"])
@pytest.mark.parametrize("left_mib", [-20, 12])
def test_r41_the_first_limit_that_is_named_does_where_no_step_could_be_measured(trains, call, traffic,
                                                                                tmp_path, batch, left_mib):
    """Neither opens the run below baseline and foreign_bytes, nor fits the model in what is left."""
    base = ["train", "can-kd", "--data", traffic, "--out", tmp_path / "run", *SMALL, "--stage",
            "normal", "--model-size", "teacher", "--gat-jk", "lstm", "--teacher-gat-hidden", "32",
            "--teacher-gat-heads", "8", "--teacher-gat-layers", "3", "--max-epochs", "1",
            "--min-steps-per-epoch", "1", "--batch-size", batch]
    lowest = call(*base, "--memory-limit", "64MiB")
    begins_mib = 128 + float(re.search(r"([\d.]+) MiB are held", lowest.err).group(1))
    done = call(*base, "--memory-limit", f"{int(begins_mib) + left_mib}MiB")
    assert_refused(done, 1, "a limit of", "raise memory_limit")
    assert not (tmp_path / "run").exists()
    named, done = until_it_does(lambda limit: call(*base, "--memory-limit", f"{limit}MiB"), named_in(done.err)[0])
    peak = events(tmp_path / "run", "admitted")[0]["peak_bytes"]
    # Before the run opens, not even the sizes of its largest graphs are known.
    assert named - begins_mib < (3 if left_mib < 0 else 2) * peak / 2**20 + 32


@pytest.fixture(scope="module")
def busy(tmp_path_factory, program):
    """Enough windows that memory, not the number of steps, bounds a batch."""
    bus = tmp_path_factory.mktemp("busy")
    write_traffic(bus / "train_01__flood.csv", 4, 14000 * WINDOW + 1, 5 * WINDOW)
    out = bus / "set"
    subprocess.run([program, "import", "can", str(bus), "--out", str(out), "--window", str(WINDOW),
                    "--stride", str(WINDOW)], check=True, capture_output=True)
    return out


def test_k5_a_planned_batch_trains_and_a_fifth_more_is_refused(trains, call, busy, tmp_path):
    """The tightest task is the student's: its step holds the teacher too."""
    base = ["can-kd", "--data", busy, "--config", "small", "--stage", "normal", "--max-epochs", "1",
            "--student-gat-hidden", "16", "--student-gat-heads", "8", "--student-gat-layers", "32",
            "--gradient-checkpointing", "false", "--cache-bytes", "0", "--compute-threads", "2",
            "--scoring-chunk", "64", "--batch-size-max", "1024"]  # So that a step, not what answers, holds the peak.

    def plan(mib):
        done = call("plan", *base, "--memory-limit", f"{mib}MiB", "--json")
        assert done.status == 0, done.err
        found = json.loads(done.out.splitlines()[-1])
        assert found["tasks"].keys() == {"teacher_gat_normal", "student_gat_normal"}
        assert found["batch_size"] == min(one["batch_size"] for one in found["tasks"].values())
        return found, found["tasks"]["student_gat_normal"]

    wide = plan(4096)[1]
    assert wide["at_most_rows"] and wide["batch_size"] > 100  # Memory is not what bounds it.
    static = wide["parts"]["static"]
    needed = static + (wide["leased_bytes"] - static) * 4 // 5
    limit = 4096 - (wide["available_bytes"] - needed) * 17 // 16 // 2**20
    found, narrow = plan(limit)
    assert found["task"] == "student_gat_normal" and not narrow["at_most_rows"]
    assert 16 <= found["batch_size"] < wide["batch_size"]
    assert narrow["leased_bytes"] <= narrow["available_bytes"] < narrow["larger_leased_bytes"]
    assert narrow["larger_rows"] >= 1.2 * found["batch_size"]
    table = call("plan", *base, "--memory-limit", f"{limit}MiB").out
    assert "CppNode" not in table  # Our autograd functions by their own names.
    told = re.search(r"batch_size = (\d+), held there by student_gat_normal", table)
    near = pytest.approx(found["batch_size"], rel=0.1)  # What a process holds differs a little from start to start.
    assert int(told[1]) == near
    assert re.search(r"a fifth more, \d+ graphs, would lease", table)

    def train(graphs):
        return call("train", *base, "--out", tmp_path / f"{graphs}", "--memory-limit", f"{limit}MiB",
                    "--batch-size", graphs, "--quiet", "--json")

    assert_refused(train(narrow["larger_rows"]), 1, "a limit of", "batch_size")
    done = train("auto")
    assert done.status == 0, done.err
    assert [one["batch_size"] for one in events(tmp_path / "auto", "batch_size")] == [near]
    assert json.loads(done.out.splitlines()[-1])["peak_resident_bytes"] <= limit * 2**20


def test_auto_plans_for_a_set_of_a_few_graphs(trains, call, tmp_path):
    write_traffic(tmp_path / "bus/train_01__flood.csv", 4, 60 * WINDOW + 1, 5 * WINDOW)
    made = call("import", "can", tmp_path / "bus", "--out", tmp_path / "few", "--window", WINDOW,
                "--stride", WINDOW)
    assert made.status == 0, made.err
    done = call("train", "can-kd", "--data", tmp_path / "few", "--out", tmp_path / "run", *SMALL,
                "--stage", "normal", "--model-size", "teacher", "--memory-limit", "1GiB",
                "--batch-size", "auto")
    assert done.status == 0, done.err
    [planned] = events(tmp_path / "run", "batch_size")  # min_steps_per_epoch cuts it.
    assert 1 <= planned["batch_size"] <= 60 and len(events(tmp_path / "run", "step")) >= 2 * 2


@pytest.mark.slow
def test_choices_keep_the_effective_batch_in_micro_batches(trains, call, busy):
    base = ["plan", "can-kd", "--data", busy, "--config", "small", "--stage", "normal",
            "--model-size", "teacher", "--cache-bytes", "0", "--compute-threads", "2",
            "--scoring-chunk", "64", "--json"]

    def plan(mib, *options):
        done = call(*base, "--memory-limit", f"{mib}MiB", *options)
        assert done.status == 0, done.err
        return json.loads(done.out.splitlines()[-1])

    def parts(choice):
        size, count = re.search(r"batch_size = (\d+), accumulate_grad_batches = (\d+)",
                                choice["options"]).groups()
        assert int(size) == choice["batch_size"]
        return int(size), int(count)

    effective = 1501  # No multiple of anything that plans keep to.
    roomy = plan(4096, "--choices", "--effective-batch", effective)
    assert {parts(one) for one in roomy["choices"]} == {(effective, 1)}
    whole = max(one["peak_bytes"] for one in roomy["choices"])
    task = roomy["tasks"]["teacher_gat_normal"]
    limit = 4096 - (task["available_bytes"] - whole * 2 // 3) * 17 // 16 // 2**20
    narrow = plan(limit, "--choices", "--effective-batch", effective)
    found = {parts(one) for one in narrow["choices"]}
    assert max(count for _, count in found) > 1
    for size, count in found:
        assert size * (count - 1) < effective <= size * count
    assert_refused(call(*base, "--memory-limit", "4GiB", "--effective-batch", 1501), 2,
                   "--effective-batch")


def test_choices_are_planned_and_timed_for_the_tightest_task(trains, call, traffic):
    base = ["plan", "can-kd", "--data", traffic, "--config", "small", "--stage", "normal",
            "--memory-limit", "1GiB", "--compute-threads", "2", "--offload-teacher-to-cpu", "true",
            "--student-gat-hidden", "64", "--choices"]
    done = call(*base, "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    teachers = found["task"].startswith("teacher")
    choices = found["choices"]
    assert len(choices) == (4 if teachers else 8)
    assert len({choice["options"] for choice in choices}) == len(choices)
    [asked] = [choice for choice in choices if choice["configured"]]
    assert "gradient_checkpointing = true, precision = 32" in asked["options"]
    assert teachers or "offload_teacher_to_cpu = true" in asked["options"]
    speeds = [choice["graphs_per_second"] for choice in choices]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] > 0
    table = call(*base).out
    assert f"choices for {found['task']}" in table and table.count("(as configured)") == 1
    plain = call(*base[:-1], "--json")
    assert "choices" not in json.loads(plain.out.splitlines()[-1])


def test_published_students_are_evaluated_beside_ours(train, trains, call, traffic, tmp_path):
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    def student(path, seed, width=3, heads=2):
        draw = numpy.random.default_rng(seed)
        both, hidden = width * heads, width * heads  # Two layers: an LSTM of 2 × both / 2.
        shapes = {"lin.weight": (1, both), "lin.bias": (1,), "jk.att.weight": (1, 2 * hidden),
                  "jk.att.bias": (1,)}
        for k, rows in enumerate((10, both)):
            shapes |= {f"convs.{k}.att_src": (1, heads, width), f"convs.{k}.att_dst": (1, heads, width),
                       f"convs.{k}.bias": (both,), f"convs.{k}.lin.weight": (both, rows)}
        for end in ("", "_reverse"):
            shapes |= {f"jk.lstm.weight_ih_l0{end}": (4 * hidden, both),
                       f"jk.lstm.weight_hh_l0{end}": (4 * hidden, hidden),
                       f"jk.lstm.bias_ih_l0{end}": (4 * hidden,),
                       f"jk.lstm.bias_hh_l0{end}": (4 * hidden,)}
        save_file({name: draw.normal(0, 0.3, shape).astype("float32")
                   for name, shape in shapes.items()}, path)
        return sum(int(numpy.prod(shape)) for shape in shapes.values())

    folder = tmp_path / "published"
    folder.mkdir()
    sizes = {"one": student(folder / "one.safetensors", 1), "two": student(folder / "two.safetensors", 2)}
    options = ["--model-size", "teacher", "--stage", "normal"]
    ours = train("run", *options)
    beside = train("run", "--stage", "evaluation", "--original-students", folder)["evaluation"]
    assert beside["original"].keys() == sizes.keys()
    for name, parameters in sizes.items():
        assert beside["original"][name]["parameters"] == parameters
        assert beside["original"][name]["test"]["all"]["graphs"] == 120
    assert beside["original"]["one"]["held_out"] != beside["original"]["two"]["held_out"]
    assert "original one" in (tmp_path / "run/evaluation.txt").read_text()
    assert ours["state_sha256"] and "teacher" in beside
    alone = train("alone", *options, "--run-test", "true", "--stage", "all", "--original-students",
                  folder / "one.safetensors")["evaluation"]
    assert alone["original"].keys() == {"one"}
    (folder / "three.safetensors").write_bytes(b"junk")  # Read before anything is trained.
    done = call("train", "can-kd", "--data", traffic, "--out", tmp_path / "bad", "--memory-limit",
                "1GiB", *SMALL, "--original-students", folder)
    assert_refused(done, 1, "three.safetensors")
    assert not (tmp_path / "bad").exists()
    os.rename(folder / "three.safetensors", os.fsencode(folder) + b"/caf\xe9.safetensors")
    done = call("train", "can-kd", "--data", traffic, "--out", tmp_path / "bad", "--memory-limit",
                "1GiB", *SMALL, "--original-students", folder)
    assert_refused(done, 1, "original_students", "is not UTF-8", "rename it")


def test_eval_says_what_training_said(train, call, tmp_path):
    summary = train("run", "--model-size", "teacher")
    done = call("eval", tmp_path / "run", "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out.splitlines()[-1]) == summary["evaluation"]


def test_a_finished_run_stands_at_the_step_of_its_checkpoint(train, tmp_path):
    summary = train("run", "--stage", "normal", "--model-size", "teacher")
    status = plimsoll.status(tmp_path / "run")
    assert status["status"] == "finished" and status["message"] == ""
    assert summary["step"] == status["step"] == status["steps_total"] == status["checkpoint_step"]


def test_memory_metrics_of_each_epoch_are_written(train, tmp_path):
    train("run", "--stage", "normal", "--model-size", "teacher", "--log-every-n-steps", "1")
    written = b"".join(p.read_bytes() for p in (tmp_path / "run/metrics").iterdir())
    for tag in (b"memory/resident_bytes", b"memory/leased/tensor", b"teacher_gat_normal/loss",
                b"teacher_gat_normal/held_out_loss", b"teacher_gat_normal/graphs"):
        assert tag in written, tag
    assert b"test/f1" not in written
    train("often", "--stage", "normal", "--model-size", "teacher", "--test-every-n-epochs", "1")
    assert all("test/f1" in e for e in events(tmp_path / "often", "epoch"))


def steps_done(run: pathlib.Path) -> int:
    try:
        lines = (run / "events.jsonl").read_bytes().splitlines()
    except OSError:
        return 0
    return sum(b'"event":"step"' in line for line in lines)


def kill_and_resume(program, traffic, run, reference, kills, seed):
    """Kills a run after random numbers of steps, resumes it, and returns its last summary."""
    dice = random.Random(seed)
    total = steps_done(reference)
    command = [program, "train", "can-kd", "--data", str(traffic), "--out", str(run),
               "--memory-limit", "1GiB", *SMALL, "--checkpoint-every-n-steps", "3"]
    resume = [program, "resume", str(run), "--quiet", "--json"]
    marks = sorted(dice.sample(range(1, total - 1), kills))
    killed = 0
    for mark in marks:
        child = subprocess.Popen(resume if (run / "run.toml").exists() else command,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while child.poll() is None and steps_done(run) < mark:
            time.sleep(0.003)
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            killed += 1
        child.wait()
    done = subprocess.run(resume, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), killed


@pytest.mark.parametrize("kills", [3, pytest.param(32, marks=pytest.mark.slow)])
def test_killed_at_any_step_a_run_ends_in_the_same_bits(train, program, traffic, tmp_path, kills):
    seed = int(os.environ.get("PLIMSOLL_SEED", "5"))
    whole = train("whole")
    last, killed = kill_and_resume(program, traffic, tmp_path / "run", tmp_path / "whole", kills, seed)
    assert killed >= kills * 2 // 3, (seed, killed)
    print(f"killed {killed} times, seed {seed}")
    assert last["state_sha256"] == whole["state_sha256"], seed
    assert last["evaluation"] == whole["evaluation"], seed


def test_sigint_leaves_a_checkpoint_to_go_on_from(train, program, traffic, tmp_path, call):
    whole = train("whole", "--stage", "normal", "--max-epochs", "6")
    run = tmp_path / "run"
    child = subprocess.Popen([program, "train", "can-kd", "--data", str(traffic), "--out", str(run),
                              "--memory-limit", "1GiB", *SMALL, "--stage", "normal", "--max-epochs",
                              "6"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while child.poll() is None and steps_done(run) < 3:
        time.sleep(0.003)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    told = json.loads(out.splitlines()[-1])
    assert told["status"] == "stopped" and told["stop_reason"] == "SIGINT"
    done = call("resume", run, "--quiet", "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out.splitlines()[-1])["state_sha256"] == whole["state_sha256"]
