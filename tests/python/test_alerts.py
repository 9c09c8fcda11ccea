# SPDX-License-Identifier: Apache-2.0
"""Alerts of `plimsoll run` and `plimsoll watch`: told, and acted upon before the kernel does."""
import json
import math
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.support.cgroup import MemoryCgroup

# Grows by so many MiB a second, in pieces of 4 MiB; ends as asked, with a word, where it is told to.
GROW = """
import signal, sys, time
if "save" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved", flush=True)))
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
kept, began = [], time.monotonic()
while True:
    kept.append(b"x" * (4 << 20))
    time.sleep(max(0, began + len(kept) * 4 / float(sys.argv[1]) - time.monotonic()))
"""


def run_program(program, *words, **options):
    return subprocess.run([program, *map(str, words)], text=True, capture_output=True, timeout=120, check=False,
                          **options)


def alerts_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("rate", "more"), [(50, []), (400, []), (2000, []), (100, ["--no-cgroup"])])
def test_t9_a_command_hears_of_the_limit_before_the_kernel_kills(program, tmp_path, rate, more):
    if not more:
        MemoryCgroup.needed()
    done = run_program(program, "run", "--memory-limit", "512MiB", "--signal", "TERM,KILL", "--alert-file",
                       tmp_path / "alerts", "--json", *more, "--", sys.executable, "-c", GROW, rate, "save")
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["ending"] == "stopped" and told["oom_kills"] == 0, done.stderr
    assert "stopped by SIGTERM before its limit of 512.0 MiB" in done.stderr
    if rate < 1000:  # Else it may have been asked twice before Python came to hear of it.
        assert done.stdout.startswith("saved\n"), done.stderr
    levels = [one["level"] for one in alerts_of(tmp_path / "alerts")]
    assert "act" in levels and "signal" in levels
    assert rate > 100 or levels[0] == "high"
    assert told["peak_bytes"] <= 520 << 20


def test_the_second_signal_ends_what_does_not_listen(program):
    MemoryCgroup.needed()
    done = run_program(program, "run", "--memory-limit", "512MiB", "--signal", "TERM,KILL", "--json", "--",
                       sys.executable, "-c", GROW, 100, "deaf")
    told = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 137 and told["ending"] == "stopped" and told["oom_kills"] == 0, done.stderr
    assert done.stderr.count("is sent") == 2


def test_without_a_signal_nothing_is_sent_and_a_command_is_told(program, tmp_path):
    MemoryCgroup.needed()
    heard = tmp_path / "heard"
    done = run_program(program, "run", "--memory-limit", "256MiB", "--alert-command", f"cat >> {heard}", "--",
                       sys.executable, "-c", GROW, 100)
    assert done.returncode == 137 and "killed for memory at its limit" in done.stderr
    assert {one["level"] for one in alerts_of(heard)} >= {"act"}
    assert "processes it left behind" not in done.stderr


def test_a_size_of_ones_own_is_told_to_the_command_too(program, tmp_path):
    done = run_program(program, "run", "--alert", "24MiB", "--alert-file", tmp_path / "file", "--", sys.executable, "-c",
                       "import time; x = b'x' * (64 << 20); time.sleep(3)")
    assert done.returncode == 0
    one, = [one for one in alerts_of(tmp_path / "file") if one["level"] == "size"]
    assert "more than 24.0 MiB" in one["text"]


@pytest.mark.parametrize(("words", "text"), [
    (["run", "--signal", "SOON", "--", "true"], "--signal"),
    (["run", "--memory-limit", "1GiB", "--reserve", "much", "--", "true"], "--reserve"),
    (["watch"], "--find"),
    (["watch", "1", "--find"], "--find"),
    (["watch", "1", "--listen", "99999"], "--listen"),
    (["watch", "1", "--signal", "TERM,"], "--signal"),
])
def test_wrong_usage_is_explained(program, words, text):
    done = run_program(program, *words)
    assert done.returncode == 2 and text in done.stderr, done.stderr


