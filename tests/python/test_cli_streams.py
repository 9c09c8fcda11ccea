# SPDX-License-Identifier: Apache-2.0
"""The program where it is not at home: closed or full streams, little address space, odd paths."""
import gzip
import json
import os
import resource
import signal
import subprocess
import time

import pytest


@pytest.fixture
def call(program):
    def run(*arguments, **options) -> subprocess.CompletedProcess:
        return subprocess.run([program, *map(str, arguments)],
                              capture_output=True, timeout=120, check=False, **options)
    return run


def trained(call, folder, *more, **options) -> subprocess.CompletedProcess:
    """A short run at folder/run."""
    made = call("synth", "cosir", "--rows", 600, "--image-dim", 16, "--text-dim", 16, "--out",
                folder / "data", "--quiet")
    assert made.returncode == 0, made.stderr
    return call("train", "cosir", "--data", folder / "data", "--out", folder / "run", "--epochs", 1,
                "--batch-size", 64, "--eval-pairs", 40, "--memory-limit", "1GiB", *more, **options)


def seal_toml(path, text):
    """As the program writes a run.toml: the CRC-32C of the text is its last line."""
    crc = 0xFFFFFFFF
    for byte in text.encode():
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    path.write_text(f"{text}# crc32c {crc ^ 0xFFFFFFFF:08x}\n")


