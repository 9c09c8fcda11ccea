# SPDX-License-Identifier: Apache-2.0
"""IdMap: the sample ids of a table, and their positions in the order given.

A table's rows are found by 64-bit id. Integers are their own id; a string's id is a 63-bit hash of
it. Two strings of a table with the same hash are refused when the table is made. Ids and positions
are looked up in files that are mapped, not loaded.

    ids.npy                 int64 by position; absent when ids are 0 … N−1 in order
    sorted.npy, order.npy   ids ascending and their positions; absent when ids.npy ascends
    names.bin, names.npy    strings by position: their bytes, and where each begins

Threads: read-only once made.
Memory:  pages of the maps, which the kernel can take back. Making one holds the ids given and
         their order: 24 bytes an id.
"""
from __future__ import annotations

import hashlib
import itertools
import operator
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import NotFoundError
from ._files import map_npy, replace_bytes, replace_npy

FILES = ("ids.npy", "sorted.npy", "order.npy", "names.bin", "names.npy")
_PIECE = 1 << 18


def hash_of(name: str) -> int:
    """Returns a string's id: 63 bits of BLAKE2b."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _integers(values: np.ndarray, what: str) -> np.ndarray:
    if values.ndim != 1:
        raise ValueError(f"{what}: shape {values.shape} where one id after the other is needed")
    if values.dtype.kind not in "iu" or (
            values.dtype == np.uint64 and len(values) and int(values.max()) >= 1 << 63):
        raise ValueError(f"{what}: {values.dtype} where 64-bit integers or strings are needed")
    return np.ascontiguousarray(values, dtype=np.int64)


class Asked(np.ndarray):
    """An array of ids that stand for strings, with the strings for errors. Arrays computed from it have no strings."""

    names: list[str] | None = None


def parse(ids: Any, what: str = "sample_ids") -> tuple[np.ndarray, list[str] | None]:
    """Returns (int64 ids, the strings they stand for or None) of a caller's `ids`.

    Takes integers or strings in any sequence, NumPy array or torch tensor.
    Errors: ValueError naming the argument.
    """
    if isinstance(ids, (str, bytes)):
        raise ValueError(f"{what}: {ids!r} is one id; pass a list of them")
    if isinstance(ids, range):
        return np.arange(ids.start, ids.stop, ids.step, dtype=np.int64), None
    if not isinstance(ids, (np.ndarray, list, tuple)):
        if hasattr(ids, "detach"):
            ids = ids.detach().cpu().numpy()
        elif hasattr(ids, "__array__"):
            ids = np.asarray(ids)
        else:
            try:
                ids = list(ids)
            except TypeError:
                raise ValueError(f"{what}: {ids!r} is not a sequence of ids") from None
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        return _integers(ids, what), None
    listed = ids.tolist() if isinstance(ids, np.ndarray) else ids
    if len(listed) == 0:
        return np.empty(0, np.int64), None
    if isinstance(listed[0], str):
        if not all(isinstance(one, str) for one in listed):
            raise ValueError(f"{what}: strings and other ids are mixed")
        hashes = np.fromiter(map(hash_of, listed), np.int64, len(listed)).view(Asked)
        hashes.names = list(listed)
        return hashes, hashes.names
    if type(listed[0]) is int:
        try:
            array = np.array(listed)  # The quick way; what it cannot do is looked at one by one.
            if array.dtype == np.int64 and array.ndim == 1:
                return array, None
        except (OverflowError, ValueError):
            pass
    try:
        return np.array([operator.index(one) for one in listed], np.int64), None
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{what}: not 64-bit integers or strings ({error})") from None


class IdMap:
    """A map between the ids of a table and their positions, in the order given. Shape: a position is int64 in [0, rows)."""

    def __init__(self, directory: pathlib.Path, rows: int, named: bool) -> None:
        """Maps the files in `directory`. For make() and open()."""
        self.rows = rows
        self.named = named
        self.dense = not (directory / "ids.npy").exists()
        self._ids = None if self.dense else map_npy(directory / "ids.npy")
        self._sorted, self._order = self._ids, None
        if (directory / "order.npy").exists():
            self._sorted = map_npy(directory / "sorted.npy")
            self._order = map_npy(directory / "order.npy")
        if named:
            self._names = map_npy(directory / "names.bin", raw=True)
            self._names_at = map_npy(directory / "names.npy")

    @classmethod
    def make(cls, directory: pathlib.Path, ids: np.ndarray, names: Sequence[str] | None) -> IdMap:
        """Writes the files for `ids`, and opens them. Errors: ValueError naming an id given twice; OSError."""
        if len(ids) == 0:
            raise ValueError("sample_ids: there are none")
        order = None
        if not np.all(ids[:-1] < ids[1:]):
            order = np.argsort(ids, kind="stable")
            ascending = ids[order]
            twice = np.flatnonzero(ascending[:-1] == ascending[1:])
            if len(twice):
                first, second = order[twice[0]], order[twice[0] + 1]
                if names is None or names[first] == names[second]:
                    what = ids[first] if names is None else repr(names[first])
                    raise ValueError(f"sample_ids: {what} is given twice")
                raise ValueError(f"sample_ids: {names[first]!r} and {names[second]!r} have the "
                                 "same 63-bit hash; rename one of them")
        for name in FILES:
            (directory / name).unlink(missing_ok=True)
        if names is not None:
            encoded = [name.encode() for name in names]
            ends = np.fromiter(itertools.accumulate(map(len, encoded)), np.int64, len(encoded))
            replace_npy(directory / "names.npy", np.concatenate([[0], ends]))
            replace_bytes(directory / "names.bin", b"".join(encoded))
        if order is not None:
            replace_npy(directory / "sorted.npy", ascending)
            replace_npy(directory / "order.npy", order)
        if order is not None or ids[0] != 0 or ids[-1] != len(ids) - 1:
            replace_npy(directory / "ids.npy", ids)
        return cls(directory, len(ids), names is not None)

    def slice(self, begin: int, end: int) -> np.ndarray:
        """Returns the 64-bit ids at positions [begin, end), int64."""
        if self._ids is None:
            return np.arange(begin, end, dtype=np.int64)
        return np.ascontiguousarray(self._ids[begin:end])

    def ascending(self) -> Iterable[np.ndarray]:
        """Yields all 64-bit ids in ascending order, in pieces."""
        for begin in range(0, self.rows, _PIECE):
            end = min(begin + _PIECE, self.rows)
            if self._sorted is None:
                yield np.arange(begin, end, dtype=np.int64)
            else:
                yield np.ascontiguousarray(self._sorted[begin:end])

    def given(self, positions: np.ndarray | Sequence[int]) -> list[Any]:
        """Returns the ids at `positions` as the caller gave them: ints, or strings."""
        if not self.named:
            if self._ids is None:
                return [int(one) for one in positions]
            return self._ids[np.asarray(positions, np.int64)].tolist()
        bounds = ((int(self._names_at[one]), int(self._names_at[one + 1])) for one in positions)
        return [bytes(self._names[begin:end]).decode() for begin, end in bounds]

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """Returns the positions of 64-bit ids. Errors: NotFoundError naming the first unknown one."""
        if self._sorted is None:
            wrong = (ids < 0) | (ids >= self.rows)
            places = ids
        else:
            places = np.searchsorted(self._sorted, ids)
            inside = np.minimum(places, self.rows - 1)
            wrong = self._sorted[inside] != ids
            places = inside if self._order is None else self._order[inside]
        if wrong.any():
            first, names = int(np.argmax(wrong)), getattr(ids, "names", None)
            raise NotFoundError(f"there is no sample with id {int(ids[first]) if names is None else repr(names[first])}")
        return places

    def same_order(self, ids: np.ndarray) -> bool:
        """Whether `ids` are the map's ids at the same positions."""
        return len(ids) == self.rows and all(
            np.array_equal(self.slice(begin, begin + _PIECE), ids[begin:begin + _PIECE])
            if begin + _PIECE <= self.rows else
            np.array_equal(self.slice(begin, self.rows), ids[begin:])
            for begin in range(0, self.rows, _PIECE))

    def fingerprint(self) -> str:
        """Returns the fingerprint of the set of ids and their kind. It does not depend on their order."""
        return fingerprint(self.ascending(), self.named)


def fingerprint(pieces: Iterable[np.ndarray], named: bool) -> str:
    """Computes the fingerprint of ascending 64-bit ids, given in pieces. named: the ids stand for strings, not for integers."""
    digest = hashlib.blake2b(b"names" if named else b"integers", digest_size=16)
    for piece in pieces:
        digest.update(np.ascontiguousarray(piece, dtype="<i8").data)
    return digest.hexdigest()
