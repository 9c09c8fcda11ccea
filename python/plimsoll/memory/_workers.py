# SPDX-License-Identifier: Apache-2.0
"""The worker processes of the DataLoader that a loop waits for when memory pressure ends it.

Reading order: _memory.py, this file.
"""
from __future__ import annotations

import sys
from typing import Any


def end_workers_waited_for() -> None:
    """Ends the workers of the DataLoader whose next() the calling thread is in, if any.

    Torch itself waits up to 5 seconds for each worker to finish a batch that nobody will use, while its memory grows. A
    loop between two batches is left alone: its workers stop by themselves at `prefetch_factor`. Looks only at the
    thread's own frames. Touching every object, as the garbage collector does, would double the pages that forked
    workers share.
    """
    loader = sys.modules.get("torch.utils.data.dataloader")
    frame = sys._getframe() if loader is not None else None
    while frame is not None:
        one = frame.f_locals.get("self") if frame.f_globals is vars(loader) else None
        if end_workers(one):
            return
        frame = frame.f_back


def end_workers(batches: Any) -> bool:
    """Ends the workers of a DataLoader's iterator. Returns False for anything else."""
    loader = sys.modules.get("torch.utils.data.dataloader")
    if loader is None or type(batches) is not loader._MultiProcessingDataLoaderIter:
        return False
    # Torch must forget them first, or its SIGCHLD handler would raise RuntimeError in place of our exception.
    if getattr(batches, "_worker_pids_set", False):
        loader._utils.signal_handling._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    for worker in getattr(batches, "_workers", []):
        worker.terminate()
    return True
