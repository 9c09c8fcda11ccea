#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the house rules that a machine can check; a ctest (tidy.rules).

    tools/tidy.py             checks the whole tree; prints FILE:LINE: what is wrong
    tools/tidy.py --selftest  plants one violation of each rule and checks that it is found

Rules: layering of includes and of Python's imports, torch headers only where allowed, file and line length, length of Python's
functions, SPDX lines, header pragma, banned names, names that two unnamed namespaces of a folder have, sources owned by a
CMakeLists.txt, folder READMEs, contracts of public headers, empty error messages, clang-format (when clang-format-14 is there),
references that the repository cannot resolve (paths in documentation and comments, pages that are not
here, codes in names of tests without an entry in tests/issues/README.md), and asserts that cannot fail.
"""
import ast
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
    "run": {"run", "base", "os", "memory", "store", "data", "plan", "watch"},
    "tables": {"tables", "run", "base", "os", "memory", "store", "data", "plan", "watch"},
    "torch": {"torch", "run", "base", "os", "memory", "store", "data", "plan", "watch"},
    "kernels": {"kernels", "torch", "base"},
}
CLI_MAY = {"run", "tables", "watch"}
# Rooms of the Python package, lowest first: a file may import its own room and lower ones; those of a line are apart.
PACKAGE = "python/plimsoll"
STRANGERS = ("recipes", "integrations")  # Rooms that use what the others say in public.
OF_OTHERS = {"_models", "_optimizers", "_schedulers", "_results", "_parameters"}  # Names in accelerate, Lightning and torch, too.
ROOMS = (("core",), ("memory", "kernels"), ("ranks", "data"), ("rows",), ("training",), ("run",), ("watch", "recipes"),
         ("integrations",), ("cli", "compat"))
ROOM_OF = {"_core": "core", "_torch": "core", "errors": "core", "store": "rows", "plots": "recipes", "__main__": "cli"}
# A function's docstring says what it does: "Returns …", or "Whether …"; nouns that look like such verbs are none.
VERB = re.compile(r"(?!(?:Its|This|Was|Bytes|Ids|Items|Rows|Batches|Gradients|Options|Attributes|Tensors|Errors|Values)\b|"
                  r"(?:Samples|Counts|Counters|Names|Parts|Places|States|Steps|Weights) of )(?:Whether|[A-Z][a-z]+s)\b(?!:)")
PROPERTY = re.compile(r"\b(?:property|cached_property|setter)$")  # Its docstring is a noun phrase.
# Beginnings and phrases that a reader in a hurry reads twice.
RIDDLE = re.compile(r"(Of|What|That|Whoever|Who|As)\b")
RIDDLES = re.compile(r"\b(?:is of each|(?:is|are) (?:told|said)|one of (?:the|those) [^.]*\bthose that)\b")
TORCH_FOLDERS = {"src/torch", "src/kernels", "python", "bench", "tests", "examples"}
TORCH_HEADER = re.compile(r'#include [<"](torch|ATen|c10|caffe2)/')
INCLUDE = re.compile(r'#include "([^"]+)"')
BANNED = re.compile(r"(?:^|[_A-Z/.])(util|utils|helper|helpers|common|manager|misc)(?:[_.]|$)", re.I)
BANNED_TYPE = re.compile(r"\b(?:class|struct)\s+(?:\[\[\w+\]\]\s+)?\w*(Util|Helper|Common|Manager|Misc)\w*\b")
# The compatibility classes keep the original's names.
BANNED_EXEMPT = re.compile(r"compat|TrainableEmbeddingManager|FeatureManager")
EMPTY_MESSAGE = re.compile(r'(?:throw \w[\w:]*|fail|make_error)\((?:[^;"]*[^=;" ] ?)?""\s*\)')
DOC_PATH = re.compile(r"`((?:src|include|docs|tools|tests|bench|cmake|python|cli|data)/[\w./-]+)`")
# The same in comments and docstrings, where a path has no quotes and a file a suffix.
PLAIN_PATH = re.compile(r"(?<![\w./{-])((?:src|include|docs|tools|tests|bench|cmake|python|cli|data)"
                        r"/(?:[\w.-]+/)*[\w-]+\.(?:h|cpp|py|md|txt|sh|cmake|svg|json|jsonl))\b")
COMMENT = {True: re.compile(r"^\s*//|\s//\s"), False: re.compile(r"^\s*#|\s#\s")}  # C++; others.
PAGE_ELSEWHERE = re.compile(r"\b(?:DESIGN|REQUIREMENTS|REVIEW|RUNS|WATCH|EXAMPLES)(?:\.md|'s\b|\s*§)")
REFERENCES_EXEMPT = {"tools/tidy.py"}  # It plants them.
LEGEND = "tests/issues/README.md"
TEST_CODE = re.compile(r"(?:\bdef test_|\bTEST(?:_[FP])?\(\s*|, ?|_)([ckmrstCKMRST]\d{1,2})(?=_|[A-Z]\w*(?:Test)?\b)")
IDLE_CPP = re.compile(r"(?:EXPECT|ASSERT)_TRUE\(true\)|(?:EXPECT|ASSERT)_FALSE\(false\)|\bSUCCEED\(\)")
# Of an unnamed namespace's outermost lines: a type, a constant or variable, a function with its parameters.
UNNAMED = re.compile(r"^(?:(?:struct|class|enum(?: class)?) (\w+)[^;\n]*$|(?!using|namespace|template)\w[\w:<>,&* ]*[ &*]"
                     r"(?:(\w+)(?:\{| = |;|\[)|(\w+\([^)]*\)) (?:noexcept )?\{))", re.M)
# What a public header promises: a function that may fail, and the errors that its comment names.
MAY_FAIL = re.compile(r"\s*(?:\[\[nodiscard\]\] |static |inline )*Result<.*> (\w+)\(")
NAMES_ERRORS = re.compile(r"\b[Ee]rrors\b|\bAs \w+\(\)")
TRY_HEADER = "base/check.h"  # Of PLIMSOLL_TRY; sources that are built together have it from each other.
LINE_MAX, HEADER_MAX, SOURCE_MAX = 100, 300, 800
FUNCTION_MAX = 70  # Lines of a Python function's body, those of its docstring, empty ones and comments not counted.
PYTHON_FOLDERS = ("python/", "tests/", "bench/", "tools/")


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
            yield number, "a torch header outside src/torch, src/kernels and the bindings"
        match = INCLUDE.match(line)
        if not match:
            continue
        target = match.group(1)
        if relative.startswith("include/") and not target.startswith("plimsoll/"):
            yield number, f'a public header includes "{target}", which is not public'
        top = target.split("/")[0]
        if folder in LAYERS and top in LAYERS and top not in LAYERS[folder]:
            yield number, f"src/{folder} may not include src/{top} (layers: {sorted(LAYERS[folder])})"
        if relative.startswith("cli/") and top in LAYERS and top not in CLI_MAY:
            yield number, f"cli may include only include/, cli/, run/, tables/ and watch/, not {target}"


def check_contract(lines: list[str]):
    """A public header says Threads and Memory at its head, and of each public function that may fail the errors."""
    head = "\n".join(lines).partition("#pragma once")[0]
    for word in ("Threads:", "Memory:"):
        if word not in head:
            yield 1, f"a public header without {word} at its head"
    public, comment = True, ""
    for number, line in enumerate(lines, 1):
        if re.match(r"(?:class|struct) |\};", line):
            public = not line.startswith("class")
        elif label := re.match(r" (public|private|protected):", line):
            public = label[1] == "public"
        if line.strip().startswith("//"):
            comment += line
            continue
        if public and (function := MAY_FAIL.match(line)) and not NAMES_ERRORS.search(comment):
            yield number, f"{function[1]}() may fail, and its comment names no errors"
        if not MAY_FAIL.match(line):  # A comment may be of several.
            comment = ""


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
    tries = next((number for number, line in enumerate(lines, 1) if re.match(r"\s*PLIMSOLL_TRY", line)), None)
    if tries and f'#include "{TRY_HEADER}"' not in lines and relative != f"src/{TRY_HEADER}":
        yield tries, f"PLIMSOLL_TRY without {TRY_HEADER}: a build of each source alone (make asan) does not find it"
    yield from check_includes(relative, lines)
    if relative.startswith("include/"):
        yield from check_contract(lines)


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


def check_unnamed(root: pathlib.Path, sources: list[str]):
    """Sources of a folder are compiled together (PLIMSOLL_UNITY): no two have the same name in unnamed namespaces."""
    seen: dict[tuple[str, ...], str] = {}
    for source in sources:
        if not re.match(r"(src|cli|python)/.*(?<!_test)\.cpp$", source):
            continue
        text = (root / source).read_text(encoding="utf-8")
        for part in re.finditer(r"^namespace \{\n(.*?)^\}  // namespace$", text, re.M | re.S):
            for name in UNNAMED.finditer(part.group(1)):
                what = re.sub(r"\s+", " ", next(filter(None, name.groups())))
                around = re.findall(r"^namespace ([\w:]+) \{$", text[:part.start()], re.M)[-1:]
                first = seen.setdefault((str(pathlib.PurePath(source).parent), *around, what), source)
                if first != source:
                    number = text.count("\n", 0, part.start(1) + name.start()) + 1
                    yield source, number, f"{what} is in an unnamed namespace of {first} too: name one more closely"


def check_references(root: pathlib.Path, relative: str, lines: list[str], codes: set[str]):
    """Paths and pages that are named must be there, and codes in names of tests have an entry."""
    document = relative.endswith(".md")
    comment = COMMENT[relative.endswith((".h", ".cpp"))]
    tests = relative.startswith("tests/") or relative.endswith("_test.cpp")
    for number, line in enumerate(lines, 1):
        named = DOC_PATH.findall(line) if document else PLAIN_PATH.findall(line) if comment.search(line) else []
        for name in named:
            if not any((root / above / name.rstrip("/.")).exists() for above in ("", "src")):
                yield number, f"names {name}, which does not exist"
        if match := PAGE_ELSEWHERE.search(line):
            yield number, f"cites {match.group(0)}, a page that is not in the repository"
        if tests and not document and re.match(r"\s*(?:def |TEST)", line):
            for code in TEST_CODE.findall(line):
                if (plain := code[0].upper() + str(int(code[1:]))) not in codes:
                    yield number, f"a test named after {plain}, which {LEGEND} does not explain"


def check_python(relative: str, text: str):
    """Rules of one Python file."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield error.lineno or 1, "is not Python"
        return
    if relative.startswith(PYTHON_FOLDERS):
        yield from check_lengths(tree, text.splitlines())
    if relative.startswith("tests/"):
        yield from check_asserts(tree)


