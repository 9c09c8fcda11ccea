# SPDX-License-Identifier: Apache-2.0
"""Patterns compiled from texts: the caches of the standard library fill, and have bounds."""
# /// truth
# leaks = false
# ///
import functools
import inspect
import linecache
import re
import typing

from watched import steps


def main():
    found = 0
    for step in steps():
        pattern = re.compile(f"(step|{step}) of ([0-9]+)")
        found += sum(pattern.match(f"step of {at}") is not None for at in range(200))
        made = functools.partial(main, step)
        inspect.signature(made.func)
        typing.Optional[typing.Literal[step]]
        linecache.getline(re.__file__, step)


main()
