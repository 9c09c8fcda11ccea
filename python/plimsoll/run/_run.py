# SPDX-License-Identifier: Apache-2.0
"""Run: the lifecycle of a training run around a PyTorch loop of your own.

Reading order: _run_life.py, _run_parts.py, _run_sources.py, _run_loader.py, _run_embedding.py,
_run_step.py, _run_gradients.py, this file.

Threads: the thread that trains.   Memory: that of its parts.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..core import _torch_gate
from ..core._numbers import number_of, real, whole
from ..core._random_states import RandomStates
from ..errors import MemoryPressure
from ..memory._device_memory import of_accelerator
from ..memory._scratch import find_run_by
from ..rows._embedding import EmbeddingStore, Normal, Optimizer, Uniform, Zeros, is_table
from ..training._batch import Batch
from ._run_life import Failure, Intervals, Life, Where

if TYPE_CHECKING:
    import torch

    from ._run_embedding import Vectors
    from ._run_loader import RunLoader
    from ._run_sources import Source

_SEEDS = 1 << 63


class Run:
    """A training run in a folder: made, or gone on with from its last commit.

        with plimsoll.Run("runs/items", memory_limit="8GiB", seed=7) as run:
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            run.track(model=model, optimizer=optimizer)              # restored here, bit for bit
            for batch in run.steps(run.loader(dataset, batch_size=256, workers=2), epochs=3):
                run.log(loss=run.step(loss, batch, clip_norm=1.0))   # loss(batch) -> a scalar

    Start the program again after Ctrl-C, `kill -9` or a power cut: it goes on. From another shell
    `plimsoll status|stop|pause|continue|limit runs/items` work as on any run.

    What holds:
      - The limit is of this process and its workers (Governor, made here). Memory that nobody leased ends
        the loop with MemoryPressure. That, and any refusal of memory, loses at most the step that was being made: the
        steps before it are committed. docs/guide/resume.md says where a large model may lose more.
      - A commit is whole or not there: parts, random states, tables and the place in the data are of one
        step. Killed at any instant, the run goes on from the last commit or the one before it.
      - The same bits as a run that nobody disturbed, of what is tracked, from the same program on the
        same machine: the order, and each item's random states, come from (seed, epoch, index).
      - run.step() is a transaction: refused memory, it is tried again, or leaves no trace.
    What does not:
      - What is not tracked begins anew at each start: counters and lists of your own, generators that a
        dataset keeps. Code before, between and after the loops runs again; what it does to tracked parts counts once.
      - With a backward and an optimizer of your own, instead of run.step(), a step that fails is not put
        back (the program ends, and the last commit stands). All else holds: gradients of tracked optimizers (torch's) that
        wait for their step, where several batches make one, are part of a commit.
      - Data without a position (see steps()) is read again up to the place.
      - A table's learning rate that set_optimizer() changed is not kept: set it from the step.
      - Several ranks (below) without virtual_workers have data of loader() only; a Trainer's have no virtual_workers.
      - A product that torch computes before the run is made fixes MKL's kernels: make the run first, or set
        MKL_CBWR=AVX2,STRICT before the program.

    Ranks: started by torchrun, N processes are one run of N ranks, on one machine or on several that share its folder: no other
    program, no DistributedDataParallel. batch_size is per rank. The limit is shared by all ranks of a machine and torchrun.
    run.step() averages the gradients and returns the loss of all. Rank 0 writes the folder. Modules,
    optimizers, schedulers and scalers are the same on all ranks; other parts may be each rank's own. All make
    the same step and stop at the same one. A run begun with `virtual_workers` has the same bits for any number
    of ranks, and any may go on with it.

    path:         its folder.
    memory_limit: as Governor's; "" finds what the machine leaves.
    seed:         of Python's, NumPy's and torch's generators, the order, and rows.
    options:      what else decides the bits, such as {"lr": 1e-3}: kept in run.toml, and a start with
                  other values is refused with both. Before the first commit anything may change.
    device_memory_limit: of torch's accelerator (each rank's own), or by device: {"cuda:1": "20GiB"}; as Governor's devices. None: that
                  of `plimsoll run --device-memory-limit`, or no limit. Commits know on which kind of device each module was:
                  another one has other bits, and is refused without accept=("device",).
    foreign_bytes, disk_limit: as Governor's.
    compute_threads: torch's; None: as many as the run began with, or torch has.
    deterministic: operators that have no deterministic form raise; False: they run, and the same bits are
                  not promised.
    accept:       names of the identity that may differ from now on, such as ("torch",), and of settings of tracked optimizers,
                  schedulers and scalers that the program's own are taken of, such as ("lr",) or ("optimizer.lr",):
                  events.jsonl says so, and the bits differ. Without it a RuntimeWarning names a setting that was edited,
                  and the run goes on with what it had.
    virtual_workers: how many a batch is cut for, a power of two that the number of ranks divides. batch_size
                  is per worker. A loop's batch is a WorkerBatches with one batch for each of this rank's workers, and
                  run.step() calls its function with these in turn, each with random numbers of its own.
                  0: as many as ranks, and a batch is what collate_fn gave.
    rank_stopped_seconds: longest that a rank may be stopped (SIGSTOP, a debugger) before the others end it, and
                  themselves with ConnectionError naming it; 0: as long as gloo waits, half an hour.
    Errors: ValueError (another process trains in it; another identity, with both values; no run, and the
            folder is not empty; another run or governor in this process); BudgetExceeded; CorruptError;
            OSError; ImportError without torch. What one of several ranks has, all have; ConnectionError, from
            whatever waits for the others, when one of them has ended.
    """

    def __init__(self, path: str | os.PathLike[str], *, memory_limit: int | str = "", seed: int = 0,
                 options: dict[str, Any] | None = None, foreign_bytes: int | str = "128MiB",
                 device_memory_limit: int | str | Mapping[str, int | str] | None = None,
                 disk_limit: int | str = "", compute_threads: int | None = None, deterministic: bool = True,
                 accept: Iterable[str] = (), virtual_workers: int = 0, rank_stopped_seconds: float = 30.0,
                 _of_recipe: Any = None) -> None:
        _torch_gate.load()
        from ..ranks import _ranks
        from ..ranks._virtual_workers import VirtualWorkers
        from ._part_settings import PartSettings
        from ._run_gradients import Gradients
        from ._run_parts import Parts
        from ._run_step import Steps
        from ._run_tables import TableFolders

        accept = (accept,) if isinstance(accept, str) else tuple(accept)
        devices = of_accelerator(device_memory_limit)
        if current() is not None:
            raise ValueError(f"Run: {current()!r} is open in this process; close it first")
        self.path = pathlib.Path(path)
        self.seed = whole("Run: seed", seed, 0)
        if self.seed >= _SEEDS:
            raise ValueError(f"Run: seed {seed} must be less than 2**63")
        self.updated = False
        """Whether the last run.step() stepped the optimizer (see TrainingStep.updated)."""
        real("Run: rank_stopped_seconds", rank_stopped_seconds, 0)
        whole("Run: virtual_workers", virtual_workers, 0)
        if compute_threads is not None:
            whole("Run: compute_threads", compute_threads, 0)
        group = self.group = _ranks.join(
            rank_stopped_seconds, path=os.path.abspath(path), seed=seed, memory_limit=memory_limit, options=options or {},
            compute_threads=compute_threads, deterministic=deterministic, virtual_workers=virtual_workers)
        """The processes that train the run: its only one, or its ranks."""
        try:
            self._workers = VirtualWorkers.dealt(virtual_workers, group.rank, group.count, self.seed)
        except ValueError:
            group.close()
            raise
        self._count = 1 if self._workers is None else self._workers.count
        self._life = Life(self.path, self._content, self._here, group, self._count, memory_limit=memory_limit, seed=self.seed,
                          options=dict(options or {}), foreign_bytes=foreign_bytes, disk_limit=disk_limit, devices=devices,
                          compute_threads=compute_threads, deterministic=deterministic, accept=accept,
                          run_toml=_of_recipe.run_toml if _of_recipe else None)
        self._of_recipe = _of_recipe  # Of plimsoll.recipes: what the program was told.
        self.governor = self._life.governor
        """The limit, and who holds what of it."""
        saved = self._saved = self._life.saved
        self._parts = Parts(saved.pop("parts", None), f"the commit of step {self._life.saved_step}",
                            PartSettings(saved.pop("settings", {}), accept))
        self._random = saved.get("random")  # Put back when batches are taken.
        self._gradients = Gradients(saved.pop("gradients", {}) if saved else None)  # Of loops without run.step().
        self._tables: dict[str, tuple[Vectors, dict[str, Any]]] = {}
        self._folders = TableFolders(self.path, group.rank, group.count, self._life.saved_step,
                                     saved.get("table_folder", "embeddings"), saved.get("ranks", 1))
        self._life.committed = self._folders.committed
        if self.is_writer:
            self._folders.clear()
        self._loaders: list[RunLoader] = []
        self._life.end_workers = self._end_workers
        self._loops = self._epochs = 0  # Loops that were begun, and their epochs.
        self._in_body = False  # A batch was given, and the body has not come back for the next one.
        self._left = False  # Nor will it: by `break`, or by what it raised.
        self._given: Callable[[], Generator[Any, None, None] | None] = lambda: None  # The last loop's batches, while they are kept.
        self._made = False  # Its step, by run.step().
        self._live = False  # Before the batch's first run.step(): nothing was stepped since the boundary.
        self._cut_off = False  # The loop of another program ended in the middle of a step.
        self._failure: Failure | None = None  # What ended a step that was not made, or a loop; no other has begun since.
        self._source: Source | None = None
        self._waiting: Callable[[], None] | None = None  # Puts back what was committed after a loop that was left.
        self._waits_at: Any = None  # The place in the data before a batch that is waited for.
        self._steps = Steps(self._parts, self._tables, saved.pop("step_state", None) if saved else None,
                            self._life.saved_step >= 0, self.path, group, self._workers)
        self._steps.interruptible = lambda: self._life.at_place(Where.STEP)
        self._loss: float | None = None
        self._phase = ""
        _remember(self)

    # ---- What the run consists of ----

    @property
    def steps_made(self) -> int:
        """Since the run began, in all its lives; the step whose body runs is not counted yet."""
        return self._life.at.step + int(self._left and self._failure is None)

    @property
    def stopped(self) -> str:
        """Why steps() ended early: "SIGINT", "SIGTERM", ".stop" (`plimsoll stop`); "" if it did not."""
        return self._life.stopped

    @property
    def stop_asked(self) -> bool:
        """Whether a stop is asked for that the loop has not come to: work between two steps may end early.

        Of several ranks, whether any is asked: they all look as often."""
        return self._life.asked()

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, from 0."""
        return self._life.at.epoch

    @property
    def is_writer(self) -> bool:
        """Whether this process writes what the run leaves beside its commits: an export, a picture. Of several ranks
        the first one does."""
        return self.group.first

    def track(self, **parts: Any) -> None:
        """Names what must be the same after a resumption, and restores it if the run goes on; once more where the loop
        goes on that was interrupted, as what the program does to it before that is part of what it was.

        A part has state_dict() and load_state_dict() (modules, optimizers, schedulers, scalers, averages,
        …), or is a tensor, a dict of plain values, or a random generator. Random states of Python, NumPy
        and torch, tables of embedding() and the place in the data are parts of every run.
        Errors: ValueError naming parts and tensors that are missing, extra or of another shape or dtype;
                a part of a name that is taken; after the first batch.
        """
        self._check_open()
        self.group.check_parts(parts)
        for name, part in parts.items():
            for differs in self._parts.track(name, part):
                self._life.report.event("setting", differs)

    def embedding(self, name: str, *, rows: int, dim: int, optimizer: Optimizer | None = None,
                  init: Zeros | Normal | Uniform | None = None, dtype: str = "float32", store_bytes: int | str = 0, batch_rows: int = 4096,
                  ids: Callable[[], Any] | None = None, layout: str = "any_order", order_seed: int = 0, io_threads: int = 8) -> Vectors:
        """One trainable row for each id from 0 to rows − 1, or of `ids`, on disk: a torch.nn.Module (see Vectors).

            vectors = run.embedding("items", rows=10_000_000, dim=64, optimizer=plimsoll.AdamW(lr=0.03))
            vectors(ids)                     # int64 [...] -> float32 [..., 64], with autograd

        ids: makes the ids of a new table, int64 [rows]; of one process without virtual_workers.
        All else: as EmbeddingStore.open(), layout and order_seed of a new table. Without a value, that has
        optimizer=plimsoll.AdamW(lr=0.001) and init=plimsoll.Normal(std=0.01) with the run's seed; print(vectors) names
        the optimizer. With virtual_workers, or several ranks, a DealtVectors: each rank has a
        table of the rows that are its own, and store_bytes is per rank.
        Errors: as EmbeddingStore.open(); ValueError for another table than the run's, with both values.
        """
        from ..rows._rank_rows import DealtTable
        from ._run_embedding import DealtVectors, Vectors

        self._check_open()
        init = Normal(seed=self.seed) if init is None else init
        said = {"rows": rows, "dim": dim, "dtype": dtype, "optimizer": str(optimizer), "init": str(init)}
        if name in self._tables or self._parts.closed or not name.isidentifier():
            raise ValueError(f"embedding: {name!r} must be a new name of letters, digits and underscores, before the first batch")
        if self._saved:
            _must_be_equal(f"embedding {name!r}", said, self._saved["tables"].get(name))
        if ids is not None and self._workers is not None:
            self._workers.refuse(f"embedding: ids of {name!r}", "number the rows from 0, and leave ids out")
        self.group.must_be_same("the parts", {name: said}, "open the same tables on all ranks")
        table = self.group.on_all("the parts", lambda: self._opened(
            name, rows, ids, {"layout": layout, "order_seed": order_seed}, dim=dim, dtype=dtype, init=init, optimizer=optimizer,
            store_bytes=store_bytes, batch_rows=batch_rows, io_threads=io_threads))
        made = Vectors(name, table, self._parts) if self._workers is None else DealtVectors(
            name, DealtTable(name, table, rows, self.group), self._parts)
        self._tables[name] = made, said
        return made

    def _opened(self, name: str, rows: int, ids: Callable[[], Any] | None, new: dict[str, Any], **options: Any) -> EmbeddingStore:
        """This process's table, moved here first where another number of ranks had it. new: what only a new table is given."""
        def made(path: str | os.PathLike[str], at_step: int | None = None) -> EmbeddingStore:
            with self._folders.which(rows, path, ids) as which:
                return EmbeddingStore.open(self.governor, path, at_step=at_step, **which, **({} if is_table(path) else new), **options)

        def read(path: str) -> EmbeddingStore:
            return EmbeddingStore.open(self.governor, path, at_step=self._life.saved_step, pinned=True)

        self._folders.move(name, made, read)
        return made(self._folders.path(name), self._life.saved_step if self._saved else None)

    def loader(self, dataset: Any, *, batch_size: int, workers: int = 0,
               collate_fn: Callable[[list[Any]], Any] | None = None, shuffle: bool = True,
               drop_last: bool = False, prefetch: int = 2, start_method: str = "fork",
               device: str | torch.device | None = None) -> RunLoader:
        """Batches of any map-style dataset (__getitem__ and __len__), for steps().

        The order is SampleOrder(len(dataset), seed, epoch), begun at any place at once. The main random
        states of Python, NumPy and torch are set for each item from (seed, epoch, index), so that
        augmentations are the same for any number of workers and after a resumption; without workers
        those of the loop are put back. Not set are generators that the dataset keeps for itself.

        batch_size: of each rank, where there are several, or of each virtual worker; a last, partial batch is
                    divided among them.
        workers:    processes, by `start_method`. "fork": anew for each epoch, so that they see what the program has changed in
                    the dataset before it, and a loop within the loop has its own. "spawn": once, as that takes seconds:
                    they see no change, and serve one loop at a time. 0: items are made in this one.
        collate_fn: items -> a batch; None: torch's default_collate.
        drop_last:  leaves out an epoch's last, partial batch.
        prefetch:   batches in flight for each worker.
        device:     of torch's, such as "cuda": a batch's tensors are there, at any depth; all else in it stays as it is. The next batch
                    is made, and goes there from page-locked memory (two batches, leased as "pinned"), while a step computes.
                    Where memory has no room for that, it is copied when it is needed. The bits are those of tensor.to(device).
                    None: batches are in host memory.
        Errors: ValueError naming the argument.
        """
        from ..core._devices import numbered
        from ._device_batches import DeviceBatches
        from ._run_loader import RunLoader

        self._check_open()
        where = numbered(device, "loader: device")
        made = RunLoader(dataset, self.seed, cut=self._workers, batch_size=batch_size, workers=workers, collate_fn=collate_fn,
                         shuffle=shuffle, drop_last=drop_last, prefetch=prefetch,
                         start_method=start_method, device=None if where is None else DeviceBatches(self.governor, where))
        self._loaders.append(made)
        return made

    # ---- The loop ----

    def steps(self, data: Any, *, epochs: int = 1, largest: Any = None, commit_every_steps: int | None = None,
              commit_every_minutes: float = 10.0, cleanup_every_n_steps: int = 0,
              progress: bool = True) -> Iterator[Any]:
        """The batches of some epochs; of a run that goes on, those that are left.

        Between two batches the run looks at the memory, obeys Ctrl-C, SIGTERM, SIGUSR1, `plimsoll stop`,
        `pause` and `limit`, and commits when it is time; at the end it commits. Asked to stop, it commits
        and the loop ends: `run.stopped` says why, and what comes after the loop should look at it. After
        `break` the step that was made counts, and the loop has ended. An exception of the body should leave the run.
        Caught around the loop, but inside the run, it counts as `break`: the step and the loop as done, and committed.
        One that run.step() raised does not: its step was not made, nothing is committed, and the run has failed unless
        another loop follows. Loops may follow one another: epochs count on, and those that came to their end before a
        resumption give nothing. `epochs` of the last may grow.

        data:    of loader(); a list of batches; a plimsoll.Loader; TokenSet.batches(…); anything with
                 state_dict() and load_state_dict() (a StatefulDataLoader), whose state a commit holds for its own loop,
                 so all loops take the same one; or another iterable, with a RuntimeWarning: a resumption reads its
                 epoch again up to the place. Of what is not of loader() each virtual worker has
                 a whole batch, so a step has as many as there are workers; at the end of an epoch some have none.
        largest: the largest batch that will come: the first run.step() admits it first (see
                 TrainingStep.admit), so that no later step can fail for memory.
        commit_every_steps, commit_every_minutes: whichever comes first; 0: not by that. Steps without a
                 value are 0, or a recipe's --checkpoint-every-n-steps. Where a copy of it fits into memory
                 beside a step, a thread writes it, and the loop waits for the copy alone (events.jsonl:
                 stall_seconds); the one before it is what a crash meanwhile comes back to.
        cleanup_every_n_steps: how often what nobody uses is given back (Governor.clean_up()), between two
                 steps; 0: under pressure only. It changes no result; events.jsonl says what it freed.
        progress: a bar on a terminal, lines elsewhere, on stderr.
        Errors: ValueError (parts or tables of the commit that are not here; other data); MemoryPressure
                after a commit; OSError (a commit failed: the one before it stands).
        """
        from ._run_loader import RunLoader
        from ._run_sources import Dealt, source_of

        self._check_open()
        of_recipe = self._of_recipe
        if commit_every_steps is None:
            commit_every_steps = of_recipe.commit_every_steps if of_recipe else 0
        epochs = whole("steps: epochs", epochs, 1)
        every = Intervals.of("steps", commit_every_steps=commit_every_steps, commit_every_minutes=commit_every_minutes,
                             cleanup_every_n_steps=cleanup_every_n_steps)
        workers = self._workers
        if workers is not None and not workers.told and not isinstance(data, RunLoader):
            workers.refuse(f"steps: data of a {type(data).__name__}", "use run.loader(dataset), which each has its part of, or say virtual_workers")
        self._begin_or_wait()
        self._failure = None
        self._life.begins()
        self._close_parts()
        loop, first = self._loops, self._epochs
        self._loops, self._epochs = loop + 1, first + epochs
        if loop < self._life.at.loop or self.stopped:
            return iter(())
        source = source_of(data, self.seed)
        if workers is not None and not isinstance(data, RunLoader):
            source = Dealt(source, workers)
        batches = self._batches(source, loop, first, first + epochs, largest, every,
                                not progress or (of_recipe is not None and of_recipe.quiet))
        self._given = weakref.ref(batches)
        return batches

    def _close_parts(self) -> None:
        """Nothing is tracked any more. Errors: ValueError naming parts and tables that are missing."""
        if self._parts.closed:
            return
        self._parts.check_complete()
        missing = sorted(self._saved.get("tables", {}).keys() - self._tables.keys())
        if missing:
            raise ValueError(f"steps: the run has tables that this program does not open: run.embedding({', '.join(map(repr, missing))}, …)")
        self.group.check_shared(self._parts)

    def _must_have_begun_with(self, data: dict[str, Any]) -> None:
        _must_be_equal("steps: the data", data, self._saved["data"])

    def _batches(self, source: Source, loop: int, first: int, end: int, largest: Any, every: Intervals,
                 quiet: bool) -> Generator[Any, None, None]:
        from ._run_loader import RunLoader
        from ._run_sources import Sought

        life, at = self._life, self._life.at
        state, ended = self._begin_loop(source, loop, first, end, largest, quiet)
        with self._noted(), life.signals(), life.at_place(Where.BUSY):
            if ended == "left" and at.epoch == end:
                self._waiting = lambda: self._pass_over(source, state, left=True)
                return
            if ended or at.epoch == end:
                self._pass_over(source, state, ended == "left")  # What comes after the loop is done again.
                state = None
            moved = at.epoch < end and source.batches is None
            while at.epoch < end:
                with life.at_place(Where.WAITS):
                    batches, state = self._start(source, state), None
                while True:
                    self._waits_at = source.state() if isinstance(source, Sought) else None
                    try:
                        life.where = Where.WAITS
                        batch = self.group.next(batches)
                        life.where = Where.BUSY
                    except StopIteration:
                        life.where, self._waits_at = Where.BUSY, None
                        break
                    except Exception as error:
                        life.where = Where.BUSY
                        # Of other data the place is not known now.
                        if life.ended_waiting(error, workers=source.num_workers > 0,
                                              place_known=isinstance(source, (RunLoader, Sought))):
                            return
                        raise
                    self._waits_at = None
                    self._in_body = True
                    try:
                        life.where = Where.BODY
                        yield batch
                        life.where = Where.BUSY
                    except GeneratorExit:  # Later where a variable keeps the iterator: the step may be counted by then.
                        self._left = self._in_body and self._loops == loop + 1
                        raise
                    except MemoryPressure:  # The watcher's, after the body has come back: the boundary obeys.
                        life.where = Where.BUSY
                    self._in_body, self._failure = False, None
                    self.group.check_made(self._made)
                    self._made = False
                    self._advance(Batch(_one_of(batch)).rows * self._count)
                    del batch
                    if life.boundary(every):
                        return
                if at.batch == 0:
                    raise ValueError(f"steps: epoch {at.epoch} has no batch: an iterator can be read once "
                                     "only, so give something that can be iterated again")
                at.epoch, at.batch = at.epoch + 1, 0
            at.ended = "whole"
            life.commit(moved=moved)
        life.ended()

    def _begin_loop(self, source: Source, loop: int, first: int, end: int, largest: Any, quiet: bool) -> tuple[Any, str]:
        """(what the source goes on with, how the loop has ended already). Errors: ValueError for other loops or data than before."""
        from ._run_loader import RunLoader

        life, at = self._life, self._life.at
        if loop > at.loop:
            at.loop, at.first, at.epoch, at.batch, at.source, at.ended = loop, first, first, 0, None, ""
        state, ended, at.ended = at.source, at.ended, ""
        if self._random is not None:
            _must_be_equal("steps: the loops before", {"epochs": first}, {"epochs": at.first})
            if at.batch:
                self._must_have_begun_with(source.shape())
        self._source, self._steps.largest = source, largest
        self._steps.placed = source.placed if isinstance(source, RunLoader) else lambda batch: batch
        if not self._steps:
            self._gradients.watch(self._parts)
        done = at.batch / source.batches if source.batches else 0.0
        total = at.step + source.batches * (end - at.epoch) - at.batch if source.batches else None
        life.report.begin(quiet=quiet, step=at.step, steps_total=total, epoch=at.epoch, fraction=done,
                          epochs=end)
        if self._random is not None:
            life.report.text(f"goes on at step {at.step}" if at.epoch < end else
                             f"finished at step {at.step}: of its {end} epochs none is left")
        return state, ended

    def _start(self, source: Source, state: Any) -> Iterator[Any]:
        at = self._life.at
        self._parts.load_again()
        if source.batches is not None and at.batch >= source.batches and not source.counts_on:
            batches: Iterator[Any] = iter(())
        else:
            batches = source.start(at.epoch, at.batch, state)
        self._put_back()  # After what beginning in the middle has drawn.
        return batches

    def _pass_over(self, source: Source, state: Any, left: bool) -> None:
        """The loop has ended, as the commit has it."""
        if state is not None:
            source.pass_over(state, left)
        self._parts.load_again()
        self._put_back()

    def _put_back(self) -> None:
        self._gradients.put_back()
        self._parts.put_back()
        self._put_back_random()

    def _put_back_random(self) -> None:
        if self._random is not None:
            RandomStates.from_plain(self._random).put_back()
            self._random = None

    def _advance(self, rows: int) -> None:
        """The body has come back: a step was made."""
        at, source = self._life.at, self._source
        at.step, at.batch = at.step + 1, at.batch + 1
        self._steps.begin_batch()
        self._between_steps()
        done = at.batch / source.batches if source is not None and source.batches else 0.0
        self._life.report.step(step=at.step, epoch=at.epoch, fraction=done, rows=rows, loss=self._loss)

    def _between_steps(self) -> None:
        for vectors, _ in self._tables.values():
            vectors._between_steps()

    def _begin_or_wait(self) -> None:
        """Completes the loop before: commits one that was left by `break`, or puts that commit back in a resumed run."""
        self._close_kept()
        self._end_left_loop()
        if self._waiting is not None:
            self._waiting()
            self._waiting = None

    def _close_kept(self) -> None:
        """Batches that a variable keeps after `break` hear signals until they are closed."""
        batches: Any = self._given()
        if batches is not None and not batches.gi_running:
            batches.close()

    def _end_left_loop(self) -> None:
        """After `break`: the step was made, and the loop has ended. After a step that was not made nothing is committed."""
        left, self._in_body, self._left = self._in_body and self._failure is None, False, False
        if left:
            self._advance(0)
            at = self._life.at
            at.epoch, at.batch, at.ended = self._epochs, 0, "left"
            self._life.commit()
            self._life.ended()

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """An exception that leaves is what ends the run, though the program goes on; leaving a generator is none."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            self._failure = Failure.of(error)
            raise

    def _content(self) -> tuple[dict[str, Any], list[EmbeddingStore]]:
        """Returns the content of a commit, and the tables that belong to it."""
        content, tables = self._here()
        content["random"] = RandomStates().to_plain()
        content["parts"], content["own"] = self.group.own_states(
            self._parts, content["parts"], {"random states": content["random"], "gradients of accumulate": content["step_state"]})
        return content, tables

    def _here(self) -> tuple[dict[str, Any], list[EmbeddingStore]]:
        """The same of this process, without random states."""
        at, source = self._life.at, self._source
        assert source is not None  # There is a step to commit.
        at.source = (self._waits_at or source.state()) if at.batch or source.counts_on else None
        content = {"parts": self._parts.live(), "own": [], "ranks": self.group.count, "data": source.shape(),
                   "table_folder": self._folders.name, "tables": {name: said for name, (_, said) in self._tables.items()},
                   "step_state": self._steps.state(), "settings": self._parts.settings.to_plain()}
        if gradients := self._gradients.state():
            content["gradients"] = gradients
        return content, [vectors.store for vectors, _ in self._tables.values()]

    # ---- A step ----

    def step(self, f: Callable[..., Any], batch: Any, *, optimizer: Any = None, loss: str | None = None,
             weight: Callable[..., Any] | None = None, accumulate: int = 1,
             clip_norm: float | None = None, scheduler: Any = None,
             before_update: Callable[[], Any] | None = None,
             split: Callable[[Any, int], Any] | None = None, checkpoint: Iterable[Any] = (),
             allow_batchnorm_microbatch: bool = False) -> float:
        """One step of the tracked models, optimizers, scaler and tables as a transaction; returns the loss.

        `f` is called with the entries of a tuple or list, with anything else as one argument; it gives the
        loss. Gradients are zeroed, backward, clipping and the optimizer's step are done here. All options
        are TrainingStep's, whose docstring says what is put back and when a batch is cut; they stay the
        same for all steps of a run. A torch.amp.GradScaler that is tracked is used. A scheduler given
        here is stepped with the optimizer, and must be tracked.

        loss:      how the losses of parts make that of the batch. Only with it is a batch cut that memory refused: "mean"
                   where each row has its own share of a mean, as in torch's losses by default; "sum". None: never, as a loss may
                   compare the rows of a batch. A model with batch statistics wants allow_batchnorm_microbatch=True as well.
        optimizer: one of the tracked optimizers, or several: this call zeroes and steps these alone, and gradients that its loss
                   has for parameters of others are dropped. So a batch may have several calls, each with a loss and options
                   of its own, as a GAN's has two. They are one step of the run, and one transaction: a call that fails puts
                   back the calls before it, whose parameters and states are copied until the batch's end; rows of tables
                   are not put back, and the run cannot commit then. None: all, in one call a batch.
        Errors: BudgetExceeded (the step does not fit and was not made), MemoryPressure: the steps before it are committed; ValueError.
        """
        self._check_open()
        if not self._in_body:
            raise ValueError("step: call it in the body of `for batch in run.steps(…)`")
        same = {"loss": loss, "accumulate": accumulate, "clip_norm": clip_norm, "scheduler": scheduler,
                "checkpoint": list(checkpoint), "allow_batchnorm_microbatch": allow_batchnorm_microbatch}
        functions = {"weight": weight, "before_update": before_update, "split": split}  # Often made anew for each call.
        with self._noted():
            self._gradients.leave()
            with self._put_back_or_made():
                step = self._steps.of(optimizer, same, functions, self._life.report.event_of_step)
                self._loss = self._steps.make(step, batch, f)
        self._made, self._failure = True, None
        self.updated = step.updated
        return self._loss

    @contextlib.contextmanager
    def _put_back_or_made(self) -> Iterator[None]:
        """Inside, a step is made, or put back; where memory ends it, the boundary before it is committed."""
        life = self._life
        if not self._steps.is_half_made:  # The batch's first call.
            self._live = life.keeper.is_live()
        try:
            with life.at_place(Where.BUSY):
                yield
        except MemoryError as error:
            self._step_was_put_back(error)
            raise
        except RuntimeError as error:
            if Failure.of(error).of_memory:  # torch's.
                self._step_was_put_back(error)
            raise

    def _step_was_put_back(self, error: BaseException) -> None:
        life = self._life
        if self._steps.is_half_made:
            return
        if self._live:
            life.keeper.put_back()
        life.save_last()  # Of several ranks there is none, and those that have agreed commit.
        if life.drawn is not None and not self.group.over and getattr(error, "_told_to_ranks", False):
            life.drawn.put_back()
            life.commit()

    def idle(self, seconds: float) -> bool:
        """Waits between two loops, for something to train on; `plimsoll stop`, `pause` and `limit` are obeyed.

        True: the run was asked to stop meanwhile; `stopped` says why, and steps() gives nothing any more.
        Of several ranks all wait until the first one's time is over.
        """
        self._check_open()
        self._begin_or_wait()
        return self._life.idle(seconds)

    def end_loop(self) -> None:
        """Commits the last step of a loop that was left by `break`, for work that follows it.

        Without it the next loop, idle() or close() does. Does nothing where no loop was left, and after a step that
        was not made. Errors: OSError, as of any commit.
        """
        self._check_open()
        self._end_left_loop()

    def log(self, **values: Any) -> None:
        """Metrics of the step that is being made: RUN/events.jsonl, and RUN/metrics for TensorBoard.

        values: numbers, or tensors of one, which keep their graph; `loss` is what `plimsoll status` shows.
        Errors: ValueError naming the value that is no number.
        """
        self._check_open()
        numbers = {name: number_of(f"log: {name}", value) for name, value in values.items()}
        if "loss" in numbers:
            self._loss = numbers["loss"]
        at = self._life.at
        self._life.report.log(at.step + int(self._in_body), at.epoch, numbers)

    def event(self, name: str, /, **values: Any) -> None:
        """Adds a line to RUN/events.jsonl: {"event": name, **values} and the time. Of several ranks the first one's.

            run.event("preview", step=run.steps_made, text=answer)

        name: one of your own: what the run itself writes is read by `plimsoll why` and the report.
        values: texts, numbers, truth values. Errors: TypeError naming the value that is none; OSError.
        """
        self._check_open()
        for key, value in values.items():
            if not isinstance(value, (str, int, float)):
                raise TypeError(f"event: {key} is a {type(value).__name__}, where a text or a number is needed")
        self._life.report.event(name, values)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names what the loop does meanwhile, for `plimsoll why` and the report: "decode", "evaluate".

            with run.phase("evaluate"):
                evaluate(model)

        After a phase whose name begins with "eval", "valid" or "test", what nobody uses is given back
        (Governor.clean_up()), so that the steps that follow begin where training stood.
        """
        self._check_open()
        before, self._phase = self._phase, name
        self._life.phase(name)
        try:
            yield
        finally:
            self._phase = before
            if not self._life.closed:
                self._life.phase(before)
                if name.lower().startswith(("eval", "valid", "test")) and self.governor.arena_attached:
                    self._life.clean_up("evaluation")

    # ---- The end ----

    def close(self, error: BaseException | None = None) -> None:
        """Ends the run: the last word in its status, workers, tables, governor, folder, torch's settings.

        error: what ended it; None: nothing did. A second close does nothing.
        """
        if self._life.closed:
            return
        life, step = self._life, self._life.at.step + int(self._in_body or self._cut_off)
        try:
            self._close_kept()
            life.where = Where.BUSY
            if error is None:
                self._end_left_loop()
                step = life.at.step if self._failure is None else step
            failure = self._failure if error is None else Failure.of(error)
            if failure is not None and failure.of_memory and self.group.commits_alone:
                self._end_workers()
                life.save_last()
        except BaseException as failed:
            error = failed if error is None else error
            raise
        finally:
            for one in self._loaders:
                one.close()
            self._source, self._left = None, False
            self._gradients.leave()
            life.close(self._failure if error is None else Failure.of(error), step)

    def _end_workers(self) -> None:
        for one in self._loaders:
            one.end_workers()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        self.close(error)

    def _check_open(self) -> None:
        if self._life.closed:
            raise ValueError(f"{self.path}: this run was closed; make plimsoll.Run({str(self.path)!r}) again")

    def __repr__(self) -> str:
        return f"<Run {self.path}, step {self.steps_made}>"


