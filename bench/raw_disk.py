# SPDX-License-Identifier: Apache-2.0
"""The bare disk's speed for benchmarks in Python: bench_raw_disk (raw_disk.h), built beside `plimsoll`."""
import json
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = pathlib.Path(os.environ.get("PLIMSOLL_PROGRAM", ROOT / "build/dev/bin/plimsoll")).parent / "bench_raw_disk"


def speed(directory: pathlib.Path, *, file_bytes: int, total_bytes: int, read_bytes: int, read_bytes_least: int = 0,
          write_bytes: int = 4096, read_percent: int = 100, at_random: bool = False) -> dict:
    """Bytes a second at the best of the depths 1 to 64, which one that is, and all of them.

    file_bytes:  size of the file that is read, and of another that is written unless read_percent is 100; both
                 stay in `directory` for the next call.
    total_bytes: moved at each depth.
    read_bytes_least: unless 0, reads have every size in whole pages from this to read_bytes, each as often.

    Errors: SystemExit with what the program said.
    """
    command = [PROGRAM, "--directory", directory, "--file-bytes", file_bytes, "--bytes", total_bytes, "--read-bytes",
               read_bytes, "--read-bytes-least", read_bytes_least, "--write-bytes", write_bytes, "--read-percent", read_percent,
               *(["--random"] if at_random else [])]
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{PROGRAM.name}: {done.stderr.strip()}")
    return json.loads(done.stdout.strip().splitlines()[-1])
