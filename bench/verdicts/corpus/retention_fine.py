# SPDX-License-Identifier: Apache-2.0
"""Threads that churn through malloc()'s arenas and free all, some of it later: the allocator keeps it."""
# /// truth
# leaks = false
# ///
import collections
import ctypes
import random
import threading

from watched import steps

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
late = collections.deque()


def churn(seed):
    draw, blocks = random.Random(seed), []
    for k in range(200):
        size = draw.randint(2_000, 20_000)
        blocks.append(libc.malloc(size))
        ctypes.memset(blocks[k], 1, size)
    for k in range(200):
        if k % 40:
            libc.free(blocks[k])
        else:
            late.append(blocks[k])


for step in steps():
    threads = [threading.Thread(target=churn, args=(3 * step + k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while len(late) > 300:
        libc.free(late.popleft())
