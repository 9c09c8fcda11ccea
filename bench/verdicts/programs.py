# SPDX-License-Identifier: Apache-2.0
"""The programs of a corpus, and what is true of them.

A corpus is a folder of Python programs named PAIR_leak….py and PAIR_fine….py. Each has a block of TOML in its
comments, between `# /// truth` and `# ///`:

    leaks = true                     # Or false, and no more keys but `needs`.
    owners = ["native", "tensors"]   # Any of which is right.
    bytes_per_step = 262144          # What the program keeps, where that is known exactly; else left out.
    phase = "eval"                   # In which it leaks, where the program has phases.
    holder = "losses|Meter"          # A regular expression that the text about the holder has to match; else left out.
    needs = ["PIL"]                  # Modules without which the program is left out.

Lines that end with `# site` (and why, after a colon) are where what leaks is allocated; any of them is right.
A program makes its steps in `for step in steps():`, and names phases by `with phase("eval"):` (watched.py).
"""
import dataclasses
import hashlib
import importlib.util
import pathlib
import re
import tomllib

SALT = "plimsoll verdicts 1"
_NAME = re.compile(r"(\w+?)_(leak|fine)(?:_\w+)?")
_BLOCK = re.compile(r"^# /// truth\n((?:# .*\n)+?)# ///$", re.M)
_KEYS = {"leaks", "owners", "bytes_per_step", "phase", "holder", "needs"}


@dataclasses.dataclass(frozen=True)
class Program:
    path: pathlib.Path
    pair: str
    leaks: bool
    owners: tuple[str, ...] = ()
    bytes_per_step: float | None = None
    phase: str = ""
    holder: str = ""
    needs: tuple[str, ...] = ()
    sites: tuple[int, ...] = ()  # Lines.

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def held_out(self) -> bool:
        """Of the half that no threshold was chosen on; a pair is in one half, by its name and SALT alone."""
        return hashlib.sha256(f"{SALT}/{self.pair}".encode()).digest()[0] % 2 == 1

    @property
    def lacks(self) -> list[str]:
        """Modules it needs that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def read(path: pathlib.Path) -> Program:
    """Errors: ValueError, which names the file, where the block, a key or the name is not as it should be."""
    text = path.read_text(encoding="utf-8")
    name, block = _NAME.fullmatch(path.stem), _BLOCK.search(text)
    if not name or not block:
        raise ValueError(f"{path}: no program of a corpus: PAIR_leak.py or PAIR_fine.py with a `# /// truth` block")
    try:
        truth = tomllib.loads(re.sub(r"^# ", "", block.group(1), flags=re.M))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: its truth block: {error}") from None
    if unknown := truth.keys() - _KEYS:
        raise ValueError(f"{path}: its truth block has unknown keys {sorted(unknown)}; there are {sorted(_KEYS)}")
    if truth.get("leaks") is not (name.group(2) == "leak"):
        raise ValueError(f"{path}: its name says {name.group(2)}, its truth block leaks = {truth.get('leaks')}")
    if truth["leaks"] and not truth.get("owners"):
        raise ValueError(f"{path}: a leak has owners")
    marked = (number for number, line in enumerate(text.splitlines(), 1) if re.search(r"# site\b", line))
    lists = {key: tuple(truth.get(key, ())) for key in ("owners", "needs")}
    return Program(path, name.group(1), sites=tuple(marked), **{**truth, **lists})


def corpus(folder: pathlib.Path) -> list[Program]:
    """By name. Errors: ValueError where a program is not as it should be, or there is none."""
    programs = [read(path) for path in sorted(folder.glob("*.py"))]
    if not programs:
        raise ValueError(f"{folder}: no programs (*.py) are there")
    return programs
