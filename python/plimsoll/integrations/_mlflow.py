# SPDX-License-Identifier: Apache-2.0
"""log_to_mlflow(): copies a run's parameters, metrics and final status to MLflow, through MLflow's own library.

Metrics come from RUN/events.jsonl. A tag of the MLflow run records how much of it was sent, so the run folder
is only read.

Threads: one call at a time for one run.
Memory:  one line of the file and one request of at most 1,000 metrics.
"""
from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from ..errors import CorruptError, NotFoundError

_REQUEST_METRICS, _REQUEST_PARAMS = 1000, 100  # MLflow's own limits on one log_batch.
_LINE_BYTES = 64 << 10  # No event is longer than 4 KiB.
_PARAM_CHARACTERS = 6000  # MLflow's own limit on a parameter.
_EVALUATION_BYTES = 64 << 20
_LOGGED = {"step": "train", "epoch": "epoch", "eval": "eval", "device": "device"}  # Event → first part of its metrics' names.
_ENDS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_NOT_METRICS = {"time", "event", "step", "task"}
_RUN_TAG, _SENT_TAG = "plimsoll.run", "plimsoll.sent"


def log_to_mlflow(run: str | os.PathLike[str], *, tracking_uri: str | None = None,
                  experiment: str | None = None, run_name: str | None = None,
                  every_n_steps: int = 10) -> str:
    """Logs a recipe's run to MLflow and returns the id of its MLflow run.

        plimsoll.log_to_mlflow("RUN", tracking_uri="sqlite:///mlflow.db")     # then: mlflow ui

    You may call it at any time, also while the run trains. A later call finds the same MLflow run and
    adds new events: nothing is logged twice, and the steps that a resumed run repeats are left out.

    Parameters: the keys of run.toml, as they were at the first call; a run's `options` as options.NAME.
    Metrics:    train/loss and the loss's terms, at every n-th step; epoch/… at each epoch;
                eval/… at each evaluation. For can-kd the task's name precedes them.
    Status:     FINISHED, KILLED (stopped), FAILED, or RUNNING.

    tracking_uri:  MLflow's store, as for mlflow.set_tracking_uri(); None: MLflow's current setting.
                   MLflow refuses folders (`file:…`) unless MLFLOW_ALLOW_FILE_STORE=true.
    experiment:    name of the experiment, which is created if missing; None: the name of the recipe.
    run_name:      name of the MLflow run; None: the name of the run folder.
    every_n_steps: logs only the steps whose number this divides.
    Requires: `pip install mlflow`, or the smaller mlflow-skinny.
    Errors:   ImportError without MLflow; NotFoundError (no run there); ValueError (every_n_steps, or
              MLflow holds more events than the folder); CorruptError; MLflow's own exceptions.
    """
    if every_n_steps < 1:
        raise ValueError(f"every_n_steps: {every_n_steps} is less than 1")
    client = _client(tracking_uri)
    folder = pathlib.Path(run)
    if not (folder / "run.toml").is_file():
        raise NotFoundError(f"{folder}: no run there (no run.toml)")
    params = _params(folder / "run.toml")
    with open(folder / "events.jsonl", "rb") as events:
        first = events.readline(_LINE_BYTES)
        if not first.endswith(b"\n"):
            raise NotFoundError(f"{folder}: the run has no events yet")
        name = folder.resolve().name
        # A run folder keeps its first event for good; another run has another time or name.
        key = hashlib.sha256(name.encode(errors="replace") + b"\0" + first).hexdigest()[:32]
        recipe = params.get("recipe", "cosir")
        found = _find_or_make(client, experiment or recipe, key, run_name or name, params,
                              _parse(first).get("time"))
        _send(client, found, events, folder, every_n_steps)
    return found.info.run_id


def _client(tracking_uri: str | None) -> Any:
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise ImportError("plimsoll.log_to_mlflow needs MLflow's library: pip install mlflow, or the "
                          "smaller mlflow-skinny") from error
    return MlflowClient(tracking_uri=tracking_uri)


def _params(path: pathlib.Path) -> dict[str, str]:
    """Returns the keys of run.toml, which has one `key = literal  # source` per line."""
    found, table = {}, ""
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        table = "options." if line == "[options]" else table
        match = re.match(r'("(?:[^"\\]|\\.)*"|\w+) = ("(?:[^"\\]|\\.)*"|[^#]*)', line)
        if match:
            found[_named(table + _literal(match.group(1)))] = _literal(match.group(2))[:_PARAM_CHARACTERS]
    return found


def _literal(text: str) -> str:
    text = text.strip()
    try:
        return str(json.loads(text)) if text.startswith('"') else text
    except ValueError:
        return text


def _named(name: str) -> str:
    """Replaces the characters that MLflow refuses in names by underscores."""
    return re.sub(r"[^\w. :/-]", "_", name)


