# SPDX-License-Identifier: Apache-2.0
"""Search: finds the lines that allocate a leak, and its holder, once a Watch suspects one.

    quiet → sampling → (verdict: leak) → looking for the holder → collecting once → told → quiet
                                       → tracing lines of a few steps ↗

Allocations are sampled from the first suspicion on (decision 0031). Once there is a verdict, the surviving samples give the
lines. A search through all reachable objects, a piece per step, finds the holder. If there is none, one collection tells
whether the growth is garbage.

Threads: those of its Watch.   Memory: 1.6 MiB while it samples, 32 MiB at most while it looks for the holder.
"""
from __future__ import annotations

import gc
import threading
import time

from .. import _core
from ._children import ChildSearch
from ._graph_walk import GraphWalk, keeps_its_gradient
from ._holders import FEW, Roots, name_of, name_of_grown
from ._lines import STEPS, LineTrace
from ._samples import library_folders, mean_of

PIECE_SECONDS = 0.0015
"""How long a step waits for the search, garbage collection apart."""
_SEARCHES_MOST = 4  # In the life of a Watch; each has a collection.
_SITES_MOST = 8
_EXPLAINED = 0.3  # Share of the growth that survivors must stand for; else what a line holds is compared.
_GARBAGE = 0.5  # Share of the survivors, or of the growth, that one collection frees.
_KINDS_OF = {"tensors": "tensors", "python": "objects", "native": "heap", "leased": "heap", "unexplained": "heap",
             "heap": "heap", "shared": "maps"}


