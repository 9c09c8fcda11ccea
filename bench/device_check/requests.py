# SPDX-License-Identifier: Apache-2.0
"""Random requests and releases of memory, played on a device or on the rules of src/plan/device_allocator.h.

    python -m bench.device_check.requests '[{"seed": 1, "count": 5000, "streams": 1, "room": 125829120}]'

The command plays them on the rules, in a process of its own where the device is a card, and prints what they say as JSON.

Threads: one.   Memory: as drawn on a device; on the rules some bytes for each block.
"""
from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

NO_LIMIT = 1 << 60
LIVE_MOST = 60


class ByRules:
    """Holds blocks by the rules: an allocator for each stream, since streams share no segment while nothing is refused."""

    def __init__(self, rules: Any, streams: int, room: int) -> None:
        if streams > 1 and room != NO_LIMIT:
            raise ValueError("rules of several streams know no limit in common")
        self._rules = [rules(room) for _ in range(streams)]

    def allocate(self, size: int, stream: int) -> Any:
        """Returns a block; None when it is refused."""
        return self._rules[stream].allocate(size)

    def free(self, block: Any, stream: int, other: bool) -> None:
        """Takes a block back."""
        self._rules[stream].free(block)

    def statistics(self) -> tuple[int, ...]:
        """Returns allocated bytes, reserved bytes, segments."""
        return tuple(map(sum, zip(*(one.statistics() for one in self._rules))))


class OnDevice:
    """Holds tensors on the device; `other`: the second stream used them as well (record_stream)."""

    def __init__(self, device: Any, streams: int) -> None:
        import torch

        self._torch, self._device, self._streams = torch, device, [device.module.current_stream(), *(device.stream() for _ in range(streams - 1))]

    def allocate(self, size: int, stream: int) -> Any:
        """Returns a tensor, in a list that alone holds it; None when it is refused."""
        with self._device.on(self._streams[stream]):
            try:
                return [self._torch.empty(size, dtype=self._torch.uint8, device=self._device.name)]
            except self._torch.OutOfMemoryError:
                return None

    def free(self, block: Any, stream: int, other: bool) -> None:
        """Lets a tensor go. Waits for the second stream, so that the next request finds the block free."""
        if not other or len(self._streams) == 1:
            block.clear()
            return
        second = self._streams[1 - stream]
        second.wait_event(self._streams[stream].record_event())
        with self._device.on(second):
            block[0][:1].fill_(1)
        block[0].record_stream(second)
        block.clear()
        self._device.module.synchronize()

    def statistics(self) -> tuple[int, ...]:
        """Returns allocated bytes, reserved bytes, segments."""
        now = self._device.module.memory_stats()
        return tuple(int(now.get(f"{name}.all.current", 0)) for name in ("allocated_bytes", "reserved_bytes", "segment"))


def played(holder: Any, seed: int, count: int, streams: int, largest: int = 26) -> Iterator[tuple[int, ...]]:
    """Makes the requests and releases; yields the statistics after each one, and whether it was refused. At the end nothing is held."""
    drawn, live = random.Random(seed), []
    for _ in range(count):
        refused = False
        if live and (len(live) > LIVE_MOST or drawn.random() < 0.495):
            holder.free(*live.pop(drawn.randrange(len(live))))
        else:
            size = int(2 ** drawn.uniform(0, drawn.choice([12, 20, 22, 24, largest])))
            stream, other = drawn.randrange(streams), drawn.random() < 0.5
            block = holder.allocate(size, stream)
            refused = block is None
            if not refused:
                live.append((block, stream, other))
        yield (*holder.statistics(), int(refused))
    for one in live:
        holder.free(*one)


def by_rules(rules: Any, games: list[dict[str, int]]) -> list[list[list[int]]]:
    """Returns what the rules say after each request of each game."""
    return [[list(one) for one in played(ByRules(rules, game["streams"], game["room"]), game["seed"], game["count"], game["streams"])]
            for game in games]


def told_by_rules(games: list[dict[str, int]], simulated: bool) -> list[list[list[int]]] | str:
    """Returns by_rules(); where the simulated device is not built, why not."""
    if simulated:
        from tests import device

        return by_rules(device.Rules, games)
    # Not in the card's process: importing it gives torch a second device.
    done = subprocess.run([sys.executable, "-m", "bench.device_check.requests", json.dumps(games)], text=True, capture_output=True, check=False)
    if done.returncode != 0:
        return f"the rules do not run here: {(done.stderr.strip().splitlines() or ['no reason was given'])[-1]}"
    return json.loads(done.stdout)


if __name__ == "__main__":
    import torch  # noqa: F401

    import plimsoll_simulated_device

    print(json.dumps(by_rules(plimsoll_simulated_device.Rules, json.loads(sys.argv[1]))))
