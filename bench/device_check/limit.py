# SPDX-License-Identifier: Apache-2.0
"""Check 1: the limit of a device holds through random requests, and torch's allocator does as the rules that plans replay.

Threads: one.   Memory: at most the limit, on the device.
"""
from __future__ import annotations

import gc
from typing import Any

from bench.device_check.device import MIB, Device
from bench.device_check.requests import NO_LIMIT, OnDevice, played, told_by_rules
from bench.device_check.result import CannotRun, Result

ROOM = 61 * MIB  # A segment is a multiple of 2 MiB: rounding of the share decides nothing.
LARGE_ROOM = 1801 * MIB  # Two streams meet no limit there.
SEED = 31


def check(device: Device) -> Result:
    """Plays three games: one stream at the limit, two streams below it, two streams at it."""
    first, second, third = device.pick((10_000, 5_000, 5_000), (4_000, 2_000, 2_000))
    if device.simulated:
        from tests import device as simulated

        simulated.configure(poison=False, capacity=3 << 30)
    context, reserved_first = _context(device)
    games = [{"seed": SEED, "count": first, "streams": 1, "room": ROOM}, {"seed": SEED + 1, "count": second, "streams": 2, "room": NO_LIMIT}]
    rules: Any = f"{reserved_first} bytes were reserved before" if reserved_first else told_by_rules(games, device.simulated)
    seen = [_played(device, ROOM, SEED, first, 1), _played(device, LARGE_ROOM, SEED + 1, second, 2), _played(device, ROOM, SEED + 2, third, 2)]
    above = sum(one.above for one in seen)
    differ = None if isinstance(rules, str) else [_first_difference(one.statistics, wanted) for one, wanted in zip(seen, rules)]
    result = Result(above + sum(count for count, _ in differ or ()), "requests that differ or pass the limit", 0)
    result.add("context + reserved above the limit", "0", f"{above} of {first + second + third:,}", above == 0)
    result.add("closest to the limit", "", f"{max(one.closest for one in seen):.1%} of it")
    grown = _context(device)[0] - context
    result.add("context that was made meanwhile", "", f"{grown / MIB:.1f} MiB: it is measured when the limit is imposed")
    for name, one in (("one stream", seen[0]), ("two streams", seen[2])):
        result.add(f"refused at the limit, {name}", "some", f"{one.refused:,}", one.refused > 0)
    for at, name in enumerate(("one stream, at the limit", "two streams, record_stream")):
        if differ is None:
            result.add(f"allocated, reserved, segments: {name}", "as the rules", f"not compared: {rules}")
        else:
            count, text = differ[at]
            result.add(f"allocated, reserved, segments: {name}", "as the rules", text, count == 0)
    result.peers = {"requests": first + second + third, "refused": sum(one.refused for one in seen), "context_mib": round(context / MIB, 1),
                    "compared": int(differ is not None)}
    return result


def _context(device: Device) -> tuple[int, int]:
    """Returns the context's bytes, and what stays reserved when nothing is used."""
    with device.governor("90%") as governor:
        context = governor.devices[device.name].context_bytes
    device.forget()
    return context, device.module.memory_reserved()


class _Seen:
    """Statistics after each request, and how they stand to the limit."""

    def __init__(self) -> None:
        self.statistics: list[list[int]] = []
        self.above, self.refused, self.closest = 0, 0, 0.0


def _played(device: Device, room: int, seed: int, count: int, streams: int) -> _Seen:
    seen = _Seen()
    with _with_room(device, room) as governor:
        line = governor.devices[device.name]
        device.forget()
        for one in played(OnDevice(device, streams), seed, count, streams):
            held = line.context_bytes + one[1]
            seen.statistics.append(list(one))
            seen.above += held > line.limit_bytes
            seen.refused += one[3]
            seen.closest = max(seen.closest, held / line.limit_bytes)
    gc.collect()
    device.module.synchronize()
    device.forget()
    return seen


def _with_room(device: Device, room: int) -> Any:
    """Makes a governor whose limit leaves exactly `room` beside the context, which grows when a kernel is first used."""
    context, _ = _context(device)
    for _ in range(5):
        governor = device.governor(context + room)
        if governor.devices[device.name].room_bytes == room:
            return governor
        context = governor.devices[device.name].context_bytes
        governor.close()
    raise CannotRun(f"the context's bytes do not stay: {context}; another process uses the device")


def _first_difference(seen: list[list[int]], wanted: list[list[int]]) -> tuple[int, str]:
    """Returns how many differ, and the first of them."""
    wrong = [at for at, (one, other) in enumerate(zip(seen, wanted)) if one != other]
    if not wrong:
        return 0, f"the same after each of {len(seen):,}"
    at = wrong[0]
    return len(wrong), f"{len(wrong):,} of {len(seen):,} differ; first after {at}: {seen[at]}, not {wanted[at]}"
