# SPDX-License-Identifier: Apache-2.0
"""The torch-free library. Private: use the package `plimsoll`, whose classes wrap these.

Arrays must be contiguous and of the exact dtype (TypeError otherwise); results are written into
arrays that the caller brings. Errors are those of plimsoll.errors, ValueError and OSError.
"""
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

_Ids = NDArray[np.int64]
_Floats = NDArray[np.float32]
_Bytes = NDArray[np.uint8]

version: str
torch_version: str

def parse_bytes(text: str, whole_bytes: int = 0) -> int:
    """Bytes from "512MiB", "6GB" or "25%" (of whole_bytes). Errors: ValueError."""
def format_bytes(bytes: int) -> str:
    """ "768.0 MiB"."""
def crc32c(bytes: _Bytes, seed: int = 0) -> int:
    """CRC-32C of the bytes, continuing from one returned earlier (0 to begin)."""
def limits(memory_limit: str = "", source: str = "memory_limit") -> LimitReport:
    """Every bound on this process. Errors: ValueError."""
def in_memory_file_system(path: str) -> str:
    """ "tmpfs" or "ramfs" when what is written below the path stays in memory, else ""."""
def resident() -> Resident:
    """Returns the memory that the operating system charges this process now."""
def describe(path: str) -> str:
    """Returns the content of a Plimsoll directory or file, as JSON. Errors: NotFoundError, CorruptError."""
def embedding_verify(directory: str) -> None:
    """Compares every checksum. Errors: CorruptError naming file and page; OSError."""
def feature_verify(directory: str) -> None:
    """Compares every checksum. Errors: CorruptError naming file and block; OSError."""

class LimitCandidate:
    """One thing that bounds the process."""

    @property
    def source(self) -> str:
        """ "user", "cgroup v2 memory.max", "SLURM_MEM_PER_NODE", "available", …"""
    @property
    def where(self) -> str:
        """The file, the variable or the option it was read from."""
    @property
    def bytes(self) -> int:
        """The bound, in bytes."""

class LimitReport:
    """All bounds found, and the one that holds; str() is one line."""

    @property
    def candidates(self) -> list[LimitCandidate]:
        """In the order looked up; at least one."""
    @property
    def limit_bytes(self) -> int:
        """The limit that holds, in bytes."""
    @property
    def winner(self) -> int:
        """Index into candidates."""
    @property
    def defaulted(self) -> bool:
        """True: no user limit, so limit_bytes is 80 % of the winner."""
    def explain(self) -> str:
        """ "768.0 MiB (user: --memory-limit)"."""
    def __str__(self) -> str: ...
    def __repr__(self) -> str: ...

class Resident:
    """Memory that the operating system charges the process, in bytes."""

    @property
    def anonymous(self) -> int:
        """Heap, stacks, arenas."""
    @property
    def file(self) -> int:
        """Mapped files and code, which the kernel can take back."""
    @property
    def shared(self) -> int:
        """Shared memory."""
    @property
    def swapped(self) -> int:
        """On swap."""
    @property
    def peak(self) -> int:
        """Highest total so far."""
    @property
    def total(self) -> int:
        """anonymous + file + shared."""

class PoolState:
    """One tag's line in the ledger, in bytes."""

    @property
    def yielded_bytes(self) -> int:
        """Admitted, and taken by a lower limit until it rises again."""
    @property
    def floor_bytes(self) -> int:
        """Promised at admission."""
    @property
    def cap_bytes(self) -> int:
        """Never passed."""
    @property
    def leased_bytes(self) -> int:
        """Leased now."""
    @property
    def peak_bytes(self) -> int:
        """Highest leased so far."""

class TreeMemory:
    """Memory held beside this process's own resident memory, and a part of that; in bytes."""

    @property
    def children_bytes(self) -> int:
        """Anonymous and shared memory of all descendants; what they share counts once."""
    @property
    def in_flight_bytes(self) -> int:
        """Shared memory that is resident in no process: batches on their way from a worker, or never touched."""
    @property
    def mapped_bytes(self) -> int:
        """Bytes of the process's mapped files: private mappings, as weights are loaded from safetensors."""
    @property
    def children(self) -> int:
        """How many descendants there are."""
    def __repr__(self) -> str: ...

class Measured:
    """The governor's last measurement, in bytes."""

    @property
    def resident(self) -> Resident:
        """Memory of this process alone."""
    @property
    def tree(self) -> TreeMemory:
        """Memory of its children, and shared memory."""
    @property
    def unexplained_bytes(self) -> int:
        """Without a lease, and not there before the governor; mapped weights among it."""
    @property
    def held_bytes(self) -> int:
        """All that is held to the limit."""
    def __repr__(self) -> str: ...

class Watcher:
    """A thread that looks at what the process's governor holds, as long as it is open."""

    def __init__(self, wake: int) -> None:
        """`wake`: a signal that Python handles, sent to the calling thread at a stop; 0: none."""
    def take(self) -> tuple[bool, bool, PressureReport] | None:
        """News, once: whether it asks for a stop, whether the next step boundary comes too late for it, and what was seen."""
    def defer(self) -> None:
        """The last stop waits for a step boundary: the watcher repeats it as long as it holds."""
    def avert(self) -> None:
        """The stop that was taken need not be; the watcher reports the next one at once."""
    def close(self) -> None:
        """Ends the thread; a second close does nothing."""

class Ledger:
    """A consistent copy of who holds what, in bytes; str() is a table."""

    @property
    def measured(self) -> Measured:
        """Result of the last measurement, beside the leases."""
    @property
    def crowded_bytes(self) -> int:
        """Measured without a lease, beyond what was set aside for it."""
    def explain(self) -> str:
        """Names the holders of memory without a lease, in a sentence."""

    @property
    def asked_bytes(self) -> int:
        """The limit asked for last; below limit_bytes until it fits."""
    @property
    def limit_bytes(self) -> int:
        """Allowed."""
    @property
    def baseline_bytes(self) -> int:
        """Resident before anything was leased."""
    @property
    def leased_bytes(self) -> int:
        """Over all pools."""
    @property
    def leased_peak_bytes(self) -> int:
        """Highest leased so far."""
    @property
    def committed_bytes(self) -> int:
        """Sum over pools of max(floor, leased)."""
    @property
    def orphan_bytes(self) -> int:
        """Leases of earlier governors that are still alive."""
    @property
    def free_bytes(self) -> int:
        """limit − baseline − committed."""
    @property
    def pools(self) -> dict[str, PoolState]:
        """By tag: "tensors", "rows", "features", "loader", "pinned", "foreign",
        "other"."""
    def __str__(self) -> str: ...
    def __repr__(self) -> str: ...

class Eviction:
    """Bytes that one owner gave back; resident bytes of the process, before and after."""

    @property
    def owner(self) -> str:
        """"arena", "heap", "features", "loader", …"""
    @property
    def move(self) -> str:
        """"purge" or "shrink"."""
    @property
    def wanted_bytes(self) -> int:
        """Asked for."""
    @property
    def given_bytes(self) -> int:
        """Given, as the owner says."""
    @property
    def before_bytes(self) -> int:
        """Resident before it."""
    @property
    def after_bytes(self) -> int:
        """Resident after it."""
    @property
    def freed_bytes(self) -> int:
        """before_bytes − after_bytes."""
    def __repr__(self) -> str: ...

