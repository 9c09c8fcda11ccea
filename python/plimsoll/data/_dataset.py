# SPDX-License-Identifier: Apache-2.0
"""import_dataset(): writes a dataset of numbers and fixed-shape arrays into a FeatureStore, in bounded memory.

Reading order: import_dataset(), _items(), _Chunk.
Memory: one chunk of about 4 MiB, and one item at a time.
"""
from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from .. import _core
from ..core import _torch_gate
from ..memory._memory import Governor, with_governor
from ._features import FeatureWriter

_CHUNK_BYTES = 4 << 20
_STORED = {"float32", "float16", "float64", "int64", "int32", "uint8"}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


@with_governor
def import_dataset(dataset: Any, out: str | os.PathLike[str], *,
                   ids: str | Iterable[int] | None = None, groups: str | None = None,
                   governor: Governor | None = None,
                   dtype: str | Mapping[str, str] | None = None,
                   allow_non_finite: bool = False,
                   compression: str = "none", append: bool = False) -> dict[str, Any]:
    """Streams a dataset into a FeatureStore in `out` and returns plimsoll.info(out).

    The store is a new one, unless `append` is set.

    dataset: map-style (len() and [i]; a torch Dataset, a list, a NumPy array), iterable (a
             generator, an IterableDataset), or a dict of equally long arrays. An item is a dict, a
             (named) tuple or one array, tensor or number. The first item decides the columns
             ("value" for a single array, "c0", "c1", … for a tuple); every other item must fit them.
    ids:     the key that holds an item's id, or an iterable of one id per item. The default is the key "id" where
             items have it, else 0, 1, 2, …; with `append` counting starts at the store's number of records.
    groups:  the key that holds an item's group id; items of a group are consecutive.
    governor: the governor whose limit applies; by default a new one for the time of the call.
    dtype:   a dtype for every floating-point column, or a dtype by column: "float16" halves the bytes. A whole number
             that the dtype cannot represent is an error.
    compression: as for FeatureWriter.
    append:  adds the items to the store in `out` (FeatureWriter.extend). Its columns must be the same; its compression
             stays.

    Shape:  column k is [items, shape of the first item's k-th array…].
    Errors: ValueError naming the item and the column (missing, another shape or dtype, not an
            array, NaN or infinity, duplicate id); OSError. After an error `out` is unchanged.
    """
    assert governor is not None  # By with_governor.
    items = _items(dataset)
    first = next(items, None)
    if first is None:
        raise ValueError("dataset: it has no items, so its columns are unknown")
    named = _named(first, 0)
    id_key = ids if isinstance(ids, str) else ("id" if ids is None and "id" in named else None)
    own_ids = None if ids is None or isinstance(ids, str) else iter(ids)
    keys = [key for key in (id_key, groups) if key is not None]
    for key in keys:
        if key not in named:
            raise ValueError(f"item 0: there is no {key!r} in it; it has {', '.join(named)}")
    specs = {name: _spec(name, value, dtype) for name, value in named.items() if name not in keys}
    unknown = [name for name in dtype if name not in specs] if isinstance(dtype, Mapping) else []
    if unknown:
        raise ValueError(f"dtype: there is no column {unknown[0]!r}; there are {', '.join(specs)}")
    if not specs:
        raise ValueError("item 0: it holds nothing but ids")
    columns = {name: (stored, shape) for name, (stored, shape, _) in specs.items()}
    first_id = 0
    if append:
        first_id = json.loads(_core.describe(os.fspath(out)))["rows"]
        writer = FeatureWriter.extend(governor, out, allow_non_finite=allow_non_finite)
        if (writer.columns, writer.grouped) != (columns, groups is not None):
            writer.close()
            raise ValueError(f"{os.fspath(out)}: it has columns {writer.columns}{' and groups' * writer.grouped} where "
                             f"the items have {columns}{' and groups' * (groups is not None)}")
    else:
        writer = FeatureWriter(governor, out, columns, grouped=groups is not None, allow_non_finite=allow_non_finite,
                               compression=compression)
    with writer:
        chunk = _Chunk(specs, grouped=groups is not None)
        for index, item in enumerate(itertools.chain([first], items)):
            named = _named(item, index)
            chunk.add(index, _id_of(named, index, id_key, own_ids, first_id), named,
                      None if groups is None else _integer(named.get(groups), index, groups), keys)
            if chunk.full:
                chunk.flush(writer)
        if own_ids is not None and next(own_ids, None) is not None:
            raise ValueError(f"ids: there are more of them than the {index + 1} items")
        chunk.flush(writer)
    return json.loads(_core.describe(os.fspath(out)))


