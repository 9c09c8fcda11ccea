# SPDX-License-Identifier: Apache-2.0
"""Governor, ledger, leases, limits and sizes; and the exceptions they raise."""
import gc
import pickle
import time

import numpy as np
import pytest

import plimsoll

MIB = 1 << 20


def test_sizes_parse_and_print():
    assert plimsoll.parse_bytes("512MiB") == 512 * MIB
    assert plimsoll.parse_bytes("6GB") == 6_000_000_000
    assert plimsoll.parse_bytes("25%", 400) == 100
    assert plimsoll.format_bytes(768 * MIB) == "768.0 MiB"


@pytest.mark.parametrize("text", ["", "many", "-1MiB", "12 parsecs", "25%"])
def test_a_bad_size_is_a_value_error(text):
    with pytest.raises(ValueError):
        plimsoll.parse_bytes(text)


def test_limits_name_every_candidate_and_the_winner():
    report = plimsoll.limits("512MiB")
    assert report.limit_bytes == 512 * MIB
    assert not report.defaulted
    assert report.candidates[report.winner].bytes == 512 * MIB
    assert "512.0 MiB" in str(report)
    assert plimsoll.limits().limit_bytes > 0


def test_a_governor_states_its_limit_and_its_ledger():
    with plimsoll.Governor("4GiB", foreign_bytes="32MiB") as governor:
        assert governor.limit_bytes == 4096 * MIB
        assert "4.0 GiB" in governor.limit.explain()
        ledger = governor.ledger()
        assert ledger.limit_bytes == 4096 * MIB
        assert ledger.baseline_bytes > 0
        assert ledger.pools["foreign"].floor_bytes == 32 * MIB
        assert ledger.free_bytes == (
            ledger.limit_bytes - ledger.baseline_bytes - ledger.orphan_bytes - ledger.committed_bytes)
        assert "foreign" in str(ledger)
        assert not governor.step_boundary().stop


def test_a_line_says_how_much_is_used_and_what_is_left(capsys):
    with plimsoll.Governor("4GiB") as governor:
        before = governor.log_memory_state()
        assert before.startswith("Memory usage: ") and before.endswith("leased nothing)")
        with governor.reserve("40MiB"):
            held = np.ones(40 * MIB, np.uint8)
            line = governor.log_memory_state("after epoch 3")
        assert capsys.readouterr().out == f"{before}\n{line}\n"
        assert line.startswith("Memory usage after epoch 3: ")
        assert "leased other 40.0 MiB" in line and "of 4.0 GiB" in line

        def percent(text):
            return float(text.split("% of")[0].split()[-1])

        assert percent(line) - percent(before) == pytest.approx(100 * held.nbytes / (4096 * MIB),
                                                                abs=0.5)


def test_sizes_may_be_numbers():
    with plimsoll.Governor(1 << 33, foreign_bytes=MIB) as governor:
        assert governor.limit_bytes == 1 << 33
        assert governor.ledger().pools["foreign"].floor_bytes == MIB


@pytest.mark.parametrize("arguments", [
    {"memory_limit": "lots"}, {"memory_limit": -5}, {"memory_limit": 1.5},
    {"memory_limit": "1GiB", "foreign_bytes": "x"}, {"memory_limit": "1GiB", "disk_limit": "x"}])
def test_a_bad_limit_is_a_value_error(arguments):
    with pytest.raises(ValueError):
        plimsoll.Governor(**arguments)


def test_foreign_bytes_may_be_a_share_of_the_machine():
    machine = int(open("/proc/meminfo").readline().split()[1]) << 10
    with plimsoll.Governor("4GiB", foreign_bytes="0.1%") as governor:
        assert governor.ledger().pools["foreign"].floor_bytes == pytest.approx(machine / 1000, rel=0.001)


def test_a_number_of_more_than_63_bits_is_a_value_error(governor):
    for call in (lambda: plimsoll.Governor("4GiB", foreign_bytes=1 << 63), lambda: governor.reserve(1 << 63)):
        with pytest.raises(ValueError, match="9223372036854775808 is too large"):
            call()


