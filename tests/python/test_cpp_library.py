# SPDX-License-Identifier: Apache-2.0
"""What C++ programs find: the tree that `cmake --install` makes, moved elsewhere, and examples/cpp built from it.

Everything is built outside the repository, by CMake's ordinary commands; objects come from ccache where it has them.
"""
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from tests.conftest import program_path

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADERS = {path.name for path in (ROOT / "include/plimsoll").iterdir()}


def run(*command, status=0, folder=None, **environment) -> str:
    """Runs a command with nothing of this build in its environment; what it printed."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("PLIMSOLL", "LD_LIBRARY", "MKL"))}
    done = subprocess.run([str(one) for one in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=500,
                          check=False, cwd=folder, env={**own, **environment})
    assert done.returncode == status, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def build() -> pathlib.Path:
    """The build folder of the program under test."""
    program = program_path()
    if program is None or not (program.parents[1] / "CMakeCache.txt").exists():
        pytest.skip("there is no build folder to install from: run make dev")
    return program.parents[1]


@pytest.fixture(scope="module")
def prefix(build, tmp_path_factory) -> pathlib.Path:
    """An installed tree that was moved since."""
    folder = tmp_path_factory.mktemp("installed")
    run("cmake", "--install", build, "--component", "cpp", "--prefix", folder / "first")
    return (folder / "first").rename(folder / "moved")


def compiled(source: pathlib.Path, build: pathlib.Path, *options: str) -> pathlib.Path:
    """The folder in which CMake has built a project, with the compiler and the libraries of `build`."""
    cache = (build / "CMakeCache.txt").read_text(encoding="utf-8")
    compiler = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.+)$", cache, re.M)
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    # Folders of every test are others: names that begin with this one count as the same.
    cached = {"CCACHE_BASEDIR": str(source.parent), "CCACHE_NOHASHDIR": "1"}
    out = source.parent / f"{source.name}-build"
    run("cmake", "-S", source, "-B", out, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0",
        f"-DCMAKE_CXX_COMPILER={compiler[1]}", *launcher, *options, **cached)
    run("cmake", "--build", out, **cached)
    return out


@pytest.fixture(scope="module")
def example(build, prefix) -> pathlib.Path:
    """The program of examples/cpp, built outside the repository."""
    if not (prefix / "lib/libplimsoll_torch.so").exists():
        pytest.skip("this build has no LibTorch")
    source = shutil.copytree(ROOT / "examples/cpp", prefix.parent / "example")
    return compiled(source, build, f"-DCMAKE_PREFIX_PATH={prefix}") / "train"


def test_the_installed_tree_has_public_headers_libraries_and_no_place_of_the_build(build, prefix):
    files = {path.relative_to(prefix).as_posix() for path in prefix.rglob("*") if path.is_file()}
    torch = "lib/libplimsoll_torch.so" in files
    headers = {pathlib.PurePath(name).name for name in files if re.fullmatch(r"include/plimsoll/[^/]+", name)}
    assert headers == (HEADERS if torch else HEADERS - {"torch.h"})
    libraries = {"core", "run", "torch"} if torch else {"core"}
    others = {name for name in files if not re.fullmatch(r"include/plimsoll/[^/]+|lib/cmake/plimsoll/plimsoll\w+(-\w+)?\.cmake", name)}
    assert others == {"include/plimsoll/third_party/tl/expected.hpp", *(f"lib/libplimsoll_{name}.so" for name in libraries)}
    for name in sorted(files):
        if name.endswith((".cmake", ".h")):
            text = (prefix / name).read_text(encoding="utf-8")
            # One path may be named: the LibTorch of the build, which is where it is looked for last.
            text = re.sub(r'DOC "|"[^"\n]*/torch"', "", text) if name.endswith("plimsollConfig.cmake") else text
            assert str(ROOT) not in text and str(build) not in text and str(prefix.with_name("first")) not in text, name
    for name in libraries:
        places = re.search(r"\(RUNPATH\).*\[(.*)\]", run("readelf", "-d", prefix / f"lib/libplimsoll_{name}.so"))
        assert all(place.startswith("$ORIGIN") for place in places[1].split(":")), places


def test_each_public_header_compiles_alone_and_the_core_links_without_torch(build, prefix):
    source = prefix.parent / "headers"  # Beside what it includes, as ccache's names begin there.
    source.mkdir()
    names = sorted(path.name for path in (prefix / "include/plimsoll").glob("*.h"))
    for name in names:
        (source / f"{name}.cpp").write_text(f'#include "plimsoll/{name}"\n', encoding="utf-8")
    (source / "main.cpp").write_text("""
