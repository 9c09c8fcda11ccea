# SPDX-License-Identifier: Apache-2.0
"""The loop of a program of the corpus: `for step in steps(): …`, and `with phase("eval"): …` in it.

VERDICTS_WATCHER says who looks on meanwhile: "plimsoll" for plimsoll.Watch, "clock" for the time alone. What was seen
becomes JSON in the file VERDICTS_OUT. VERDICTS_STEPS is how many steps there are, VERDICTS_STEP_SECONDS how long one
takes at least. Standard output says when the loop begins.
"""
import array
import contextlib
import json
import mmap
import multiprocessing
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
    """plimsoll.Watch, and the sizes of the process after each step."""

    def __init__(self, out: pathlib.Path, steps: int) -> None:
        import plimsoll

        self._out = out
        self._sizes = array.array("q", [0, 0] * steps)  # After each step, resident and of it anonymous; it never grows.
        self._watch = plimsoll.Watch()

    def phase(self, name: str) -> contextlib.AbstractContextManager:
        return self._watch.phase(name)

    def step(self, made: int, steps: int) -> None:
        self._watch.step()
        _, resident, shared, *_ = map(int, pathlib.Path("/proc/self/statm").read_text().split())
        both = array.array("q", [resident * mmap.PAGESIZE, (resident - shared) * mmap.PAGESIZE])
        self._sizes[2 * made - 2:2 * made] = both

    def end(self) -> None:
        found = self._watch.verdict()
        self._out.write_text(json.dumps({
            "kind": found.kind, "owner": found.owner, "bytes_per_step": found.bytes_per_step, "phase": found.phase,
            "sites": [site for site, _ in found.sites], "holder": found.holder, "text": str(found),
            "resident": self._sizes[::2].tolist(), "anonymous": self._sizes[1::2].tolist()}))


class Clock(Nobody):
    """When the first quarter of the steps was over, and when the last: for who looks on by itself."""

    def __init__(self, out: pathlib.Path, steps: int) -> None:
        self._out = out
        self._quarter = 0.0

    def step(self, made: int, steps: int) -> None:
        if not self._quarter and 4 * made >= steps:
            self._quarter = time.time()

    def end(self) -> None:
        self._out.write_text(json.dumps({"quarter": self._quarter, "end": time.time()}))


_count = int(os.environ["VERDICTS_STEPS"])


def _made() -> Nobody:
    """Made as this is imported: workers that are started later know of it. In a worker: nobody."""
    if multiprocessing.current_process().name != "MainProcess":
        if os.environ["VERDICTS_WATCHER"] == "plimsoll":
            import plimsoll  # noqa: F401  As the main module of a program has it that watches.
        return Nobody()
    kind = {"plimsoll": Plimsoll, "clock": Clock}[os.environ["VERDICTS_WATCHER"]]
    return kind(pathlib.Path(os.environ["VERDICTS_OUT"]), _count)


_watcher = _made()


def steps() -> Iterator[int]:
    """The numbers of the steps, while somebody looks on."""
    least = float(os.environ["VERDICTS_STEP_SECONDS"])
    print("begin", flush=True)
    for step in range(_count):
        begun = time.perf_counter()
        yield step
        _watcher.step(step + 1, _count)
        time.sleep(max(0.0, least - (time.perf_counter() - begun)))
    _watcher.end()


def phase(name: str) -> contextlib.AbstractContextManager:
    """What the loop does meanwhile."""
    return _watcher.phase(name)