def test_a_limit_below_what_is_resident_is_refused_with_numbers():
    with pytest.raises(plimsoll.BudgetExceeded) as caught:
        plimsoll.Governor("1MiB", foreign_bytes=0)
    assert caught.value.limit_bytes == MIB
    assert caught.value.advice


def test_a_lease_holds_and_returns_bytes(governor):
    before = governor.ledger().leased_bytes
    with governor.reserve("3MiB") as lease:
        assert (lease.bytes, lease.tag) == (3 * MIB, "other")
        lease.grow("5MiB")
        assert governor.ledger().leased_bytes == before + 5 * MIB
        lease.shrink(MIB)
        assert lease.bytes == MIB
    assert lease.bytes == 0
    assert governor.ledger().leased_bytes == before


def test_a_refusal_carries_its_numbers_and_is_a_memory_error(governor):
    with governor.reserve("10MiB", tag="features"), pytest.raises(MemoryError) as caught:
        governor.reserve("100GiB", tag="other")
    refusal = caught.value
    assert isinstance(refusal, plimsoll.BudgetExceeded)
    assert refusal.tag == "other"
    assert refusal.requested_bytes == 100 << 30
    assert 0 < refusal.available_bytes < governor.limit_bytes == refusal.limit_bytes
    assert refusal.held_bytes["features"] == 10 * MIB
    assert refusal.advice and refusal.advice in str(refusal)
    again = pickle.loads(pickle.dumps(refusal))
    assert vars(again) == vars(refusal)


def test_a_promise_is_kept_for_its_tag(governor):
    free = governor.ledger().free_bytes
    governor.promise(free - 8 * MIB, "rows")
    assert governor.ledger().pools["rows"].floor_bytes == free - 8 * MIB
    with pytest.raises(plimsoll.BudgetExceeded):
        governor.reserve(16 * MIB, "other")
    with pytest.raises(plimsoll.BudgetExceeded) as refused:
        governor.promise(16 * MIB)
    assert refused.value.requested_bytes == 16 * MIB
    with governor.reserve(free - 8 * MIB, "rows"), pytest.raises(ValueError, match="tag"):
        governor.promise(1, "what")


def test_pinned_memory_is_a_pool_of_its_own(governor):
    with governor.reserve("10MiB", tag="pinned") as lease:
        assert lease.tag == "pinned"
        pools = governor.ledger().pools
        assert pools["pinned"].leased_bytes == 10 * MIB and pools["loader"].leased_bytes == 0
        assert "pinned" in str(governor.ledger())
        with pytest.raises(plimsoll.BudgetExceeded, match="pinned wanted.*lower batch_size") as caught:
            governor.reserve("100GiB", tag="pinned")
        assert caught.value.held_bytes["pinned"] == 10 * MIB
    assert governor.ledger().pools["pinned"].leased_bytes == 0


def test_reserve_checks_its_arguments(governor):
    with pytest.raises(ValueError, match="tag"):
        governor.reserve(1, tag="rocks")
    with pytest.raises(ValueError, match="size"):
        governor.reserve(-1)


def test_a_cell_that_runs_twice_replaces_its_governor():
    first = plimsoll.Governor("4GiB")
    second = plimsoll.Governor("4GiB")
    with pytest.raises(ValueError):
        first.reserve(1)
    with second.reserve(MIB):
        pass
    first.close()  # Must not touch its successor.
    with second.reserve(MIB):
        pass
    second.close()


def test_a_governor_that_holds_something_is_not_replaced():
    with plimsoll.Governor("4GiB") as first, first.reserve("1MiB"):
        with pytest.raises(ValueError, match="other"):
            plimsoll.Governor("4GiB")
        assert first.ledger().leased_bytes >= MIB


def test_leases_in_dead_reference_cycles_do_not_block_the_next_governor():
    gc.disable()
    try:
        holder = {"governor": plimsoll.Governor("4GiB")}
        holder["lease"] = holder["governor"].reserve("1MiB")
        holder["self"] = holder
        del holder
        plimsoll.Governor("4GiB").close()
    finally:
        gc.enable()