#include "plimsoll/bytes.h"
#include "plimsoll/governor.h"
#include <cstdio>
int main() {
  auto governor = plimsoll::Governor::create({.memory_limit = "1GiB"}).or_throw();
  const auto lease = governor.reserve(plimsoll::Tag::kOther, 1 << 20).or_throw();
  std::puts(plimsoll::format_bytes(governor.state().pools[int(lease.tag())].leased_bytes).c_str());
  return governor.reserve(plimsoll::Tag::kOther, std::int64_t{1} << 40) ? 1 : 0;
}
""", encoding="utf-8")
    core, torch = ([f"{name}.cpp" for name in names if (name == "torch.h") is wanted] for wanted in (False, True))
    (source / "CMakeLists.txt").write_text(f"""
cmake_minimum_required(VERSION 3.25)
project(headers LANGUAGES CXX)
find_package(plimsoll 0.1 REQUIRED)
add_library(core OBJECT {' '.join(core)})
target_link_libraries(core PRIVATE plimsoll::core)
if({bool(torch)})
  add_library(torch OBJECT {' '.join(torch)})
  target_link_libraries(torch PRIVATE plimsoll::torch)
endif()
add_executable(main main.cpp)
target_link_libraries(main PRIVATE plimsoll::core)
""", encoding="utf-8")
    program = compiled(source, build, f"-DCMAKE_PREFIX_PATH={prefix}") / "main"
    assert run(program) == "1.0 MiB\n"
    assert "torch" not in run("readelf", "-d", program)


def test_a_package_says_which_torch_it_wants_and_which_components_it_has(build, prefix, tmp_path):
    project = "cmake_minimum_required(VERSION 3.25)\nproject(asks LANGUAGES CXX)\nfind_package(plimsoll 0.1 REQUIRED COMPONENTS {})\n"
    torch = (prefix / "lib/libplimsoll_torch.so").exists()
    (tmp_path / "CMakeLists.txt").write_text(project.format("python"), encoding="utf-8")
    asked = ("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    assert "no plimsoll::python: its components are core and torch" in " ".join(run(*asked, status=1).split())
    (tmp_path / "CMakeLists.txt").write_text(project.format("torch"), encoding="utf-8")
    older = tmp_path / "older"
    (older / "include/torch/headeronly").mkdir(parents=True)
    (older / "include/torch/headeronly/version.h").write_text(
        "#define TORCH_VERSION_MAJOR 1\n#define TORCH_VERSION_MINOR 13\n#define TORCH_VERSION_PATCH 1\n", encoding="utf-8")
    refused = " ".join(run(*asked, f"-DPLIMSOLL_TORCH_ROOT={older}", status=1).split())
    assert ("and found 1.13: set PLIMSOLL_TORCH_ROOT" if torch else "it was built without LibTorch") in refused


def test_the_page_shows_the_example_as_it_is_built():
    """What docs/how-to/cpp.md prints in C++ and CMake is text of examples/cpp."""
    page = (ROOT / "docs/how-to/cpp.md").read_text(encoding="utf-8")
    texts = {kind: (ROOT / f"examples/cpp/{name}").read_text(encoding="utf-8") for kind, name in
             (("cpp", "train.cpp"), ("cmake", "CMakeLists.txt"))}
    blocks = re.findall(r"```(cpp|cmake)\n(.*?)```", page, re.DOTALL)
    assert {kind for kind, _ in blocks} == {"cpp", "cmake"}
    for kind, block in blocks:
        there = [line.strip() for line in texts[kind].splitlines()]
        for line in filter(None, (line.strip() for line in block.splitlines())):
            assert line in there, f"{line!r} is not in examples/cpp"


def test_the_example_killed_in_its_commits_ends_with_the_bits_of_one_life(example, tmp_path):
    """Rows of 3 GB within 512 MiB. Each life dies at another place of a commit, and the next has another limit."""
    arguments = ("--steps", 24, "--commit-every", 4)
    whole = run(example, tmp_path / "undisturbed", "--memory-limit", "512MiB", *arguments)
    assert "committed: step 24" in whole and "goes on" not in whole
    rows, limit, peak = (float(re.search(pattern, whole)[1]) for pattern in (r"rows: ([\d.]+) GiB", r"limit: ([\d.]+) MiB",
                                                                            r"peak ([\d.]+) MiB"))
    assert rows * 1024 > 5 * limit and peak <= limit == 512
    begins = []
    for point, limit in (("store.commit.superblock.after:1", "512MiB"), ("store.commit.superblock.after:3", "2GiB"),
                         ("store.commit.superblock.before:1", "512MiB"), ("file.rename.before:2", "900MiB"),
                         ("file.rename.after:1", "512MiB")):
        told = run(example, tmp_path / "killed", "--memory-limit", limit, *arguments, status=-9, PLIMSOLL_CRASH=point)
        begins += map(int, re.findall(r"goes on at step (\d+)", told))
    told = run(example, tmp_path / "killed", "--memory-limit", "1GiB", *arguments)
    begins.append(int(re.search(r"goes on at step (\d+)", told)[1]))
    assert begins == sorted(begins) and len(set(begins)) > 2, begins
    digest = re.search(r"^digest (\w{16})$", whole, re.M)
    assert f"digest {digest[1]}\n" in told
