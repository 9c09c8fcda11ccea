# SPDX-License-Identifier: Apache-2.0
"""Follows the limits that refusals name (R41)."""
import re

_NAMED = re.compile(r"(?P<process>a limit of at least (\d+)MiB)|(?P<guess>try a limit of (\d+) MiB)|(?P<does>a limit of (\d+) MiB would do)")


def named_in(text):
    """Returns (the limit in MiB that a refusal names, whether the refusal says that it does)."""
    found = _NAMED.search(text)
    assert found is not None, text
    # "at least": of a process with nothing of the run in it, and another one holds a little more.
    return int(found[found.lastindex + 1]) + (found["process"] is not None), found["does"] is not None


def until_it_does(train, limit, tries=6):
    """Calls train(limit in MiB) with the limit that the last refusal named, at most `tries` times, until nothing is refused.

    Each limit is above the one before, and one that "would do" does. Returns the last limit and what train() returned.
    """
    does = False
    for _ in range(tries + 1):
        done = train(limit)
        if done.status == 0:
            return limit, done
        assert done.status == 1 and not does, (limit, done.err)
        named, does = named_in(done.err)
        assert named > limit, (limit, done.err)
        limit = named
    raise AssertionError(f"{tries} limits were named, and {limit} MiB after them: {done.err}")
