# SPDX-License-Identifier: Apache-2.0
"""import_can(), GraphSet and GraphBatches: sets of many small graphs, and batches of them.

Threads: any number of threads may read a GraphSet; a GraphBatches' calls run one at a time.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..core._arrays import byte_size, ids_in, not_pickled
from ..memory._buffers import Buffer
from ..memory._memory import Governor, with_governor

if TYPE_CHECKING:
    import torch

_FEATURES = 11


@with_governor
def import_can(inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
               out: str | os.PathLike[str], *, window: int = 100, stride: int = 100,
               validation: float = 0.2, seed: int = 42,
               columns: Sequence[str] = ("timestamp", "arbitration_id", "data_field", "attack"),
               vocabulary: str | os.PathLike[str] | None = None, normal_ids: bool = False,
               dialect: str = "auto", exclude: Sequence[str] = ("suppress", "masquerade"), ids_max: int = 65536,
               skip_bad: bool = False, rebuild: bool = False, threads: int = 1,
               chunk: int | str = "1MiB", governor: Governor | None = None) -> dict[str, Any]:
    """Makes a graph set in `out` from CAN frames in CSV files or logs, as `plimsoll import can` does.

    inputs:     files and folders (.csv and .log, .gz or not, and .txt files that hold frames). Files named test_*, or in a
                folder so named, are for testing; all others are for training.
    window:     number of frames in a graph. stride: number of frames from the first of one graph to the first of the next.
    validation: share of the training graphs held out, chosen by `seed`.
    columns:    the header's names of time, id, payload and label; "-" for a time or a label that the files lack.
                Frames without a label are taken as normal, and counted.
    dialect:    the lines' format: "csv" (a header, or these four columns), "decimal" (the same, with ids and bytes in
                decimal), "hcrl" (time, id, DLC, bytes, and R or T for injected; or "Timestamp: … ID: … DLC: …"),
                "candump" (logs of can-utils), "road" (the same, with labels of the capture_metadata.json beside them).
                "auto": the first line of each file decides.
    vocabulary: a graph set whose ids are used; by default the ids of the training files. All other
                ids share one index, the last.
    normal_ids: takes only the ids of normal frames from the training files. An attack with thousands of
                made-up ids then adds no rows to a model's table.
    exclude:    files with any of these words in their name are left out; () takes all.
    skip_bad:   skips and counts rows that cannot be read, instead of refusing the file.
    rebuild:    makes the set even if neither inputs nor options have changed since `out` was made.
    threads, chunk: change only the speed.
    governor:   the governor whose limit applies; by default a new one for the time of the call.

    Returns plimsoll.info(out), and "reused": True when `out` was left unchanged.
    Errors: ValueError naming file and line, or the option; NotFoundError; CorruptError for a
            damaged gzip; BudgetExceeded; OSError. After an error an older set is unchanged.
    """
    assert governor is not None  # By with_governor.
    given = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    reused = _core.import_can(
        governor._core, [os.fspath(one) for one in given], os.fspath(out), window, stride,
        validation, seed, list(columns), "" if vocabulary is None else os.fspath(vocabulary),
        normal_ids, list(exclude), ids_max, skip_bad, dialect, rebuild, threads, byte_size(chunk, "chunk"))
    return {**json.loads(_core.describe(os.fspath(out))), "reused": reused}


def import_graphs(inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
                  out: str | os.PathLike[str], *, window: int = 100, validation: float = 0.2,
                  seed: int = 42, vocabulary: str | os.PathLike[str] | None = None,
                  rebuild: bool = False, governor: Governor | None = None) -> dict[str, Any]:
    """Makes a graph set in `out` from graphs that the original program saved.

    inputs: files processed_graphs.pt, each with the id_mapping.pkl that was saved beside it. They are
            read as plain values: no code in them is run, and torch_geometric is not needed.
    window: number of frames in a graph when the files were made; it bounds the graph's nodes and edges.
    The other arguments are those of import_can().

    Returns plimsoll.info(out), and "reused".
    Errors: CorruptError naming the damage, or a class that such files do not hold; ValueError naming
            the graph; NotFoundError; BudgetExceeded; OSError.
    """
    given = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    for one in given:
        if os.path.splitext(os.fspath(one))[1] != ".pt":
            raise ValueError(f"inputs: {os.fspath(one)} is no .pt; import_can() reads CSV")
    return import_can(given, out, window=window, validation=validation, seed=seed,
                      vocabulary=vocabulary, exclude=(), rebuild=rebuild, governor=governor)


class GraphBatch:
    """A batch of graphs joined into one: NumPy arrays that you may keep, and their tensors.

    Shape: x float32 [nodes, 11]; edge_index int64 [2, edges], nodes numbered through the batch;
           edge_attr float32 [edges, 11]; batch int64 [nodes], the index of each node's graph in the batch;
           y int64 [graphs], 1 for a graph with any attack; graphs int64 [graphs], each graph's index in the set.
    """

    __slots__ = ("x", "edge_index", "edge_attr", "batch", "y", "graphs", "epoch", "position",
                 "ends_epoch", "_buffers")

    def __init__(self, governor: Governor, graphs: int, nodes: int, edges: int) -> None:
        self._buffers = {
            "x": Buffer(governor, (nodes, _FEATURES), "float32"),
            "edge_index": Buffer(governor, (2, edges), "int64"),
            "edge_attr": Buffer(governor, (edges, _FEATURES), "float32"),
            "batch": Buffer(governor, (nodes,), "int64"),
            "y": Buffer(governor, (graphs,), "int64"),
        }
        self.x, self.edge_index, self.edge_attr, self.batch, self.y = (
            buffer.array for buffer in self._buffers.values())
        self.graphs = np.empty(graphs, np.int64)
        self.epoch, self.position, self.ends_epoch = 0, 0, False

    def _flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return (self.x.reshape(-1), self.edge_index.reshape(-1), self.edge_attr.reshape(-1),
                self.batch, self.y)

    def tensor(self, name: str) -> torch.Tensor:
        """Returns x, edge_index, edge_attr, batch or y as a tensor over the same bytes.

        Errors: KeyError; ImportError without torch.
        """
        return self._buffers[name].tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by name: torch_geometric.data.Data(**batch.tensors()) makes a batch for that library."""
        return {name: buffer.tensor for name, buffer in self._buffers.items()}

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return (f"<GraphBatch of {len(self)} graphs: {len(self.x)} nodes, "
                f"{self.edge_index.shape[1]} edges>")


