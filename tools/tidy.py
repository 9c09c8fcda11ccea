#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the house rules that a machine can check; a ctest (tidy.rules).

    tools/tidy.py             checks the whole tree; prints FILE:LINE: what is wrong
    tools/tidy.py --selftest  plants one violation of each rule and checks that it is found

Rules: layering of includes, torch headers only where allowed, file and line length, SPDX lines,
header pragma, banned names, sources owned by a CMakeLists.txt, folder READMEs, empty error
messages, clang-format (when clang-format-14 is there), and paths named in the documentation.
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

# A folder of src/ may include these folders; everything may include include/plimsoll.
LAYERS = {
    "base": {"base"},
    "os": {"os", "base"},
    "memory": {"memory", "base", "os"},
    "store": {"store", "base", "os", "memory"},
    "data": {"data", "base", "os", "memory"},
    "plan": {"plan", "base", "memory"},
    "watch": {"watch", "base", "os", "memory"},
    "torch": {"torch", "base", "os", "memory", "store", "data", "plan", "watch"},
    "recipes": {"recipes", "torch", "base", "os", "memory", "store", "data", "plan", "watch"},
}
TORCH_FOLDERS = {"src/torch", "src/recipes", "python", "bench", "tests"}
TORCH_HEADER = re.compile(r'#include [<"](torch|ATen|c10|caffe2)/')
INCLUDE = re.compile(r'#include "([^"]+)"')
BANNED = re.compile(r"(?:^|[_A-Z/.])(util|utils|helper|helpers|common|manager|misc)(?:[_.]|$)", re.I)
BANNED_TYPE = re.compile(r"\b(?:class|struct)\s+(?:\[\[\w+\]\]\s+)?\w*(Util|Helper|Common|Manager|Misc)\w*\b")
# The compatibility classes keep the original's names.
BANNED_EXEMPT = re.compile(r"compat|TrainableEmbeddingManager|FeatureManager")
EMPTY_MESSAGE = re.compile(r'(?:throw \w[\w:]*|fail|make_error)\((?:[^;"]*[^=;" ] ?)?""\s*\)')
DOC_PATH = re.compile(r"`((?:src|include|docs|tools|tests|bench|cmake|python|cli|data)/[\w./-]+)`")
LINE_MAX, HEADER_MAX, SOURCE_MAX = 100, 300, 800


def files(root: pathlib.Path) -> list[pathlib.Path]:
    """Tracked files and new ones that git does not ignore; outside git, every file."""
    listing = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    if listing.returncode == 0 and listing.stdout:
        found = [root / name for name in listing.stdout.splitlines()]
    else:
        found = [path for path in root.rglob("*") if path.is_file()]
    return sorted(path for path in found if path.is_file())


def check_includes(relative: str, lines: list[str]):
    folder = relative.split("/")[1] if relative.startswith("src/") else None
    torch_allowed = any(relative.startswith(name + "/") for name in TORCH_FOLDERS) \
        or relative == "include/plimsoll/torch.h"
    for number, line in enumerate(lines, 1):
        if TORCH_HEADER.match(line) and not torch_allowed:
            yield number, "a torch header outside src/torch, src/recipes and the bindings"
        match = INCLUDE.match(line)
        if not match:
            continue
        target = match.group(1)
        if relative.startswith("include/") and not target.startswith("plimsoll/"):
            yield number, f'a public header includes "{target}", which is not public'
        top = target.split("/")[0]
        if folder in LAYERS and top in LAYERS and top not in LAYERS[folder]:
            yield number, f"src/{folder} may not include src/{top} (layers: {sorted(LAYERS[folder])})"
        if relative.startswith("cli/") and top in LAYERS and top not in ("recipes", "watch"):
            yield number, f"cli may include only include/, cli/, recipes/ and watch/, not {top}/"


def check_source(relative: str, lines: list[str]):
    header = relative.endswith(".h")
    limit = HEADER_MAX if header else SOURCE_MAX
    if len(lines) > limit:
        yield limit, f"{len(lines)} lines, the limit is {limit}: split the file"
    if not lines or "SPDX-License-Identifier: Apache-2.0" not in lines[0]:
        yield 1, "the first line must be // SPDX-License-Identifier: Apache-2.0"
    if header and "#pragma once" not in lines:
        yield 1, "a header needs #pragma once"
    if BANNED.search(relative) and not BANNED_EXEMPT.search(relative):
        yield 1, "banned file name (util, helper, common, manager, misc): name the concept"
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_MAX:
            yield number, f"{len(line)} columns, the limit is {LINE_MAX}"
        if BANNED_TYPE.search(line) and not BANNED_EXEMPT.search(line):
            yield number, "banned type name (Util, Helper, Common, Manager, Misc)"
        if re.search(r"//\s*TODO(?!\(#\d+\))", line):
            yield number, "a TODO needs an issue number: TODO(#12)"
    for match in EMPTY_MESSAGE.finditer("\n".join(lines)):
        yield "\n".join(lines).count("\n", 0, match.start()) + 1, "an error with an empty message"
    yield from check_includes(relative, lines)