def check_lengths(tree: ast.Module, lines: list[str]):
    """Neither a file nor a function is longer than what is read at once."""
    if len(lines) > SOURCE_MAX:
        yield SOURCE_MAX, f"{len(lines)} lines, the limit is {SOURCE_MAX}: split the file"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[ast.get_docstring(node, clean=False) is not None:]
            inside = lines[body[0].lineno - 1:node.end_lineno] if body else []
            count = sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in inside)
            if count > FUNCTION_MAX:
                yield node.lineno, f"{node.name}() has {count} lines, the limit is {FUNCTION_MAX}: split the function"


def check_asserts(tree: ast.Module):
    """Asserts that hold whatever the code under test does, and comparisons whose answer nobody takes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, (ast.Compare, ast.BoolOp)):
            yield node.lineno, "a comparison whose answer nobody takes"
        if not isinstance(node, ast.Assert):
            continue
        test = node.test
        if isinstance(test, ast.Tuple) or not any(isinstance(part, (ast.Name, ast.Call)) for part in ast.walk(test)):
            yield node.lineno, "an assert that cannot fail: it tests a constant"
        elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) and any(
                isinstance(part, ast.Constant) and part.value for part in test.values):
            yield node.lineno, "an assert that cannot fail: one side of `or` is always true"
        for part in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]:
            if re.fullmatch(r"[\w.\[\]'\"]*(?:_ns|_bytes|_count|\.sum\(\)|len\(.*\)) >= 0", ast.unparse(part)):
                yield node.lineno, "an assert that cannot fail: a count is never negative"


def python_modules(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Of the Python package, by their names: "plimsoll.run._run"."""
    paths = [path for path in (root / PACKAGE).rglob("*.py") if "__pycache__" not in path.parts]
    return {".".join(path.relative_to((root / PACKAGE).parent).with_suffix("").parts).removesuffix(".__init__"): path
            for path in sorted(paths)}


