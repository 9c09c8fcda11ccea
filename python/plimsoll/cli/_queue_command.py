# SPDX-License-Identifier: Apache-2.0
"""`plimsoll queue`: commands that run one after another, each in its limit.

Threads: the calling one.   Memory: one job; `list` all of them.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import difflib
import json
import os
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .. import _core
from ..errors import CorruptError, NotFoundError
from ._queue import Job, Queue, health_of

_FAILED, _USAGE, _NOBODY = 1, 2, 4
_RESTARTS_MOST, _NUMBER_MOST, _SECONDS_MOST, _COMMAND_SHOWN = 1_000_000, 1 << 40, 3650 * 24 * 3600, 60
_ADD = """\
The queue is made where there is none. The command runs in the present folder, with the environment
of `plimsoll queue run`, and reads nothing from standard input. At most 1,000 jobs wait.

Examples:
  plimsoll queue add queue/ --memory-limit 24GiB -- python train.py
  plimsoll queue add queue/ --memory-limit 24GiB --timeout 12h --restarts 5 -- python train.py"""
_RUN = """\
One job after another, each as by `plimsoll run`, in a process that ends with it. Ctrl-C asks the
job to end and queues it again; a second one kills it. What was running when a runner was killed is
started again by the next one; a run in it goes on from its last commit. With --restarts a job that
died is started again after 1, 2, 4, ... at most 60 seconds, the next one running meanwhile; not
when it died twice with no commit in between. In the hours of --pause-hours the run of a running job
is paused as by `plimsoll pause`. Incident rules: docs/guide/jobs.md.
Exit status 1: a job failed.

Examples:
  plimsoll queue run queue/
  plimsoll queue run queue/ --wait --pause-hours 09:00-17:30 --rules incidents.toml"""
_ALL = """\
Examples:
  plimsoll queue add queue/ --memory-limit 24GiB -- python train.py
  plimsoll queue run queue/
  plimsoll queue list queue/             from another shell"""
_COMMANDS = ("add", "list", "cancel", "run")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Says what is wrong as the rest of the program does."""
        print(f"plimsoll: error: {message}\n  see `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(_USAGE)


def run(arguments: Sequence[str]) -> int:
    """Does what the words ask for; returns the exit status. Wrong usage ends with status 2."""
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    parser = _parser()
    if odd := [word for word in words if not _is_utf8(word)]:
        parser.error(f"{odd[0]!r} is not UTF-8, and a job is kept in UTF-8")
    if words and not words[0].startswith("-") and words[0] not in _COMMANDS:
        near = difflib.get_close_matches(words[0], _COMMANDS, 1)
        parser.error(f"unknown command '{words[0]}'; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(_COMMANDS)}"))
    try:
        typed = parser.parse_args(words[:at])
        typed.command = words[at + 1:]
        if (typed.work is _add) != bool(typed.command):
            typed.parser.error("COMMAND is required: words after --" if typed.work is _add else f"'{words[-1]}' is one word too many")
        return typed.work(typed)
    except (CorruptError, NotFoundError, OSError, ValueError) as error:
        print("plimsoll: error:", error.args[0] if isinstance(error, NotFoundError) else error, file=sys.stderr)
    except sqlite3.Error as error:
        print(f"plimsoll: error: {os.path.join(typed.DIR, 'queue.db')}: {error}\n"
              "  where it is damaged, move it away, and add the jobs again", file=sys.stderr)
    return _FAILED


def _parser() -> argparse.ArgumentParser:
    def command(name: str, about: str, work: Any, more: str) -> Any:
        parser = commands.add_parser(name, help=about, description=about, epilog=more, **form)
        parser.add_argument("DIR", help="Folder of the queue")
        parser.add_argument("--json", action="store_true", help="Result as one line of JSON instead of text")
        parser.set_defaults(work=work, parser=parser)
        return parser.add_argument

    form: dict[str, Any] = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
    whole = _Parser(prog="plimsoll queue", description="Run commands one after another, each in its limit", epilog=_ALL, **form)
    commands = whole.add_subparsers(metavar="|".join(_COMMANDS), required=True, parser_class=_Parser)
    add = command("add", "Add a command to a queue: COMMAND and its arguments, written after --", _add, _ADD)
    add("--memory-limit", required=True, type=_size, metavar="SIZE", help="Memory limit of the command and its processes: 24GiB, 6GB, 25%%")
    add("--timeout", type=seconds_from, default=0, metavar="TIME", help="Time after which a start of the command is ended: 90s, 15m, 2h, 1d")
    add("--restarts", type=_number_to(0, _RESTARTS_MOST), default=0, metavar="N",
        help="How often the command is started again when it was killed or failed [0]")
    command("list", "Show the jobs of a queue, and how they fare", _list, "Example:\n  plimsoll queue list queue/ --json")
    cancel = command("cancel", "Cancel a job; one that runs is asked to end", _cancel,
                     "Exit status 4: it was over already.\n\nExample:\n  plimsoll queue cancel queue/ 7")
    cancel("JOB", type=_number_to(1, _NUMBER_MOST), help="Number of the job")
    run = command("run", "Run the jobs of a queue", _run, _RUN)
    run("--wait", action="store_true", help="Wait for more jobs when all are done")
    run("--pause-hours", type=hours_from, action="append", default=[], metavar="HOURS",
        help="Hours of the day in which no job starts: 09:00-17:30; may be repeated")
    run("--rules", type=_rules, metavar="FILE", help="File of incident rules, .toml")
    run("--grace", type=seconds_from, default=30, metavar="TIME", help="Time from being asked to end to being killed: 90s, 15m [30s]")
    return whole


