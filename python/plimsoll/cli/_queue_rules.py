# SPDX-License-Identifier: Apache-2.0
"""Incident rules: which end of a job is an incident, by evidence, and what follows from it (docs/guide/jobs.md).

Patterns are of whole words, so that OOM is not found in "classroom". A kill for memory leaves no line: the kernel's counters tell of it.

Threads: pure functions.   Memory: RULES_MOST rules.
"""
from __future__ import annotations

import importlib
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

RULES_MOST, PATTERN_MOST, FILE_BYTES_MOST = 64, 256, 256 << 10
THEN = ("note", "retry", "fail")  # It is told; another start, within --restarts, whatever the status; no other start.
# As `plimsoll run --json` says how a command ended, and what the runner of a queue adds.
EVENTS = ("done", "killed_for_limit", "killed_in_cgroup", "stopped", "machine_full", "killed", "timeout")
_TABLE = re.compile(r"\s*\[\[\s*rule\s*\]\]")


class Rule(NamedTuple):
    """One of pattern, status and event has a value."""

    name: str
    then: str = "note"
    pattern: re.Pattern[bytes] | None = None
    status: Sequence[int] = ()
    event: Sequence[str] = ()


# Found whatever a job prints.
USUAL = [Rule("killed at its memory limit", event=("killed_for_limit", "killed_in_cgroup", "stopped")),
         Rule("killed because the machine was full", event=("machine_full",)), Rule("ran out of time", "fail", event=("timeout",))]


def read_rules(path: str) -> list[Rule]:
    """Rules of a file, and the usual ones behind them. Errors: ValueError with file and line; OSError."""
    with pathlib.Path(path).open("rb") as file:
        text = file.read(FILE_BYTES_MOST + 1).decode(errors="replace")
    if len(text) > FILE_BYTES_MOST:
        raise ValueError(f"{path}:1: more than {FILE_BYTES_MOST >> 10} KiB")
    return parse_rules(path, text) + USUAL


def parse_rules(name: str, text: str) -> list[Rule]:
    """Rules in TOML. name: of the file, for errors. Errors: as read_rules()."""
    lines = text.splitlines()
    rules, at = [], 1
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        found = toml.loads(text)
        tables = found.pop("rule", [])
        if found or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise ValueError("rules are tables [[rule]], and nothing else is there")
        if len(tables) > RULES_MOST:
            raise ValueError(f"{len(tables)} rules, and there may be {RULES_MOST}")
        for at, table in zip([number for number, line in enumerate(lines, 1) if _TABLE.match(line)] + [1] * len(tables), tables):
            rules.append(_rule(**{"name": "", "then": "note", "pattern": "", "status": (), "event": (), **table}))
    except ImportError:
        raise ValueError(f"{name}: Python before 3.11 reads no TOML\n  `pip install tomli`") from None
    except (ValueError, RecursionError) as error:
        told = re.search(r"at line (\d+)", str(error))
        raise ValueError(f"{name}:{told[1] if told else at}: {error}") from None
    return rules


def _rule(name: Any, then: Any, pattern: Any, status: Any, event: Any, **others: Any) -> Rule:
    if others:
        raise ValueError(f"no key of a rule: {min(others)}; there are name, pattern, status, event, then")
    for key, value in (("name", name), ("pattern", pattern), ("then", then)):
        if not isinstance(value, str):
            raise ValueError(f"{key} is a text in quotes")
        if len(value.encode()) > PATTERN_MOST:
            raise ValueError(f"{key} has at most {PATTERN_MOST} bytes")
    status, event = (value if isinstance(value, (list, tuple)) else [value] for value in (status, event))
    if not all(type(one) is int and 0 <= one <= 255 for one in status):
        raise ValueError("status is a number from 0 to 255, or a list of them")
    if unknown := [one for one in event if one not in EVENTS]:
        raise ValueError(f'no event: "{unknown[0]}"; there are {", ".join(EVENTS)}')
    if then not in THEN:
        raise ValueError(f'then is {", ".join(THEN)}, not "{then}"')
    if not name:
        raise ValueError("a rule needs a name")
    if bool(pattern) + bool(status) + bool(event) != 1:
        raise ValueError("a rule has one of pattern, status and event")
    return Rule(name, then, _words(pattern) if pattern else None, status, event)


def _words(pattern: str) -> re.Pattern[bytes]:
    try:
        if "[:" in pattern:
            raise ValueError("classes of characters are written as \\d, \\s and \\w")
        re.compile(pattern)  # Alone: its brackets must not close those around it.
        return re.compile(rb"(?:^|[^A-Za-z0-9_])(?:" + pattern.encode() + rb")(?:$|[^A-Za-z0-9_])")
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f'pattern "{pattern}": {error}') from None


def find_incident(rules: Sequence[Rule], status: int, event: str, lines: Sequence[str]) -> dict[str, str] | None:
    """Returns the first rule that matches the end of a job, or its output. lines: for each rule, the line that matched; "" for none."""
    for at, rule in enumerate(rules):
        evidence = f"status {status}" if status in rule.status else f"event {event}" if event in rule.event else "".join(lines[at:at + 1])
        if evidence:
            return {"rule": rule.name, "evidence": evidence, "then": rule.then}
    return None
