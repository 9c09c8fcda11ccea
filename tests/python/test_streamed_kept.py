# SPDX-License-Identifier: Apache-2.0
"""Blocks of streamed weights that stay in host memory, until it is needed."""
import collections
import contextlib
import gc

import pytest

torch = pytest.importorskip("torch")

from test_streamed import MIB, Net, same

import plimsoll
from plimsoll.training import _weight_files


@pytest.fixture
def reads(monkeypatch):
    """How often each block was read: by the number in a weight's name."""
    found = collections.Counter()

    def counted(read):
        def counting(reader, place, *more):
            found[int(place.name.split(".")[1])] += place.name.endswith("base.weight")
            return read(reader, place, *more)

        return counting

    for name in ("read", "read_in_place"):
        monkeypatch.setattr(_weight_files.WeightReader, name, counted(getattr(_weight_files.WeightReader, name)))
    return found


def test_blocks_that_are_kept_are_read_once_until_their_memory_is_needed(governor, tmp_path, reads):
    torch.manual_seed(1)
    model = Net(width=32, blocks=8)
    x = torch.randn(4, 8)

    def made():
        model.zero_grad()
        model(x).square().mean().backward()
        return [one.grad.clone() for one in model.parameters() if one.requires_grad]

    torch.manual_seed(2)
    expected = made()
    before = governor.ledger().pools["weights"].leased_bytes
    streamed = plimsoll.stream_frozen(model, weights="streamed", directory=tmp_path, cache_bytes=5 * 8192)
    block = streamed.kept_bytes // 5
    assert streamed.kept_bytes == 5 * block and governor.ledger().pools["weights"].leased_bytes - before == streamed.ring_bytes

    def steps():
        reads.clear()
        for _ in range(3):
            torch.manual_seed(2)
            assert same(made(), expected)
        return dict(reads)

    kept = {3, 4, 5, 6, 7}
    first = steps()
    assert all(first.get(one) == 1 for one in kept) and sum(first.get(one, 0) for one in range(3)) > 3, first  # Block 1 may have been read before.
    assert not set(steps()) & kept
    leases = []
    while streamed.kept_bytes > 3 * block:
        leases.append(governor.reserve(governor.ledger().free_bytes + block))  # Empty pages of the arena may do for some.
    for lease in leases:
        lease.close()
    assert set(steps()) & kept
    while streamed.kept_bytes < 5 * block:
        governor.step_boundary()
    steps()
    assert not set(steps()) & kept
    streamed.close()
    gc.collect()
    assert governor.ledger().pools["weights"].leased_bytes == before


def test_the_memory_of_kept_blocks_goes_while_they_run(governor, tmp_path):
    """It is taken back in forward, before each block: what a graph has saved stays."""
    torch.manual_seed(1)
    model = Net(width=32, blocks=8)
    x = torch.randn(4, 8)
    torch.manual_seed(2)
    expected = model(x).square().mean()
    streamed = plimsoll.stream_frozen(model, weights="streamed", directory=tmp_path, cache_bytes="1MiB")
    kept = []

    def taken_back(*_):
        with contextlib.suppress(plimsoll.BudgetExceeded), governor.reserve(governor.ledger().free_bytes + streamed.kept_bytes):
            pass
        kept.append(streamed.kept_bytes)

    whole = streamed.kept_bytes
    for block in model.blocks:
        block.base.register_forward_hook(taken_back)
    for turn in range(5):
        torch.manual_seed(2)
        made = model(x).square().mean()
        assert torch.equal(made, expected)
        made.backward()
        assert max(kept) < whole
        assert turn or kept[0] > 0  # The block that runs has its own. Later it may be in another slot.
        kept.clear()
        while streamed.kept_bytes < whole:
            governor.step_boundary()


def test_a_cache_that_does_not_fit_is_refused_by_its_option(governor, tmp_path):
    model = Net(width=600, blocks=4)
    with governor.reserve(governor.ledger().free_bytes - 10 * MIB), pytest.raises(plimsoll.BudgetExceeded) as refused:
        plimsoll.stream_frozen(model, weights="streamed", directory=tmp_path, cache_bytes="1GiB")
    assert "cache_bytes" in str(refused.value)
    with pytest.raises(ValueError, match="cache_bytes"):
        plimsoll.stream_frozen(Net(), weights="streamed", directory=tmp_path, cache_bytes="much")