def test_leaving_the_block_closes_what_was_opened_in_it(tmp_path):
    with plimsoll.Governor("4GiB") as governor:
        table = plimsoll.EmbeddingStore.open(governor, tmp_path / "t", rows=10, dim=4)
        writer = plimsoll.FeatureWriter(governor, tmp_path / "f", {"x": ("float32", ())})
    with pytest.raises(ValueError, match="closed"):
        table.gather([1])
    with pytest.raises(ValueError, match="closed"):
        writer.append([1], x=np.zeros(1, np.float32))
    assert not (tmp_path / "f").exists()
    table.close()  # Twice is fine.
    governor.close()


def test_arrays_outlive_the_governor(tmp_path):
    with plimsoll.Governor("4GiB") as governor:
        table = plimsoll.EmbeddingStore.open(governor, tmp_path / "t", rows=10, dim=4,
                                             init=plimsoll.Zeros())
        rows = table.gather(np.arange(10))
    array = rows.array
    del rows
    gc.collect()
    assert array.shape == (10, 4) and not array.any()


def test_results_are_leased_while_they_live(tmp_path):
    with plimsoll.Governor("4GiB") as governor:
        table = plimsoll.EmbeddingStore.open(governor, tmp_path / "t", rows=1000, dim=256)
        before = governor.ledger().leased_bytes
        rows = table.gather(np.arange(1000))
        assert governor.ledger().leased_bytes >= before + 1000 * 256 * 4
        del rows
        if not governor.arena_attached:  # The arena keeps freed blocks for the next step.
            assert governor.ledger().leased_bytes == before


def test_a_limit_moves_while_a_store_is_open(governor, tmp_path):
    ids = np.arange(20_000)
    rows = np.arange(20_000 * 64, dtype=np.float32).reshape(-1, 64)
    store = plimsoll.EmbeddingStore.open(governor, tmp_path / "rows", rows=100_000, dim=64,
                                         store_bytes="64MiB", batch_rows=20_000)
    store.update(ids, rows)
    store.commit(1)
    np.testing.assert_array_equal(store.gather(ids).array, rows)
    held = governor.ledger()
    before = held.limit_bytes
    low = held.limit_bytes - held.free_bytes - 32 * MIB
    change = governor.set_limit(low)
    assert change.settled and change.limit_bytes == change.asked_bytes == low
    assert change.before_bytes == before
    assert change.shrunk_bytes >= 32 * MIB
    assert [one.owner for one in change.evictions if one.move == "shrink"] == ["rows"]
    assert sum(one.freed_bytes for one in change.evictions) > 24 * MIB
    assert governor.limit_bytes == low and governor.ledger().free_bytes >= 0
    assert governor.ledger().pools["rows"].yielded_bytes >= 30 * MIB
    assert "set_limit" in str(governor.limit)
    assert not governor.step_boundary().stop
    np.testing.assert_array_equal(store.gather(ids).array, rows)
    change = governor.set_limit(before)
    assert change.grown_bytes >= 32 * MIB
    assert governor.ledger().pools["rows"].yielded_bytes == 0
    assert governor.ledger().pools["rows"].leased_bytes == held.pools["rows"].leased_bytes
    np.testing.assert_array_equal(store.gather(ids).array, rows)


def test_a_limit_that_does_not_fit_says_stop_and_what_would_do(governor):
    with governor.reserve("64MiB"):
        needed = governor.ledger()
        change = governor.set_limit(needed.baseline_bytes)
        assert not change.settled
        assert governor.ledger().asked_bytes == needed.baseline_bytes
        deadline = time.monotonic() + 60
        while not (report := governor.step_boundary()).stop:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert report.needed_bytes == (
            needed.limit_bytes - needed.free_bytes)
        assert governor.set_limit(report.needed_bytes).settled
        assert not governor.step_boundary().stop


@pytest.mark.parametrize("size", ["", " ", "much", "0", -1, 1.5])
def test_a_bad_new_limit_is_refused_and_changes_nothing(governor, size):
    before = governor.limit_bytes
    with pytest.raises((ValueError, TypeError)):
        governor.set_limit(size)
    assert governor.limit_bytes == before
