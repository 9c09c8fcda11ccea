# SPDX-License-Identifier: Apache-2.0
"""A vocabulary grows as new words come, ever fewer of them."""
# /// truth
# leaks = false
# ///
import random

from watched import steps


def main():
    seen, draw = {}, random.Random(7)
    for step in steps():
        for _ in range(400):
            word = f"word {min(int(draw.paretovariate(0.9)), 60000)} of the corpus"
            seen.setdefault(word, [0, step])[0] += 1


main()
