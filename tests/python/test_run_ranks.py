# SPDX-License-Identifier: Apache-2.0
"""plimsoll.Run of several ranks, as torchrun starts them on one machine (decision 0026)."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.support.cgroup import MemoryCgroup
from tests.support.lives import told

pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "support" / "rank_programs.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    """In one process, which imports torch once."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in ("averaged", "refused", "names", "asked"):
        (folder / name).mkdir()
    done = subprocess.run([sys.executable, "-m", "tests.support.rank_programs", folder], cwd=ROOT, text=True,
                          env=ENVIRONMENT, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("items, size, ranks", [(150, 7, 2), (23, 4, 3), (12, 4, 3), (5, 1, 5)])
def test_the_order_is_cut_by_position_so_that_a_sample_is_seen_once(items, size, ranks):
    from plimsoll import SampleOrder
    from plimsoll._run_loader import RunLoader

    loaders = [RunLoader(range(items), 7, cut=(rank, ranks), batch_size=size) for rank in range(ranks)]
    for epoch in range(2):
        batches = [list(one.start(epoch, 0)) for one in loaders]
        assert {len(one) for one in batches} == {loaders[0].batches} == {-(-items // (size * ranks))}
        seen = [int(item) for together in zip(*batches) for part in together for item in part]
        assert seen == [SampleOrder(items, 7, epoch).at(place) for place in range(items)]
        rows = [len(part) for part in list(zip(*batches))[-1]]
        assert max(rows) - min(rows) <= 1  # The last batch, too.


def test_ranks_learn_what_one_process_learns_on_their_batches_together(scenarios):
    """Targets that do not count are spread unevenly, so the mean is one of weights."""
    seen = scenarios["averaged"]
    for way, count in (("mean", 3), ("sum", 2)):
        one, *ranks = seen[way]["losses"]
        assert len(one) == 16 and len(ranks) == count
        for losses in ranks:
            assert losses == pytest.approx(one, rel=1e-12)
        assert max(seen[way]["apart"]) < 1e-13
        assert ranks == [ranks[0]] * count  # To the bit, on all ranks.


@pytest.mark.parametrize("kind, kills", [("pictures", 4), pytest.param("pictures", 20, marks=pytest.mark.slow),
                                         pytest.param("texts", 12, marks=pytest.mark.slow)])
def test_killed_at_any_moment_ranks_end_in_the_same_bits(kind, kills, tmp_path):
    """Rank 0, rank 1, both and the launcher, in turn."""
    seen = told(PROGRAMS, tmp_path, kills, 7 * kills, "each", kind)
    assert seen["digest"] == seen["undisturbed"] and len(seen["killed_at"]) == kills


@pytest.mark.slow
@pytest.mark.parametrize("who", ["0", "1"])
def test_killed_in_any_stage_of_a_commit_ranks_end_in_the_same_bits(who, tmp_path):
    seen = told(PROGRAMS, tmp_path, "stages", 0, who)
    assert seen["digest"] == seen["undisturbed"] and seen["killed_at"]


def test_a_step_that_one_rank_is_refused_is_made_again_by_all(scenarios):
    seen = scenarios["refused"]
    (undisturbed, disturbed) = seen["ends"]
    assert [one[0] for one in undisturbed] == [one[0] for one in disturbed]
    steps, passes = undisturbed[0][1:]
    # The first refusal came before anybody's update, the second when rank 0's optimizer had written.
    assert [one[1:] for one in disturbed] == [[steps + 1, passes + 4]] * 2  # Two, and one after each refusal.
    assert [(one["step"], one["next"]) for one in seen["refusals"]] == [(4, "the same step again"),
                                                                        (9, "the same step again")]
    assert seen["refusals"][0]["refusal"] == "rank 1: OutOfMemoryError: refused for the test"


def test_what_is_asked_of_one_rank_is_done_by_all_at_the_same_step(scenarios):
    seen = scenarios["asked"]
    for steps, why, begin, end, _ in seen["stopped"]:
        assert (steps, why) == (5, "SIGTERM")
        assert begin < 1 << 30 and end < 768 << 20  # Half of 2 GiB and of 1.5 GiB, less the launcher's.
    assert [one[0] for one in seen["went on"]] == [10, 10]
    assert [one[-1] for one in seen["went on"]] == [one[-1] for one in seen["undisturbed"]]


def test_what_ranks_cannot_have_is_refused_by_name(scenarios):
    ends = scenarios["names"]
    texts = {"seed": "ValueError: Run: seed of rank 1 is not that of rank 0",
             "accept": "ValueError: accept: a run goes on with as many ranks as it began with",
             "embedding": "ValueError: embedding: a run of 2 ranks cannot have it yet; use torch.nn.Embedding",
             "wrapped": "ValueError: track: model is a DistributedDataParallel, and the run averages the gradients",
             "last batch": "ValueError: loader: 9 items in batches of 4 on each of 2 ranks leave a last batch of 1, fewer",
             "trainer": "ValueError: the loop of another program: a run of 2 ranks cannot have it yet",
             "data": "ValueError: steps: data of a list: a run of 2 ranks cannot have it yet; use run.loader(dataset)",
             "sparse": "ValueError: step: a parameter of [9, 4] is on cpu and its gradient torch.sparse_coo",
             "no step": "ValueError: steps: a body of several ranks makes its step by run.step()"}
    for rank, one in enumerate(ends):
        for name, text in texts.items():
            assert one[name].startswith(text), one[name]
        assert one["limit"].startswith(f"BudgetExceeded: rank {rank} of 2, whose share of memory_limit is "), one["limit"]
    first = ends[0]
    assert all(text.startswith("ValueError: Run: model of rank 1 is not that of rank 0") for text in first["model"])
    assert first["body"][0].startswith("ConnectionError: Run: ") and first["body"][1] == "ValueError: of one rank"
    assert all("ranks was 2 and is 3" in text for text in first["three"])
    assert "ranks was 2 and is unset" in first["one"]


def test_several_machines_are_refused_by_name(tmp_path, monkeypatch):
    import plimsoll

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="4 ranks, 2 of them on this machine: the ranks of a run are on one machine yet"):
        plimsoll.Run(tmp_path / "run", memory_limit="1GiB")
    assert not (tmp_path / "run").exists()


def test_torchrun_and_its_ranks_stay_inside_the_one_limit(tmp_path):
    """Steps that do not fit are cut on both ranks; rank 1 is killed, and torchrun starts both again."""
    MemoryCgroup.needed()
    limit = 1536 << 20
    with MemoryCgroup(limit) as group:
        done = group.run([*TORCHRUN, "--max-restarts", "1", PROGRAMS, tmp_path / "run", str(limit)],
                         env=ENVIRONMENT, timeout=200)
    assert done.returncode == 0 and done.oom_kills == 0, done.stderr
    assert "refused memory" in done.stderr and "goes on at step 3" in done.stderr, done.stderr
    assert done.stdout.splitlines() == ["(6, 2)"] * 2
    assert limit / 2 < done.tree_peak_bytes <= limit
