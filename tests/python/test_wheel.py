# SPDX-License-Identifier: Apache-2.0
"""`pip install .` as a user types it: into an empty folder, then used from there.

With the developer's compiler flags, so that ccache has most objects from build/dev.
"""
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def install(target: pathlib.Path, *options: str) -> dict[str, str]:
    """Installs into `target`; returns the environment that uses it. Skips without a compiler."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
               "--no-deps", "--target", str(target), "-C", "cmake.define.PLIMSOLL_DEVELOPER=ON",
               *options, str(ROOT)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=3000, check=False)
    if "Could not find a version that satisfies the requirement scikit-build-core" in done.stderr:
        pytest.skip("an isolated build downloads scikit-build-core, and there is no package index")
    assert done.returncode == 0, done.stderr[-4000:]
    return {**os.environ, "PYTHONPATH": str(target)}


def run_python(environment: dict[str, str], code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=300,
                          check=False, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_r55_the_printed_command_is_the_one_that_is_tested():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "`pip install .`" in readme and "--no-build-isolation" not in readme


def test_r55_an_isolated_build_finds_the_installed_torch(tmp_path):
    """CMake asks Python for torch as PlimsollDeps.cmake does, inside what pip makes of the environment."""
    torch = pytest.importorskip("torch")
    question = re.search(r"COMMAND \$\{plimsoll_python\} (-I -c)\s+\"([^\"]+)\"",
                         (ROOT / "cmake/PlimsollDeps.cmake").read_text(encoding="utf-8"))
    assert question
    # pip hides what is installed with a sitecustomize on PYTHONPATH; so does this one.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [path for path in sys.path if not path.endswith('-packages')]\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = question.group(2)
    hidden = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=environment)
    assert hidden.returncode != 0
    found = subprocess.run([sys.executable, "-I", "-c", code], text=True, capture_output=True, check=True,
                           env=environment)
    assert pathlib.Path(found.stdout.strip()) == pathlib.Path(torch.__file__).parent


@pytest.mark.slow
def test_r55_a_plain_install_beside_torch_has_the_torch_parts(tmp_path):
    pytest.importorskip("torch")
    environment = install(tmp_path / "site")
    package = tmp_path / "site" / "plimsoll"
    names = sorted(one.name for one in package.iterdir())
    assert "libplimsoll_core.so" in names and "py.typed" in names and "_core.pyi" in names
    assert any(name.startswith("_torch.cpython") for name in names)
    assert (tmp_path / "site/bin/plimsoll").exists()
    done = subprocess.run([sys.executable, tmp_path / "site/bin/plimsoll", "limits"], text=True,
                          capture_output=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0 and "limit:" in done.stdout, done.stderr
    answer = run_python(environment, f"""
import torch, plimsoll
assert plimsoll.__file__.startswith({str(tmp_path)!r})
with plimsoll.Governor("4GiB") as governor:
    assert governor.arena_attached
    x = torch.ones(1 << 20)
    print(governor.ledger().pools["tensors"].leased_bytes >= 4 << 20, open("/proc/self/maps").read()
          .count("libplimsoll_core.so") > 0)
""")
    assert answer.split() == ["True", "True"]

@pytest.mark.slow
def test_an_install_without_torch_has_the_core_and_says_how_to_get_the_rest(tmp_path):
    environment = install(tmp_path / "site", "-C", "cmake.define.PLIMSOLL_WITH_TORCH=OFF")
    package = tmp_path / "site" / "plimsoll"
    assert not any(one.name.startswith("_torch.cpython") for one in package.iterdir())
    answer = run_python(environment, f"""
import plimsoll
assert plimsoll.__file__.startswith({str(tmp_path)!r})
with plimsoll.Governor("1GiB") as governor:
    table = plimsoll.EmbeddingStore.open(governor, {str(tmp_path / "t")!r}, rows=9, dim=2)
    assert table.gather([3]).array.shape == (1, 2)
try:
    import plimsoll._torch
except ImportError as error:
    print(error)
""")
    assert "`pip install .`" in answer
