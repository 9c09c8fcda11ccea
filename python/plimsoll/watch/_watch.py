# SPDX-License-Identifier: Apache-2.0
"""Watch: whose memory grows in a loop of one's own, whether that is a leak, where it comes from and who holds it.

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
    """Says whether a loop leaks: whose memory grows, by how many bytes a step, and in which phase.

        with plimsoll.Watch() as watch:
            for batch in batches:
                train(batch)
                watch.step()
            print(watch.verdict())
        # leak: native grows by 1.2 MiB a step, in phase eval, allocated at train.py:61, held by list `kept` in module
        # __main__, 38 minutes to the limit

    Owners are torch's tensors and other leases (with a Governor), Python's arenas, the native heap in
    use, what malloc() retains, shared memory, children, mapped files, what was there before the run (code,
    interpreter, libraries), and what came since and none of them explains.
    A verdict takes seven windows of 25 steps: what comes and goes within a window does not count, the
    first quarter is warm-up, and a leak is what rises in both halves of the rest and does not slow down. Growth
    below 100 KiB a step takes up to 27 windows. Until then the verdict says how long it takes, and the rate so far.

    malloc() counts its free pieces when it is asked, and is asked the more rarely the longer that takes. Where it took more
    than 3 ms for more than 15,000 pieces, twice in a row, it is left alone for 10,000 times as long, and what was "native"
    and "retained" is "unexplained" meanwhile; twice as long each time that comes again.

    Where something has risen for four windows, allocations are sampled (one in 512 KiB; of Python's objects, malloc(),
    shared memory or tensors, as the owner is), and no longer than until there is an answer. Then a search through all
    that can be reached, graphs of gradients too, 1.5 ms a step, finds who holds it. Where less than half of it was
    found so, one gc.collect() tells garbage from a leak, before anybody is named, unless Python made a full collection
    itself meanwhile. Worker processes that multiprocessing started since are asked
    for their lines and holders. Known are lines of Python 3.10 to 3.13; not known is what other children allocate, or a
    function that ctypes has looked up.

    Units:    bytes; a step is one call of step().
    Threads:  any; calls from several queue up. Of several Watches of a process one at a time searches.
    Forks:    in a forked child, step() and verdict() raise ValueError: make another there.
    Memory:   a fixed 80 KB, however long it watches; with a search 2 MiB, in each worker too, and 32 MiB at most while it
              looks for a holder.
    Time:     looks are so rare that they take 0.6 % of a core at most. A search adds 1.5 ms to a step, for some 30 steps,
              and hooks three steps 2 ms each; the collection, where there is one, takes `collect_seconds`.
    """

    def __init__(self, *, window_steps: int = 25, search: bool = True) -> None:
        """window_steps: steps of a window; more where a loop comes and goes over more of them. search: whether it is
        looked for where what grows is allocated, and who holds it.

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
        """Calls of step() so far."""
        self._looked = False  # Since the last step.
        self._look()

    def step(self) -> None:
        """Counts a step; call it where each step ends."""
        self.steps += 1
        self._look()
        if self._search is not None:
            self._search.step(self.steps, self._looked)
        self._looked = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names what the loop does meanwhile: a leak says in which phase it grows. At most 16 names.

            with watch.phase("eval"):
                evaluate(model)
        """
        self._look(self._core.look_as_phase_begins)  # What came before belongs to what was before.
        self._phases.append(name)
        try:
            yield
        finally:
            self._look(self._core.look_as_phase_ends)
            self._phases.pop()

    def verdict(self, *, wait: bool = True) -> Finding:
        """Returns what grows, by all looks so far. str() is one line; `.advice` says what to do.

        wait: finishes a search that is under way now, which may take a second. False: the search goes on beside the steps, and
              its result is in a later verdict.
        """
        found = self._core.verdict()
        if wait and self._search is not None and found.kind == "leak":
            self._search.finish(self.steps)
            found = self._core.verdict()
        return found

    @property
    def searching(self) -> bool:
        """Whether it is being looked for where what grows is allocated, and who holds it."""
        return self._search is not None and self._search.under_way

    @property
    def collect_seconds(self) -> float | None:
        """How long the search's gc.collect() took; None where there was none."""
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
        """In a notebook: who held how much, and the verdict."""
        governor = Governor.current()
        picture = self._core.picture(governor.limit_bytes if governor is not None else 0)
        return f"<p>{html.escape(repr(self)[1:-1])}</p>{picture}"

    def _look(self, look: Callable[[float, str], bool] | None = None) -> None:
        look = look or self._core.look
        self._looked |= look(float(self.steps), self._phases[-1] if self._phases else "")

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends what is searched for; the verdict may be asked for afterwards."""
        if self._search is not None:
            if kind is None:
                with suppress(ValueError):  # In a forked child.
                    self.verdict()
            self._search.close()

    def __repr__(self) -> str:
        return f"<Watch after {self.steps} steps: {self.verdict()}>"