@pytest.mark.parametrize("closed", [(2,), (1, 2), (0, 1, 2)])
def test_r48_closed_streams_never_become_files_of_the_run(program, call, tmp_path, closed):
    def close_streams():
        for descriptor in closed:
            os.close(descriptor)

    trained(call, tmp_path, "--set", "nonsense=1")  # Makes the data, and no run.
    words = [program, "train", "cosir", "--data", tmp_path / "data", "--out", tmp_path / "run",
             "--epochs", 1, "--batch-size", 64, "--eval-pairs", 40, "--memory-limit", "1GiB"]
    done = subprocess.run([str(word) for word in words], preexec_fn=close_streams, timeout=120,
                          stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == 0
    assert (tmp_path / "run" / ".lock").read_text().strip().isdigit()
    for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines():
        json.loads(line)
    made = tmp_path / "more"
    subprocess.run([program, "synth", "cosir", "--rows", "64", "--out", made],
                   preexec_fn=close_streams, timeout=120, check=True)
    assert call("store", "verify", made).returncode == 0


def test_r50_a_result_that_cannot_be_written_is_a_failure(program, tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    for words in (["limits"], ["limits", "--json"], ["--help"], ["--version"]):
        with open("/dev/full", "w", encoding="ascii") as full:
            done = subprocess.run([program, *words], stdout=full, stderr=subprocess.PIPE, text=True,
                                  timeout=60, check=False)
        assert done.returncode == 1, words
        assert "standard output: the result could not be written" in done.stderr
        assert ": No space left" in done.stderr or words[0] != "limits"


def bounded(which, mebibytes, program, *words):
    def bound(size=mebibytes << 20):
        resource.setrlimit(which, (size, size))
    done = subprocess.run([program, *map(str, words)], preexec_fn=bound, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != -signal.SIGABRT, (mebibytes, done.stderr)
    assert "terminate called" not in done.stderr and "bad_alloc" not in done.stderr
    return done


def synthesised_under(which, mebibytes, program, folder):
    return bounded(which, mebibytes, program, "synth", "cosir", "--rows", "300000", "--out", folder / str(mebibytes), "--quiet")


def trained_under(which, mebibytes, program, folder):
    """Of what trained() made."""
    return bounded(which, mebibytes, program, "train", "cosir", "--data", folder / "data", "--out", folder / str(mebibytes),
                   "--memory-limit", "1GiB", "--quiet")


def test_r50_too_little_address_space_is_named(program, call, tmp_path):
    """However far it gets: the libraries, the threads, the first allocation. What needs torch needs more."""
    trained(call, tmp_path, "--set", "nonsense=1")  # Makes the data, and no run.
    for work, sizes in ((synthesised_under, (16, 24, 32, 48, 56)), (trained_under, (64, 200, 300, 400, 500))):
        seen = 0
        for mebibytes in sizes:
            done = work(resource.RLIMIT_AS, mebibytes, program, tmp_path)
            seen += "ulimit -v" in done.stderr
            if done.returncode != 0:
                assert "ulimit -v" in done.stderr or "shared libraries" in done.stderr or \
                    "plimsoll: error: " in done.stderr, (mebibytes, done.returncode, done.stderr)
        assert seen > 0, work


def test_too_little_private_memory_is_named(program, call, tmp_path):
    """`ulimit -d`, which bounds private mappings and not the whole address space."""
    trained(call, tmp_path, "--set", "nonsense=1")
    for work, sizes in ((synthesised_under, (1, 8, 16, 24, 32)), (trained_under, (1, 8, 32, 64, 128))):
        assert any("ulimit -v or -d" in work(resource.RLIMIT_DATA, mebibytes, program, tmp_path).stderr for mebibytes in sizes), work


def test_too_few_threads_end_the_work_and_do_not_stop_it(program, tmp_path):
    """Those that did start would wait for ever for the others."""
    for mebibytes in (24, 28, 32):
        done = synthesised_under(resource.RLIMIT_DATA, mebibytes, program, tmp_path)
        if "Resource temporarily unavailable" in done.stderr:
            assert done.returncode == 1 and not (tmp_path / str(mebibytes)).exists()
            return
    pytest.fail("a thread could always be started")


def test_a_file_that_may_not_grow_is_named(program, tmp_path):
    """`ulimit -f`, whose signal would end the process; what `run` starts is told as it ever was."""
    done = synthesised_under(resource.RLIMIT_FSIZE, 1, program, tmp_path)
    assert done.returncode == 1 and "File too large" in done.stderr and str(tmp_path) in done.stderr
    done = subprocess.run([program, "run", "--alert", "1GiB", "--", "grep", "SigIgn", "/proc/self/status"],
                          capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout.split()[1], 16) & 1 << (signal.SIGXFSZ - 1) == 0


def test_r49_a_path_that_is_not_utf8_is_refused_at_the_start(program, tmp_path):
    odd = os.fsencode(tmp_path) + b"/M\xfcnchen"
    good = os.fsencode(tmp_path) + b"/good"
    for words in ([b"train", b"cosir", b"--data", good, b"--out", odd],
                  [b"synth", b"cosir", b"--rows", b"64", b"--out", odd],
                  [b"import", b"can", good, b"--out", odd],
                  [b"store", b"import", odd + b".npy", b"--out", good]):
        done = subprocess.run([os.fsencode(program), *words], capture_output=True, timeout=60,
                              check=False)
        assert done.returncode == 2, done.stderr
        assert b"is not UTF-8" in done.stderr and rb"M\xfcnchen" in done.stderr
    assert os.listdir(tmp_path) == []
    done = subprocess.run([os.fsencode(program), b"run", b"--alert", b"1GiB", b"--", b"echo", odd],
                          capture_output=True, timeout=60, check=False)
    assert done.stdout == odd + b"\n"  # What it starts may be told anything.


def test_r49_a_folder_that_is_not_utf8_is_refused_for_a_run(program, tmp_path):
    odd = os.fsencode(tmp_path) + b"/M\xfcnchen"
    os.mkdir(odd)
    done = subprocess.run([program, "train", "cosir", "--data", "d", "--out", "run"], cwd=odd,
                          capture_output=True, timeout=60, check=False)
    assert done.returncode == 2 and b"path is not UTF-8" in done.stderr
    assert os.listdir(odd) == []


def test_r68_a_name_of_20000_parts_is_refused(call, tmp_path):
    for content in ("[" + ".".join(["a"] * 20_000) + "]\n", ".".join(["a"] * 20_000) + " = 1\n"):
        (tmp_path / "deep.toml").write_text("seed = 1\n" + content)
        done = call("train", "cosir", "--config", tmp_path / "deep.toml", "--data", "d", "--out", "r")
        assert done.returncode == 2
        assert b"deep.toml:2: more than 64 dots in a line" in done.stderr
    seal_toml(tmp_path / "run.toml", "[" + ".".join(["a"] * 20_000) + "]\n")
    done = call("resume", tmp_path)
    assert done.returncode == 1 and b"more than 64 dots" in done.stderr


def wait_until_heeded(process, number):
    """Until the process has a handler of that signal, or has ended."""
    until = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < until:
        with open(f"/proc/{process.pid}/status") as status:
            caught, = (int(line.split()[1], 16) for line in status if line.startswith("SigCgt:"))
        if caught >> (number - 1) & 1:
            return
        time.sleep(0.01)


def test_r68_an_import_of_packed_newlines_heeds_sigterm(program, tmp_path):
    with open(tmp_path / "blank.csv.gz", "wb") as file:
        part = gzip.compress(b"\n" * (64 << 20), 9)
        file.write(b"".join([part] * 160))  # 10 GiB
    importing = subprocess.Popen([program, "import", "can", tmp_path / "blank.csv.gz", "--out",
                                  tmp_path / "graphs", "--quiet"], stderr=subprocess.PIPE, text=True)
    wait_until_heeded(importing, signal.SIGTERM)
    importing.send_signal(signal.SIGTERM)
    try:
        _, told = importing.communicate(timeout=20)
    finally:
        importing.kill()
    if "no zlib" in told:
        pytest.skip("the program was built without zlib")
    assert importing.returncode == 1 and "import cancelled" in told


@pytest.mark.parametrize("layout", ["any_order", "sample_order"])
def test_r68_a_read_only_run_is_evaluated(call, tmp_path, layout):
    done = trained(call, tmp_path, "--json", "--quiet", "--set", f"label_layout={layout}")
    assert done.returncode == 0, done.stderr
    trained_out = done.stdout
    run = tmp_path / "run"

    def names():
        return sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))

    if os.geteuid() == 0:  # To root every folder is writable, but none on a read-only mount is.
        mounted = subprocess.run(["unshare", "-m", "sh", "-c",
                                  'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"', "sh",
                                  run], capture_output=True, check=False)
        if mounted.returncode != 0:
            pytest.skip(f"no read-only mount: {mounted.stderr.decode()}")
        inside = ["unshare", "-m", "sh", "-c", 'mount --bind "$1" "$1" && '
                  'mount -o remount,bind,ro "$1" && shift && exec "$@"', "sh", str(run)]
    else:
        inside = []
        for folder, _, files in os.walk(run):
            for name in (folder, *(os.path.join(folder, file) for file in files)):
                os.chmod(name, 0o555)
    before = names()
    done = subprocess.run([*inside, os.environ.get("PLIMSOLL_PROGRAM", "plimsoll"), "eval", str(run),
                           "--json"], capture_output=True, text=True, timeout=120, check=False)
    for folder, _, _ in os.walk(run):
        os.chmod(folder, 0o755)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recall"]["raw"] == json.loads(trained_out)["recall"]["raw"]
    assert names() == before