class LimitChange:
    """Result of set_limit()."""

    @property
    def before_bytes(self) -> int:
        """The limit until then."""
    @property
    def asked_bytes(self) -> int:
        """The smallest of what was asked for and every other bound."""
    @property
    def limit_bytes(self) -> int:
        """The limit in force; above asked_bytes as long as that does not fit."""
    @property
    def settled(self) -> bool:
        """limit_bytes == asked_bytes."""
    @property
    def purged_bytes(self) -> int:
        """Given back from caches of free memory."""
    @property
    def shrunk_bytes(self) -> int:
        """Given back by stores and loaders."""
    @property
    def grown_bytes(self) -> int:
        """Taken again by them."""
    @property
    def resident(self) -> Resident:
        """Resident memory now."""
    @property
    def evictions(self) -> list[Eviction]:
        """One for every owner that gave memory back."""
    def __repr__(self) -> str: ...

class PressureReport:
    """Result of step_boundary()."""

    @property
    def resident(self) -> Resident:
        """Memory of the process and its children, shared memory included."""
    @property
    def unexplained_bytes(self) -> int:
        """Part of `resident` without a lease that was not there before the governor."""
    @property
    def pressure(self) -> bool:
        """It was near the limit, and more without a lease than was set aside."""
    @property
    def kernel(self) -> str:
        """Signal of the kernel: "", "tight" (a cgroup met its bound) or "stalled" (PSI)."""
    @property
    def stop(self) -> bool:
        """Nothing helped, or a limit that was asked for does not fit: save and end the run."""
    @property
    def needed_bytes(self) -> int:
        """When `stop`: the smallest limit that would do just now."""
    @property
    def purged_bytes(self) -> int:
        """Given back from caches of free memory."""
    @property
    def shrunk_bytes(self) -> int:
        """Given back by stores and loaders."""
    @property
    def grown_bytes(self) -> int:
        """Taken again by stores, once there was room."""
    @property
    def evictions(self) -> list[Eviction]:
        """One for every owner that gave memory back."""
    def __repr__(self) -> str: ...

class Tag:
    """Whose bytes they are."""

    TENSORS: ClassVar[Tag]
    ROWS: ClassVar[Tag]
    FEATURES: ClassVar[Tag]
    LOADER: ClassVar[Tag]
    PINNED: ClassVar[Tag]
    FOREIGN: ClassVar[Tag]
    OTHER: ClassVar[Tag]

class Lease:
    """The right to hold a number of bytes."""

    @property
    def bytes(self) -> int:
        """Held now."""
    @property
    def tag(self) -> str:
        """Whose bytes they are."""
    def grow(self, bytes: int) -> None:
        """Errors: BudgetExceeded; then unchanged."""
    def shrink(self, bytes: int) -> None:
        """Lowers the lease, never raising it."""
    def close(self) -> None:
        """Returns every byte."""

class Governor:
    """A handle on the process's governor."""

    @staticmethod
    def create(memory_limit: str, source: str, disk_limit: str, directory: str,
               foreign_bytes: int, pressure_fraction: float) -> Governor:
        """Errors: ValueError, BudgetExceeded."""
    @staticmethod
    def current() -> Governor:
        """The process's governor; not valid when there is none."""
    @property
    def valid(self) -> bool:
        """False: an empty handle."""
    def reserve(self, tag: Tag, bytes: int) -> Lease:
        """Errors: BudgetExceeded."""
    def admit(self, tag: Tag, bytes: int) -> None:
        """Promises a tag so much more, whether it is leased yet or not. Errors: BudgetExceeded."""
    def leased_array(self, tag: Tag, bytes: int) -> _Bytes:
        """Uninitialised, 64-byte aligned memory that holds its own lease. Errors: BudgetExceeded."""
    def ledger(self) -> Ledger:
        """A consistent copy."""
    def limit(self) -> LimitReport:
        """The limit asked for last and where it comes from."""
    def set_limit(self, text: str, source: str) -> LimitChange:
        """Moves the limit. Errors: ValueError."""
    @property
    def disk_limit_bytes(self) -> int:
        """Most the stores may hold on disk."""
    def step_boundary(self) -> PressureReport:
        """To be called between steps."""
    def before_stop(self) -> PressureReport:
        """The moves of step_boundary(), for a loop that calls none."""
    def rebaseline(self) -> int:
        """Measures the baseline again; only while nothing is leased."""
    def lower_baseline(self, bytes: int, anonymous_bytes: int) -> int:
        """Takes from it what has gone back to the system since; returns it."""
    def close(self) -> None:
        """Ends the governor; leases still out become orphans."""

class RowOptimizer:
    """How apply() turns a gradient into a change of the row."""

    ADAMW: ClassVar[RowOptimizer]
    ADAMW_FRESH: ClassVar[RowOptimizer]
    ADAGRAD: ClassVar[RowOptimizer]
    SGD: ClassVar[RowOptimizer]
    SGD_MOMENTUM: ClassVar[RowOptimizer]
    ROW_ADAGRAD: ClassVar[RowOptimizer]
    ADAM: ClassVar[RowOptimizer]

class RowOptimizerOptions:
    """The kind and its numbers."""

    def __init__(self, kind: RowOptimizer, learning_rate: float, beta1: float, beta2: float,
                 epsilon: float, weight_decay: float, momentum: float = 0.0) -> None: ...

class RowInitKind:
    """Rows before their first update."""

    ZEROS: ClassVar[RowInitKind]
    NORMAL: ClassVar[RowInitKind]
    UNIFORM: ClassVar[RowInitKind]

class RowInit:
    """The kind, its scale and its seed."""

    def __init__(self, kind: RowInitKind, scale: float, seed: int) -> None: ...

class SlabPlan:
    """How a slab is divided and what the disk may come to hold, in bytes; str() is a table."""

    @property
    def total_bytes(self) -> int:
        """The slab."""
    @property
    def frame_bytes(self) -> int:
        """Page frames."""
    @property
    def index_bytes(self) -> int:
        """Id index and page table."""
    @property
    def buffer_bytes(self) -> int:
        """I/O buffers and the scratch of a request."""
    @property
    def queue_bytes(self) -> int:
        """Look-ahead queue."""
    @property
    def floor_bytes(self) -> int:
        """The smallest slab that works for this table."""
    @property
    def disk_cap_bytes(self) -> int:
        """Most the directory can reach."""
    @property
    def rows_max(self) -> int:
        """Rows all this is enough for; 0: the table cannot grow."""
    @property
    def network(self) -> str:
        """"NFS", …: the directory is on a file system of a network; else empty."""
    def __str__(self) -> str: ...

class RowDType:
    """Data type that a weight is stored as."""

    FLOAT32: RowDType
    BFLOAT16: RowDType

class RowLayout:
    """Where rows lie on disk."""

    ANY_ORDER: RowLayout
    SAMPLE_ORDER: RowLayout

