# SPDX-License-Identifier: Apache-2.0
"""plimsoll.log_to_mlflow: a run of ours, read back with MLflow's own library and default rules."""
import json
import os
import shutil
import subprocess
import sys

import pytest

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")
pytest.importorskip("alembic")

import plimsoll


@pytest.fixture(scope="module")
def trained(run_program, small_data, tmp_path_factory) -> dict:
    run = tmp_path_factory.mktemp("mlflow") / "first run"
    summary = run_program("train", "cosir", "--data", small_data, "--out", run, "--memory-limit", "1GiB",
                          "--epochs", 2, "--batch-size", 512, "--set", "eval_pairs=200", "--json")
    return {"run": run, "summary": summary}


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> str:
    """What `mlflow ui` opens by default is a file like this."""
    return f"sqlite:///{tmp_path_factory.mktemp('db')}/mlflow.db"


@pytest.fixture
def client(database):
    return mlflow.MlflowClient(tracking_uri=database)


def values(client, run_id: str, key: str) -> list[tuple[int, float]]:
    return sorted((one.step, one.value) for one in client.get_metric_history(run_id, key))


def events(run) -> list[dict]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def cut(run, folder, lines: int):
    """A copy of the run as it was after so many events."""
    shutil.copytree(run, folder)
    text = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "events.jsonl").write_bytes(b"".join(text[:lines]))
    return folder


def test_the_options_of_a_loop_of_ones_own_are_parameters(tmp_path, database, client):
    from plimsoll.run import _run_settings

    options = {"lr": 1e-3, "name": "a \"b\" # c", "a+b": 2, **{f"layer {at}": at for at in range(120)}}
    (tmp_path / "run.toml").write_text(_run_settings.to_toml({"seed": 7}, options))
    (tmp_path / "events.jsonl").write_text('{"time":1.7e9,"event":"start","step":0}\n')
    params = client.get_run(plimsoll.log_to_mlflow(tmp_path, tracking_uri=database)).data.params
    assert params["seed"] == "7" and params["options.lr"] == "0.001" and params["options.a_b"] == "2"
    assert params["options.name"] == "a \"b\" # c" and params["options.layer 119"] == "119"


def test_r34_mlflow_reads_the_run(trained, database, client):
    run_id = plimsoll.log_to_mlflow(trained["run"], tracking_uri=database, every_n_steps=1)
    found = client.get_run(run_id)
    assert found.info.status == "FINISHED" and found.info.run_name == "first run"
    assert found.info.end_time >= found.info.start_time > 1_600_000_000_000
    assert client.get_experiment(found.info.experiment_id).name == "cosir"
    assert found.data.params["batch_size"] == "512" and found.data.params["label_optimizer"] == "adamw"
    losses = [(event["step"], event["loss"]) for event in events(trained["run"]) if event["event"] == "step"]
    assert len(losses) == trained["summary"]["step"] > 10
    assert values(client, run_id, "train/loss") == losses
    epochs = [(event["step"], event["loss"]) for event in events(trained["run"]) if event["event"] == "epoch"]
    assert values(client, run_id, "epoch/loss") == epochs
    recall = trained["summary"]["recall"]["raw"]["t2i"]["r10"]
    assert found.data.metrics["eval/raw/t2i/r10"] == pytest.approx(recall)


def test_r34_a_second_call_adds_only_what_is_new(trained, database, client, tmp_path):
    run = cut(trained["run"], tmp_path / "second", 12)
    run_id = plimsoll.log_to_mlflow(run, tracking_uri=database, every_n_steps=1)
    assert client.get_run(run_id).info.status == "RUNNING"
    part = values(client, run_id, "train/loss")
    assert 0 < len(part) < trained["summary"]["step"]
    # Killed in the middle of a line; the resumed run repeats the last steps, then goes on.
    whole = (trained["run"] / "events.jsonl").read_bytes().splitlines(keepends=True)
    repeated = [line for line in whole[:12] if b'"event":"step"' in line][-2:]
    with open(run / "events.jsonl", "ab") as file:
        file.write(whole[12][:9])
        file.flush()
        assert plimsoll.log_to_mlflow(run, tracking_uri=database, every_n_steps=1) == run_id
        assert values(client, run_id, "train/loss") == part
        file.write(b"\n" + b"".join(line.replace(b'{"time":1', b'{"time":2') for line in repeated))
        file.write(b"".join(whole[12:]))
    for _ in range(2):
        assert plimsoll.log_to_mlflow(run, tracking_uri=database, every_n_steps=1) == run_id
        assert [step for step, _ in values(client, run_id, "train/loss")] == list(
            range(1, trained["summary"]["step"] + 1))
        assert client.get_run(run_id).info.status == "FINISHED"


