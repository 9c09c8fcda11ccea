# SPDX-License-Identifier: Apache-2.0
"""What other tools say of a program of the corpus: the original's tracker, memray, scalene."""
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
    """`memray --leaks` of the last three quarters: what was allocated in them and not freed, by site."""
    from memray import FileReader

    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "capture"
        with playing(program, pace, VERDICTS_WATCHER="memray", VERDICTS_OUT=str(out)):
            pass
        by_site: dict[tuple[str, int], int] = {}
        with FileReader(out) as reader:
            for record in reader.get_leaked_allocation_records(merge_threads=True):
                site = _first_own(record.stack_trace(), program.path.parent)
                by_site[site] = by_site.get(site, 0) + record.size
    sites = sorted(by_site, key=by_site.get, reverse=True)
    per_step = sum(by_site.values()) / (0.75 * pace.steps)
    return Said(per_step > LEAST_BYTES_PER_STEP, f"{per_step / 1e3:.0f} kB a step", bytes_per_step=per_step,
                sites=tuple(sites))


def scalene(program: Program, pace: Pace) -> Said:
    """The leaks that scalene reports, the likeliest first."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "profile.json"
        command = ("-m", "scalene", "run", "--memory", "--memory-leak-detector", "-o", str(out))
        with playing(program, pace, command):
            pass
        profile = json.loads(out.read_text()) if out.exists() else {"files": {}}
    leaks = [(leak["likelihood"], file, int(line)) for file, seen in profile["files"].items()
             for line, leak in seen["leaks"].items()]
    sites = tuple((file, line) for _, file, line in sorted(leaks, reverse=True))
    return Said(bool(sites), f"{len(sites)} leaks", sites=sites)


def tools() -> dict:
    """Those that play a program by themselves, and are installed."""
    return {name: tool for name, tool in (("memray", memray), ("scalene", scalene)) if versions()[name]}
