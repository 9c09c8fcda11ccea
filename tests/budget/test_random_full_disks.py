# SPDX-License-Identifier: Apache-2.0
"""Full disks at random moments: nothing is lost, and each run goes on by itself."""
import pytest

from tests.support import full_disk

pytest.importorskip("plimsoll._torch")

from tests.budget.random_full_disks import SIZE_MIB, drawn, outcome_of


def runs_of(tmp_path, seed, indices):
    lines = []
    for index in indices:
        with full_disk.small_disk(tmp_path / str(index), SIZE_MIB) as disk:
            lines.append(outcome_of(drawn(seed, index), disk))
        assert lines[-1]["right"], lines[-1]
    return lines


def test_s04_full_disks_at_random_moments_lose_nothing(tmp_path):
    assert sum(line["paused"] for line in runs_of(tmp_path, 1, range(3))) >= 1


@pytest.mark.slow
def test_s04_fifty_full_disks_at_random_moments_lose_nothing(tmp_path):
    assert sum(line["paused"] for line in runs_of(tmp_path, 2, range(50))) >= 25
