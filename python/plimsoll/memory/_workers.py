# SPDX-License-Identifier: Apache-2.0
"""The worker processes of a DataLoader that a loop waits for when it is ended for want of memory.

Reading order: _memory.py, this file.
"""
from __future__ import annotations

import sys
from typing import Any


def end_workers_waited_for() -> None:
    """Ends the workers of the DataLoader in whose next() the calling thread is, if it is in one.

    Torch itself waits up to 5 seconds for each of them to finish its batch, which nobody will see and in
    which it grows as before. Where the loop is between two batches they stop by themselves, at the most
    that `prefetch_factor` allows. Looks at the thread's own frames: to touch every object, as the garbage
    collector does, would double the pages that forked workers share.
    """
    loader = sys.modules.get("torch.utils.data.dataloader")
    frame = sys._getframe() if loader is not None else None
    while frame is not None:
        one = frame.f_locals.get("self") if frame.f_globals is vars(loader) else None
        if end_workers(one):
            return
        frame = frame.f_back


def end_workers(batches: Any) -> bool:
    """Ends the workers of an iterator of a DataLoader; False where it is none that has workers."""
    loader = sys.modules.get("torch.utils.data.dataloader")
    if loader is None or type(batches) is not loader._MultiProcessingDataLoaderIter:
        return False
    # Torch forgets them first: its handler of SIGCHLD would raise RuntimeError in place of ours.
    if getattr(batches, "_worker_pids_set", False):
        loader._utils.signal_handling._remove_worker_pids(id(batches))
        batches._worker_pids_set = False
    for worker in getattr(batches, "_workers", []):
        worker.terminate()
    return True
