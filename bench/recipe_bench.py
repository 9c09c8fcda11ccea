# SPDX-License-Identifier: Apache-2.0
"""What benchmarks that run the program `plimsoll` on data of their own share: the options of the
program and of the working folder, and the last line.
"""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent


def add_options(parser: argparse.ArgumentParser, folder: str) -> None:
    """Adds --smoke, --program, --work (build/FOLDER) and --keep."""
    parser.add_argument("--smoke", action="store_true", help="seconds; only the answer counts")
    parser.add_argument("--program", type=pathlib.Path, default=pathlib.Path(
        os.environ.get("PLIMSOLL_PROGRAM", ROOT / "build/release/bin/plimsoll")))
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build" / folder,
                        help="folder for data and runs, made anew")
    parser.add_argument("--keep", action="store_true", help="keep that folder")


def name() -> str:
    """The benchmark's own: that of its folder."""
    return pathlib.Path(sys.argv[0]).resolve().parent.name


def call(command: list, environment: dict | None = None) -> str:
    """What a command prints; ends the benchmark when it fails."""
    done = subprocess.run([str(part) for part in command], text=True, env=environment,
                          capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{name()}: {' '.join(map(str, command))}: status {done.returncode}\n"
                 f"{done.stderr[-2000:]}")
    return done.stdout


def events(run_folder: pathlib.Path) -> list[dict]:
    """The lines of a run's events.jsonl."""
    return [json.loads(line) for line in (run_folder / "events.jsonl").read_text().splitlines()]


def run(options: argparse.Namespace, benchmark: Callable[[], dict]) -> int:
    """Runs it in an empty options.work and prints its result; returns the exit status."""
    if not options.program.exists():
        sys.exit(f"{name()}: {options.program} is not there: run make build, or set "
                 "PLIMSOLL_PROGRAM")
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    try:
        result = benchmark()
    finally:
        if not options.keep:
            shutil.rmtree(options.work, ignore_errors=True)
    print(json.dumps(result))
    return 0 if result["pass"] else 1
