# SPDX-License-Identifier: Apache-2.0
"""An extension that allocates a thousand small pieces a step and frees nine of ten."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 40000
# ///
import ctypes

from watched import steps

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for step in steps():
    pieces = []
    for k in range(1_000):
        pieces.append(libc.malloc(400))  # site
        ctypes.memset(pieces[k], 1, 400)
    for k in range(900):
        libc.free(pieces[k])
