# SPDX-License-Identifier: Apache-2.0
"""plimsoll.Run of several ranks, as torchrun starts them on one machine (decision 0026)."""
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

import pytest

from tests.support.cgroup import MemoryCgroup
from tests.support.lives import told

torch = pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "support" / "rank_programs.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"}
MIDDLE = 469  # A seed whose first moments are neither before a life's first commit nor behind its end.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    """In one process, which imports torch once."""
    return seen_in(tmp_path_factory.mktemp("ranks"), "averaged", "refused", "names", "asked", "dealt", "by_sockets", "looked_up", "stopped", "apart")


def seen_in(folder, *names):
    for name in names:
        (folder / name / "names").mkdir(parents=True)
    done = subprocess.run([sys.executable, "-m", "tests.support.rank_programs", folder, *names], cwd=ROOT, text=True,
                          env=ENVIRONMENT, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("items, size, ranks", [(150, 7, 2), (23, 4, 3), (12, 4, 3), (5, 1, 5)])
def test_the_order_is_cut_by_position_so_that_a_sample_is_seen_once(items, size, ranks):
    from plimsoll import SampleOrder
    from plimsoll.run._run_loader import RunLoader
    from plimsoll.ranks._virtual_workers import VirtualWorkers

    loaders = [RunLoader(range(items), 7, cut=VirtualWorkers(ranks, rank), batch_size=size) for rank in range(ranks)]
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
    for way, count in (("mean", 3), ("sum", 2), ("mean of two", 2), ("sum of two", 2)):
        one, *ranks = seen[way]["losses"]
        assert len(one) == 16 and len(ranks) == count
        for losses in ranks:
            assert losses == pytest.approx(one, rel=1e-12)
        assert max(seen[way]["apart"]) < 1e-13
        assert ranks == [ranks[0]] * count  # To the bit, on all ranks.


@pytest.mark.parametrize("kind, kills", [("pictures", 4), pytest.param("pictures", 20, marks=pytest.mark.slow),
                                         pytest.param("texts", 12, marks=pytest.mark.slow)])
def test_killed_at_any_moment_ranks_end_in_the_same_bits(kind, kills, tmp_path):
    """Rank 0, rank 1, both and the launcher, in turn; then one of them is stopped, which the other ends."""
    seen = told(PROGRAMS, tmp_path, kills, 7 * kills, "each", kind)
    assert seen["digest"] == seen["undisturbed"] and len(seen["killed_at"]) == kills


@pytest.mark.slow
def test_any_number_of_ranks_ends_a_whole_run_in_the_same_bits(tmp_path):
    """With rows, and without."""
    for alone, *ranks in seen_in(tmp_path, "numbers")["numbers"]:
        assert ranks == [[alone] * count for count in (1, 2, 4, 8)]


def test_any_number_of_ranks_goes_on_with_a_run_of_virtual_workers(scenarios):
    """Four, then two, then eight, then one, stopped between."""
    seen = scenarios["dealt"]
    assert seen["went on"] == [seen["alone"]] == [seen["workers"]]
    assert seen["same"] == [0] * 4


def test_windows_of_accumulate_have_the_same_bits_for_any_number_of_ranks(scenarios):
    """4 ranks, then 8, then 2, within windows of three batches: after steps 5 and 10."""
    seen = scenarios["dealt"]
    assert seen["windows went on"] == [seen["windows"]] * 2


def test_batches_of_a_list_are_dealt_to_virtual_workers(scenarios):
    seen = scenarios["dealt"]
    alone, eight = seen["listed"]
    assert {alone[0], *(one[0] for one in eight + seen["listed went on"])} == {alone[0]}
    assert alone[1] == sum(one[1] for one in eight) == 42
    assert min(one[1] for one in eight) == 4  # Without a batch at the end of both epochs.


def test_rows_of_any_number_of_ranks_have_the_same_bits(scenarios):
    """Two tables, ids that come again, a table that some workers leave out; 4 ranks, then 2, 8 and 1."""
    seen = scenarios["looked_up"]
    assert seen["went on"] == [seen["alone"]]
    assert len({*seen["few"]}) == 1  # Two rows, four ranks.


def test_ranks_learn_the_rows_that_one_process_learns(scenarios):
    alone, ranks, workers = (torch.tensor(one) for one in scenarios["looked_up"]["learnt"])
    assert torch.allclose(alone, ranks, atol=1e-5) and torch.allclose(alone, workers, atol=1e-5)
    assert (alone.abs() > 0.1).any()  # They began near 0.


def test_ranks_that_cannot_share_memory_exchange_by_sockets_with_the_same_bits(scenarios):
    for alone, ranks in scenarios["by_sockets"]:
        assert [one[0] for one in ranks] == [alone] * 4
        assert ranks[0][1] == ["Run: ranks exchange by sockets, and not by memory: PermissionError: refused for the test"]
        assert [one[1] for one in ranks[1:]] == [[]] * 3


def test_info_says_what_tables_a_run_has(scenarios):
    run, folder, alone = scenarios["looked_up"]["info"]
    assert run["kind"] == "run" and run["tables"] == [folder]
    assert folder["kind"] == "tables" and folder["path"].endswith("moved/embeddings-4-0") and folder["ranks"] == 4
    items, users = folder["tables"]
    assert (items["name"], items["rows"], items["dim"], items["dtype"], items["optimizer"]) == ("items", 60, 5, "float32", "adamw")
    assert (users["name"], users["rows"], users["dim"], users["dtype"], users["optimizer"]) == ("users", 40, 3, "bfloat16", "adagrad")
    assert items["parts"] == 4 and items["commit_steps"][0] == users["commit_steps"][0] == 3
    assert [(one["name"], one["rows"], one["parts"]) for one in alone["tables"][0]["tables"]] == [("items", 60, 1), ("users", 40, 1)]


def test_a_move_of_rows_that_is_killed_goes_on_or_never_was(scenarios):
    """From 4 ranks to 2, rank 1 killed in its second table; then 2 ranks go on, or the 4 of before."""
    seen = scenarios["looked_up"]
    two, four = seen["interrupted"]
    for left, digests, _ in (two, four):
        assert "embeddings-2-3/rank-1/items" in left and "embeddings-2-3/rank-1/users" not in left
        assert {*digests} == {seen["alone"]}
    assert (two[2], four[2]) == (["embeddings-2-3"], ["embeddings-4-0"])


def test_what_one_rank_s_lookup_fails_in_all_fail_in(scenarios):
    seen = scenarios["looked_up"]
    assert seen["refused"] == [seen["alone"]] * 2  # Both made the step again.
    assert seen["fails"][0] == ["ValueError: rank 1: ValueError: of one rank", "ValueError: of one rank"]
    assert "items: there is no row 9; ids are from 0 to 8" in seen["fails"][1][0]
    assert seen["fails"][1][1] == "NotFoundError: items: there is no row 9; ids are from 0 to 8"


@pytest.mark.parametrize("kills, seed, ranks", [(3, MIDDLE, "2,4,1"), pytest.param(100, 1100, "4,2,8", marks=pytest.mark.slow)])
def test_killed_at_any_moment_other_numbers_of_ranks_end_in_the_same_rows(kills, seed, ranks, tmp_path):
    """So many ranks, in turn."""
    seen = told(PROGRAMS, tmp_path, kills, seed, "each", "rows", ranks)
    assert seen["digest"] == seen["undisturbed"] and len(seen["killed_at"]) == kills


def test_counts_that_a_word_of_ranks_does_not_hold_are_refused():
    from plimsoll.ranks._ranks import Ranks

    assert Ranks.counts_as_text([1000] * 192) == ",".join(["1000"] * 192)
    with pytest.raises(ValueError, match="193000 rows of 193 ranks in one lookup: their counts are 964 bytes.*960; start fewer ranks"):
        Ranks.counts_as_text([1000] * 193)


def test_a_process_alone_has_what_ranks_have():
    from plimsoll.ranks._group import Solo
    from plimsoll.ranks._ranks import Ranks

    names = [name for name in vars(Solo) if not name.startswith("_")]
    own = {"rank", "count", "undisturbed", "alike"}  # Of an object.
    assert len(names) > 20 and own < set(names) and {name for name in names if not hasattr(Ranks, name)} == own


def test_parts_of_a_rank_s_own_are_for_as_many_ranks(scenarios):
    four, one, two = scenarios["dealt"]["own"]
    assert all("mine of its 2 ranks were not the same, so 4 cannot go on" in text for text in four)
    assert "so 1 cannot go on with them: start 2 again" in one[0]
    assert two == [0, 1]
    assert scenarios["dealt"]["more"] == ["Run: the number of parts of rank 1 is not that of rank 0: track the same on all "
                                          "ranks"] * 2


def test_what_virtual_workers_cannot_have_is_refused_by_name(scenarios):
    seen = scenarios["dealt"]["refused"]
    assert seen["3 workers"] == "Run: virtual_workers 3 must be a power of two, such as 8"
    assert seen["embedding"].startswith("step: accumulate, or a GradScaler, beside run.embedding: a run of 4 virtual workers")
    assert seen["outside"].startswith("items: looked up outside run.step()")
    assert "virtual_workers was 8 and is 16" in seen["other"]
    assert all(text == "Run: virtual_workers 4 cannot be dealt to 3 ranks: start 1, 2, 4 of them"
               for text in seen["3 ranks"])


def test_a_tree_adds_up_alike_wherever_its_subtrees_are_made():
    from plimsoll.ranks._virtual_workers import Node, Tree

    def tree(nodes, sums):
        made = Tree(sums)
        for one in nodes:
            made.add(one)
        return made.whole()

    random = torch.Generator().manual_seed(5)
    for count in (1, 2, 3, 6, 8, 16):
        grads = [torch.randn(37, generator=random) * 10 ** (k % 5) for k in range(count)]
        weights = [float(k % 3) for k in range(count)]  # Some count nothing, and have no gradient.

        def leaves(begin, end):
            return [Node(float(k) / 3, weights[k], {0: grads[k].clone()} if weights[k] else {}) for k in range(begin, end)]

        for sums in (True, False):
            whole = tree(leaves(0, count), sums)
            for ranks in (1, 2, 4, 8):
                own = count // ranks
                if own * ranks != count or own & (own - 1):
                    continue
                parts = [tree(leaves(k * own, (k + 1) * own), sums) for k in range(ranks)]
                for one in parts:
                    one.gradients.setdefault(0, torch.zeros(37))  # As ranks that exchange have.
                again = tree(parts, sums)
                assert (again.loss, again.weight) == (whole.loss, whole.weight)
                assert torch.equal(again.gradients[0], whole.gradients.get(0, torch.zeros(37)))
            wanted = sum(g.double() * (1 if sums else w) for g, w in zip(grads, weights) if w)
            if sum(weights):
                wanted = wanted / (1 if sums else sum(weights))
                assert torch.allclose(whole.gradients[0].double(), wanted, rtol=1e-5, atol=1e-2)


def test_small_pieces_of_a_slice_are_sent_together_and_large_ones_from_where_they_are():
    from plimsoll.ranks import _rank_sums

    least = _rank_sums._PIECE_LEAST
    some = [torch.full((size,), float(k)) for k, size in enumerate((3 * least, least, 10, 7, 2 * least, 2 * least - 17))]
    slices, staged = _rank_sums._slices(some, 4, torch.zeros(9 * least))
    assert [[len(one) for one in pieces] for pieces in slices] == [[2 * least], [least, least], [2 * least], [2 * least]]
    assert [[len(one) for one in pieces] for _, pieces in staged] == [[10, 7, 2 * least - 17], [17, 2 * least - 17]]
    assert slices[0][0].data_ptr() == some[0].data_ptr()
    assert _rank_sums._slices([torch.zeros(2)], 4, torch.zeros(4))[0][2:] == [[], []]


@pytest.mark.parametrize("kills, seed, ranks", [(3, MIDDLE, "2,4,1"), pytest.param(100, 500, "4,1,2,8", marks=pytest.mark.slow)])
def test_killed_at_any_moment_other_numbers_of_ranks_end_in_the_same_bits(kills, seed, ranks, tmp_path):
    """So many ranks, in turn; rank 0, rank 1, all and the launcher are killed, rank 0 and rank 1 stopped."""
    seen = told(PROGRAMS, tmp_path, kills, seed, "each", "virtual", ranks)
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


def test_gradients_of_a_rank_s_own_within_a_window_are_committed(scenarios):
    """Two ranks, two batches an update, stopped between them."""
    went_on, undisturbed = scenarios["asked"]["windows"]
    assert went_on == undisturbed


def test_a_stopped_rank_is_ended_within_its_bound_and_named(scenarios):
    seen = scenarios["stopped"]
    seconds, text = seen["ended"]
    assert 1.0 < seconds < 8.0  # 2 s are allowed; gloo would wait for half an hour.
    assert text.startswith("Run: rank 1 (process ") and "ended; rank 1 had been stopped (SIGSTOP) for as long as" in text
    assert seen["continued"] == seen["went on"] == seen["undisturbed"]


def test_what_ranks_cannot_have_is_refused_by_name(scenarios):
    ends = scenarios["names"]
    texts = {"seed": "ValueError: Run: seed of rank 1 is not that of rank 0",
             "accept": "ValueError: accept: a run goes on with as many virtual_workers as it began with",
             "wrapped": "ValueError: track: model is a DistributedDataParallel, and the run averages the gradients",
             "last batch": "ValueError: loader: 9 items in batches of 4 for each of 2 ranks leave a last batch of 1, fewer",
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
    assert all("virtual_workers was 2 and is 3" in text for text in first["three"])
    assert "virtual_workers was 2 and is unset" in first["one"]


def test_ranks_of_several_machines_have_the_bits_of_one_process(scenarios):
    """Two launchers of two ranks, which see one another over the network alone."""
    seen = scenarios["apart"]
    digest = seen["alone"][0]
    for machine in seen["apart"]:
        for made, began, share, shared in machine:
            assert (made, began, shared) == (digest, 0, False)
            assert (3 << 30) // 4 < share <= (3 << 30) // 2  # Of a machine's limit, which two have.


def test_ranks_of_a_new_start_find_one_another_in_a_store_that_has_older_ones():
    """Rank 1 of an older start had asked; and rank 0 of one tells this rank 2 its name before it ends."""
    from plimsoll.ranks._ranks import _name_of_start

    store = torch.distributed.HashStore()
    store.set("plimsoll/asked/1", "a rank that has ended")

    def names(before=lambda: None):
        with concurrent.futures.ThreadPoolExecutor(3) as ranks:
            others = [ranks.submit(_name_of_start, store, rank, 3) for rank in (1, 2)]
            before()
            return {one.result() for one in [ranks.submit(_name_of_start, store, 0, 3), *others]}

    def ends_early():
        while not store.check(["plimsoll/asked/2"]) or (asked := store.get("plimsoll/asked/2")) == first:
            time.sleep(0.001)
        store.set(f"plimsoll/told/{asked.decode()}", "older")
        while not store.check(["plimsoll/answered/older/2"]):
            time.sleep(0.001)

    one = names()
    first = store.get("plimsoll/asked/2")
    other = names(ends_early)
    assert len(one) == len(other) == 1 and one != other and other != {"older"}


def test_a_machine_that_loses_a_rank_ends_the_others_which_go_on_anywhere(scenarios):
    seen = scenarios["apart"]
    assert seen["killed"] == [None, None]
    digest = seen["alone"][0]
    assert [one[0] for one in seen["went on"]] == [digest] * 2 and seen["went on"][0][1] == 4  # On one machine.
    assert [one[:2] for machine in seen["restarted"] for one in machine] == [[digest, 4]] * 4


def test_torchrun_and_its_ranks_stay_inside_the_one_limit(tmp_path):
    """Steps that do not fit are cut on both ranks; rank 1 is killed, and torchrun starts both again."""
    MemoryCgroup.needed()
    limit = 1536 << 20
    with MemoryCgroup(limit) as group:
        done = group.run([*TORCHRUN, "--max-restarts", "1", PROGRAMS, "large", tmp_path / "run", str(limit)],
                         env=ENVIRONMENT, timeout=200)
    assert done.returncode == 0 and done.oom_kills == 0, done.stderr
    assert "refused memory" in done.stderr and "goes on at step 3" in done.stderr, done.stderr
    steps, other = done.stdout.splitlines()
    assert steps == other and steps in ("(6, 2)", "(6, 4)")  # What else the ranks hold decides whether halves do.
    assert limit / 2 < done.tree_peak_bytes <= limit


@pytest.mark.parametrize("limits", [(1000, 1250), pytest.param(100, marks=pytest.mark.slow)], ids=str)
def test_ranks_with_tables_stay_inside_any_limit(limits, tmp_path):
    """What does not fit is refused by name; the kernel ends nobody. A number: so many limits of 900 to 1,500 MiB by chance."""
    MemoryCgroup.needed()
    draw = random.Random(25)
    if isinstance(limits, int):
        limits = [draw.randrange(900, 1500) for _ in range(limits)]
    ends = {}
    for mib in limits:
        run, limit = tmp_path / f"{len(ends)}", mib << 20
        with MemoryCgroup(limit) as group:
            done = group.run([*TORCHRUN, PROGRAMS, "crowded", run, str(limit)], env=ENVIRONMENT, timeout=200)
        assert done.oom_kills == 0 and done.tree_peak_bytes <= limit, f"{mib} MiB, {done.tree_peak_bytes >> 20} held\n{done.stderr}"
        refused = any(name in done.stderr for name in ("BudgetExceeded: ", "MemoryPressure: "))
        assert done.stdout.splitlines() == ["8", "8"] if done.returncode == 0 else refused, f"{mib} MiB\n{done.stderr}"
        ends[mib] = done.returncode
        shutil.rmtree(run, ignore_errors=True)
    assert ends[max(ends)] == 0 and ends[min(ends)] != 0, ends
