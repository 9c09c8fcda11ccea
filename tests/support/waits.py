# SPDX-License-Identifier: Apache-2.0
"""Waits between streams that are left out, for tests of what finds them."""
import contextlib

from plimsoll.memory import _pinned


class Unordered:
    """A stream that does not wait where it is told to."""

    def __init__(self, stream):
        self._stream = stream

    def wait_event(self, event):
        pass

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def __enter__(self):
        return self._stream.__enter__()

    def __exit__(self, *what):
        return self._stream.__exit__(*what)


@contextlib.contextmanager
def left_out(which):
    """Inside, one of the waits of copies to and from a device is not there.

    which: "copies wait": for the memory that they write or read; "compute waits": the stream that computes, for copies; "": none.
    """
    init, compute = _pinned.CopyStream.__init__, _pinned.CopyStream.compute

    def unordered(self, *arguments):
        init(self, *arguments)
        self._stream = Unordered(self._stream)

    if which == "copies wait":
        _pinned.CopyStream.__init__ = unordered
    elif which == "compute waits":
        _pinned.CopyStream.compute = lambda self: Unordered(compute(self))
    try:
        yield
    finally:
        _pinned.CopyStream.__init__, _pinned.CopyStream.compute = init, compute


def forget_frames(error):
    """Lets go of the frames of an error and of those before it, which hold models and batches."""
    while error is not None:
        error.__traceback__, error = None, error.__context__