def python_imports(name: str, path: pathlib.Path, modules: dict[str, pathlib.Path]):
    """(line, a module of ours, whether only types need it) for each import in a file, also those within functions."""
    def visit(node: ast.AST, typing: bool):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, typing
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[:len(name.split(".")) - node.level + (path.stem == "__init__")] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in modules or inner == "plimsoll._core" else base, typing
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for one in node.body:
                yield from visit(one, True)
            for one in node.orelse:
                yield from visit(one, typing)
        else:
            for one in ast.iter_child_nodes(node):
                yield from visit(one, typing)

    for line, target, typing in visit(ast.parse(path.read_text(encoding="utf-8")), False):
        if target.partition(".")[0] == "plimsoll":
            yield line, target, typing


def check_rooms(root: pathlib.Path):
    """Imports of the Python package point down, and modules import each other in no circle; types may, within a room."""
    modules = python_modules(root)
    level = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
    graph: dict[str, dict[str, int]] = {}
    for name, path in modules.items():
        relative = path.relative_to(root).as_posix()
        if name == "plimsoll":  # Names of all rooms; nobody imports them from it.
            continue
        own = ROOM_OF.get(name.split(".")[1], name.split(".")[1])
        if own not in level:
            yield relative, 1, f"{own} is no room of {PACKAGE}: ROOMS of tools/tidy.py has them"
            continue
        for line, target, typing in python_imports(name, path, modules):
            if target == "plimsoll":
                yield relative, line, "imports from the whole package: name the module"
                continue
            room = ROOM_OF.get(target.split(".")[1], target.split(".")[1])
            if room != own and level.get(room, len(ROOMS)) >= level[own]:
                yield relative, line, f"{own} may not import {target}: {room} is not below it"
            elif not typing and target in modules:
                graph.setdefault(name, {}).setdefault(target, line)
    done: set[str] = set()

    def circles(name: str, above: list[str]):
        if name in above:
            circle = [*above[above.index(name):], name]
            yield modules[circle[0]].relative_to(root).as_posix(), graph[circle[0]][circle[1]], f"a circle: {' → '.join(circle)}"
        elif name not in done:
            for target in graph.get(name, {}):
                yield from circles(target, [*above, name])
            done.add(name)

    for name in graph:
        yield from circles(name, [])


