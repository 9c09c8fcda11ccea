# SPDX-License-Identifier: Apache-2.0
"""A day of a machine that trains, in as many minutes as one likes: make soak (SOAK_MINUTES=60)

A queue is run all the while by a runner that is killed (kill -9) and started again at least twenty times. Its jobs are
runs that must end in the bits of one that nobody disturbed (killed in the middle, paused, their limit moved, stopped),
programs that leak until they are ended, and some that fail. Beside it, one `plimsoll watch` looks on at the whole tree.

At the end: no job is lost and none ran for nothing; every run has the undisturbed bits; the resident memory of the
watcher, and of each runner from its first jobs to its last, is flat to 1 MiB; no process, cgroup, file in /dev/shm or
descriptor is left; and the queue's folder is within its bounds. Seeds are printed; a line of JSON is the result.

    PLIMSOLL_PROGRAM=build/dev/bin/plimsoll PYTHONPATH=build/dev/python \\
        python -m tests.budget.soak --minutes 10 --seed 1
"""
import argparse
import collections
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from tests.support.cgroup import _own_group

MIB = 1 << 20
FLAT = MIB
KILLS_EVERY_LEAST_S = 8  # A job must come to its first commit in between.
SETTLED_S = 20        # After which a watcher has looked at everything that it keeps.
QUEUE_BYTES = 1200 * (256 << 10)
STEPS = 120

TRAIN = f"""
import hashlib, json, pathlib, sys, time
import torch
import plimsoll

leak, pause = float(sys.argv[2]), float(sys.argv[3])
kept = []
torch.manual_seed(5)
with plimsoll.Run(sys.argv[1], memory_limit="768MiB", seed=5) as run:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = run.embedding("rows", rows=200, dim=16, store_bytes="4MiB", optimizer=plimsoll.AdamW(lr=0.01))
    run.track(model=model, optimizer=optimizer)
    data = run.loader([{{"item": k % 200, "y": float(k % 3)}} for k in range({STEPS} * 8)], batch_size=8, workers=1)
    for batch in run.steps(data, epochs=1, commit_every_steps=10, progress=False):
        run.step(lambda b: (model(rows(b["item"])).squeeze(1) - b["y"].float()).square().mean(), batch)
        time.sleep(pause)
        kept.append(bytearray(int(leak * 2**20)))
    if run.stopped == "":
        with torch.no_grad():
            seen = hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values()))
            seen.update(rows(torch.arange(200)).numpy().tobytes())
        pathlib.Path(sys.argv[1], "digest").write_text(seen.hexdigest())
    sys.exit(0 if run.stopped == "" else 1)
"""
LEAK = "import time; kept = []\nwhile True: kept.append(bytearray(4 << 20)); time.sleep(0.02)"
KINDS = ("train", "train", "train", "leaky", "leak", "fail", "hold")