class Search:
    """The search of one Watch for sites and holders. One search at a time samples in a process."""

    _began: int  # The step, as these of _begin().
    _seen_windows: int
    _suspected_at: int
    _marked: dict[str, int]

    def __init__(self, core: _core.Watch, window_steps: int) -> None:
        self._core, self._window = core, window_steps
        self._allocations: _core.Allocations | None = None
        self._holders: _core.HolderSearch | None = None
        self._graphs: GraphWalk | None = None  # Belongs to _holders.
        self._unshown = ""  # The owner whose allocations are to be sampled from the next step on.
        self._over = False  # There is an answer; hooks are removed in the next step.
        self._trace: LineTrace | None = None
        self._shown: set[str] = set()
        self._children, self._children_asked_at = ChildSearch(core), 0
        self._searches = 0
        self._told: set[str] = set()
        self._trimmed = False
        self.collect_seconds: float | None = None
        """The seconds that gc.collect() took; None where there was none."""

    @property
    def sampling(self) -> bool:
        """Whether allocations are hooked."""
        return self._allocations is not None

    @property
    def under_way(self) -> bool:
        """Whether finish() would have something to end."""
        return self.sampling or self._children.asking

    def step(self, step: int, looked: bool) -> None:
        """Goes on with the search. Called after each step of the loop. looked: the Watch has just looked."""
        if self._trace is not None:
            self._trace.end()
        if self._over:
            self._end()
        elif self._holders is not None:
            self._look_for_holder(step)
        if self._allocations is not None:
            self._allocations.step(step)
            if self._unshown:
                self._show(self._unshown)
            elif self._holders is None:
                self._roots.prepare(PIECE_SECONDS / 4)
        if looked and not self._over:
            self._consider(step)
        if self._trace is not None and (self._trace.steps == STEPS or not self._trace.begin()):
            self._tell_lines(step)

    def finish(self, step: int) -> None:
        """Finishes the search now, in one go, for a verdict that does not wait."""
        windows, owner, rise = self._core.suspect()
        self._children.consider(windows, rise if owner == "children" else None, now=True)
        if self._over:
            self._end()
        if self._allocations is None:
            return
        if self._trace is not None:
            self._trace.end()
            self._tell_lines(step)
        elif self._holders is None:
            self._consider(step, asked=True)
        while self._holders is not None:
            self._look_for_holder(step, piece_seconds=1.0, asked=True)
        if self._over:
            self._end()

    def close(self) -> None:
        """Removes all hooks, and ends searching for good."""
        self._searches = _SEARCHES_MOST
        self._children.close()
        self._end()

    def _consider(self, step: int, asked: bool = False) -> None:
        windows, owner, rise = self._core.suspect()
        if windows != self._children_asked_at:
            self._children_asked_at = windows
            self._children.consider(windows, rise if owner == "children" else None)
        if self._allocations is None:
            if owner in _KINDS_OF and owner not in self._told and self._searches < _SEARCHES_MOST:
                self._begin(step, windows, owner, rise)
            elif self._core.retains() and not self._trimmed:
                self._trim()
            return
        if self._holders is not None or self._trace is not None or (windows == self._seen_windows and not asked):
            return
        self._seen_windows = windows
        if owner in _KINDS_OF:
            self._suspected_at = windows
            self._show(owner)
        if not self._marked and step >= self._began + self._window:
            self._marked = {name: held for name, held, _ in self._allocations.sites(0, step + 1, 64)}
            self._marked_at = step
        finding = self._core.verdict()
        sampled = step - self._began
        if finding.kind == "leak" and (finding.owner not in _KINDS_OF or finding.owner in self._told):
            self._end()
        elif finding.kind == "leak" and _KINDS_OF[finding.owner] not in self._shown:
            self._show(finding.owner)
            self._began = step
        elif finding.kind == "leak" and sampled >= 3 * self._window:
            self._judge(step, finding)
        elif windows - self._suspected_at >= 4 and finding.kind != "leak":
            self._end()

    def _begin(self, step: int, windows: int, owner: str, rise: float) -> None:
        try:
            self._allocations = _core.Allocations(mean_of(rise), library_folders())
        except ValueError:  # Another Watch of this process searches.
            return
        self._began, self._seen_windows, self._suspected_at = step, windows, windows
        self._roots = Roots(skipped=[self])
        self._marked = {}
        self._marked_at = step
        self._full_collections = _full_collections()
        self._shown.clear()
        self._allocations.step(step)
        self._unshown = owner

    def _show(self, owner: str) -> None:
        """Starts to sample the allocations of `owner`, those of recently loaded libraries included."""
        self._unshown = ""
        kind = _KINDS_OF[owner]
        if self._allocations is not None and (kind not in self._shown or kind in ("heap", "maps")):
            self._allocations.show(kind)
            self._shown.add(kind)

    def _judge(self, step: int, finding: _core.Finding) -> None:
        assert self._allocations is not None
        self._searches += 1
        grown = finding.bytes_per_step * (step - self._began - self._window)
        since, until = 0, step + 1 - self._window
        sites = [(name, held) for name, held, _ in self._allocations.sites(since, until, _SITES_MOST)]
        if sum(held for _, held in sites) < _EXPLAINED * grown:  # One block that is made anew, and larger.
            until = step + 1
            now = [(name, held - self._marked.get(name, 0))
                   for name, held, _ in self._allocations.sites(since, until, 64)]
            sites = [(name, held) for name, held in sorted(now, key=lambda one: -one[1]) if held > 0][:_SITES_MOST]
        self._finding, self._sites = finding, [(name, held) for name, held in sites if name]
        self._range, self._collected = (since, until), False
        if sum(held for _, held in sites) < _EXPLAINED * grown and finding.owner in ("native", "unexplained"):
            self._trace = LineTrace(finding.owner, tuple(library_folders()))
            return
        self._roots.begin()
        where = self._sites[0][0] if self._sites else ""
        self._holders = _core.HolderSearch(
            self._allocations, where, since, until, self._roots.first, self._roots.later, self._roots.skipped,
            self._roots.tensor, self._roots.look_at if self._roots.tensor else None)
        self._graphs = GraphWalk(self._holders)
        self._stage = "reach"
        if until > step:  # Made anew in the next step.
            self._look_for_holder(step, 2 * PIECE_SECONDS)

    def _garbage(self, step: int) -> bool:
        """Whether one gc.collect() frees the growth. None is made where Python made a full collection since."""
        assert self._allocations is not None
        if self._collected or (_full_collections() > self._full_collections and gc.isenabled()):
            return False
        self._collected = True
        grown = self._finding.bytes_per_step * (step - self._began - self._window)
        before = sum(held for _, held, _ in self._allocations.sites(*self._range, 64))
        held_before = _core.own_bytes(self._finding.owner)
        began = time.perf_counter()
        gc.collect()
        self.collect_seconds = time.perf_counter() - began
        after = sum(held for _, held, _ in self._allocations.sites(*self._range, 64))
        freed = held_before - _core.own_bytes(self._finding.owner)
        return bool((before and after < (1 - _GARBAGE) * before and freed > 0.2 * grown) or freed > _GARBAGE * grown)

    def _tell_lines(self, step: int) -> None:
        """Reports the lines of the trace, without a holder: no hook saw the memory, so no object can be looked for."""
        assert self._trace is not None
        self._sites, self._trace = self._trace.sites[:_SITES_MOST], None
        self._tell("", garbage=self._garbage(step))
        self._end()

    def _look_for_holder(self, step: int, piece_seconds: float = PIECE_SECONDS, asked: bool = False) -> None:
        holders, graphs = self._holders, self._graphs
        assert holders is not None and graphs is not None
        if self._stage == "told":
            if holders.release(piece_seconds):
                self._holders, self._graphs, self._over = None, None, True
            return
        if self._stage == "reach" and self._reached(piece_seconds):
            found, wanted = holders.found
            graphs.clear()
            name = name_of(holders, self._roots) if wanted and found >= FEW * wanted else ""
            if found <= (1 - _GARBAGE) * wanted and self._garbage(step):  # Reachable memory is no garbage.
                self._tell("", garbage=True)
            elif name:
                self._tell(name)
            elif self._roots.tensor is not None and keeps_its_gradient(self._roots.tensor):
                self._tell(_core.NOBODY_CREATE_GRAPH)
            else:  # No object shows the memory: look for a growing container.
                self._stage, self._met_at = "wait", step
        if self._stage == "wait" and (asked or step >= self._met_at + self._window):
            self._stage = "weigh"
        if self._stage == "weigh" and holders.weigh(piece_seconds):
            self._tell(name_of_grown(holders, self._roots, step - self._met_at))

    def _reached(self, seconds: float) -> bool:
        """Goes on for about `seconds`. Returns whether the search is over. Graphs are walked as soon as their tensors are met."""
        assert self._holders is not None and self._graphs is not None
        met = self._holders.advance(seconds / 2)
        walked = self._graphs.advance(seconds / 2)
        return self._holders.enough or (met and walked)

    def _tell(self, holder: str, garbage: bool = False) -> None:
        owner = self._finding.owner
        self._core.tell(owner, self._sites, holder, garbage, self._finding.bytes_per_step)
        self._told.add(owner)
        self._stage = "told"
        self._roots.clear()

    def _trim(self) -> None:
        """Starts a thread that trims malloc()'s heap, once. The thread is no daemon, so the program's end waits for it: a daemon
        that returns from C++ at that time would be unwound, which ends the process."""
        self._trimmed = True

        def trim() -> None:
            self._core.tell_trimmed(_core.trim())

        threading.Thread(target=trim, name="plimsoll-trim").start()

    def _end(self) -> None:
        if self._trace is not None:
            self._trace.end()
            self._trace = None
        if self._holders is not None:
            self._holders.release(1.0)
            self._holders = self._graphs = None
        if self._allocations is not None:
            self._allocations.close()
            self._allocations = None
            self._roots.clear()
        self._unshown, self._over = "", False


def _full_collections() -> int:
    return int(gc.get_stats()[-1]["collections"])
