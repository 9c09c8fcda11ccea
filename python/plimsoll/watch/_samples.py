# SPDX-License-Identifier: Apache-2.0
"""Sampling of allocations: the distance of samples, and the folders whose frames are not the program's own.

Threads: any.   Memory: a few paths.
"""
from __future__ import annotations

import contextlib
import functools
import os
import site
import sysconfig

_MEAN_LEAST, _MEAN_MOST = 32 << 10, 512 << 10


@functools.cache
def library_folders() -> list[str]:
    """Returns the folders whose frames are not the program's own: the standard library, installed packages, this one."""
    paths = sysconfig.get_paths()
    folders = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    with contextlib.suppress(AttributeError):  # Some environments have no site module.
        folders |= {*site.getsitepackages(), site.getusersitepackages()}
    folders.add(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return sorted(os.path.join(one, "") for one in folders if one)


def mean_of(rise: float) -> float:
    """Returns the mean distance of samples in bytes, for a growth of `rise` bytes per step."""
    return min(max(2.5 * rise, _MEAN_LEAST), _MEAN_MOST)
