# SPDX-License-Identifier: Apache-2.0
"""A plimsoll.Run whose model is on the simulated device: killed in each stage of a commit, and the bits of an undisturbed run there."""
import pathlib

import pytest

from tests.support.lives import told
from tests.support.on_device import skip_without_torch

skip_without_torch()

PROGRAMS = pathlib.Path(__file__).resolve().parents[1] / "support/run_programs.py"


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_around_a_commit_a_run_on_a_device_ends_in_the_same_bits(workers, tmp_path):
    seen = told(PROGRAMS, tmp_path, "stages", 0, "on_simulated_device", workers, "3GiB")
    assert seen["digest"] == seen["undisturbed"] and len(seen["killed_at"]) == 8


@pytest.mark.parametrize(("kind", "kills", "needed"), [("hugging_face", 2, ("transformers", "accelerate")), ("lightning", 1, ("lightning",))])
def test_killed_a_trainer_on_a_device_ends_in_the_same_bits(kind, kills, needed, tmp_path):
    for name in needed:
        pytest.importorskip(name)
    seen = told(PROGRAMS.with_name("trainer_programs.py"), tmp_path, kills, 46, f"{kind}_on_simulated_device", 0, "3GiB")
    assert seen["digest"] == seen["undisturbed"] and len(seen["killed_at"]) == kills