class EmbeddingStoreOptions:
    """Options of EmbeddingStore.open() and plan()."""

    dtype: RowDType
    layout: RowLayout
    order_seed: int
    rows_max: int
    pinned: bool
    dirty_bytes: int

    def __init__(self, directory: str, dim: int, optimizer: RowOptimizerOptions, init: RowInit,
                 store_bytes: int, rows: int, ids: _Ids | None, at_step: int, batch_rows: int,
                 io_threads: int, compute_threads: int) -> None: ...

def virtual_shards(ids: _Ids, shards: _Ids) -> None:
    """Writes the shard of each id, from 0 to 4,095 (docs/formats/embedding_store.md). Shape: [n] each."""

class EmbeddingStore:
    """Rows by id; see plimsoll.EmbeddingStore."""

    @staticmethod
    def open(governor: Governor, options: EmbeddingStoreOptions) -> EmbeddingStore:
        """Errors: BudgetExceeded, ValueError, NotFoundError, CorruptError, OSError."""
    @staticmethod
    def plan(options: EmbeddingStoreOptions) -> SlabPlan:
        """The slab this table would need. Creates nothing."""
    def close(self) -> None:
        """Returns the slab; what was not committed is gone."""
    def gather(self, ids: _Ids, out: _Floats) -> None:
        """Shape: ids [n], out [n, dim]. Errors: NotFoundError, CorruptError, OSError."""
    def apply(self, ids: _Ids, grads: _Floats, rate_scale: float) -> None:
        """Shape: ids [n], grads [n, dim]. Errors: as gather(), ValueError."""
    def update(self, ids: _Ids, rows: _Floats) -> None:
        """Shape: ids [n], rows [n, dim]. Errors: as gather()."""
    def restore(self, ids: _Ids, sequences: NDArray[np.uint32], values: _Floats) -> None:
        """Records as scan() shows them. Shape: ids [n], distinct; values [n, dim + state_floats]. Errors: as gather()."""
    def gather_listed(self, ids: list[int], rows: int, floats: int) -> bool:
        """gather() to the address `rows`, of so many floats. False, and nothing done, when there is
        something else than 64-bit ints in the list."""
    def update_listed(self, ids: list[int], rows: int, floats: int, marks: NDArray[np.bool_],
                      chunk_rows: int) -> bool:
        """update() from the address `rows`, likewise; then sets marks[id // chunk_rows]."""
    def prefetch(self, ids: _Ids) -> None:
        """A hint; cannot fail."""
    def insert(self, ids: _Ids) -> int:
        """Shape: ids [n]. How many are new. Errors: ValueError, CorruptError, OSError."""
    def erase(self, ids: _Ids) -> None:
        """Shape: ids [n]. Errors: as gather(), ValueError."""
    def begin_epoch(self, epoch: int) -> None:
        """Errors: CorruptError, OSError."""
    def commit(self, step: int) -> None:
        """Makes everything so far durable. Errors: ValueError, OSError."""
    def scan(self, visit: Callable[[_Ids, NDArray[np.uint32], _Floats], object]) -> None:
        """The arrays given to visit are valid during that call only."""
    def set_optimizer(self, options: RowOptimizerOptions) -> None:
        """Errors: ValueError for another kind."""
    @property
    def rows(self) -> int:
        """Rows in the table."""
    @property
    def rows_max(self) -> int:
        """Rows there may be at most; 0: the rows are fixed."""
    @property
    def dim(self) -> int:
        """Floats per row."""
    @property
    def slots(self) -> int:
        """Optimizer floats per weight: 0, 1 or 2."""
    @property
    def state_floats(self) -> int:
        """Optimizer floats per row: dim × slots, and one for row-wise Adagrad."""
    @property
    def last_commit(self) -> int:
        """−1 before the first."""
    def slab_plan(self) -> SlabPlan:
        """How the slab is divided."""
    def stats(self) -> dict[str, int | float]:
        """Counters since open."""

class FeaturePlan:
    """How a feature store's slab is divided, in bytes; the parts add up to total_bytes."""

    @property
    def total_bytes(self) -> int:
        """The slab."""
    @property
    def frame_bytes(self) -> int:
        """Frames of blocks, and the map that finds them."""
    @property
    def buffer_bytes(self) -> int:
        """Where neighbours, and compressed blocks, are read to."""
    @property
    def table_bytes(self) -> int:
        """Tables kept whole: checksums, places, ids, groups."""
    @property
    def index_bytes(self) -> int:
        """Pages and fences of the id index."""
    @property
    def slack_bytes(self) -> int:
        """Alignment."""

class FeatureStore:
    """Columns by id; see plimsoll.FeatureStore."""

    @staticmethod
    def open(governor: Governor, directory: str, cache_bytes: int, io_threads: int,
             join_gap_bytes: int, parts: int) -> FeatureStore:
        """Errors: NotFoundError, CorruptError, BudgetExceeded."""
    def close(self) -> None:
        """Lets go of the store."""
    def read(self, ids: _Ids, columns: list[int], out: list[_Bytes]) -> None:
        """Shape: out[k] has n × the bytes of column k. Errors: NotFoundError, CorruptError, OSError."""
    def read_ordinals(self, ordinals: _Ids, columns: list[int], out: list[_Bytes]) -> None:
        """Reads as read(); of a ragged column out[k] has the elements of all records."""
    def lengths(self, ordinals: _Ids, column: int, out: _Ids) -> None:
        """Elements of a ragged column. Errors: ValueError."""
    def ordinals_of(self, ids: _Ids, out: _Ids) -> None:
        """Errors: NotFoundError."""
    def find(self, ids: _Ids, out: _Ids) -> None:
        """Ordinals, −1 where there is none. Errors: CorruptError; OSError."""
    def ids_of(self, ordinals: _Ids, out: _Ids) -> None:
        """Errors: ValueError for an ordinal out of range."""
    def column(self, name: str) -> int:
        """Index of a column. Errors: NotFoundError naming the columns there are."""
    @property
    def rows(self) -> int:
        """Records in the store."""
    @property
    def parts(self) -> int:
        """Parts that it reads."""
    @property
    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → (dtype, shape of one record, or of one element)."""
    @property
    def ragged(self) -> dict[str, int]:
        """Ragged column → the most elements of a record."""
    def describe(self, directory: str) -> str:
        """JSON, as describe() of the module; of the parts that it reads."""
    def plan(self) -> FeaturePlan:
        """How the slab is divided."""
    def stats(self) -> dict[str, int | float]:
        """Counters since open."""

class FeatureWriter:
    """Builds a FeatureStore; see plimsoll.FeatureWriter."""

    @staticmethod
    def create(governor: Governor, directory: str, names: list[str], dtypes: list[str],
               shapes: list[list[int]], lengths_max: list[int], grouped: bool, allow_non_finite: bool,
               compression: str) -> FeatureWriter:
        """Errors: ValueError, BudgetExceeded, OSError."""
    @staticmethod
    def extend(governor: Governor, directory: str, allow_non_finite: bool) -> FeatureWriter:
        """Errors: NotFoundError, CorruptError, ValueError, BudgetExceeded, OSError."""
    @property
    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → (dtype, shape of one record, or of one element)."""
    @property
    def ragged(self) -> dict[str, int]:
        """Ragged column → the most elements of a record."""
    @property
    def grouped(self) -> bool:
        """append() takes group ids."""
    def append(self, ids: _Ids, columns: list[_Bytes], groups: _Ids | None, lengths: list[_Ids]) -> None:
        """Errors: ValueError naming record, id and column; OSError."""
    def finish(self) -> None:
        """Errors: ValueError for a duplicate id; OSError."""
    @property
    def rows(self) -> int:
        """Records appended so far."""
    def close(self) -> None:
        """Without finish(): removes what was written."""

