# SPDX-License-Identifier: Apache-2.0
"""A wrapper around a process that comes and goes in what it holds."""
# /// truth
# leaks = false
# ///
import subprocess
import sys

from watched import steps

SERVER = """
import sys
kept = []
while sys.stdin.readline():
    kept.append(bytearray(200_000))
    if len(kept) == 15:
        kept.clear()
    print(flush=True)
"""
wrapper = subprocess.Popen([sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])",
                            sys.executable, "-c", SERVER], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for step in steps():
    print(file=wrapper.stdin, flush=True)
    wrapper.stdout.readline()
