#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Leaking and innocent programs in pairs: what plimsoll.Watch, `plimsoll watch`, the original's tracker, memray and
scalene say of each, and how often they are right, on the half that thresholds were chosen on and on the other."""
import argparse
import concurrent.futures
import json
import os
import pathlib
import sys

import plimsoll  # noqa: F401  bench/run builds the package for those that name it.
import peers
import score
from plays import Pace, PlayError, Said, watched
from programs import SALT, Program, corpus

HERE = pathlib.Path(__file__).resolve().parent
PACE, SMOKE_PACE, SLOW_SMOKE_PACE = Pace(300, 0.05), Pace(240, 0.02), Pace(1200, 0.02)
PEERS_PACE = Pace(300, 0.01)
SMOKE_PAIRS = {"buffer", "numbers"}  # One of each half, which need nothing but Python.
OURS = "plimsoll.Watch"


def said_of(program: Program, steps: int, smoke: bool, tools: dict) -> tuple[dict[str, Said], str]:
    """By watcher; and what speaks against the program's truth."""
    seen = watched(program, SMOKE_PACE if smoke else Pace(steps, PACE.step_seconds), outside=not smoke)
    if smoke and seen.inside.text.startswith("too early"):  # A slow look is followed by 800 times as long.
        seen = watched(program, SLOW_SMOKE_PACE, outside=False)
    said = {OURS: seen.inside}
    if seen.outside:
        said["plimsoll watch"] = seen.outside
    for name, bar in peers.TRACKER_BYTES.items():
        said[name] = peers.tracker(seen.resident, bar)
    for name, tool in tools.items():
        try:
            said[name] = tool(program, PEERS_PACE)
        except PlayError as error:  # It broke the program: it says nothing of it.
            said[name] = Said(False, f"failed: {str(error).strip().splitlines()[-1][:100]}")
    return said, score.doubted(program, seen.anonymous)


def line(program: Program, said: dict[str, Said]) -> str:
    truth = "leaks" if program.leaks else "fine"
    wrong = "; ".join(f"{name}: {one.text}" for name, one in said.items()
                      if name != OURS and one.leaks != program.leaks)
    mark = " " if said[OURS].leaks == program.leaks else "!"
    return f"{program.name:26} {truth:5} {mark} {said[OURS].text}" + (f"   [wrong: {wrong}]" if wrong else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="four programs, short; plimsoll.Watch has to be right")
    parser.add_argument("--corpus", type=pathlib.Path, help="folder of other programs, all counted as held out")
    parser.add_argument("--half", choices=["tuning", "held-out"], help="only this half")
    parser.add_argument("--pairs", help="only these, separated by commas")
    parser.add_argument("--steps", type=int, default=PACE.steps, help="that each program makes")
    parser.add_argument("--no-peers", action="store_true", help="without memray and scalene")
    parser.add_argument("--jobs", type=int, default=3, help="programs at a time; they sleep most of the time")
    parser.add_argument("--directory", type=pathlib.Path, help="where programs leave their files; default: TMPDIR")
    options = parser.parse_args()
    if options.directory:
        os.environ["TMPDIR"] = str(options.directory.resolve())
    try:
        programs = corpus((options.corpus or HERE / "corpus").resolve())
    except (OSError, ValueError) as error:
        sys.exit(f"verdicts: {error}")
    halves = {one: "held_out" if options.corpus or one.held_out else "tuning" for one in programs}
    wanted = SMOKE_PAIRS if options.smoke else set(options.pairs.split(",")) if options.pairs else None
    programs = [one for one in programs if (wanted is None or one.pair in wanted)
                and options.half in (None, halves[one].replace("_", "-"))]
    skipped = {one.name: one.lacks for one in programs if one.lacks}
    programs = [one for one in programs if not one.lacks]
    if not programs:
        sys.exit("verdicts: no programs are left to play")
    tools = {} if options.smoke or options.no_peers else peers.tools()
    told, failed, doubts = {}, [], []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        plays = {one: pool.submit(said_of, one, options.steps, options.smoke, tools) for one in programs}
        for program, play in plays.items():
            try:
                told[program], doubt = play.result()
            except PlayError as error:
                failed.append(program.name)
                print(f"{program.name:26} FAILED {error}", flush=True)
                continue
            doubts += [doubt] if doubt else []
            print(line(program, told[program]), flush=True)
    for name, modules in skipped.items():
        print(f"{name:26} skipped: {', '.join(modules)} not installed")
    for doubt in doubts:
        print(f"truth in doubt: {doubt}")
    tables = {}
    for half in ("tuning", "held_out"):
        of_half = [one for one in told if halves[one] == half]
        watchers = dict.fromkeys(name for one in of_half for name in told[one])
        tables[half] = {name: score.table([(one, told[one][name]) for one in of_half]) for name in watchers}
        for name, scored in tables[half].items():
            print(f"{half:9} {name:16} " + "  ".join(f"{key} {value}" for key, value in scored.items()))
    ours = tables["held_out"].get(OURS) or tables["tuning"].get(OURS)
    if ours is None:
        sys.exit("verdicts: every program failed")
    right, of = map(int, ours["recall"].split("/"))
    met = score.met(ours)
    right_in_smoke = all(said[OURS].leaks == one.leaks for one, said in told.items())
    result = {
        "name": "verdicts", "value": round(right / of, 3) if of else None, "unit": "recall",
        "bar": score.BARS["recall"],
        "pass": not failed and not doubts and (right_in_smoke if options.smoke else all(met.values())),
        "peers": {"programs": len(told), "bars": score.BARS, "met": met, "versions": peers.versions(), "salt": SALT,
                  "skipped": skipped, "failed": failed, "doubts": doubts, **tables}}
    print(json.dumps(result))
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