def private_names(tree: ast.AST) -> set[str]:
    """Names with one underscore that a file gives to functions and attributes."""
    return {name for node in ast.walk(tree)
            for name in ([node.name] if isinstance(node, ast.FunctionDef) else
                         [node.attr] if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) else [])
            if name.startswith("_") and not name.startswith("__")}


def docstrings(tree: ast.AST):
    """(line, text) of each module's, function's, class's and attribute's."""
    for node in ast.walk(tree):
        body = node.body if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) else []
        for one in body[:1] if isinstance(node, ast.Module) else body:
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                yield one.lineno, one.value.value.strip()


def check_verbs(code: str):
    """Checks that docstrings of functions begin with a verb in the third person."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not any(PROPERTY.search(ast.unparse(one)) for one in node.decorator_list):
            text = ast.get_docstring(node)
            if text and not VERB.match(text):
                yield node.body[0].lineno, f"{node.name}(): its docstring begins with {text.split()[0]}, not with a verb such as Returns, or Whether"


def check_docstrings(code: str):
    """Docstrings begin with what they are about, say who says, and have no breathless sentence."""
    for line, text in docstrings(ast.parse(code)):
        if begin := RIDDLE.match(text):
            yield line, f"a docstring begins with {begin[0]}: say first what it is about"
        for found in RIDDLES.finditer(text):
            yield line, f"a docstring says {found[0]!r}: say who does, or `per`"
        for part in re.split(r"[,.;:()]|\n\s*\n|\n {2,}", text):
            if len(part.split()) > 25:
                yield line, f"a docstring has {len(part.split())} words without a comma: {' '.join(part.split()[:6])} …"


def check_words(root: pathlib.Path):
    """Docstrings of Python; those of the bindings are seen in the stubs that a build makes (tests/python/test_stubs.py)."""
    for path in python_modules(root).values():
        code = path.read_text(encoding="utf-8")
        for line, what in (*check_docstrings(code), *check_verbs(code)):
            yield path.relative_to(root).as_posix(), line, what


def check_privacy(root: pathlib.Path):
    """Recipes and integrations do as strangers: what is private of the package's other files they do not use."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in python_modules(root).values()}
    names = {path: private_names(tree) for path, tree in trees.items()}
    rooms = {path: path.relative_to(root / PACKAGE).parts[0] for path in trees}
    elsewhere = set().union(*(names[path] for path in trees if rooms[path] not in STRANGERS))
    for path, tree in trees.items():
        if rooms[path] in STRANGERS:
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr in elsewhere - names[path] - OF_OTHERS:
                    yield path.relative_to(root).as_posix(), node.lineno, f"uses {node.attr}, which is private of another file"


