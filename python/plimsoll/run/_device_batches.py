# SPDX-License-Identifier: Apache-2.0
"""DeviceBatches: copies batches of host tensors to a device, one batch ahead of use.

Reading order: _pinned.py, this file, _run_loader.py.

Threads: the thread that trains; HostSlots has one that copies.
Memory:  two batches of pinned host memory, and one more batch on the device. If either has no room for it, the next batch stays
         in host memory and is copied when it is needed.
"""
from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import BudgetExceeded, MemoryPressure
from ..memory._memory import Governor, refused_by_device
from ..memory._pinned import HostSlots, Like, NotPinned, Sent
from ..training._batch import _is_packed, _mapped


class DeviceBatches:
    """Copies batches to a device, with the same bits as tensor.to(device)."""

    def __init__(self, governor: Governor, device: torch.device) -> None:
        """Makes the slots. device: a torch.device with its number, not the CPU."""
        self._slots = HostSlots(governor, device)
        self._governor = governor

    @property
    def device(self) -> torch.device:
        """The device that batches are copied to, with its number."""
        return self._slots.device

    def through(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches on the device. Before a batch is yielded, the next one is taken from `batches` and its copy has begun.

        Errors: those of `batches`, each when its batch is due, but a MemoryError at once; BudgetExceeded where the device has no room.
        """
        coming = self._next(batches)
        try:
            while coming is not None:
                ready, coming = [coming.arrived()], None
                coming = self._next(batches)
                yield ready.pop()  # The loop has the only reference.
        finally:
            if coming is not None:
                coming.drop()

    def brought(self, batch: Any) -> Any:
        """Returns one batch on the device."""
        return _Coming(self._governor, self.device, batch, None).arrived()

    def _next(self, batches: Iterator[Any]) -> _Coming | _Failed | None:
        try:
            batch = next(batches)
        except StopIteration:
            return None
        except MemoryError:
            raise
        except Exception as error:
            return _Failed(error)
        found: list[torch.Tensor] = []
        waiting = _mapped(batch, lambda leaf: _in_slot(leaf, found))
        if not found or self._slots.busy:  # The slots hold the batch of an outer loop.
            return _Coming(self._governor, self.device, batch, None)
        like = [_like(one) for one in found]
        try:
            return _Coming(self._governor, self.device, waiting, self._slots.send(like, lambda slots: _fill(slots, found)))
        except MemoryPressure:
            raise
        except (BudgetExceeded, NotPinned, torch.OutOfMemoryError):
            return _Coming(self._governor, self.device, batch, None)

    def close(self) -> None:
        """Ends the thread and releases the slots."""
        self._slots.close()


class _Place(int):
    """The index of a tensor that is being copied; it takes the tensor's place in the batch."""


class _Coming:
    """A batch, some of whose tensors are in `sent`."""

    def __init__(self, governor: Governor, device: torch.device, batch: Any, sent: Sent | None) -> None:
        self._governor, self._device, self._batch, self._sent = governor, device, batch, sent

    def arrived(self) -> Any:
        """Returns the batch on the device, once."""
        try:
            tensors = self._sent.arrive() if self._sent is not None else []
            return _mapped(self._batch, lambda leaf: tensors[leaf] if isinstance(leaf, _Place) else _brought(leaf, self._device))
        except torch.OutOfMemoryError as error:
            raise refused_by_device(self._governor, "loader: the device has no room for a batch", error) from None

    def drop(self) -> None:
        """Discards the batch, which is no longer needed."""
        if self._sent is not None:
            self._sent.drop()


class _Failed:
    """The error that the source raised instead of a batch."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def arrived(self) -> Any:
        raise self._error

    def drop(self) -> None:
        pass


def _in_slot(leaf: Any, found: list[torch.Tensor]) -> Any:
    """Adds the leaf to `found` and returns its index as a _Place. A leaf that cannot go through a slot is returned as it is."""
    plain = (type(leaf) is torch.Tensor and leaf.device.type == "cpu" and leaf.layout == torch.strided and leaf.numel() > 0
             and not (leaf.is_quantized or leaf.is_conj() or leaf.is_neg() or leaf.requires_grad))
    if not plain:
        return leaf
    found.append(leaf)
    return _Place(len(found) - 1)


def _brought(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, torch.Tensor) or _is_packed(leaf) else leaf


def _like(one: torch.Tensor) -> Like:
    """Returns the layout of one.to(device)."""
    strides = one.stride() if one.is_contiguous() else torch.empty_like(one, device="meta").stride()
    return Like(tuple(one.shape), strides, one.dtype, one.numel() * one.element_size())


def _fill(slots: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copies tensors to slots, and drops the references to them."""
    while tensors:
        slot, one = slots[len(tensors) - 1], tensors.pop()
        if slot.stride() == one.stride():  # The bytes have no gaps: memmove() copies them without Python's lock.
            ctypes.memmove(slot.data_ptr(), one.data_ptr(), one.numel() * one.element_size())
        else:
            slot.copy_(one)
