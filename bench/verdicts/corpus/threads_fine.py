# SPDX-License-Identifier: Apache-2.0
"""Threads that are joined."""
# /// truth
# leaks = false
# ///
import threading

from watched import steps

stop = threading.Event()
stop.set()


def read_ahead():
    buffer = bytearray(100_000)
    stop.wait()
    buffer.clear()


for step in steps():
    thread = threading.Thread(target=read_ahead, daemon=True)
    thread.start()
    thread.join()
