# SPDX-License-Identifier: Apache-2.0
"""Requests of another program to a run: status, why, report, stop, pause, continue, limit. Does not import torch.

Threads: any.
"""
from __future__ import annotations

import json
import os
from typing import Any

from .. import _core

Path = str | os.PathLike[str]


def status(run: Path) -> dict[str, Any]:
    """Returns the status of a run, as `plimsoll status --json` prints it: status, step, loss, alive, pid, …

    Errors: NotFoundError (no run there); CorruptError.
    """
    return json.loads(_core.run_status(os.fspath(run)))


def why(run: Path) -> dict[str, Any]:
    """Returns how a run ended and who held the memory, as `plimsoll why --json` prints it: cause, incident, memory, summary, …

    run: the folder of a run, or of `plimsoll run --record`.
    Errors: NotFoundError (neither is there); CorruptError.
    """
    return json.loads(_core.run_why(os.fspath(run)))


def report(run: Path, out: Path | None = None, trace: Path | None = None) -> str:
    """Writes a run's report as one self-contained HTML page; returns its path. A run that ends writes RUN/report.html by itself.

    run:   as for why().
    out:   the file; None: RUN/report.html.
    trace: a file for the run's memory over time as counters, which Perfetto opens beside a trace of torch.profiler.
    Errors: those of why(); OSError.
    """
    page = _core.run_report(os.fspath(run), os.fspath(out or ""))
    if trace is not None:
        _core.run_trace(os.fspath(run), os.fspath(trace))
    return page


def stop(run: Path) -> bool:
    """Asks a run to end at its next step, with a checkpoint. Returns False if no process trains there.

    Errors: NotFoundError (no run there); OSError.
    """
    return _core.run_stop(os.fspath(run))


def pause(run: Path) -> bool:
    """Asks a run to wait at its next step; it keeps its memory. Returns False if no process trains there.

    Errors: those of stop().
    """
    return _core.run_pause(os.fspath(run))


def continue_run(run: Path) -> bool:
    """Lets a paused run continue (`plimsoll continue`). Returns False if no process trains there.

    Errors: those of stop().
    """
    return _core.run_continue(os.fspath(run))


def limit(run: Path, size: int | str) -> bool:
    """Asks a run to keep within another memory limit while it trains. Returns False if no process trains there.

    size: bytes, or "6GiB", "25%" of the machine.
    Errors: those of stop(); ValueError for a size that cannot be read.
    """
    return _core.run_limit(os.fspath(run), str(size))
