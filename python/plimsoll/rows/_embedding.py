# SPDX-License-Identifier: Apache-2.0
"""EmbeddingStore: one trainable row per id, on disk, inside a fixed slab of memory.

Threads: calls on one store from several Python threads run one at a time.
"""
from __future__ import annotations

import contextlib
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._core import SlabPlan
from ..core._arrays import byte_size, contiguous, ids_in, not_pickled
from ..core._folders import replaced
from ..errors import NotFoundError
from ..memory._buffers import Buffer
from ..memory._memory import Governor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW for rows: two moments per weight, bias correction by the row's own number of steps.

    A row that is not in a request does not change (torch.optim.AdamW decays every row every step).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    _kind = _core.RowOptimizer.ADAMW

    def _options(self) -> _core.RowOptimizerOptions:
        return _core.RowOptimizerOptions(self._kind, self.lr, *self.betas, self.eps,
                                         self.weight_decay)


@dataclass(frozen=True)
class AdamWFresh(AdamW):
    """AdamW that starts anew at every apply(): zero moments, one step. No state is stored."""

    _kind = _core.RowOptimizer.ADAMW_FRESH


@dataclass(frozen=True)
class Adagrad:
    """torch.optim.Adagrad for rows: one accumulator per weight."""

    lr: float = 1e-2
    eps: float = 1e-10
    weight_decay: float = 0.0
    _kind = _core.RowOptimizer.ADAGRAD

    def _options(self) -> _core.RowOptimizerOptions:
        return _core.RowOptimizerOptions(self._kind, self.lr, 0.9, 0.999, self.eps,
                                         self.weight_decay)


@dataclass(frozen=True)
class RowAdagrad(Adagrad):
    """Adagrad with one accumulator per row, which adds up the mean square of the row's gradient."""

    _kind = _core.RowOptimizer.ROW_ADAGRAD


@dataclass(frozen=True)
class Adam(AdamW):
    """torch.optim.Adam for rows: like AdamW, but weight decay is added to the gradient.

    torch.optim.SparseAdam differs: it counts steps of the table, not of the row, and adds eps before
    it corrects the bias (up to lr × 32 eps ÷ |gradient| a step).
    """

    _kind = _core.RowOptimizer.ADAM