class Soak:
    def __init__(self, program: str, folder: pathlib.Path, seed: int, minutes: float, ahead: int):
        self.program, self.folder, self.dice = program, folder, random.Random(f"soak/{seed}")
        self.queue = folder / "queue"
        self.minutes, self.ahead = minutes, ahead
        self.kinds: dict[int, str] = {}
        self.seen: collections.Counter = collections.Counter()
        self.runners: list[list[int]] = []  # Resident bytes of each, from its first job on.
        self.told = 0  # Bytes of the log, of runners before this one.
        self.watcher: list[tuple[float, int]] = []
        self.cgroups_before = self.cgroups()
        self.train = folder / "train.py"
        self.train.write_text(TRAIN)

    @staticmethod
    def cgroups() -> set[str]:
        """Those whose guard has ended."""
        return {path.name for path in _own_group()[1].glob("plimsoll-*-*")
                if path.name.split("-")[1].isdecimal() and not pathlib.Path("/proc", path.name.split("-")[1]).exists()}

    def call(self, *words, check=True) -> subprocess.CompletedProcess:
        done = subprocess.run([self.program, *map(str, words)], text=True, capture_output=True, timeout=120,
                              cwd=self.folder, check=False)
        if check and done.returncode != 0:
            raise SystemExit(f"soak: {words}: status {done.returncode}: {done.stderr[-800:]}")
        return done

    def jobs(self) -> dict[int, dict]:
        return {job["id"]: job for job in json.loads(self.call("queue", "list", self.queue, "--json").stdout)["jobs"]}

    def add(self) -> None:
        kind = KINDS[len(self.kinds) % len(KINDS)]
        run = self.folder / f"run-{len(self.kinds)}"
        python = sys.executable
        pause = self.dice.choice([0, 0.01, 0.05])
        words = {"train": [python, self.train, run, 0, pause], "leaky": [python, self.train, run, 6, 0.02],
                 "leak": [python, "-c", LEAK], "fail": [python, "-c", "print('classroom'); raise SystemExit(3)"],
                 "hold": [python, "-c", "x = bytearray(100 << 20)"]}[kind]
        limit = "192MiB" if kind == "leak" else "1GiB"
        restarts = 30 if kind in ("train", "leaky") else 0
        done = self.call("queue", "add", self.queue, "--memory-limit", limit, "--restarts", restarts, "--json", "--",
                         *words)
        self.kinds[json.loads(done.stdout)["id"]] = kind

    def undisturbed(self) -> str:
        run = self.folder / "undisturbed"
        subprocess.run([sys.executable, self.train, run, "0", "0"], check=True, stdout=subprocess.DEVNULL,
                       cwd=self.folder)
        return (run / "digest").read_text()

    def start_runner(self) -> subprocess.Popen:
        self.runners.append([])
        self.seen["runners"] += 1
        log = self.folder / "runner.log"
        self.told = log.stat().st_size if log.exists() else 0  # By the runners before it.
        return subprocess.Popen([self.program, "queue", "run", self.queue, "--wait", "--grace", "10s"],
                                stdout=subprocess.DEVNULL, stderr=open(self.folder / "runner.log", "ab"),
                                cwd=self.folder)

    def running(self) -> tuple[int, str]:
        """The job that is under way, and its run; (0, "") where none is."""
        for number, job in self.jobs().items():
            if job["state"] == "running" and job["progress"]:
                return number, job["progress"].rsplit(": ", 1)[0]
        return 0, ""

    def may_end(self, number: int, run: str) -> bool:
        """Whether it has committed since it ended last, by itself too: what ends twice at one step is not started again."""
        with contextlib.suppress(OSError, ValueError):
            before = self.jobs()[number]["restart_progress"]
            commit = json.loads((pathlib.Path(run) / "checkpoints" / "manifest.json").read_text())["step"]
            return commit > int(before.rsplit(" ", 1)[-1] or 0)
        return False

    def disturb(self) -> None:
        """Something that happens to a run in a day: asked to pause, to stop, its limit moved, killed."""
        number, run = self.running()
        if not number:
            return
        what = self.dice.choice(["pause", "limit", "kill", "stop"])
        if what == "pause":
            self.call("pause", run, check=False)
            time.sleep(self.dice.uniform(0, 1))
            self.call("continue", run, check=False)
        elif what == "limit":
            self.call("limit", run, self.dice.choice(["700MiB", "768MiB", "800MiB"]), check=False)
        elif not self.may_end(number, run):
            return
        elif what == "stop":
            self.call("stop", run, check=False)
        else:
            with contextlib.suppress(OSError, ValueError):
                pid = json.loads((pathlib.Path(run) / "status.json").read_text())["pid"]
                if pid in descendants(os.getpid()):
                    os.kill(pid, signal.SIGKILL)
        self.seen[what] += 1

    def look(self, watcher: subprocess.Popen, runner: subprocess.Popen) -> None:
        if watcher.poll() is not None:
            raise SystemExit("soak: the watcher has ended")
        self.watcher.append((time.monotonic(), resident(watcher.pid)))
        if runner.poll() is not None:
            raise SystemExit(f"soak: the runner has ended: {(self.folder / 'runner.log').read_text()[-800:]}")
        if self.runners[-1] or self.has_jobs():  # Before that it was a Python that loads.
            self.runners[-1].append(resident(runner.pid))

    def has_jobs(self) -> bool:
        """Whether the runner has begun with a job."""
        with open(self.folder / "runner.log", encoding="utf-8") as log:
            log.seek(self.told)
            return " runs: " in log.read()

    def work(self) -> None:
        """Until the time is over: jobs are added, runs disturbed, the runner killed and started again."""
        ends = time.monotonic() + 60 * self.minutes
        kills_every = max(60 * self.minutes / 24, KILLS_EVERY_LEAST_S)
        self.add()
        runner = self.start_runner()
        watcher = subprocess.Popen([self.program, "watch", str(os.getpid()), "--json", "--every", "0.2"],
                                   stdout=subprocess.DEVNULL)
        killed = disturbed = time.monotonic()
        try:
            while time.monotonic() < ends:
                time.sleep(1)
                self.look(watcher, runner)
                now = time.monotonic()
                waiting = [job for job in self.jobs().values() if job["state"] == "waiting"]
                if len(waiting) < self.ahead:
                    self.add()
                if now - disturbed > kills_every / 4:
                    disturbed = now
                    self.disturb()
                if now - killed > kills_every and (not (job := self.running())[0] or self.may_end(*job)):
                    killed = now
                    runner.kill()
                    runner.wait()
                    self.seen["runner killed"] += 1
                    runner = self.start_runner()
            self.finish(watcher, runner)
        finally:
            for one in (runner, watcher):
                one.kill()
                one.wait()

    def finish(self, watcher: subprocess.Popen, runner: subprocess.Popen) -> None:
        """What is left runs to its end, within five minutes."""
        deadline = time.monotonic() + 300
        while any(job["state"] in ("waiting", "running") for job in self.jobs().values()):
            if time.monotonic() > deadline:
                raise SystemExit("soak: jobs do not come to an end:\n" + self.call("queue", "list", self.queue).stdout)
            time.sleep(0.5)
            self.look(watcher, runner)
        runner.send_signal(signal.SIGTERM)
        runner.wait(timeout=10)

    def check(self, digest: str) -> dict:
        """Everything that must hold. Raises SystemExit, naming what does not."""
        wrong: list[str] = []
        jobs = self.jobs()
        kept = sorted(self.kinds)[-200:]
        if lost := [number for number in kept if number not in jobs]:
            wrong.append(f"jobs are lost: {lost}")
        for number, job in jobs.items():
            kind = self.kinds[number]
            self.seen[f"{kind} {job['state']}"] += 1
            run = self.folder / f"run-{sorted(self.kinds).index(number)}"
            if kind in ("train", "leaky", "hold") and job["state"] != "done":
                wrong.append(f"job {number}, {kind}, is {job['state']}: {job['why']}")
            elif kind in ("train", "leaky") and (run / "digest").read_text() != digest:
                wrong.append(f"job {number}, {job['starts']} starts: other bits")
            if kind == "fail" and (job["state"] != "failed" or job["incidents"]):
                wrong.append(f"job {number} is {job['state']}, {job['incidents']}")
            if kind == "leak" and job["ending"] not in ("killed_for_limit", "stopped"):
                wrong.append(f"job {number} ended as {job['ending']}")
        settled = [bytes_ for at, bytes_ in self.watcher if at > self.watcher[0][0] + SETTLED_S] or [0]
        wrong += flat("the watcher", settled)
        for number, life in enumerate(self.runners):
            wrong += flat(f"runner {number}", life[4:])  # Its first jobs load more of Python.
        size = sum(path.stat().st_size for path in self.queue.rglob("*") if path.is_file())
        if size > QUEUE_BYTES:
            wrong.append(f"the queue's folder has {size} bytes")
        for _ in range(40):
            if not (left := descendants(os.getpid())):
                break
            time.sleep(0.25)
        if left:
            wrong.append(f"processes are left: {left}")
        if groups := self.cgroups() - self.cgroups_before:
            wrong.append(f"cgroups are left: {groups}")
        result = {"minutes": self.minutes, "jobs": len(self.kinds), **self.seen,
                  "watcher_kib": [min(settled) >> 10, max(settled) >> 10],
                  "runner_kib": [max(life) >> 10 for life in self.runners if life],
                  "queue_bytes": size, "wrong": wrong}
        print(json.dumps(result))
        return result


