# SPDX-License-Identifier: Apache-2.0
"""Streams of the simulated device: each planted missing wait is found, and nothing where nothing is missing.

Late copies and kernels are held by gates that the test opens: no clock decides.
"""
import contextlib

import pytest
import torch

from tests import device

DEV = "sim"
COUNT = 1000
UNORDERED = "nothing orders them"


@pytest.fixture
def streams():
    """The stream that computes, and one for copies. Afterwards all has run."""
    yield torch.accelerator.current_stream(), torch.Stream(device=DEV)
    device.open_gates()
    torch.accelerator.synchronize()


@pytest.fixture
def checked():
    with device.order_checked():
        yield


def ring(waits_for_compute, waits_for_copy, steps=4):
    """Batches that are copied to one slot by a stream of its own, as loaders do; returns their sums."""
    compute, copies = torch.accelerator.current_stream(), torch.Stream(device=DEV)
    hosts = [torch.full((COUNT,), float(k + 1)).pin_memory() for k in range(steps)]
    slot, sums = torch.zeros(COUNT, device=DEV), []
    for host in hosts:
        if waits_for_compute:
            copies.wait_event(compute.record_event())
        with copies:
            slot.copy_(host, non_blocking=True)
        if waits_for_copy:
            compute.wait_event(copies.record_event())
        sums.append((slot * 2).sum())
    torch.accelerator.synchronize()
    return [one.item() for one in sums]


WANTED = [2.0 * COUNT * (k + 1) for k in range(4)]


def test_with_both_waits_nothing_is_found(streams, checked):
    assert ring(True, True) == WANTED
    with device.kernels_late():
        assert ring(True, True) == WANTED


@pytest.mark.parametrize(("waits", "found"), [((False, True), r"stream \d writes \(a copy from the host\) what stream 0 writes \(aten::zero"),
                                              ((True, False), r"stream 0 reads \(aten::mul\) what stream \d writes \(a copy from the host\)")])
@pytest.mark.parametrize("late", [False, True])
def test_each_missing_wait_is_found(streams, checked, waits, found, late):
    with pytest.raises(RuntimeError, match=f"{found}.*{UNORDERED}"):
        if late:
            with device.kernels_late():
                ring(*waits)
        else:
            ring(*waits)


@contextlib.contextmanager
def held_copy(copies):
    """Yields (host, x): a copy of ones from `host` to `x`, which held zeros, was begun and does not run inside."""
    host, x = torch.ones(COUNT).pin_memory(), torch.zeros(COUNT, device=DEV)
    with device.copies_held():
        with copies:
            x.copy_(host, non_blocking=True)
        yield host, x


def test_a_copy_that_is_overtaken_by_what_reads_it_shows_the_old_values(streams):
    compute, copies = streams
    with held_copy(copies) as (_, x):
        assert not copies.query() and x.sum().item() == 0  # Nobody waited.
        device.open_gates()
        compute.wait_event(copies.record_event())
        assert x.sum().item() == COUNT


def test_a_host_that_writes_before_its_copy_was_made_is_seen(streams):
    _, copies = streams
    with held_copy(copies) as (host, x):
        host.zero_()
    copies.synchronize()
    assert x.sum().item() == 0


@pytest.mark.parametrize(("waits", "total"), [(True, 3.0 * COUNT), (False, 11.0 * COUNT)])
def test_a_copy_that_overtakes_the_kernel_before_it_shows_the_new_values(streams, waits, total):
    compute, copies = streams
    x, new = torch.ones(COUNT, device=DEV), torch.full((COUNT,), 5.0).pin_memory()
    with device.kernels_late():
        device.hold_stream()
        y = x * 2 + 1
        if waits:
            copies.wait_event(compute.record_event())
        with copies:
            x.copy_(new, non_blocking=True)
        if not waits:
            copies.synchronize()
        device.open_gates()
        assert y.sum().item() == total


def test_other_bytes_of_one_tensor_are_apart(streams, checked):
    compute, copies = streams
    halves, host = torch.zeros(2 * COUNT, device=DEV), torch.ones(COUNT).pin_memory()
    copies.wait_event(compute.record_event())
    with copies:
        halves[COUNT:].copy_(host, non_blocking=True)
    halves[:COUNT] += 1
    with pytest.raises(RuntimeError, match=UNORDERED):
        halves[:COUNT + 1] += 1


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_made_anew_before_its_last_reader_is_found(streams, checked, recorded):
    """A tensor of one stream, read in another and let go of: without record_stream() its stream gives the memory away."""
    compute, copies = streams
    with copies:
        x = torch.ones(3 << 20, device=DEV)
    compute.wait_event(copies.record_event())
    kept = x * 2
    if recorded:
        x.record_stream(compute)
    del x

    def anew():
        with copies:
            return torch.ones(3 << 20, device=DEV)

    if recorded:
        anew()
    else:
        with pytest.raises(RuntimeError, match="record_stream"):
            anew()
    assert kept.sum().item() == 6 << 20


def test_events_and_the_host_order_too(streams, checked):
    compute, copies = streams
    host, x = torch.ones(COUNT).pin_memory(), torch.zeros(COUNT, device=DEV)
    torch.accelerator.synchronize()  # The host has waited: what it starts now comes after.
    with copies:
        x.copy_(host, non_blocking=True)
        copied = copies.record_event()
    copied.synchronize()
    assert x.sum().item() == COUNT and copied.query()


def test_a_model_that_trains_in_one_stream_is_silent(streams, checked):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)).to(DEV)
    lstm = torch.nn.LSTM(8, 8).to(DEV)
    optimizer = torch.optim.AdamW([*model.parameters(), *lstm.parameters()], fused=True)
    with device.kernels_late():
        for _ in range(3):
            optimizer.zero_grad()
            model(lstm(torch.ones(5, 4, 8, device=DEV))[0]).square().mean().backward()
            optimizer.step()
    assert all(torch.isfinite(one).all() for one in model.parameters())
