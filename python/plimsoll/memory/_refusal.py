# SPDX-License-Identifier: Apache-2.0
"""Work that may be refused memory, and that leaves none in use then.

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


_HOST = "DefaultCPUAllocator"  # In the messages of the arena and of torch's own CPU allocator.


def is_of_device(error: BaseException) -> bool:
    """Whether a device refused the memory, not the host."""
    return not isinstance(error, BudgetExceeded) and _HOST not in str(error)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The reason why memory was refused, as text."""

    text: str
    of_device: bool = False
    """Whether a device refused it, not the host."""

    def __str__(self) -> str:
        return self.text


def unless_refused(work: Callable[[], Any]) -> tuple[Any, Refusal | None]:
    """Returns (work(), None), or (None, the refusal) if memory was refused.

    After a refusal, nothing of the work stays in memory: the frames of the exception are cleared, and so is autograd's
    queue of this thread, where an interrupted backward leaves entries.
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
