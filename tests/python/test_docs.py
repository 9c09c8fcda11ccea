# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ name is there: Python names, commands with their options, functions in files.

tools/tidy.py has the checks that need neither the package nor the program.
"""
import contextlib
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Decisions are history: they name what was there when they were made.
PAGES = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "decisions" not in path.parts)]


CONSOLE = "import sys; from plimsoll.cli._program import main; sys.exit(main())"  # It has the recipes in Python.


def texts():
    return [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in PAGES]


def test_r32_every_python_name_in_the_docs_exists():
    plimsoll = importlib.import_module("plimsoll")
    missing, seen = [], 0
    for page, text in texts():
        for path in re.findall(r"(?<![\w/.-])plimsoll\.([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)", text):
            if page.startswith("docs/formats/"):  # Keys of files look the same.
                continue
            seen += 1
            there = plimsoll
            for name in path.split("."):
                if isinstance(there, type(plimsoll)) and not hasattr(there, name):
                    with contextlib.suppress(ImportError):
                        importlib.import_module(f"{there.__name__}.{name}")
                there = getattr(there, name, None)
                if there is None:
                    missing.append(f"{page}: plimsoll.{path}")
                    break
    assert seen > 15 and not missing, missing


def commands() -> dict[tuple[str, ...], set[str]]:
    """Commands of the program in the docs, with the options named beside them."""
    found: dict[tuple[str, ...], set[str]] = {}
    for page, text in texts():
        lines = [line for block in re.findall(r"```(?:sh)?\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
        for line in lines + re.findall(r"`(plimsoll [^`]+)`", text.replace("\n", " ")):
            match = re.match(r"plimsoll((?: [a-z][a-z-]*)+)(.*)", line)
            if match and ".." not in line:
                words = tuple(match.group(1).split())
                rest = match.group(2).split(" -- ")[0].split("#")[0].split("  ")[0]
                found.setdefault(words, set()).update(re.findall(r"(--[a-z][a-z-]+)", rest))
    return found


def test_r32_every_command_and_option_in_the_docs_exists(program):
    found = commands()
    assert len(found) > 15
    wrong = []
    for words, options in found.items():
        words = words[:2] if words[0] in ("train", "plan", "import", "store", "synth", "queue") else words[:1]
        start = [sys.executable, "-c", CONSOLE] if {"chat", "vision"} & set(words) else [program]
        done = subprocess.run([*start, *words, "--help"], text=True, capture_output=True, timeout=60, check=False)
        if done.returncode != 0:
            wrong.append(f"plimsoll {' '.join(words)}: {done.stderr.strip()}")
        wrong += [f"plimsoll {' '.join(words)} {option}" for option in sorted(options)
                  if not re.search(rf"{option}\b", done.stdout)]
    assert not wrong, wrong


@pytest.mark.parametrize("page", ["docs/ARCHITECTURE.md", "docs/HACKING.md"])
def test_r32_functions_are_in_the_files_named_beside_them(page):
    text = (ROOT / page).read_text(encoding="utf-8").replace("\n", " ")
    wrong, seen = [], 0
    for name, path in re.findall(r"`((?:plimsoll\.)?[A-Za-z_][\w:.]*)`(?: \w+)? \(`((?:src|include|python|cli)/[^`]+)`", text):
        seen += 1
        last = re.split(r"::|\.", name)[-1]
        file = ROOT / path
        sources = [file] if file.suffix else list(file.parent.glob(file.name + ".*"))
        # A method may be declared beside the file that defines its class's parts.
        sources += [near for source in sources[:1] for near in source.parent.glob(source.stem.split("_")[0] + "*")]
        if not any(re.search(rf"\b{last}\b", source.read_text(encoding="utf-8")) for source in sources):
            wrong.append(f"{name} is not in {path}")
    assert not wrong, wrong
    assert seen > (10 if "ARCH" in page else 0)


def test_r24_a_bound_is_called_a_margin_and_not_the_truth():
    pages = [*texts(), *((path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
                         for folder in ("src", "include", "python") for path in sorted((ROOT / folder).rglob("*"))
                         if path.suffix in (".h", ".md", ".py", ".pyi"))]
    plain = [(page, re.sub(r"[\s/*#]+", " ", text).lower()) for page, text in pages]
    assert any("an eighth of what is not static" in text for _, text in plain)
    assert not [page for page, text in plain if re.search(r"never (be )?(below|under) the truth", text)]
