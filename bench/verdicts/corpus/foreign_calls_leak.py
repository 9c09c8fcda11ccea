# SPDX-License-Identifier: Apache-2.0
"""A foreign function allocates within a function of the program, and nobody frees it."""
# /// truth
# leaks = true
# owners = ["native", "unexplained"]
# bytes_per_step = 150000
# ///
import ctypes

from watched import steps

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]


def opened(size):
    handle = libc.malloc(size)  # site
    ctypes.memset(handle, 1, size)  # site
    return handle


def made(size):
    return opened(size)


for step in steps():
    made(150000)
