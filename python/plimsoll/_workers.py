# SPDX-License-Identifier: Apache-2.0
"""The worker processes of a DataLoader that a loop waits for when it is ended for want of memory.

Reading order: _memory.py, this file.
"""
from __future__ import annotations

import sys


def end_workers_waited_for() -> None:
    """Ends the workers of the DataLoader in whose next() the calling thread is, if it is in one.

    Torch itself waits up to 5 seconds for each of them to finish its batch, which nobody will see and in
    which it grows as before. Where the loop is between two batches they stop by themselves, at the most
    that `prefetch_factor` allows. Looks at the thread's own frames: to touch every object, as the garbage
    collector does, would double the pages that forked workers share.
    """
    loader = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(loader, "_MultiProcessingDataLoaderIter", None)
    handling = getattr(getattr(loader, "_utils", None), "signal_handling", None)
    if kind is None or handling is None:
        return
    frame = sys._getframe()
    while frame is not None:
        one = frame.f_locals.get("self") if frame.f_globals is vars(loader) else None
        if type(one) is kind:
            # Torch forgets them first: its handler of SIGCHLD would raise RuntimeError in place of ours.
            if getattr(one, "_worker_pids_set", False):
                handling._remove_worker_pids(id(one))
                one._worker_pids_set = False
            for worker in getattr(one, "_workers", []):
                worker.terminate()
            return
        frame = frame.f_back
