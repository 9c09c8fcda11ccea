# SPDX-License-Identifier: Apache-2.0
"""A program that grows as its one argument, JSON, says: of random_programs.py.

    python growing_program.py '{"what": "heap", "rate": 2e8, "piece": 4194304, "hears": "save", …}'

It grows in pieces, each no sooner than `piece / rate` seconds after the one before: also one that waited for a processor
is not made up for. Its output says nothing of its end.
"""
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from multiprocessing import shared_memory

BASE_RATE = 150e6  # Bytes a second, up to where it begins.
NEVER_S = 60       # Who holds what it has waits so long.


class Kept:
    """What is never let go of."""

    def __init__(self, options: dict):
        self.what, self.prefix, self.pieces, self.files = options["what"], options["prefix"], [], []

    def add(self, size: int) -> None:
        if self.what == "heap":
            self.pieces.append(b"x" * size)
        elif self.what == "segments":
            self.pieces.append(shared_memory.SharedMemory(create=True, size=size,
                                                          name=f"{self.prefix}-{os.getpid()}-{len(self.pieces)}"))
            self.pieces[-1].buf[::4096] = b"x" * -(-size // 4096)
        elif self.what == "files":  # In /dev/shm, and mapped by nobody.
            with open(f"/dev/shm/{self.prefix}-{os.getpid()}", "ab", buffering=0) as file:
                file.write(b"x" * size)
        else:
            import torch

            self.pieces.append(torch.ones(size // 4).share_memory_())

    def grow(self, total: float, rate: float, piece: int) -> None:
        grown = 0
        while grown < total:
            began = time.monotonic()
            self.add(piece)
            grown += piece
            time.sleep(max(0.0, piece / rate - (time.monotonic() - began)))


def life(options: dict, share: int) -> None:
    """One of `share` processes that grow."""
    kept = Kept(options)
    kept.grow(options["base"] / share, BASE_RATE / share, 1 << 20)
    time.sleep(options["wait"])
    kept.grow(options["most"] / share, options["rate"] / share, options["piece"])
    time.sleep(NEVER_S if options["hold"] else 0)


def worker(options: dict, number: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if number == options["deaf_worker"] else signal.SIG_DFL)
    life(options, options["workers"])


def hear(options: dict) -> None:
    def save(*_):
        time.sleep(options["save_s"])
        pathlib.Path(options["saved"]).write_text("saved")
        sys.exit(0)

    if options["hears"] != "default":
        signal.signal(signal.SIGTERM, save if options["hears"] == "save" else signal.SIG_IGN)


def main() -> int:
    options = json.loads(sys.argv[1])
    print("OOM in the classroom: Killed process 12 (python), out of memory", flush=True)
    hear(options)
    if not options["workers"]:
        life(options, 1)
        return options["status"]
    context = multiprocessing.get_context(options["start"])
    children = [context.Process(target=worker, args=(options, number), daemon=options["daemon"])
                for number in range(options["workers"])]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return options["status"] or int(any(child.exitcode for child in children) and not options["survives"])


if __name__ == "__main__":
    sys.exit(main())
