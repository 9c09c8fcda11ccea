# SPDX-License-Identifier: Apache-2.0
"""A tokenizer that remembers each word it has cut, in a stream of names that do not come again."""
# /// truth
# leaks = true
# owners = ["python", "native"]
# holder = "cache|Tokenizer"
# ///
from watched import steps


class Tokenizer:
    def __init__(self):
        self.cache = {}

    def pieces(self, word):
        if word not in self.cache:
            self.cache[word] = [word[k:k + 3] for k in range(0, len(word), 3)]  # site
        return self.cache[word]


tokenizer = Tokenizer()
for step in steps():
    for k in range(300):
        tokenizer.pieces(f"name{step * 300 + k:08d}")
