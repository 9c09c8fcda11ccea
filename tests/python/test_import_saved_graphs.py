# SPDX-License-Identifier: Apache-2.0
"""plimsoll import can processed_graphs.pt: graphs of the original program, read without running
anything from them.

The files are made here as torch.save makes them (a zip of one pickle and the tensors' bytes), with
classes that only bear torch_geometric's names; where torch is installed, by torch.save itself too.
"""
import collections
import io
import json
import os
import pathlib
import pickle
import random
import signal
import struct
import subprocess
import sys
import tracemalloc
import types
import zipfile

import numpy as np
import pytest

import plimsoll
from test_without_torch import WITHOUT, run_python

SEED = 20261122
STORAGES = {"f4": "FloatStorage", "f8": "DoubleStorage", "i8": "LongStorage", "i4": "IntStorage"}


@pytest.fixture
def modules(monkeypatch):
    """torch_geometric's classes by name, as pickle looks them up."""
    made = {}
    for module, names in {"torch_geometric.data.data": ["Data", "DataEdgeAttr"],
                          "torch_geometric.data.storage": ["GlobalStorage"],
                          "original.preprocessing": ["GraphDataset"]}.items():
        one = types.ModuleType(module)
        for name in names:
            made[name] = type(name, (), {"__module__": module})
            setattr(one, name, made[name])
        parts = module.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]),
                                types.ModuleType(".".join(parts[:i])))
        monkeypatch.setitem(sys.modules, module, one)
    return types.SimpleNamespace(**made)


def data_of(modules, tensors):
    """A Data as torch_geometric 2 keeps it: a class of its own (since 2.3), and a store that knows its parent."""
    data, store = modules.Data(), modules.GlobalStorage()
    store.__dict__.update(_mapping=dict(tensors), _parent=data)
    data.__dict__.update(_edge_attr_cls=modules.DataEdgeAttr, _store=store)
    return data


class Storage:
    def __init__(self, array, key):
        self.array, self.key = array, key


class Tensor:
    """An array in a storage of its own, or at a place of another's."""

    def __init__(self, array, storage=None, offset=0):
        self.array, self.storage, self.offset = array, storage, offset