@dataclass(frozen=True)
class SGD:
    """torch.optim.SGD for rows. With momentum each weight has a velocity; a row that is not in a request does not move.
    The table records whether there is momentum, so that is fixed; its value may change.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0

    def _options(self) -> _core.RowOptimizerOptions:
        kind = _core.RowOptimizer.SGD_MOMENTUM if self.momentum else _core.RowOptimizer.SGD
        return _core.RowOptimizerOptions(kind, self.lr, 0.9, 0.999, 0.0, self.weight_decay,
                                         self.momentum)


@dataclass(frozen=True)
class Zeros:
    """The initial rows are zero."""

    def _init(self) -> _core.RowInit:
        return _core.RowInit(_core.RowInitKind.ZEROS, 0.0, 0)


@dataclass(frozen=True)
class Normal:
    """The initial rows are normally distributed around 0; each depends on (seed, id) alone."""

    std: float = 0.01
    seed: int = 0

    def _init(self) -> _core.RowInit:
        return _core.RowInit(_core.RowInitKind.NORMAL, self.std, self.seed)


@dataclass(frozen=True)
class Uniform:
    """The initial rows are uniform in [−bound, bound); each depends on (seed, id) alone."""

    bound: float = 0.01
    seed: int = 0

    def _init(self) -> _core.RowInit:
        return _core.RowInit(_core.RowInitKind.UNIFORM, self.bound, self.seed)


Optimizer = AdamW | Adagrad | SGD

_BY_NAME: dict[str, Optimizer] = {
    "adamw": AdamW(), "adamw_fresh": AdamWFresh(), "adagrad": Adagrad(), "adam": Adam(),
    "row_adagrad": RowAdagrad(), "sgd": SGD(), "sgd_momentum": SGD(momentum=0.9)}


class Rows:
    """Rows copied out of a store for one step. Change them freely: only apply() writes back."""

    ids: np.ndarray
    """The requested ids, int64 [n]; duplicates stay."""

    def __init__(self, ids: np.ndarray, buffer: Buffer, store: EmbeddingStore) -> None:
        self.ids = ids
        self._store = store
        self._buffer: Buffer | None = buffer
        self._leaf: Any = None

    def _held(self) -> Buffer:
        if self._buffer is None:
            raise ValueError("rows: these were applied already; gather again for the next step")
        return self._buffer

    @property
    def array(self) -> np.ndarray:
        """A NumPy copy. Shape: float32 [n, dim]. Errors: ValueError once applied."""
        return self._held().array.copy()

    @property
    def tensor(self) -> torch.Tensor:
        """The rows as a leaf of torch's graph, with requires_grad; always the same tensor.

        Shape:  float32 [n, dim], on the CPU. Leased while it is alive.
        Errors: ImportError without torch; ValueError once applied.
        """
        if self._leaf is None:
            # detach() shares the bytes, and keeps the graph out of the buffer.
            self._leaf = self._held().tensor.detach().requires_grad_()
        return self._leaf

    def _gradient(self) -> np.ndarray:
        buffer = self._held()
        grad = None if self._leaf is None else self._leaf.grad
        if grad is None:
            raise ValueError("rows: rows.tensor has no gradient; use rows.tensor in the loss and "
                             "call backward() before apply(rows)")
        if grad.is_sparse:
            grad = grad.to_dense()
        # Autograd chooses the strides of a gradient; expanded ones are legal.
        return contiguous(grad.detach().contiguous(), "rows.tensor.grad", "float32",
                          buffer.array.shape)

    def _end(self) -> None:
        self._buffer = None
        self._leaf = None

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        state = "applied" if self._buffer is None else f"{list(self._buffer.array.shape)}"
        return f"<Rows {state}>"


class EmbeddingStore:
    """One trainable row per id, with its optimizer state, inside a fixed slab of memory.

    A store belongs to the process that opened it. A DataLoader's workers open the table themselves,
    each with a Governor of its own: EmbeddingStore.open(governor, "users", pinned=True).

    The table may be many times larger than the slab. The slab holds an index of the table's pages, so its
    minimum grows with the table: 6.8 GiB for 10⁹ rows of 128 floats with AdamW (plan().floor_bytes).
    Rows that were never changed take no disk: they are computed from `init`. commit(step) makes all changes
    durable together.

        users = plimsoll.EmbeddingStore.open(governor, "users", rows=10_000_000, dim=64)
        rows = users.gather(ids)
        loss(rows.tensor).backward()
        users.apply(rows)
        users.commit(step)
    """

    def __init__(self, governor: Governor, store: _core.EmbeddingStore, directory: str, optimizer: Optimizer) -> None:
        """Takes what open() made; call open() instead."""
        self._governor = governor
        self._core = store
        self.directory = directory
        self.optimizer = optimizer
        """The optimizer that apply() steps rows with."""
        self._written = 0  # Number of calls that changed rows.
        governor._adopt(self)

    __reduce_ex__ = not_pickled

    @classmethod
    def open(cls, governor: Governor, directory: str | os.PathLike[str], *,
             rows: int | None = None, ids: Any = None, rows_max: int | None = None,
             dim: int | None = None, dtype: str | None = None,
             optimizer: Optimizer | None = None, init: Zeros | Normal | Uniform | None = None,
             store_bytes: int | str = 0, at_step: int | None = None, batch_rows: int = 4096,
             layout: str | None = None, order_seed: int | None = None, dirty_bytes: int | str = 0,
             pinned: bool = False, io_threads: int = 8, compute_threads: int = 1) -> EmbeddingStore:
        """Opens the table in `directory`, or makes it when there is none.

        While this store is open no other one can change the table: a second open(), in this process or
        another, is refused. Any number of readers may open its commits (`pinned`).

        rows or ids: for a new table: dense ids 0 … rows−1, or any distinct int64 ids.
        rows_max:    for a new table: most rows, so that ids may be inserted and, in any order, erased;
                     memory and disk are planned for so many. `rows` and `ids` may then be left out; for
                     an existing table they are not compared. Without it the rows are fixed.
        dim:         weights per row. `dim`, `dtype`, `optimizer` and `init` may be left out for an
                     existing table; if given, they must match it (an optimizer's numbers may
                     change). A new table without them has AdamW(lr=0.001) and Normal(std=0.01).
        dtype:       how a weight is stored: "float32" (the default), or "bfloat16" for half the
                     bytes: a step is computed in float32 and rounded stochastically, with reproducible
                     random numbers. Rows are passed and returned as float32 in either case.
        store_bytes: the slab, in bytes or as "64MiB"; 0 is 64 MiB or the floor, if that is larger.
        at_step:     opens this commit instead of the newest.
        batch_rows:  rows of the largest request expected; sizes the scratch in the slab.
        layout:      for a new table: "any_order"; or "sample_order" for rows that are visited once per
                     epoch in the order SampleOrder(rows, order_seed, epoch), as by a Loader: they
                     stream at the disk's bandwidth. Any other request works too, more slowly.
        order_seed:  seed of the order of coming epochs; equal to the Loader's. Sample order only.
        dirty_bytes: most bytes of changed rows that wait for the disk, in any order; 0: as much as the
                     disk writes in a hundredth of the time since the last commit (50 ms to 1 s).
        pinned:      opens a commit of an existing table read-only. Another process may train in the
                     table meanwhile (in sample order: not during the open). Training keeps the commit
                     while the disk has room, and does not wait for readers; when the commit is gone,
                     gather() raises NotFoundError.

        Shape:  ids is int64 [n].
        Errors: BudgetExceeded (slab refused or below the floor), ValueError (dim, dtype, layout, optimizer,
                init or ids differ from the table's; duplicate ids; the table is open elsewhere for
                change), NotFoundError (no commit at at_step; pinned: no table), CorruptError,
                OSError. A directory on a network file system gives a RuntimeWarning.
        """
        path = os.fspath(directory)
        there = _describe(path)
        if pinned and not there:
            raise NotFoundError(f"{path}: there is no table to be read (pinned)")
        dim, optimizer, init = _fill_in(path, there, dim, optimizer, init)
        options = _core.EmbeddingStoreOptions(
            path, dim, _options_of(optimizer), _init_of(init), byte_size(store_bytes, "store_bytes"),
            0 if rows is None else rows, None if ids is None else ids_in(ids),
            -1 if at_step is None else at_step, batch_rows, io_threads, compute_threads)
        options.rows_max = 0 if rows_max is None else rows_max
        options.pinned = pinned
        options.dtype = _dtype_of(there.get("dtype", "float32") if dtype is None else dtype)
        options.layout = _layout_of(there.get("layout", "any_order") if layout is None else layout)
        options.order_seed = there.get("order_seed", 0) if order_seed is None else order_seed
        options.dirty_bytes = byte_size(dirty_bytes, "dirty_bytes")
        core = _core.EmbeddingStore.open(governor._core, options)
        if network := core.slab_plan().network:
            warnings.warn(f"{path} is on {network}: a commit is as durable as its server, and "
                          "slower; a local disk is better", RuntimeWarning, stacklevel=2)
        return cls(governor, core, path, optimizer)

    def gather(self, ids: Any) -> Rows:
        """Returns copies of rows, in request order.

        Shape:  ids is int64 [n], duplicates allowed; the rows are float32 [n, dim].
        Errors: NotFoundError naming the first unknown id; BudgetExceeded; CorruptError; OSError.
        """
        wanted = ids_in(ids)
        buffer = Buffer(self._governor, (len(wanted), self.dim), "float32")
        self._core.gather(wanted, buffer.array)
        return Rows(wanted.copy(), buffer, self)

    def apply(self, rows: Rows | Any, grads: Any = None, *, rate_scale: float = 1.0) -> None:
        """Makes one optimizer step: apply(rows) takes the gradient rows.tensor.grad, apply(ids, grads) the one given.

        Gradients of a duplicate id are summed, in request order. `rate_scale` multiplies the learning rate. After
        apply(rows) the Rows cannot be used again: gather for the next step. A TrainingStep applies the Rows in its
        batch by itself.

        Shape:  grads is float32 [n, dim].
        Errors: ValueError (no gradient, NaN or infinity naming the id), NotFoundError,
                CorruptError, OSError. After an error no row has changed.
        """
        if isinstance(rows, Rows):
            if grads is not None:
                raise ValueError("grads: apply(rows) takes rows.tensor.grad; to bring gradients of "
                                 "your own call apply(rows.ids, grads)")
            self._written += 1
            self._core.apply(rows.ids, rows._gradient(), rate_scale)
            rows._end()
            return
        if grads is None:
            raise ValueError("grads: apply(ids, grads) needs gradients, float32 [n, dim]")
        ids = ids_in(rows)
        self._written += 1
        self._core.apply(ids, contiguous(grads, "grads", "float32", (len(ids), self.dim)),
                         rate_scale)

    def update(self, ids: Any, rows: Any) -> None:
        """Sets the weights of rows and clears their optimizer state; of a duplicate id, the last row counts.

        Shape:  ids is int64 [n], rows is float32 [n, dim].
        Errors: those of gather().
        """
        wanted = ids_in(ids)
        self._written += 1
        self._core.update(wanted, contiguous(rows, "rows", "float32", (len(wanted), self.dim)))

    def insert(self, ids: Any) -> int:
        """Inserts the ids that have no row yet, and returns their number.

        New rows have the values of `init`; existing rows do not change. The next commit makes them durable, and
        a crash before it removes them. In sample order they join the next epoch that begins (see begin_epoch()).
        Shape:  ids is int64 [n], duplicates allowed.
        Errors: ValueError when not all fit (naming rows_max), or the table was made without rows_max;
                CorruptError; OSError. After an error nothing was inserted.
        """
        self._written += 1
        return self._core.insert(ids_in(ids))

    def erase(self, ids: Any) -> None:
        """Removes rows. Their ids are unknown until they are inserted again, with initial values.

        The place of an inserted row is free at once. That of a row with which the table was made is free once
        the table is compacted (`plimsoll store compact`).
        Shape:  ids is int64 [n], duplicates allowed.
        Errors: NotFoundError naming the first unknown id; ValueError for a table without rows_max,
                or in sample order, where rows cannot be erased. After an error no row was removed.
        """
        self._written += 1
        self._core.erase(ids_in(ids))

    def prefetch(self, ids: Any) -> None:
        """Announces ids that will be requested soon. The hint may be ignored, and never fails."""
        self._core.prefetch(ids_in(ids))

    def begin_epoch(self, epoch: int) -> None:
        """Announces that the coming requests visit rows in the order of this epoch. Does nothing except in sample order. A
        new table is in epoch 0. Only speed depends on it, never results.

        The order is SampleOrder(rows, order_seed, epoch), over the rows that exist when the epoch begins. An epoch
        that has begun already goes on. Rows that the last epoch did not visit are carried over. Any epoch but the
        next one costs a pass over the table, and so do rows inserted after the first batch of the last epoch. Rows
        inserted between begin_epoch() and the first batch cost nothing, and join the epoch after it.
        Errors: CorruptError; OSError. The store then only repeats that error.
        """
        self._core.begin_epoch(epoch)

    def commit(self, step: int) -> None:
        """Makes all changes durable under the number `step`.

        Requires: step > last_commit.
        Errors:   OSError; then this store only repeats that error, and the table on disk still
                  has its earlier commits.
        """
        self._core.commit(step)

    def scan(self, visit: Callable[[np.ndarray, np.ndarray, np.ndarray], None]) -> None:
        """Calls visit(ids, sequences, values) for every row, in order of creation; inserted rows come last, by place.

        Shape:    int64 [n], uint32 [n] (updates so far), float32 [n, dim + state] with the
                  weights first. The arrays are copies.
        Requires: visit does not call this store.
        Errors:   those of visit; CorruptError; OSError.
        """
        self._core.scan(lambda ids, sequences, values: visit(
            np.array(ids), np.array(sequences), np.array(values)))

    def export(self, out: str | os.PathLike[str], *, slots: bool = False) -> int:
        """Writes OUT/ids.npy and OUT/rows.npy (with `slots` OUT/slots.npy), and returns the number of rows.

        Shape:  int64 [rows], float32 [rows, dim], float32 [rows, state]. Rows are streamed: memory
                does not grow with the table.
        Errors: FileExistsError if one of the files exists; CorruptError; OSError.
        """
        folder = pathlib.Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        dim, rows = self.dim, self.rows
        shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
            "ids": (np.int64, (rows,)), "rows": (np.float32, (rows, dim))}
        if slots:
            shapes["slots"] = (np.float32, (rows, self._core.state_floats))
        with contextlib.ExitStack() as files:
            into = {name: files.enter_context(_npy_file(folder / f"{name}.npy", np.dtype(dtype), shape))
                    for name, (dtype, shape) in shapes.items()}

            def write(ids: np.ndarray, _: np.ndarray, values: np.ndarray) -> None:
                into["ids"](ids)
                into["rows"](values[:, :dim])
                if slots:
                    into["slots"](values[:, dim:])

            self.scan(write)
        return rows

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Changes the learning rate and the other numbers. Errors: ValueError for another kind of optimizer."""
        self._core.set_optimizer(_options_of(optimizer))
        self.optimizer = optimizer

    @property
    def rows(self) -> int:
        """The number of rows in the table."""
        return self._core.rows

    @property
    def rows_max(self) -> int:
        """The most rows that the table may have; 0: the rows are fixed."""
        return self._core.rows_max

    @property
    def dim(self) -> int:
        """Floats per row."""
        return self._core.dim

    @property
    def last_commit(self) -> int:
        """The step of the newest commit; −1 before the first."""
        return self._core.last_commit

    def plan(self) -> SlabPlan:
        """Returns the division of the slab, and the most bytes that the directory may hold."""
        return self._core.slab_plan()

    def stats(self) -> dict[str, int | float]:
        """Returns counters since open(): requests, hits, hit_rate, pages, bytes, evictions, commits, …

        A hit is a row that was in memory when requested. Units are in the names.
        """
        return self._core.stats()

    def verify(self) -> None:
        """Reads the newest commit and compares every checksum. Errors: CorruptError; OSError."""
        _core.embedding_verify(self.directory)

    def close(self) -> None:
        """Returns the slab. Changes that were not committed are lost, as after a crash."""
        self._core.close()

    def __enter__(self) -> EmbeddingStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<EmbeddingStore {self.directory}>"


