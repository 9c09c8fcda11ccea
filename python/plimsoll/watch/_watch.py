# SPDX-License-Identifier: Apache-2.0
"""Watch: finds leaks in a loop of your own: the owner that grows, the line that allocates, and the holder.

Threads: a Watch may be used from any thread; its phases are of one loop.
"""
from __future__ import annotations

import html
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from .. import _core
from .._core import Finding
from ..memory._memory import Governor
from ._search import Search


class Watch:
    """A detector of memory leaks in a loop. Its verdict names the growing owner, bytes per step, phase, line and holder.

        with plimsoll.Watch() as watch:
            for batch in batches:
                train(batch)
                watch.step()
            print(watch.verdict())
        # leak: native grows by 1.2 MiB a step, in phase eval, allocated at train.py:61, held by list `kept` in module
        # __main__, 38 minutes to the limit

    Owners are tensors and other leases (with a Governor), Python's arenas, the native heap in use, malloc()'s
    retained memory, shared memory, children, mapped files, the memory from before the run (code, interpreter,
    libraries), and the unexplained rest.
    A verdict takes seven windows of 25 steps. Memory that comes and goes within a window does not count. The
    first quarter is warm-up. A leak rises in both halves of the rest, and does not slow down. Growth below
    100 KiB a step takes up to 27 windows. Until then the verdict gives the waiting time and the rate so far.

    malloc() needs time to count its free pieces. The longer it takes, the more rarely it is asked. After more than 3 ms
    for more than 15,000 pieces, twice in a row, it is not asked for 10,000 times as long. Meanwhile the owners "native"
    and "retained" are part of "unexplained". The pause doubles each time.

    After four windows of growth, allocations are sampled until there is an answer: one in 512 KiB, among Python's
    objects, malloc(), shared memory or tensors, whichever grows. Then a search through all reachable objects, autograd
    graphs included, finds the holder, at 1.5 ms a step. If less than half of the growth is found, one gc.collect()
    tells garbage from a leak, unless Python made a full collection itself. Worker processes that multiprocessing
    started meanwhile report their own lines and holders. Lines are known for Python 3.10 to 3.13. The allocations of
    other children, and of functions that ctypes has looked up, are unknown.

    Units:    bytes; a step is one call of step().
    Threads:  any; concurrent calls queue up. One Watch of a process searches at a time.
    Forks:    in a forked child, step() and verdict() raise ValueError: make another Watch there.
    Memory:   80 KB, however long it watches; with a search 2 MiB, in each worker too, and at most 32 MiB during the
              search for a holder.
    Time:     looks take at most 0.6 % of a core. A search adds 1.5 ms to a step, for some 30 steps; its hooks add 2 ms
              to each of three steps; its gc.collect(), if any, takes `collect_seconds`.
    """

    def __init__(self, *, window_steps: int = 25, search: bool = True) -> None:
        """Begins to watch.

        window_steps: steps per window; more for a loop whose memory comes and goes over more steps.
        search:       whether to look for the line that allocates a growth, and for its holder.
        Errors: ValueError for windows below 1.
        """
        if window_steps < 1:
            raise ValueError(f"window_steps: {window_steps} is less than 1")
        self._core = _core.Watch(float(window_steps))
        self._search = Search(self._core, window_steps) if search else None
        if self._search is not None:
            weakref.finalize(self, self._search.close)
        self._phases: list[str] = []
        self.steps = 0
        """Number of calls of step()."""
        self._looked = False  # Since the last step.
        self._look()

    def step(self) -> None:
        """Counts a step. Call it at the end of each step."""
        self.steps += 1
        self._look()
        if self._search is not None:
            self._search.step(self.steps, self._looked)
        self._looked = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names a phase of the loop inside the `with` block: a verdict names the phase of a growth. At most 16 names.

            with watch.phase("eval"):
                evaluate(model)
        """
        self._look(self._core.look_as_phase_begins)  # Growth so far belongs to the phase before.
        self._phases.append(name)
        try:
            yield
        finally:
            self._look(self._core.look_as_phase_ends)
            self._phases.pop()

    def verdict(self, *, wait: bool = True) -> Finding:
        """Returns the verdict on all looks so far. str() is one line; `.advice` is a list of remedies.

        wait: finishes a running search now, which may take a second. False: the search goes on beside the steps, and
              a later verdict has its result.
        """
        found = self._core.verdict()
        if wait and self._search is not None and found.kind == "leak":
            self._search.finish(self.steps)
            found = self._core.verdict()
        return found

    @property
    def searching(self) -> bool:
        """Whether a search for the line and the holder of a growth is running."""
        return self._search is not None and self._search.under_way

    @property
    def collect_seconds(self) -> float | None:
        """The seconds that the search's gc.collect() took; None where there was none."""
        return None if self._search is None else self._search.collect_seconds

    @property
    def owners(self) -> dict[str, int]:
        """Bytes held at the last look, by owner."""
        return self._core.owners

    @property
    def held_bytes(self) -> int:
        """Bytes that this process and its children held at the last look. Shared pages count once; files do not count."""
        return self._core.held_bytes

    def _repr_html_(self) -> str:
        """Returns the holders' bytes as a picture, and the verdict, for a notebook."""
        governor = Governor.current()
        picture = self._core.picture(governor.limit_bytes if governor is not None else 0)
        return f"<p>{html.escape(repr(self)[1:-1])}</p>{picture}"

    def _look(self, look: Callable[[float, str], bool] | None = None) -> None:
        look = look or self._core.look
        self._looked |= look(float(self.steps), self._phases[-1] if self._phases else "")

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends the search. verdict() may still be called."""
        if self._search is not None:
            if kind is None:
                with suppress(ValueError):  # In a forked child.
                    self.verdict()
            self._search.close()

    def __repr__(self) -> str:
        return f"<Watch after {self.steps} steps: {self.verdict()}>"
