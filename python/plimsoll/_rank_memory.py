# SPDX-License-Identifier: Apache-2.0
"""RankMemory: memory of each rank that all ranks of a machine have before them, for what they exchange.

    a rank's file    [board (of rank 0's) | room for gradients | rows]
    the board        how many have come, who has left, what each says
    rows             of lookups, where owners write them and a step reads them; of their gradients

Who writes where is agreed before: by words, which meet at the board, and so is that nobody reads any more. Sockets would copy
every byte four times.

Reading order: src/os/meeting.h, this file, _ranks.py, _rank_rows.py.
Threads: the thread that trains; rows may be let go of in any. A forked child has none of it mapped.
Memory:  the board, 2 KiB a rank; the room, 4 MiB at most; the most rows that lookups of a step have had at once, until a lookup needs
         less than a quarter of that; the latter two leased, and kept. Pages of others' files that this rank touches are resident in
         it, too, and count in its share once more.
"""
from __future__ import annotations

import contextlib
import mmap
import os
import time
import uuid
import weakref
from collections.abc import Sequence

import numpy as np

from . import _core
from ._memory import Governor, Lease
from ._rank_watch import state_of

_NAME = "plimsoll-rank"  # src/os/mappings.cpp knows it.
_ALIGNED = 64
_COUNTERS, _LEFT = 8, 64  # Places on the board: two of 4 bytes, then a byte a rank; the words follow.
_LOOKS_MS = 100  # How long a rank that has ended may be waited for.
_LONGEST = 1800.0  # Seconds, as gloo waits for one that does not come.
ROOM_BYTES = 4 << 20
_KEPT = 32 << 20


class SharedRows:
    """Ids and rows behind them, in a rank's file. Shape: int64 [count], float32 [count, dim]."""

    def __init__(self, pages: mmap.mmap, begin: int, count: int, dim: int) -> None:
        """begin: in `pages`, which are kept as long as an array of them is."""
        self.ids = np.frombuffer(pages, np.int64, count, begin)
        self.all = np.frombuffer(pages, np.float32, count * dim, begin + _rows_at(count))
        self.rows = self.all.reshape(count, dim)