@contextlib.contextmanager
def _npy_file(path: pathlib.Path, dtype: np.dtype, shape: tuple[int, ...]) -> Iterator[Callable[[np.ndarray], Any]]:
    """Yields a function that appends rows to a .npy file, which appears when the block ends. Errors: FileExistsError."""
    if path.exists():
        raise FileExistsError(17, "export does not overwrite files", str(path))
    with replaced(path) as partial, open(partial, "wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
        yield lambda values: file.write(np.ascontiguousarray(values, dtype=dtype).data)


def _options_of(optimizer: Any) -> _core.RowOptimizerOptions:
    if not isinstance(optimizer, (AdamW, Adagrad, SGD)):
        raise ValueError(f"optimizer: {optimizer!r} is none of plimsoll.AdamW(...), AdamWFresh(...), "
                         "Adam(...), Adagrad(...), RowAdagrad(...) and SGD(...)")
    return optimizer._options()


def _init_of(init: Any) -> _core.RowInit:
    if not isinstance(init, (Zeros, Normal, Uniform)):
        raise ValueError(f"init: {init!r} is not plimsoll.Zeros(), plimsoll.Normal(...) or "
                         "plimsoll.Uniform(...)")
    return init._init()


def is_table(path: str | os.PathLike[str]) -> bool:
    """Whether EmbeddingStore.open() would find a table in `path`."""
    return bool(_describe(os.fspath(path)))


def _describe(path: str) -> dict[str, Any]:
    """Returns the description of the table in `path`; {} when there is none."""
    try:
        there = json.loads(_core.describe(path))
    except NotFoundError:
        return {}
    return there if there.get("kind") == "embedding_store" else {}


def _dtype_of(name: str) -> _core.RowDType:
    names = {"float32": _core.RowDType.FLOAT32, "bfloat16": _core.RowDType.BFLOAT16}
    if name not in names:
        raise ValueError(f"dtype: {name!r} is not one of {', '.join(names)}")
    return names[name]


def _layout_of(name: str) -> _core.RowLayout:
    names = {"any_order": _core.RowLayout.ANY_ORDER, "sample_order": _core.RowLayout.SAMPLE_ORDER}
    if name not in names:
        raise ValueError(f"layout: {name!r} is not one of {', '.join(names)}")
    return names[name]


def _fill_in(path: str, there: dict[str, Any], dim: int | None, optimizer: Any,
             init: Any) -> tuple[int, Any, Any]:
    """Fills in dim, optimizer and init where they are None: from the existing table, else the defaults."""
    if not there:
        if dim is None:
            raise ValueError(f"dim: there is no table in {path} yet, so give the floats per row")
        return dim, AdamW() if optimizer is None else optimizer, Normal() if init is None else init
    if init is None:
        kind = {"normal": Normal, "uniform": Uniform}.get(there["init"])
        init = Zeros() if kind is None else kind(there["init_scale"], there["init_seed"])
    if optimizer is None:
        optimizer = _BY_NAME[there["optimizer"]]
    return there["dim"] if dim is None else dim, optimizer, init
