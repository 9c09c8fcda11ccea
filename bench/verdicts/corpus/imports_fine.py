# SPDX-License-Identifier: Apache-2.0
"""Modules imported as they are needed, in the first 40 steps."""
# /// truth
# leaks = false
# ///
import importlib

from watched import steps

NAMES = ["decimal", "email", "http.client", "sqlite3", "xml.dom.minidom", "unittest", "asyncio", "concurrent.futures"]
for step in steps():
    if step % 5 == 0 and step // 5 < len(NAMES):
        importlib.import_module(NAMES[step // 5])
    said = bytearray(120_000)
