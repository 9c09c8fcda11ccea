#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What looking costs: plimsoll.Watch in a loop, beside memray and scalene in the same loop (loop.py); `plimsoll watch`
on a foreign tree, beside psrecord (hold.py)."""
import argparse
import importlib.util
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import plimsoll  # noqa: F401  bench/run builds the package for those that name it.

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from bench.loop_turns import T95, Loop, ratio_and_bound

BAR, STALL_MS, TREE_SHARE = 1.01, 5.0, 0.01
WINDOW_STEPS, SMOKE_WINDOW_STEPS = 25, 2  # 25 unless a program says otherwise.
WARM_WINDOWS = 1
STALLS = ("stall_ms", "stall_wall_ms", "stall_cpu_ms")
LOOPS = {"calm": (0, 12), "leaking": (150_000, 24)}  # Bytes kept of a step, and windows.
GIB = 1 << 30


def started(how: str, kept: int, folder: pathlib.Path, steps: int, window_steps: int, core: int) -> Loop:
    words = [HERE / "loop.py", "bare" if how == "scalene" else how, kept, folder, steps, window_steps]
    before = ["-m", "scalene", "run", "--memory", "-o", folder / "profile.json"] if how == "scalene" else []
    return Loop(*before, *words, core=core)


def compared(how: str, name: str, folder: pathlib.Path, pairs: int, window_steps: int) -> dict:
    """That of LOOPS with it, beside the same loop bare: ratio of the steps' time and its bound, and what it said."""
    logs, digests, said, bare_ms = [], set(), [], []
    kept, windows = LOOPS[name]
    cores = sorted(os.sched_getaffinity(0))
    for _ in range(pairs):
        cores.reverse()
        loops = [started(one, kept, folder, windows * window_steps, window_steps, core)
                 for one, core in (("bare", cores[0]), (how, cores[-1]))]
        for loop in loops:
            loop.begin()
        before, after = (statistics.mean(loop.seconds()[WARM_WINDOWS * window_steps:]) for loop in loops)
        logs.append(math.log(after / before))
        bare_ms.append(1e3 * before)
        ends = [loop.end() for loop in loops]
        digests |= {end["digest"] for end in ends}
        said.append(ends[1])
    if len(digests) != 1:
        sys.exit(f"watch_cost: the loops end with different models beside {how}")
    ratio, bound = ratio_and_bound(logs)
    result = {"ratio": round(ratio, 4), "bound": round(bound, 4), "pairs": pairs,
              "step_ms": round(statistics.median(bare_ms), 1)}
    if how == "watch":
        if wrong := [one["kind"] for one in said if (one["kind"] == "leak") != (kept > 0)]:
            sys.exit(f"watch_cost: of a loop that keeps {kept} B a step the verdict is {wrong[0]}")
        result |= {name: round(max(one[name] for one in said), 2) for name in STALLS}
        result["stall_ms_median"] = round(statistics.median(one["stall_ms"] for one in said), 2)
        result |= {name: round(statistics.median(one[name] for one in said), 1) for name in ("calls_ms", "search_ms")}
    return result