def test_a_kill_between_two_requests_logs_nothing_twice(trained, database, client, tmp_path, monkeypatch):
    from plimsoll.integrations import _mlflow

    run = cut(trained["run"], tmp_path / "third", 10_000)
    monkeypatch.setattr(_mlflow, "_REQUEST_METRICS", 7)
    real, calls = mlflow.MlflowClient.log_batch, []

    def dies(self, run_id, metrics=(), params=(), tags=(), **rest):
        calls.append(len(metrics))
        if len(calls) == 5:
            real(self, run_id, metrics, params)  # The metrics arrived, the tag did not.
            raise ConnectionError("gone")
        return real(self, run_id, metrics, params, tags, **rest)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", dies)
    with pytest.raises(ConnectionError):
        plimsoll.log_to_mlflow(run, tracking_uri=database, every_n_steps=1)
    run_id = plimsoll.log_to_mlflow(run, tracking_uri=database, every_n_steps=1)
    assert max(calls) <= 7
    assert [step for step, _ in values(client, run_id, "train/loss")] == list(
        range(1, trained["summary"]["step"] + 1))


def test_r67_nothing_in_a_run_folder_leads_out_of_it(trained, database, client, tmp_path):
    run = cut(trained["run"], tmp_path / "hostile", 10_000)
    (run / "metrics" / "mlflow_run_id").write_text("../" * 11 + "\n")
    (run / "evaluation.json").symlink_to("/dev/zero")  # Asked for by no event of cosir.
    before = {path.relative_to(tmp_path): path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    run_id = plimsoll.log_to_mlflow(run, tracking_uri=database)
    assert client.get_run(run_id).info.status == "FINISHED"
    assert before == {path.relative_to(tmp_path): path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_r68_a_newline_in_the_user_name_harms_nothing(trained, database, client, tmp_path, monkeypatch):
    for name in ("USER", "LOGNAME", "USERNAME", "LNAME"):
        monkeypatch.setenv(name, "eve\nstatus: 9\n")
    run_id = plimsoll.log_to_mlflow(cut(trained["run"], tmp_path / "user", 10_000), tracking_uri=database,
                                    run_name="a\nb", experiment="with 'quotes'")
    found = client.get_run(run_id)
    assert found.info.status == "FINISHED" and found.info.run_name == "a\nb"
    assert client.get_experiment(found.info.experiment_id).name == "with 'quotes'"


def test_mlflows_refusal_of_a_folder_reaches_the_caller(trained, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(mlflow.exceptions.MlflowException, match="MLFLOW_ALLOW_FILE_STORE"):
        plimsoll.log_to_mlflow(trained["run"], tracking_uri=f"file://{tmp_path}/mlruns")


def test_what_cannot_be_logged_is_said(trained, database, tmp_path):
    with pytest.raises(plimsoll.NotFoundError, match="nowhere: no run there"):
        plimsoll.log_to_mlflow(tmp_path / "nowhere", tracking_uri=database)
    with pytest.raises(ValueError, match="every_n_steps: 0 is less than 1"):
        plimsoll.log_to_mlflow(trained["run"], tracking_uri=database, every_n_steps=0)
    run = cut(trained["run"], tmp_path / "lost", 10_000)
    plimsoll.log_to_mlflow(run, tracking_uri=database)
    cut_short = (run / "events.jsonl").read_bytes().splitlines(keepends=True)[0]
    (run / "events.jsonl").write_bytes(cut_short)
    with pytest.raises(ValueError, match="events.jsonl: has .* part of the file is lost"):
        plimsoll.log_to_mlflow(run, tracking_uri=database)


def test_without_mlflow_the_error_says_what_to_install(trained):
    code = ("import sys; sys.modules['mlflow'] = None\nimport plimsoll\n"
            f"plimsoll.log_to_mlflow({str(trained['run'])!r})")
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False,
                          env=dict(os.environ))
    assert done.returncode == 1 and "pip install mlflow" in done.stderr
