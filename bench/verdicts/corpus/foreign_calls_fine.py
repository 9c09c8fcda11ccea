# SPDX-License-Identifier: Apache-2.0
"""A foreign function allocates within a function of the program, which frees it."""
# /// truth
# leaks = false
# ///
import ctypes

from watched import steps

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


def opened(size):
    handle = libc.malloc(size)
    ctypes.memset(handle, 1, size)
    return handle


for step in steps():
    libc.free(opened(150000))