class Tree:
    """hold.py and its children."""

    def __init__(self, size: int, processes: int) -> None:
        self._process = subprocess.Popen([sys.executable, HERE / "hold.py", str(size), str(processes)], text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if not self._process.stdout.readline():
            sys.exit(f"watch_cost: hold.py: status {self._process.wait()}")
        self.pid = self._process.pid

    def longest_ms(self) -> float:
        """Of a map and an unmap, since the last call."""
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def looked(tree: Tree, command: list, seconds: float) -> tuple[float, float, str]:
    """Share of a core that a watcher takes after its first second, longest map in ms meanwhile, and what it printed."""
    with tempfile.TemporaryFile("w+") as said:
        watcher = subprocess.Popen([str(word) for word in command], stdout=said, stderr=said)
        try:
            time.sleep(1)  # It starts.
            tree.longest_ms()
            spent, began = processor_seconds(watcher.pid), time.perf_counter()
            time.sleep(seconds)
            spent, took = processor_seconds(watcher.pid) - spent, time.perf_counter() - began
            longest = tree.longest_ms()
        except FileNotFoundError:
            said.seek(0)
            sys.exit(f"watch_cost: {command[0]} ended: {said.read()[-500:]}")
        finally:
            watcher.terminate()
            watcher.wait()
        said.seek(0)
        return spent / took, longest, said.read()


def processor_seconds(pid: int) -> float:
    """Of a process, to a nanosecond: of all its threads."""
    return sum(int(path.read_text().split()[0]) for path in pathlib.Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def tree_cost(size: int, seconds: float) -> dict:
    """Of `plimsoll watch`, psrecord and nobody, in turns, of a look a second."""
    available = next(int(line.split()[1]) << 10 for line in open("/proc/meminfo", encoding="utf-8")
                     if line.startswith("MemAvailable"))
    if available < 1.2 * size:
        sys.exit(f"watch_cost: a tree of {size / GIB:.1f} GiB, and {available / GIB:.1f} GiB are available: "
                 "--tree-gib 4 takes less")
    tree = Tree(size, 4)
    try:
        program = os.environ["PLIMSOLL_PROGRAM"]
        ways = {"plimsoll watch": [program, "watch", tree.pid, "--json", "--every", "1"]}
        if importlib.util.find_spec("psrecord"):
            ways["psrecord"] = [sys.executable, "-m", "psrecord", tree.pid, "--include-children", "--interval", "1",
                                "--log", os.devnull]
        tree.longest_ms()
        time.sleep(seconds)
        told = {"nobody": {"longest_map_ms": round(tree.longest_ms(), 2)}}
        for name, command in ways.items():
            share, longest, said = looked(tree, command, seconds)
            told[name] = {"core_share": round(share, 5), "longest_map_ms": round(longest, 2)}
            if name == "plimsoll watch":
                held = json.loads(said.splitlines()[-1])["held_bytes"]
                if not size <= held <= 1.05 * size + 200e6:
                    sys.exit(f"watch_cost: plimsoll watch says {held} bytes of a tree that holds {size}")
                told[name]["held_gib"] = round(held / GIB, 3)
    finally:
        tree.end()
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two pairs, 256 MiB, no peers; only the answers count")
    parser.add_argument("--pairs", type=int, default=16, choices=[one + 1 for one in T95])
    parser.add_argument("--tree-gib", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=60, help="that each watcher looks at the tree")
    parser.add_argument("--directory", type=pathlib.Path, help="where to put files; default: build")
    options = parser.parse_args()
    build = HERE.parents[1] / "build"
    folder = pathlib.Path(tempfile.mkdtemp(prefix="watch_cost-", dir=options.directory
                                           or (build if build.exists() else None)))
    pairs, size, seconds, window_steps = (2, GIB / 4, 3, SMOKE_WINDOW_STEPS) if options.smoke else \
        (options.pairs, options.tree_gib * GIB, options.seconds, WINDOW_STEPS)
    try:
        loops = {f"watch, {name}": compared("watch", name, folder, pairs, window_steps) for name in LOOPS}
        for peer in [] if options.smoke else ["memray", "scalene"]:
            there = importlib.util.find_spec(peer) is not None
            loops[peer] = compared(peer, "calm", folder, 3, window_steps) if there else "not installed"
        tree = tree_cost(int(size), seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ours = [loops[f"watch, {name}"] for name in LOOPS]
    bound, stall = (max(one[name] for one in ours) for name in ("bound", "stall_ms"))
    share = tree["plimsoll watch"]["core_share"]
    result = {"name": "watch_cost", "value": bound, "unit": "x", "bar": BAR,
              "pass": options.smoke or (bound <= BAR and stall <= STALL_MS and share <= TREE_SHARE),
              "peers": {"stall_ms": stall, "stall_ms_bar": STALL_MS, "core_share": share, "core_share_bar": TREE_SHARE,
                        "loops": loops, "tree": tree, "tree_bytes": int(size)}}
    print(json.dumps(result))
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
