# SPDX-License-Identifier: Apache-2.0
"""Giving unused memory back between steps: measured, logged, and without a trace in the result."""
import json

import pytest

from test_cli import call, trains  # noqa: F401  Fixtures.


@pytest.fixture
def data(call, tmp_path):
    folder = tmp_path / "data"
    assert call("synth", "cosir", "--rows", "4000", "--out", folder, "--seed", "0").status == 0
    return folder


def train(call, data, out, every):
    done = call("train", "cosir", "--data", data, "--out", out, "--memory-limit", "1GiB", "--epochs",
                "1", "--batch-size", "256", "--eval-pairs", "100", "--cleanup-every-n-steps",
                str(every), "--quiet", "--json")
    assert done.status == 0, done.err
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return json.loads(done.out.splitlines()[-1]), [e for e in events if e["event"] == "cleanup"]


def test_cleaning_up_every_n_steps_changes_no_bit_and_says_what_it_freed(trains, call, data, tmp_path):
    runs = {every: train(call, data, tmp_path / f"run{every}", every) for every in (0, 1, 5)}
    assert len({summary["state_sha256"] for summary, _ in runs.values()}) == 1
    for every, (summary, events) in runs.items():
        between = [e for e in events if e["when"] == "step"]
        assert len(between) == (summary["step"] // every if every else 0)
        assert [e["step"] for e in between] == [every * (k + 1) for k in range(len(between))]
        for event in events:
            assert event["freed_bytes"] == \
                event["resident_before_bytes"] - event["resident_after_bytes"]
    _, events = runs[0]
    after = [e for e in events if e["when"] == "evaluation"]
    assert len(after) == 2  # Before and after training.
    assert all(e["arena_bytes"] > 0 and e["freed_bytes"] > 0 for e in after)
