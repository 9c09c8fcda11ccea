# SPDX-License-Identifier: Apache-2.0
"""What one of several ranks is disturbed in, all of them hear: the scenarios of tests/support/rank_agreement.py."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"}


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    """In one process, which imports torch once."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run([sys.executable, "-m", "tests.support.rank_agreement", folder, "moved", "admitted", "handed", "idled", "pressed",
                           "tables"], cwd=ROOT, text=True, env=ENVIRONMENT, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_step_that_is_committed_again_is_never_without_its_checkpoint(scenarios):
    """Each rank in turn is killed before and after it writes, or its disk is full; so is one of a finished run that is started again."""
    seen = scenarios["moved"]
    (undisturbed,) = seen.pop("undisturbed")
    assert [began for began, _ in undisturbed] == [0, 0]
    for name, (disturbed, ranks) in seen.items():
        assert disturbed or name == "finished", name  # Which need not be committed again.
        assert [began for began, _ in ranks] == [6, 6], name
        assert [digest for _, digest in ranks] == [digest for _, digest in undisturbed], name


def test_a_largest_step_that_one_rank_has_no_room_for_is_refused_on_all(scenarios):
    seen = scenarios["admitted"]
    ((first, limit), (second, same)), status = seen["short"]
    assert limit == same and f"a limit of {limit >> 20} MiB would do" in second
    assert second.startswith("BudgetExceeded: a step of 16384 rows is not admitted: it needs ") and " MiB would do" in second
    assert first == f"BudgetExceeded: rank 1: {second}"
    assert (status["status"], status["cause"], status["message"]) == ("stopped", "refused", first)
    ((first, _), (second, _)), status = seen["full"]
    assert first == f"RuntimeError: rank 1: {second}" and "full for the test" in second
    assert status["message"] == first
    assert seen["whole"][0] == [["ended", 0]] * 2


def test_rows_in_a_batch_of_several_workers_are_refused_by_their_table_s_name(scenarios):
    """They were never applied."""
    seen = scenarios["handed"]
    text = ("ValueError: step: Rows of the table 'items' in a batch: a run of 2 {} cannot have it yet; use "
            "run.embedding('items', …), and look ids up in the step's function")
    assert seen["ranks"] == [text.format("ranks")] * 2
    assert seen["one"] == ["ValueError: rank 1: " + text.format("ranks"), text.format("ranks")]
    assert seen["workers"] == text.format("virtual workers")
    assert seen["none"] == ["ended"] * 2


def test_ranks_leave_idle_together_whenever_each_came(scenarios):
    assert scenarios["idled"] == [6, 6]


def test_a_watcher_s_stop_in_a_wait_of_one_rank_ends_all(scenarios):
    """In the wait for a batch, and in an agreement within another: nothing is agreed or committed after it."""
    for (first, second), went_on in scenarios["pressed"].values():
        assert second[0] == "MemoryPressure: memory is short" and second[1] < 4
        assert first[0].startswith("ConnectionError: Run: ") and "(rank 1 has left)" in first[0] and first[1] < 8
        assert went_on == [2, 2]


def test_what_a_rank_holds_while_it_opens_its_table_does_not_grow_with_the_rows(scenarios):
    small, large = scenarios["tables"].values()
    for rows, (lives, _) in ((300_000, small), (3_000_000, large)):
        for life in lives:
            assert sum(own for _, own in life) == rows
            assert all(peak < 4 << 20 for peak, _ in life), life
    assert small[1] == large[1]