def check_tree(root: pathlib.Path, clang_format: bool = True) -> list[str]:
    problems: list[str] = []
    sources: list[str] = []
    legend = root / LEGEND
    codes = set(re.findall(r"^\| ([CKMRST]\d+) \|", legend.read_text(encoding="utf-8") if legend.exists() else "", re.M))
    for path in files(root):
        relative = path.relative_to(root).as_posix()
        if path.suffix in {".h", ".cpp", ".py", ".md", ".sh", ".cmake"}:
            text = path.read_text(encoding="utf-8")
            exempt = relative in REFERENCES_EXEMPT
            found = [] if exempt else list(check_references(root, relative, text.splitlines(), codes))
            if path.suffix == ".py":
                found += check_python(relative, text)
            if path.suffix == ".cpp" and IDLE_CPP.search(text):
                found.append((text.count("\n", 0, IDLE_CPP.search(text).start()) + 1,
                              "an assert that cannot fail: it tests a constant"))
            problems += [f"{relative}:{number}: {what}" for number, what in found]
        if path.suffix in {".h", ".cpp"}:
            sources.append(relative)
            lines = path.read_text(encoding="utf-8").splitlines()
            problems += [f"{relative}:{number}: {text}" for number, text in check_source(relative, lines)]
    for check in (check_owned, check_unnamed):
        problems += [f"{name}:{number}: {text}" for name, number, text in check(root, sources)]
    for check in (check_rooms, check_privacy, check_words):
        problems += [f"{name}:{number}: {text}" for name, number, text in check(root)]
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
    """Plants a violation of each rule in a temporary tree; each must be found, and nothing where none is expected ("")."""
    good = "// SPDX-License-Identifier: Apache-2.0\n"
    cases = {
        "src/base/a.cpp": (good + '#include "store/pages.h"\n', "may not include"),
        "src/store/b.cpp": (good + '#include "data/loader.h"\n', "may not include"),
        "src/data/c.cpp": (good + "#include <torch/types.h>\n", "torch header"),
        "include/plimsoll/d.h": (good + '#pragma once\n#include "base/check.h"\n', "not public"),
        "include/plimsoll/ae.h": (good + "//\n// Memory: none.\n#pragma once\n", "without Threads:"),
        "include/plimsoll/af.h": (good + "class A {\n public:\n  /// Opens it.\n  static Result<A> open(int b);\n};\n", "open() may fail"),
        "include/plimsoll/ag.h": (good + "// Threads: any.   Memory: none.\n#pragma once\nclass A {\n public:\n  /// Errors: kIo.\n"
                                         "  Result<void> b();\n private:\n  Result<int> c();\n};\n", ""),
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
        "src/base/n.cpp": (good + "// see docs/nowhere.md\n", "does not exist"),
        "python/o.py": ("# Source: DESIGN §7.\n", "cites DESIGN §"),
        "tests/python/test_p.py": ("def test_r99_holds():\n    assert f()\n", "named after R99"),
        "src/base/q_test.cpp": (good + "TEST(R98Lock, Holds) {}\n", "named after R98"),
        "tests/test_r.py": ("def test_a():\n    assert True\n", "cannot fail"),
        "tests/test_s.py": ("def test_a():\n    assert f() or True\n", "cannot fail"),
        "tests/test_t.py": ("def test_a(x):\n    assert x == 1 and x.stall_ns >= 0\n", "cannot fail"),
        "tests/test_u.py": ("def test_a(x):\n    x == 1\n", "nobody takes"),
        "tests/test_z.py": ("x = 1\n" * 801, "801 lines, the limit is 800"),
        "bench/aa.py": ("class A:\n    def f():\n" + "        x = 1\n" * 71, "aa.py:2: f() has 71 lines"),
        "tools/ab.py": ("async def f():\n    def g():\n" + "        x = 1\n" * 70, "ab.py:1: f() has 71 lines"),
        "bench/ac.py": ('def f():\n    """' + "\n" * 80 + '"""\n    # why\n\n' + "    x = 1\n    # why\n\n" * 70, ""),
        "tests/test_ad.py": ("def f(:\n", "is not Python"),
        "src/base/v_test.cpp": (good + "TEST(A, B) { SUCCEED(); }\n", "cannot fail"),
        "src/base/w.cpp src/base/x.cpp": (good + "namespace {\nint f(int a) {\n}\n}  // namespace\n", "more closely"),
        "src/os/w.cpp src/os/x.cpp": (good + "namespace {\nconstexpr int kA = 1;\n}  // namespace\n", "more closely"),
        "src/base/y.cpp": (good + "  PLIMSOLL_TRY(auto a, b());\n", "PLIMSOLL_TRY without"),
        "python/plimsoll/core/_a.py": ("def f():\n    from ..run import _run\n", "core may not import"),
        "python/plimsoll/nowhere/_a.py": ("import os\n", "no room"),
        "python/plimsoll/run/_a.py python/plimsoll/run/_b.py": ("from ._a import a\nfrom ._b import b\n", "a circle"),
        "python/plimsoll/core/_d.py": ('def f():\n    """What it gives."""\n', "begins with What"),
        "python/plimsoll/core/_w.py": ('"""What it holds."""\n', "begins with What"),
        "python/plimsoll/core/_s.py": ('class A:\n    """As others."""\n', "begins with As"),
        "python/plimsoll/core/_e.py": ('class A:\n    x = 1\n    """Of each row."""\n', "begins with Of"),
        "python/plimsoll/core/_f.py": ('def f():\n    """A name that is told."""\n', "say who does"),
        "python/plimsoll/core/_h.py": ('def f():\n    """Rows of a table."""\n', "begins with Rows, not with a verb"),
        "python/plimsoll/core/_i.py": ('class A:\n    def f(self):\n        """The sum."""\n', "begins with The, not with a verb"),
        "python/plimsoll/core/_j.py": ('async def f():\n    """`x` doubled."""\n', "begins with `x`, not with a verb"),
        "python/plimsoll/core/_k.py": ('class A:\n    """The sums."""\n    @property\n    def f(self):\n        """The sum."""\n', ""),
        "python/plimsoll/core/_l.py": ('def f():\n    """Warns of it."""\ndef g():\n    """Whether it is."""\n', ""),
        "python/plimsoll/core/_g.py": ('def f():\n    """' + "Word " * 26 + '."""\n', "words without a comma"),
        "cli/m.cpp": (good + '#include "store/pages.h"\n', "cli may include only"),
    }
    failures = 0
    for name, (text, expected) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for one in name.split():
                path = root / one
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            found = [problem for problem in check_tree(root, clang_format=False) if expected in problem]
            if bool(found) != bool(expected):
                print(f"tidy selftest: {name}: expected a problem with '{expected}'" if expected else f"tidy selftest: {found}")
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
