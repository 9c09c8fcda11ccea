# SPDX-License-Identifier: Apache-2.0
"""Arrays for results: fresh leased memory, never a view of a store's pages.

The memory comes from torch's arena if the governor has one attached, so that tensors and arrays share it. Otherwise
each array has its own lease.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..core._arrays import _NUMPY_NAME

if TYPE_CHECKING:
    import torch

    from ._memory import Governor


class Buffer:
    """Fresh memory for one result: a NumPy array and, on demand, a tensor over the same bytes.

    Units:  shape in elements; leased as "tensors" when the arena is attached, else as "other".
    Errors: BudgetExceeded.
    """

    __slots__ = ("_array", "_dtype", "_tensor")

    def __init__(self, governor: Governor, shape: tuple[int, ...], dtype: str) -> None:
        self._dtype = dtype
        self._tensor: Any = None
        numpy_dtype = np.dtype(_NUMPY_NAME.get(dtype, dtype))
        bytes_needed = numpy_dtype.itemsize * math.prod(shape)
        if governor.arena_attached:
            import torch

            try:
                self._tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            except torch.OutOfMemoryError as error:
                raise governor.refusal("tensors", bytes_needed, str(error)) from None
            self._array: np.ndarray | None = None  # Made when asked for: it costs a microsecond.
        else:
            block = governor._core.leased_array(_core.Tag.OTHER, bytes_needed)
            self._array = block.view(numpy_dtype).reshape(shape)

    @property
    def array(self) -> np.ndarray:
        """The NumPy array; a bfloat16 buffer has its bits as uint16."""
        if self._array is None:
            import torch

            flat = (self._tensor.view(torch.uint16) if self._dtype == "bfloat16"
                    else self._tensor)
            self._array = flat.numpy()
        return self._array

    @property
    def address(self) -> int:
        """The address of the bytes, valid while the buffer, its array or its tensor lives."""
        return self.array.ctypes.data if self._tensor is None else self._tensor.data_ptr()

    @property
    def tensor(self) -> torch.Tensor:
        """A tensor over the same bytes; nothing is copied. Errors: ImportError without torch."""
        if self._tensor is None:
            import torch

            tensor = torch.from_numpy(self.array)
            self._tensor = tensor.view(torch.bfloat16) if self._dtype == "bfloat16" else tensor
        return self._tensor


class Columns(dict[str, np.ndarray]):
    """The columns of one batch: a dict of NumPy arrays [rows, …] by name, also available as tensors.

    Shape: every array has len(ids) rows, in the order of `ids`. A ragged column has the elements of all rows, row after
           row: row i is [offsets[name][i]:offsets[name][i + 1]]. The arrays are copies, yours to keep and to change. A
           bfloat16 column is uint16 bits in NumPy and bfloat16 as a tensor.
    """

    ids: np.ndarray
    """The ids of the rows, int64 [rows]."""

    offsets: dict[str, np.ndarray]
    """Offsets of ragged columns by name, int64 [rows + 1], as torch.nested.nested_tensor_from_jagged takes them."""

    def __init__(self, ids: np.ndarray, buffers: dict[str, Buffer],
                 offsets: dict[str, np.ndarray] | None = None) -> None:
        super().__init__((name, buffer.array) for name, buffer in buffers.items())
        self.ids = ids
        self.offsets = {} if offsets is None else offsets
        self._buffers = buffers

    def tensor(self, name: str) -> torch.Tensor:
        """Returns the column as a torch tensor over the same bytes; nothing is copied or converted.

        Errors: KeyError for a column that was not read; ImportError without torch.
        """
        return self._buffers[name].tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns every column as a torch tensor over the same bytes, by name."""
        return {name: buffer.tensor for name, buffer in self._buffers.items()}

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}: {array.dtype}{list(array.shape)}"
                          for name, array in self.items())
        return f"<{type(self).__name__} of {len(self.ids)} rows: {parts}>"