class SampleOrder:
    """A keyed permutation; see plimsoll.SampleOrder."""

    def __init__(self, samples: int, seed: int, epoch: int) -> None: ...
    def at(self, positions: _Ids, out: _Ids) -> None:
        """Errors: ValueError for a position out of range."""
    def position_of(self, samples: _Ids, out: _Ids) -> None:
        """Errors: ValueError for a sample out of range."""
    @property
    def samples(self) -> int:
        """How many there are."""

class Split:
    """Which records train; see plimsoll.Split."""

    @staticmethod
    def create(governor: Governor, store: FeatureStore, held_out_groups: int, seed: int) -> Split:
        """Errors: ValueError, BudgetExceeded."""
    def close(self) -> None:
        """Returns what it leases."""
    @property
    def train_rows(self) -> int:
        """Records that train."""
    @property
    def held_out_rows(self) -> int:
        """Records held out."""
    @property
    def held_out_groups(self) -> int:
        """Groups held out."""
    def train_ordinals(self, ranks: _Ids, out: _Ids) -> None:
        """Errors: ValueError for a rank out of range."""
    def held_out_ordinals(self, ranks: _Ids, out: _Ids) -> None:
        """Errors: ValueError for a rank out of range."""

class Loader:
    """Batches in a seeded order; see plimsoll.Loader."""

    @staticmethod
    def open(governor: Governor, store: FeatureStore, split: Split, columns: list[str],
             batch_rows: int, queue_bytes: int, threads: int, drop_last: bool,
             sweep_batches: int, seed: int, epoch: int, position: int) -> Loader:
        """Errors: ValueError, NotFoundError, BudgetExceeded."""
    def next(self) -> dict[str, Any]:
        """Takes a batch and describes it: rows, epoch, position, ends_epoch, state_after."""
    def copy(self, ids: _Ids, groups: _Ids, columns: list[_Bytes]) -> None:
        """Copies the batch taken last and gives its slot back."""
    def upcoming_ids(self) -> list[int]:
        """Ids of the batch after the one handed out last."""
    def seek(self, seed: int, epoch: int, position: int) -> None:
        """Errors: ValueError for a position outside the epoch."""
    @property
    def batches_per_epoch(self) -> int:
        """Batches in one epoch."""
    @property
    def slot_bytes(self) -> int:
        """Bytes of one batch in the ring."""
    @property
    def slots(self) -> int:
        """Batches that fit the ring."""
    @property
    def stall_ns(self) -> int:
        """Time next() waited."""
    def close(self) -> None:
        """Ends the threads and returns the ring."""

def import_can(governor: Governor, inputs: list[str], out: str, window: int, stride: int,
               validation: float, seed: int, columns: list[str], vocabulary: str,
               normal_ids: bool, exclude: list[str], ids_max: int, skip_bad: bool, dialect: str,
               rebuild: bool, threads: int, chunk_bytes: int) -> bool:
    """True when `out` was left as it was. Errors: see plimsoll.import_can."""

class GraphSet:
    """Many small graphs; see plimsoll.GraphSet."""

    @staticmethod
    def open(governor: Governor, directory: str, cache_bytes: int) -> GraphSet:
        """Errors: NotFoundError, CorruptError, BudgetExceeded, OSError."""
    def close(self) -> None:
        """Lets go of the set."""
    @property
    def graphs(self) -> int:
        """How many there are."""
    @property
    def ids(self) -> int:
        """Ids in the vocabulary."""
    @property
    def cached(self) -> bool:
        """True when the graphs stay in memory."""
    def split_size(self, split: str) -> int:
        """Errors: ValueError for a split that is none."""
    def split(self, split: str, out: _Ids) -> None:
        """Shape: out [split_size(split)]."""
    def vocabulary(self, out: _Ids) -> None:
        """Shape: out [ids]."""
    def describe(self, graphs: _Ids, nodes: _Ids, edges: _Ids, labels: _Ids, files: _Ids) -> None:
        """Errors: ValueError for a graph out of range."""
    def gather(self, graphs: _Ids, x: _Floats, edge_index: _Ids, edge_attr: _Floats,
               graph_of_node: _Ids, labels: _Ids) -> None:
        """Shape: flat arrays, at least as large as the batch. Errors: ValueError, CorruptError."""
    def verify(self) -> None:
        """Errors: CorruptError naming the graph; OSError."""

class GraphBatches:
    """Batches in a seeded order; see plimsoll.GraphBatches."""

    @staticmethod
    def open(set: GraphSet, split: str, graphs: _Ids | None, batch_graphs: int, nodes_max: int,
             edges_max: int, bytes_max: int, min_steps: int, shuffle: bool, seed: int, epoch: int,
             position: int) -> GraphBatches:
        """Errors: ValueError naming the option."""
    def peek(self) -> tuple[int, int, int]:
        """Graphs, nodes and edges of the next batch."""
    def next(self, x: _Floats, edge_index: _Ids, edge_attr: _Floats, graph_of_node: _Ids,
             labels: _Ids, graphs: _Ids) -> tuple[int, int, bool]:
        """Assembles a batch; its epoch, position and whether it ends the epoch."""
    def steps(self, epoch: int) -> int:
        """Batches of an epoch."""
    def seek(self, epoch: int, position: int) -> None:
        """Errors: ValueError for a position outside the epoch."""
    @property
    def graphs(self) -> int:
        """Graphs of an epoch."""
    @property
    def most(self) -> tuple[int, int, int]:
        """Graphs, nodes and edges that no batch passes."""
    @property
    def state(self) -> tuple[int, int]:
        """Epoch and position."""
    def close(self) -> None:
        """Lets go of the set."""

class TokenSet:
    """Rows of token ids; see plimsoll.TokenSet."""

    @staticmethod
    def open(path: str) -> TokenSet:
        """Errors: NotFoundError, CorruptError, OSError."""
    def close(self) -> None:
        """Lets go of the file."""
    @property
    def rows(self) -> int:
        """Rows in all."""
    @property
    def about(self) -> str:
        """Summary of the import, as JSON."""
    @property
    def counts(self) -> tuple[int, int, int, int, int, str]:
        """Tokens, those trained on, tokens of the longest row, vocabulary, bytes of an id, fingerprint."""
    def length(self, row: int) -> int:
        """Tokens of a row. Errors: ValueError, CorruptError."""
    def read(self, row: int, ids: NDArray[np.int32], trained: _Bytes) -> None:
        """Shape: int32 [tokens], uint8 [tokens]. Errors: ValueError, CorruptError naming the row, OSError."""
    def verify(self) -> None:
        """Errors: CorruptError, OSError."""

