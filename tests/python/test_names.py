# SPDX-License-Identifier: Apache-2.0
"""One thing has one name: arguments in Python are called as the program's options are."""
import inspect
import re
import subprocess

import plimsoll

SHORT = {"host", "disk", "foreign", "store", "dirty", "queue", "cache", "join_gap", "threads", "chunk_size"}


def functions():
    """(path, function) of everything public that may be called."""
    for name in plimsoll.__all__:
        value = getattr(plimsoll, name)
        if inspect.isclass(value):
            for member, inner in vars(value).items():
                inner = inner.__func__ if isinstance(inner, (classmethod, staticmethod)) else inner
                if inspect.isfunction(inner) and (member == "__init__" or not member.startswith("_")):
                    yield f"{name}.{member}", inner
        elif inspect.isfunction(value):
            yield name, value


def arguments():
    for path, function in functions():
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name not in ("self", "cls"):
                yield path, parameter.name, str(parameter.annotation)


def options(program) -> set[str]:
    """Names of the program's options, and of what --set takes."""
    found = set()
    for words in (["train", "cosir"], ["train", "can-kd"], ["import", "can"], ["import", "chat"], ["limit"], ["run"],
                  ["store", "import"]):
        told = subprocess.run([program, *words, "--help"], text=True, capture_output=True, timeout=60, check=True)
        found |= set(re.findall(r"--([a-z][a-z0-9-]+)", told.stdout))
    for recipe in ("cosir", "can-kd"):
        told = subprocess.run([program, "config", recipe], text=True, capture_output=True, timeout=60, check=True)
        found |= set(re.findall(r"^#? ?([a-z]\w+) = ", told.stdout, re.MULTILINE))
    return {name.replace("-", "_") for name in found}


def test_r38_sizes_and_threads_have_the_names_of_options(program):
    told = options(program)
    assert {"memory_limit", "store_bytes", "foreign_bytes"} <= told
    seen, wrong = set(), []
    for path, name, annotation in arguments():
        if "int | str" in annotation or name.endswith("threads"):
            seen.add(name)
            if name in SHORT - told:  # Another name for what an option is called, or none of its unit.
                wrong.append(f"{path}({name})")
    assert {"memory_limit", "disk_limit", "foreign_bytes", "store_bytes", "cache_bytes", "queue_bytes",
            "compute_threads", "loader_threads", "io_threads"} <= seen & told
    assert not wrong, wrong
