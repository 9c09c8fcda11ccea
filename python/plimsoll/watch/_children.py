# SPDX-License-Identifier: Apache-2.0
"""Leaks in worker processes: a Watch asks, and its workers answer with the lines that allocate and the holder.

    Watch: ask() ─ a byte in a pipe ─→ thread of each worker: samples allocations, writes its lines into its slot
    Watch: search(slot) ─────────────→ the worker that grows most: looks for the holder, writes its name

Workers are processes that multiprocessing started after the first Watch was made, by fork, or by spawn or forkserver
where they import plimsoll (as they do where the program's main module does).

Threads: one in each worker, which waits in poll() until it is asked.
Memory:  260 KiB that parent and workers share; in a worker 1.6 MiB while it samples, and in one of them 32 MiB at most
         while it looks for the holder.
"""
from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import multiprocessing.process
import multiprocessing.util
import os
import select
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from .. import _core
from ._samples import library_folders, mean_of

_VARIABLE = "PLIMSOLL_WATCH_BOARD"
_NAME = "plimsoll-watch"
_HEADER = struct.Struct("<Qdq")  # The number of the question; mean_bytes; the slot that is to search.
_LENGTH = struct.Struct("<I")
_SLOTS, _SLOT_BYTES = 64, 4096  # One a worker; those beyond are not heard.
_FIRST = 4096
_TICK_SECONDS = 0.25
_OLD = 4  # Ticks after which what is alive counts as kept.
_SITES_MOST = 8
_PIECE_SECONDS = 0.002
_WINDOWS_MOST = 8  # Most windows to wait for an answer.
_QUESTIONS_MOST = 4  # In the life of a Watch.


class Board:
    """The shared memory of a parent and its workers. There is one per process."""

    def __init__(self, file: int, bell: int, rope: int) -> None:
        self._file, self._bell, self._rope = file, bell, rope
        self._map = mmap.mmap(file, _FIRST + _SLOTS * _SLOT_BYTES)
        self._number, self._asked, self._parent = 0, False, os.getpid()

    @classmethod
    def made(cls) -> Board:
        """Makes the board of this process. Only workers started later see it."""
        file = os.memfd_create(_NAME)
        os.ftruncate(file, _FIRST + _SLOTS * _SLOT_BYTES)
        board = cls(file, *os.pipe())
        os.environ[_VARIABLE] = f"{os.getpid()}:{file}:{board._bell}"
        multiprocessing.util.register_after_fork(board, Board._in_child)
        return board

    # ---- The parent's ----

    def ask(self, mean_bytes: float) -> bool:
        """Makes all workers sample until withdraw(). Returns False where another Watch is asking."""
        if self._asked:
            return False
        self._asked = True
        self._number += 1
        self._map[:_HEADER.size] = _HEADER.pack(self._number, mean_bytes, -1)
        os.write(self._rope, b"?")
        return True

    def search(self, slot: int) -> None:
        """Makes the worker of `slot` look for the holder."""
        number, mean_bytes, _ = _HEADER.unpack_from(self._map)
        self._map[:_HEADER.size] = _HEADER.pack(number, mean_bytes, slot)

    def answers(self) -> dict[int, dict[str, Any]]:
        """Returns the workers' answers so far, by slot: sites [(line, bytes)], and the holder once a worker has looked for it."""
        found = {}
        for slot in range(_SLOTS):
            at = _FIRST + slot * _SLOT_BYTES
            length, = _LENGTH.unpack_from(self._map, at)
            with contextlib.suppress(ValueError):  # The answer is being written.
                one = json.loads(self._map[at + _LENGTH.size:at + _LENGTH.size + length])
                if one["number"] == self._number:
                    found[slot] = one
        return found

    def withdraw(self) -> None:
        """Withdraws the question. Does nothing in a forked child."""
        if self._asked and os.getpid() == self._parent:
            self._asked = False
            os.read(self._bell, 1)

    # ---- The worker's ----

    def _in_child(self) -> None:
        os.close(self._rope)  # The pipe then shows when the parent is gone.
        self.attend()

    def attend(self) -> None:
        """Starts a thread that answers the parent's questions."""
        threading.Thread(target=self._attend, name=_NAME, daemon=True).start()

    def _attend(self) -> None:
        questions = select.poll()
        questions.register(self._bell, select.POLLIN)
        slot = None

        def asked(wait: bool = False) -> bool:
            told = questions.poll(None if wait else 0)
            if any(events & select.POLLHUP for _, events in told):
                raise EOFError  # The parent is gone.
            return bool(told)

        with contextlib.suppress(EOFError):
            while asked(wait=True):
                if slot is None and (slot := self._claimed()) is None:
                    return
                with contextlib.suppress(ValueError):  # A Watch of this process searches itself.
                    _answer(self, slot, asked)
                while asked():
                    time.sleep(_TICK_SECONDS)

    def _claimed(self) -> int | None:
        """Returns a slot that no living process has; None where all are taken."""
        for slot in range(_SLOTS):
            with contextlib.suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _FIRST + slot * _SLOT_BYTES)
                return slot
        return None

    @property
    def question(self) -> tuple[int, float, int]:
        """The question's number, the mean distance of samples in bytes, and the slot that is to look for the holder."""
        return _HEADER.unpack_from(self._map)

    def write(self, slot: int, answer: dict[str, Any]) -> None:
        """Replaces the answer of `slot`."""
        text = json.dumps(answer).encode()
        while len(text) > _SLOT_BYTES - _LENGTH.size:
            answer["sites"].pop()
            text = json.dumps(answer).encode()
        at = _FIRST + slot * _SLOT_BYTES
        self._map[at + _LENGTH.size:at + _LENGTH.size + len(text)] = text
        self._map[at:at + _LENGTH.size] = _LENGTH.pack(len(text))


