# SPDX-License-Identifier: Apache-2.0
"""EmbeddingStore: one trainable row per id, on disk, inside a fixed slab of memory.

Threads: calls on one store from several Python threads queue up.
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
    """torch.optim.AdamW for rows: two moments per weight, bias correction by the row's own count.

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
    """A new AdamW at every apply(): moments start at zero, one step. Nothing is stored."""

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
    """Adagrad with one accumulator per row, of the mean square of its gradient."""

    _kind = _core.RowOptimizer.ROW_ADAGRAD


@dataclass(frozen=True)
class Adam(AdamW):
    """torch.optim.Adam for rows: as AdamW, but weight decay is added to the gradient.

    torch.optim.SparseAdam differs: it counts steps of the table, not of the row, and adds eps before
    it corrects the bias (up to lr × 32 eps ÷ |gradient| a step).
    """

    _kind = _core.RowOptimizer.ADAM


@dataclass(frozen=True)
class SGD:
    """torch.optim.SGD for rows. With momentum each weight keeps a velocity; a row that is not in a
    request does not move. Whether there is momentum is part of the table; how much is not.
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
    """Rows start at zero."""

    def _init(self) -> _core.RowInit:
        return _core.RowInit(_core.RowInitKind.ZEROS, 0.0, 0)


@dataclass(frozen=True)
class Normal:
    """Rows start normally distributed around 0; each depends on (seed, id) alone."""

    std: float = 0.01
    seed: int = 0

    def _init(self) -> _core.RowInit:
        return _core.RowInit(_core.RowInitKind.NORMAL, self.std, self.seed)


@dataclass(frozen=True)
class Uniform:
    """Rows start uniform in [−bound, bound); each depends on (seed, id) alone."""

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
    """int64 [n], as asked for; duplicates stay."""

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
        """The rows as a leaf of torch's graph, with requires_grad; the same one every time.

        Shape:  float32 [n, dim], on the CPU. Leased while it is alive.
        Errors: ImportError without torch; ValueError once applied.
        """
        if self._leaf is None:
            # detach(): the buffer keeps no graph; both are the same bytes.
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
    least size grows with the table: 6.8 GiB for 10⁹ rows of 128 floats with AdamW (plan().floor_bytes).
    Rows that were never changed take no disk: they are computed from `init`. Changes are durable, all
    together, after commit(step).

        users = plimsoll.EmbeddingStore.open(governor, "users", rows=10_000_000, dim=64)
        rows = users.gather(ids)
        loss(rows.tensor).backward()
        users.apply(rows)
        users.commit(step)
    """

    def __init__(self, governor: Governor, store: _core.EmbeddingStore, directory: str, optimizer: Optimizer) -> None:
        """For open()."""
        self._governor = governor
        self._core = store
        self.directory = directory
        self.optimizer = optimizer
        """The optimizer that apply() steps rows with."""
        self._written = 0  # Calls that change rows.
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

        Until this store is closed nobody else can change the table: a second open(), in this process
        or another, is refused. Any number may read commits of it beside that (`pinned`).

        rows or ids: of a new table: dense ids 0 … rows−1, or any distinct int64 ids.
        rows_max:    of a new table: places for rows, so that ids may be inserted and, in any order,
                     erased; memory and disk are planned for as many. `rows` and `ids` may then be
                     left out, and of a table that exists they are not compared. A table made
                     without it has the rows it has.
        dim:         weights per row. `dim`, `dtype`, `optimizer` and `init` may be left out for a
                     table that exists; when given they must fit it (an optimizer's numbers may
                     change). A new table without them has AdamW(lr=0.001) and Normal(std=0.01).
        dtype:       what a weight is stored as: "float32" (the default), or "bfloat16" for half the
                     bytes: a step is computed in float32 and rounded up or down by chance, the same
                     one every time. Rows given and taken are float32 in either case.
        store_bytes: the slab, in bytes or as "64MiB"; 0 is 64 MiB or the floor, if that is larger.
        at_step:     opens this commit instead of the newest.
        batch_rows:  rows of the largest request expected; sizes the scratch in the slab.
        layout:      of a new table: "any_order", or "sample_order" for rows that are visited once an
                     epoch in the order SampleOrder(rows, order_seed, epoch), as a Loader does: they
                     stream at the disk's bandwidth. Any other request works too, more slowly.
        order_seed:  of the epochs that begin from now on; as the Loader's. Sample order only.
        dirty_bytes: most bytes of changed rows that wait for the disk in any order; 0: what the
                     disk writes in a hundredth of the time since the last commit (50 ms to 1 s).
        pinned:      opens a commit of a table that exists, to read it only: nothing is written, and
                     another process may train in it meanwhile (in sample order: not while it is
                     opened). Training keeps the commit while there is room for it on disk, and
                     waits for nothing; once it is gone gather() raises NotFoundError.

        Shape:  ids is int64 [n].
        Errors: BudgetExceeded (slab refused or below the floor), ValueError (another dim, dtype,
                layout, optimizer, init or ids than the table's; duplicate ids; somebody has it open
                to change it), NotFoundError (no commit at at_step; pinned: no table), CorruptError,
                OSError. A directory on a network's file system is a
                RuntimeWarning.
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
        """Copies rows out, in request order.

        Shape:  ids is int64 [n], duplicates allowed; the rows are float32 [n, dim].
        Errors: NotFoundError naming the first unknown id; BudgetExceeded; CorruptError; OSError.
        """
        wanted = ids_in(ids)
        buffer = Buffer(self._governor, (len(wanted), self.dim), "float32")
        self._core.gather(wanted, buffer.array)
        return Rows(wanted.copy(), buffer, self)

    def apply(self, rows: Rows | Any, grads: Any = None, *, rate_scale: float = 1.0) -> None:
        """One optimizer step: apply(rows) takes rows.tensor.grad; or apply(ids, grads).

        Gradients of a duplicate id are summed, in request order. `rate_scale` multiplies the
        learning rate. Rows given here are used up: gather again for the next step. A TrainingStep
        applies the Rows in its batch by itself.

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
        """Sets weights and clears those rows' optimizer state; the last of a duplicate id wins.

        Shape:  ids is int64 [n], rows is float32 [n, dim].
        Errors: as gather().
        """
        wanted = ids_in(ids)
        self._written += 1
        self._core.update(wanted, contiguous(rows, "rows", "float32", (len(wanted), self.dim)))

    def insert(self, ids: Any) -> int:
        """Makes sure that there are rows with these ids; returns how many are new.

        New rows begin as `init` says. Those that are there stay as they are. Durable with the next
        commit, like everything; absent after a crash before it. In sample order they join the next
        epoch that begins (see begin_epoch()).
        Shape:  ids is int64 [n], duplicates allowed.
        Errors: ValueError when there are not places for all (naming rows_max), or the table was made
                without rows_max; CorruptError; OSError. After an error nothing was inserted.
        """
        self._written += 1
        return self._core.insert(ids_in(ids))

    def erase(self, ids: Any) -> None:
        """Removes rows: their ids are unknown until they are inserted anew, with initial values.

        The place of an inserted row is free at once; that of a row the table was made with once it
        is compacted (`plimsoll store compact`).
        Shape:  ids is int64 [n], duplicates allowed.
        Errors: NotFoundError naming the first unknown id; ValueError for a table without rows_max,
                or in sample order, where rows come and stay. After an error no row is gone.
        """
        self._written += 1
        self._core.erase(ids_in(ids))

    def prefetch(self, ids: Any) -> None:
        """Says which ids will be asked for soon. A hint: it may be dropped and cannot fail."""
        self._core.prefetch(ids_in(ids))

    def begin_epoch(self, epoch: int) -> None:
        """Says that the coming requests visit rows in the order of this epoch. Sample order only,
        else nothing happens; a new table is in epoch 0. Results never depend on it, only speed.

        The order is SampleOrder(rows, order_seed, epoch), with the rows there are when it begins. An
        epoch that was already begun goes on. Rows that the last epoch did not visit are carried over;
        any epoch but the next one costs a pass over the table, and so do rows inserted since the
        first batch of the last one: insert between begin_epoch() and its first batch, and they are in
        the epoch after it for nothing.
        Errors: CorruptError; OSError. The store then only repeats that error.
        """
        self._core.begin_epoch(epoch)

    def commit(self, step: int) -> None:
        """Makes everything so far durable under the number `step`.

        Requires: step > last_commit.
        Errors:   OSError; then this store only repeats that error, and the table on disk still
                  holds the commits it held.
        """
        self._core.commit(step)

    def scan(self, visit: Callable[[np.ndarray, np.ndarray, np.ndarray], None]) -> None:
        """Calls visit(ids, sequences, values) for every row, in the order they were created
        (inserted rows behind the others, by their places).

        Shape:    int64 [n], uint32 [n] (updates so far), float32 [n, dim + state] with the
                  weights first. The arrays are copies.
        Requires: visit does not call this store.
        Errors:   what visit raises; CorruptError; OSError.
        """
        self._core.scan(lambda ids, sequences, values: visit(
            np.array(ids), np.array(sequences), np.array(values)))

    def export(self, out: str | os.PathLike[str], *, slots: bool = False) -> int:
        """Writes OUT/ids.npy and OUT/rows.npy (with `slots` OUT/slots.npy); returns the rows.

        Shape:  int64 [rows], float32 [rows, dim], float32 [rows, state]. Streams: memory
                does not grow with the table.
        Errors: FileExistsError when one of the files is there; CorruptError; OSError.
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
        """Changes learning rate and the other numbers. Errors: ValueError for another kind."""
        self._core.set_optimizer(_options_of(optimizer))
        self.optimizer = optimizer

    @property
    def rows(self) -> int:
        """Rows in the table."""
        return self._core.rows

    @property
    def rows_max(self) -> int:
        """Rows there may be at most; 0: the rows are fixed."""
        return self._core.rows_max

    @property
    def dim(self) -> int:
        """Floats per row."""
        return self._core.dim

    @property
    def last_commit(self) -> int:
        """Step of the newest commit; −1 before the first."""
        return self._core.last_commit

    def plan(self) -> SlabPlan:
        """How the slab is divided and the most the directory may hold, in bytes."""
        return self._core.slab_plan()

    def stats(self) -> dict[str, int | float]:
        """Counters since open: requests, hits, hit_rate, pages, bytes, evictions, commits, …

        A hit is a row that was in memory when asked for. Units are in the names.
        """
        return self._core.stats()

    def verify(self) -> None:
        """Reads the newest commit and compares every checksum. Errors: CorruptError; OSError."""
        _core.embedding_verify(self.directory)

    def close(self) -> None:
        """Returns the slab. What was not committed is gone, as after a crash."""
        self._core.close()

    def __enter__(self) -> EmbeddingStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<EmbeddingStore {self.directory}>"


@contextlib.contextmanager
def _npy_file(path: pathlib.Path, dtype: np.dtype, shape: tuple[int, ...]) -> Iterator[Callable[[np.ndarray], Any]]:
    """A function that adds rows to a .npy, which is there when the block has ended. Errors: FileExistsError."""
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
    """Whether EmbeddingStore.open() finds one there."""
    return bool(_describe(os.fspath(path)))


def _describe(path: str) -> dict[str, Any]:
    """The table that exists in `path`; nothing when there is none."""
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
