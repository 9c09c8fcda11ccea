# SPDX-License-Identifier: Apache-2.0
"""Arrays in and out: what callers may pass, and the leased memory that results are written to.

In: anything with the buffer protocol or DLPack (NumPy, torch, JAX …) that is on the CPU,
contiguous and of the exact dtype; nothing is converted silently. Ids may also be a list of ints.
Out: fresh memory, never a view of a store's pages. It comes from torch's arena when the governor
has one attached (so tensors and arrays share it), else from a lease of its own.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from . import _torch_gate

if TYPE_CHECKING:
    import torch

    from ..memory._memory import Governor

# NumPy has no bfloat16: its bits travel as uint16, and tensors view them as what they are.
_NUMPY_NAME = {"bfloat16": "uint16"}


def byte_size(size: int | str, option: str, whole_bytes: int = 0) -> int:
    """Bytes from 1024, "64MiB" or "25%". Errors: ValueError naming the option."""
    if isinstance(size, str):
        try:
            return _core.parse_bytes(size, whole_bytes)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None
    try:
        value = operator.index(size)
    except TypeError:
        raise ValueError(f"{option}: {size!r} is neither a number of bytes nor a size such as "
                         "'64MiB'") from None
    if value < 0:
        raise ValueError(f"{option}: {value} is negative")
    if value >= 1 << 63:
        raise ValueError(f"{option}: {value} is too large")
    return value


def _to_numpy(value: Any, name: str) -> np.ndarray:
    """`value` as a NumPy array over the same memory. Errors: ValueError naming it."""
    if isinstance(value, np.ndarray):
        return value
    torch = _torch_gate.torch_if_imported()
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise ValueError(f"{name}: the tensor is on {value.device}; move it with .cpu()")
        tensor = value.detach()
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.uint16)
        return tensor.numpy()
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: not an array that the CPU can read ({error})") from None
    try:
        return np.asarray(memoryview(value))
    except TypeError:
        raise ValueError(
            f"{name}: {type(value).__name__} is not an array (NumPy, DLPack or buffer protocol)"
        ) from None


def contiguous(value: Any, name: str, dtype: str, shape: Sequence[int | None]) -> np.ndarray:
    """`value` as a contiguous NumPy array of exactly this dtype and shape, without copying.

    Shape:  None in `shape` stands for any length.
    Errors: ValueError naming the argument and what it should have been.
    """
    array = _to_numpy(value, name)
    wanted = np.dtype(_NUMPY_NAME.get(dtype, dtype))
    if array.dtype != wanted:
        raise ValueError(f"{name}: {array.dtype} where {dtype} is needed; nothing is converted "
                         "silently")
    if array.ndim != len(shape) or any(
            want is not None and have != want
            for have, want in zip(array.shape, shape, strict=True)):
        text = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: shape {tuple(array.shape)} where ({text}) is needed")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: not contiguous; pass numpy.ascontiguousarray(...) or "
                         "tensor.contiguous()")
    return array


def ids_in(value: Any, name: str = "ids") -> np.ndarray:
    """Ids as a contiguous int64 array. Lists, tuples and ranges of ints are accepted too.

    Errors: ValueError naming the argument; an id beyond 64 bits is one.
    """
    if isinstance(value, (list, tuple, range)):
        try:
            return np.array([operator.index(one) for one in value], dtype=np.int64)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{name}: not 64-bit integers ({error})") from None
    return contiguous(value, name, "int64", (None,))


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The same memory as a flat array of uint8."""
    return array.reshape(-1).view(np.uint8)


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
                raise governor._refusal_to_try("tensors", bytes_needed, str(error)) from None
            self._array: np.ndarray | None = None  # Made when asked for: it costs a microsecond.
        else:
            block = governor._core.leased_array(_core.Tag.OTHER, bytes_needed)
            self._array = block.view(numpy_dtype).reshape(shape)

    @property
    def array(self) -> np.ndarray:
        """The NumPy array; of a bfloat16 buffer its bits, uint16."""
        if self._array is None:
            import torch

            flat = (self._tensor.view(torch.uint16) if self._dtype == "bfloat16"
                    else self._tensor)
            self._array = flat.numpy()
        return self._array

    @property
    def address(self) -> int:
        """Where the bytes are, for as long as this or one of the two is."""
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
    """Named arrays of one batch, each [rows, …]: a dict of NumPy arrays, and their tensors.

    Shape: every array has len(ids) rows, in the order of `ids`; of a ragged column the elements of all rows, one row
           after another, row i being [offsets[name][i]:offsets[name][i + 1]]. The arrays are copies: yours to
           keep and to change. A bfloat16 column is uint16 bits in NumPy and bfloat16 as a tensor.
    """

    ids: np.ndarray
    """int64 [rows]."""

    offsets: dict[str, np.ndarray]
    """Of ragged columns: int64 [rows + 1], as torch.nested.nested_tensor_from_jagged takes them."""

    def __init__(self, ids: np.ndarray, buffers: dict[str, Buffer],
                 offsets: dict[str, np.ndarray] | None = None) -> None:
        super().__init__((name, buffer.array) for name, buffer in buffers.items())
        self.ids = ids
        self.offsets = {} if offsets is None else offsets
        self._buffers = buffers

    def tensor(self, name: str) -> torch.Tensor:
        """The column as a torch tensor over the same bytes; nothing is copied or converted.

        Errors: KeyError for a column that was not read; ImportError without torch.
        """
        return self._buffers[name].tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every column as a torch tensor over the same bytes."""
        return {name: buffer.tensor for name, buffer in self._buffers.items()}

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}: {array.dtype}{list(array.shape)}"
                          for name, array in self.items())
        return f"<{type(self).__name__} of {len(self.ids)} rows: {parts}>"


def batches_of(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of consecutive ranges that cover [0, count)."""
    for begin in range(0, count, size):
        yield begin, min(begin + size, count)


def unique_names(names: Iterable[str], what: str) -> list[str]:
    """The names as a list. Errors: ValueError for a name given twice, or none at all."""
    listed = [names] if isinstance(names, str) else list(names)
    for name in listed:
        if not isinstance(name, str) or listed.count(name) > 1:
            raise ValueError(f"{what}: {name!r} is not a name, or is given twice")
    return listed




def not_pickled(self: Any, protocol: Any) -> Any:
    """For `__reduce_ex__` of what belongs to the process that opened it. Errors: TypeError."""
    name = type(self).__name__
    table = " with pinned=True" if name == "EmbeddingStore" else ""
    raise TypeError(f"{name}: belongs to the process that opened it and is not pickled; let the "
                    f"worker open it by its directory{table}, with a Governor of its own")
