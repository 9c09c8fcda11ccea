# SPDX-License-Identifier: Apache-2.0
"""Modules imported as they are needed, and a list of what each said."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 120000
# holder = "said"
# ///
import importlib

from watched import steps

NAMES = ["decimal", "email", "http.client", "sqlite3", "xml.dom.minidom", "unittest", "asyncio", "concurrent.futures"]
said = []
for step in steps():
    if step % 5 == 0 and step // 5 < len(NAMES):
        importlib.import_module(NAMES[step // 5])
    said.append(bytearray(120_000))  # site