class TokenBatches:
    """Sequences of fixed length; see plimsoll.TokenBatches."""

    @staticmethod
    def open(set: TokenSet, batch_size: int, sequence_length: int, packing: bool, window: int, shuffle: bool,
             seed: int, pad_id: int, held_out: int, only_held_out: bool, place: tuple[int, int, int]) -> TokenBatches:
        """Errors: ValueError naming the option."""
    def next(self, input_ids: _Ids, labels: _Ids, position_ids: _Ids, documents: _Ids
             ) -> tuple[tuple[int, int, int], int, int, int, int, int, bool]:
        """Place, sequences, tokens, trained, rows, left out, whether it ends the epoch."""
    def seek(self, place: tuple[int, int, int]) -> None:
        """Errors: ValueError for a place that is none."""
    @property
    def place(self) -> tuple[int, int, int]:
        """Epoch, position, sequence."""
    def close(self) -> None:
        """Lets go of the set."""

class TokenWriter:
    """Makes a token set; include/plimsoll/token_set.h has the contract."""

    @staticmethod
    def open(governor: Governor, path: str, vocabulary: int, fingerprint: str, row_tokens_max: int,
             rebuild: bool) -> TokenWriter:
        """Errors: ValueError, BudgetExceeded, OSError."""
    @property
    def whole(self) -> bool:
        """The set is there already."""
    @property
    def position(self) -> str:
        """Position given to the last commit."""
    @property
    def rows(self) -> int:
        """Rows written."""
    def append(self, ids: NDArray[np.uint32], trained: list[tuple[int, int]]) -> None:
        """Shape: uint32 [tokens]. Errors: ValueError, OSError."""
    def end_row(self) -> tuple[int, int, bool]:
        """Tokens, those trained on, whether it was cut."""
    def drop_row(self) -> None:
        """Forgets the row under way."""
    def append_rows(self, from_: TokenSet, begin: int, end: int) -> int:
        """Adds rows of another set; returns their bytes. Errors: ValueError, CorruptError, BudgetExceeded, OSError."""
    def commit(self, position: str) -> None:
        """Errors: OSError."""
    def finish(self, about: str, fingerprint: str) -> None:
        """Errors: ValueError, OSError."""
    def close(self) -> None:
        """Leaves work under way as the last commit has it."""

class TokenSpans:
    """Which tokens have a character of a text's spans; src/data/token_spans.h has the contract."""

    def __init__(self, tokens: list[bytes], trimmed: bool, prefixed: bool) -> None: ...
    def find(self, ids: NDArray[np.uint32], text: str, characters: list[tuple[int, int]]
             ) -> list[tuple[int, int]] | None:
        """Tokens; None where the ids are not those of the text. Shape: uint32 [tokens]."""

def has_any(text: str, marked: bytes) -> bool:
    """Whether a text has a character whose byte is not 0; those that have no byte are marked, too."""

image_pixels_max: int
"""Pixels of an image at most, by default."""

def image_info(encoded: _Bytes, pixels_max: int) -> tuple[str, int, int, int, int]:
    """Format, width, height (upright), orientation, bytes that decoding takes beside the pixels.

    Errors: ValueError, CorruptError.
    """
def decode_image(encoded: _Bytes, pixels_max: int, pixels: _Bytes) -> None:
    """Shape: pixels [height * width * 3]. Errors: ValueError, CorruptError."""
def resize_image(pixels: _Bytes, from_: tuple[int, int], out: _Bytes, to: tuple[int, int], filter: int) -> None:
    """Shape: pixels, out [height * width * 3]; sizes as width and height. Errors: ValueError."""
