# SPDX-License-Identifier: Apache-2.0
"""Work that memory may refuse, and nothing left of it then.

Threads: the thread that trains.   Memory: none.
"""
from __future__ import annotations

import contextlib
import dataclasses
import gc
import traceback
from collections.abc import Callable
from typing import Any

from ..errors import BudgetExceeded


_HOST = "DefaultCPUAllocator"  # In the arena's refusals, as in those of torch's own allocator.


def is_of_device(error: BaseException) -> bool:
    """Whether a device refused memory, and not the host."""
    return not isinstance(error, BudgetExceeded) and _HOST not in str(error)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Memory was refused; str() says why."""

    text: str
    of_device: bool = False
    """Whether a device refused it, and not the host."""

    def __str__(self) -> str:
        return self.text


def unless_refused(work: Callable[[], Any]) -> tuple[Any, Refusal | None]:
    """(work(), None); or (None, why memory was refused).

    Then nothing is left of it: what its frames held is let go, and what a backward that ended half way
    left in autograd's queue of this thread.
    """
    import torch

    try:
        return work(), None
    except (torch.OutOfMemoryError, BudgetExceeded) as error:
        refusal = Refusal(str(error), is_of_device(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
    torch.clear_autocast_cache()
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.ones((), requires_grad=True).mul(1).backward()
    gc.collect()
    return None, refusal
