# SPDX-License-Identifier: Apache-2.0
"""A memory cgroup for one child process, made below this process's own cgroup.

    with MemoryCgroup(768 << 20) as group:
        run = group.run([program, "train", …])
    assert run.oom_kills == 0 and run.peak_resident_bytes <= 768 << 20

Works with cgroup v1 and v2. Holds only the child that run() starts and is removed afterwards.
MemoryCgroup.needed() skips a test where making one is not allowed; with PLIMSOLL_REQUIRE_CGROUP=1 it
fails it. What was skipped is noted in the file $PLIMSOLL_CGROUP_SKIPS, a line each, as C++ tests do
(needs_cgroup.h).
Command line: python -m tests.support.cgroup BYTES -- COMMAND …  (prints one JSON line at the end
on standard error; used by hand), or --skipped FILE (what tools/check.sh says last).
"""
import collections
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

MOUNT = pathlib.Path("/sys/fs/cgroup")


@dataclasses.dataclass
class Run:
    """How the child ended. `returncode` is as subprocess gives it: −9 when killed."""
    returncode: int
    stdout: str
    stderr: str
    peak_resident_bytes: int    # Of the child: by the kernel at its end, or seen; see _own_peak_bytes().
    tree_peak_bytes: int        # Most that all processes together were seen to hold; see _tree_bytes().
    unmapped_peak_bytes: int    # Of that, anonymous and shared memory: what the kernel cannot drop.
    group_peak_bytes: int       # The cgroup's own peak; counts clean page cache too.
    oom_kills: int
    seconds: float

    @property
    def last_json(self) -> dict:
        return json.loads(self.stdout.strip().splitlines()[-1])


def _own_group() -> tuple[int, pathlib.Path]:
    """(version, folder) of this process's memory cgroup. Raises OSError when there is none."""
    v2 = None
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return 1, MOUNT / "memory" / path.lstrip("/")
        if controllers == "":
            v2 = path.lstrip("/")
    if v2 is None or not (MOUNT / v2 / "cgroup.controllers").exists():
        raise OSError("no memory cgroup is mounted under /sys/fs/cgroup")
    return 2, MOUNT / v2


