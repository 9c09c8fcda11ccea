# SPDX-License-Identifier: Apache-2.0
"""bench/scale's model, beside the code that it is of (with ranks that only count) and beside failures drawn by chance."""
import pathlib
import random
import subprocess
import sys
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench.scale import model
from plimsoll.ranks import _rank_sums, _ranks
from plimsoll.rows._rank_rows import DealtTable, LookedUp, Wanted

COUNTS = (2, 4, 8, 64)


class Counting:
    """Stands for Ranks, one of so many: counts words, and bytes and messages that all_to_all would send to others."""

    counts_as_text = staticmethod(_ranks.Ranks.counts_as_text)
    memory = None

    def __init__(self, rank, count):
        self.rank, self.count, self.tables, self.words, self.sent, self.messages = rank, count, [], 0, 0, 0

    def either(self, alone, together):
        return together(self)

    def agreed(self, place, work, says=None, words=lambda _: ""):
        self.words += 1
        made = work()
        # All ranks want as much of each as this one.
        return made, [_ranks.Said(place, 0, (), words(made))] * self.count

    def all_to_all(self, got, given, got_of, given_to):
        assert len(given) == sum(given_to) and len(got) == sum(got_of)
        got.zero_()
        self.messages += self.count - 1
        self.sent += (len(given) - given_to[self.rank]) * given[:1].numel() * given.element_size()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", [1 << 20, (1 << 22) + 12345])
def test_a_tree_sum_sends_the_slices_that_ranks_cut(count, size):
    parameter = torch.nn.Parameter(torch.empty(size))
    parameter.grad = torch.empty(size)
    room = torch.empty(_rank_sums._room_bytes([parameter], count, _rank_sums._BUCKET_BYTES), dtype=torch.uint8)
    staging, theirs = room.view(torch.float32).chunk(2)
    sent, received, messages = [0] * count, [0] * count, [0] * count
    for bucket in _rank_sums._buckets([parameter.grad], len(theirs)):
        slices = [sum(map(len, pieces)) * 4 for pieces in _rank_sums._slices(bucket, count, staging)[0]]
        for rank, own in enumerate(slices):  # Others' slices to them and theirs of it here; then its own to all, and theirs.
            sent[rank] += sum(slices) - own + (count - 1) * own
            received[rank] += (count - 1) * own + sum(slices) - own
            messages[rank] += 2 * (count - 1)
    said = model.tree_sums(model.Run(count, workers=count, dense_bytes=4 * size))
    assert said.sent == said.received == pytest.approx(max(sent), rel=0.01) == pytest.approx(max(received), rel=0.01)
    assert said.messages == max(messages)


@pytest.mark.parametrize("dim", [5, 128])
@pytest.mark.parametrize("count", COUNTS)
def test_rows_and_gradients_are_the_bytes_that_a_table_exchanges(count, dim):
    rows, lookups, run = 20000, 2, model.Run(count, workers=2 * count, rows=20000, row_bytes=4 * dim)
    ranks = Counting(1, count)
    table = DealtTable("items", type("Store", (), {"dim": dim})(), 10 * rows, ranks)
    table.gathered = lambda ids: torch.zeros(len(ids), dim)
    chance, looked_up = np.random.default_rng(1), []
    for _ in range(lookups):
        wanted = Wanted.of(chance.choice(10 * rows, rows, replace=False), count)
        got = table.exchanged(ranks, wanted, [wanted.counts] * count, [0] * count)
        looked_up.append(LookedUp(table, wanted, got))
        looked_up[-1].gradient = got
    said = model.look_ups(run)
    assert ranks.sent == pytest.approx(said.sent, rel=0.02) and ranks.messages == said.messages and run.lookups == lookups
    assert ranks.words == lookups  # And as many of look_up() itself.
    before, ranks.words, ranks.sent, ranks.messages = said, 0, 0, 0
    table.owned(looked_up, lambda _: 1.0)
    said = model.row_gradients(run)
    assert ranks.sent == pytest.approx(said.sent, rel=0.02) and ranks.messages == said.messages and ranks.words == 3
    assert said.sent < before.sent + lookups * rows * 4  # Ids go once more, and nothing else.


