# SPDX-License-Identifier: Apache-2.0
"""`plimsoll import chat`: the command line of import_chat().

Threads: the calling one.   Memory: that of import_chat().
"""
from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from ..data.importers._chat_import import import_chat
from ._import_command import add_files, add_ignored, add_parts, add_rest, parser_of, run_import


def run(arguments: Sequence[str]) -> int:
    """Imports chats, and prints the result. Returns the exit status. Wrong usage ends the process with status 2."""
    return run_import(_parser(), import_chat, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("chat", "Token set of chats in JSON, with the ids of a Hugging Face tokenizer",
                       "plimsoll import chat chats.jsonl --tokenizer models/tiny --out chats.tokens --max-length 2048\n"
                       "  plimsoll import chat *.jsonl --tokenizer models/tiny --out chats.tokens --part 3/8\n"
                       "  plimsoll import chat *.jsonl --tokenizer models/tiny --out chats.tokens --join 8")
    add_files(parser)
    add = parser.add_argument
    add("--tokenizer", required=True, metavar="DIR", help="Folder of the tokenizer and its chat template")
    add("--out", required=True, metavar="FILE", help="Token set to make, or made before")
    add("--template", type=_template, metavar="FILE|NAME",
        help="Chat template: a Jinja file, or the name of one of the tokenizer's [its default, or tool_use]")
    add("--template-kwargs", type=_object, metavar="JSON",
        help="Variables for the template: '{\"enable_thinking\": false}'")
    add("--train", choices=("assistant", "last", "all"), default="assistant",
        help="Turns that are trained on [assistant]")
    add("--max-length", type=int, default=0, help="Number of tokens at which rows are cut [no bound]")
    add("--errors-max", type=int, default=0, help="Number of lines that may be left out for an error [0]")
    add("--date", help="Day for templates that ask for it: 2026-01-31")
    add("--line-bytes-max", default="100MiB", metavar="SIZE", help="Longest line [100MiB]")
    add("--text-bytes-max", default="2MiB", metavar="SIZE", help="Longest message [2MiB]")
    add("--encoder", choices=("auto", "tokenizers", "gigatoken"), default="auto",
        help="Library that encodes: gigatoken gives the same ids, faster [auto: gigatoken where it is installed]")
    add_ignored(parser)
    add_parts(parser)
    add_rest(parser)
    return parser


def _template(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        if re.fullmatch(r"\w+", path):
            return path  # The name of one of the tokenizer's.
        raise argparse.ArgumentTypeError(f"{path}: there is no such file") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None


def _object(text: str) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: no JSON: {error}") from None
    if not isinstance(said, dict):
        raise argparse.ArgumentTypeError(f"{text}: no JSON object")
    return said