class GraphSet:
    """Many small graphs in one file (docs/formats/graph_set.md). Each is read when it is used."""

    def __init__(self, governor: Governor, core: _core.GraphSet, path: str) -> None:
        """Takes what open() made; call open() instead."""
        self._governor = governor
        self._core = core
        self.path = path
        governor._adopt(self)

    __reduce_ex__ = not_pickled

    @classmethod
    def open(cls, governor: Governor, directory: str | os.PathLike[str], *,
             cache_bytes: int | str | None = None) -> GraphSet:
        """Opens the set in `directory`.

        cache_bytes: the most bytes that graphs may take in memory, such as "1GiB"; 0 reads each graph from disk. By
                default all stay in memory when they fit in half of the governor's free bytes.
        Errors: NotFoundError, CorruptError, BudgetExceeded, OSError.
        """
        path = os.fspath(directory)
        core = _core.GraphSet.open(governor._core, path,
                                   -1 if cache_bytes is None else byte_size(cache_bytes, "cache_bytes"))
        return cls(governor, core, path)

    @property
    def info(self) -> dict[str, Any]:
        """Description of the set, as plimsoll.info() returns it."""
        return json.loads(_core.describe(self.path))

    @property
    def cached(self) -> bool:
        """Whether the graphs stay in memory once they are read."""
        return self._core.cached

    @property
    def table_rows(self) -> int:
        """Number of rows of an embedding table over x[:, 0]: one per id, and one for all other ids."""
        return self._core.ids + 1

    @property
    def vocabulary(self) -> np.ndarray:
        """Arbitration ids, ascending: an id's position is its index in x[:, 0]. Shape: int64 [ids]."""
        out = np.empty(self._core.ids, np.int64)
        self._core.vocabulary(out)
        return out

    def split(self, name: str) -> np.ndarray:
        """Returns the indices of the graphs of "train", "validation" or "test", ascending. Errors: ValueError."""
        out = np.empty(self._core.split_size(name), np.int64)
        self._core.split(name, out)
        return out

    def describe(self, graphs: Any = None) -> dict[str, np.ndarray]:
        """Returns the number of nodes and edges, the label and the file of each graph; of all graphs by default.

        Shape:  int64 [graphs] each; "file" is an index into info["files"].
        Errors: ValueError for a graph that is not there.
        """
        which = np.arange(len(self), dtype=np.int64) if graphs is None else ids_in(graphs, "graphs")
        out = {name: np.empty(len(which), np.int64) for name in ("nodes", "edges", "y", "file")}
        self._core.describe(which, *out.values())
        return out

    def read(self, graphs: Any) -> GraphBatch:
        """Returns these graphs, in this order, as one batch.

        Errors: ValueError for a graph that is not there; CorruptError naming the graph;
                BudgetExceeded; OSError.
        """
        which = ids_in(graphs, "graphs")
        sizes = self.describe(which)
        batch = GraphBatch(self._governor, len(which), int(sizes["nodes"].sum()),
                           int(sizes["edges"].sum()))
        self._core.gather(which, *batch._flat())
        batch.graphs[:] = which
        return batch

    def batches(self, split: str = "train", *, graphs: Any = None, batch_graphs: int = 256,
                nodes_max: int = 0, edges_max: int = 0, bytes_max: int | str = 0,
                min_steps: int = 0, shuffle: bool = True, seed: int = 0, epoch: int = 0,
                position: int = 0) -> GraphBatches:
        """Returns batches of a split, or of `graphs`, with every graph exactly once per epoch.

        batch_graphs, nodes_max, edges_max, bytes_max: the most that a batch may have; 0 is no bound.
        min_steps: the least number of batches per epoch.
        Errors:    ValueError naming the option, also when one graph alone exceeds a bound.
        """
        members = None if graphs is None else ids_in(graphs, "graphs")
        if members is not None and len(members) == 0:
            raise ValueError("graphs: there are none; leave it out for those of the split")
        core = _core.GraphBatches.open(
            self._core, split, members, batch_graphs, nodes_max, edges_max,
            byte_size(bytes_max, "bytes_max"), min_steps, shuffle, seed, epoch, position)
        return GraphBatches(self._governor, core)

    def verify(self) -> None:
        """Reads everything and compares every checksum. Errors: CorruptError, OSError."""
        self._core.verify()

    def close(self) -> None:
        """Closes the set. Open GraphBatches keep it until they are closed, too."""
        self._core.close()

    def __len__(self) -> int:
        return self._core.graphs

    def __getitem__(self, graph: int) -> GraphBatch:
        """Returns one graph, as a batch of one."""
        if not 0 <= graph < len(self):
            raise IndexError(f"graph {graph} of {len(self)}")
        return self.read([graph])

    def __enter__(self) -> GraphSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GraphBatches:
    """Batches of a GraphSet in a seeded order; made by GraphSet.batches()."""

    def __init__(self, governor: Governor, core: _core.GraphBatches) -> None:
        """Takes what GraphSet.batches() made; call that instead."""
        self._governor = governor
        self._core = core
        governor._adopt(self)

    __reduce_ex__ = not_pickled

    def next(self) -> GraphBatch:
        """Returns the next batch. Epochs follow one another without end. Errors: those of GraphSet.read()."""
        batch = GraphBatch(self._governor, *self._core.peek())
        batch.epoch, batch.position, batch.ends_epoch = self._core.next(*batch._flat(),
                                                                        batch.graphs)
        return batch

    def __iter__(self) -> Iterator[GraphBatch]:
        """Yields the remaining batches of the current epoch."""
        while True:
            batch = self.next()
            yield batch
            if batch.ends_epoch:
                return

    @property
    def state(self) -> tuple[int, int]:
        """The position for seek(): (epoch, number of its graphs already returned)."""
        return self._core.state

    def seek(self, epoch: int, position: int = 0) -> None:
        """Moves to a position in an epoch. Errors: ValueError for a position outside it."""
        self._core.seek(epoch, position)

    def steps(self, epoch: int = 0) -> int:
        """Returns the number of batches in an epoch. If batches are packed, it varies slightly between epochs."""
        return self._core.steps(epoch)

    @property
    def graphs(self) -> int:
        """Number of graphs in an epoch."""
        return self._core.graphs

    @property
    def most(self) -> tuple[int, int, int]:
        """Upper bounds of a batch: (graphs, nodes, edges)."""
        return self._core.most

    def close(self) -> None:
        """Ends the batches and releases the set."""
        self._core.close()
