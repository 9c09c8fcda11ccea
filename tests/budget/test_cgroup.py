# SPDX-License-Identifier: Apache-2.0
"""The product's claim as a test: training inside a real memory cgroup smaller than the data.

Each test runs the program in a cgroup of exactly the limit it was given, swap off, and reads the
kernel's own counters afterwards: no kill, and the highest resident size within the limit. The
naive way in the same cgroup is killed, which shows that the cgroup bites.
"""
import pathlib
import shutil
import sys

import pytest

from tests.support.cgroup import MemoryCgroup

MIB = 1 << 20
NAIVE = pathlib.Path(__file__).with_name("naive.py")


@pytest.fixture(autouse=True)
def cgroup_allowed():
    MemoryCgroup.needed()


def synthesise(run_program, folder: pathlib.Path, rows: int) -> pathlib.Path:
    needed = rows * 4096 * 2
    if shutil.disk_usage(folder).free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of disk in {folder}")
    run_program("synth", "cosir", "--rows", rows, "--out", folder / "data")
    return folder / "data"


def train_inside(program, data, out, limit_mib: int, *options):
    with MemoryCgroup(limit_mib * MIB) as group:
        return group.run([program, "train", "cosir", "--data", data, "--out", out,
                          "--memory-limit", f"{limit_mib}MiB", "--epochs", "1", "--json", *options])


def assert_held(run, limit_mib: int) -> dict:
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.oom_kills == 0
    assert run.peak_resident_bytes <= limit_mib * MIB
    summary = run.last_json
    assert summary["status"] == "finished"
    assert summary["limit_bytes"] == limit_mib * MIB
    # What the program says of itself agrees with what the kernel says.
    assert summary["peak_resident_bytes"] <= run.peak_resident_bytes + 8 * MIB
    return summary


def assert_naive_is_killed(data, limit_mib: int):
    with MemoryCgroup(limit_mib * MIB) as group:
        run = group.run([sys.executable, NAIVE, data])
    assert run.returncode == -9, f"the naive way survived: {run.stdout}"
    assert run.oom_kills >= 1


def test_a_peak_is_the_child_s_own_however_large_its_parent_was():
    large = bytearray(400 * MIB)
    large[::4096] = b"x" * len(large[::4096])
    with MemoryCgroup(1 << 30) as group:
        small = group.run(["sleep", "0.2"])
        own = group.run([sys.executable, "-c", f"import time; x = bytearray({150 * MIB}); time.sleep(0.2)"])
    assert 0 < small.peak_resident_bytes < 50 * MIB
    assert 150 * MIB < own.peak_resident_bytes < 250 * MIB


def test_data_larger_than_the_limit_trains_where_the_naive_way_is_killed(
        program, run_program, tmp_path):
    data = synthesise(run_program, tmp_path, 180_000)  # 703 MiB of features.
    run = train_inside(program, data, tmp_path / "run", 576, "--batch-size", "1024",
                       "--set", "eval_pairs=1000")
    assert_held(run, 576)
    assert_naive_is_killed(data, 576)


@pytest.mark.slow
def test_a_million_pairs_train_inside_768_mib(program, run_program, tmp_path):
    data = synthesise(run_program, tmp_path, 1_000_000)
    assert_naive_is_killed(data, 768)
    assert_held(train_inside(program, data, tmp_path / "run", 768), 768)
    shutil.rmtree(tmp_path / "run")
    # Rows of 128 floats with two moments each: rows and features are more than 7 × the limit.
    out = tmp_path / "wide"
    assert_held(train_inside(program, data, out, 768, "--set", "label_dim=128"), 768)
    used = sum(path.stat().st_blocks * 512 for folder in (data, out)
               for path in folder.rglob("*") if path.is_file())
    assert used > 7 * 768 * MIB
