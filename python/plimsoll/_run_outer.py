# SPDX-License-Identifier: Apache-2.0
"""OuterLoop: the loop of another program, such as a Trainer, as one of a run.

It says what was made; the run looks at the memory, obeys and commits, as between two batches of steps().

Threads: the thread that trains.   Memory: none.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._run import Run


class OuterLoop:
    """Of one call of what drives it: begin(), made() after each step, end()."""

    def __init__(self, run: Run, *, commit_every_steps: int, commit_every_minutes: float) -> None:
        if commit_every_steps < 0 or commit_every_minutes < 0:
            raise ValueError(f"commit_every_steps {commit_every_steps} and commit_every_minutes "
                             f"{commit_every_minutes} must be 0 or more")
        if run._ranks is not None:
            run._ranks.refuse("the loop of another program", "use run.steps(), or one process")
        self._run, self._every = run, (commit_every_steps, 60 * commit_every_minutes)
        self._held = contextlib.ExitStack()

    @property
    def goes_on(self) -> bool:
        """Whether there is a commit to go on from."""
        return self._run._life.saved_step >= 0

    def begin(self, data: dict[str, Any], *, batches: int, epochs: int, steps: int) -> None:
        """Everything is tracked. data: what a resumption must find the same; batches: of an epoch, as data's
        place counts them; steps: of all epochs. Errors: as Run.steps()."""
        run = self._run
        life, at = run._life, run._life.at
        run._close_parts()
        if run._saved:
            run._must_have_begun_with(data)
        run._source = _Told(data, batches)
        self._batches = batches
        life.report.begin(quiet=True, step=at.step, steps_total=steps, epoch=at.epoch,
                          fraction=at.batch / batches, epochs=epochs)
        if self.goes_on:
            life.report.text(f"goes on at step {at.step}")
        self._held.enter_context(life.signals())

    def put_back_random(self) -> None:
        """The random states of the commit, once."""
        self._run._put_back_random()

    def made(self, *, step: int, epoch: int, batch: int, rows: int, loss: float | None) -> bool:
        """`step` steps are done, and `batch` batches of `epoch`. True: the run was asked to stop and has
        committed; whatever comes after is not part of it. Errors: MemoryPressure; OSError."""
        run, at = self._run, self._run._life.at
        at.step, at.epoch, at.batch = step, epoch, batch
        run._between_steps()
        run._life.report.step(step=step, epoch=epoch, fraction=batch / self._batches, rows=rows, loss=loss)
        return run._life.boundary(*self._every)

    def end(self) -> None:
        """The loop came to its end: what was made is committed."""
        self._run._put_back_random()
        self._run._life.commit()

    def finished(self, *, step: int, epoch: int) -> None:
        """end(), with steps that were not told: `step` in all, and `epoch` whole epochs."""
        at = self._run._life.at
        at.step, at.epoch, at.batch = step, epoch, 0
        self.end()

    def close(self) -> None:
        self._held.close()


class _Told:
    """A source whose place somebody else knows."""

    num_workers = 0

    def __init__(self, data: dict[str, Any], batches: int) -> None:
        self._data = data
        self.batches: int | None = batches

    def shape(self) -> dict[str, Any]:
        return self._data

    def start(self, epoch: int, batch: int, state: Any) -> Iterator[Any]:
        raise ValueError("steps: the loop of this run is another program's")

    def state(self) -> Any:
        return None