def _peak_so_far_bytes(pid: int | str) -> int:
    """VmHWM of a process; 0 when it has ended."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))


def _own_peak_bytes(counted: int, inherited: int, seen: int) -> int:
    """Peak of a child. What the kernel counted of it begins with the peak that its parent had when it was
    forked; no more than that says nothing of the child, and the highest that was seen of it counts."""
    return counted if counted > inherited else seen


class MemoryCgroup:
    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.version, parent = _own_group()
        if self.version == 2:
            # Only a cgroup without processes of its own may hand the controller to children; a
            # delegated leaf is left as it is and the reason reported.
            if "memory" not in (parent / "cgroup.subtree_control").read_text().split():
                (parent / "cgroup.subtree_control").write_text("+memory")
        self.folder = parent / f"plimsoll-test-{os.getpid()}-{time.monotonic_ns()}"
        self.folder.mkdir()
        try:
            if self.version == 1:
                (self.folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
                swap = self.folder / "memory.memsw.limit_in_bytes"
            else:
                (self.folder / "memory.max").write_text(str(limit_bytes))
                swap = self.folder / "memory.swap.max"
            if swap.exists():
                swap.write_text(str(limit_bytes) if self.version == 1 else "0")
        except OSError:
            self.folder.rmdir()
            raise

    @classmethod
    def why_not(cls) -> str | None:
        """None when a memory cgroup can be made here, else the reason in words."""
        try:
            with cls(64 << 20) as group:
                run = group.run(["true"])
                return None if run.returncode == 0 else f"`true` ended with {run.returncode}"
        except OSError as error:
            return f"cannot make a memory cgroup below this process's own: {error}"

    @classmethod
    def noted(cls) -> str | None:
        """why_not(), noted as a test that was skipped or did less; fails where cgroups are required."""
        import pytest

        reason = cls.why_not()
        if reason:
            if os.environ.get("PLIMSOLL_REQUIRE_CGROUP") == "1":
                pytest.fail(f"PLIMSOLL_REQUIRE_CGROUP=1, and {reason}", pytrace=False)
            if notes := os.environ.get("PLIMSOLL_CGROUP_SKIPS"):
                with open(notes, "a", encoding="utf-8") as file:
                    file.write(reason.replace("\n", " ") + "\n")
        return reason

    @classmethod
    def needed(cls) -> None:
        """Skips the test that calls this where no memory cgroup can be made."""
        import pytest

        if reason := cls.noted():
            pytest.skip(reason)

    def __enter__(self) -> "MemoryCgroup":
        return self

    def __exit__(self, *unused) -> None:
        for _ in range(100):  # The kernel empties a cgroup a moment after its last process ended.
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.05)

    def _number(self, name: str) -> int:
        try:
            return int((self.folder / name).read_text())
        except (OSError, ValueError):
            return 0

    def oom_kills(self) -> int:
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        for line in (self.folder / name).read_text().splitlines():
            key, value = line.split()
            if key == "oom_kill":
                return int(value)
        raise OSError(f"{self.folder / name} has no oom_kill counter")

    def start(self, command: list[str], **options) -> subprocess.Popen:
        """Starts a child inside the group; it joins before it executes `command`."""
        join = f'echo $$ > "{self.folder}/cgroup.procs" && exec "$@"'
        return subprocess.Popen(["sh", "-c", join, "sh", *map(str, command)], **options)

    def _tree_bytes(self) -> tuple[int, int]:
        """What the group's processes hold now that the kernel cannot simply drop, and the same with their code.

        Anonymous and shared memory is charged to the group once, however many processes map it. Mapped
        files may be charged to another group that read them first, so they are taken from the process
        that maps most of them: libraries, which the others share with it.
        """
        names = ("total_rss", "total_shmem") if self.version == 1 else ("anon", "shmem")
        held, mapped = 0, [0]
        for line in (self.folder / "memory.stat").read_text().splitlines():
            key, value = line.split()
            held += int(value) if key in names else 0
        for pid in (self.folder / "cgroup.procs").read_text().split():
            try:
                status = pathlib.Path(f"/proc/{pid}/status").read_text()
            except OSError:  # It has ended meanwhile.
                continue
            mapped += [int(line.split()[1]) << 10 for line in status.splitlines()
                       if line.startswith("RssFile:")]
        return held, held + max(mapped)

    def run(self, command: list[str], timeout: float = 3600, echo: bool = False, **options) -> Run:
        """Runs `command` inside the group to its end; kills it after `timeout` seconds."""
        began = time.monotonic()
        inherited = _peak_so_far_bytes("self")
        child = self.start(command, stdout=subprocess.PIPE,
                           stderr=None if echo else subprocess.PIPE, text=True, **options)
        texts: dict[str, str] = {"stdout": "", "stderr": ""}

        def drain(name):
            stream = getattr(child, name)
            if stream is None:
                return
            for line in stream:
                texts[name] = (texts[name] + line)[-1_000_000:]
                if echo:
                    print(line, end="", flush=True)

        ended, highest, seen = threading.Event(), (0, 0), 0

        def watch():
            nonlocal highest, seen
            while not ended.wait(0.02):
                highest = tuple(map(max, highest, self._tree_bytes()))
                seen = max(seen, _peak_so_far_bytes(child.pid))

        readers = [threading.Thread(target=drain, args=(name,)) for name in texts]
        readers.append(threading.Thread(target=watch))
        for reader in readers:
            reader.start()
        killer = threading.Timer(timeout, lambda: os.kill(child.pid, signal.SIGKILL))
        killer.start()
        _, status, usage = os.wait4(child.pid, 0)
        killer.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        ended.set()
        for reader in readers:
            reader.join()
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        peak = _own_peak_bytes(usage.ru_maxrss * 1024, inherited, seen)
        return Run(child.returncode, texts["stdout"], texts["stderr"], peak, max(highest[1], peak),
                   highest[0], self._number(name), self.oom_kills(), time.monotonic() - began)


def said_of_skips(notes: pathlib.Path) -> str:
    """What a reader of `make check` must not miss; "" when nothing was skipped."""
    reasons = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    if not reasons:
        return ""
    kinds = collections.Counter(reasons).most_common(3)
    return "\n".join([
        "", "!" * 78,
        f"NOT CHECKED: {len(reasons)} tests that hold whole runs to their limit in a memory cgroup were "
        "skipped.", "Nothing above shows that a run is not killed for memory. Why:",
        *(f"  {count} x {reason}" for reason, count in kinds),
        "Run as root, or in a cgroup that is delegated; PLIMSOLL_REQUIRE_CGROUP=1 makes it a failure.",
        "!" * 78])


def main() -> int:
    if sys.argv[1] == "--skipped":
        if said := said_of_skips(pathlib.Path(sys.argv[2])):
            print(said)
        return 0
    limit, command = int(sys.argv[1]), sys.argv[sys.argv.index("--") + 1:]
    with MemoryCgroup(limit) as group:
        run = group.run(command, echo=True)
    print(json.dumps({"limit_bytes": limit, "returncode": run.returncode,
                      "oom_kills": run.oom_kills, "peak_resident_bytes": run.peak_resident_bytes,
                      "group_peak_bytes": run.group_peak_bytes, "seconds": round(run.seconds, 1)}),
          file=sys.stderr)
    return run.returncode if run.returncode >= 0 else 128 - run.returncode


if __name__ == "__main__":
    sys.exit(main())
