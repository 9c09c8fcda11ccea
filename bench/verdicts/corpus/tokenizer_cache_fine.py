# SPDX-License-Identifier: Apache-2.0
"""A tokenizer that remembers each word it has cut, in a language of 3,000 words."""
# /// truth
# leaks = false
# ///
import random

from watched import steps


class Tokenizer:
    def __init__(self):
        self.cache = {}

    def pieces(self, word):
        if word not in self.cache:
            self.cache[word] = [word[k:k + 3] for k in range(0, len(word), 3)]
        return self.cache[word]


tokenizer, draw = Tokenizer(), random.Random(5)
for step in steps():
    for k in range(300):
        tokenizer.pieces(f"word{draw.randrange(3_000):08d}")