def _find_or_make(client: Any, experiment: str, key: str, run_name: str, params: dict[str, str],
                  began: Any) -> Any:
    from mlflow.entities import Param

    there = client.get_experiment_by_name(experiment)
    experiment_id = there.experiment_id if there else client.create_experiment(experiment)
    runs = client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{key}'", max_results=1)
    if runs:
        return runs[0]
    start = int(began * 1000) if isinstance(began, (int, float)) else None
    made = client.create_run(experiment_id, start_time=start, run_name=run_name, tags={_RUN_TAG: key})
    all_params = [Param(k, v) for k, v in params.items()]
    for at in range(0, len(all_params), _REQUEST_PARAMS):
        client.log_batch(made.info.run_id, params=all_params[at:at + _REQUEST_PARAMS])
    return made


class _Sent:
    """The position up to which events.jsonl was sent, and the last step sent of each kind; kept in a tag of the MLflow run."""

    def __init__(self, tags: dict[str, str]) -> None:
        state = json.loads(tags.get(_SENT_TAG, "{}"))
        self.bytes = int(state.get("bytes", 0))
        self.steps = {kind: int(state.get(kind, -1)) for kind in _LOGGED}

    def tag(self) -> Any:
        from mlflow.entities import RunTag

        return RunTag(_SENT_TAG, json.dumps({"bytes": self.bytes, **self.steps}))

    def is_new(self, event: dict[str, Any]) -> bool:
        """Whether an event is new. False for a step that a resumed run repeats, to the same bits."""
        kind, step = event.get("event"), event.get("step")
        if kind not in _LOGGED or not isinstance(step, int) or step <= self.steps[kind]:
            return False
        self.steps[kind] = step
        return True


def _send(client: Any, run: Any, events: Any, folder: pathlib.Path, every_n_steps: int) -> None:
    """Sends the new events. The tag is sent with the metrics it counts, so after a kill at most one request is
    sent again. MLflow ignores a metric whose time, step and value it has."""
    sent, run_id = _Sent(run.data.tags), run.info.run_id
    events.seek(0, os.SEEK_END)
    if events.tell() < sent.bytes:
        raise ValueError(f"{folder}/events.jsonl: has {events.tell()} bytes, and MLflow's run {run_id} was "
                         f"sent {sent.bytes}: part of the file is lost")
    events.seek(sent.bytes)
    metrics: list[Any] = []

    def request() -> None:
        while len(metrics) > _REQUEST_METRICS:
            client.log_batch(run_id, metrics[:_REQUEST_METRICS])
            del metrics[:_REQUEST_METRICS]
        client.log_batch(run_id, metrics, tags=[sent.tag()])
        metrics.clear()

    last: dict[str, Any] = {}
    for line in _whole_lines(events, folder):
        event = _parse(line)
        if sent.is_new(event) and (event["event"] != "step" or event["step"] % every_n_steps == 0):
            metrics += _metrics_of(event, folder)
        last = event or last
        sent.bytes += len(line)
        if len(metrics) >= _REQUEST_METRICS:
            request()
    if last:
        request()
        _set_status(client, run_id, last)


def _set_status(client: Any, run_id: str, last: dict[str, Any]) -> None:
    if last["event"] == "end":
        client.set_terminated(run_id, _ENDS.get(last.get("status", ""), "FAILED"), int(last["time"] * 1000))
    else:
        client.update_run(run_id, status="RUNNING")


def _whole_lines(events: Any, folder: pathlib.Path) -> Iterator[bytes]:
    """Yields complete lines, up to one that is still being written. Errors: CorruptError for a line that is too long."""
    while line := events.readline(_LINE_BYTES):
        if not line.endswith(b"\n"):
            if len(line) == _LINE_BYTES:
                raise CorruptError(f"{folder}/events.jsonl: a line of more than {_LINE_BYTES} bytes")
            return
        yield line


def _parse(line: bytes) -> dict[str, Any]:
    """Parses an event; returns {} for a line that a kill cut short."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    good = isinstance(event, dict) and isinstance(event.get("event"), str) and _is_number(event.get("time"))
    return event if good else {}


def _metrics_of(event: dict[str, Any], folder: pathlib.Path) -> Iterator[Any]:
    from mlflow.entities import Metric

    task = event.get("task")
    prefix = f"{task}/{_LOGGED[event['event']]}" if isinstance(task, str) else _LOGGED[event["event"]]
    values: dict[str, Any] = {name: value for name, value in event.items() if name not in _NOT_METRICS}
    if event["event"] == "eval":
        if isinstance(values.get("recall"), str):
            values = json.loads(values["recall"])
        elif "file" in values:  # can-kd: its figures are in a file, always of this name.
            with open(folder / "evaluation.json", "rb") as file:
                values = json.loads(file.read(_EVALUATION_BYTES))
    for name, value in _numbers(prefix, values):
        yield Metric(_named(name), float(value), int(event["time"] * 1000), event["step"])


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yields (path of names, number) for each number in nested objects."""
    if isinstance(value, dict):
        for part, inner in value.items():
            yield from _numbers(f"{name}/{part}", inner)
    elif _is_number(value):
        yield name, value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
