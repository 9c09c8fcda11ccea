# SPDX-License-Identifier: Apache-2.0
"""Arrays that callers may pass, checked and taken without a copy.

An array is anything with the buffer protocol or DLPack: NumPy, torch, JAX. It must be on the CPU, contiguous and of
the exact dtype; nothing is converted silently. Ids may also be a list of ints.
"""
from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import _core
from . import _torch_gate

# NumPy has no bfloat16: its bits travel as uint16, and tensors view them as bfloat16.
_NUMPY_NAME = {"bfloat16": "uint16"}


def byte_size(size: int | str, option: str, whole_bytes: int = 0) -> int:
    """Returns the bytes of 1024, "64MiB" or "25%" (of `whole_bytes`). Errors: ValueError naming the option."""
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
    """Returns `value` as a NumPy array over the same memory. Errors: ValueError naming the argument."""
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
    """Returns `value` as a contiguous NumPy array of exactly this dtype and shape, without copying.

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
    """Returns ids as a contiguous int64 array [n]. Lists, tuples and ranges of ints are accepted too.

    Errors: ValueError naming the argument; an id beyond 64 bits is one.
    """
    if isinstance(value, (list, tuple, range)):
        try:
            return np.array([operator.index(one) for one in value], dtype=np.int64)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{name}: not 64-bit integers ({error})") from None
    return contiguous(value, name, "int64", (None,))


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns the same memory as a flat array of uint8."""
    return array.reshape(-1).view(np.uint8)


def batches_of(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields (begin, end) of consecutive ranges of `size` that cover [0, count); the last may be shorter."""
    for begin in range(0, count, size):
        yield begin, min(begin + size, count)


def unique_names(names: Iterable[str], what: str) -> list[str]:
    """Returns the names as a list. Errors: ValueError for a name that is not a string, or is given twice."""
    listed = [names] if isinstance(names, str) else list(names)
    for name in listed:
        if not isinstance(name, str) or listed.count(name) > 1:
            raise ValueError(f"{what}: {name!r} is not a name, or is given twice")
    return listed




def not_pickled(self: Any, protocol: Any) -> Any:
    """Raises the TypeError of objects that belong to one process; assigned to `__reduce_ex__`."""
    name = type(self).__name__
    table = " with pinned=True" if name == "EmbeddingStore" else ""
    raise TypeError(f"{name}: belongs to the process that opened it and is not pickled; let the "
                    f"worker open it by its directory{table}, with a Governor of its own")
