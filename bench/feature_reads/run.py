#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shuffled batches of features from disk: plimsoll.Loader and FeatureStore.read() beside the bare disk's random
reads, numpy.memmap, h5py and lmdb; each with and without batches read ahead. Of a store that grew in parts, and of
ragged records, beside the bare disk alone.

    run.py [--smoke] [--data-gib N] [--batches N] [--parts N] [--ragged] [--directory DIR]
"""
import argparse
import collections
import concurrent.futures
import importlib.util
import json
import mmap
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
import warnings

import numpy as np
import torch

import plimsoll  # bench/run builds the package for those that name it.

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from bench import raw_disk

BAR = 0.85
SEED = 7
DIM = 1000          # Floats a record: with what LMDB and the store add to it, a page of 4 KiB.
RECORD_BYTES = 4 * DIM
SHORTEST, LONGEST = 64, 4095  # Floats of a ragged record: of one to four pages, each as often but for a hundredth.
PAGE = 4096
BATCH = 1024
WRITTEN_AT_ONCE = 16_384
ROUNDS = 3
PAIRS = 3           # Turns of the store, each between two of the disk.
WORKERS = 4         # Processes of a DataLoader that read ahead, two batches each.
MIB, GIB = 1 << 20, 1 << 30
PATTERN = np.random.default_rng(SEED).standard_normal(DIM, np.float32)


def rows_of(ids: np.ndarray) -> np.ndarray:
    """What the records are, float32 [n, DIM]: a function of their ids."""
    rows = PATTERN * (1 + (ids % 1009).astype(np.float32)[:, None] / 1024)
    rows[:, 0], rows[:, -1] = ids & 0xFFFF, ids >> 16
    return rows


def lengths_of(ids: np.ndarray) -> np.ndarray:
    """Floats of ragged records, int64 [n], by the id."""
    return SHORTEST + (ids * 2_654_435_761 >> 7) % (LONGEST + 1 - SHORTEST)


def ragged_rows(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What ragged records are: floats of all of them, and offsets. Each counts on from its id."""
    offsets = np.concatenate([[0], np.cumsum(lengths_of(ids))])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
    return (np.repeat(ids & 0xFFFFF, np.diff(offsets)) + within).astype(np.float32), offsets


