# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks have before them (RankMemory), as Python has it: words, arrays over it, and what is left of them."""
import gc
import os
import pathlib
import re
import signal
import threading
import time

import numpy as np
import pytest

import plimsoll
from plimsoll._core import RankMemory

torch = pytest.importorskip("torch")
WORD = 32


@pytest.fixture
def governor():
    held = int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1]) << 10  # By tests before this one.
    with plimsoll.Governor(held + (1 << 30)) as made:
        yield made


def opened(count):
    """Of so many ranks, all in this process."""
    made = [RankMemory(rank, count, WORD) for rank in range(count)]
    for one in made:
        one.open([other.address for other in made])
    return made


def mapped():
    """Mappings of any rank's file, and descriptors of one."""
    files = [os.readlink(f"/proc/self/fd/{one.name}") for one in pathlib.Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return pathlib.Path("/proc/self/maps").read_text().count("plimsoll-rank"), sum("plimsoll-rank" in one for one in files)


def forked(count, train):
    """train(memory, rank) in processes of their own, rank 0 in this one; what that gave, and how the others ended."""
    pipes = [os.pipe() for _ in range(2 * count)]
    addresses, pids = [], []

    def told(rank):
        memory = RankMemory(rank, count, WORD)
        os.write(pipes[rank][1], f"{memory.address}\n".encode())
        with open(pipes[count + rank][0], closefd=False) as lines:
            memory.open([lines.readline()[:-1] for _ in range(count)])
        return memory

    for rank in range(1, count):
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                train(told(rank), rank)
                os._exit(0)
            finally:
                os._exit(1)
    own = RankMemory(0, count, WORD)
    for rank in range(1, count):
        with open(pipes[rank][0], closefd=False) as lines:
            addresses.append(lines.readline()[:-1])
    for rank in range(1, count):
        os.write(pipes[count + rank][1], "".join(f"{one}\n" for one in [own.address, *addresses]).encode())
    own.open([own.address, *addresses])
    try:
        made = train(own, 0)
    finally:
        own.close()
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    for ends_of in pipes:
        for end in ends_of:
            os.close(end)
    return made, ends


@pytest.mark.parametrize("count", [2, 5])
def test_words_are_what_all_said(count):
    def train(memory, rank):
        for k in range(300):
            said = memory.word(f"{rank} says {k}".encode().ljust(WORD))
            assert said == b"".join(f"{other} says {k}".encode().ljust(WORD) for other in range(count))
            if k % 50 == rank:
                time.sleep(0.01)
                memory.meet()
            elif k % 50 < count:
                memory.meet()
        return k

    assert forked(count, train) == (299, [0] * (count - 1))


@pytest.mark.parametrize("how", ["killed", "leaves"])
def test_a_rank_that_does_not_come_any_more_is_noticed(how):
    """By some, who leave as well."""
    def train(memory, rank):
        memory.word(bytes(WORD))
        if rank == 2:
            memory.close() if how == "leaves" else os.kill(os.getpid(), signal.SIGKILL)
            return None
        began = time.monotonic()
        with pytest.raises(OSError, match="rank . has left"):
            memory.word(bytes(WORD))
        return time.monotonic() - began

    took, ends = forked(3, train)
    assert took < 2 and ends == [0, -9 if how == "killed" else 0]


def test_who_waits_does_not_use_the_processor():
    def train(memory, rank):
        if rank:
            time.sleep(1.0)
        began = time.process_time()
        memory.word(bytes(WORD))
        return time.process_time() - began

    assert forked(2, train)[0] < 0.2


def test_a_handler_of_a_signal_ends_a_wait():
    """That of one process, which alone has come."""
    one, other = opened(2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background job has it ignored.
    try:
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            one.meet()
        assert time.monotonic() - began < 2
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    one.close()
    other.meet()  # That one came before it left.
    with pytest.raises(OSError, match="rank 0 has left"):
        other.meet()
    other.close()
    with pytest.raises(ValueError, match="closed"):
        other.meet()


def test_others_run_while_one_waits():
    one, other = opened(2)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(other.meet()))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    one.meet()
    thread.join(10)
    assert seen == [None]
    one.close()
    other.close()


def test_rows_that_others_wrote_stay_until_no_array_of_them_is_left(governor):
    one, other = opened(2)
    first = one.take(1000, 16, governor._core)
    begin = first.begin
    first.ids[:] = np.arange(1000)
    theirs = other.rows(0, begin, 1000, 16)
    assert (theirs.ids == np.arange(1000)).all()
    theirs.rows[:] = 7
    kept = torch.from_numpy(first.rows)[3:5]
    del first
    gc.collect()
    second = one.take(5000, 16, governor._core)  # It grows, and is mapped anew.
    assert second.begin >= begin + 1000 * 72
    second.rows[:] = 9
    assert kept.eq(7).all() and (other.rows(0, second.begin, 5000, 16).rows == 9).all()
    del kept
    assert one.take(1000, 16, governor._core).begin == begin  # Of that nothing is left.
    third = one.take(0, 16, governor._core)
    assert third.ids.shape == (0,) and third.rows.shape == (0, 16)
    one.close()
    other.close()


def test_memory_is_leased_and_what_is_refused_changes_nothing(governor):
    one, other = opened(2)
    before = governor.ledger().leased_bytes
    made = one.take(1 << 16, 128, governor._core)  # 32.5 MiB.
    held = governor.ledger().leased_bytes - before
    assert 32 << 20 < held < 40 << 20
    one.grow_room(RankMemory.ROOM_BYTES, governor._core)
    assert governor.ledger().leased_bytes - before == held + RankMemory.ROOM_BYTES
    with pytest.raises(plimsoll.BudgetExceeded):
        one.take(1 << 22, 128, governor._core)
    assert governor.ledger().leased_bytes - before == held + RankMemory.ROOM_BYTES
    other.grow_room(RankMemory.ROOM_BYTES, None)  # Before there is a governor.
    assert made.rows.shape == (1 << 16, 128)
    one.close()
    one.close()
    other.close()
    assert governor.ledger().leased_bytes == before


def test_nothing_is_left_behind_and_a_forked_child_maps_none_of_it(governor):
    gc.collect()
    before = mapped()
    one, other = opened(2)
    made = one.take(1000, 16, governor._core)
    theirs = other.rows(0, made.begin, 1000, 16)
    one.room(1)[:] = 1
    assert mapped()[0] > before[0] + 3
    child = os.fork()
    if child == 0:
        os._exit(0 if mapped()[0] == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    one.close()
    other.close()
    assert made.rows.shape == theirs.rows.shape  # Still there.
    made.rows[:] = 1
    assert (theirs.rows == 1).all()
    del made, theirs
    assert mapped() == before


def test_a_file_that_is_another_one_is_refused():
    one, other = opened(2)
    third = RankMemory(0, 2, WORD)
    with open("/dev/null", "r+b") as null, pytest.raises(OSError, match="is not what rank 1 calls plimsoll-rank "):
        third.open([third.address, re.sub(r" \d+ ", f" {null.fileno()} ", other.address, count=1)])
    for memory in (one, other, third):
        memory.close()
