# SPDX-License-Identifier: Apache-2.0
"""The .pyi files say what the modules have: the same names, the same arguments, both ways."""
import ast
import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import plimsoll
from plimsoll import compat

PACKAGE = pathlib.Path(plimsoll.__file__).parent


def module_of(name: str):
    if name == "_torch":
        pytest.importorskip("torch")
        from plimsoll.core import _torch_gate

        module = _torch_gate.load_if_torch_imported()
        if module is None:
            pytest.skip("plimsoll was built without torch")
        return module
    return importlib.import_module(f"plimsoll.{name}")


def declared(name: str) -> dict[str, ast.AST]:
    """Public names of a stub, methods as "Class.method"."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse((PACKAGE / f"{name}.pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = node
        elif isinstance(node, ast.ClassDef):
            found[node.name] = node
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    found[f"{node.name}.{member.name}"] = member
                elif isinstance(member, ast.AnnAssign):
                    found[f"{node.name}.{member.target.id}"] = member
    return found


def attribute(module, path: str):
    value = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", ["_core", "_torch"])
def test_every_declared_name_exists_with_its_arguments(name):
    module = module_of(name)
    for path, node in declared(name).items():
        value = attribute(module, path)  # AttributeError: the stub declares too much.
        decorators = {ast.unparse(one) for one in getattr(node, "decorator_list", [])}
        if isinstance(node, ast.FunctionDef) and "property" not in decorators and (
                path.split(".")[-1] not in {"__str__", "__repr__"}):
            first_line = (value.__doc__ or "").splitlines()[0]
            arguments = [one.arg for one in node.args.args if one.arg != "self"]
            inside = re.sub(r"\[[^\]]*\]", "", first_line)  # Types hold commas.
            actual = list(re.findall(r"(\w+): ", inside.split("->")[0]))
            assert actual == arguments, f"{name}.{path}: {first_line}"


@pytest.mark.parametrize("name", ["_core", "_torch"])
def test_every_name_of_the_module_is_declared(name):
    module, stub = module_of(name), declared(name)
    for attribute_name, value in vars(module).items():
        if attribute_name.startswith("_"):
            continue
        assert attribute_name in stub, f"{name}.pyi lacks {attribute_name}"
        if inspect.isclass(value):
            enumerators = {"name", "value"} if hasattr(value, "__members__") else set()
            for member in vars(value):
                if not member.startswith("_") and member not in enumerators:
                    assert f"{attribute_name}.{member}" in stub, f"{attribute_name}.{member}"


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
    if getattr(value, "__module__", "") == "plimsoll._core":
        stub = declared("_core")[path]
        assert ast.get_docstring(stub), path
        return
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
