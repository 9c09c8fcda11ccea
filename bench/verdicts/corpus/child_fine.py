# SPDX-License-Identifier: Apache-2.0
"""A server in a child process that keeps the last thing it is sent."""
# /// truth
# leaks = false
# ///
import subprocess
import sys

from watched import steps

SERVER = """
import sys
while sys.stdin.readline():
    kept = bytearray(300_000)
    print(flush=True)
"""
child = subprocess.Popen([sys.executable, "-c", SERVER], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for step in steps():
    print(file=child.stdin, flush=True)
    child.stdout.readline()
