# SPDX-License-Identifier: Apache-2.0
"""Patterns compiled from texts and kept with their matches; the library's caches fill beside them."""
# /// truth
# leaks = true
# owners = ["python", "native"]
# holder = "kept"
# ///
import linecache
import re

from watched import steps


def main():
    kept = []
    for step in steps():
        pattern = re.compile(f"(step|{step}) of ([0-9]+)")
        kept.append([pattern, [text.group(2) for text in map(pattern.match, (f"step of {at}" for at in range(1500))) if text]])  # site
        linecache.getline(re.__file__, step)


main()
