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
from ._run_life import Failure, Intervals, Life, Where, is_evaluation

if TYPE_CHECKING:
    import torch

    from ..ranks._group import Group
    from ._run_embedding import Vectors
    from ._run_loader import RunLoader
    from ._run_sources import Source

_SEEDS = 1 << 63


class Run:
    """A training run in a folder: a new one, or one that is resumed from its last commit.

        with plimsoll.Run("runs/items", memory_limit="8GiB", seed=7) as run:
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            run.track(model=model, optimizer=optimizer)              # restored here, bit for bit
            for batch in run.steps(run.loader(dataset, batch_size=256, workers=2), epochs=3):
                run.log(loss=run.step(loss, batch, clip_norm=1.0))   # loss(batch) -> a scalar

    After Ctrl-C, `kill -9` or a power cut, start the program again: the run resumes. From another shell `plimsoll status|stop|pause|continue|limit
    runs/items` work as on any run.

    Guaranteed:
      - The limit covers this process and its workers (Governor, made here). When memory without a lease exceeds it, the loop
        ends with MemoryPressure. That, and any refusal of memory, loses at most the step that was being made:
        the steps before it are committed. docs/guide/resume.md says where a large model may lose more.
      - A commit is atomic: parts, random states, tables and the position in the data belong to the same step. Killed at any instant, the
        run resumes from the last commit or the one before it.
      - Tracked parts get the same bits as in an undisturbed run of the same program on the same machine. The order, and each item's random
        states, depend on (seed, epoch, index) alone.
      - run.step() is a transaction: if memory is refused, it is tried again, or leaves no trace.
    Not guaranteed:
      - Untracked state begins anew at each start: your own counters and lists, generators inside a dataset. Code before, between and
        after the loops runs again; its effect on tracked parts counts once.
      - Without run.step(), with a backward and an optimizer of your own, a failed step is not undone (the program ends, and the last
        commit stands). The rest holds: gradients of tracked torch optimizers that are being accumulated are part of a commit.
      - Data without a position (see steps()) is read again up to the position.
      - A table's learning rate that set_optimizer() changed is not kept: compute it from the step.
      - Several ranks (below) without virtual_workers need data of loader(); a Trainer cannot have virtual_workers.
      - A matrix product before the run fixes MKL's kernels: make the run first, or set MKL_CBWR=AVX2,STRICT before the program.

    Ranks: under torchrun, N processes are one run of N ranks, on one machine or on several that share its folder. The program stays the
    same, without DistributedDataParallel. batch_size is per rank. All ranks of a machine share the limit with torchrun. run.step()
    averages the gradients and returns the loss over all ranks. Rank 0 writes the folder. Modules, optimizers, schedulers and scalers
    are the same on all ranks; other parts may differ. All ranks make the same steps and stop at the same one. A run begun with
    `virtual_workers` has the same bits for any number of ranks, and may be resumed with any.

    path:         its folder.
    memory_limit: the Governor's; "" is found from the machine.
    seed:         for Python's, NumPy's and torch's generators, the order, and rows.
    options:      other values that determine the bits, such as {"lr": 1e-3}. They are kept in run.toml. A resumption with
                  other values is refused, naming both. Before the first commit anything may change.
    device_memory_limit: for torch's accelerator (per rank), or by device: {"cuda:1": "20GiB"}; see Governor's `devices`. None: that
                  of `plimsoll run --device-memory-limit`, or no limit. A commit records the kind of device of each module. Another
                  kind gives other bits, and is refused without accept=("device",).
    foreign_bytes, disk_limit: the Governor's.
    compute_threads: torch's; None: as many as the run began with, or torch's present number.
    deterministic: operators without a deterministic form raise; False: they run, and the same bits are not guaranteed.
    accept:       names that may differ from the commit: of the identity, such as ("torch",), or settings of tracked optimizers,
                  schedulers and scalers, such as ("lr",) or ("optimizer.lr",). The program's values are then used, events.jsonl records
                  it, and the bits differ. Settings not named here keep the commit's values, with a RuntimeWarning.
    virtual_workers: number of shares that a batch is cut into, a power of two that the number of ranks divides. batch_size is per
                  worker. A loop's batch is a WorkerBatches with one batch for each of this rank's workers, and run.step() calls its
                  function with each in turn, with random numbers of its own. 1: every rank makes the whole step, for batches that cannot be
                  cut; run.group.by_chunks() shares other work. 0: one per rank, and a batch is the result of collate_fn.
    rank_stopped_seconds: longest that a rank may be stopped (SIGSTOP, a debugger). After that the other ranks kill it, and
                  raise ConnectionError naming it; 0: gloo's time-out, half an hour.
    keep_checkpoints: number of checkpoints that are kept, newest first; a table of rows keeps two commits.
    tensorboard:  whether RUN/metrics gets TensorBoard's event files.
    Errors: ValueError (another process trains in it; another identity, with both values; no run, and the folder is not empty; another
            run or governor in this process); BudgetExceeded; CorruptError; OSError; ImportError without torch. An error on one rank is
            raised on all of them; ConnectionError, from any call that waits for other ranks, when one has ended.
    """

    def __init__(self, path: str | os.PathLike[str], *, memory_limit: int | str = "", seed: int = 0,
                 options: dict[str, Any] | None = None, foreign_bytes: int | str = "128MiB",
                 device_memory_limit: int | str | Mapping[str, int | str] | None = None,
                 disk_limit: int | str = "", compute_threads: int | None = None, deterministic: bool = True,
                 accept: Iterable[str] = (), virtual_workers: int = 0, rank_stopped_seconds: float = 30.0, keep_checkpoints: int = 2,
                 tensorboard: bool = True, _of_recipe: Any = None) -> None:
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
        whole("Run: keep_checkpoints", keep_checkpoints, 1)
        whole("Run: compute_threads", 0 if compute_threads is None else compute_threads, 0)
        group: Group = (_of_recipe and _of_recipe.group) or _ranks.join(
            rank_stopped_seconds, path=os.path.abspath(path), seed=seed, memory_limit=memory_limit, options=options or {},
            compute_threads=compute_threads, deterministic=deterministic, virtual_workers=virtual_workers)
        self.group = group
        """The processes that train the run: Solo, Leader or Ranks, whose by_chunks() shares work among them."""
        try:
            self._workers = VirtualWorkers.dealt(virtual_workers, group.rank, group.count, self.seed)
        except ValueError:
            group.close()
            raise
        self._count = 1 if self._workers is None else self._workers.count
        self._life = Life(self.path, self._content, self._here, group, self._count, memory_limit=memory_limit, seed=self.seed,
                          options=dict(options or {}), foreign_bytes=foreign_bytes, disk_limit=disk_limit, devices=devices,
                          compute_threads=compute_threads, deterministic=deterministic, accept=accept,
                          keep_checkpoints=keep_checkpoints, tensorboard=tensorboard, of_recipe=_of_recipe)
        self._of_recipe = _of_recipe  # Set by plimsoll.recipes: the options of the command line.
        self.governor = self._life.governor
        """The limit and its holders."""
        saved = self._saved = self._life.saved
        self._parts = Parts(saved.pop("parts", None), f"the commit of step {self._life.saved_step}",
                            PartSettings(saved.pop("settings", {}), accept))
        self._random = saved.get("random")  # Restored when the loop begins.
        self._gradients = Gradients(saved.pop("gradients", {}) if saved else None)  # For loops without run.step().
        self._tables: dict[str, tuple[Vectors, dict[str, Any]]] = {}
        self._folders = TableFolders(self.path, group.rank, group.count, self._life.saved_step,
                                     saved.get("table_folder", "embeddings"), saved.get("ranks", 1))
        self._life.committed = self._folders.committed
        if self.is_writer:
            self._folders.clear()
        self._loaders: list[RunLoader] = []
        self._life.end_workers = self._end_workers
        self._loops = self._epochs = 0  # Number of loops begun, and of their epochs.
        self._in_body = False  # The body of the loop runs: it has a batch and has not asked for the next one.
        self._left = False  # The body was left by `break` or an exception.
        self._given: Callable[[], Generator[Any, None, None] | None] = lambda: None  # The last loop's iterator, if it is alive.
        self._made = False  # The body called run.step().
        self._live = False  # Before the batch's first run.step(): no optimizer has stepped since the boundary.
        self._cut_off = False  # The loop of another program ended in the middle of a step.
        self._failure: Failure | None = None  # The error that ended a step or a loop, until the next loop begins.
        self._source: Source | None = None
        self._waiting: Callable[[], None] | None = None  # Restores the commit made after a loop left by `break`.
        self._waits_at: Any = None  # The position in the data while the next batch is awaited.
        self._steps = Steps(self._parts, self._tables, saved.pop("step_state", None) if saved else None,
                            self._life.saved_step >= 0, group, self._workers)
        self._steps.interruptible = lambda: self._life.at_place(Where.STEP)
        self._loss: float | None = None
        self._phase = ""
        _remember(self)

    # ---- What the run consists of ----

    @property
    def steps_made(self) -> int:
        """The number of steps since the run began, over all starts; a step whose body still runs is not counted."""
        return self._life.at.step + int(self._left and self._failure is None)

    @property
    def stopped(self) -> str:
        """The reason why steps() ended early: "SIGINT", "SIGTERM", ".stop" (`plimsoll stop`); "" if it did not."""
        return self._life.stopped

    @property
    def stop_asked(self) -> bool:
        """Whether a stop was requested that the loop has not reached: work between two steps may end early.

        With several ranks, True if any of them was asked. All ranks must read this equally often.
        """
        return self._life.asked()

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, from 0."""
        return self._life.at.epoch

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the run's other outputs: an export, a picture. With several ranks, only the first
        one does.
        """
        return self.group.first

    def track(self, **parts: Any) -> None:
        """Names state that a resumption restores, and restores it at once if the run is resumed. It is restored again when the interrupted
        loop continues, as the program's earlier changes to it are part of the commit already.

        A part has state_dict() and load_state_dict() (modules, optimizers, schedulers, scalers, averages,
        …), or is a tensor, a dict of plain values, or a random generator. Random states of Python, NumPy
        and torch, tables of embedding() and the position in the data are parts of every run.
        Errors: ValueError naming parts and tensors that are missing, extra or of another shape or dtype;
                for a name already used; after the first batch.
        """
        self._check_open()
        self.group.check_parts(parts)
        for name, part in parts.items():
            for differs in self._parts.track(name, part):
                self._life.report.event("setting", differs)

    def embedding(self, name: str, *, rows: int, dim: int, optimizer: Optimizer | None = None,
                  init: Zeros | Normal | Uniform | None = None, dtype: str = "float32", store_bytes: int | str = 0, batch_rows: int = 4096,
                  ids: Callable[[], Any] | None = None, layout: str = "any_order", order_seed: int = 0, io_threads: int = 8) -> Vectors:
        """Makes a torch.nn.Module with one trainable row, on disk, for each id from 0 to rows − 1, or each of `ids` (see Vectors).

            vectors = run.embedding("items", rows=10_000_000, dim=64, optimizer=plimsoll.AdamW(lr=0.03))
            vectors(ids)                     # int64 [...] -> float32 [..., 64], with autograd

        ids: makes the ids of a new table, int64 [rows]; only for one process without virtual_workers.
        Other arguments: those of EmbeddingStore.open(); layout and order_seed are for a new table. By default, that has
        optimizer=plimsoll.AdamW(lr=0.001) and init=plimsoll.Normal(std=0.01) with the run's seed; print(vectors) shows
        the optimizer. With virtual_workers or several ranks, returns a DealtVectors: each rank has a
        table of the rows it owns, and store_bytes is per rank.
        Errors: those of EmbeddingStore.open(); ValueError for another table than the run's, with both values.
        """
        from ..rows._rank_rows import DealtTable
        from ._run_embedding import DealtVectors, Vectors

        self._check_open()
        if self.group.alike:
            raise ValueError(f"embedding: {name!r}: ranks with virtual_workers=1 cannot have it yet; start one process, or more virtual_workers")
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
        """Opens this rank's table, after it was made from the tables of another number of ranks if need be. new: options for a new table only."""
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
        """Makes batches of any map-style dataset (__getitem__ and __len__), for steps().

        The order is SampleOrder(len(dataset), seed, epoch), which starts at any position at once. For each item, the main random
        states of Python, NumPy and torch are set from (seed, epoch, index), so that augmentations are the same for any number of
        workers and after a resumption. Without workers the loop's states are restored. Generators inside the dataset are not set.

        batch_size: items per rank, or per virtual worker; a last, partial batch is divided among them.
        workers:    number of processes. "fork" starts them anew for each epoch, so that they see the program's earlier changes
                    to the dataset, and a nested loop has its own. "spawn" starts them once, as that takes seconds:
                    they see no change, and serve one loop at a time. 0: items are made in this process.
        collate_fn: makes a batch from a list of items; None: torch's default_collate.
        drop_last:  leaves out an epoch's last, partial batch.
        prefetch:   batches in flight for each worker.
        start_method: "fork", "spawn" or "forkserver"; see workers.
        device:     a device of torch, such as "cuda", to which a batch's tensors are moved, at any depth; other values stay. The next
                    batch is made and copied from pinned memory (two batches, leased as "pinned") while a step computes.
                    Without room for that, it is copied when it is needed. The bits are those of tensor.to(device).
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
        """Yields the batches of `epochs` epochs. A resumed run yields only the remaining ones.

        Between two batches the run checks the memory, obeys Ctrl-C, SIGTERM, SIGUSR1, `plimsoll stop`, `pause` and `limit`, and commits
        when due; it also commits at the end. On a stop it commits and the loop ends: check `run.stopped`, which names the reason, after
        the loop. After `break` the step counts as made and the loop as done. Let exceptions of the body leave the run. If one is caught
        around the loop, but inside the run, it counts as `break`: step and loop are done, and committed. An exception of run.step()
        does not: the step was not made, nothing is committed, and the run has failed unless another loop follows. Loops may follow one
        another: epochs are counted on, and loops completed before a resumption yield nothing. `epochs` of the last loop may grow.

        data:    of loader(); a list of batches; a plimsoll.Loader; TokenSet.batches(…); an object with state_dict() and
                 load_state_dict() (a StatefulDataLoader), whose state a commit stores for the current loop only, so all loops must take
                 the same one; or another iterable, with a RuntimeWarning: a resumption reads its epoch again up to the position. Unless
                 data is of loader(), each virtual worker takes a whole batch, so a step uses one per worker; at the end of an epoch
                 some workers have none.
        largest: the largest batch that will come. The first run.step() admits it before its own (see
                 TrainingStep.admit), so that no later step can fail for memory.
        commit_every_steps, commit_every_minutes: a commit is due by whichever comes first; 0: not by that. None is 0, or a recipe's
                 --checkpoint-every-n-steps. If a copy of the state fits into memory beside a step, a thread writes it, and the loop
                 waits for the copy alone (events.jsonl: stall_seconds). A crash during the writing comes back to the commit before.
        cleanup_every_n_steps: number of steps between calls of Governor.clean_up(), which frees unused memory and changes no
                 result; 0: under pressure only. events.jsonl records the bytes freed.
        progress: a bar on a terminal, lines elsewhere, on stderr.
        Errors: ValueError (parts or tables of the commit are missing here; other data); MemoryPressure
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
        """Ends tracking. Errors: ValueError naming parts and tables of the commit that the program lacks."""
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
                self._pass_over(source, state, ended == "left")  # The program does its work after the loop again.
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
                        # For other data the position is unknown here.
                        if life.ended_waiting(error, workers=source.num_workers > 0, place_known=isinstance(source, (RunLoader, Sought))):
                            return
                        raise
                    self._waits_at = None
                    self._in_body = True
                    try:
                        life.where = Where.BODY
                        yield batch
                        life.where = Where.BUSY
                    except GeneratorExit:  # May come late, when a variable kept the iterator: the step may be counted by then.
                        self._left = self._in_body and self._loops == loop + 1
                        raise
                    except MemoryPressure:  # Raised by the watcher after the body has ended: the boundary obeys.
                        life.where = Where.BUSY
                    self._in_body, self._failure = False, None
                    self.group.check_made(self._made)
                    self._made = False
                    self._advance(Batch(_one_of(batch)).rows * self._count)
                    del batch
                    if life.boundary(every):
                        return
                if at.batch == 0:
                    raise ValueError(f"steps: epoch {at.epoch} has no batch: an iterator can be read once only, so give one that can be iterated again")
                at.epoch, at.batch = at.epoch + 1, 0
            at.ended = "whole"
            life.commit(moved=moved)
        life.ended()

    def _begin_loop(self, source: Source, loop: int, first: int, end: int, largest: Any, quiet: bool) -> tuple[Any, str]:
        """Returns (the source's state to begin from, how the loop has ended already). Errors: ValueError for other loops or data than before."""
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
        life.report.begin(quiet=quiet, step=at.step, steps_total=total, epoch=at.epoch, fraction=done, epochs=end)
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
        self._put_back()  # Last, as starting in the middle of an epoch draws random numbers.
        return batches

    def _pass_over(self, source: Source, state: Any, left: bool) -> None:
        """Restores the state after a loop that had ended by the commit."""
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
        """Counts a step, after the body has ended."""
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
        """Completes the loop before: commits one that was left by `break`, or restores that commit in a resumed run."""
        self._close_kept()
        self._end_left_loop()
        if self._waiting is not None:
            self._waiting()
            self._waiting = None

    def _close_kept(self) -> None:
        """Closes the iterator of a loop left by `break`, if a variable keeps it: it would still take signals."""
        batches: Any = self._given()
        if batches is not None and not batches.gi_running:
            batches.close()

    def _end_left_loop(self) -> None:
        """Counts and commits the last step of a loop left by `break`. Does nothing after a step that was not made."""
        left, self._in_body, self._left = self._in_body and self._failure is None, False, False
        if left:
            self._advance(0)
            at = self._life.at
            at.epoch, at.batch, at.ended = self._epochs, 0, "left"
            self._life.commit()
            self._life.ended()

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Records an exception that leaves the block as the run's failure, even if the program continues. GeneratorExit is none."""
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
        """Returns the content and tables of this process, without random states."""
        at, source = self._life.at, self._source
        assert source is not None  # A commit has a step, and so a source.
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
        """Makes one step of the tracked models, optimizers, scaler and tables as a transaction; returns the loss.

        `f` is called with the entries of a tuple or list as arguments, or with anything else as one argument, and returns the
        loss. This call zeroes gradients, runs backward, clips, and steps the optimizer. The options are
        TrainingStep's, whose docstring says what is restored and when a batch is cut; they stay the
        same for all steps of a run. A tracked torch.amp.GradScaler is used. `scheduler` is stepped with the
        optimizer, and must be tracked.

        loss:      how the losses of micro-batches combine to that of the batch: "mean" where each row has an equal share of a
                   mean, as in torch's losses by default; "sum". Only then is a batch cut that memory refused. None: never cut, as a loss
                   may compare the rows of a batch. A model with batch statistics needs allow_batchnorm_microbatch=True as well.
        optimizer: one of the tracked optimizers, or several: this call zeroes and steps these alone, and drops gradients that its loss
                   has for parameters of others. So a batch may have several calls, each with its own loss and options,
                   as for a GAN. They are one step of the run, and one transaction. A call that fails undoes
                   the earlier calls, whose parameters and states are copied until the batch's end; rows of tables
                   cannot be undone, and the run cannot commit then. None: all optimizers, in one call per batch.
        Errors: BudgetExceeded (the step does not fit and was not made), MemoryPressure: the steps before it are committed; ValueError.
        """
        self._check_open()
        if not self._in_body:
            raise ValueError("step: call it in the body of `for batch in run.steps(…)`")
        same = {"loss": loss, "accumulate": accumulate, "clip_norm": clip_norm, "scheduler": scheduler,
                "checkpoint": list(checkpoint), "allow_batchnorm_microbatch": allow_batchnorm_microbatch}
        functions = {"weight": weight, "before_update": before_update, "split": split}  # May differ from call to call.
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
        """Guards one step. If memory ends it, the step is undone and the boundary before it is committed."""
        life = self._life
        if not self._steps.is_half_made:  # This is the batch's first call.
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
        life.save_last()  # Several ranks keep no copy; they commit below, if all agreed on the error.
        if life.drawn is not None and not self.group.over and getattr(error, "_told_to_ranks", False):
            life.drawn.put_back()
            life.commit()

    def idle(self, seconds: float) -> bool:
        """Waits between two loops, such as for new data; obeys `plimsoll stop`, `pause` and `limit`.

        Returns True if the run was asked to stop meanwhile; `stopped` has the reason, and steps() then yields nothing.
        With several ranks all wait until rank 0's time is over.
        """
        self._check_open()
        self._begin_or_wait()
        return self._life.idle(seconds)

    def end_loop(self) -> None:
        """Commits the last step of a loop that was left by `break`, for work that follows it.

        Otherwise the next loop, idle() or close() does it. Does nothing if no loop was left, or its last step was
        not made. Errors: OSError, as for any commit.
        """
        self._check_open()
        self._end_left_loop()

    def log(self, **values: Any) -> None:
        """Writes metrics of the current step to RUN/events.jsonl, and to RUN/metrics for TensorBoard.

        values: numbers, or tensors of one number, which keep their graph; `plimsoll status` shows `loss`.
        Errors: ValueError naming the value that is no number.
        """
        self._check_open()
        numbers = {name: number_of(f"log: {name}", value) for name, value in values.items()}
        self._loss = numbers.get("loss", self._loss)
        at = self._life.at
        self._life.report.log(at.step + int(self._in_body), at.epoch, numbers)

    def scalars(self, values: Mapping[str, Any]) -> None:
        """Writes numbers of the current step to RUN/metrics for TensorBoard alone, by tags such as "held_out/loss". Errors: log()'s."""
        self._check_open()
        numbers = {tag: number_of(f"scalars: {tag}", value) for tag, value in values.items()}
        self._life.report.scalars(self._life.at.step + int(self._in_body), numbers)

    def event(self, name: str, /, **values: Any) -> None:
        """Adds a line to RUN/events.jsonl: {"event": name, **values} and the time. With several ranks, rank 0's counts.

            run.event("preview", step=run.steps_made, text=answer)

        name: your own; `plimsoll why` and the report read the names that the run itself writes.
        values: texts, numbers, bools. Errors: TypeError naming a value of another type; OSError.
        """
        self._check_open()
        for key, value in values.items():
            if not isinstance(value, (str, int, float)):
                raise TypeError(f"event: {key} is a {type(value).__name__}, where a text or a number is needed")
        self._life.report.event(name, values)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names the loop's work inside the block, for `plimsoll why` and the report: "decode", "evaluate".

            with run.phase("evaluate"):
                evaluate(model)

        After a phase whose name begins with "eval", "valid" or "test", unused memory is freed
        (Governor.clean_up()), so that training goes on with its former memory.
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
                if is_evaluation(name) and self.governor.arena_attached:
                    self._life.clean_up("evaluation")

    # ---- The end ----

    def close(self, error: BaseException | None = None) -> None:
        """Ends the run: writes its last status, then closes workers, tables, governor and folder, and restores torch's settings.

        error: the exception that ended it; None: there was none. A second close does nothing.
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
    """Returns the run that is open in this process, or None."""
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
