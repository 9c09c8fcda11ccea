# SPDX-License-Identifier: Apache-2.0
"""How often what was said of programs is right."""
import dataclasses
import pathlib
import re
import statistics

from plays import Said
from programs import Program

BARS = {"recall": 0.95, "false_alarms": 0.05, "slope_error": 0.02, "site": 0.9, "holder": 0.8}
AT_MOST = {"false_alarms", "slope_error"}


@dataclasses.dataclass
class Share:
    """So many of so many."""

    right: int = 0
    of: int = 0

    def add(self, right: bool) -> None:
        self.right += right
        self.of += 1

    @property
    def value(self) -> float | None:
        return self.right / self.of if self.of else None

    def __str__(self) -> str:
        return f"{self.right}/{self.of}"


def site_right(program: Program, said: Said) -> bool:
    """Whether the first site named is a line that the program marks."""
    if not said.sites:
        return False
    file, line = said.sites[0]
    return pathlib.Path(file).name == program.path.name and line in program.sites


def owner_right(program: Program, said: Said) -> bool:
    """From outside, what a process has for itself is one owner, its heap."""
    return said.owner in program.owners or said.owner == "heap" and not {"shared", "children"} & set(program.owners)


def slope_error(program: Program, said: Said) -> float:
    return abs(said.bytes_per_step / program.bytes_per_step - 1)


def table(said_of: list[tuple[Program, Said]]) -> dict:
    """Shares as "18/20". Of leaks: `recall` found; `owner`, `phase`, `site`, `holder` right, of all leaks that have
    one, those not found among them; `slope_error` median of those found. `false_alarms`: of programs without a leak."""
    shares = {name: Share() for name in ("recall", "false_alarms", "owner", "phase", "site", "holder")}
    errors = []
    for program, said in said_of:
        if not program.leaks:
            shares["false_alarms"].add(said.leaks)
            continue
        shares["recall"].add(said.leaks)
        shares["owner"].add(said.leaks and owner_right(program, said))
        if program.phase:
            shares["phase"].add(said.leaks and said.phase == program.phase)
        if program.sites:
            shares["site"].add(said.leaks and site_right(program, said))
        if program.holder:
            shares["holder"].add(said.leaks and re.search(program.holder, said.holder) is not None)
        if program.bytes_per_step and said.leaks and said.bytes_per_step:
            errors.append(slope_error(program, said))
    return {**{name: str(share) for name, share in shares.items()},
            "slope_error": round(statistics.median(errors), 4) if errors else None}


def met(scored: dict) -> dict[str, bool]:
    """Which of BARS a table meets; a share of nothing does."""
    def value(name: str) -> float:
        found = scored[name]
        if isinstance(found, str):
            right, of = map(int, found.split("/"))
            found = right / of if of else None
        return found if found is not None else (0.0 if name in AT_MOST else 1.0)
    return {name: value(name) <= bar if name in AT_MOST else value(name) >= bar for name, bar in BARS.items()}


def doubted(program: Program, anonymous: list[int]) -> str:
    """What speaks against the truth block: the process does not grow as it says. "" where nothing does, or nothing can
    be said: of children and shared memory. More may become resident than is kept, or less while what was freed
    before is used again; not by much. Looked at are the first steps after warm-up and the last: in between a watcher
    that searches holds memory of its own."""
    if not program.bytes_per_step or {"children", "shared"} & set(program.owners):
        return ""
    warm = len(anonymous) // 4
    grown = (min(anonymous[-10:]) - min(anonymous[warm:warm + 10])) / (len(anonymous) - warm - 10)
    return "" if 0.6 <= grown / program.bytes_per_step <= 2 else \
        f"{program.name}: grows by {grown:.0f} B a step, not by {program.bytes_per_step}"
