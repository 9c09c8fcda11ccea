# SPDX-License-Identifier: Apache-2.0
"""Settings of torch that a run changes and restores.

Threads: one run at a time per process.   Memory: none.
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

# The value that the program `plimsoll` sets before it starts; see docs/HACKING.md.
MKL_CBWR = "AVX2,STRICT"


@contextlib.contextmanager
def torch_settings() -> Iterator[None]:
    """Restores torch's number of threads and determinism after the block; a run changes them inside."""
    import torch

    os.environ.setdefault("MKL_CBWR", MKL_CBWR)
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    module: Any = torch.utils.deterministic  # Its types lack what its module's class has.
    fill = module.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch._C._set_deterministic_algorithms(deterministic, warn_only=warn_only)  # torch's own function imports its compiler.
        module.fill_uninitialized_memory = fill