def pages_of(ids: np.ndarray) -> int:
    """Bytes of the fewest pages that such records fit on, each read by itself."""
    return int((-(-4 * lengths_of(ids) // PAGE)).sum()) * PAGE


def all_rows(records: int):
    for first in range(0, records, WRITTEN_AT_ONCE):
        ids = np.arange(first, min(records, first + WRITTEN_AT_ONCE))
        yield ids, rows_of(ids)


# ---- Peers: make(folder, records) writes them; read(ids) answers float32 [n, DIM] ----

class Memmap:
    """numpy.memmap: pages of their own for records, no reading around them, ids in the order of the file."""

    def __init__(self, folder: pathlib.Path):
        self.path, self.rows = folder / "records.bin", None

    def make(self, records: int) -> None:
        with open(self.path, "wb") as file:
            for _, rows in all_rows(records):
                np.pad(rows, ((0, 0), (0, PAGE // 4 - DIM))).tofile(file)

    def read(self, ids: np.ndarray) -> np.ndarray:
        if self.rows is None:
            mapped = np.memmap(self.path, np.float32, "r")
            mapped._mmap.madvise(mmap.MADV_RANDOM)
            self.rows = mapped.reshape(-1, PAGE // 4)[:, :DIM]
        order = np.argsort(ids)
        out = np.empty((len(ids), DIM), np.float32)
        out[order] = self.rows[ids[order]]
        return out


class H5py:
    """h5py: a contiguous dataset, indexed by a batch's ids in the order of the file."""

    def __init__(self, folder: pathlib.Path):
        self.path, self.rows = folder / "records.h5", None

    def make(self, records: int) -> None:
        import h5py
        with h5py.File(self.path, "w", libver="latest") as file:
            made = file.create_dataset("rows", (records, DIM), np.float32)
            for ids, rows in all_rows(records):
                made[ids[0]:ids[-1] + 1] = rows

    def read(self, ids: np.ndarray) -> np.ndarray:
        import h5py
        if self.rows is None:
            self.rows = h5py.File(self.path, "r", libver="latest", locking=False)["rows"]
        order = np.argsort(ids)
        out = np.empty((len(ids), DIM), np.float32)
        out[order] = self.rows[ids[order]]
        return out


class Lmdb:
    """lmdb: one transaction a batch, keys in their order, no read-ahead, no lock, values not copied twice."""

    def __init__(self, folder: pathlib.Path):
        self.path, self.env = folder / "records.lmdb", None

    def make(self, records: int) -> None:
        import lmdb
        env = lmdb.open(str(self.path), map_size=2 * PAGE * records + 64 * MIB, subdir=False, writemap=True,
                        map_async=True, sync=False)
        for ids, rows in all_rows(records):
            with env.begin(write=True) as txn:
                txn.cursor().putmulti([(int(key).to_bytes(8, "big"), row.tobytes()) for key, row in zip(ids, rows)],
                                      append=True)
        env.sync(True)
        env.close()

    def read(self, ids: np.ndarray) -> np.ndarray:
        import lmdb
        if self.env is None:
            self.env = lmdb.open(str(self.path), readonly=True, subdir=False, lock=False, readahead=False)
        out = np.empty((len(ids), DIM), np.float32)
        with self.env.begin(buffers=True) as txn:
            for at in np.argsort(ids):
                out[at] = np.frombuffer(txn.get(int(ids[at]).to_bytes(8, "big")), np.float32)
        return out


PEERS = {"memmap": (Memmap, "numpy"), "h5py": (H5py, "h5py"), "lmdb": (Lmdb, "lmdb")}


class Batches(torch.utils.data.Dataset):
    """Whole batches by their number, for a DataLoader; each worker opens the file itself."""

    def __init__(self, peer, order):
        self.peer, self.order = peer, order

    def __getitem__(self, number: int):
        return self.peer.read(self.order(number))

    def __len__(self):
        return sys.maxsize


# ---- One turn: alone on the disk ----

def rounds_of(options, take, batch_bytes=lambda number: BATCH * RECORD_BYTES) -> list[float]:
    """Bytes delivered a second, by round; take(number) answers batch `number` of those of all rounds."""
    rates = []
    for number in range(ROUNDS):
        batches = range(number * options.batches, (number + 1) * options.batches)
        began = time.perf_counter()
        for at in batches:
            take(at)
        rates.append(sum(map(batch_bytes, batches)) / (time.perf_counter() - began))
    return rates


def checked(what: str, ids: np.ndarray, rows: np.ndarray) -> None:
    if not np.array_equal(rows, rows_of(ids)):
        sys.exit(f"feature_reads: {what} answers other records than were written")


def dropped_from_cache(folder: pathlib.Path) -> None:
    """Writes all files of a folder back and has the kernel forget them."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def order_of(options, first: int):
    """number → ids of the batch so many behind batch `first` of the epoch."""
    shuffled = plimsoll.SampleOrder(options.records, SEED, 0)

    def ids(number: int) -> np.ndarray:
        at = (first + number) * BATCH
        return shuffled.at(np.arange(at, at + BATCH))
    return ids


def turn_of_peer(options, name: str, folder: pathlib.Path) -> dict[str, float]:
    peer = PEERS[name][0](folder)
    peer.make(options.records)
    result = {}
    for part, workers in enumerate((WORKERS, 0)):  # Workers open what this process has not opened yet.
        dropped_from_cache(folder)
        order = order_of(options, part * options.part)
        if workers:
            batches = torch.utils.data.DataLoader(
                Batches(peer, order), batch_size=None, num_workers=workers,
                sampler=range(options.part), prefetch_factor=2)
            source = iter(batches)
            checked(name, order(0), next(source).numpy())  # The workers have started.
            rates = rounds_of(options, lambda number: next(source))
            del source, batches
        else:
            checked(name, order(0), peer.read(order(0)))
            rates = rounds_of(options, lambda number: peer.read(order(number + 1)))
        result["ahead" if workers else "alone"] = statistics.median(rates)
    return result


def make_store(options, governor, path: pathlib.Path) -> None:
    """In options.parts parts of equal size, the first written, the others added."""
    ends = np.linspace(0, options.records, options.parts + 1).astype(np.int64)
    for begin, end in zip(ends[:-1], ends[1:]):
        shape, ragged = ((), {"x": LONGEST}) if options.ragged else ((DIM,), None)
        writer = (plimsoll.FeatureWriter(governor, path, {"x": ("float32", shape)}, ragged=ragged) if begin == 0 else
                  plimsoll.FeatureWriter.extend(governor, path))
        with writer:
            for first in range(begin, end, WRITTEN_AT_ONCE // 8):
                ids = np.arange(first, min(end, first + WRITTEN_AT_ONCE // 8))
                writer.append(ids, x=ragged_rows(ids) if options.ragged else rows_of(ids))


def turn_of_ragged(options, folder: pathlib.Path) -> dict[str, float]:
    """Bytes of the pages that records need, a second: what a disk that reads nothing else would have to read."""
    governor = plimsoll.Governor(f"{options.limit_mib}MiB")
    make_store(options, governor, folder / "store")
    with plimsoll.FeatureStore.open(governor, folder / "store", cache_bytes=options.cache_mib * MIB) as store:
        order = order_of(options, 0)
        for number in range(2):
            batch, (values, offsets) = store.read(order(number)), ragged_rows(order(number))
            if not (np.array_equal(batch["x"], values) and np.array_equal(batch.offsets["x"], offsets)):
                sys.exit("feature_reads: the store answers other records than were written")
            del batch
        before = store.stats()["bytes_read"]
        needed = sum(pages_of(order(number)) for number in range(2, 2 + ROUNDS * options.batches))
        rates = rounds_of(options, lambda number: store.read(order(number + 2)),
                          lambda number: pages_of(order(number + 2)))
        result = {"alone": statistics.median(rates),
                  "read_bytes": (store.stats()["bytes_read"] - before) / needed}
        order = order_of(options, options.part + 1)
        with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
            coming = collections.deque(pool.submit(store.read, order(number)) for number in range(4))

            def take(number: int) -> None:
                coming.append(pool.submit(store.read, order(number + 4)))
                coming.popleft().result()

            result["ahead"] = statistics.median(rounds_of(options, take, lambda number: pages_of(order(number))))
    governor.close()
    return result


def turn_of_store(options, folder: pathlib.Path) -> dict[str, float]:
    if options.ragged:
        return turn_of_ragged(options, folder)
    governor = plimsoll.Governor(f"{options.limit_mib}MiB")
    make_store(options, governor, folder / "store")
    result = {}
    with plimsoll.FeatureStore.open(governor, folder / "store", cache_bytes=options.cache_mib * MIB) as store:
        order = order_of(options, 0)
        checked("FeatureStore.read", order(0), store.read(order(0))["x"])
        result["alone"] = statistics.median(rounds_of(options, lambda number: store.read(order(number + 1))))
        state = plimsoll.LoaderState(SEED, 0, options.part * BATCH)
        with plimsoll.Loader.open(governor, store, batch_rows=BATCH, seed=SEED, state=state,
                                  loader_threads=options.threads) as loader:
            batch = loader.next()
            checked("Loader", batch.ids, batch["x"])
            result["ahead"] = statistics.median(rounds_of(options, lambda number: loader.next()))
        result["read_bytes"] = store.stats()["bytes_read"] / store.stats()["bytes_delivered"]
    governor.close()
    return result


def turn_of_disk(options, folder: pathlib.Path) -> dict[str, float]:
    """Random reads of a page, or of as many as ragged records need, of a file as large as the data; as many bytes at
    each depth as a round delivers."""
    most = -(-4 * LONGEST // PAGE) if options.ragged else 1
    asked = raw_disk.speed(folder, file_bytes=int(options.data_gib * GIB) // PAGE * PAGE,
                           total_bytes=options.batches * BATCH * PAGE * (1 + most) // 2, read_bytes=most * PAGE,
                           read_bytes_least=PAGE if options.ragged else 0, at_random=True)
    return {"alone": asked["bytes_per_second"] * (1 if options.ragged else RECORD_BYTES / PAGE), "depth": asked["depth"]}


def measured(options) -> dict:
    plain = options.parts == 1 and not options.ragged
    there = [name for name, (_, module) in PEERS.items() if plain and importlib.util.find_spec(module)]
    turns: dict[str, list[dict[str, float]]] = {}
    for name in ("disk", *["store", "disk"] * (1 if options.smoke else PAIRS), *there):
        folder = pathlib.Path(tempfile.mkdtemp(prefix="plimsoll-features-", dir=options.directory))
        try:
            turn = (turn_of_disk(options, folder) if name == "disk" else turn_of_store(options, folder)
                    if name == "store" else turn_of_peer(options, name, folder))
        finally:
            shutil.rmtree(folder)
        turns.setdefault(name, []).append(turn)
        print(f"{name}: " + ", ".join(f"{how} {rate / MIB:,.0f} MiB/s" for how, rate in turn.items()
                                      if how in ("alone", "ahead")), flush=True)
    ours = [max(turn["alone"], turn["ahead"]) for turn in turns["store"]]
    around = [(before["alone"] + after["alone"]) / 2 for before, after in zip(turns["disk"], turns["disk"][1:])]
    to_disk = [store / disk for store, disk in zip(ours, around)]
    best_peer = max((max(turns[name][0]["alone"], turns[name][0]["ahead"]) for name in there), default=0.0)
    bounded_mib = int(os.environ.get("PLIMSOLL_CGROUP_MIB", "0"))
    times = 4 if plain else 10
    far_less = 0 < times * bounded_mib * MIB <= options.data_gib * GIB
    value = statistics.median(to_disk)
    if not options.smoke and not far_less:
        print(f"not judged: memory for the page cache is not bounded to a {times}th of the data; --cgroup-mib of bench/run")
    return {"name": "feature_reads", "value": round(value, 4), "unit": "x bare disk, best of depths 1 to 64",
            "bar": BAR, "pass": options.smoke or (value >= BAR and min(ours) >= best_peer and far_less),
            "peers": {"to_best_peer": round(min(ours) / best_peer, 3) if there else None, "records": options.records,
                      "parts": options.parts, "ragged": options.ragged, "data_gib": round(options.data_gib, 2), "cgroup_mib": bounded_mib,
                      "to_disk": [round(one, 3) for one in to_disk],
                      "mib_per_second": {name: [{how: round(rate / MIB, 1) for how, rate in turn.items()
                                                 if how in ("alone", "ahead")} for turn in of]
                                         for name, of in turns.items()},
                      "disk_best_depths": [turn["depth"] for turn in turns["disk"]],
                      "bytes_read_to_delivered": round(turns["store"][0]["read_bytes"], 3)}, "seed": SEED}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--smoke", action="store_true", help="small sizes; only the answers count")
    parser.add_argument("--data-gib", type=float, help="size of the data: far more than memory, and than the host of a "
                        "virtual disk may cache (often as much as it has memory) [8; smoke: 0.035]")
    parser.add_argument("--batches", type=int, default=64, help="of 1,024 records, a round")
    parser.add_argument("--parts", type=int, default=1, help="parts of the store, at most 64")
    parser.add_argument("--ragged", action="store_true", help="records of 64 to 4,095 floats")
    parser.add_argument("--cache-mib", type=int, default=64, help="the store's slab")
    parser.add_argument("--limit-mib", type=int, default=512, help="the governor's limit")
    parser.add_argument("--threads", type=int, default=2, help="the loader's")
    parser.add_argument("--directory", type=pathlib.Path, help="folder below which data is written")
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # More workers than cores: they wait.
    options = parser.parse_args()
    if options.smoke:
        options.batches = 1
    options.data_gib = options.data_gib or (0.1 if options.smoke and options.ragged else
                                            36 / 1024 if options.smoke else 8)
    options.records = int(options.data_gib * GIB) // (8318 if options.ragged else PAGE)
    options.part = ROUNDS * options.batches + 1  # Batches of one way of reading, the first unjudged.
    if 2 * options.part * BATCH > options.records:
        parser.error(f"--data-gib: {options.records} records are fewer than {2 * options.part} batches; "
                     "fewer --batches")
    result = measured(options)
    print(json.dumps(result))
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