def _one_of(batch: Any) -> Any:
    from ..ranks._virtual_workers import WorkerBatches

    return batch[0] if isinstance(batch, WorkerBatches) else batch


def _must_be_equal(what: str, now: dict[str, Any], saved: dict[str, Any] | None) -> None:
    if saved is None:
        raise ValueError(f"{what} is not in the commit that the run goes on from: it came later; train anew")
    differs = [f"{name} was {saved.get(name)} and is {now.get(name)}"
               for name in {**saved, **now} if now.get(name) != saved.get(name)]
    if differs:
        raise ValueError(f"{what} is another than the run began with: {'; '.join(differs)}. The same bits "
                         "need the same; or train anew in another folder")


_open: Any = None  # A weak reference to the run of this process.
_at_fork = False


def current() -> Run | None:
    """The run that is open in this process."""
    run = _open() if _open is not None else None
    return run if run is not None and not run._life.closed else None


def _folder() -> pathlib.Path | None:
    run = current()
    return None if run is None else run.path


find_run_by(_folder)


def _remember(run: Run) -> None:
    global _open, _at_fork
    _open = weakref.ref(run)
    if not _at_fork:
        os.register_at_fork(after_in_child=_in_child)
        _at_fork = True


def _in_child() -> None:
    run = current()
    if run is not None:
        run._life.leave_in_child()
