# SPDX-License-Identifier: Apache-2.0
"""Ranks of can-kd in Python, and what they are made of: whole steps on each rank, and work by chunks (decision 0087)."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from tests.support.on_device import skip_without_torch

skip_without_torch()

from tests.support.python_can_kd import make_set

# An optimizer imports torch._dynamo: each rank would.
SCENARIOS = "import runpy, torch._dynamo; runpy.run_module('tests.support.can_kd_ranks', run_name='__main__', alter_sys=True)"
ROOT = pathlib.Path(__file__).resolve().parents[2]


def seen_in(folder, *names):
    """What scenarios of tests/support/can_kd_ranks.py give, in one process, which imports torch once."""
    (folder / "bus").mkdir()
    done = subprocess.run([sys.executable, "-c", SCENARIOS, make_set(folder / "bus"), folder, *names], cwd=ROOT, text=True,
                          env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"}, capture_output=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    return seen_in(tmp_path_factory.mktemp("ranks"), "alike", "killed", "chunks", "whole_steps")


def assert_alike(ends):
    assert all(one == ends[0] for one in ends) and ends[0]["same"] == 1
    assert ends[0]["looks"] and ends[0]["evaluation"]["teacher"]["fusion"]
    assert ends[0]["files"] == []  # The teachers' answers are of no use any more.


def test_any_number_of_ranks_ends_in_the_bits_of_one_process(scenarios):
    """The autoencoder scores the curriculum."""
    assert_alike(scenarios["alike"])


@pytest.mark.slow
def test_eight_ranks_end_in_the_bits_of_one_process(tmp_path):
    """The classifier itself scores, each epoch anew, as in test_recipe_ranks.py."""
    assert_alike(seen_in(tmp_path, "eight")["eight"])


def test_killed_ranks_go_on_in_another_number_to_the_same_bits(scenarios):
    alone, killed = scenarios["killed"]
    assert {**killed, "looks": 0} == {**alone, "looks": 0}
    assert sorted(set(map(tuple, killed["looks"])), key=str) == sorted(set(map(tuple, alone["looks"])), key=str)


def test_rows_by_chunks_are_made_by_one_rank_each(scenarios):
    ends = scenarios["chunks"]
    for ranks in ends:
        for count in (0, 1, 10, 64):
            assert all(len(one[str(count)]) == count and [row[0] for row in one[str(count)]] == list(range(count)) for one in ranks)
        assert sorted(begin for one in ranks for begin in one["made"]) == sorted([0, 0, *range(0, 64, 10)])
        assert all(one["signs"] and one["again"] == 64 and one["looks"] == "KeyError: 'asked to stop'" for one in ranks)
        assert all("refused for the test" in one["refused"] for one in ranks)
        assert all(("with virtual_workers=1 cannot have it yet" in one.get("embedding", "")) == (len(ranks) > 1) for one in ranks)


def test_with_one_virtual_worker_each_rank_makes_the_whole_step(scenarios):
    seen = scenarios["whole_steps"]
    assert len(seen["ends"]) == 6 and all(one == seen["ends"][0] for one in seen["ends"])
    assert all("the loss of rank 1 is" in text and "all ranks make the same steps" in text for text in seen["differs"])
