# SPDX-License-Identifier: Apache-2.0
"""What other tools say of a program of the corpus: the original's tracker, memray, scalene."""
import importlib.metadata
import json
import pathlib
import subprocess
import sys
import tempfile

from plays import HERE, Pace, PlayError, Said, playing
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


def memray(program: Program, pace: Pace) -> Said:
    """`memray flamegraph --temporal --leaks` of the last three quarters of the steps: what was allocated in them and
    not freed, by site (leaked.py)."""
    with tempfile.TemporaryDirectory() as folder:
        out, clock = pathlib.Path(folder) / "capture", pathlib.Path(folder) / "clock.json"
        command = ("-m", "memray", "run", "--trace-python-allocators", "-q", "-o", str(out))
        with playing(program, pace, command, VERDICTS_WATCHER="clock", VERDICTS_OUT=str(clock)):
            pass
        told = json.loads(clock.read_text())
        done = subprocess.run([sys.executable, HERE / "leaked.py", out, str(told["quarter"]), str(told["end"]),
                               program.path.parent], text=True, capture_output=True, check=False)
    if done.returncode:
        raise PlayError(f"{program.name}: leaked.py: {done.stderr}")
    by_site = json.loads(done.stdout)
    per_step = sum(size for *_, size in by_site) / (0.75 * pace.steps)
    return Said(per_step > LEAST_BYTES_PER_STEP, f"{per_step / 1e3:.0f} kB a step", bytes_per_step=per_step,
                sites=tuple((file, line) for file, line, _ in by_site))


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
