# SPDX-License-Identifier: Apache-2.0
"""What a run writes for TensorBoard, read back with TensorBoard and by hand. MLflow: test_mlflow.py."""
import json
import math
import os
import subprocess

import pytest


@pytest.fixture(scope="module")
def trained(run_program, small_data, tmp_path_factory) -> dict:
    """One short run with metrics."""
    base = tmp_path_factory.mktemp("metrics")
    summary = run_program("train", "cosir", "--data", small_data, "--out", base / "run",
                          "--memory-limit", "1GiB", "--epochs", 2, "--batch-size", 512,
                          "--set", "metrics_every_n_steps=2", "--set", "eval_pairs=200",
                          "--json")
    return {"run": base / "run", "summary": summary}


@pytest.fixture(scope="module")
def scalars(trained):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(trained["run"] / "metrics"))
    reader.Reload()
    return {tag: reader.Scalars(tag) for tag in reader.Tags()["scalars"]}


def test_tensorboard_reads_the_losses_and_the_memory_of_a_run(trained, scalars):
    assert any("loss" in tag for tag in scalars), sorted(scalars)
    assert any("resident" in tag for tag in scalars), sorted(scalars)
    assert {"eval/raw_t2i_r1", "eval/oracle_i2t_map", "eval/train_mean_rank", "loss/epoch", "rows/hit_rate"} <= set(scalars), sorted(scalars)
    recall = trained["summary"]["recall"]
    assert scalars["eval/raw_t2i_r1"][-1].value == pytest.approx(recall["raw"]["t2i"]["r1"], rel=1e-6)
    steps = trained["summary"]["step"]
    for tag, values in scalars.items():
        assert values, tag
        assert all(0 <= value.step <= steps for value in values), tag
        assert all(math.isfinite(value.value) for value in values), tag


def test_event_files_are_clean_tfrecords(trained):
    """TensorBoard's own reader skips a bad record silently; this one checks every CRC."""
    records = pytest.importorskip("tensorboard.compat.tensorflow_stub.pywrap_tensorflow")
    files = sorted((trained["run"] / "metrics").glob("events.out.tfevents.*"))
    assert files
    for path in files:
        reader = records.PyRecordReader_New(str(path).encode())
        count, bytes_read = 0, 0
        while True:
            try:
                reader.GetNext()
            except Exception as end:
                assert "OutOfRange" in type(end).__name__, end
                break
            count += 1
            bytes_read += 16 + len(reader.record())
        assert count > 1
        assert bytes_read == path.stat().st_size


def test_a_resumed_run_replaces_the_steps_it_does_again(program, run_program, small_data, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tmp_path / "run"
    command = [program, "train", "cosir", "--data", small_data, "--out", run, "--memory-limit",
               "1GiB", "--epochs", "2", "--batch-size", "512", "--set", "metrics_every_n_steps=1",
               "--set", "eval_pairs=100", "--set", "checkpoint_every_n_steps=6", "--json"]
    # Killed in the second commit after the first step: at step 12, with a checkpoint of step 6.
    killed = subprocess.run(list(map(str, command)), capture_output=True, check=False,
                            env=dict(os.environ, PLIMSOLL_CRASH="store.commit.superblock.before:3"))
    assert killed.returncode == -9, killed.stderr
    summary = run_program("resume", run, "--json")
    reader = accumulator.EventAccumulator(str(run / "metrics"))
    reader.Reload()
    steps = [value.step for value in reader.Scalars("train/loss")]
    assert steps == list(range(1, summary["step"] + 1))


def test_events_are_json_lines_with_every_step(trained):
    events = [json.loads(line) for line in (trained["run"] / "events.jsonl").read_text().splitlines()]
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == list(range(1, trained["summary"]["step"] + 1))
    assert all(len(line) < 512 for line in (trained["run"] / "events.jsonl").read_text().splitlines()
               if '"event":"step"' in line)


def test_status_shows_a_finished_run(program, trained):
    shown = subprocess.run([program, "status", trained["run"], "--json"], text=True,
                           capture_output=True, check=True)
    status = json.loads(shown.stdout)
    assert status["status"] == "finished" and status["alive"] is False
    assert status["step"] == trained["summary"]["step"]
    assert 0 < status["peak_resident_bytes"] <= 1 << 30
