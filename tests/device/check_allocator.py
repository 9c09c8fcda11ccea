# SPDX-License-Identifier: Apache-2.0
"""The simulated device's allocator beside the project's replayer of CUDA's (src/plan/device_allocator.h): the same statistics after
each of some thousand random requests, some of them refused."""
import gc
import random

import pytest
import torch

from tests import device

DEV = "sim"


@pytest.fixture(autouse=True)
def memory_is_empty():
    gc.collect()
    torch.accelerator.empty_cache()
    yield
    device.configure(**device.DEFAULTS)


def statistics():
    now = torch.accelerator.memory_stats()
    return tuple(now[f"{name}.all.current"] for name in ("allocated_bytes", "reserved_bytes", "segment"))


@pytest.mark.parametrize(("limit_mib", "refusals"), [(250, False), (120, True)])
@pytest.mark.parametrize("seed", [3, 4])
def test_random_requests(limit_mib, refusals, seed):
    device.configure(capacity=limit_mib * device.MIB, poison=False)
    rules, drawn = device.Rules(limit_mib * device.MIB), random.Random(seed)
    live, refused = [], 0
    for number in range(5000):
        if live and (len(live) > 60 or drawn.random() < 0.495):
            tensor, block = live.pop(drawn.randrange(len(live)))
            del tensor
            rules.free(block)
        else:
            size = int(2 ** drawn.uniform(0, drawn.choice([12, 20, 22, 24, 26])))
            block = rules.allocate(size)
            try:
                tensor = torch.empty(size, dtype=torch.uint8, device=DEV)
            except torch.OutOfMemoryError:
                assert block is None, f"seed {seed}, request {number} of {size} bytes"
                refused += 1
            else:
                assert block is not None, f"seed {seed}, request {number} of {size} bytes"
                live.append((tensor, block))
        assert statistics() == rules.statistics(), f"seed {seed}, request {number}"
    assert (refused > 0) == refusals
    print(f"{number + 1} requests and releases, {refused} refused")


def test_what_a_test_may_set():
    device.configure(capacity=64 << 20)
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(10 << 20, dtype=torch.uint8, device=DEV)
    y = torch.empty(100, device=DEV)
    assert statistics()[:2] == ((10 << 20) + 512, 12 << 20) and torch.isnan(y).all()
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 60 MiB\. Device 0 has a total capacity of 64 MiB"):
        torch.empty(60 << 20, dtype=torch.uint8, device=DEV)
    big = torch.ones(5 << 20, device=DEV)
    with pytest.raises(torch.OutOfMemoryError):
        big * 2 + big  # Within a kernel.
    del big, x, y
    torch.accelerator.empty_cache()
    assert torch.accelerator.max_memory_allocated() >= 30 << 20 and torch.accelerator.get_memory_info() == (64 << 20, 64 << 20)
    device.configure(context=30 << 20)
    assert device.mem_get_info() == (34 << 20, 64 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(40 << 20, dtype=torch.uint8, device=DEV)
    device.configure(context=0)
    device.set_per_process_memory_fraction(0.5)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(40 << 20, dtype=torch.uint8, device=DEV)
    device.configure(fraction=1.0)
    with device.refusing(2):
        a = torch.ones(3, device=DEV)
        b = a + 1
        with pytest.raises(torch.OutOfMemoryError, match="on request"):
            a + b
        a + b
    del a, b
    torch.accelerator.empty_cache()
    device.configure(exact=True)
    a = torch.empty(1000, device=DEV)
    assert torch.accelerator.memory_reserved() == 4032
    del a
