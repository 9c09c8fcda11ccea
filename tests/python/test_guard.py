# SPDX-License-Identifier: Apache-2.0
"""`plimsoll run`: any command under a limit, and what the user is told at its end."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.support.cgroup import MemoryCgroup

HOLD = "import time; held = bytearray(int({} * 2**20)); time.sleep({})"


@pytest.fixture
def plimsoll(program):
    def run(*words, **options):
        return subprocess.run([program, "run", *map(str, words)], text=True, capture_output=True,
                              timeout=60, **options)
    return run


def test_the_command_is_as_alone(plimsoll):
    done = plimsoll("--memory-limit", "2GiB", "--", sys.executable, "-c",
                    "import sys; print(sys.stdin.read().upper()); sys.exit(5)", input="words")
    assert done.returncode == 5
    assert done.stdout == "WORDS\n"
    assert "ended with status 5" in done.stderr and "of 2.0 GiB" in done.stderr
    assert "would help" not in done.stderr


def test_in_a_cgroup_it_is_killed_at_the_limit_and_told_what_would_help(plimsoll):
    MemoryCgroup.needed()
    done = plimsoll("--memory-limit", "128MiB", "--json", "--", sys.executable, "-c",
                    HOLD.format(400, 5))
    assert done.returncode == 137
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["ending"] == "killed_for_limit" and told["oom_kills"] == 1 and told["in_cgroup"]
    # Pages of libraries that others have in use are not charged to it.
    assert told["process_peak_bytes"] < 160 << 20
    assert "killed for memory at its limit of 128.0 MiB" in done.stderr
    assert "would help: a higher limit" in done.stderr


@pytest.mark.parametrize("more", [[], ["--no-cgroup"]])
def test_t10_the_cgroup_around_it_is_told_from_its_own_limit(program, tmp_path, more):
    MemoryCgroup.needed()
    with MemoryCgroup(300 << 20) as group:
        done = group.run([program, "run", "--memory-limit", "600MiB", "--json", "--record", tmp_path, *more, "--",
                          sys.executable, "-c", HOLD.format(500, 5).replace("bytearray(", "b'x' * (")])
    told = done.last_json
    assert told["status"] == 137 and told["oom_kills"] == 1 and told["ending"] == "killed_in_cgroup", told
    assert told["killer_limit_bytes"] == 300 << 20
    assert "killed for memory in the cgroup around it, which may hold 300.0 MiB" in done.stderr
    why = json.loads(subprocess.run([program, "why", tmp_path, "--json"], text=True, capture_output=True,
                                    check=True).stdout)
    assert why["cause"] == "killed_in_cgroup" and why["incident"] and why["memory"]
    assert "(limit 300.0 MiB), not at the limit of 600.0 MiB" in why["summary"]


def test_without_a_cgroup_it_is_measured_and_stopped(plimsoll):
    done = plimsoll("--memory-limit", "128MiB", "--alert", "64MiB", "--no-cgroup", "--json", "--",
                    sys.executable, "-c", HOLD.format(129, 20))
    assert done.returncode == 128 + signal.SIGTERM
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["ending"] == "stopped" and not told["in_cgroup"]
    assert "more than 64.0 MiB" in done.stderr
    assert "over the limit of 128.0 MiB: asked to end" in done.stderr
    assert "no cgroup holds the limit" in done.stderr.splitlines()[0]


def test_who_ends_well_when_asked_has_failed_all_the_same(plimsoll):
    save = ("import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved')))\n"
            + HOLD.format(129, 20))
    done = plimsoll("--memory-limit", "128MiB", "--no-cgroup", "--", sys.executable, "-c", save)
    assert done.stdout == "saved\n"
    assert done.returncode == 1


def test_a_signal_is_handed_on(program):
    guard = subprocess.Popen(
        [program, "run", "--alert", "2GiB", "--", "sh", "-c",
         "trap 'echo told; exit 9' TERM; echo ready; while :; do sleep 0.05; done"],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert guard.stdout.readline() == "ready\n"
    guard.send_signal(signal.SIGTERM)
    out, _ = guard.communicate(timeout=30)
    assert out == "told\n" and guard.returncode == 9


def ended(pid):
    """Waits until a process is gone, or dead and not yet waited for by whoever inherited it."""
    for _ in range(600):
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


# Prints its PID and that of a process below it, in one line; `words` come first in both shells.
FAMILY = "{words} sh -c '{words} echo $PPID $$; while :; do sleep 0.1; done' & wait; sleep 60"


class Guarded:
    """A running `plimsoll run`: its keeper, its guard, two processes of its command, and their cgroup."""

    def __init__(self, program, *words, deaf=False):
        family = FAMILY.format(words='trap "" TERM;' if deaf else "")
        self.keeper = subprocess.Popen([program, "run", *words, "--", "sh", "-c", family], text=True,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.family = [int(pid) for pid in self.keeper.stdout.readline().split()]
        with open(f"/proc/{self.family[0]}/status", encoding="ascii") as file:
            self.guard = next(int(line.split()[1]) for line in file if line.startswith("PPid:"))
        with open(f"/proc/{self.family[0]}/cgroup", encoding="ascii") as file:
            lines = [line.strip().split(":", 2) for line in file]
        self.groups = [path for name in ("/memory", "/unified", "") for _, _, below in lines
                       if os.path.isdir(path := f"/sys/fs/cgroup{name}{below}") and "/plimsoll-" in path]


@pytest.mark.parametrize("killed", ["guard", "keeper"])
def test_s45_the_command_ends_with_its_guard(program, killed):
    run = Guarded(program, "--alert", "2GiB")
    assert run.guard != run.keeper.pid
    os.kill(run.guard if killed == "guard" else run.keeper.pid, signal.SIGKILL)
    assert all(ended(pid) for pid in [*run.family, run.guard, run.keeper.pid])
    assert run.keeper.wait() in (137, -9)


def test_s45_who_does_not_hear_ends_with_the_guard_too_and_why_names_it(program, tmp_path):
    run = Guarded(program, "--memory-limit", "1GiB", "--record", tmp_path, deaf=True)
    os.kill(run.guard, signal.SIGKILL)
    out, err = run.keeper.communicate(timeout=60)
    assert run.keeper.returncode == 137 and all(ended(pid) for pid in run.family)
    assert f"its guard, PID {run.guard}" in err
    assert not any(map(os.path.exists, run.groups))
    why = json.loads(subprocess.run([program, "why", tmp_path, "--json"], text=True, capture_output=True,
                                    check=True).stdout)
    assert why["cause"] == "killed" and f"its guard, PID {run.guard}" in why["summary"], why


def test_s45_the_next_start_removes_the_cgroup_that_a_killed_guard_left(program, plimsoll):
    MemoryCgroup.needed()
    run = Guarded(program, "--memory-limit", "1GiB")
    alive = Guarded(program, "--memory-limit", "1GiB")
    assert run.groups and alive.groups
    for pid in (run.keeper.pid, run.guard):  # At once: neither is there to see the other's end.
        os.kill(pid, signal.SIGSTOP)
    for pid in (run.keeper.pid, run.guard, *run.family):
        os.kill(pid, signal.SIGKILL)
    run.keeper.wait()
    assert all(ended(pid) for pid in (*run.family, run.guard)) and all(map(os.path.exists, run.groups))
    while any(pathlib.Path(group, "cgroup.procs").read_text() for group in run.groups):  # A `sleep 0.1` of the family's.
        time.sleep(0.01)
    assert plimsoll("--memory-limit", "1GiB", "--", "true").returncode == 0
    assert not any(map(os.path.exists, run.groups)) and all(map(os.path.exists, alive.groups))
    alive.keeper.terminate()
    assert alive.keeper.wait(timeout=60) != 0 and not any(map(os.path.exists, alive.groups))


GROWING_FAMILY = """
import os, sys, time
print(open('/proc/self/oom_score_adj').read(), flush=True)
for _ in range(40):
    if os.fork() == 0:
        break