class _Chunk:
    """Items that wait for the writer: one array per column, filled item by item."""

    def __init__(self, specs: dict[str, tuple[str, tuple[int, ...], np.dtype]],
                 grouped: bool) -> None:
        self._specs = specs
        record = sum(np.dtype(stored).itemsize * int(np.prod(shape, dtype=np.int64))
                     for stored, shape, _ in specs.values())
        self._capacity = max(1, min(65536, _CHUNK_BYTES // max(1, record)))
        self._arrays = {name: np.empty((self._capacity, *shape), stored)
                        for name, (stored, shape, _) in specs.items()}
        self._ids = np.empty(self._capacity, np.int64)
        self._groups = np.empty(self._capacity, np.int64) if grouped else None
        self._count = 0

    @property
    def full(self) -> bool:
        return self._count == self._capacity

    def add(self, index: int, item_id: int, named: dict[str, Any], group: int | None,
            keys: list[str]) -> None:
        if len(named) != len(self._specs) + len(keys) or any(
                name not in named for name in self._specs):
            raise ValueError(f"item {index}: it has {', '.join(named)} where item 0 had "
                             f"{', '.join([*self._specs, *keys])}")
        row = self._count
        for name, (stored, shape, given) in self._specs.items():
            array = _as_array(named[name], index, name)
            if array.shape != shape:
                raise ValueError(f"item {index}, column {name!r}: shape {array.shape} where item 0 "
                                 f"had {shape}")
            if array.dtype != given:
                raise ValueError(f"item {index}, column {name!r}: {array.dtype} where item 0 had "
                                 f"{given}")
            self._arrays[name][row] = array
            if given.kind != "f" and given != stored and not np.array_equal(self._arrays[name][row].astype(given), array):
                raise ValueError(f"item {index}, column {name!r}: a whole number that is not one of {stored} (dtype)")
        self._ids[row] = item_id
        if self._groups is not None:
            self._groups[row] = cast(int, group)
        self._count += 1

    def flush(self, writer: FeatureWriter) -> None:
        if self._count:
            writer.append(self._ids[:self._count],
                          {name: array[:self._count] for name, array in self._arrays.items()},
                          groups=None if self._groups is None else self._groups[:self._count])
        self._count = 0


def _items(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, Mapping):
        lengths = {name: len(column) for name, column in dataset.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"dataset: columns of different lengths: {lengths}")
        return ({name: column[i] for name, column in dataset.items()}
                for i in range(next(iter(lengths.values()), 0)))
    # By index if possible: iter() would find no end of a torch Dataset. An IterableDataset inherits a [i] that only raises.
    torch = _torch_gate.torch_if_imported()
    iterable = torch is not None and isinstance(dataset, torch.utils.data.IterableDataset)
    if not iterable and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return (dataset[i] for i in range(len(dataset)))
    try:
        return iter(dataset)
    except TypeError:
        raise ValueError(f"dataset: {type(dataset).__name__} has neither len() and [i], nor can it "
                         "be iterated over") from None


def _named(item: Any, index: int) -> dict[str, Any]:
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return dict(zip(item._fields, item, strict=True))
    if isinstance(item, (tuple, list)):
        return {f"c{k}": value for k, value in enumerate(item)}
    if item is None:
        raise ValueError(f"item {index}: it is None")
    return {"value": item}


def _as_array(value: Any, index: int, name: str) -> np.ndarray:
    torch = _torch_gate.torch_if_imported()
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        array = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    elif isinstance(value, float):
        array = np.asarray(value, np.float32)  # A Python number carries no precision of its own.
    elif isinstance(value, (list, tuple)) and value and all(
            isinstance(one, (int, float)) for one in value):
        integers = all(isinstance(one, int) for one in value)
        array = np.asarray(value, np.int64 if integers else np.float32)
    else:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"item {index}, column {name!r}: not an array ({error})") from None
    if array.dtype == np.bool_:
        array = array.view(np.uint8)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"item {index}, column {name!r}: {type(value).__name__} is not an array "
                         "or a number")
    return array


def _spec(name: str, value: Any, dtype: str | Mapping[str, str] | None
          ) -> tuple[str, tuple[int, ...], np.dtype]:
    """Returns (dtype to store, shape, dtype as given) of a column, from the first item."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"item 0: column {name!r} needs a name of small letters, digits and _")
    array = _as_array(value, 0, name)
    stored = array.dtype.name
    if isinstance(dtype, Mapping):
        stored = dtype.get(name, stored)
    elif dtype is not None and array.dtype.kind == "f":
        stored = dtype
    if stored not in _STORED:
        raise ValueError(f"item 0, column {name!r}: {stored} cannot be stored; "
                         f"use one of {', '.join(sorted(_STORED))}")
    if array.dtype.kind == "f" and np.dtype(stored).kind != "f":
        raise ValueError(f"item 0, column {name!r}: {array.dtype} does not fit {stored}")
    return stored, array.shape, array.dtype


def _id_of(named: dict[str, Any], index: int, key: str | None, own: Iterator[int] | None, first_id: int) -> int:
    if key is not None:
        return _integer(named.get(key), index, key)
    if own is None:
        return first_id + index
    value = next(own, None)
    if value is None:
        raise ValueError(f"ids: there are only {index} of them, and more items")
    return _integer(value, index, "ids")


def _integer(value: Any, index: int, key: str) -> int:
    try:
        given = value.item() if hasattr(value, "item") else value.__index__()
        if (number := int(given)) != given:
            raise ValueError
        return int(np.int64(number))
    except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError):
        raise ValueError(f"item {index}, {key!r}: {value!r} is not a 64-bit integer") from None
