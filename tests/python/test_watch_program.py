# SPDX-License-Identifier: Apache-2.0
"""`plimsoll watch`: any process from outside, and the one that trains in a run."""
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import urllib.request

import pytest

HOLD = "held = bytearray(64 << 20); print('ready', flush=True); input()"


@pytest.fixture
def holder():
    child = subprocess.Popen([sys.executable, "-c", HOLD], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.wait()


def watch_program(program, *words, **options):
    return subprocess.run([program, "watch", *map(str, words)], text=True, capture_output=True, timeout=120,
                          check=False, **options)


def test_one_look_says_who_holds_what(program, holder):
    done = watch_program(program, holder.pid, "--once", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["pid"] == holder.pid and told["close"] and told["looks"] == 1
    assert told["owners"]["heap"] >= 64 << 20 and told["owners"]["children"] < 16 << 20
    assert told["held_bytes"] >= 64 << 20 and told["bound_bytes"] >= told["held_bytes"]
    assert told["verdict"]["kind"] == "too short" and told["verdict"]["unit"] == "second"
    assert 0 < told["room"]["left_bytes"] < told["room"]["limit_bytes"]
    assert told["room"]["seconds_left"] is None
    text = watch_program(program, holder.pid, "--once").stdout
    assert text.startswith(f"process {holder.pid}: ") and "\n  heap " in text and "\x1b" not in text
    assert "too early: 0 of 7 windows of 25 seconds were seen, the others take 175 seconds more; so far nothing rises" in text


# Holds the lock of a run as a trainer does, makes five steps a time, and keeps 100 kB of each; of 2 GB in all.
TRAINER = """
import fcntl, json, os, pathlib, sys, time
run = pathlib.Path(sys.argv[1])
(run / "run.toml").write_text("")
lock = open(run / ".lock", "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print(os.getpid(), file=lock, flush=True)
kept = []
for step in range(5, 20_000, 5):
    kept.append(bytearray(500_000))
    status = dict(status="running", step=step, limit_bytes=2 << 30, leased_by_tag=dict(tensors=1 << 20, rows=2 << 20),
                  devices=[dict(name="cuda", limit_bytes=9 << 30, context_bytes=5 << 20, allocated_bytes=7 << 20, reserved_bytes=8 << 20)])
    (run / "status.new").write_text(json.dumps(status))
    os.replace(run / "status.new", run / "status.json")
    if step == 5:
        print("ready", flush=True)
    time.sleep(0.02)
"""


def first_verdict(program, child: subprocess.Popen, target) -> dict:
    """Of a watch that goes on until there is one, however slow the machine is; ends both."""
    with subprocess.Popen([program, "watch", str(target), "--json", "--every", "0.05"], text=True,
                          stdout=subprocess.PIPE) as watch:
        for line in watch.stdout:
            told = json.loads(line)
            if told["verdict"]["kind"] != "too short":
                break
        child.kill()
        child.wait()
        watch.stdout.read()
    assert watch.returncode == 0
    return told


def test_a_run_has_its_steps_its_leases_and_its_limit(program, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", TRAINER, tmp_path], text=True, stdout=subprocess.PIPE)
    assert child.stdout.readline() == "ready\n"
    told = first_verdict(program, child, tmp_path)
    verdict = told["verdict"]
    assert told["pid"] == child.pid and verdict["unit"] == "step"
    assert verdict["kind"] == "leak" and verdict["owner"] == "unexplained", verdict["text"]
    assert verdict["bytes_per_unit"] == pytest.approx(100_000, rel=0.2)
    assert told["owners"]["tensors"] == 1 << 20 and told["owners"]["leased"] == 2 << 20
    room = told["room"]
    if room["source"] == "limit of the run":  # Unless the machine has less.
        assert room["limit_bytes"] == 2 << 30
        assert room["left_bytes"] == (2 << 30) - told["held_bytes"]
    assert room["seconds_left"] == pytest.approx(room["left_bytes"] / verdict["bytes_per_second"])
    done = watch_program(program, tmp_path, "--once")
    assert done.returncode == 4 and "no process trains there" in done.stderr


def test_a_process_that_leaks_is_told_by_the_second_and_it_ends_with_it(program):
    leak = "import time\nkept = []\nfor _ in range(4000): kept.append(bytearray(300_000)); time.sleep(0.02)"
    child = subprocess.Popen([sys.executable, "-c", leak])
    verdict = first_verdict(program, child, child.pid)["verdict"]
    assert verdict["kind"] == "leak" and verdict["owner"] == "heap", verdict["text"]
    assert verdict["unit"] == "second" and verdict["text"].endswith(" a second")
    assert verdict["bytes_per_unit"] == pytest.approx(verdict["bytes_per_second"], rel=0.02)
    assert verdict["bytes_per_unit"] < 300_000 / 0.02
    assert len(verdict["advice"]) == 1


def test_text_that_nobody_watches_live_has_no_control_codes(program, holder):
    with subprocess.Popen([program, "watch", str(holder.pid), "--every", "0.05"], text=True,
                          stdout=subprocess.PIPE) as watch:
        looks = 0
        for line in watch.stdout:
            assert "\x1b" not in line
            looks += line.startswith(f"process {holder.pid}: ")
            if looks == 3:
                break
        holder.kill()
        assert watch.stdout.read().endswith(f"process {holder.pid} has ended\n")


@pytest.mark.parametrize("columns", [0, 30])  # Not known; narrower than the lines.
def test_a_terminal_is_written_in_place(program, holder, columns):
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    watch = subprocess.Popen([program, "watch", str(holder.pid), "--every", "0.05"], stdout=end)
    os.close(end)
    text = b""
    while text.count(b"\x1b[J") < 2:
        text += os.read(terminal, 4096)
    holder.kill()
    assert watch.wait(timeout=60) == 0
    os.close(terminal)
    first = text[:text.index(b"\x1b[")]
    lines = first.decode().splitlines()
    rows = sum(-(-len(line) // columns) for line in lines) if columns else len(lines)
    assert rows >= len(lines) + 2 * (columns > 0)
    assert text[len(first):].startswith(f"\x1b[{rows}F\x1b[J".encode())


def test_a_run_in_which_nobody_trains_and_what_is_none(program, tmp_path):
    assert "no run there" in watch_program(program, tmp_path).stderr
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    done = watch_program(program, child.pid, "--once")
    assert done.returncode == 1 and f"process {child.pid} has ended" in done.stderr
    assert watch_program(program, os.getpid(), "--every", "0").returncode == 2


def test_prometheus_is_told_what_is_held_of_a_run_s_devices(program, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", TRAINER, tmp_path], text=True, stdout=subprocess.PIPE)
    assert child.stdout.readline() == "ready\n"
    with subprocess.Popen([program, "watch", str(tmp_path), "--listen", "0", "--json"], text=True, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE) as watch:
        with urllib.request.urlopen(re.search(r"http://\S+/metrics", watch.stderr.readline())[0], timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        child.kill()
        child.wait()
    told = {re.sub(r'target="[^"]*",', "", line.rpartition(" ")[0]): float(line.rpartition(" ")[2]) for line in lines if "_device_" in line and line[0] != "#"}
    assert told == {'plimsoll_device_bytes{device="cuda",owner="tensors"}': 7 << 20, 'plimsoll_device_bytes{device="cuda",owner="cache"}': 1 << 20,
                    'plimsoll_device_bytes{device="cuda",owner="context"}': 5 << 20, 'plimsoll_device_limit_bytes{device="cuda"}': 9 << 30}
