# SPDX-License-Identifier: Apache-2.0
"""Where a record comes from: the commit, and the machine.

Threads: any.   Memory: none.
"""
from __future__ import annotations

import os
import pathlib
import platform
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent


def commit() -> str:
    """Returns the commit, and whether the tree is as it was then: but for the records of benchmarks.

    PLIMSOLL_COMMIT says it for a copy of the tree that has no history.
    """
    if given := os.environ.get("PLIMSOLL_COMMIT"):
        return given

    def git(*words: str) -> str:
        try:
            return subprocess.run(["git", *words], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout.strip()
        except OSError:  # No git.
            return ""

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/*/results.jsonl")
    return (git("describe", "--always") or "unknown") + ("-dirty" if changed else "")


def machine() -> str:
    """Returns the processor, its cores, the memory and the kernel, in a line."""
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8")
                  if line.startswith("model name")), platform.machine())
    memory = next(int(line.split()[1]) for line in open("/proc/meminfo", encoding="utf-8"))
    return f"{model}, {os.cpu_count()} cores, {memory / 2**20:.0f} GiB, Linux {platform.release()}"
