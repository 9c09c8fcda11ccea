# SPDX-License-Identifier: Apache-2.0
"""Threads that wait for a word that never comes, each with a buffer."""
# /// truth
# leaks = true
# owners = ["native", "unexplained"]
# holder = "thread|Thread|frame|read_ahead"
# ///
import threading

from watched import steps

stop = threading.Event()


def read_ahead():
    buffer = bytearray(100_000)  # site
    stop.wait()
    buffer.clear()


for step in steps():
    threading.Thread(target=read_ahead, daemon=True).start()
