# SPDX-License-Identifier: Apache-2.0
"""import_can(), GraphSet and GraphBatches: many small graphs, and batches of them.

Threads: a GraphSet may be read from any number of threads; a GraphBatches' calls queue up.
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
    """Makes a graph set in `out` of CAN frames in CSV or logs; what `plimsoll import can` does.

    inputs:     files and folders (.csv and .log, .gz or not, and .txt that hold frames). What is named test_*, or lies in a folder so
                named, is for testing; all else is for training.
    window:     frames of a graph; stride: from the first frame of one to that of the next.
    validation: share of the training graphs held out, chosen by `seed`.
    columns:    the header's names of time, id, payload and label; "-" for a time or a label that the files have not:
                such frames are taken as normal, and counted.
    dialect:    how lines are read: "csv" (a header, or these four columns), "decimal" (the same, with ids and bytes in
                decimal), "hcrl" (time, id, DLC, bytes, and R or T for injected; or "Timestamp: … ID: … DLC: …"),
                "candump" (logs of can-utils), "road" (the same, with labels of the capture_metadata.json beside them).
                "auto": as the first line of each file shows.
    vocabulary: a graph set whose ids are taken; by default those of the training files. All other
                ids share one index, the last.
    normal_ids: of the training files take only ids of frames that are no attack; an attack with
                thousands of made-up ids then costs every model no row for each.
    exclude:    files with any of these in their name are left out; () takes all.
    skip_bad:   leave out rows that cannot be read, and count them, instead of refusing the file.
    rebuild:    also when neither inputs nor options have changed since `out` was made.
    threads, chunk: change nothing but the speed.
    governor:   whose limit to keep; by default one of its own for the time of the call.

    Returns what plimsoll.info(out) says, and "reused": True when `out` was left as it was.
    Errors: ValueError naming file and line, or the option; NotFoundError; CorruptError for a
            damaged gzip; BudgetExceeded; OSError. After an error an older set is as it was.
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
    """Makes a graph set in `out` of graphs the original program saved.

    inputs: processed_graphs.pt, each with the id_mapping.pkl that was saved beside it. They are
            read as plain values: nothing in them is run, and torch_geometric is not needed.
    window: frames of a graph when they were made: bounds their nodes and edges.
    Otherwise as import_can().

    Returns what plimsoll.info(out) says, and "reused".
    Errors: CorruptError naming a class that such a file does not hold, or damage; ValueError naming
            the graph; NotFoundError; BudgetExceeded; OSError.
    """
    given = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    for one in given:
        if os.path.splitext(os.fspath(one))[1] != ".pt":
            raise ValueError(f"inputs: {os.fspath(one)} is no .pt; import_can() reads CSV")
    return import_can(given, out, window=window, validation=validation, seed=seed,
                      vocabulary=vocabulary, exclude=(), rebuild=rebuild, governor=governor)


class GraphBatch:
    """Some graphs as one: NumPy arrays that are yours to keep, and their tensors.

    Shape: x float32 [nodes, 11]; edge_index int64 [2, edges], numbered through the batch;
           edge_attr float32 [edges, 11]; batch int64 [nodes], the place of each node's graph;
           y int64 [graphs], 1 with any attack; graphs int64 [graphs], which they are.
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
        """One of x, edge_index, edge_attr, batch, y as a tensor over the same bytes.

        Errors: KeyError; ImportError without torch.
        """
        return self._buffers[name].tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them; torch_geometric.data.Data(**batch.tensors()) is a batch of its own."""
        return {name: buffer.tensor for name, buffer in self._buffers.items()}

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return (f"<GraphBatch of {len(self)} graphs: {len(self.x)} nodes, "
                f"{self.edge_index.shape[1]} edges>")


