# SPDX-License-Identifier: Apache-2.0
"""A crew: rank 0 trains as if it were alone, and the other ranks compute tiles for it and keep nothing (decision 0086).

    rank 0      Leader, the run's group; a Tiled of it shares its tiles
    the others  Helper.serve(), from the beginning of the run to its end

Each step of the work is agreed on, as in _ranks.py: a refusal or an error of any rank is rank 0's, which repeats its step or ends.

Reading order: _ranks.py, _tiled.py, this file, _dealt_tiles.py.
Threads: the thread that trains.   Memory: that of Ranks, and the modules that the others compute with.
"""
from __future__ import annotations

import contextlib
import io
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..core import _torch_gate
from ..memory._memory import Governor, format_bytes, limits
from ._dealt_tiles import PLACE, DealtTiles, HelpedTiles
from ._group import Solo
from ._pieces import ALL, Piece, flat, lease, pass_on
from ._ranks import Ranks
from ._tiled import Asked

if TYPE_CHECKING:
    from .._core import LimitChange
    from ._messages import Boundary
    from ._ranks import Said

_WORDS = ("end", "stay", "begin", "module", "forward", "backward")
_STAYS_EVERY = 60.0  # Seconds; a rank that nobody speaks to for half an hour gives up.
_STOPPED_SECONDS = 30.0
_T = TypeVar("_T")