else:
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) & 0xFF)
held = []
while True:
    held.append(b'x' * 2**20)
    time.sleep(.1)
"""


@pytest.mark.parametrize("may_lower", [True, False])
def test_s45_the_kernel_chooses_the_command_and_not_its_guard(program, tmp_path, may_lower):
    """A command of forty processes, each of them smaller than the guard; with and without the right to lower a score."""
    MemoryCgroup.needed()
    lower = ["sh", "-c", "echo -5 > /proc/self/oom_score_adj"]
    before = [] if may_lower else ["setpriv", "--bounding-set", "-sys_resource"]
    if subprocess.run(before + ["true"], check=False).returncode != 0:
        pytest.skip("setpriv does not work here")
    may_lower = may_lower and subprocess.run(lower, check=False, stderr=subprocess.DEVNULL).returncode == 0
    with MemoryCgroup(120 << 20) as group:
        done = group.run([*before, program, "run", "--memory-limit", "600MiB", "--json", "--record", tmp_path, "--",
                          sys.executable, "-c", GROWING_FAMILY])
    told = done.last_json
    assert told["oom_kills"] >= 1 and told["ending"] == "killed_in_cgroup" and told["status"] in (137, 256 - 9), done.stderr
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        own = int(file.read())
    assert own == 1000 or (int(done.stdout.split()[0]) == own) is may_lower
    why = json.loads(subprocess.run([program, "why", tmp_path, "--json"], text=True, capture_output=True,
                                    check=True).stdout)
    assert why["cause"] == "killed_in_cgroup" and "its guard" not in why["summary"]


@pytest.mark.parametrize(("words", "text"), [
    (["--", "true"], "give --memory-limit, --device-memory-limit, --alert, --restarts, --record or --signal"),
    (["--memory-limit", "much", "--", "true"], "--memory-limit"),
    (["--memory-limit", "1GiB", "--alert", "soon", "--", "true"], "--alert"),
    (["--memory-limit", "1GiB"], "COMMAND"),
])
def test_wrong_usage_is_explained(plimsoll, words, text):
    done = plimsoll(*words)
    assert done.returncode == 2 and text in done.stderr


def test_a_command_that_is_not_there(plimsoll):
    done = plimsoll("--memory-limit", "1GiB", "--", "plimsoll-no-such-program")
    assert done.returncode == 1
    assert "plimsoll-no-such-program: no such program" in done.stderr


def test_json_goes_to_a_file_apart_from_what_the_command_prints(plimsoll, tmp_path):
    said = json.dumps({"ending": "none of ours"})
    done = plimsoll("--memory-limit", "1GiB", "--json-file", tmp_path / "told", "--", sys.executable, "-c", f"print({said!r}, end=''); exit(3)")
    told = json.loads((tmp_path / "told").read_text())
    assert (done.returncode, done.stdout, told["ending"], told["status"]) == (3, said, "done", 3)
    done = plimsoll("--memory-limit", "1GiB", "--json-file", tmp_path / "none" / "told", "--", "true")
    assert done.returncode == 0 and "told: what came of the command could not be written" in done.stderr


def test_r66_the_peak_is_never_below_the_processes_own(plimsoll):
    """Held and given back within a tenth of the time between two looks."""
    brief = "import time; time.sleep(.3); x = bytearray(300 << 20); del x; time.sleep(.3)"
    for more in ([], ["--no-cgroup"]):
        done = plimsoll("--memory-limit", "600MiB", "--json", *more, "--", sys.executable, "-c", brief)
        told = json.loads(done.stdout.splitlines()[-1])
        assert told["process_peak_bytes"] >= 300 << 20
        assert told["peak_bytes"] >= told["process_peak_bytes"]
        assert "ended with status 0" in done.stderr and "; peak 3" in done.stderr, done.stderr


def test_r61_a_fast_leak_is_told_as_growth_and_nothing_else(plimsoll):
    if reason := MemoryCgroup.why_not():
        pytest.skip(reason)
    leak = ("import time\nkept = []\n"
            "while True: kept.append(bytearray(2 << 20)); time.sleep(.04)")
    done = plimsoll("--memory-limit", "192MiB", "--", sys.executable, "-c", leak)
    assert done.returncode == 137
    helps = [line for line in done.stderr.splitlines() if "would help" in line]
    assert len(helps) == 1 and "grew steadily, by" in helps[0], done.stderr
    assert "would only put off the end" in helps[0]


# Each start appends a letter to the file, and ends as the word of its number says: a status or a signal.
TRIES = """
import os, pathlib, signal, sys, time
tries = pathlib.Path(sys.argv[1])
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
now = sys.argv[1 + len(tries.read_text())]
if now == "wait":
    print("ready", flush=True)
    time.sleep(60)