class GraphSet:
    """Many small graphs in one file (docs/formats/graph_set.md), read as they are wanted."""

    def __init__(self, governor: Governor, core: _core.GraphSet, path: str) -> None:
        """For open()."""
        self._governor = governor
        self._core = core
        self.path = path
        governor._adopt(self)

    __reduce_ex__ = not_pickled

    @classmethod
    def open(cls, governor: Governor, directory: str | os.PathLike[str], *,
             cache_bytes: int | str | None = None) -> GraphSet:
        """Opens the set in `directory`.

        cache_bytes: how many bytes the graphs may take in memory: "1GiB"; 0 reads each from disk. By
                default all stay in memory when half of what the governor has free is enough.
        Errors: NotFoundError, CorruptError, BudgetExceeded, OSError.
        """
        path = os.fspath(directory)
        core = _core.GraphSet.open(governor._core, path,
                                   -1 if cache_bytes is None else byte_size(cache_bytes, "cache_bytes"))
        return cls(governor, core, path)

    @property
    def info(self) -> dict[str, Any]:
        """What plimsoll.info() says of it."""
        return json.loads(_core.describe(self.path))

    @property
    def cached(self) -> bool:
        """True when the graphs stay in memory once read."""
        return self._core.cached

    @property
    def table_rows(self) -> int:
        """Rows of an embedding table over x[:, 0]: every id, and one for all others."""
        return self._core.ids + 1

    @property
    def vocabulary(self) -> np.ndarray:
        """Arbitration ids, ascending; the place of one is its index. Shape: int64 [ids]."""
        out = np.empty(self._core.ids, np.int64)
        self._core.vocabulary(out)
        return out

    def split(self, name: str) -> np.ndarray:
        """The graphs of "train", "validation" or "test", ascending. Errors: ValueError."""
        out = np.empty(self._core.split_size(name), np.int64)
        self._core.split(name, out)
        return out

    def describe(self, graphs: Any = None) -> dict[str, np.ndarray]:
        """Nodes, edges, label and file of each graph; of all by default.

        Shape:  int64 [graphs] each; "file" is a place in info["files"].
        Errors: ValueError for a graph that is not there.
        """
        which = np.arange(len(self), dtype=np.int64) if graphs is None else ids_in(graphs, "graphs")
        out = {name: np.empty(len(which), np.int64) for name in ("nodes", "edges", "y", "file")}
        self._core.describe(which, *out.values())
        return out

    def read(self, graphs: Any) -> GraphBatch:
        """These graphs, in this order, as one batch.

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
        """Batches of a split, or of `graphs`: every graph exactly once an epoch.

        batch_graphs, nodes_max, edges_max, bytes_max: what a batch has at most; 0 is no bound.
        min_steps: at least so many batches an epoch.
        Errors:    ValueError naming the option, also when one graph alone passes a bound.
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
        """Lets go of the set; batches under way keep it until they are closed too."""
        self._core.close()

    def __len__(self) -> int:
        return self._core.graphs

    def __getitem__(self, graph: int) -> GraphBatch:
        """One graph, as a batch of one."""
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
        """For GraphSet.batches()."""
        self._governor = governor
        self._core = core
        governor._adopt(self)

    __reduce_ex__ = not_pickled

    def next(self) -> GraphBatch:
        """The next batch; epochs follow one another without end. Errors: as GraphSet.read()."""
        batch = GraphBatch(self._governor, *self._core.peek())
        batch.epoch, batch.position, batch.ends_epoch = self._core.next(*batch._flat(),
                                                                        batch.graphs)
        return batch

    def __iter__(self) -> Iterator[GraphBatch]:
        """The rest of the epoch it is in."""
        while True:
            batch = self.next()
            yield batch
            if batch.ends_epoch:
                return

    @property
    def state(self) -> tuple[int, int]:
        """(epoch, graphs of it handed out): where seek() would go on."""
        return self._core.state

    def seek(self, epoch: int, position: int = 0) -> None:
        """Goes to a position of an epoch. Errors: ValueError outside it."""
        self._core.seek(epoch, position)

    def steps(self, epoch: int = 0) -> int:
        """Batches of an epoch. Packed batches differ a little from epoch to epoch."""
        return self._core.steps(epoch)

    @property
    def graphs(self) -> int:
        """Graphs of an epoch."""
        return self._core.graphs

    @property
    def most(self) -> tuple[int, int, int]:
        """Graphs, nodes and edges that no batch passes."""
        return self._core.most

    def close(self) -> None:
        """Lets go of the set."""
        self._core.close()
