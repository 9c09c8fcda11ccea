#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`make quick`: checks what a change touches, in at most three minutes and without torch.

    make quick                  the working tree and the commits since main; without any, the last commit
    make quick SINCE=HEAD~3     all since that commit

It runs the house rules, ruff, the C++ tests of the folders that changed, and the Python tests that name a changed
module and need no torch. It says what it left out: `make check` runs everything. The time that setup took counts.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/quick"
SECONDS = 170
NEEDS_TORCH = re.compile(r"torch|transformers|lightning|trainer")
ALWAYS = ("tests/python/test_names.py", "tests/python/test_docs.py")  # Of any change in the package.


def output(*command: str) -> list[str]:
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"quick: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.split("\n")[:-1]


def changed_since(since: str) -> list[str]:
    """Paths that differ from that commit, new files among them. since: "" is as the module says."""
    new = output("git", "ls-files", "--others", "--exclude-standard")
    if since:
        return output("git", "diff", "--name-only", since) + new
    main = next((one for one in ("origin/main", "main") if subprocess.run(
        ["git", "rev-parse", "-q", "--verify", one], cwd=ROOT, capture_output=True, check=False).returncode == 0), "HEAD")
    found = output("git", "diff", "--name-only", output("git", "merge-base", "HEAD", main)[0]) + new
    return found or output("git", "diff", "--name-only", "HEAD~1")


def cpp_tests(changed: list[str]) -> list[str]:
    """Names of folders in ctest whose C++ changed, or whose tests include a header that did."""
    folders = {pathlib.PurePath(one).parent.name for one in changed
               if one.endswith((".cpp", ".h")) and one.startswith(("src/", "tests/"))}
    headers = [one.removeprefix("src/").removeprefix("include/") for one in changed if one.endswith(".h")]
    for test in ROOT.glob("src/**/*_test.cpp") if headers else ():
        text = test.read_text(encoding="utf-8")
        if any(f'"{one}"' in text or f"<{one}>" in text for one in headers):
            folders.add(test.parent.name)
    return sorted(folders)


def python_tests(changed: list[str]) -> tuple[list[str], int]:
    """Files of tests without torch that changed or name a changed module; and how many more of those need torch."""
    stems = {pathlib.PurePath(one).stem.strip("_") for one in changed if one.startswith("python/plimsoll/") and one.endswith(".py")}
    named = re.compile(r"\b_?(" + "|".join(map(re.escape, sorted(stems))) + r")\b") if stems else None
    found, others = set(ALWAYS if stems else ()), 0
    for path in sorted((ROOT / "tests/python").glob("test_*.py")):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if name in changed or (named and (path.stem.removeprefix("test_") in stems or named.search(text))):
            if NEEDS_TORCH.search(text):
                others += 1
            else:
                found.add(name)
    return sorted(found), others


class Steps:
    """Commands, one after the other, until the time is over."""

    def __init__(self, spent: float = 0.0) -> None:
        """spent: seconds of the time that are over."""
        self._begin = time.monotonic() - spent
        self.failed: list[str] = []
        self.left: list[str] = []

    def run(self, name: str, *command: str) -> bool:
        """Whether it passed. One that would begin too late, or is not over in time, is left out."""
        begin = time.monotonic()
        seconds = SECONDS - (begin - self._begin)
        status = ended_within(seconds, command) if seconds > 0 else None
        if status is None:
            self.left.append(name)
            print(f"quick: {name}: left out, the time is over", flush=True)
            return False
        print(f"quick: {name}: {'passed' if status == 0 else 'FAILED'} in {time.monotonic() - begin:.1f} s", flush=True)
        if status:
            self.failed.append(name)
        return status == 0


def ended_within(seconds: float, command: tuple[str, ...]) -> int | None:
    """Runs a command and returns its status; None when it was not over in time, and has been ended with its children."""
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as child:
        try:
            return child.wait(seconds)
        except BaseException as stopped:
            os.killpg(child.pid, signal.SIGKILL)
            if not isinstance(stopped, subprocess.TimeoutExpired):
                raise
            return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="", help="the commit that the change begins after")
    parser.add_argument("--begin", type=float, default=0.0, help="when setup began, in seconds since 1970")
    parsed = parser.parse_args()
    changed = [one for one in changed_since(parsed.since) if (ROOT / one).exists()]
    folders, (files, others) = cpp_tests(changed), python_tests(changed)
    print(f"quick: {len(changed)} files changed; C++ tests of {', '.join(folders) or 'no folder'}; "
          f"{len(files)} files of Python tests, {others} more need torch", flush=True)
    steps = Steps(max(0.0, time.time() - parsed.begin) if parsed.begin else 0.0)
    steps.run("house rules", sys.executable, "tools/tidy.py")
    python = [one for one in changed if one.endswith(".py")]
    if python:
        steps.run("ruff", sys.executable, "-m", "ruff", "check", "--quiet", *python)
    if (folders or files) and steps.run("configure", "cmake", "--preset", "quick", "-Wno-dev", "--log-level=WARNING"):
        known = output("ninja", "-C", str(BUILD), "-t", "targets", "all")
        tests = sorted({line.split(":")[0] for line in known if re.match(rf"({'|'.join(folders)})_\w+_test: ", line)}) if folders else []
        build = ("cmake", "--build", str(BUILD), "--target")
        if tests and steps.run("build of the C++ tests", *build, *tests):
            steps.run("C++ tests", "ctest", "--test-dir", str(BUILD), "-R", rf"^({'|'.join(folders)})\.", "-LE", "slow|gpu", "-j", "2",
                      "--output-on-failure", "--no-tests=ignore")
        if files and steps.run("build of the package", *build, "_core"):
            steps.run("Python tests", "env", f"PYTHONPATH={BUILD / 'python'}", sys.executable, "-m", "pytest", "-q", "-m", "not slow",
                      "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", *files)
    told = [f"FAILED: {', '.join(steps.failed)}"] * bool(steps.failed) + [f"left out: {', '.join(steps.left)}"] * bool(steps.left)
    print(f"quick: {'; '.join(told) or 'passed'}. `make check` runs everything.")
    return 1 if steps.failed else 0


if __name__ == "__main__":
    sys.exit(main())
