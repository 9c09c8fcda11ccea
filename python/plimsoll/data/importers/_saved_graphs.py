# SPDX-License-Identifier: Apache-2.0
"""Graphs that the original program saved (processed_graphs.pt beside id_mapping.pkl), for the import of src/data/graph_import.cpp.

A processed_graphs.pt is a torch.save of a list of torch_geometric Data objects; id_mapping.pkl is a dict of arbitration ids and
their indices. Both are read as plain values (_torch_file.py): neither torch nor torch_geometric need be there.

Reading order: read_saved_graphs(), _Graphs, _torch_file.py.
Threads: the calling one.   Memory: that of TorchFile, and a block of graphs.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import _core
from ._torch_file import Record, Tensor, TorchFile, unpickle

_ADVICE = "restore the file, or import the CSV files it was made of"
_BESIDE = "put the id_mapping.pkl beside it that was saved with it"
_FEATURES = 11
_UNKNOWN = 0xFFFFFFFF  # The key of all ids that are not known (graph_parts.h).
_MAPPING_MOST = 1 << 10  # Bytes of id_mapping.pkl for one id.
_MAPPING_HELD = 24  # Python's bytes for one of them.
_INDEX_MOST = 10**9
_BLOCK_GRAPHS, _BLOCK_ROWS = 512, 1 << 14
_NAMES = ("x", "edge_index", "edge_attr", "y")

Take = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray], object]


def read_saved_graphs(governor: _core.Governor, path: str, window: int, ids_max: int, take: Take,
                      step: Callable[[float], object]) -> list[int]:
    """Reads the graphs of a file, in the order of its list. Returns the ids that its mapping has.

    take: called with blocks of graphs: x [nodes, 11], whose first column is an id's bits; edge_attr [edges, 11]; places of nodes
          [edges, 2]; of each graph its nodes, its edges, and whether it has an attack.
    step: called now and then with the share of the graphs that are read; it may raise KeyboardInterrupt.
    Errors: CorruptError naming the damage, or a class that such files do not hold; ValueError naming the graph; BudgetExceeded; OSError.
    """
    file = pathlib.Path(path)
    ids = _read_mapping(governor, file.with_name("id_mapping.pkl"), ids_max)
    with TorchFile(file, governor, _ADVICE, lambda: step(0.0)) as saved:
        graphs = _Graphs(saved, ids, window)
        records = _listed(file, saved.value(_is_record, _kept))
        block: list[tuple[np.ndarray, np.ndarray, np.ndarray, bool]] = []
        rows = 0
        for number, record in enumerate(records):
            block.append(graphs.read(number, record))
            rows += len(block[-1][0]) + len(block[-1][1])
            if len(block) == _BLOCK_GRAPHS or rows >= _BLOCK_ROWS or number + 1 == len(records):
                x, edge_attr, ends, attack = zip(*block, strict=True)
                take(np.concatenate(x), np.concatenate(edge_attr), np.concatenate(ends), np.array([len(one) for one in x], np.int64),
                     np.array([len(one) for one in ends], np.int64), np.array(attack, np.int64))
                step((number + 1) / len(records))
                block, rows = [], 0
    return [key for key in ids.values() if key != _UNKNOWN]


def _bad(what: str, advice: str = _ADVICE) -> ValueError:
    return ValueError(f"{what}; {advice}")


# ---- id_mapping.pkl ----

def _read_mapping(governor: _core.Governor, path: pathlib.Path, ids_max: int) -> dict[int, int]:
    """Returns the id that each index stands for; _UNKNOWN for that of ids not known. Errors: as read_saved_graphs()."""
    size = os.stat(path).st_size
    if size > (ids_max + 1) * _MAPPING_MOST:
        raise _bad(f"{path}: {size} bytes, of {ids_max} ids at most", "raise --ids-max (ids_max), if these are CAN ids at all")
    with contextlib.closing(governor.reserve(_core.Tag.OTHER, _MAPPING_HELD * size)):
        items = unpickle(path.read_bytes(), path, _ADVICE)
    if type(items) is not dict or not items:
        raise _bad(f"{path}: no dict of ids and their indices")
    if len(items) > ids_max + 1:
        raise _bad(f"{path}: more than {ids_max} different ids", "raise --ids-max (ids_max), if these are CAN ids at all")
    ids: dict[int, int] = {}
    for at, (name, index) in enumerate(items.items()):
        key = _key_of(name)
        if key is None or type(index) is not int or index in ids:
            raise _bad(f"{path}: entry {at} is not one id and its own index")
        ids[index] = key
    if len(set(ids.values())) != len(ids):
        raise _bad(f"{path}: an id with two indices")
    return ids


def _key_of(name: Any) -> int | None:
    """Returns an id that is a number, or hexadecimal text. None for anything else."""
    if name == "OOV":
        return _UNKNOWN
    if type(name) is str:
        digits = name[2:] if name[:2] in ("0x", "0X") else name
        name = int(digits, 16) if digits and not set(digits) - set("0123456789abcdefABCDEF") else -1
    return name if type(name) is int and 0 <= name < _UNKNOWN else None


# ---- processed_graphs.pt ----

def _is_record(module: str, name: str) -> bool:
    """Whether a class is one of such a file: a graph, what holds its tensors, or a dataset that holds the list."""
    return module == "torch_geometric.data" or module.startswith("torch_geometric.data.") or name == "GraphDataset"


def _is_graph(value: Any) -> bool:
    return isinstance(value, Record) and value.kind.endswith(".Data")


def _kept(kind: str, state: Any) -> Any:
    """Returns what is wanted of a record's state. A Data has its tensors in its _store's _mapping, or in its own attributes."""
    if kind.endswith(".GlobalStorage"):
        return _tensors(state["_mapping"])  # Without its _parent, which would hold itself.
    if kind.endswith(".Data"):
        store = state.get("_store")
        return store.state if isinstance(store, Record) else _tensors(state)
    return state if kind.endswith(".GraphDataset") else None


def _tensors(state: dict[str, Any]) -> tuple[Tensor | None, ...]:
    return tuple(one if isinstance(one := state.get(name), Tensor) else None for name in _NAMES)


def _listed(path: pathlib.Path, value: Any) -> list[Any]:
    if isinstance(value, Record) and not _is_graph(value) and type(getattr(value, "state", None)) is dict:
        value = next((one for one in value.state.values() if type(one) is list and one), None)
    if type(value) is not list:
        raise _bad(f"{path}: no list of graphs")
    for number, one in enumerate(value):
        if not _is_graph(one) or type(getattr(one, "state", None)) is not tuple:
            raise _bad(f"{path}: item {number} of its list is no graph")
    return value


class _Graphs:
    def __init__(self, file: TorchFile, ids: dict[int, int], window: int) -> None:
        self._file = file
        self._window = window
        known = sorted(index for index in ids if 0 <= index <= _INDEX_MOST)
        self._indices = np.array([*known, np.nan])  # Every number has a place in it, and none is the last.
        self._keys = np.array([*(ids[index] for index in known), _UNKNOWN], np.uint32)

    def read(self, number: int, record: Record) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
        """Returns x, edge_attr, the places of the nodes of each edge, and whether there is an attack."""
        name = f"{self._file.path}: graph {number}"
        x, index, attr, y = (None if one is None else _matrix(one) for one in record.state)
        if x is None or x.dtype in ("", "f2") or x.shape[1] != _FEATURES or x.shape[0] == 0:
            raise _bad(f"{name} has no x of {_FEATURES} columns")
        if index is None or not index.dtype or index.shape[0] != 2:
            raise _bad(f"{name} has no edge_index of two rows")
        edges = index.shape[1]
        if attr is not None and (attr.dtype in ("", "f2") or attr.shape != (edges, _FEATURES)):
            raise _bad(f"{name} has an edge_attr that is not {_FEATURES} columns for each edge")
        if y is None or not y.dtype or y.shape != (1, 1):
            raise _bad(f"{name} has no y of one number")
        if x.shape[0] > self._window + 1 or edges > self._window:
            raise _bad(f"{name} has {x.shape[0]} nodes and {edges} edges, more than a window of {self._window} frames can",
                       "pass --window (window) as it was when the graphs were made")
        rows = self._numbers(x)
        keys = self._keys_of(rows[:, 0], name)
        out = rows.astype(np.float32)
        out.view(np.uint32)[:, 0] = keys
        edge_attr = np.zeros((edges, _FEATURES), np.float32) if attr is None else self._numbers(attr).astype(np.float32)
        return out, edge_attr, self._ends(index, x.shape[0], name), bool(self._numbers(y)[0, 0] != 0)

    def _numbers(self, matrix: Tensor) -> np.ndarray:
        return self._file.array(matrix).astype(np.float64)

    def _keys_of(self, values: np.ndarray, name: str) -> np.ndarray:
        at = np.searchsorted(self._indices, values)
        known = self._indices[at] == values
        if not known.all():
            node = int(known.argmin())
            raise _bad(f"{name}: node {node} has {values[node]:g} for an id, which id_mapping.pkl does not know", _BESIDE)
        return self._keys[at]

    def _ends(self, index: Tensor, nodes: int, name: str) -> np.ndarray:
        places = self._numbers(index)
        good = (places >= 0) & (places < nodes) & (places == np.floor(places))
        if not good.all():
            raise _bad(f"{name}: edge {int(good.argmin()) % places.shape[1]} is between nodes it does not have")
        return np.ascontiguousarray(places.T.astype(np.int32))


def _matrix(tensor: Tensor) -> Tensor | None:
    """Returns a tensor as a matrix: a vector is a row of it, a number one element. None for more dimensions."""
    if len(tensor.shape) > 2:
        return None
    missing = 2 - len(tensor.shape)
    return tensor._replace(shape=(1,) * missing + tensor.shape, strides=(0,) * missing + tensor.strides)