class TorchPickler(pickle._Pickler):
    """Writes Tensors and Storages as torch.save does."""

    def __init__(self, file, storages):
        super().__init__(file, 2)
        self.storages = storages

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Tensor):
            storage = obj.storage
            if storage is None:
                storage = Storage(np.ascontiguousarray(obj.array), str(len(self.storages)))
                self.storages[storage.key] = storage.array
            self.write(pickle.GLOBAL + b"torch._utils\n_rebuild_tensor_v2\n")
            self.write(pickle.MARK)
            kind = STORAGES[storage.array.dtype.str[1:]]
            self.write(pickle.MARK)
            self.save("storage")
            self.write(pickle.GLOBAL + b"torch\n" + kind.encode() + b"\n")
            self.save(storage.key)
            self.save("cpu")
            self.save(storage.array.size)
            self.write(pickle.TUPLE + pickle.BINPERSID)
            size = storage.array.itemsize
            self.save(obj.offset)
            self.save(tuple(obj.array.shape))
            self.save(tuple(one // size for one in obj.array.strides))
            self.save(False)
            self.save(collections.OrderedDict())
            self.write(pickle.TUPLE + pickle.REDUCE)
            self.memoize(obj)
            return
        super().save(obj, save_persistent_id)


def write_pt(path, value, storages=None, raw=None):
    """What torch.save(value, path) writes; `raw` replaces the pickle."""
    storages = {} if storages is None else storages
    text = io.BytesIO()
    if raw is None:
        TorchPickler(text, storages).dump(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("processed_graphs/data.pkl", text.getvalue() if raw is None else raw)
        file.writestr("processed_graphs/byteorder", "little")
        for key in sorted(storages):  # As text: 0, 1, 10, 11, 2, …
            file.writestr(f"processed_graphs/data/{key}", storages[key].tobytes())
        file.writestr("processed_graphs/version", "3\n")
    return path


IDS = [0x0, 0x43F, 0x5A, 0x316, 0x7FF, 0x1A0, 0x2B0]


def write_mapping(folder, ids=IDS, protocol=4, extra=()):
    mapping = {one: index for index, one in enumerate(ids)}
    mapping["OOV"] = len(ids)
    mapping.update(extra)
    (folder / "id_mapping.pkl").write_bytes(pickle.dumps(mapping, protocol))


def random_graphs(numbers, count):
    """(x, edge_index, edge_attr, y) with index columns of IDS or OOV."""
    graphs = []
    for _ in range(count):
        nodes, edges = int(numbers.integers(1, 8)), int(numbers.integers(0, 20))
        x = numbers.random((nodes, 11), np.float32)
        x[:, 0] = numbers.permutation(len(IDS) + 1)[:nodes]
        graphs.append((x, numbers.integers(0, nodes, (2, edges)),
                       numbers.random((edges, 11), np.float32),
                       np.array([numbers.integers(0, 2)])))
    return graphs


def datas(modules, graphs):
    return [data_of(modules, {"x": Tensor(x), "edge_index": Tensor(ends), "edge_attr": Tensor(attr),
                              "y": Tensor(y)}) for x, ends, attr, y in graphs]


@pytest.fixture
def run(program):
    def call(path, out, *more):
        return subprocess.run([program, "import", "can", str(path), "--out", str(out), "--json",
                               "--memory-limit", "1GiB", *more], capture_output=True, text=True,
                              timeout=120, check=False)
    return call


def tensors_of(folder):
    """A set's tensors, by its documented format."""
    blob = (pathlib.Path(folder) / "graphs.safetensors").read_bytes()
    length, = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8:8 + length])
    types_of = {"I64": "<i8", "F32": "<f4", "I32": "<i4", "U8": "u1"}
    return {name: np.frombuffer(blob[8 + length + one["data_offsets"][0]:
                                     8 + length + one["data_offsets"][1]],
                                types_of[one["dtype"]]).reshape(one["shape"])
            for name, one in header.items() if name != "__metadata__"}


def check_set(folder, graphs, ids=IDS):
    t = tensors_of(folder)
    assert t["vocabulary"].tolist() == sorted(ids)
    index = [sorted(ids).index(one) for one in ids] + [len(ids)]
    assert len(t["y"]) == len(graphs)
    for g, (x, ends, attr, y) in enumerate(graphs):
        nodes = slice(t["node_ptr"][g], t["node_ptr"][g + 1])
        edges = slice(t["edge_ptr"][g], t["edge_ptr"][g + 1])
        assert np.array_equal(t["x"][nodes, 1:], x[:, 1:]), g
        assert t["x"][nodes, 0].tolist() == [index[int(one)] for one in x[:, 0]], g
        assert np.array_equal(t["edges"][edges].T, ends), g
        assert np.array_equal(t["edge_attr"][edges], attr), g
        assert t["y"][g] == (1 if np.any(y) else 0), g


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_list_of_graphs_becomes_a_set_with_the_same_numbers(run, modules, tmp_path, protocol):
    graphs = random_graphs(np.random.default_rng(SEED), 2500)  # More than one APPENDS of 1,000.
    path = write_pt(tmp_path / "cache" / "processed_graphs.pt", datas(modules, graphs))
    write_mapping(path.parent, protocol=protocol)
    done = run(path, tmp_path / "set")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["reused"] is False
    check_set(tmp_path / "set", graphs)
    t = tensors_of(tmp_path / "set")
    assert t["split_ptr"].tolist() == [0, 2000, 2500, 2500]
    assert json.loads(run(path, tmp_path / "set").stdout)["reused"] is True  # K11.
    write_mapping(path.parent, ids=[*IDS[:-1], 0x2B1])
    assert json.loads(run(path, tmp_path / "set").stdout)["reused"] is False
    assert 0x2B1 in tensors_of(tmp_path / "set")["vocabulary"]


@pytest.mark.parametrize("cache_bytes", [None, 0])
def test_graphs_without_edges_are_read_back(run, modules, tmp_path, governor, cache_bytes):
    graphs = random_graphs(np.random.default_rng(SEED), 40)
    graphs = [(x, ends[:, :0], attr[:0], y) if g % 3 else (x, ends, attr, y) for g, (x, ends, attr, y) in enumerate(graphs)]
    path = write_pt(tmp_path / "cache" / "processed_graphs.pt", datas(modules, graphs))
    write_mapping(path.parent)
    assert run(path, tmp_path / "set").returncode == 0
    with plimsoll.GraphSet.open(governor, tmp_path / "set", cache_bytes=cache_bytes) as made:
        made.verify()
        for g, (x, ends, attr, _) in enumerate(graphs):
            one = made[g]
            assert np.array_equal(one.x[:, 1:], x[:, 1:]) and np.array_equal(one.edge_index, ends), g
            assert np.array_equal(one.edge_attr, attr), g
        batches = list(made.batches(batch_graphs=3, seed=1))
        assert sorted(g for batch in batches for g in batch.graphs.tolist()) == made.split("train").tolist()
        assert any(batch.edge_index.shape[1] == 0 for batch in batches)


def test_a_dataset_object_and_shared_strided_storages_are_read_too(run, modules, tmp_path):
    graphs = random_graphs(np.random.default_rng(2), 30)
    every = Storage(np.concatenate([x.reshape(-1) for x, *_ in graphs]), "0")
    storages = {"0": every.array}
    made, at = [], 0
    for x, ends, attr, y in graphs:
        # Columns of a [edges, 2] array: strides (1, 2), as .t() leaves them.
        pairs = Storage(np.ascontiguousarray(ends.T).reshape(-1), str(len(storages)))
        storages[pairs.key] = pairs.array
        made.append(data_of(modules, {
            "x": Tensor(x, every, at), "edge_attr": Tensor(attr.astype(np.float64)),
            "edge_index": Tensor(pairs.array.reshape(-1, 2).T, pairs), "y": Tensor(y)}))
        at += x.size
        for name in ("edge_attr", "y"):  # Storages get their numbers in order of writing.
            one = made[-1]._store._mapping[name]
            one.storage = Storage(np.ascontiguousarray(one.array), str(len(storages)))
            storages[one.storage.key] = one.storage.array
    dataset = modules.GraphDataset()
    dataset.name, dataset.data_list = "set_01", made
    path = write_pt(tmp_path / "processed_graphs.pt", dataset, storages)
    write_mapping(tmp_path)
    done = run(path, tmp_path / "set")
    assert done.returncode == 0, done.stderr
    check_set(tmp_path / "set", graphs)
    blob = bytearray(path.read_bytes())
    blob[blob.index(every.array.tobytes()) + 4] ^= 1  # No tensor takes this storage whole.
    path.write_bytes(blob)
    done = run(path, tmp_path / "other")
    assert done.returncode == 1 and "data/0" in done.stderr and "another checksum" in done.stderr, done.stderr
    assert not (tmp_path / "other").exists()


def test_what_torch_itself_saves_is_read(run, modules, tmp_path):
    torch = pytest.importorskip("torch")
    graphs = random_graphs(np.random.default_rng(3), 120)
    values = [data_of(modules, {"x": torch.from_numpy(x), "edge_index": torch.from_numpy(ends),
                                "edge_attr": torch.from_numpy(attr), "y": torch.from_numpy(y)})
              for x, ends, attr, y in graphs]
    torch.save(values, tmp_path / "processed_graphs.pt")
    write_mapping(tmp_path)
    done = run(tmp_path / "processed_graphs.pt", tmp_path / "set")
    assert done.returncode == 0, done.stderr
    check_set(tmp_path / "set", graphs)


def test_ids_as_hexadecimal_text_or_numpy_numbers_are_understood(run, modules, tmp_path):
    graphs = random_graphs(np.random.default_rng(4), 5)
    path = write_pt(tmp_path / "processed_graphs.pt", datas(modules, graphs))
    for ids in ([f"{one:X}" for one in IDS], [hex(one) for one in IDS],
                [np.int64(one) for one in IDS], [np.uint16(one) for one in IDS]):
        write_mapping(tmp_path, ids=ids)
        done = run(path, tmp_path / "set")
        assert done.returncode == 0, done.stderr
        check_set(tmp_path / "set", graphs)


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_code_in_a_pickle_is_refused_by_its_name_and_not_run(run, modules, tmp_path, protocol):
    marker = tmp_path / "ran"
    raw = pickle.dumps([Hostile(marker)], protocol)
    path = write_pt(tmp_path / "processed_graphs.pt", None, raw=raw)
    write_mapping(tmp_path)
    done = run(path, tmp_path / "set")
    assert done.returncode == 1
    assert "posix.system" in done.stderr and "processed_graphs.pt" in done.stderr
    write_pt(path, datas(modules, random_graphs(np.random.default_rng(5), 3)))
    (tmp_path / "id_mapping.pkl").write_bytes(raw)
    done = run(path, tmp_path / "set")
    assert "posix.system" in done.stderr and "id_mapping.pkl" in done.stderr
    for text in (b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.", b"c__builtin__\ngetattr\n."):
        write_mapping(tmp_path)
        write_pt(path, None, raw=b"\x80\x02" + text)
        done = run(path, tmp_path / "set")
        assert done.returncode == 1 and "builtin" in done.stderr
    assert not marker.exists()
    assert not (tmp_path / "set").exists()


HOSTILE = {
    "a list that holds itself": b"\x80\x02]q\x00h\x00ah\x00a.",
    "a million lists in one another": b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "a chain through the memo": b"\x80\x02" + b"".join(
        b"]r" + struct.pack("<I", i) + b"j" + struct.pack("<I", i - 1) + b"a0" if i else b"]q\x000"
        for i in range(50_000)) + b"j" + struct.pack("<I", 49_999) + b".",
    "a place of the memo far out": b"\x80\x02]r\xff\xff\xff\xffj\xff\xff\xff\xff\x86.",
    "a text of 2^62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a.",
    "too long an integer": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "nothing": b"",
    "no end": b"\x80\x02]",
    "an end at once": b".",
    "marks alone": b"((((.",
    "appending to nothing": b"a.",
    "a call of a list": b"]]R.",
    "a state for a number": b"K\x01}b.",
    "an old opcode": b"(lp0\n.",
    "a key of a million tuples": b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.",
    "a far place of the memo alone": b"\x80\x02]r\x00\x00\x00\x7f.",
    "a state for a function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__)s\x86b.",
    "a state for a class": b"\x80\x02ctorch_geometric.data.data\nData\nN}X\x04\x00\x00\x00kindX\x01\x00\x00\x00xs\x86b.",
    "a number of NumPy's that is an object": b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00O8K\x00K\x01\x87R.",
    "a registered extension": b"\x80\x02\x82\x01.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused(run, tmp_path, name):
    path = write_pt(tmp_path / "processed_graphs.pt", None, raw=HOSTILE[name])
    write_mapping(tmp_path)
    done = run(path, tmp_path / "set")
    assert done.returncode == 1, done.stderr
    assert "processed_graphs.pt" in done.stderr
    assert not (tmp_path / "set").exists()


def broken(graphs, change):
    x, ends, attr, y = (one.copy() for one in graphs[1])
    tensors = {"x": x, "edge_index": ends, "edge_attr": attr, "y": y}
    change(tensors)
    return [graphs[0], tuple(tensors.get(name) for name in ("x", "edge_index", "edge_attr", "y"))]


def test_a_graph_that_is_none_is_named(run, modules, tmp_path):
    graphs = [(np.zeros((2, 11), np.float32), np.zeros((2, 3), np.int64),
               np.zeros((3, 11), np.float32), np.array([0]))] * 2
    write_mapping(tmp_path)
    for change, words in [
            (lambda t: t["x"].__setitem__((0, 0), 99), "an id"),
            (lambda t: t["x"].__setitem__((0, 0), 0.5), "an id"),
            (lambda t: t["x"].__setitem__((0, 0), np.nan), "an id"),
            (lambda t: t["edge_index"].__setitem__((1, 1), 2), "edge 1"),
            (lambda t: t["edge_index"].__setitem__((1, 1), -1), "edge 1"),
            (lambda t: t.update(x=t["x"][:, :7]), "x of 11"),
            (lambda t: t.update(edge_attr=t["edge_attr"][:1]), "edge_attr"),
            (lambda t: t.update(edge_index=t["edge_index"][:1]), "edge_index"),
            (lambda t: t.update(y=np.array([0, 1])), "y of one"),
            (lambda t: t.update(x=np.zeros((300, 11), np.float32)), "--window")]:
        path = write_pt(tmp_path / "processed_graphs.pt", datas(modules, broken(graphs, change)))
        done = run(path, tmp_path / "set")
        assert done.returncode == 1 and "graph 1" in done.stderr and words in done.stderr, words
    assert not (tmp_path / "set").exists()


def test_a_missing_mapping_and_other_files_are_named(run, modules, tmp_path):
    graphs = random_graphs(np.random.default_rng(6), 3)
    path = write_pt(tmp_path / "processed_graphs.pt", datas(modules, graphs))
    done = run(path, tmp_path / "set")
    assert done.returncode == 1 and "id_mapping.pkl" in done.stderr
    write_mapping(tmp_path)
    old = tmp_path / "old" / "processed_graphs.pt"
    old.parent.mkdir()
    write_mapping(old.parent)
    old.write_bytes(pickle.dumps([1, 2]))  # As torch before 1.6 began: no zip.
    done = run(old, tmp_path / "set")
    assert done.returncode == 1 and "1.6" in done.stderr
    with zipfile.ZipFile(old, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", b"\x80\x02]." * 100)
    done = run(old, tmp_path / "set")
    assert done.returncode == 1 and "compressed" in done.stderr


@pytest.mark.parametrize("mutations", [400, pytest.param(5000, marks=pytest.mark.slow)])
def test_any_damage_is_refused_or_changes_nothing(governor, modules, tmp_path, mutations):
    """Seeded mutations: never a crash, never a hang, never other numbers without a word."""
    graphs = random_graphs(np.random.default_rng(7), 6)
    path = write_pt(tmp_path / "processed_graphs.pt", datas(modules, graphs))
    write_mapping(tmp_path)
    whole = path.read_bytes()
    pickled = whole.index(b"data.pkl") + len(b"data.pkl")
    pickle_end = whole.index(b"PK\x03\x04", pickled)
    random.seed(SEED)
    refused = 0
    for number in range(mutations):
        changed = bytearray(whole)
        if number % 3 == 0:
            changed = changed[:random.randrange(len(changed))]
        else:
            low, high = (pickled, pickle_end) if number % 3 == 1 else (0, len(changed))
            for _ in range(random.randint(1, 4)):
                changed[random.randrange(low, high)] = random.randrange(256)
        path.write_bytes(changed)
        try:
            plimsoll.import_graphs(path, tmp_path / "set", rebuild=True, governor=governor)
        except (plimsoll.CorruptError, ValueError) as error:
            assert "processed_graphs.pt" in str(error), (SEED, number, error)
            refused += 1
        else:
            check_set(tmp_path / "set", graphs)
    assert refused > mutations / 2


@pytest.mark.parametrize("mutations", [600, pytest.param(20_000, marks=pytest.mark.slow)])
def test_any_other_pickle_is_refused_or_read_as_what_it_says(governor, modules, tmp_path, mutations):
    """Seeded mutations of the pickle alone, under checksums that match: never a crash, and no error but those."""
    graphs = random_graphs(np.random.default_rng(8), 3)
    storages, text = {}, io.BytesIO()
    TorchPickler(text, storages).dump(datas(modules, graphs))
    write_mapping(tmp_path)
    mapping = (tmp_path / "id_mapping.pkl").read_bytes()
    path = tmp_path / "processed_graphs.pt"
    random.seed(SEED)
    refused = 0
    for number in range(mutations):
        pickles = [bytearray(text.getvalue()), bytearray(mapping)]
        changed = pickles[number % 4 == 3]
        for _ in range(random.randint(1, 3)):
            changed[random.randrange(len(changed))] = random.randrange(256)
        write_pt(path, None, storages, bytes(pickles[0]))
        (tmp_path / "id_mapping.pkl").write_bytes(pickles[1])
        try:
            plimsoll.import_graphs(path, tmp_path / "set", rebuild=True, governor=governor)
        except (plimsoll.CorruptError, ValueError) as error:
            assert str(tmp_path) in str(error), (SEED, number, error)
            refused += 1
    assert refused > mutations / 2


def test_a_file_is_admitted_before_it_is_read(governor, modules, tmp_path):
    path = write_pt(tmp_path / "processed_graphs.pt", None, raw=bytes(100 << 20))
    write_mapping(tmp_path)
    with governor.reserve(governor.ledger().free_bytes - (50 << 20)):
        before = governor.ledger().pools["other"].leased_bytes
        with pytest.raises(plimsoll.BudgetExceeded):
            plimsoll.import_graphs(path, tmp_path / "set", governor=governor)
        assert governor.ledger().pools["other"].leased_bytes == before
    assert not (tmp_path / "set").exists()


def test_what_python_holds_meanwhile_is_leased(governor, modules, tmp_path):
    path = write_pt(tmp_path / "processed_graphs.pt", datas(modules, random_graphs(np.random.default_rng(10), 2000)))
    write_mapping(tmp_path)
    before = governor.ledger().pools["other"].leased_bytes
    tracemalloc.start()
    try:
        plimsoll.import_graphs(path, tmp_path / "set", governor=governor)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    leased = governor.ledger().pools["other"].peak_bytes - before
    assert 4 << 20 < held < leased < 4 * held


def test_torch_is_not_needed(modules, tmp_path):
    graphs = random_graphs(np.random.default_rng(11), 5)
    path = write_pt(tmp_path / "processed_graphs.pt", datas(modules, graphs))
    write_mapping(tmp_path)
    run_python(WITHOUT + f"import plimsoll; plimsoll.import_graphs({str(path)!r}, {str(tmp_path / 'set')!r})")
    check_set(tmp_path / "set", graphs)


@pytest.mark.parametrize("python", [False, True])
def test_ctrl_c_ends_an_import_and_leaves_nothing(program, modules, tmp_path, python):
    path = write_pt(tmp_path / "processed_graphs.pt", datas(modules, random_graphs(np.random.default_rng(9), 6000)))
    write_mapping(tmp_path)
    words = ([sys.executable, "-c", f"import plimsoll; plimsoll.import_graphs({str(path)!r}, {str(tmp_path / 'set')!r})"] if python else
             [program, "import", "can", str(path), "--out", str(tmp_path / "set")])
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as going:
        while not (tmp_path / "set/parts.partial/0.graphs").exists():
            assert going.poll() is None, going.stderr.read()
        going.send_signal(signal.SIGINT)
        said = going.communicate(timeout=120)[1]
    assert (going.returncode, "KeyboardInterrupt" in said, "import cancelled" in said) == (-signal.SIGINT if python else 1, python, not python), said
    assert not (tmp_path / "set").exists()


def test_python_imports_saved_graphs_too(governor, modules, tmp_path):
    graphs = random_graphs(np.random.default_rng(8), 9)
    path = write_pt(tmp_path / "processed_graphs.pt", datas(modules, graphs))
    write_mapping(tmp_path)
    said = plimsoll.import_graphs(path, tmp_path / "set", governor=governor)
    assert said["reused"] is False
    with plimsoll.GraphSet.open(governor, tmp_path / "set") as made:
        assert len(made) == 9
    check_set(tmp_path / "set", graphs)
