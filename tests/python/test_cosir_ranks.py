# SPDX-License-Identifier: Apache-2.0
"""The recipe `cosir` of Python as several ranks: one digest for any number of them (decision 0086)."""
import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from plimsoll.core import _torch_gate

if _torch_gate.load_if_torch_imported() is None:
    pytest.skip("plimsoll was built without torch", allow_module_level=True)

# An optimizer imports torch._dynamo: each rank would.
SCENARIOS = "import runpy, torch._dynamo; runpy.run_module('tests.support.cosir_ranks', run_name='__main__', alter_sys=True)"
ROWS, STEPS = 5300, 9  # Two epochs of two or three steps and one of phase 2: of four tiles, and at the end of an epoch of two.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ends(program, folder):
    subprocess.run([program, "synth", "cosir", "--rows", str(ROWS), "--image-dim", "40", "--text-dim", "24", "--out", folder / "data"],
                   check=True, capture_output=True)
    done = subprocess.run([sys.executable, "-c", SCENARIOS, str(folder)], cwd=pathlib.Path(__file__).resolve().parents[2],
                          text=True, capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def events(run, name):
    return [one for one in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if one["event"] == name]


def bits(end):
    return {name: one for name, one in end.items() if name != "limit_bytes"}


def test_any_number_of_ranks_ends_in_the_bits_of_one_process(ends):
    alone = ends["alone"]
    assert alone["status"] == "finished" and alone["step"] == STEPS
    for name, ranks in (("2", 2), ("3", 3)):
        first, *others = ends[name]
        assert bits(first) == bits(alone) and others == [{}] * (ranks - 1)
        assert first["limit_bytes"] <= (4 << 30) // ranks


def test_killed_another_number_of_ranks_goes_on_to_the_same_bits(ends):
    assert ends["kills"] == ["killed"] * 3
    assert bits(ends["after kills"][0]) == bits(ends["alone"])


def test_a_stop_of_all_is_a_commit_and_one_process_goes_on(ends):
    first, *others = ends["stopped"]
    assert first["status"] == "stopped" and 1 <= first["step"] < STEPS and others == [{}] * 3
    assert bits(ends["after a stop"][0]) == bits(ends["alone"])


def test_a_limit_that_moves_is_that_of_all_ranks(ends, folder):
    assert bits(ends["limit"][0]) == bits(ends["alone"])
    larger, smaller = events(folder / "limit", "limit")
    assert larger["asked"] == "6GiB" and larger["limit_bytes"] - larger["before_bytes"] == pytest.approx(2 << 30, abs=2)  # Shares are rounded.
    assert smaller["asked"] == "100MiB" and "the run's other processes hold all of it" in smaller["message"]


def test_what_ranks_cannot_have_is_named(ends, folder):
    assert "batch_size = auto is planned for one process" in ends["auto"][0] and ends["auto"][1] == {}
    assert "of 4" in ends["small"][0] and "whose share of memory_limit is" in ends["small"][0], ends["small"]
    assert not (folder / "small" / "checkpoints" / "manifest.json").exists()
