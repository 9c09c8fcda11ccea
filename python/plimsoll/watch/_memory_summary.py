# SPDX-License-Identifier: Apache-2.0
"""memory_summary(): the holders of memory in this process and its children, as text.

Threads: any.   Memory: the text.
"""
from __future__ import annotations

from ..memory._memory import Governor, format_bytes
from ._watch import Watch

_WORTH = 0.15  # Share of what is held, from which on an owner is worth advice.
_ADVICE = {
    "tensors": "torch's tensors: a smaller batch, activation checkpointing, or losses and outputs that are kept with "
               "their graphs (.item(), .detach())",
    "leased": "rows, features and the loader's ring: each has an option for its size (store_bytes=, batch_rows=, prefetch=)",
    "python": "Python's objects: lists and dicts that only grow; columns in NumPy or in a store take less",
    "native": "malloc() of libraries and extensions: decoded images, NumPy arrays, tokenizers",
    "heap": "memory of the process: a smaller batch, or data in a store instead of in memory",
    "retained": "freed, and kept by malloc(): Governor.clean_up() gives it back, MALLOC_ARENA_MAX=2 keeps less",
    "unexplained": "without a lease: the interpreter and libraries, NumPy, mmap() of extensions, memory before the governor; "
                   "plimsoll.adopt() leases a model that was made before it",
    "shared": "batches that workers pass: a smaller prefetch_factor, and batches that are let go of after their step",
    "children": "worker processes: fewer of them, or a data set that keeps nothing per worker",
}
_BESIDE = ("files", "page tables")  # The kernel takes them back, or needs them for the rest.


def memory_summary() -> str:
    """Returns a few lines of text: the holders of memory in this process and its children, and advice.

        print(plimsoll.memory_summary())

    Shared pages count once. Python's arenas are counted from the first plimsoll.Watch or summary on.
    Time:   one close look: 3 ms where 200 MB are held, 110 ms where 10 GB are.
    Errors: ValueError, OSError where /proc cannot be read.
    """
    watch = Watch()
    owners, held = watch.owners, watch.held_bytes
    if (before := owners.pop("before the run", None)) is not None:  # There is one look: nothing has come since.
        owners["unexplained"] += before
    governor = Governor.current()
    count = watch._core.processes
    lines = [f"{format_bytes(held)} held in {count} process{'es' if count > 1 else ''}"
             + (f", limit {governor.limit.explain()}" if governor is not None else "")]
    for name, size in sorted(owners.items(), key=lambda one: (one[0] in _BESIDE, -one[1])):
        if size > 0:
            share = "" if name in _BESIDE else f"  {100 * size / max(held, 1):5.1f} %"
            lines.append(f"  {name:<12}{format_bytes(size):>12}{share}")
    if governor is not None:
        lines.append(f"  leases: {governor.ledger().explain()}")
    for name, size in sorted(owners.items(), key=lambda one: -one[1]):
        if name in _ADVICE and size >= _WORTH * held:
            lines.append(f"  {name}: {_ADVICE[name]}")
    return "\n".join(lines)
