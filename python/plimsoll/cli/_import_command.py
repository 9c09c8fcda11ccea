# SPDX-License-Identifier: Apache-2.0
"""Parts that the command lines of import_chat(), import_vision() and import_pairs() share.

Threads: the calling one.   Memory: that of the import.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import _core
from ..data.importers._parts import part_from, part_path
from ..memory._memory import Governor

_FAILED, _USAGE = 1, 2


def parser_of(name: str, description: str, example: str) -> argparse.ArgumentParser:
    """Makes a parser without options. The last options come from add_rest()."""
    return argparse.ArgumentParser(
        prog=f"plimsoll import {name}", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description=description, epilog=f"Example:\n  {example}")


def add_files(parser: argparse.ArgumentParser) -> None:
    """Adds the argument FILES."""
    parser.add_argument("FILES", nargs="+", help="Rows: JSON (lines, an array), CSV, TSV, Parquet, Arrow, a folder of datasets', "
                        "or an archive of WebDataset; plain, or packed by gzip, zstd, bzip2 or xz")


def add_ignored(parser: argparse.ArgumentParser) -> None:
    """Adds the option --ignore-keys."""
    parser.add_argument("--ignore-keys", type=lambda text: text.split(","), action="extend", default=[], metavar="NAME,…",
                        help="Keys of rows to read as if they were not there: topic, or messages.topic of a message")


def add_parts(parser: argparse.ArgumentParser) -> None:
    """Adds the options --part and --join."""
    add = parser.add_mutually_exclusive_group().add_argument
    add("--part", type=part_from, metavar="K/N",
        help="Part of the files to import, into OUT.part-K-of-N, for tasks that share the work; a file is not divided")
    add("--join", type=int, default=0, metavar="N",
        help="Number of parts to make OUT of, with the bytes of an import of all files; the parts stay")


def add_rest(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every import command shares."""
    add = parser.add_argument
    add("--rebuild", action="store_true", help="Set is made anew even when nothing has changed")
    add("--memory-limit", default="", metavar="SIZE", help="Memory limit of the process: 768MiB, 6GB, 25%%")
    add("--json", action="store_true", help="Result as one line of JSON instead of text")
    add("--quiet", action="store_true", help="Progress is not shown")


def run_import(parser: argparse.ArgumentParser, make: Callable[..., dict[str, Any]], arguments: Sequence[str],
               source: str = "FILES") -> int:
    """Imports, and prints the result. Returns the exit status. Wrong usage ends the process with status 2.

    source: name of make()'s first argument.
    """
    typed = parser.parse_args(arguments)
    part = getattr(typed, "part", None)
    out = typed.out if part is None else part_path(typed.out, part)
    options = {name: value for name, value in vars(typed).items()
               if name not in (source, "out", "memory_limit", "json", "quiet")}
    try:
        governor = Governor(typed.memory_limit)
    except ValueError as error:  # A size that cannot be parsed.
        print("plimsoll: error:", str(error).replace("memory_limit", "--memory-limit", 1), file=sys.stderr)
        return _USAGE
    except (OSError, MemoryError, RuntimeError) as error:
        print(f"plimsoll: error: {error}", file=sys.stderr)
        return _FAILED
    try:
        with governor:
            made = make(getattr(typed, source), typed.out, governor=governor,
                        progress=None if typed.quiet else _core.WorkMeter("import").update, **options)
    except KeyboardInterrupt:
        print(f"plimsoll: stopped; the same command goes on with {out}", file=sys.stderr)
        return _FAILED
    except (ValueError, KeyError, OSError, MemoryError, RuntimeError, ImportError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"plimsoll: error: {text}", file=sys.stderr)
        return _FAILED
    if typed.json:
        print(json.dumps(made))
        return 0
    status = _core.run_program([b"plimsoll", b"info", str(out).encode(errors="surrogateescape")])
    for name, one in made.get("odd", {}).items():  # From import_pairs(): a feature store does not print it.
        print(f"  odd       {one['count']:,} {name} ({', '.join(one['first'])})")
    for name, (rows, _) in made.get("keys", {}).get("counted", {}).items():
        print(f"  not used  {name} in {rows:,} rows")
    for number, text in enumerate(made["first_rows"]):
        print(f"  row {number}, what is trained on between ⟦ and ⟧:\n    " + text.replace("\n", "\n    "))
    if made["reused"]:
        print("  (as it was: neither inputs nor options have changed)")
    return status