def join() -> Leader | Helper | None:
    """Returns this process's place in the crew that torchrun started; None for a process that it did not start, or alone."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    ranks = Ranks(_STOPPED_SECONDS)
    return Leader(ranks) if ranks.first else Helper(ranks)


class Leader(Solo):
    """Rank 0, as the group of its run."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.crew = ranks, self
        self._modules: list[torch.nn.Module] = []  # Those that the others have.
        self._said_at = time.monotonic()

    @property
    def undisturbed(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Makes a context in which the watcher raises no stop."""
        return self.ranks.undisturbed

    @undisturbed.setter
    def undisturbed(self, made: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self.ranks.undisturbed = made

    # ---- Words ----

    def say(self, word: str, *numbers: float, text: str = "") -> None:
        """Says a word that the others serve. Errors: ConnectionError where one has ended."""
        self._said_at = time.monotonic()
        self.ranks.say(PLACE, _WORDS.index(word), *numbers, text=text)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Makes a block that the watcher does not interrupt. After an error that the others have not heard, the ranks part."""
        try:
            with self.undisturbed():
                yield
        except BaseException as error:
            if not getattr(error, "_told_to_ranks", False):
                self.ranks.close()
            raise

    def _stays(self) -> None:
        """Says that rank 0 is still there, now and then."""
        if time.monotonic() - self._said_at > _STAYS_EVERY and not self.ranks.over:
            self.say("stay")

    def any(self, place: str, yes: _T) -> _T:
        self._stays()
        return yes

    def settle(self, own: Boundary, limits: Any) -> Boundary:
        self._stays()
        return own

    def close(self) -> None:
        """Ends the others. A second close does nothing."""
        if not self.ranks.over:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self.say("end")
            self.ranks.close()

    # ---- The limit ----

    def governor(self, memory_limit: int | str, **options: Any) -> Governor:
        """Makes the governors of all ranks' shares. Errors: BudgetExceeded naming the rank and its share."""
        with self.together():
            self.say("begin", torch.get_num_threads())
            governor: Governor = self.ranks.on_all("the beginning", lambda: self.ranks.governor(memory_limit, **options))
        return governor

    def whole(self, share_bytes: int) -> int:
        return self.ranks.whole(share_bytes)

    def limits(self, governor: Governor, root: str) -> Any:
        return OwnLimit(self.ranks, governor, root)

    # ---- Tiles ----

    def dealt(self, asked: Asked, inputs: Sequence[torch.Tensor]) -> DealtTiles:
        """Returns the tiles of a batch, which all ranks compute."""
        return DealtTiles(self, self._known(asked.module), asked, inputs)

    def _known(self, module: torch.nn.Module) -> int:
        """Returns the number by which the others know the module. The first time it is passed on to them."""
        for number, one in enumerate(self._modules):
            if one is module:
                return number
        ranks = self.ranks
        with self.together():
            written = io.BytesIO()
            torch.save(module, written)
            self.say("module", len(written.getbuffer()))
            pieces = [Piece(0, ALL, len(written.getbuffer()), torch.frombuffer(written.getbuffer(), dtype=torch.uint8))]
            ranks.on_all(PLACE, lambda: lease(ranks, pieces))
            pass_on(ranks, pieces)
            ranks.on_all(PLACE, lambda: None)
        self._modules.append(module)
        return len(self._modules) - 1


class Helper:
    """Another rank. SIGINT and SIGTERM are rank 0's to obey."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._modules: list[torch.nn.Module] = []
        self._tiles: HelpedTiles | None = None
        self._governor: Governor | None = None
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)

    def serve(self, begin: Callable[[int], None], memory_limit: int | str, **options: Any) -> None:
        """Serves rank 0 until that ends its run.

        begin:        called with rank 0's number of threads, before this rank's governor is made.
        memory_limit: that of all ranks; options: more of Governor's.
        Errors:       ConnectionError where another rank has ended.
        """
        try:
            while (said := self.ranks.say(PLACE)[0]).numbers[0]:
                try:
                    if said.numbers[0] == _WORDS.index("begin"):
                        self._begin(begin, int(said.numbers[1]), memory_limit, options)
                    else:
                        self._serve(_WORDS[int(said.numbers[0])], said)
                except Exception as error:
                    if self.ranks.over or not getattr(error, "_told_to_ranks", False):
                        raise
                    self._tiles = None  # Rank 0 repeats its step, or ends.
                    _torch_gate.load().purge()
        finally:
            self.ranks.close()
            if self._governor is not None:
                self._governor.close()

    def _begin(self, begin: Callable[[int], None], threads: int, memory_limit: int | str, options: dict[str, Any]) -> None:
        def made() -> Governor:
            begin(threads)
            return self.ranks.governor(memory_limit, **options)

        governor: Governor = self.ranks.on_all("the beginning", made)
        governor._hears = lambda *_: governor._watcher.defer()  # The next word looks.
        self._governor = governor

    def _serve(self, word: str, said: Said) -> None:
        if word == "module":
            self._take_module(int(said.numbers[1]))
        elif word == "forward":
            self._tiles = HelpedTiles.of(self.ranks, self._modules, said)
            self._tiles.forward(self._check_pressure)
        elif word == "backward" and self._tiles is not None:
            self._tiles.backward()
            self._tiles = None

    def _take_module(self, size: int) -> None:
        ranks = self.ranks
        written = ranks.on_all(PLACE, lambda: torch.empty(size, dtype=torch.uint8))
        pass_on(ranks, [Piece(0, ALL, size, flat(written))])

        def read() -> None:
            self._modules.append(torch.load(io.BytesIO(written.numpy()), weights_only=False))

        ranks.on_all(PLACE, read)

    def _check_pressure(self) -> None:
        """Raises MemoryPressure, for rank 0, where memory is short here."""
        governor = self._governor
        seen = None if governor is None else governor._look()
        if governor is not None and seen is not None and seen.stop:
            raise governor._pressure(seen)


class OwnLimit:
    """The requests of `plimsoll limit`, of which rank 0 takes its own share; the others keep theirs."""

    def __init__(self, ranks: Ranks, governor: Governor, root: str) -> None:
        self._ranks, self._governor, self._request = ranks, governor, pathlib.Path(root) / ".limit"
        self._share = governor.limit_bytes

    def take(self) -> list[tuple[str, LimitChange | None, str, bool]]:
        """Obeys a request. Returns it: the size asked for, the change or None, the reason for none, whether it is for devices."""
        taken = self._request.with_name(".limit.taken")
        try:
            os.replace(self._request, taken)  # A request written meanwhile is kept as the next one.
        except FileNotFoundError:
            return []
        text = taken.read_text(encoding="utf-8", errors="replace").strip()
        taken.unlink()
        if text.startswith("devices "):
            return [(text.removeprefix("devices "), None, "", True)]
        try:
            whole = limits(text).limit_bytes
            others = self._ranks.whole(self._share) - self._share
            if whole <= others:
                raise ValueError(f"{text}: the run's other processes hold all of it, {format_bytes(others)}; ask for more")
            return [(text, self._governor.set_limit(whole - others), "", False)]
        except ValueError as error:
            return [(text, None, str(error), False)]

    def close(self) -> None:
        pass
