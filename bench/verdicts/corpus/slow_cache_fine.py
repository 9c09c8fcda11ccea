# SPDX-License-Identifier: Apache-2.0
"""A cache of 200 items, drawn at random: it fills ever slower."""
# /// truth
# leaks = false
# ///
import random

from watched import steps

cache, draw = {}, random.Random(5)


def decoded(key):
    if key not in cache:
        cache[key] = bytearray(46000)
    return cache[key]


for step in steps():
    decoded(draw.randrange(200))
