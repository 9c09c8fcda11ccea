# SPDX-License-Identifier: Apache-2.0
"""A wrapper that stays as it is, around a process that grows."""
# /// truth
# leaks = true
# owners = ["children"]
# bytes_per_step = 200000
# ///
import subprocess
import sys

from watched import steps

SERVER = """
import sys
kept = []
while sys.stdin.readline():
    kept.append(bytearray(200_000))
    print(flush=True)
"""
wrapper = subprocess.Popen([sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])",
                            sys.executable, "-c", SERVER], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for step in steps():
    print(file=wrapper.stdin, flush=True)
    wrapper.stdout.readline()
