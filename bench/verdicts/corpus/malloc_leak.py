# SPDX-License-Identifier: Apache-2.0
"""An extension that allocates in each call and never frees."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 200000
# ///
import ctypes

from watched import steps

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
for step in steps():
    ctypes.memset(libc.malloc(200_000), 1, 200_000)  # site