if ":" in now:
    now, told = now.split(":", 1)
    with open(os.environ["PLIMSOLL_PROGRESS"], "w") as note:
        note.write(told)
if now.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, now))
sys.exit(int(now))
"""


def starts(plimsoll, tmp_path, restarts, *endings, **options):
    done = plimsoll("--restarts", restarts, "--json", "--", sys.executable, "-c", TRIES,
                    tmp_path / "tries", *endings, **options)
    return done, len((tmp_path / "tries").read_text())


def test_r35_what_was_killed_or_failed_is_started_again_after_longer_and_longer_pauses(plimsoll, tmp_path):
    done, count = starts(plimsoll, tmp_path, 5, "SIGKILL", "1", "0", "1")
    assert done.returncode == 0 and count == 3
    assert json.loads(done.stdout.splitlines()[-1])["restarts"] == 2
    assert "started again in 1 s (1 of 5)\n" in done.stderr
    assert "started again in 2 s (2 of 5)\n" in done.stderr


def test_restarts_are_counted(plimsoll, tmp_path):
    done, count = starts(plimsoll, tmp_path, 1, "1", "7", "0")
    assert done.returncode == 7 and count == 2
    assert "that was the last of --restarts 1" in done.stderr


@pytest.mark.parametrize("status", [2, 126, 127])
def test_a_wrong_use_is_not_tried_again(plimsoll, tmp_path, status):
    done, count = starts(plimsoll, tmp_path, 5, status, "0")
    assert done.returncode == status and count == 1


def test_who_gets_no_further_is_not_started_again(plimsoll, tmp_path):
    done, count = starts(plimsoll, tmp_path, 9, "1:run: step 3", "1:run: step 4", "1:run: step 4", "0")
    assert done.returncode == 1 and count == 3
    assert "started again in 1 s (1 of 9), from run: step 3\n" in done.stderr
    assert "ended twice without getting further (run: step 4): not started again" in done.stderr


def test_a_guard_without_restarts_leaves_the_progress_to_the_one_around_it(plimsoll, program, tmp_path):
    done = plimsoll("--restarts", 9, "--", program, "run", "--alert", "2GiB", "--", sys.executable, "-c", TRIES,
                    tmp_path / "tries", "1:run: step 4", "1:run: step 4", "0")
    assert done.returncode == 1 and (tmp_path / "tries").read_text() == "xx", done.stderr
    assert "ended twice without getting further (run: step 4)" in done.stderr


def test_who_was_asked_to_end_is_not_started_again(program, tmp_path):
    guard = subprocess.Popen(
        [program, "run", "--restarts", "5", "--", sys.executable, "-c", TRIES, tmp_path / "tries", "wait"],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert guard.stdout.readline() == "ready\n"
    guard.send_signal(signal.SIGTERM)
    guard.communicate(timeout=30)
    assert guard.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "tries").read_text() == "x"


# ---- The limit of a GPU's memory ----

SAYS = "import os; print(os.environ.get('PLIMSOLL_DEVICE_MEMORY_LIMIT'), os.environ.get('PYTORCH_CUDA_ALLOC_CONF'))"
DRIVER = """
#include <string.h>
struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { return %(begins)d; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned at, void** card) { *card = (void*)(unsigned long)(at + 1); return 0; }
int nvmlDeviceGetMemoryInfo(void* card, struct memory* out) { out->total = (unsigned long long)(unsigned long)card * (20ull << 30); return 0; }
"""


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """Makes a driver of two GPUs, of 20 and 40 GiB, which this machine has not."""
    def made(begins=0):
        (tmp_path / "nvml.c").write_text(DRIVER % {"begins": begins})
        subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", tmp_path / "nvml.c"], check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    return made


@pytest.mark.parametrize("limit, had, wanted", [
    ("10GiB", None, "per_process_memory_fraction:0.250000"), ("80%", None, "per_process_memory_fraction:0.800000"),
    ("100GiB", "", "per_process_memory_fraction:1.000000"),
    ("10GiB", "expandable_segments:True", "expandable_segments:True,per_process_memory_fraction:0.250000")])
def test_a_command_gets_the_limit_of_a_gpu_as_torch_reads_it(plimsoll, cards, monkeypatch, limit, had, wanted):
    cards()
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if had is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", had)
    done = plimsoll("--device-memory-limit", limit, "--", sys.executable, "-c", SAYS)
    assert done.returncode == 0 and done.stdout == f"{limit} {wanted}\n", done


def test_a_share_that_the_user_told_torch_stays(plimsoll, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.5")
    done = plimsoll("--device-memory-limit", "80%", "--", sys.executable, "-c", SAYS)
    assert done.stdout == "80% per_process_memory_fraction:0.5\n"
    assert "PYTORCH_CUDA_ALLOC_CONF says per_process_memory_fraction:0.5 already, which stays" in done.stderr


@pytest.mark.parametrize("begins", [None, 9])  # No driver; one that finds no GPU.
def test_without_a_driver_runs_of_plimsoll_alone_keep_a_size(plimsoll, cards, monkeypatch, begins):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if begins is not None:
        cards(begins)
    done = plimsoll("--device-memory-limit", "10GiB", "--", sys.executable, "-c", SAYS)
    assert done.stdout == "10GiB None\n" and "NVIDIA's driver does not tell how large the GPU is: runs of plimsoll keep the limit" in done.stderr


@pytest.mark.parametrize("limit", ["much", "0", "0%"])
def test_a_limit_of_a_gpu_that_is_none_starts_nothing(plimsoll, limit):
    done = plimsoll("--device-memory-limit", limit, "--", sys.executable, "-c", SAYS)
    assert done.returncode == 2 and "--device-memory-limit: " in done.stderr and not done.stdout
