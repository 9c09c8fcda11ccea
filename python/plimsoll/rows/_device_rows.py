# SPDX-License-Identifier: Apache-2.0
"""Rows of a step's lookups on a device: gathered into pinned host memory, with gradients that come back to the host.

A lookup's leaf is on the device, so its gradient accumulates there. All gradients come to the host together, when the optimizers
are about to step. That waits for the stream that computes, and for no other work of the device.

Reading order: _pinned.py, _embedding.py, this file, _run_embedding.py.
Threads: the thread that trains; backward may look up again in a thread of autograd (recomputing).
Memory:  pinned, two slots of the largest lookup, and a step's gradients. The rows belong to the device's allocator.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core._arrays import ids_in
from ..errors import BudgetExceeded
from ..memory._pinned import FromDevice, HostSlots, Like, NotPinned
from ._embedding import EmbeddingStore, Rows

if TYPE_CHECKING:
    import torch

    from ..memory._memory import Governor
    from ._rank_rows import Owned


class DeviceRows(Rows):
    """Rows of one lookup on a device."""

    def __init__(self, ids: np.ndarray, leaf: torch.Tensor, store: EmbeddingStore, way: RowsWay) -> None:
        self.ids = ids
        self._store, self._leaf, self._way = store, leaf, way
        self._ended = False

    def _device_leaf(self) -> torch.Tensor:
        if self._ended:
            raise ValueError("rows: these were applied already; gather again for the next step")
        leaf: torch.Tensor = self._leaf
        return leaf

    @property
    def array(self) -> np.ndarray:
        """A NumPy copy. Shape: float32 [n, dim]. Errors: ValueError once applied."""
        return self._device_leaf().detach().cpu().numpy()

    @property
    def tensor(self) -> torch.Tensor:
        """The rows as a leaf of torch's graph. Shape: float32 [n, dim], on the device. Errors: ValueError once applied."""
        return self._device_leaf()

    def _gradient(self) -> np.ndarray:
        return self._way.gradients([self])[0].copy()

    def _end(self) -> None:
        self._leaf, self._ended = None, True


class RowsWay:
    """The path of rows to a device, and of their gradients back."""

    def __init__(self, governor: Governor, device: torch.device) -> None:
        self._there, self._back = HostSlots(governor, device), FromDevice(governor, device)

    @classmethod
    def of(cls, governor: Governor, device: torch.device) -> RowsWay:
        """Returns the path of a governor, shared by all its tables. device: a torch.device with its number."""
        if device not in governor._row_ways:
            governor._row_ways[device] = cls(governor, device)
        way: RowsWay = governor._row_ways[device]
        return way

    def gather(self, store: EmbeddingStore, ids: Any) -> DeviceRows | None:
        """Returns rows in request order, as EmbeddingStore.gather(). None: the host lacks pinned memory for them.

        Shape: ids int64 [n], n > 0. Errors: as EmbeddingStore.gather(); torch.OutOfMemoryError.
        """
        import torch

        wanted = ids_in(ids)
        try:
            (rows,) = self._there.bring([Like.dense((len(wanted), store.dim), torch.float32)],
                                        lambda slots: store._core.gather(wanted, slots[0].numpy()))
        except NotPinned:
            return None
        except BudgetExceeded as error:
            if error.tag != "pinned":
                raise
            return None
        return DeviceRows(wanted.copy(), rows.requires_grad_(torch.is_grad_enabled()), store, self)

    def gradients(self, rows: Sequence[DeviceRows]) -> list[np.ndarray]:
        """Returns the rows' gradients on the host, valid until the next call. Shape: float32 [n, dim] each. Errors: ValueError for rows without one."""
        grads = []
        for one in rows:
            if (grad := one.tensor.grad) is None:
                raise ValueError("rows: rows.tensor has no gradient; use rows.tensor in the loss and call backward() before apply(rows)")
            grads.append((grad.to_dense() if grad.is_sparse else grad).detach())
        try:
            found = self._back.fetch(grads)
        except (BudgetExceeded, NotPinned):
            found = [one.contiguous().cpu() for one in grads]
        return [one.numpy() for one in found]


def gradients_of(rows: Sequence[Rows | Owned]) -> list[np.ndarray]:
    """Returns the gradients of rows on the host or a device. Those of a device are copied together, and valid until the next call.

    Shape: float32 [n, dim] each. Errors: ValueError for rows without a gradient.
    """
    found: dict[int, np.ndarray] = {}
    for way in {id(one._way): one._way for one in rows if isinstance(one, DeviceRows)}.values():
        those = [one for one in rows if isinstance(one, DeviceRows) and one._way is way]
        found.update(zip(map(id, those), way.gradients(those), strict=True))
    return [found[id(one)] if id(one) in found else one._gradient() for one in rows]
