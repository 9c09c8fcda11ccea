# SPDX-License-Identifier: Apache-2.0
"""A cache by a key that never comes again."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 120000
# holder = "cache"
# ///
from watched import steps

cache = {}


def decoded(key):
    if key not in cache:
        cache[key] = bytearray(120000)  # site
    return cache[key]


for step in steps():
    decoded((step // 150, step))