class RankMemory:
    """What one rank sees of all of them, from open() to close()."""

    def __init__(self, rank: int, count: int, word_bytes: int) -> None:
        """Makes this rank's. Errors: OSError where the system has no memfd."""
        self._rank, self._count, self._word = rank, count, word_bytes
        self._words_at = -(-(_LEFT + count) // _ALIGNED) * _ALIGNED
        self._head = -(-(self._words_at + 2 * count * word_bytes) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._rows_begin = self._head + ROOM_BYTES
        self._name = f"{_NAME} {uuid.uuid4().hex}"
        own = os.memfd_create(self._name, os.MFD_CLOEXEC)
        self._files = {rank: own}
        self._rooms: dict[int, np.ndarray] = {}
        self._pages: dict[int, tuple[mmap.mmap, int]] = {}  # Rows of each rank, and how many bytes.
        self._pids: Sequence[int] = ()
        self._room_bytes = self._rows_bytes = 0  # Of this rank's.
        self._taken: dict[int, int] = {}  # Rows of this rank's that are in use, from and to.
        self._leases: list[Lease] = []
        self._all, self._turn = [0, 0], 0
        self._board, self._counters = np.empty(0, np.uint8), list[np.ndarray]()
        try:
            os.ftruncate(own, self._rows_begin)
        except OSError:
            self.close()
            raise

    @property
    def address(self) -> str:
        """For the others' open()."""
        return f"{os.getpid()} {self._files[self._rank]} {self._name}"

    def open(self, addresses: Sequence[str]) -> None:
        """Of all ranks in their order, this one's too.

        Errors: OSError where a file of another process may not be opened, or is another one.
        """
        for rank, address in enumerate(addresses):
            pid, file, name = address.split(" ", 2)
            if rank != self._rank:
                path = f"/proc/{pid}/fd/{file}"
                self._files[rank] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                if name not in os.readlink(f"/proc/self/fd/{self._files[rank]}"):
                    raise OSError(f"{path} is not what rank {rank} calls {name}")
        self._pids = [int(address.split(" ", 1)[0]) for address in addresses]
        self._board = np.frombuffer(_mapped(self._files[0], self._head, 0), np.uint8)
        self._counters = [self._board[begin:begin + 4].view(np.uint32) for begin in range(0, _COUNTERS, 4)]

    # ---- The board ----

    def meet(self, which: int = 0) -> None:
        """Waits until all ranks have come here, and have written what they wrote before. Errors: RuntimeError where one has left, or ended.

        which: 0 for rooms, 1 for words, so that a rank that goes astray is waited for, and not taken for one that came.
        """
        counter, everybody = self._counters[which], (self._all[which] + self._count) & 0xFFFFFFFF
        self._all[which] = everybody
        _core.come(counter, everybody)
        until = time.monotonic() + _LONGEST
        while not _core.met(counter, everybody, _LOOKS_MS):
            for rank, pid in enumerate(self._pids):
                if self._board[_LEFT + rank] or state_of(pid) in "ZX":
                    if _core.met(counter, everybody, 0):
                        return  # It came before.
                    raise RuntimeError(f"rank {rank} has left")
            if time.monotonic() > until:
                raise RuntimeError(f"a rank has not come for {_LONGEST:.0f} s")

    def word(self, own: bytes | memoryview) -> bytes:
        """What all ranks say, each `word_bytes`, in their order."""
        self._turn ^= 1  # Others may still read what was said before.
        begin = self._words_at + self._turn * self._count * self._word
        words = self._board[begin:begin + self._count * self._word]
        words[self._rank * self._word:(self._rank + 1) * self._word] = np.frombuffer(own, np.uint8)
        self.meet(1)
        return words.tobytes()

    # ---- The room ----

    def grow(self, size: int, governor: Governor | None) -> None:
        """Makes the own room `size` bytes or larger; its file has it already. Errors: BudgetExceeded; then unchanged."""
        if size > self._room_bytes:
            assert size <= ROOM_BYTES
            self._lease(0, size, governor)
            self._room_bytes = size

    def room(self, rank: int) -> np.ndarray:
        """A rank's, which has made it. Shape: uint8 [ROOM_BYTES]."""
        if rank not in self._rooms:
            self._rooms[rank] = np.frombuffer(_mapped(self._files[rank], ROOM_BYTES, self._head), np.uint8)
        return self._rooms[rank]

    # ---- Rows ----

    def take(self, count: int, dim: int, governor: Governor) -> tuple[SharedRows, int]:
        """(room for so many of this rank's, where it begins for the others), until no array of the rows is left.

        Requires: no other rank is at this one's rows. Errors: BudgetExceeded.
        """
        size, begin = max(_rows_bytes(count, dim), _ALIGNED), 0
        if not self._taken and size < self._rows_bytes // 4 and self._rows_bytes > _KEPT:
            self._resize(max(size, _KEPT), governor)
        for first, end in sorted(self._taken.items()):
            if begin + size <= first:
                break
            begin = end
        if begin + size > self._rows_bytes:
            # What grows by little each time would be mapped anew each time.
            self._resize(begin + size + (begin + size) // 8, governor)
        made = SharedRows(self._pages_of(self._rank, begin + size), begin, count, dim)
        self._taken[begin] = begin + size
        weakref.finalize(made.all, self._taken.pop, begin).atexit = False  # Views of it, and tensors, keep it.
        return made, begin

    def rows(self, rank: int, begin: int, count: int, dim: int) -> SharedRows:
        """What a rank has taken."""
        return SharedRows(self._pages_of(rank, begin + _rows_bytes(count, dim)), begin, count, dim)

    def _pages_of(self, rank: int, needed: int) -> mmap.mmap:
        if rank not in self._pages or self._pages[rank][1] < needed:
            begin = self._rows_begin
            size = os.fstat(self._files[rank]).st_size - begin
            assert size >= needed
            self._pages[rank] = _mapped(self._files[rank], size, begin), size
        return self._pages[rank][0]

    def _resize(self, size: int, governor: Governor) -> None:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if size > self._rows_bytes:
            self._lease(1, size, governor)
        os.ftruncate(self._files[self._rank], self._rows_begin + size)
        if size < self._rows_bytes:
            self._leases[1].shrink(size)
        self._rows_bytes = size

    def _lease(self, which: int, size: int, governor: Governor | None) -> None:
        while governor is not None and len(self._leases) <= which:
            self._leases.append(governor.reserve(0))
        if governor is not None:
            self._leases[which].grow(size)

    def close(self) -> None:
        """Leaves the others. A second close does nothing."""
        if len(self._board):
            self._board[_LEFT + self._rank] = 1
            for counter in self._counters:
                _core.wake(counter)
            self._counters.clear()
        self._board = np.empty(0, np.uint8)
        self._rooms.clear()
        self._pages.clear()
        files, self._files = self._files, {}
        for file in files.values():
            with contextlib.suppress(OSError):
                os.close(file)
        for lease in self._leases:
            lease.close()


def _rows_bytes(count: int, dim: int) -> int:
    return -(-(_rows_at(count) + 4 * count * dim) // _ALIGNED) * _ALIGNED


def _rows_at(count: int) -> int:
    return -(-8 * count // _ALIGNED) * _ALIGNED


def _mapped(file: int, size: int, begin: int) -> mmap.mmap:
    """Unmapped with the last array over it."""
    pages = mmap.mmap(file, size, offset=begin)
    pages.madvise(mmap.MADV_DONTFORK)
    return pages