def _answer(board: Board, slot: int, asked: Callable[[], bool]) -> None:
    """Samples until the question is withdrawn. Looks for the holder once the parent asks this slot."""
    number, mean_bytes, _ = board.question
    allocations = _core.Allocations(mean_bytes, library_folders())
    try:
        for kind in ("objects", "heap", "maps"):
            allocations.show(kind)
        tick, holder = 0, None
        while asked():
            time.sleep(_TICK_SECONDS)
            tick += 1
            allocations.step(tick)
            sites = [(name, held) for name, held, _ in allocations.sites(0, max(tick - _OLD, 0), _SITES_MOST) if name]
            if not sites:
                continue
            if holder is None and board.question[2] == slot:
                holder = _holder(allocations, sites[0][0], max(tick - _OLD, 0), asked)
            board.write(slot, {"number": number, "sites": sites, "holder": holder})
    finally:
        allocations.close()


def _holder(allocations: _core.Allocations, where: str, until: int, asked: Callable[[], bool]) -> str:
    """Returns the name of the holder of the memory allocated at line `where`; "" where none was found."""
    from ._graph_walk import GraphWalk
    from ._holders import FEW, Roots, name_of

    roots = Roots(skipped=[])
    roots.begin()
    search = _core.HolderSearch(allocations, where, 0, until, roots.first, roots.later, roots.skipped, roots.tensor,
                                roots.look_at if roots.tensor else None)
    graphs = GraphWalk(search)
    try:
        while not (search.advance(_PIECE_SECONDS) & graphs.advance(_PIECE_SECONDS) or search.enough):
            time.sleep(5 * _PIECE_SECONDS)
            if not asked():
                return ""
        found, wanted = search.found
        return name_of(search, roots) if wanted and found >= FEW * wanted else ""
    finally:
        search.release(1.0)


_board: Board | None = None


def _the_board() -> Board:
    global _board
    if _board is None or os.environ.get(_VARIABLE, "").partition(":")[0] != str(os.getpid()):
        _board = Board.made()
    return _board


def answer_parent() -> None:
    """Starts to answer the parent's questions, in a process that multiprocessing started. Does nothing where the parent has no Watch."""
    said = os.environ.get(_VARIABLE, "")
    if not said or multiprocessing.process.current_process().name == "MainProcess":
        return
    with contextlib.suppress(ValueError, OSError):
        parent, file, bell = map(int, said.split(":"))
        shared = f"/proc/{parent}/fd/{file}"
        if parent != os.getpid() and os.readlink(shared).startswith(f"/memfd:{_NAME}"):
            Board(os.open(shared, os.O_RDWR | os.O_CLOEXEC),
                  os.open(f"/proc/{parent}/fd/{bell}", os.O_RDONLY | os.O_CLOEXEC), -1).attend()


class ChildSearch:
    """The questions of one Watch to the workers of its process."""

    def __init__(self, core: _core.Watch) -> None:
        self._core, self._board = core, _the_board()
        self.asking = self._told = False
        self._questions = 0
        self._asked_at = self._suspected_at = self._slot = 0
        self._searched_at: int | None = None

    def consider(self, windows: int, rise: float | None, now: bool = False) -> None:
        """Begins, reads or ends a question to the workers. Called after each window.

        rise: growth of the workers in bytes per step, where they grow fastest; else None.
        now:  a verdict is wanted now.
        """
        if not self.asking:
            if rise is not None and not self._told and not now and self._questions < _QUESTIONS_MOST:
                self._begin(windows, rise)
            return
        if rise is not None:
            self._suspected_at = windows
        finding = self._core.verdict()
        if finding.kind != "leak" or finding.owner != "children":
            if windows - self._suspected_at >= 4:
                self.close()
            return
        answers = self._board.answers()
        if not answers:
            if windows - self._asked_at >= _WINDOWS_MOST:  # Children of another kind.
                self._told = True
                self.close()
            return
        if self._searched_at is None:
            self._slot = max(answers, key=lambda slot: sum(held for _, held in answers[slot]["sites"]))
            self._board.search(self._slot)
            self._searched_at = windows
        holder = answers.get(self._slot, {}).get("holder")
        if holder is not None or now or windows - self._searched_at >= _WINDOWS_MOST:
            self._tell(finding, answers, holder or "")

    def _begin(self, windows: int, rise: float) -> None:
        self.asking = self._board.ask(mean_of(rise))
        self._questions += self.asking
        self._asked_at = self._suspected_at = windows
        self._searched_at = None

    def _tell(self, finding: _core.Finding, answers: dict[int, dict[str, Any]], holder: str) -> None:
        sums: dict[str, int] = {}
        for one in answers.values():
            for name, held in one["sites"]:
                sums[name] = sums.get(name, 0) + held
        sites = sorted(sums.items(), key=lambda one: -one[1])[:_SITES_MOST]
        self._core.tell("children", sites, holder, False, finding.bytes_per_step)
        self._told = True
        self.close()

    def close(self) -> None:
        """Withdraws the question."""
        if self.asking:
            self.asking = False
            self._board.withdraw()
