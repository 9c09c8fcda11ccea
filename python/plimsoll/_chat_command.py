# SPDX-License-Identifier: Apache-2.0
"""`plimsoll import chat`: the command line of import_chat().

Threads: the calling one.   Memory: that of import_chat().
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from . import _core
from ._chat_import import import_chat
from ._memory import Governor

_FAILED = 1


def run(arguments: Sequence[str]) -> int:
    """Imports, and prints what was made; returns the exit status. Wrong usage ends with status 2."""
    typed = _parser().parse_args(arguments)
    options = {name: value for name, value in vars(typed).items()
               if name not in ("FILES", "out", "memory_limit", "json", "quiet")}
    try:
        with Governor(typed.memory_limit) as governor:
            made = import_chat(typed.FILES, typed.out, governor=governor,
                               progress=None if typed.quiet else _core.WorkMeter("import").update, **options)
    except KeyboardInterrupt:
        print(f"plimsoll: stopped; the same command goes on with {typed.out}", file=sys.stderr)
        return _FAILED
    except (ValueError, KeyError, OSError, MemoryError, RuntimeError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"plimsoll: error: {text}", file=sys.stderr)
        return _FAILED
    if typed.json:
        print(json.dumps(made))
        return 0
    status = _core.run_program([b"plimsoll", b"info", str(typed.out).encode(errors="surrogateescape")])
    if made["reused"]:
        print("  (as it was: neither inputs nor options have changed)")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plimsoll import chat", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Token set of chats in JSON, with the ids of a Hugging Face tokenizer",
        epilog="Example:\n  plimsoll import chat chats.jsonl --tokenizer models/tiny --out chats.tokens "
               "--max-length 2048")
    parser.add_argument("FILES", nargs="+", help="Chats: JSON lines or an array, plain, .gz or .zst")
    add = parser.add_argument
    add("--tokenizer", required=True, metavar="DIR", help="Folder of the tokenizer and its chat template")
    add("--out", required=True, metavar="FILE", help="Token set to make, or made before")
    add("--template", type=_template, metavar="FILE", help="Chat template, a Jinja file [the tokenizer's]")
    add("--train", choices=("assistant", "last", "all"), default="assistant",
        help="Turns that are trained on [assistant]")
    add("--max-length", type=int, default=0, help="Number of tokens at which rows are cut [no bound]")
    add("--errors-max", type=int, default=0, help="Number of lines that may be left out for an error [0]")
    add("--date", help="Day for templates that ask for it: 2026-01-31")
    add("--line-bytes-max", default="100MiB", metavar="SIZE", help="Longest line [100MiB]")
    add("--text-bytes-max", default="2MiB", metavar="SIZE", help="Longest message [2MiB]")
    add("--encoder", choices=("auto", "tokenizers", "gigatoken"), default="auto",
        help="Library that encodes: gigatoken gives the same ids, faster [auto: gigatoken where it is installed]")
    add("--rebuild", action="store_true", help="Token set is made anew even when nothing has changed")
    add("--memory-limit", default="", metavar="SIZE", help="Memory limit of the process: 768MiB, 6GB, 25%%")
    add("--json", action="store_true", help="Result as one line of JSON instead of text")
    add("--quiet", action="store_true", help="Progress is not shown")
    return parser


def _template(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
