# SPDX-License-Identifier: Apache-2.0
"""DeviceBatches: batches of tensors in host memory, brought to a device one ahead of use.

Reading order: _pinned.py, this file, _run_loader.py.

Threads: the thread that trains; HostSlots has one that copies.
Memory:  two batches of pinned host memory, and one more on the device. Where either has no room for it, the next batch stays where
         it was made, and is copied when it is needed.
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
    """Brings batches to a device. Their bits are those of batch.to(device), tensor by tensor."""

    def __init__(self, governor: Governor, device: torch.device) -> None:
        """device: any but the CPU, with its number."""
        self._slots = HostSlots(governor, device)
        self._governor = governor

    @property
    def device(self) -> torch.device:
        """Where batches are brought, with its number."""
        return self._slots.device

    def through(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches on the device. The one after each is on its way there then, and has been taken from `batches`.

        Errors: those of `batches`, in their turn, but those of memory at once; BudgetExceeded where the device has no room.
        """
        coming = self._next(batches)
        try:
            while coming is not None:
                ready, coming = [coming.arrived()], None
                coming = self._next(batches)
                yield ready.pop()  # Nobody else keeps it.
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
        if not found or self._slots.busy:  # With the batch of a loop that this one is within.
            return _Coming(self._governor, self.device, batch, None)
        like = [_like(one) for one in found]
        try:
            return _Coming(self._governor, self.device, waiting, self._slots.send(like, lambda slots: _fill(slots, found)))
        except MemoryPressure:
            raise
        except (BudgetExceeded, NotPinned, torch.OutOfMemoryError):
            return _Coming(self._governor, self.device, batch, None)

    def close(self) -> None:
        """Ends the thread and lets go of the slots."""
        self._slots.close()


class _Place(int):
    """Stands for a tensor that is on its way: which one."""


class _Coming:
    """A batch, of which `sent` has some tensors."""

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
        """Nobody will ask for it."""
        if self._sent is not None:
            self._sent.drop()


class _Failed:
    """An error that came instead of a batch."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def arrived(self) -> Any:
        raise self._error

    def drop(self) -> None:
        pass


def _in_slot(leaf: Any, found: list[torch.Tensor]) -> Any:
    """Returns what stands for the leaf, which is added to `found`; or the leaf itself, where it does not go through a slot."""
    plain = (type(leaf) is torch.Tensor and leaf.device.type == "cpu" and leaf.layout == torch.strided and leaf.numel() > 0
             and not (leaf.is_quantized or leaf.is_conj() or leaf.is_neg() or leaf.requires_grad))
    if not plain:
        return leaf
    found.append(leaf)
    return _Place(len(found) - 1)


def _brought(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, torch.Tensor) or _is_packed(leaf) else leaf


def _like(one: torch.Tensor) -> Like:
    """Returns the layout that one.to(device) has."""
    strides = one.stride() if one.is_contiguous() else torch.empty_like(one, device="meta").stride()
    return Like(tuple(one.shape), strides, one.dtype, one.numel() * one.element_size())


def _fill(slots: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copies tensors to slots, and lets go of them."""
    while tensors:
        slot, one = slots[len(tensors) - 1], tensors.pop()
        if slot.stride() == one.stride():  # Its bytes have no gaps. One thread copies them, without Python's lock.
            ctypes.memmove(slot.data_ptr(), one.data_ptr(), one.numel() * one.element_size())
        else:
            slot.copy_(one)
