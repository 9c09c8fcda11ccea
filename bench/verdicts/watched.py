# SPDX-License-Identifier: Apache-2.0
"""The loop of a program of the corpus: `for step in steps(): …`, and `with phase("eval"): …` in it.

Who looks on meanwhile is said by the variables VERDICTS_WATCHER ("plimsoll", "memray"; nobody without it) and
VERDICTS_OUT, a file for what was seen: JSON of plimsoll.Watch, memray's capture. VERDICTS_STEPS is how many steps
there are, VERDICTS_STEP_SECONDS how long one takes at least. Standard output says when the loop begins.
"""
import contextlib
import json
import mmap
import os
import pathlib
import time
from collections.abc import Iterator


class Nobody:
    """Looks on as nobody does."""

    def phase(self, name: str) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def step(self, made: int, steps: int) -> None:
        pass

    def end(self) -> None:
        pass


class Plimsoll(Nobody):
    """plimsoll.Watch, and the resident size after each step."""

    def __init__(self, out: pathlib.Path) -> None:
        import plimsoll

        self._out = out
        self._resident: list[int] = []
        self._watch = plimsoll.Watch()

    def phase(self, name: str) -> contextlib.AbstractContextManager:
        return self._watch.phase(name)

    def step(self, made: int, steps: int) -> None:
        self._watch.step()
        self._resident.append(int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE)

    def end(self) -> None:
        found = self._watch.verdict()
        self._out.write_text(json.dumps({
            "course": found.course, "owner": found.owner, "bytes_per_step": found.bytes_per_step, "phase": found.phase,
            "text": str(found), "resident": self._resident}))


class Memray(Nobody):
    """memray from the second quarter on: what was allocated then and is there at the end, it calls leaked."""

    def __init__(self, out: pathlib.Path) -> None:
        import memray

        self._tracker = memray.Tracker(out, trace_python_allocators=True)
        self._tracking = False

    def step(self, made: int, steps: int) -> None:
        if not self._tracking and 4 * made >= steps:
            self._tracker.__enter__()
            self._tracking = True

    def end(self) -> None:
        self._tracker.__exit__(None, None, None)


_watcher: Nobody = Nobody()


def steps() -> Iterator[int]:
    """The numbers of the steps, while somebody looks on."""
    global _watcher
    count, kinds = int(os.environ["VERDICTS_STEPS"]), {"plimsoll": Plimsoll, "memray": Memray}
    least = float(os.environ["VERDICTS_STEP_SECONDS"])
    if kind := kinds.get(os.environ.get("VERDICTS_WATCHER", "")):
        _watcher = kind(pathlib.Path(os.environ["VERDICTS_OUT"]))
    print("begin", flush=True)
    for step in range(count):
        begun = time.perf_counter()
        yield step
        _watcher.step(step + 1, count)
        time.sleep(max(0.0, least - (time.perf_counter() - begun)))
    _watcher.end()


def phase(name: str) -> contextlib.AbstractContextManager:
    """What the loop does meanwhile."""
    return _watcher.phase(name)
