# SPDX-License-Identifier: Apache-2.0
"""Trainers of other libraries as the loops of a run of several ranks: the scenarios of tests/support/trainer_ranks.py."""
import json
import subprocess
import sys

import pytest

from tests.support.lives import told

pytest.importorskip("torch")

from tests.support.trainers import ROOT, environment, events

# transformers.Trainer imports pandas and more when it is asked for: each rank would.
SCENARIOS = "import runpy, {}; runpy.run_module('tests.support.trainer_ranks', run_name='__main__', alter_sys=True)"
FIRST = {"hugging_face": "transformers.trainer", "lightning": "lightning"}
KINDS = ["hugging_face", "lightning"]


@pytest.fixture(scope="module", params=KINDS)
def ranks(request, tmp_path_factory):
    """(what each scenario gave, their folder), of one process that imports the library once."""
    pytest.importorskip({"hugging_face": "transformers"}.get(request.param, request.param))
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run([sys.executable, "-c", SCENARIOS.format(FIRST[request.param]), folder, request.param], cwd=ROOT,
                          env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), folder


def test_ranks_of_a_trainer_learn_what_one_process_learns(ranks):
    """On as many rows a step, without dropout."""
    seen, _ = ranks
    for name, count in (("two", 2), ("four", 4)):
        assert len(seen[name]) == count and all(one == seen[name][0] for one in seen[name])  # To the bit.
        assert seen[name][0][3] == pytest.approx(seen["one"][3], rel=1e-5) and len(seen["one"][3]) >= 6


def test_ranks_of_a_trainer_stop_at_one_step_and_go_on_to_the_same_bits(ranks):
    seen, _ = ranks
    assert [one[:2] for one in seen["stopped"]] == [["SIGTERM", [1, 2, 3, 4]]] * 2
    assert [one[1] for one in seen["went on"]] == [[5, 6]] * 2
    assert [one[2] for one in seen["went on"]] == [one[2] for one in seen["undisturbed"]]
    assert seen["undisturbed"][0][2] == seen["undisturbed"][1][2]


def test_what_one_rank_of_a_trainer_is_refused_all_do_again(ranks):
    seen, folder = ranks
    refusals = [one["refusal"] for one in events(folder / "refused", "refusal")]
    assert len(refusals) > 3 and all(one.startswith("rank 1: ") for one in refusals)
    assert seen["refused"] == seen["whole"]


def test_a_step_that_one_rank_of_a_trainer_cannot_make_names_a_limit_for_all(ranks):
    texts, limits = zip(*ranks[0]["grows"])
    assert all(text.startswith("BudgetExceeded: step 4 does not fit and was not made: ") for text in texts)
    assert limits[0] == limits[1] > 2 * (1200 << 20)


def test_ranks_of_a_trainer_end_together_where_one_waits_for_data(ranks):
    seen, _ = ranks
    assert [text for text, _ in seen["data"]] == ["RuntimeError: rank 1: KeyError: 'line 30'", "KeyError: 'line 30'"]
    assert [text for text, _ in seen["waits"]] == ["MemoryPressure: rank 1: MemoryPressure: memory is short",
                                                   "MemoryPressure: memory is short"]
    assert [one[1] for one in seen["goes on"]] == [[3, 4, 5, 6]] * 2  # Both steps before it were committed.
    assert [one[2] for one in seen["goes on"]] == [one[2] for one in seen["undisturbed"]]


def test_virtual_workers_are_refused_of_a_trainer(ranks):
    assert all("2 virtual workers cannot have it yet" in text for text in ranks[0]["told"])


@pytest.mark.parametrize("kind, kills, seed", [("hugging_face", 2, 28), *(pytest.param(kind, 24, 72, marks=pytest.mark.slow) for kind in KINDS)])
def test_killed_at_any_moment_ranks_of_a_trainer_end_in_the_same_bits(kind, kills, seed, tmp_path):
    """Rank 0, rank 1, both and the launcher, in turn; then one of them is stopped, which the other ends. Seed 28: the first moments are early."""
    pytest.importorskip({"hugging_face": "transformers"}.get(kind, kind))
    seen = told(ROOT / "tests" / "support" / "rank_programs.py", tmp_path, kills, seed, "each", kind)
    assert seen["digest"] == seen["undisturbed"] and len(seen["killed_at"]) == kills
