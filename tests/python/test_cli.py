# SPDX-License-Identifier: Apache-2.0
"""Bad input to the program: a short message, the right exit status, and nothing left behind.

Status 2 is wrong usage (unknown option, command or key, bad value); 1 is any other failure.
"""
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import time

import numpy as np
import pytest

from tests.support.named_limits import until_it_does
from tests.support.sealed import seal_toml

CONFIG_KEYS = ["checkpoint_every_n_steps", "keep_checkpoints", "queue_bytes", "store_bytes",
               "cache_bytes", "loader_threads", "compute_threads", "label_dim", "label_optimizer"]


CAN_KD_KEYS = ["stage", "config", "model_size", "teacher_gat_heads", "student_vgae_hidden_dims", "vgae_lr",
               "use_kd", "teacher_path", "offload_teacher_to_cpu", "precision"]


@dataclasses.dataclass
class Done:
    status: int
    out: str
    err: str


@pytest.fixture(scope="session")
def call(program):
    def run(*arguments, **options) -> Done:
        done = subprocess.run([program, *map(str, arguments)], text=True, capture_output=True,
                              timeout=300, check=False, **options)
        return Done(done.returncode, done.stdout, done.stderr)
    return run


@pytest.fixture(scope="session")
def trains():
    """Skips where torch is missing, which recipes compute with."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")


def assert_refused(done: Done, status: int, *words: str):
    assert done.status == status, (done.status, done.err)
    assert done.err.startswith("plimsoll: error: "), done.err
    assert len(done.err) < 1200, done.err
    assert "Traceback" not in done.err and "terminate called" not in done.err
    for word in words:
        assert word in done.err, (word, done.err)


@pytest.mark.parametrize("arguments, words", [
    ([], ["--help"]),
    (["fly"], ["fly"]),
    (["train"], ["plimsoll train --help"]),
    (["train", "cosir", "--epoch", "3"], ["--epoch", "did you mean --epochs?"]),
    (["train", "cosir"], ["--data"]),
    (["train", "cosir", "--data", "d"], ["--out"]),
    (["train", "cosir", "--epochs"], ["--epochs"]),
    (["train", "cosir", "--epochs", "many"], ["epochs", "whole number", "'many'"]),
    (["train", "cosir", "--epochs", "0"], ["epochs", "from 1"]),
    (["train", "cosir", "--batch-size", "1.5"], ["batch_size"]),
    (["train", "cosir", "--memory-limit", "lots"], ["memory_limit", "768MiB"]),
    (["train", "cosir", "--set", "batchsize=3"], ["batchsize", "did you mean 'batch_size'?"]),
    (["train", "cosir", "--set", "seed"], ["key=value"]),
    (["train", "cosir", "--set", "label_optimizer=sgd"], ["adamw, adamw_fresh, adagrad"]),
    (["train", "chat"], ["no data given", "--data PATH, or --inbox PATH"]),
    (["train", "chat", "--data", "d"], ["--out"]),
    (["train", "chat", "--epoch", "3"], ["did you mean --epochs?", "plimsoll train chat --help"]),
    (["train", "vision"], ["no data given", "--data PATH"]),
    (["train", "vision", "--set", "batchsize=3"], ["batchsize", "did you mean 'batch_size'?"]),
    (["train", "caht"], ["'caht'"]),
    (["train", "can-kd"], ["no data given", "plimsoll import can"]),
    (["train", "can-kd", "--data", "d"], ["--out"]),
    (["train", "can-kd", "--stage", "gat", "--data", "d"], ["stage must be one of all, autoencoder"]),
    (["train", "can-kd", "--teacher-gat-head", "3"], ["did you mean --teacher-gat-heads?"]),
    (["train", "can-kd", "--config", "smal"], ["smal: not a configuration file", "preset of can-kd: large, small"]),
    (["train", "can-kd", "--config", "small", "--config", "large"], ["--config"]),
    (["config", "can-kd", "--config", "smal"], ["preset of can-kd: large, small"]),
    (["train", "can-kd", "--student-vgae-hidden-dims", "0,5"], ["2 to 8 whole numbers from 1 to 65536"]),
    (["train", "can-kd", "--set", "kd_temprature=3"], ["did you mean 'kd_temperature'?"]),
    (["train", "can-kd", "--set", "label_dim=3"], ["plimsoll train can-kd --help"]),
    (["resume"], ["RUN"]),
    (["synth", "cosir", "--out", "x"], ["--rows"]),
    (["synth", "cosir", "--rows", "-5", "--out", "x"], ["--rows"]),
    (["synth", "cosir", "--rows", "ten", "--out", "x"], ["--rows"]),
    (["synth", "cosir", "--rows", "10", "--out", "x", "--memory-limit", "lots"], ["lots"]),
    (["import", "cosir", "--out", "x"], ["--image-features"]),
    (["import", "can", "d", "--out", "x", "--exclude", "dos", "--include-all"], ["--exclude excludes --include-all"]),
    (["store", "info"], ["DIR"]),
    (["limits", "--memory-limit", "lots"], ["lots"]),
])
def test_wrong_usage_ends_with_status_two(call, tmp_path, arguments, words):
    assert_refused(call(*arguments, cwd=tmp_path), 2, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name, content, words", [
    ("c.toml", "seed = 1\nepoch = 5\n", ["c.toml:2: unknown key 'epoch'; did you mean 'epochs'?"]),
    ("c.toml", "epochs = \"5\"\n", ["c.toml:1: epochs must be a whole number"]),
    ("c.toml", "epochs = = 5\n", ["c.toml:1"]),
    ("c.toml", "[model]\ndim = 5\n", ["'model'"]),
    ("c.json", "{\"epochs\": ", ["c.json: not JSON at byte"]),
    ("c.json", "{\"epoch\": 5}", ["c.json: unknown key 'epoch'"]),
    ("c.yaml", "epochs: 5", ["name it .toml or .json"]),
])
def test_a_wrong_configuration_file_is_named_with_its_line(call, tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    done = call("train", "cosir", "--config", name, "--data", "d", "--out", "run", cwd=tmp_path)
    assert_refused(done, 2, *words)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_r32_help_offers_the_recipes_there_are(call):
    done = call("train", "--help")
    offered = re.search(r"^Subcommands:\n((?:  .*\n)+)", done.out, re.MULTILINE)
    assert done.status == 0 and offered
    assert re.findall(r"^  ([\w-]+) ", offered[1], re.MULTILINE) == ["cosir", "can-kd", "chat", "vision"]


def test_a_missing_configuration_file_is_wrong_usage(call, tmp_path):
    assert_refused(call("train", "cosir", "--config", tmp_path / "no.toml"), 2, "no.toml")


@pytest.mark.parametrize("arguments", [
    ["resume", "nowhere"], ["eval", "nowhere"], ["stop", "nowhere"], ["pause", "nowhere"],
    ["continue", "nowhere"], ["limit", "nowhere", "1GiB"], ["status", "nowhere"], ["store", "info", "nowhere"],
    ["store", "verify", "nowhere"], ["store", "export", "nowhere", "--out", "x.npy"],
    ["info", "nowhere"]])
def test_what_is_not_there_is_named_with_status_one(call, tmp_path, arguments):
    assert_refused(call(*arguments, cwd=tmp_path), 1, "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_help_and_version_end_with_status_zero(call):
    assert call("--version").out.startswith("plimsoll 0.")
    for command in [[], ["train"], ["train", "cosir"], ["train", "can-kd"], ["resume"], ["eval"], ["stop"], ["pause"],
                    ["continue"], ["limit"], ["status"], ["synth", "cosir"], ["import", "cosir"],
                    ["store"], ["store", "export"], ["limits"], ["info"]]:
        done = call(*command, "--help")
        assert done.status == 0, (command, done.err)
        assert "Example" in done.out or command in (["train"],), command
    text = call("train", "cosir", "--help").out
    for key in CONFIG_KEYS:
        assert "--" + key.replace("_", "-") in text
    text = call("train", "can-kd", "--help").out
    for key in CAN_KD_KEYS:
        assert "--" + key.replace("_", "-") in text
    assert "or a preset: large, small" in text
    assert "--stage" in call("resume", "--help").out


def can_kd(call, tmp_path, *arguments):
    """Whatever is typed, the data named is not there, and nothing is left behind."""
    done = call("train", "can-kd", "--data", "nowhere", "--out", "run", *arguments, cwd=tmp_path)
    assert done.status in (1, 2), done.err
    assert not (tmp_path / "run").exists()
    return done


def test_a_preset_counts_less_than_options_and_can_be_had_as_a_file(call, tmp_path):
    assert can_kd(call, tmp_path, "--config", "small", "--teacher-gat-heads", "3").status == 1  # No data there.
    (tmp_path / "own.toml").write_text(call("config", "can-kd", "--config", "small").out)
    text = (tmp_path / "own.toml").read_text()
    assert "--config FILE`, as in small." in text
    assert "\nteacher_gat_heads = 4\n" in text and "\nbatch_size = 256\n" in text and "\nseed = 42\n" in text
    assert call("config", "can-kd", "--config", tmp_path / "own.toml").out.splitlines()[1:] == text.splitlines()[1:]
    default = call("config", "can-kd").out
    assert "\nteacher_gat_heads = 8\n" in default and "at their defaults" in default
    assert can_kd(call, tmp_path, "--config", "own.toml").status == 1


def test_a_file_of_another_recipe_is_refused_by_its_name(call, tmp_path):
    (tmp_path / "c.toml").write_text("[cosir]\nseed = 1\n")
    assert_refused(can_kd(call, tmp_path, "--config", "c.toml"), 2,
                   "c.toml:1: this belongs to the recipe cosir, not to can-kd")


def test_resume_and_eval_go_by_the_recipe_that_the_run_names(call, tmp_path):
    seal_toml(tmp_path / "run.toml", 'recipe = "can-kd"\n[can-kd]\ndata = "nowhere"\nseed = 1\n')
    assert_refused(call("resume", tmp_path, "--loader-threads", "2"), 2,
                   "unknown key 'loader_threads'", "plimsoll train can-kd --help")
    assert_refused(call("resume", tmp_path, "--set", "seed=2"), 2, "seed is part of this run's identity")
    seal_toml(tmp_path / "run.toml", '[cosir]\ndata = "nowhere"\n')
    assert_refused(call("resume", tmp_path, "--stage", "fusion"), 2, "unknown key 'stage'")
    seal_toml(tmp_path / "run.toml", 'recipe = "tomorrow"\n')
    for command in ["resume", "eval"]:
        assert_refused(call(command, tmp_path), 1, "'tomorrow'", "the version of Plimsoll")


def test_limits_print_a_table_and_the_same_as_json(call):
    found = json.loads(call("limits", "--memory-limit", "64MiB", "--json").out)
    assert found["limit_bytes"] == 64 << 20
    assert found["candidates"][found["winner"]]["source"] == "user"
    table = call("limits", "--memory-limit", "64MiB").out
    assert "* " in table and "limit: 64.0 MiB" in table


def test_s19_limits_list_shared_memory_and_open_files(call):
    space, files = os.statvfs("/dev/shm"), resource.getrlimit(resource.RLIMIT_NOFILE)
    found = json.loads(call("limits", "--json").out)
    assert found["shared_memory"]["where"] == "/dev/shm" and found["shared_memory"]["bytes"] == space.f_frsize * space.f_blocks
    assert 0 <= found["shared_memory"]["free_bytes"] <= found["shared_memory"]["bytes"]
    assert found["open_files"] == {"limit": files[0], "most": files[1]}
    table = call("limits").out
    assert "free in /dev/shm" in table and f"open files: {files[0]} for each process" in table


# --- Data ------------------------------------------------------------------------------------


def test_synth_leaves_foreign_folders_alone(call, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    assert_refused(call("synth", "cosir", "--rows", 100, "--out", tmp_path / "mine"), 1, "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_an_unwritable_place_is_named(call, tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = call("synth", "cosir", "--rows", 100, "--out", tmp_path / "file" / "data")
    assert_refused(done, 1, str(tmp_path / "file"))


def shards(folder: pathlib.Path, rows: int = 8) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    arrays = {"image": rng.standard_normal((rows, 6)).astype(np.float32),
              "text": rng.standard_normal((rows, 4)).astype(np.float32),
              "ids": np.arange(rows, dtype=np.int64) * 7 + 3}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return arrays


def import_in(call, folder: pathlib.Path) -> Done:
    return call("import", "cosir", "--image-features", folder / "image.npy", "--text-features",
                folder / "text.npy", "--ids", folder / "ids.npy", "--out", folder / "data")


def test_import_then_export_gives_back_every_value_and_id(call, tmp_path):
    arrays = shards(tmp_path)
    assert import_in(call, tmp_path).status == 0
    for column in ("image", "text"):
        out = tmp_path / f"{column}-again.npy"
        assert call("store", "export", tmp_path / "data", "--column", column, "--out",
                    out).status == 0
        assert np.array_equal(np.load(out), arrays[column])
        assert np.array_equal(np.load(tmp_path / f"{column}-again.ids.npy"), arrays["ids"])
    out = tmp_path / "all.safetensors"
    assert call("store", "export", tmp_path / "data", "--out", out).status == 0
    from safetensors.numpy import load_file
    loaded = load_file(out)
    assert {name: loaded[name].tolist() for name in arrays} == \
        {name: array.tolist() for name, array in arrays.items()}
    out = tmp_path / "text.csv"
    assert call("store", "export", tmp_path / "data", "--column", "text", "--out", out).status == 0
    table = np.loadtxt(out, delimiter=",", skiprows=1)
    assert np.array_equal(table[:, 0].astype(np.int64), arrays["ids"])
    assert np.array_equal(table[:, 1:].astype(np.float32), arrays["text"])
    assert call("store", "verify", tmp_path / "data").status == 0


def test_export_names_what_it_cannot_do(call, tmp_path):
    shards(tmp_path)
    assert import_in(call, tmp_path).status == 0
    data = tmp_path / "data"
    before = sorted(path.name for path in tmp_path.iterdir())
    assert_refused(call("store", "export", data, "--out", tmp_path / "x.npy"), 1, "--column")
    assert_refused(call("store", "export", data, "--out", tmp_path / "x.parquet"), 1, ".csv")
    assert_refused(call("store", "export", data, "--out", tmp_path / "ids.npy", "--column",
                        "image"), 1, "exists")
    assert_refused(call("store", "export", data, "--column", "sound", "--out",
                        tmp_path / "x.npy"), 1, "sound", "image")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def corrupt(kind: str, folder: pathlib.Path, arrays: dict) -> str:
    """Damages one input; returns a word the message must name."""
    match kind:
        case "missing":
            (folder / "image.npy").unlink()
        case "truncated":
            data = (folder / "image.npy").read_bytes()
            (folder / "image.npy").write_bytes(data[:-5])
        case "dtype":
            np.save(folder / "image.npy", arrays["image"].astype(np.int32))
        case "nan":
            arrays["image"][3, 2] = np.nan
            np.save(folder / "image.npy", arrays["image"])
        case "infinite":
            arrays["image"][3, 2] = np.inf
            np.save(folder / "image.npy", arrays["image"])
        case "flat":
            np.save(folder / "image.npy", arrays["image"].ravel())
        case "rows":
            np.save(folder / "image.npy", arrays["image"][:-1])
        case "duplicate":
            arrays["ids"][5] = arrays["ids"][2]
            np.save(folder / "ids.npy", arrays["ids"])
            return str(arrays["ids"][2])
        case "id dtype":
            np.save(folder / "ids.npy", arrays["ids"].astype(np.float64))
            return "ids.npy"
        case "id rows":
            np.save(folder / "ids.npy", arrays["ids"][:-2])
            return "ids.npy"
    return "image.npy"


@pytest.mark.parametrize("kind", ["missing", "truncated", "dtype", "nan", "infinite", "flat",
                                  "rows", "duplicate", "id dtype", "id rows"])
def test_bad_shards_are_named_and_leave_no_store(call, tmp_path, kind):
    word = corrupt(kind, tmp_path, shards(tmp_path))
    before = sorted(path.name for path in tmp_path.iterdir())
    assert_refused(import_in(call, tmp_path), 1, word)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_info_names_what_each_thing_is(call, tmp_path):
    shards(tmp_path)
    assert import_in(call, tmp_path).status == 0
    kinds = {"data": "feature_store", "image.npy": "npy"}
    for name, kind in kinds.items():
        done = call("info", tmp_path / name, "--json")
        assert json.loads(done.out)["kind"] == kind
    assert "image float32 [6]" in call("info", tmp_path / "data").out
    (tmp_path / "letter.txt").write_text("hello")
    assert_refused(call("info", tmp_path / "letter.txt"), 1, "nothing that Plimsoll knows")


# --- Runs ------------------------------------------------------------------------------------


@pytest.fixture
def train(call, small_data):
    def run(out, *more, **options):
        return call("train", "cosir", "--data", small_data, "--out", out, "--memory-limit", "1GiB",
                    "--epochs", 1, "--batch-size", 512, "--set", "eval_pairs=100", *more, **options)
    return run


def test_missing_data_leaves_no_run_behind(trains, call, tmp_path):
    done = call("train", "cosir", "--data", tmp_path / "nowhere", "--out", tmp_path / "run")
    assert_refused(done, 1, "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_limit_below_the_floor_says_what_would_do_and_leaves_no_run(trains, train, tmp_path):
    done = train(tmp_path / "run", "--memory-limit", "16MiB")
    assert_refused(done, 1, "limit")
    assert "MiB" in done.err
    assert not (tmp_path / "run").exists()


def test_damaged_features_are_named_and_leave_no_run(trains, call, small_data, tmp_path):
    subprocess.run(["cp", "-r", small_data, tmp_path / "data"], check=True)
    records = tmp_path / "data" / "records.dat"
    os.truncate(records, records.stat().st_size - 4096)
    done = call("train", "cosir", "--data", tmp_path / "data", "--out", tmp_path / "run")
    assert_refused(done, 1, "records.dat")
    assert not (tmp_path / "run").exists()
    assert call("store", "verify", tmp_path / "data").status == 1


def test_a_run_ends_with_one_json_line_and_all_else_on_standard_error(trains, train, call,
                                                                      tmp_path):
    run = tmp_path / "run"
    done = train(run, "--json")
    assert done.status == 0, done.err
    assert len(done.out.splitlines()) == 1
    summary = json.loads(done.out)
    for key in ["status", "step", "epoch", "loss", "rows_per_second", "limit_bytes",
                "peak_resident_bytes", "leased_peak_bytes", "hit_rate", "commits", "seconds",
                "recall", "state_sha256"]:
        assert key in summary, key
    assert summary["status"] == "finished" and len(summary["state_sha256"]) == 64
    assert 0 < summary["peak_resident_bytes"] <= summary["limit_bytes"] == 1 << 30
    assert "# from --epochs" in (run / "run.toml").read_text()

    again = train(run)
    assert_refused(again, 1, "is a run already", "plimsoll resume")
    changed = call("resume", run, "--set", "seed=9")
    assert_refused(changed, 2, "seed", "identity")
    resumed = call("resume", run, "--json", "--memory-limit", "2GiB")
    assert resumed.status == 0, resumed.err
    assert json.loads(resumed.out)["state_sha256"] == summary["state_sha256"]

    evaluated = call("eval", run, "--json")
    assert evaluated.status == 0, evaluated.err
    assert json.loads(evaluated.out)["recall"]["raw"] == summary["recall"]["raw"]
    info = json.loads(call("info", run, "--json").out)
    [table] = info["tables"][0]["tables"]
    assert info["kind"] == "run" and (table["name"], table["dim"]) == ("conditions", 2)
    conditions = run / "embeddings" / "conditions"
    assert call("store", "verify", conditions).status == 0
    out = tmp_path / "conditions.safetensors"
    assert call("store", "export", conditions, "--out", out).status == 0
    from safetensors.numpy import load_file
    rows = load_file(out)
    assert rows["rows"].shape == (table["rows"], 2)
    assert len(set(rows["ids"].tolist())) == len(rows["ids"])
    checkpoint = max((run / "checkpoints").glob("step-*"))
    shown = json.loads(call("info", checkpoint, "--json").out)
    assert shown["kind"] == "checkpoint" and shown["disk_bytes"] == (checkpoint / "parts.pt").stat().st_size


def test_r35_what_nobody_hears_is_status_4(trains, call, run_program, small_data, tmp_path):
    run = tmp_path / "run"
    run_program("train", "cosir", "--data", small_data, "--out", run, "--memory-limit", "1GiB", "--epochs", 1,
                "--batch-size", 256, "--eval-pairs", 50, "--json")
    for command in (["stop"], ["pause"], ["continue"], ["limit", "1GiB"]):
        nobody = call(command[0], run, *command[1:])
        assert nobody.status == 4 and nobody.out.strip().endswith("no process trains there")
    assert not (run / ".stop").exists() and not (run / ".limit").exists()


@pytest.mark.parametrize("batch", [256, 8192])
def test_r41_the_first_limit_that_is_named_does(trains, call, tmp_path, batch):
    run, data = tmp_path / "run", tmp_path / "data"
    assert call("synth", "cosir", "--rows", 9000, "--image-dim", 32, "--text-dim", 32, "--out", data).status == 0
    words = ["train", "cosir", "--data", data, "--out", run, "--epochs", 1, "--eval-pairs", 50,
             "--batch-size", batch, "--json"]

    until_it_does(lambda limit: call(*words, "--memory-limit", f"{limit}MiB"), 64)


@pytest.mark.parametrize("option", ["store_bytes", "cache_bytes", "queue_bytes"])
def test_r41_no_limit_is_named_where_an_option_is_too_small(trains, call, small_data, tmp_path, option):
    for limit in ("512MiB", "2GiB"):
        refused = call("train", "cosir", "--data", small_data, "--out", tmp_path / "run", "--batch-size", 256,
                       "--memory-limit", limit, "--set", f"{option}=1")
        assert_refused(refused, 1, option, f"raise {option}")
        assert "would do" not in refused.err, limit


@pytest.mark.parametrize("layout", ["any_order", "sample_order"])
def test_r41_the_first_size_that_is_named_for_an_option_does(trains, call, small_data, tmp_path, layout):
    words = ["train", "cosir", "--data", small_data, "--out", tmp_path / "run", "--epochs", 1, "--batch-size", 256,
             "--set", "eval_pairs=50", "--set", f"label_layout={layout}", "--json"]
    refused = call(*words, "--memory-limit", "512MiB", "--set", "store_bytes=1")
    assert_refused(refused, 1, "store_bytes", "raise store_bytes")
    named = re.search(r"at least .* \((\d+) bytes\) is needed", refused.err)[1]
    done = call(*words, "--memory-limit", "2GiB", "--set", f"store_bytes={named}")
    assert done.status == 0, done.err

def start(program, data, out, *more) -> subprocess.Popen:
    return subprocess.Popen(
        [program, "train", "cosir", "--data", data, "--out", out, "--memory-limit", "1GiB",
         "--epochs", "500", "--batch-size", "256", "--set", "eval_pairs=50", "--json", *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_steps(call, run, steps: int, child) -> dict:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and child.poll() is None:
        done = call("status", run, "--json")
        if done.status == 0:
            status = json.loads(done.out)
            if status["step"] >= steps:
                return status
        time.sleep(0.05)
    raise AssertionError(child.communicate(timeout=10)[1][-3000:] if child.poll() is not None
                         else "no steps in two minutes")


def test_a_run_that_is_moved_while_it_trains_ends_and_is_whole_where_it_is(
        trains, program, call, small_data, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    child = start(program, small_data, run, "--set", "checkpoint_every_n_steps=5")
    try:
        wait_for_steps(call, run, 10, child)
        run.rename(moved)
        _, err = child.communicate(timeout=120)
    finally:
        child.kill()
    # "moved or removed", or of a file that it was just writing.
    assert child.returncode == 1 and f"{run}/" in err, err
    assert not run.exists()
    assert "resumable from step" in call("status", moved).out
    assert call("eval", moved).status == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, "stop", ".stop"])
def test_a_run_stops_when_asked_and_says_so(trains, program, call, small_data, tmp_path, how):
    run = tmp_path / "run"
    child = start(program, small_data, run)
    try:
        status = wait_for_steps(call, run, 3, child)
        assert status["alive"] and status["status"] in ("running", "evaluating")
        second = call("resume", run)
        assert_refused(second, 1, "another process trains")
        if how == "stop":
            assert call("stop", run).status == 0
        elif how == ".stop":
            (run / ".stop").touch()
        else:
            child.send_signal(how)
        out, err = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["status"] == "stopped"
    shown = json.loads(call("status", run, "--json").out)
    assert shown["status"] == "stopped" and shown["checkpoint_step"] == summary["step"]


def test_a_paused_run_waits_and_goes_on(trains, program, call, small_data, tmp_path):
    run = tmp_path / "run"
    child = start(program, small_data, run)
    try:
        wait_for_steps(call, run, 2, child)
        assert call("pause", run).status == 0
        deadline = time.monotonic() + 60
        while json.loads(call("status", run, "--json").out)["status"] != "paused":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        before = json.loads(call("status", run, "--json").out)["step"]
        time.sleep(1.5)
        assert json.loads(call("status", run, "--json").out)["step"] == before
        assert call("continue", run).status == 0
        wait_for_steps(call, run, before + 2, child)
        assert call("stop", run).status == 0
        assert child.wait(timeout=120) == 0
    finally:
        child.kill()
        child.communicate()


SHORT = ["--epochs", "48", "--store-bytes", "24MiB", "--cache-bytes", "12MiB"]


@pytest.fixture(scope="module")
def undisturbed(trains, program, small_data, tmp_path_factory) -> str:
    """The final state of a short run whose limit nobody touches."""
    child = start(program, small_data, tmp_path_factory.mktemp("runs") / "plain", *SHORT)
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    return json.loads(out.splitlines()[-1])["state_sha256"]


def events(run, name: str) -> list[dict]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == name]


def wait_for_events(run, name: str, count: int) -> list[dict]:
    deadline = time.monotonic() + 60
    while len(events(run, name)) < count:
        assert time.monotonic() < deadline, (name, count)
        time.sleep(0.05)
    return events(run, name)


def test_a_run_follows_its_limit_down_and_up_and_computes_the_same(
        trains, program, call, small_data, tmp_path, undisturbed):
    run = tmp_path / "run"
    child = start(program, small_data, run, *SHORT)
    try:
        full = wait_for_steps(call, run, 3, child)["leased_by_tag"]
        # 9 MiB below what is promised: what the table says is free, and as many more.
        free = float(re.search(r"(?m)^free +([0-9.]+) MiB", events(run, "admitted")[0]["table"])[1])
        low = (1 << 30) - int((free + 9) * (1 << 20))
        assert call("pause", run).status == 0
        assert call("limit", run, low).status == 0
        change = wait_for_events(run, "limit", 1)[0]
        assert change["settled"] and change["limit_bytes"] == change["asked_bytes"] == low
        assert change["before_bytes"] == 1 << 30
        assert change["shrunk_bytes"] >= 8 << 20
        shown = json.loads(call("status", run, "--json").out)
        assert shown["limit_bytes"] == low and "plimsoll limit" in shown["limit_source"]
        assert sum(shown["leased_by_tag"].values()) < sum(full.values()) - (6 << 20)
        evicted = events(run, "evict")
        assert sum(one["given_bytes"] for one in evicted if one["move"] == "shrink") >= 8 << 20
        assert sum(one["freed_bytes"] for one in evicted) > 6 << 20
        assert call("continue", run).status == 0
        wait_for_steps(call, run, shown["step"] + 5, child)
        assert call("limit", run, "1GiB").status == 0
        change = wait_for_events(run, "limit", 2)[1]
        assert change["settled"] and change["limit_bytes"] == 1 << 30
        assert change["grown_bytes"] >= 6 << 20
        out, err = child.communicate(timeout=300)
    finally:
        child.kill()
    assert child.returncode == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["status"] == "finished"
    assert summary["state_sha256"] == undisturbed


def test_r35_memory_that_ends_a_run_is_status_3_and_names_a_limit_that_would_do(
        trains, program, call, small_data, tmp_path, undisturbed):
    run = tmp_path / "run"
    child = start(program, small_data, run, *SHORT)
    try:
        wait_for_steps(call, run, 3, child)
        assert_refused(call("limit", run, "much"), 2, "SIZE")
        assert call("limit", run, "64MiB").status == 0
        out, err = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 3, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["status"] == "stopped" and summary["stop_cause"] == "memory"
    assert not wait_for_events(run, "limit", 1)[0]["settled"]
    shown = json.loads(call("status", run, "--json").out)
    assert "64.0 MiB is asked for" in shown["message"], shown["message"]
    assert shown["checkpoint_step"] == summary["step"]
    enough = re.search(r"A limit of (\d+) MiB would do", shown["message"])[1]
    assert 64 < int(enough) < 1024
    resumed = call("resume", run, "--memory-limit", enough + "MiB", "--json")
    assert resumed.status == 0, resumed.err
    done = json.loads(resumed.out.splitlines()[-1])
    assert done["status"] == "finished"
    assert done["peak_resident_bytes"] <= int(enough) << 20
    assert done["state_sha256"] == undisturbed


def test_recipes_are_listed_and_each_has_a_file_of_its_options(call, tmp_path):
    listed = [line.split("\t") for line in call("recipes").out.splitlines()]
    assert [name for name, _ in listed] == ["cosir", "can-kd", "chat", "vision"] and all(about for _, about in listed)
    for name, _ in listed:
        file = tmp_path / f"{name}.toml"
        file.write_text(call("config", name).out)
        keys = set(re.findall(r"^(?:# )?(\w+) = ", file.read_text(), re.MULTILINE))
        offered = set(re.findall(r"^  --([\w-]+)", call("train", name, "--help").out, re.MULTILINE))
        assert keys and keys <= {flag.replace("-", "_") for flag in offered}
        assert {"batch_size", "seed", "memory_limit", "data", "out"} <= keys
        # Everything in it is accepted: what is missed is what nobody can know.
        assert_refused(call("train", name, "--config", file), 2, "data")
    assert_refused(call("config", "cosri"), 2, "did you mean cosir?")


def test_a_file_of_all_options_trains_as_none(trains, call, small_data, tmp_path):
    file = tmp_path / "cosir.toml"
    file.write_text(call("config", "cosir").out)
    words = ["--data", small_data, "--epochs", 1, "--json", "--quiet"]
    digests = {json.loads(done.out.splitlines()[-1])["state_sha256"] for done in (
        call("train", "cosir", *words, "--out", tmp_path / "a", "--config", file),
        call("train", "cosir", *words, "--out", tmp_path / "b"),
        call("train", "cosir", *words, "--out", tmp_path / "c", "--config", file, "--seed", 1))}
    assert len(digests) == 2
