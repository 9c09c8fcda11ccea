# SPDX-License-Identifier: Apache-2.0
"""What type checkers read: the stubs that a build makes of the bindings, and __init__.pyi.

nanobind writes `_core.pyi` and `_torch.pyi` from the modules themselves, so names and arguments cannot differ. What the
bindings may leave out is looked for here: docstrings, and types with what they hold.
"""
import ast
import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import plimsoll
from plimsoll import compat

PACKAGE = pathlib.Path(plimsoll.__file__).parent
ROOT = pathlib.Path(__file__).parents[2]
VAGUE = {"Callable", "Mapping", "Sequence", "dict", "list", "tuple"}


def load_tidy():
    spec = importlib.util.spec_from_file_location("tidy", ROOT / "tools" / "tidy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def functions(tree: ast.Module):
    """("Class.method", node) of each function, method and property; of a property that can be set, nothing."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.FunctionDef):
                yield f"{node.name}.{member.name}", member


def omissions(code: str):
    """What a stub does not say."""
    tree = ast.parse(code)
    found = list(functions(tree))
    fields = {name for name, node in found if any(".setter" in ast.unparse(one) for one in node.decorator_list)}
    documented = [*((one.name, one) for one in tree.body if isinstance(one, ast.ClassDef)),
                  *((name, node) for name, node in found if name not in fields and ".__" not in name)]
    yield from (f"{name} has no docstring" for name, node in documented if not ast.get_docstring(node))
    for name, node in found:
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        for type_ in [one.annotation for one in arguments if one.arg != "self"] + [node.returns]:
            if type_ is None:
                yield f"{name} has an argument or a result without a type"
                continue
            whole = {id(one.value) for one in ast.walk(type_) if isinstance(one, ast.Subscript)} | {
                id(one.func) for one in ast.walk(type_) if isinstance(one, ast.Call)}  # dict(shape=…) describes an array.
            yield from (f"{name}: {one.id} of what?" for one in ast.walk(type_)
                        if isinstance(one, ast.Name) and one.id in VAGUE and id(one) not in whole)
    yield from (f"line {line}: {what}" for line, what in load_tidy().check_docstrings(code))


@pytest.mark.parametrize("name", ["_core", "_torch"])
def test_the_bindings_have_docstrings_and_whole_types(name):
    stub = PACKAGE / f"{name}.pyi"
    if name == "_torch" and not stub.exists():
        pytest.skip("plimsoll was built without torch")
    assert stub.stat().st_mtime_ns >= next(PACKAGE.glob(f"{name}.*.so")).stat().st_mtime_ns
    code = stub.read_text(encoding="utf-8")
    assert len(list(functions(ast.parse(code)))) > {"_core": 400, "_torch": 16}[name]
    assert list(omissions(code)) == []


@pytest.mark.parametrize("planted, found", [
    ("def f() -> int: ...", "f has no docstring"),
    ("class A:\n    x: int", "A has no docstring"),
    ("class A:\n    'A thing.'\n    @property\n    def x(self) -> int: ...", "A.x has no docstring"),
    ("def f(x) -> int:\n    'Counts.'", "f has an argument or a result without a type"),
    ("def f(x: dict | None) -> int:\n    'Counts.'", "f: dict of what?"),
    ("def f() -> list[tuple]:\n    'Counts.'", "f: tuple of what?"),
    ("def f() -> int:\n    'Of each row.'", "line 2: a docstring begins with Of: say first what it is about"),
])
def test_an_omission_is_found(planted, found):
    assert list(omissions(planted)) == [found]


def public_members():
    for name, value in [*((name, getattr(plimsoll, name)) for name in plimsoll.__all__),
                        *((name, getattr(compat, name)) for name in compat.__all__)]:
        if inspect.isclass(value) or inspect.isfunction(value):
            yield name, value
        if inspect.isclass(value) and value.__module__ != "plimsoll._core":
            for member, function in vars(value).items():
                function = getattr(function, "__func__", getattr(function, "fget", function))
                if not member.startswith("_") and inspect.isfunction(function):
                    yield f"{name}.{member}", function


@pytest.mark.parametrize("path, value", list(public_members()),
                         ids=lambda one: one if isinstance(one, str) else "")
def test_everything_public_has_a_docstring_and_types(path, value):
    assert value.__doc__, path
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        assert signature.return_annotation is not inspect.Signature.empty, path
        for parameter in signature.parameters.values():
            if parameter.name not in {"self", "cls"}:
                assert parameter.annotation is not inspect.Parameter.empty, f"{path}: {parameter}"


def test_all_is_sorted_complete_and_typed():
    assert plimsoll.__all__ == sorted(plimsoll.__all__)
    assert compat.__all__ == sorted(compat.__all__)
    assert (PACKAGE / "py.typed").exists()
    assert re.fullmatch(r"\d+\.\d+\.\d+", plimsoll.__version__)


def test_the_stub_of_the_package_has_its_names_and_their_modules():
    """Names are imported when they are asked for; type checkers read where from in __init__.pyi."""
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    said = {alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert said == {**plimsoll._PLACES, "store": None}
    assert set(plimsoll.__all__) == {*said, "__version__"} and set(plimsoll.__all__) <= set(dir(plimsoll))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        plimsoll.nothing


def test_what_is_asked_of_a_run_imports_neither_numpy_nor_torch():
    code = "import sys, plimsoll\nplimsoll.status\nprint(sorted({'numpy', 'torch', 'plimsoll.run._run'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout == "[]\n"