def flat(who: str, resident_bytes: list[int]) -> list[str]:
    """What is wrong with resident sizes over a life: the second half above the first by more than FLAT."""
    half = len(resident_bytes) // 2
    if half < 4:
        return []
    before, after = max(resident_bytes[:half]), max(resident_bytes[half:])
    return [f"{who} grew from {before >> 10} to {after >> 10} KiB"] if after > before + FLAT else []


def resident(pid: int) -> int:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS:")), 0)


def descendants(pid: int) -> dict[int, str]:
    """Pids and names."""
    parents, names = {}, {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = stat.read_text()
            number = int(stat.parent.name)
            names[number] = text[text.index("(") + 1:text.rindex(")")]
            parents[number] = int(text[text.rindex(")") + 2:].split()[1])
    found, more = set(), {pid}
    while more:
        more = {one for one, parent in parents.items() if parent in more}
        found |= more
    return {one: names[one] for one in sorted(found)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--program", default=os.environ.get("PLIMSOLL_PROGRAM", ""))
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("SOAK_MINUTES", "60")))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ahead", type=int, default=3, help="jobs that wait [3]")
    parser.add_argument("--work", default="build", help="where runs are made [build]")
    options = parser.parse_args()
    if "PYTHONPATH" in os.environ:  # The jobs run in a folder of their own.
        os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep)))
    folder = pathlib.Path(tempfile.mkdtemp(dir=options.work, prefix="soak-")).resolve()
    soak = Soak(os.path.abspath(options.program), folder, options.seed, options.minutes, options.ahead)
    digest = soak.undisturbed()
    soak.work()
    result = soak.check(digest)
    if result["wrong"]:
        print(f"soak: seed {options.seed}: kept for a look: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