def scale_image(pixels: _Bytes, table: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Shape: pixels [n * 3], table [3 * 256], out [3 * n]. Errors: ValueError."""

class ImageSet:
    """Rows of messages and images; see plimsoll.ImageSet."""

    @staticmethod
    def open(path: str) -> ImageSet:
        """Errors: NotFoundError, CorruptError, OSError."""
    def close(self) -> None:
        """Lets go of the file."""
    @property
    def rows(self) -> int:
        """Rows in all."""
    @property
    def about(self) -> str:
        """Summary of the import, as JSON."""
    @property
    def counts(self) -> tuple[int, int, int, int, str]:
        """Images, their bytes encoded and decoded, bytes beside the pixels of one while it is decoded, fingerprint."""
    def row(self, row: int) -> tuple[str, list[tuple[int, int, int, int, int]]]:
        """Messages as JSON; of each image offset, bytes, CRC-32C, width, height. Errors: ValueError, CorruptError."""
    def read(self, place: tuple[int, int, int, int, int], out: _Bytes) -> None:
        """Shape: uint8 [bytes]. Errors: ValueError, CorruptError, OSError."""
    def verify(self) -> None:
        """Errors: CorruptError, OSError."""

class ImageWriter:
    """Makes an image set; include/plimsoll/image_set.h has the contract."""

    @staticmethod
    def open(governor: Governor, path: str, fingerprint: str, pixels_max: int, rebuild: bool) -> ImageWriter:
        """Errors: ValueError, BudgetExceeded, OSError."""
    @property
    def whole(self) -> bool:
        """The set is there already."""
    @property
    def position(self) -> str:
        """Position given to the last commit."""
    @property
    def rows(self) -> int:
        """Rows written."""
    @property
    def images(self) -> int:
        """Images written."""
    def append(self, messages: str, images: list[bytes]) -> None:
        """Decodes the images, and adds the row. Errors: ValueError, CorruptError, BudgetExceeded, OSError."""
    def append_rows(self, from_: ImageSet, begin: int, end: int) -> int:
        """Adds rows of another set; returns their bytes. Errors: ValueError, CorruptError, BudgetExceeded, OSError."""
    def commit(self, position: str) -> None:
        """Errors: OSError."""
    def finish(self, about: str, fingerprint: str) -> None:
        """Errors: ValueError, OSError."""
    def close(self) -> None:
        """Leaves work under way as the last commit has it."""

class ImageBatches:
    """Rows with decoded images; see plimsoll.ImageBatches."""

    @staticmethod
    def open(governor: Governor, set: ImageSet, batch_size: int, shuffle: bool, seed: int, held_out: int,
             only_held_out: bool, threads: int, queue_bytes: int, place: tuple[int, int]) -> ImageBatches:
        """Errors: ValueError naming the option, BudgetExceeded."""
    def next(self) -> tuple[tuple[int, int], list[tuple[int, str, list[NDArray[np.uint8]]]], bool]:
        """Place; row, messages as JSON, and pixels [height, width, 3] of each; whether it ends the epoch."""
    def seek(self, place: tuple[int, int]) -> None:
        """Errors: ValueError for a place that is none."""
    @property
    def place(self) -> tuple[int, int]:
        """Epoch and position."""
    def close(self) -> None:
        """Ends the threads, and lets go of the set."""

file_head: int

def file_sort(head: bytes) -> tuple[str, str, str]:
    """Kind of a file by its first file_head bytes (src/data/file_kind.h), its name, and what to do about it."""

class Unpacked:
    """The bytes of a file, unpacked where it is packed by gzip or zstd."""

    @staticmethod
    def open(governor: Governor, path: str) -> Unpacked:
        """Errors: NotFoundError, OSError, BudgetExceeded."""
    def read(self, size: int) -> bytes:
        """At most so many; none at the end. Errors: CorruptError, ValueError, OSError."""
    @property
    def position(self) -> int:
        """Bytes of the file read so far, packed."""
    def close(self) -> None:
        """Lets go of the file."""

class Lines:
    """Lines of files, or of a feed in their place; src/data/chat_lines.h has the contract."""

    @staticmethod
    def open(governor: Governor, files: list[str], line_bytes_max: int, feed: Any) -> Lines:
        """feed: a RowFeed (_row_files.py), or None. Errors: BudgetExceeded."""
    def next(self) -> tuple[int, int, bytes | None] | None:
        """File, line, and its bytes: None for one that is too long. None at the end. Errors: CorruptError, OSError."""
    def name_of(self, file: int, line: int, brief: bool) -> str:
        """"rows.jsonl:7", or "rows.json[6]" of an array."""
    @property
    def place(self) -> tuple[int, int, int]:
        """File, line and byte where the next line begins."""
    @property
    def sums(self) -> list[tuple[int, int]]:
        """Bytes and CRC-32C of what was read of each file, unpacked."""
    @property
    def done(self) -> int:
        """Bytes read, as they lie on disk; of a feed, lines."""
    def go_to(self, place: tuple[int, int, int], sums: list[tuple[int, int]]) -> bool:
        """False where what was read has changed. Errors: ValueError, OSError."""
    def close(self) -> None:
        """Lets go of the files."""

class ChatReader:
    """Files of chats as texts to tokenize; src/data/chat_reader.h has the contract."""

    @staticmethod
    def open(governor: Governor, files: list[str], training: int, line_bytes_max: int, text_bytes_max: int,
             errors_max: int, feed: Any, ignored: list[str], ignored_of_messages: list[str]) -> ChatReader:
        """Errors: BudgetExceeded."""
    def set_pieces(self, gaps: list[tuple[str, tuple[str, int, int, int]]], stripped: list[str],
                   triggers: list[str]) -> None:
        """The compiled template."""
    def next(self, bytes: int, sample: int
             ) -> list[tuple[int, int, int, str, list[tuple[int, int]], bool, list[tuple[str, str]], str]]:
        """Kind, file, line, text, trained characters, whether it ends its row, messages, what is odd (of a bad line)."""
    def note(self, key: str, file: int, line: int, detail: str) -> None:
        """Errors: ValueError naming file and line, past errors_max."""
    def count_row(self, used: int, refused: int, counted: list[tuple[str, int]]) -> None:
        """The keys of a row that was read in Python."""
    def go_on(self, state: str) -> bool:
        """False where what was read has changed. Errors: ValueError, OSError."""
    def skip_rest(self) -> None:
        """Reads the rest, no rows. Errors: CorruptError, OSError."""
    def name_of(self, file: int, line: int) -> str:
        """"chats.jsonl:7", or "chats.json[6]" of an array."""
    @property
    def state(self) -> str:
        """For go_on()."""
    @property
    def report(self) -> str:
        """Lines, rows and what was odd, as JSON."""
    @property
    def between_rows(self) -> bool:
        """No row is under way."""
    @property
    def done(self) -> int:
        """Bytes of the files read, as they lie on disk; lines of a feed."""
    @property
    def sums(self) -> list[tuple[int, int]]:
        """Bytes and CRC-32C of what was read of each file, unpacked."""
    def close(self) -> None:
        """Lets go of the files."""

def chat_gap_key(before: str, behind: str, k: int, count: int) -> str:
    """The key of a gap of a compiled template."""
class WorkMeter:
    """Progress of work that has an amount, on standard error."""

    def __init__(self, label: str) -> None: ...
    def update(self, done: int, total: int) -> None:
        """A bar on a terminal; elsewhere a line every ten seconds."""

def chat_roles() -> list[tuple[str, str]]:
    """Names of roles as rows have them, and as templates do."""
def chat_oddities() -> list[tuple[str, bool, str]]:
    """Keys of what is counted as odd, as a report has them in order; whether it is an error; in words."""

def run_program(arguments: list[bytes]) -> int:
    """The program `plimsoll` without what needs torch. Returns its exit status."""
class DeviceStatus:
    """A device's line of status.json. peak_bytes: the most that context and reserved memory were together."""

    def __init__(self, name: str, kind: str, limit_bytes: int, context_bytes: int, allocated_bytes: int, reserved_bytes: int,
                 peak_bytes: int) -> None: ...

class RunStatus:
    """Content of status.json; bytes are filled in by read_memory()."""

    status: str
    step: int
    steps_total: int
    epoch: int
    epochs: int
    loss: float
    rows_per_second: float
    seconds: float
    seconds_left: float
    devices: list[DeviceStatus]
    hit_rate: float
    checkpoint_step: int
    message: str
    cause: str
    def __init__(self) -> None: ...
    def read_memory(self, governor: Governor) -> None:
        """From the ledger and /proc."""

class RecipeField:
    """An option of a recipe that is written in Python."""

    def __init__(self, name: str, kind: str, identity: bool, preset: bool | int | float | str, help: str,
                 least: float, most: float, choices: str) -> None:
        """kind: "text", "path", "size", "integer", "real", "switch" or "choice"."""

def add_recipe(name: str, about: str, unit: str, examples: str, data_help: str, data_advice: str,
               data_or: str, plan_example: str, fields: Sequence[RecipeField], work: Any) -> None:
    """`work` has train(), and as `evaluates`, `plans` and `exports` say evaluate(), plan() and export(); see
    plimsoll.recipes. Errors: ValueError; BudgetExceeded for more than 64 recipes."""
def option_literal(recipe: str, key: str, text: str, source: str) -> str:
    """The value of an option of `recipe` as run.toml has it. Errors: ValueError naming `source` and the key."""

class RunFolder:
    """The files of a run and its lock, until close(). A forked child closes its copy."""

    @staticmethod
    def create(root: str, run_toml: str) -> RunFolder:
        """Errors: ValueError (it is a run, is not empty, another process makes it); OSError."""
    @staticmethod
    def open(root: str) -> RunFolder:
        """Errors: NotFoundError; ValueError (another process trains in it)."""
    @staticmethod
    def is_run(root: str) -> bool:
        """Whether there is a run.toml."""
    def check_identity(self, identity: dict[str, str], accepted: list[str]) -> None:
        """Writes it, or compares. Errors: ValueError naming what differs and is not accepted."""
    def write_config(self, run_toml: str) -> None:
        """Replaces run.toml."""
    def event(self, name: str, values: dict[str, Any]) -> None:
        """A line of events.jsonl. Errors: OSError."""
    def write_status(self, status: RunStatus, force: bool = False) -> None:
        """Replaces status.json, at most every 0.5 s unless `force`. Left out where the disk is full, as are events."""
    @property
    def waits_for_room(self) -> bool:
        """Whether a write of its checkpoints or tables waits, as the disk is full."""
    def wait_for_room(self) -> bool:
        """Waits while one does. False: it was given up, as the run is asked to stop."""
    def published_step(self) -> int | None:
        """Errors: CorruptError, OSError."""
    def checkpoint_path(self, step: int) -> str:
        """The folder of a step."""
    def publish(self, step: int, keep: int) -> None:
        """Names the step in the manifest, then deletes older checkpoints. Errors: OSError."""
    def discard_unpublished(self) -> None:
        """Deletes checkpoints of steps that were not published."""
    def discard_rows(self) -> None:
        """Deletes the tables."""
    def record(self, governor: Governor) -> None:
        """From here on a thread keeps looks at the memory, in looks.bin."""
    def end_record(self) -> None:
        """Takes a last look, and ends the thread."""
    def phase(self, name: str) -> None:
        """Names the phase of the loop from now on, for the looks; "": it trains."""
    def abandon(self) -> None:
        """Removes a folder that create() made."""
    def close(self) -> None:
        """Ends the lock."""

class RunRoom:
    """While it is there, writes below the run in `root` wait where the disk is full: for a rank that has no RunFolder."""

    def __init__(self, root: str) -> None: ...
    @property
    def waits_for_room(self) -> bool:
        """Returns as RunFolder's."""
    def wait_for_room(self) -> bool:
        """Returns as RunFolder's."""

class RoomNeed:
    """A write that may wait for room, until close()."""

    def __init__(self, path: str) -> None: ...
    def wait(self, bytes: int) -> bool:
        """After it failed for want of room. True: try again. False: no run waits there, or it is asked to stop."""
    def close(self) -> None:
        """It was made, or has failed."""

class LimitRequests:
    """A thread that obeys `plimsoll limit`."""

    def __init__(self, governor: Governor, run: str) -> None: ...
    def take(self) -> list[tuple[str, LimitChange | None, str, bool]]:
        """Returns requests: (the size asked for, what has changed, why nothing has, whether it is of devices, which the caller serves)."""
    def close(self) -> None:
        """Ends the thread."""

class StopSignals:
    """SIGINT, SIGTERM and SIGUSR1 set a flag while this is alive; a second SIGINT ends the process."""

    def __init__(self, keeps: bool = False) -> None:
        """keeps: what another one has seen still counts."""
    @staticmethod
    def pass_on() -> None:
        """Hands the signal on to the handlers that are there again."""

class RunControl:
    """Request to a run, by signal or file."""

    def __init__(self, run: str) -> None: ...
    def poll(self) -> str:
        """"", "stop" or "pause"."""
    @property
    def reason(self) -> str:
        """Names who asked for the stop."""

class Metrics:
    """Scalars for TensorBoard."""

    @staticmethod
    def open(folder: str, resumed_step: int) -> Metrics:
        """Errors: OSError."""
    def scalar(self, tag: str, value: float, step: int) -> None:
        """A failure waits for flush()."""
    def flush(self) -> None:
        """Errors: OSError, the first since the last call."""

class Progress:
    """The bar, or lines, on stderr."""

    def __init__(self, quiet: bool) -> None: ...
    def update(self, status: RunStatus, epoch_fraction: float, force: bool = False) -> None:
        """Drops what comes too fast."""
    def text(self, message: str) -> None:
        """Above the bar."""
    def clear(self) -> None:
        """Removes the bar."""

class RankRows:
    """Ids and rows behind them, in a rank's file. The place is kept until neither this nor any array of it is left."""

    @property
    def ids(self) -> NDArray[np.int64]:
        """Shape: int64 [count]."""
    @property
    def rows(self) -> NDArray[np.float32]:
        """Shape: float32 [count, dim]."""
    @property
    def begin(self) -> int:
        """Where it is, for others' rows()."""

class RankMemory:
    """Memory that the ranks of a machine exchange through, as one rank sees it, from open() to close().

    Errors: ValueError after close(), and in a forked child.
    """

    ROOM_BYTES: ClassVar[int]

    def __init__(self, rank: int, count: int, word_bytes: int) -> None:
        """Makes this rank's. Errors: OSError where the system has no memory files."""
    @property
    def address(self) -> str:
        """For the others' open()."""
    def open(self, addresses: Sequence[str]) -> None:
        """Opens the memory of all ranks in their order, this one's too. Errors: OSError where another process's file may not be opened, or is
        another one."""
    def meet(self) -> None:
        """Waits until all ranks have come here, and have written what they wrote before. Errors: OSError where one has left, or
        ended, or has not come for half an hour; what a signal's handler raises."""
    def word(self, own: _Bytes | bytes | memoryview) -> bytes:
        """Exchanges words: returns those of all ranks, each `word_bytes`, in their order. Errors: as meet()."""
    def grow_room(self, bytes: int, governor: Governor | None) -> None:
        """Leases that much of the own room. Errors: BudgetExceeded; then unchanged."""
    def room(self, rank: int) -> _Bytes:
        """A rank's, which has grown it. Shape: uint8 [ROOM_BYTES]. Errors: OSError."""
    def take(self, count: int, dim: int, governor: Governor | None) -> RankRows:
        """Room for so many rows of this rank's. Requires: no other rank is at its rows. Errors: BudgetExceeded; OSError."""
    def rows(self, rank: int, begin: int, count: int, dim: int) -> RankRows:
        """Returns rows that a rank has taken. Errors: OSError; ValueError where it has no such place."""
    def close(self) -> None:
        """Leaves the others; arrays stay. A second close does nothing."""

def instruction_set() -> str:
    """The processor's, as far as kernels choose by it."""
def run_status(run: str) -> str:
    """JSON of what a run is doing. Errors: NotFoundError, CorruptError."""
def run_why(run: str) -> str:
    """JSON of how a run ended. Errors: NotFoundError, CorruptError."""
def run_report(run: str, out: str) -> str:
    """Writes the page; "" is RUN/report.html. Returns where it is. Errors: NotFoundError, CorruptError, OSError."""
def run_trace(run: str, out: str) -> None:
    """Writes the looks as counters of a trace. Errors: as run_report()."""
def run_stop(run: str) -> bool:
    """False: no process trains there. Errors: NotFoundError, OSError."""
def run_pause(run: str) -> bool:
    """Returns as run_stop()."""
def run_continue(run: str) -> bool:
    """Returns as run_stop()."""
def run_limit(run: str, size: str) -> bool:
    """Returns as run_stop(). Errors: ValueError for a size that cannot be read."""
def store_directory(path: str) -> str:
    """The folder of a run's rows; any other path as it is."""
def store_verify(directory: str) -> None:
    """Errors: CorruptError naming file and page; NotFoundError; OSError."""
def store_export(directory: str, out: str, format: str, column: str, since: int, step: int,
                 memory_limit: str) -> int:
    """Returns the number of rows. Errors: ValueError, NotFoundError, OSError."""
def store_import(files: list[str], out: str, format: str, optimizer: str, dtype: str,
                 number_rows: bool, memory_limit: str) -> int:
    """Returns the number of rows. Errors: ValueError, OSError."""
def store_compact(directory: str, rows_max: int, memory_limit: str) -> tuple[int, int]:
    """Returns the bytes before and after. Errors: ValueError, NotFoundError, OSError."""

NOBODY_CREATE_GRAPH: str
"""Finding.holder of what backward(create_graph=True) leaves in circles that Python does not see."""
EVALUATION_ADVICE: str
"""Advice where an evaluation holds the memory."""

class Finding:
    """Finding of a watch about growth; str() is one line."""

    @property
    def kind(self) -> str:
        """ "too short", "plateau", "warm-up", "saturating", "step", "sawtooth", "leak", "uncollected garbage",
        "retention", "cache"."""
    @property
    def owner(self) -> str:
        """Whose course that is: "tensors", "leased", "python", "native", "shared", "children", …"""
    @property
    def bytes_per_step(self) -> float:
        """Median slope; of a leak, how much it grows; while it is too early, how fast something rose so far."""
    @property
    def bytes_per_second(self) -> float:
        """Growth of a leak per second, by the time that its steps took; else 0."""
    @property
    def grown_bytes(self) -> int:
        """How much it grew while it was judged; of a warm-up, before."""
    @property
    def bound_bytes(self) -> int:
        """Where what saturates is expected to end; else 0."""
    @property
    def windows_seen(self) -> int:
        """While it is too early: windows that are over, of `windows_wanted`."""
    @property
    def windows_wanted(self) -> int:
        """While it is too early: windows that a verdict takes, 7 or more."""
    @property
    def steps_wanted(self) -> float:
        """While it is too early: steps until then, as looks were made so far."""
    @property
    def seconds_wanted(self) -> float:
        """While it is too early: seconds until then."""
    @property
    def phase(self) -> str:
        """In which most of a leak came; "" where in none above others."""
    @property
    def process(self) -> str:
        """ "python 4711": of children that leak, the one that grew most; else ""."""
    @property
    def site(self) -> str:
        """ "path/to/file.py:123", the line that allocates most of what grows; "" where that is not known: in children,
        in threads that run no Python, of what ctypes calls, and before the search has ended."""
    @property
    def sites(self) -> list[tuple[str, int]]:
        """At most 8 such lines, each with the bytes of it that survived while it was searched; most first."""
    @property
    def holder(self) -> str:
        """The holder whose letting go frees the bytes: "list `kept` in module __main__", "attribute `history` of Trainer",
        "autograd graph of Tensor `meter.sum` in main()", "closure of …", "thread-local: …", "exception traceback: …",
        NOBODY_CREATE_GRAPH; "" where nobody was found."""
    @property
    def trimmed_bytes(self) -> int | None:
        """For retention, the bytes that one malloc_trim() gave back to the system; None before it."""
    @property
    def seconds_left(self) -> float | None:
        """Until the nearest limit (the governor's, a cgroup's, the machine's) at this growth; None where nothing
        grows."""
    @property
    def advice(self) -> list[str]:
        """Steps to take, a line each; empty where nothing is to be done."""

class Watch:
    """Looks at this process and its children. Errors: ValueError in a forked child."""

    def __init__(self, window_steps: float) -> None:
        """Windows of so many steps."""
    def look(self, step: float, phase: str) -> bool:
        """Looks, where that keeps to 1 % of a core; says whether it did."""
    def look_as_phase_begins(self, step: float, before: str) -> bool:
        """Looks as look(), for the phase before it; where it did, look_as_phase_ends() does, too."""
    def look_as_phase_ends(self, step: float, phase: str) -> bool:
        """Looks as look(), for the phase that ends."""
    def verdict(self) -> Finding:
        """By what was seen so far."""
    def suspect(self) -> tuple[int, str, float]:
        """Windows that are over; the owner that has risen fastest in the newest half of them (four at least), or "";
        by how many bytes a step."""
    def retains(self) -> bool:
        """Whether what malloc() keeps rises so."""
    def tell(self, owner: str, sites: list[tuple[str, int]], holder: str, garbage: bool, bytes_per_step: float) -> None:
        """Adds a cause of that owner's growth to its Finding."""
    def tell_trimmed(self, bytes: int) -> None:
        """Adds the bytes that trim() returned."""
    def picture(self, limit_bytes: int) -> str:
        """HTML: who held how much, by steps; 0: no limit is drawn."""
    @property
    def processes(self) -> int:
        """The process and its descendants, at the last look."""
    @property
    def held_bytes(self) -> int:
        """Anonymous and shared memory of the process and its children, at the last look."""
    @property
    def owners(self) -> dict[str, int]:
        """The same by owner, files and page tables beside it; in bytes."""

def own_bytes(owner: str) -> int:
    """Bytes of an owner in this process now; for an owner that cannot be asked, all anonymous and shared memory."""

def trim() -> int:
    """malloc_trim(0), without Python's lock; returns by how much that lowered anonymous memory, in bytes."""

class Allocations:
    """Samples what this process allocates, until close(). Errors: ValueError while another does."""

    def __init__(self, mean_bytes: float, library_folders: list[str]) -> None:
        """One in so many bytes. Frames of files in these folders are passed over for the line of an allocation."""
    def show(self, of: str) -> None:
        """Samples "objects" (Python's, to 512 bytes), "tensors" (of the arena), "heap" (malloc()) or "maps" (mmap(),
        also in files), beside what was asked for before; again: in libraries that were loaded since."""
    def step(self, step: int) -> None:
        """Counts allocations from now on for that step."""
    def sites(self, from_step: int, to_step: int, most: int) -> list[tuple[str, int, int]]:
        """Returns live allocations of steps from_step to to_step - 1: line, bytes it stands for, samples; most bytes first."""
    def close(self) -> None:
        """Samples no more; a second close does nothing."""
    @property
    def mean_bytes(self) -> float:
        """It doubles where samples take more than 1/200 of the time, or there are more than 16,384."""
    @property
    def spent_seconds(self) -> float:
        """Seconds that sampling took, over all threads."""

class HolderSearch:
    """Looks for who holds what a line allocated, from roots on, a piece at a time."""

    def __init__(self, allocations: Allocations, site: str, from_step: int, to_step: int, roots: list[object],
                 later: list[object], skipped: list[object], tensor: type | None,
                 look_at: Callable[[object], int] | None) -> None:
        """`later`: gone into only when all else was; `skipped`: never. Of each `tensor` look_at() gives the address of
        its memory, negative where a live graph hangs on it, 0 for none."""
    def advance(self, seconds: float) -> bool:
        """Goes on for about so long; True when it has ended."""
    def weigh(self, seconds: float) -> bool:
        """When it has ended: goes through the containers it met again, for about so long, to see which have grown; True
        when through all."""
    def grown(self) -> list[tuple[int, list[object]]]:
        """By how many elements (of an io.BytesIO: bytes) since they were met, and the way up; most first, 16 at most."""
    def release(self, seconds: float) -> bool:
        """Lets go of the containers it kept alive, for about so long; True when of all."""
    def holder(self) -> list[object]:
        """From the container that most of what was found lies below, up to a root; [] for none."""
    def graphs(self, first: int) -> list[tuple[int, Any]]:
        """The tensors with live graphs that it met, from the `first` on: the number of each, and the tensor."""
    def mark_graph(self, node: int, addresses: list[int]) -> None:
        """Memory at these addresses is kept by the graph of the tensor of that number."""
    @property
    def enough(self) -> bool:
        """Whether so much was found that it has ended."""
    def ways(self, most: int) -> list[list[object]]:
        """From the container of each piece that was found, up to a root."""
    @property
    def found(self) -> tuple[int, int]:
        """Pieces found, and looked for."""
    @property
    def visited(self) -> int:
        """Containers met: 1,048,576 at most."""
