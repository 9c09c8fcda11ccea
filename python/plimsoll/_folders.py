# SPDX-License-Identifier: Apache-2.0
"""Folders and the names in them, durable.

Threads: pure functions.
"""
from __future__ import annotations

import os
import pathlib


def sync_folder(folder: pathlib.Path) -> None:
    """Makes names created, renamed or removed in `folder` durable. Errors: OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folders(folder: pathlib.Path) -> None:
    """Makes a folder and those above it that are missing, each durable before the next."""
    folder = folder.absolute()
    there = next(above for above in (folder, *folder.parents) if above.is_dir())
    for depth in range(len(there.parts), len(folder.parts)):
        made = pathlib.Path(*folder.parts[:depth + 1])
        made.mkdir(exist_ok=True)
        sync_folder(made.parent)