def check_owned(root: pathlib.Path, sources: list[str]):
    """Every .cpp is listed by hand in the CMakeLists.txt of its folder or of one above it."""
    for source in sources:
        path = root / source
        if not source.endswith(".cpp"):
            continue
        owned = False
        for folder in [path.parent, *path.parent.parents]:
            listing = folder / "CMakeLists.txt"
            if listing.exists() and re.search(rf"\b{re.escape(path.stem)}\b", listing.read_text()):
                owned = True
                break
            if folder == root:
                break
        if not owned:
            yield source, 1, "listed in no CMakeLists.txt"


def check_tree(root: pathlib.Path, clang_format: bool = True) -> list[str]:
    problems: list[str] = []
    sources: list[str] = []
    for path in files(root):
        relative = path.relative_to(root).as_posix()
        if path.suffix in {".h", ".cpp"}:
            sources.append(relative)
            lines = path.read_text(encoding="utf-8").splitlines()
            problems += [f"{relative}:{number}: {text}" for number, text in check_source(relative, lines)]
        elif path.suffix == ".md":
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                for name in DOC_PATH.findall(line):
                    if not (root / name.rstrip("/.")).exists():
                        problems.append(f"{relative}:{number}: names {name}, which does not exist")
    problems += [f"{name}:{number}: {text}" for name, number, text in check_owned(root, sources)]
    for folder in sorted((root / "src").iterdir()) if (root / "src").exists() else []:
        readme = folder / "README.md"
        if folder.is_dir() and any(folder.glob("*.cpp")):
            if not readme.exists():
                problems.append(f"src/{folder.name}: no README.md")
            elif len(readme.read_text().splitlines()) > 15:
                problems.append(f"src/{folder.name}/README.md: more than fifteen lines")
    formatter = shutil.which("clang-format-14")
    if clang_format and formatter and sources:
        answer = subprocess.run([formatter, "--dry-run", "--Werror", "-style=file", *sources], cwd=root,
                                text=True, stderr=subprocess.PIPE, check=False)
        if answer.returncode:
            wrong = sorted({line.split(":")[0] for line in answer.stderr.splitlines() if ": error:" in line})
            problems += [f"{name}:1: not formatted: run make format" for name in wrong]
    return problems


def selftest() -> int:
    """Plants a violation of each rule in a temporary tree; each must be found."""
    good = "// SPDX-License-Identifier: Apache-2.0\n"
    cases = {
        "src/base/a.cpp": (good + '#include "store/pages.h"\n', "may not include"),
        "src/store/b.cpp": (good + '#include "data/loader.h"\n', "may not include"),
        "src/data/c.cpp": (good + "#include <torch/types.h>\n", "torch header"),
        "include/plimsoll/d.h": (good + '#pragma once\n#include "base/check.h"\n', "not public"),
        "src/base/e.cpp": (good + "// " + "x" * 100 + "\n", "columns"),
        "src/base/f.cpp": ("int x;\n", "SPDX"),
        "src/base/g.h": (good, "#pragma once"),
        "src/base/string_util.cpp": (good, "banned file name"),
        "src/base/h.cpp": (good + "class CacheManager {};\n", "banned type name"),
        "src/base/i.cpp": (good + "// TODO later\n", "TODO"),
        "src/base/j.cpp": (good + 'throw std::runtime_error("");\n', "empty message"),
        "src/base/k.cpp": (good + "\n" * 900, "lines, the limit"),
        "src/base/orphan.cpp": (good, "listed in no CMakeLists.txt"),
        "docs/l.md": ("see `src/nowhere/x.cpp`\n", "does not exist"),
        "cli/m.cpp": (good + '#include "store/pages.h"\n', "cli may include only"),
    }
    failures = 0
    for name, (text, expected) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            path = root / name
            path.parent.mkdir(parents=True)
            path.write_text(text)
            found = [problem for problem in check_tree(root, clang_format=False) if expected in problem]
            if not found:
                print(f"tidy selftest: {name}: expected a problem with '{expected}'")
                failures += 1
    print(f"tidy selftest: {len(cases)} planted, {failures} missed")
    return 1 if failures else 0


def main() -> int:
    if "--selftest" in sys.argv:
        return selftest()
    problems = check_tree(pathlib.Path(__file__).resolve().parent.parent)
    print("\n".join(problems) if problems else "tidy: clean")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
