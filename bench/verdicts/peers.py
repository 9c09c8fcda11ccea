# SPDX-License-Identifier: Apache-2.0
"""What other tools say of a program of the corpus: the original's tracker, memray, scalene."""
import bisect
import importlib.metadata
import json
import pathlib
import tempfile

from plays import Pace, Said, playing
from programs import Program

TRACKER_BYTES = {"tracker": 100e6, "tracker at 5 MB": 5e6}  # Called a leak above: the original's, and a lower bar.
TRACKER_SAMPLES = 10
LEAST_BYTES_PER_STEP = 5000  # Of memray, which has no verdict: what it calls leaked, above our own threshold.


def versions() -> dict[str, str | None]:
    """Of memray and scalene; None where one is not installed."""
    found = {}
    for name in ("memray", "scalene"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def tracker(resident: list[int], bar: float) -> Said:
    """The floor of the last ten samples against that of the first ten."""
    grown = min(resident[-TRACKER_SAMPLES:]) - min(resident[:TRACKER_SAMPLES])
    return Said(grown > bar, f"{grown / 1e6:+.0f} MB")


def _first_own(stack: list, folder: pathlib.Path) -> tuple[str, int]:
    """The innermost frame that is in the corpus, else the innermost."""
    frames = [(file, line) for _, file, line in stack]
    return next((one for one in frames if pathlib.Path(one[0]).parent == folder), frames[0] if frames else ("", 0))


def memray(program: Program, pace: Pace) -> Said:
    """`memray flamegraph --temporal --leaks` of the last three quarters of the steps: what was allocated in them and not
    freed, by site."""
    from memray import FileReader

    with tempfile.TemporaryDirectory() as folder:
        out, clock = pathlib.Path(folder) / "capture", pathlib.Path(folder) / "clock.json"
        command = ("-m", "memray", "run", "--trace-python-allocators", "-q", "-o", str(out))
        with playing(program, pace, command, VERDICTS_WATCHER="clock", VERDICTS_OUT=str(clock)):
            pass
        told = json.loads(clock.read_text())
        by_site: dict[tuple[str, int], int] = {}
        with FileReader(out) as reader:
            times = [snapshot.time for snapshot in reader.get_memory_snapshots()]
            begin, end = (bisect.bisect(times, 1e3 * told[when]) for when in ("quarter", "end"))
            for record in reader.get_temporal_allocation_records(merge_threads=True):
                left = sum(one.n_bytes for one in record.intervals if begin < one.allocated_before_snapshot <= end and (
                    one.deallocated_before_snapshot is None or one.deallocated_before_snapshot > end))
                if left:
                    site = _first_own(record.stack_trace(), program.path.parent)
                    by_site[site] = by_site.get(site, 0) + left
    sites = sorted(by_site, key=by_site.get, reverse=True)
    per_step = sum(by_site.values()) / (0.75 * pace.steps)
    return Said(per_step > LEAST_BYTES_PER_STEP, f"{per_step / 1e3:.0f} kB a step", bytes_per_step=per_step,
                sites=tuple(sites))


def scalene(program: Program, pace: Pace) -> Said:
    """The leaks that scalene reports, the likeliest first."""
    with tempfile.TemporaryDirectory() as folder:
        out, clock = pathlib.Path(folder) / "profile.json", pathlib.Path(folder) / "clock.json"
        command = ("-m", "scalene", "run", "--memory", "--memory-leak-detector", "-o", str(out))
        with playing(program, pace, command, VERDICTS_WATCHER="clock", VERDICTS_OUT=str(clock)):
            pass
        profile = json.loads(out.read_text()) if out.exists() else {"files": {}}
    leaks = [(leak["likelihood"], file, int(line)) for file, seen in profile["files"].items()
             for line, leak in seen["leaks"].items()]
    sites = tuple((file, line) for _, file, line in sorted(leaks, reverse=True))
    return Said(bool(sites), f"{len(sites)} leaks", sites=sites)


def tools() -> dict:
    """Those that play a program by themselves, and are installed."""
    return {name: tool for name, tool in (("memray", memray), ("scalene", scalene)) if versions()[name]}
