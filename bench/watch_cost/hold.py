# SPDX-License-Identifier: Apache-2.0
"""A foreign program: python hold.py BYTES PROCESSES holds BYTES in pages of 4 KiB, in so many processes of which it is
one, and maps and unmaps a little memory all the while.

Prints a line when it holds them. For each line of standard input it prints the longest that a map and an unmap took
since the last, in ms, over all of its processes.
"""
import ctypes
import mmap
import subprocess
import sys
import threading
import time

PROBE_BYTES, PAUSE_SECONDS = 1 << 18, 0.002


def held(size: int) -> mmap.mmap:
    """Private anonymous memory, each of whose pages was written to."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_NOHUGEPAGE)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(block)), 1, size)
    return block


class Probe(threading.Thread):
    """Maps, writes and unmaps, again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest = 0.0
        self.start()

    def run(self) -> None:
        while True:
            began = time.perf_counter()
            with mmap.mmap(-1, PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as one:
                one[0] = 1
            self.longest = max(self.longest, time.perf_counter() - began)
            time.sleep(PAUSE_SECONDS)


def main() -> None:
    size, processes = int(sys.argv[1]), int(sys.argv[2])
    others = [subprocess.Popen([sys.executable, __file__, str(size // processes), "1"], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(processes - 1)]
    block = held(size // processes)
    for other in others:
        other.stdout.readline()
    probe = Probe()
    print(len(block), flush=True)
    while sys.stdin.readline():
        longest = [1e3 * probe.longest]
        probe.longest = 0.0
        for other in others:
            print(file=other.stdin, flush=True)
            longest.append(float(other.stdout.readline()))
        print(max(longest), flush=True)


if __name__ == "__main__":
    main()
