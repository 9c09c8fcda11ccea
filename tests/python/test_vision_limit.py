# SPDX-License-Identifier: Apache-2.0
"""The recipe `vision` inside 1 GiB: in a cgroup whose killer is armed, killed, it ends in the bits of a calm run."""
import json
import random
import subprocess
import sys

import pytest

from test_chat import digest  # Skips where a library is not there.
from test_chat_limit import LIVES, MIB, killed

import plimsoll
from tests.support.cgroup import MemoryCgroup
from tests.support.vision_models import make_model, make_set


GIVEN = {"sequence_length": 96, "method": "full", "dtype": "float32", "lr": 3e-3, "batch_size": 4, "accumulate": 1, "held_out": 16,
         "seed": 5, "compute_threads": 1, "foreign_bytes": "128MiB", "checkpoint_every_n_steps": 4, "warmup_steps": 0,
         "progress": False, "memory_limit": "1GiB"}
KEEPS = """
import json, sys
import plimsoll
from plimsoll.recipes.vision import _rows
made, kept = _rows.Maker.batch, []
def keeping(self, *given):
    kept.append(b"-" * (6 << 20))  # As the original kept each image that it had decoded.
    return made(self, *given)
_rows.Maker.batch = keeping
print(json.dumps(plimsoll.train("vision", **eval(sys.argv[1]))))
"""


def life(given):
    return [sys.executable, "-c", LIVES.replace('"chat"', '"vision"'), repr(given)]


def test_m7_what_keeps_growing_ends_the_run_at_its_limit_with_a_checkpoint_and_it_goes_on_to_the_same_bits(tmp_path):
    MemoryCgroup.needed()
    make_model(tmp_path / "model")
    make_set(tmp_path / "pictures", 80)
    given = {**GIVEN, "data": str(tmp_path / "pictures"), "model": str(tmp_path / "model"), "epochs": 4,
             "checkpoint_every_n_steps": 1, "memory_limit": "512MiB"}  # Within a step it ends at its last commit.
    calm = subprocess.run(life({**given, "out": str(tmp_path / "calm")}), capture_output=True, text=True, timeout=600)
    assert calm.returncode == 0, calm.stderr[-3000:]
    given["out"] = str(tmp_path / "run")
    with MemoryCgroup(512 * MIB) as group:
        ended = group.run([sys.executable, "-c", KEEPS, repr(given)], timeout=600)
        assert ended.returncode == 0 and ended.oom_kills == 0, ended.stderr[-3000:]
        assert (ended.last_json["status"], ended.last_json["stop_cause"]) == ("stopped", "memory")
        told = plimsoll.status(tmp_path / "run")
        assert 0 < told["checkpoint_step"] == ended.last_json["step"] < 64
        last = group.run(life(given), timeout=600)
    assert last.returncode == 0 and last.oom_kills == 0, last.stderr[-3000:]
    assert last.last_json == json.loads(calm.stdout.splitlines()[-1])
    assert digest(tmp_path / "run") == digest(tmp_path / "calm")


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_in_a_cgroup_of_1_gib_it_ends_in_the_same_bits_and_has_learnt(kills, tmp_path):
    MemoryCgroup.needed()
    make_model(tmp_path / "model")
    make_set(tmp_path / "pictures", 80)
    given = {**GIVEN, "data": str(tmp_path / "pictures"), "model": str(tmp_path / "model"), "epochs": 8}
    dice = random.Random(kills)
    calm = subprocess.run(life({**given, "out": str(tmp_path / "calm")}), capture_output=True, text=True, timeout=600)
    assert calm.returncode == 0, calm.stderr[-3000:]
    expected = json.loads(calm.stdout.splitlines()[-1])
    assert expected["held_out_loss"] < 0.3 and expected["step"] == 128
    given["out"] = str(tmp_path / "run")
    with MemoryCgroup(1024 * MIB) as group:
        for kill in range(kills):
            killed(group, life(given), tmp_path / "run", 8 * kill + dice.choice([5, 6, 7]))
        last = group.run(life(given), timeout=600)
    assert last.returncode == 0 and last.oom_kills == 0, last.stderr[-3000:]
    assert last.last_json == expected and digest(tmp_path / "run") == digest(tmp_path / "calm")
    assert last.unmapped_peak_bytes <= 1024 * MIB
