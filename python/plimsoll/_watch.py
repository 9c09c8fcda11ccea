# SPDX-License-Identifier: Apache-2.0
"""Watch: whose memory grows in a loop of one's own, and whether that is a leak.

Threads: a Watch may be used from any thread; its phases are of one loop.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import _core
from ._core import Finding


class Watch:
    """Says whether a loop leaks: whose memory grows, by how many bytes a step, and in which phase.

        with plimsoll.Watch() as watch:
            for batch in batches:
                train(batch)
                watch.step()
            print(watch.verdict())      # leak: native grows by 1.2 MiB a step, in phase eval

    Owners are torch's tensors and other leases (with a Governor), Python's arenas, the native heap in
    use, what malloc() retains, shared memory, children, mapped files, and what none of them explains.
    A verdict takes eight windows of 25 steps: what comes and goes within a window does not count, the
    first quarter is warm-up, and a leak is what rises in both halves of the rest.

    Units:    bytes; a step is one call of step().
    Threads:  any; calls from several queue up.
    Forks:    in a forked child, step() and verdict() raise ValueError: make another there.
    Memory:   a fixed 40 KB, however long it watches.
    Time:     looks are left out where they would take more than 1 % of a core.
    """

    def __init__(self, *, window_steps: int = 25) -> None:
        """window_steps: steps of a window; more where a loop comes and goes over more of them.

        Errors: ValueError below 1.
        """
        if window_steps < 1:
            raise ValueError(f"window_steps: {window_steps} is less than 1")
        self._core = _core.Watch(float(window_steps))
        self._phases: list[str] = []
        self.steps = 0
        """Calls of step() so far."""
        self._look()

    def step(self) -> None:
        """Counts a step; call it where each step ends."""
        self.steps += 1
        self._look()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names what the loop does meanwhile: a leak says in which phase it grows. At most 16 names.

            with watch.phase("eval"):
                evaluate(model)
        """
        self._look()  # What came before belongs to what was before.
        self._phases.append(name)
        try:
            yield
        finally:
            self._look()
            self._phases.pop()

    def verdict(self) -> Finding:
        """What grows, by all looks so far; str() is one line, `.advice` what to do."""
        return self._core.verdict()

    @property
    def owners(self) -> dict[str, int]:
        """Who held how much at the last look, in bytes."""
        return self._core.owners

    @property
    def held_bytes(self) -> int:
        """What this process and its children held at the last look, shared pages once, files left out."""
        return self._core.held_bytes

    def _look(self) -> None:
        self._core.look(float(self.steps), self._phases[-1] if self._phases else "")

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends nothing: the verdict may be asked for afterwards."""

    def __repr__(self) -> str:
        return f"<Watch after {self.steps} steps: {self.verdict()}>"