def _is_utf8(text: str) -> bool:
    return text == text.encode(errors="replace").decode()


def _size(text: str) -> str:
    try:
        _core.limits(text, "--memory-limit")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def seconds_from(text: str) -> int:
    """Reads "90", "90s", "15m", "2h" or "1d", from 1 second to ten years. Errors: ArgumentTypeError."""
    found = re.fullmatch(r"([0-9]{1,18})([smhd]?)", text)
    seconds = int(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]] if found else 0
    if not 1 <= seconds <= _SECONDS_MOST:
        raise argparse.ArgumentTypeError(f"'{text}' is no duration: write it as 90s, 15m, 2h or 1d")
    return seconds


def hours_from(text: str) -> tuple[int, int]:
    """Reads "09:00-17:30" as minutes of the day, up to the second. Errors: ArgumentTypeError."""
    found = re.fullmatch(r"([0-9]{1,2}):([0-9]{2})-([0-9]{1,2}):([0-9]{2})", text)
    hour, minute, to_hour, to_minute = map(int, found.groups() if found else (24, 0, 24, 0))
    if max(hour, to_hour) > 23 or max(minute, to_minute) > 59 or (hour, minute) == (to_hour, to_minute):
        raise argparse.ArgumentTypeError(f"'{text}' are no hours: write them as 09:00-17:30, in local time")
    return 60 * hour + minute, 60 * to_hour + to_minute


def _number_to(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch("[0-9]{1,15}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"Value {text} not in range {least} to {most}")
        return int(text)
    return number


def _rules(path: str) -> Any:
    from ._queue_rules import read_rules

    try:
        return read_rules(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add(typed: argparse.Namespace) -> int:
    folder = os.getcwd()
    if not _is_utf8(folder):
        typed.parser.error(f"the present folder, {folder!r}, is not UTF-8: rename it, as a job is kept in UTF-8")
    number = Queue(typed.DIR, make=True).add({"command": typed.command, "directory": folder, "memory_limit": typed.memory_limit,
                                              "timeout_seconds": typed.timeout, "restarts_most": typed.restarts})
    print(json.dumps({"id": number}) if typed.json else f"job {number}")
    return 0


def _list(typed: argparse.Namespace) -> int:
    queue = Queue(typed.DIR)
    jobs, status = [], 0
    for number in queue.numbers():
        try:
            job = queue.read(number)
        except NotFoundError:
            continue  # Removed meanwhile, as others came.
        except CorruptError as error:
            print(f"plimsoll: error: {error}", file=sys.stderr)
            status = _FAILED
            continue
        health, reasons = health_of(job)
        jobs.append({**job, "log": queue.log_of(number), "health": health, "health_reasons": reasons})
    mean = sum(job["health"] for job in jobs) // len(jobs) if jobs else 100
    if typed.json:
        print(json.dumps({"runs": queue.runs(), "health": mean, "jobs": jobs}, ensure_ascii=False))
        return status
    idle = "" if queue.runs() else f"; nobody runs it: plimsoll queue run {typed.DIR}"
    print(f"{typed.DIR}: {len(jobs)} {'job' if len(jobs) == 1 else 'jobs'}, health {mean}{idle}")
    for job in jobs:
        print("\n       ".join(_lines_of(job)))
    return status


def _lines_of(job: Job) -> list[str]:
    command = " ".join(job["command"])
    shown = command if len(command) <= _COMMAND_SHOWN else f"{command[:_COMMAND_SHOWN]} ..."
    lines = [f"{job['id']:>5}  {job['state']:<9}  health {job['health']:>3}  {shown}"]
    if job["state"] == "running":
        lines.append(f"for {datetime.timedelta(seconds=int(time.time()) - job['started'])}" + (f", {job['progress']}" if job["progress"] else ""))
    elif job["why"]:
        lines.append(job["why"])
    found = collections.Counter(f"{one['rule']} ({one['evidence']})" for one in job["incidents"])
    reasons = [why for why in job["health_reasons"] if not why.startswith("incident: ")]
    if found:
        reasons.append("an incident" if len(job["incidents"]) == 1 else "incidents")
    if reasons:
        lines.append("lost health: " + "; ".join(reasons))
    lines += [f"incident: {told}" + (f", {times} times" if times > 1 else "") for told, times in found.items()]
    return lines + [f"would help: {advice}" for advice in job["advice"]]


def _cancel(typed: argparse.Namespace) -> int:
    cancelled = Queue(typed.DIR).cancel(typed.JOB)
    print(json.dumps({"id": typed.JOB, "cancelled": cancelled}) if typed.json
          else f"job {typed.JOB}: {'cancelled' if cancelled else 'it was over already'}")
    return 0 if cancelled else _NOBODY


def _run(typed: argparse.Namespace) -> int:
    from ._queue_runner import Runner
    from ._queue_rules import USUAL

    def tell(text: str) -> None:
        with contextlib.suppress(OSError):  # Nobody listens: the jobs run all the same.
            print(f"plimsoll queue: {text}", file=sys.stderr, flush=True)

    report = Runner(Queue(typed.DIR), wait=typed.wait, pause=typed.pause_hours, rules=typed.rules or USUAL, grace=typed.grace, tell=tell).run()
    print(json.dumps(report) if typed.json else "{done} done, {failed} failed, {cancelled} cancelled, {left} left".format(**report))
    return _FAILED if report["failed"] else 0