def test_t9_a_watched_process_gets_the_signal_before_its_cgroup_is_full(program, tmp_path):
    MemoryCgroup.needed()
    with MemoryCgroup(512 << 20) as group:
        child = group.start([sys.executable, "-c", GROW, "100", "save"], stdout=subprocess.PIPE, text=True)
        watch = subprocess.Popen([program, "watch", str(child.pid), "--signal", "TERM", "--alert-file",
                                  tmp_path / "alerts"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, _ = child.communicate(timeout=60)
        _, err = watch.communicate(timeout=60)
        assert child.returncode == 0 and out == "saved\n" and group.oom_kills() == 0
    assert watch.returncode == 0 and "SIGTERM is sent" in err
    levels = [one["level"] for one in alerts_of(tmp_path / "alerts")]
    assert levels[:2] == ["high", "act"] and "signal" in levels


@pytest.fixture
def holder():
    child = subprocess.Popen([sys.executable, "-c", "x = b'x' * (64 << 20); print('ready', flush=True); input()"],
                             text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.wait()


def test_a_watch_without_a_signal_sends_none(program, holder, tmp_path):
    watch = subprocess.Popen([program, "watch", str(holder.pid), "--alert-file", tmp_path / "alerts", "--json",
                              "--reserve", "1000GiB"], stdout=subprocess.PIPE, text=True)
    for _ in range(3):
        json.loads(watch.stdout.readline())
    assert holder.poll() is None
    watch.kill()
    watch.communicate()


SAMPLE = re.compile(r'(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)')
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')


def parse_exposition(text: str) -> dict:
    """By the grammar of format 0.0.4: {(name, labels): value}; refuses what it does not have."""
    samples, types = {}, {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types and kind == "gauge"
            types[name] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match and match["name"] in types, line
            labels, at = [], 0
            while match["labels"] and at < len(match["labels"]):
                one = LABEL.match(match["labels"], at)
                assert one, line
                labels.append(one.groups())
                at = one.end()
            key = (match["name"], tuple(labels))
            assert key not in samples, line
            samples[key] = float(match["value"].replace("+Inf", "inf"))
    return samples


def test_prometheus_is_answered_on_the_loopback_alone(program, holder):
    watch = subprocess.Popen([program, "watch", str(holder.pid), "--listen", "0", "--json", "--every", "0.2"],
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", watch.stderr.readline())
        port = int(url[1])
        with socket.create_connection(("127.0.0.1", port)) as idle:  # Says nothing, and holds up nobody.
            with urllib.request.urlopen(url[0], timeout=20) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                samples = parse_exposition(answer.read().decode())
            idle.close()
        target = ("target", f"process {holder.pid}")
        assert samples["plimsoll_held_bytes", (target,)] >= 64 << 20
        assert samples["plimsoll_owner_bytes", (target, ("owner", "heap"))] >= 64 << 20
        assert math.isinf(samples["plimsoll_seconds_left", (target,)])
        assert samples["plimsoll_leak_bytes_per_second", (target,)] == 0
        limit, = [key for key in samples if key[0] == "plimsoll_limit_bytes"]
        assert samples["plimsoll_left_bytes", (target,)] <= samples[limit]
        for path, status in (("/", 404), ("/metrics/x", 404)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20)
            assert refused.value.code == status
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url[0], data=b"x", timeout=20)
        assert refused.value.code == 405
        listening = [line.split()[1] for line in open("/proc/net/tcp") if line.split()[3] == "0A"]
        assert [address for address in listening if address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
        taken = run_program(program, "watch", holder.pid, "--listen", port)
        assert taken.returncode == 1 and f"--listen {port}" in taken.stderr
    finally:
        watch.kill()
        watch.communicate()


def test_t9_training_is_found_by_what_it_is(program, tmp_path):
    """One with torch and its workers, one that holds a run's lock, and one whose path has "train" in it."""
    run = tmp_path / "a run"
    run.mkdir()
    (run / "run.toml").write_text("")
    (tmp_path / "train").mkdir()
    named = tmp_path / "train" / "train.py"
    named.write_text("import os; print(os.getpid(), flush=True); input()")
    torch = ("import torch, os\nif os.fork() == 0: input()\nprint(os.getpid(), flush=True); input()")
    lock = (f"import os\nlock = open({str(run / '.lock')!r}, 'w'); print(os.getpid(), file=lock, flush=True)\n"
            "print(os.getpid(), flush=True); input()")
    children = [subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                for words in (["-c", torch], ["-c", lock], [str(named)])]
    try:
        with_torch, with_lock, with_name = [int(child.stdout.readline()) for child in children]
        found = {one["pid"]: one for one in json.loads(run_program(program, "watch", "--find", "--json").stdout)}
        assert found[with_torch]["torch"] and found[with_torch]["run"] == ""
        assert found[with_lock]["run"] == str(run)
        assert with_name not in found
        ours = [pid for pid, one in found.items() if "os.getpid()" in one["command"]]
        assert sorted(ours) == sorted([with_torch, with_lock])  # And not the forked worker.
    finally:
        for child in children:
            child.stdin.close()
            child.send_signal(signal.SIGKILL)
            child.wait()


LAUNCHER = r"""
import multiprocessing, os, subprocess, sys, time
import torch

def worker(asked):
    import torch
    os.write(1, f"worker {os.getpid()}\n".encode())  # Whole, beside what others write.
    asked.wait(60)

if __name__ == "__main__":
    asked = multiprocessing.get_context("spawn").Event()
    trainer = subprocess.Popen([sys.executable, "-c", "import os, torch; os.write(1, f'trainer {os.getpid()}\\n'.encode()); input()"])
    for start in ("fork", "spawn", "forkserver"):
        multiprocessing.get_context(start).Process(target=worker, args=(asked,), daemon=True).start()
    os.write(1, f"launcher {os.getpid()}\n".encode())
    sys.stdin.read()
    asked.set()
"""


def test_t9_a_trainer_is_found_below_a_launcher_that_has_torch_and_workers_are_not(program, tmp_path):
    (tmp_path / "launch.py").write_text(LAUNCHER)
    launcher = subprocess.Popen([sys.executable, tmp_path / "launch.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                text=True)
    try:
        said = [launcher.stdout.readline().split() for _ in range(5)]
        found = {one["pid"] for one in json.loads(run_program(program, "watch", "--find", "--json").stdout)}
        by_kind = {kind: [int(pid) for word, pid in said if word == kind] for kind in ("launcher", "trainer", "worker")}
        assert len(by_kind["worker"]) == 3
        assert found >= {*by_kind["launcher"], *by_kind["trainer"]}
        assert not found & {*by_kind["worker"]}
    finally:
        launcher.communicate(timeout=60)


def test_alerts_cost_little(program, holder, tmp_path):
    """A look of 5 ms apart is for the last moments only."""
    watch = subprocess.Popen([program, "watch", str(holder.pid), "--signal", "TERM", "--alert-file",
                              tmp_path / "alerts"], stdout=subprocess.DEVNULL)
    time.sleep(2)
    with open(f"/proc/{watch.pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    watch.kill()
    watch.wait()
    assert (int(fields[11]) + int(fields[12])) / 100 < 0.5  # Seconds of a core, at its start too.


@pytest.mark.parametrize("json_lines", [False, True])
def test_s44_a_size_that_any_process_passes_is_told_as_run_tells_it(program, tmp_path, json_lines):
    """Told once while it stays, and again after less was held; on standard error, in the file, to the command."""
    steps = ("import sys\nheld = []\nfor line in sys.stdin:\n    held = [b'x' * (int(line) << 20)]\n"
             "    print(len(held[0]), flush=True)")
    process = subprocess.Popen([sys.executable, "-c", steps], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def hold(mebibytes):
        process.stdin.write(f"{mebibytes}\n")
        process.stdin.flush()
        assert int(process.stdout.readline()) == mebibytes << 20

    def told(count):
        while not alerts.exists() or len([one for one in alerts_of(alerts) if one["level"] == "size"]) < count:
            assert watch.poll() is None, watch.communicate()
            time.sleep(0.02)

    alerts, asked = tmp_path / "alerts.jsonl", tmp_path / "asked"
    hold(1)
    watch = subprocess.Popen(
        [program, "watch", str(process.pid), "--alert", "150MiB", "--every", "0.05", "--alert-file", alerts,
         "--alert-command", f"cat >> {asked}", *(["--json"] if json_lines else [])],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    hold(200)
    told(1)
    hold(1)
    shown = 0
    while shown < 3:  # Looks at less.
        line = watch.stdout.readline()
        said = json_lines or re.match(r"process \d+: ([\d.]+) MiB in 1 process$", line)
        shown += bool(said) and (json.loads(line)["held_bytes"] if json_lines else float(said[1]) * (1 << 20)) < 150 << 20
    hold(200)
    told(2)
    process.stdin.close()
    process.wait()
    _, err = watch.communicate(timeout=60)
    assert watch.returncode == 0
    holding = f"plimsoll watch: process {process.pid} holds "  # A look may see it while it grows.
    assert all(line.startswith(holding) and line.endswith(" MiB, more than 150.0 MiB") for line in err.splitlines()), err
    assert err.count(holding) == 2, err
    assert "more than 150.0 MiB" in asked.read_text()
    assert all(one["text"].startswith(f"process {process.pid} holds") for one in alerts_of(alerts)
               if one["level"] == "size")


def test_s44_wrong_sizes_are_named_and_swap_is_told_of(program):
    done = run_program(program, "watch", 1, "--alert", "soon")
    assert done.returncode == 2 and "--alert" in done.stderr
    done = run_program(program, "limits")
    assert done.returncode == 0 and re.search(r"^swap: (none|\S+ \w+, .* of it used)", done.stdout, re.MULTILINE), done.stdout
    assert json.loads(run_program(program, "limits", "--json").stdout)["swap_bytes"] >= 0
