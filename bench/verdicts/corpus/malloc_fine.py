# SPDX-License-Identifier: Apache-2.0
"""An extension that frees what it allocates."""
# /// truth
# leaks = false
# ///
import ctypes

from watched import steps

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for step in steps():
    block = libc.malloc(200_000)
    ctypes.memset(block, 1, 200_000)
    libc.free(block)