def test_words_are_of_the_size_that_ranks_say_and_hold_the_counts_that_they_read():
    assert (model.WORD, model.WORD_TEXT, model.BUCKET) == (_ranks._ROW.size, _ranks._TEXT, _rank_sums._BUCKET_BYTES)
    for count in (8, 64, 128, 256, 512, 1024):
        run = model.Run(count, workers=count, rows=4096)
        held = True
        try:
            text = _ranks.Ranks.counts_as_text([4096 // count] * count)
            assert len(text.split(",")) == count
        except ValueError:
            held = False
        assert held == model.counts_fit(run)
    eight, sixteen = (model.word(model.Run(count, workers=16)) for count in (8, 16))
    assert 4 < sixteen.sent / eight.sent < 5  # The square.
    others = sum(model.word(model.Run(8, workers=8), rank).received for rank in range(1, 8))
    assert others == eight.sent and eight.received == sum(model.word(model.Run(8, workers=8), rank).sent for rank in range(1, 8))


def test_one_rank_sends_nothing_and_one_node_nothing_over_its_link():
    link = model.Link(1e9, 1e-4, 1e-5, 100, 1.05, 0.01, 1e-9, 1e-9)
    sizes = {"dense_bytes": 4e7, "rows": 4096, "state_bytes": 1e8, "table_bytes": 1e9}
    alone = model.Run(1, workers=64, **sizes)
    assert model.step_traffic(alone) == model.Traffic() and model.step_seconds(alone, link) == 0
    assert model.commit_seconds(alone, link, 1e9) == pytest.approx(1.1)  # The disk's.
    node = model.Run(1, ranks_a_node=8, workers=64, **sizes)
    assert model.step_traffic(node).sent > 7e7 and model.wire_bytes(node, link, model.step_traffic(node)) == (0, 0)
    # Half of the others are on its node: half of the bytes stay, and the link is shared by as many.
    two, far = (model.Run(nodes, ranks_a_node=8 // nodes, workers=64, **sizes) for nodes in (2, 8))
    assert model.wire_bytes(two, link, model.tree_sums(two))[0] / model.wire_bytes(far, link, model.tree_sums(far))[0] == pytest.approx(4 / 7)
    bare = model.Link(1e9)
    assert model.sum_seconds(two, bare) / model.sum_seconds(far, bare) == pytest.approx(4 * 4 / 7)
    assert model.step_seconds(two, link) > model.step_seconds(two, bare) > 0.1
    with pytest.raises(ValueError, match="8 virtual workers cannot be dealt to 3 ranks"):
        model.Run(3, workers=8)


@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", "os.kill(os.getpid(), 9)"])
def test_namespaces_end_with_what_made_them_however_that_ends(end):
    program = f"import os\nfrom bench.scale.run import network\nwith network(2, 100) as places:\n    print(*places, flush=True)\n    {end}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, timeout=60, check=False)
    if "OSError" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    said = done.stdout.split()
    until = time.monotonic() + 5
    while any(pathlib.Path("/proc", place).exists() for place in said) and time.monotonic() < until:
        time.sleep(0.01)
    assert len(said) == 2 and done.returncode != 0 and not any(pathlib.Path("/proc", place).exists() for place in said)


def share_lost(interval, commit, between, restart, commits, seed):
    """Of a run of so many commits, played with failures by chance."""
    chance = random.Random(seed)
    now, failure, done = 0.0, chance.expovariate(1 / between), 0
    while done < commits:
        if now + interval + commit <= failure:
            now, done = now + interval + commit, done + 1
            continue
        now = failure
        failure += chance.expovariate(1 / between)
        while now + restart > failure:  # Another one while it starts again.
            now = failure
            failure += chance.expovariate(1 / between)
        now += restart
    return 1 - commits * interval / now


@pytest.mark.parametrize("commit, between, restart", [(2.0, 22000.0, 120.0), (30.0, 3600.0, 300.0), (60.0, 600.0, 30.0)])
def test_failures_take_what_played_ones_take_and_no_other_interval_does_better(commit, between, restart):
    best = model.interval_seconds(commit, between)
    played = share_lost(best, commit, between, restart, commits=60000, seed=3)
    assert model.lost(best, commit, between, restart) == pytest.approx(played, rel=0.05)
    for factor in (0.5, 0.7, 1.4, 2.0):
        assert share_lost(factor * best, commit, between, restart, commits=60000, seed=3) > played * 0.995
    assert model.lost(3 * best, commit, between, restart) > model.lost(best, commit, between, restart)
    assert model.lost(1e9, commit, between, restart) == 1.0 and model.interval_seconds(commit, commit / 3) == commit / 3
