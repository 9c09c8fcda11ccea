# SPDX-License-Identifier: Apache-2.0
"""Window graphs the slow way: plain loops over dictionaries, one definition after another.

Written from docs/formats/graph_set.md, sharing nothing with the importer.
"""
import csv
import gzip
import math
import pathlib

import numpy as np


def frames_of(path):
    """(id, eight payload bytes, attack) of every row of a clean file."""
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", newline="") as text:
        for row in csv.DictReader(text):
            payload = bytes.fromhex(row["data_field"].strip())
            yield int(row["arbitration_id"], 16), payload.ljust(8, b"\0"), int(row["attack"])


def windows_of(frames, window, stride):
    """Rows (source, payload, attack, target) of every window, in order."""
    rows = [(frames[i][0], frames[i][1], frames[i][2], frames[i + 1][0])
            for i in range(len(frames) - 1)]
    if 0 < len(rows) < window:
        yield rows
    for begin in range(0, len(rows) - window + 1, stride):
        yield rows[begin:begin + window]


def graph_of(rows, index):
    """x, edge_index, edge_attr, y of one window; `index` maps an id to its place."""
    size = len(rows)
    sources = [index(row[0]) for row in rows]
    targets = [index(row[3]) for row in rows]
    nodes = sorted(set(sources) | set(targets))
    counts = {node: sources.count(node) for node in nodes}
    least, most = min(counts.values()), max(counts.values())
    x = np.zeros((len(nodes), 11))
    for place, node in enumerate(nodes):
        own = [i for i in range(size) if sources[i] == node]
        x[place, 0] = node
        for i in own:
            x[place, 1:9] += np.frombuffer(rows[i][1], np.uint8) / 255.0
        if own:
            x[place, 1:9] /= len(own)
            x[place, 10] = own[-1] / (size - 1) if size > 1 else 0.0
        x[place, 9] = (counts[node] - least) / (most - least) if most > least else counts[node]
    degree = {node: counts[node] + targets.count(node) for node in nodes}
    edges = sorted(set(zip(sources, targets)))
    attributes = np.zeros((len(edges), 11))
    for place, (source, target) in enumerate(edges):
        own = [i for i in range(size) if (sources[i], targets[i]) == (source, target)]
        gaps = np.diff(own)
        deviation = float(np.std(gaps)) if len(gaps) else 0.0
        attributes[place] = [
            len(own), len(own) / size,
            float(np.mean(gaps)) if len(gaps) else 0.0, deviation,
            1.0 / (1.0 + deviation) if len(gaps) else 0.0,
            own[0] / size, own[-1] / size, (own[-1] - own[0]) / size,
            float((target, source) in edges),
            degree[source] * degree[target], degree[source] / degree[target]]
    edge_index = np.array([[nodes.index(a) for a, _ in edges], [nodes.index(b) for _, b in edges]])
    return x, edge_index, attributes, int(any(row[2] for row in rows))


def graphs_of(paths, window, stride, is_test):
    """Every graph of the files, in order, and the vocabulary."""
    frames = {path: list(frames_of(path)) for path in paths}
    own = [path for path in paths if not is_test(path)] or paths
    vocabulary = sorted({frame[0] for path in own for frame in frames[path]})
    place = {can_id: i for i, can_id in enumerate(vocabulary)}
    graphs = [graph_of(rows, lambda can_id: place.get(can_id, len(place)))
              for path in paths for rows in windows_of(frames[path], window, stride)]
    return graphs, vocabulary


def write_csv(path, frames, times=None):
    """A clean file of (id, payload, attack)."""
    lines = ["timestamp,arbitration_id,data_field,attack"]
    for i, (can_id, payload, attack) in enumerate(frames):
        time = 1_600_000_000 + i * 0.0005 if times is None else times[i]
        lines.append(f"{time:.6f},{can_id:03X},{payload.hex().upper()},{attack}")
    text = ("\n".join(lines) + "\n").encode()
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def random_frames(numbers, count, ids, attacks=0.01):
    """Frames whose ids come in skewed bursts, as buses have them."""
    pool = numbers.integers(0, 0x800, ids)
    frames = []
    for _ in range(count):
        can_id = int(pool[min(ids - 1, int(numbers.exponential(max(1.0, ids / 4))))])
        length = int(numbers.choice([0, 2, 4, 8, 8, 8]))
        frames.append((can_id, numbers.bytes(length), int(numbers.random() < attacks)))
    return frames


def relative_difference(a, b):
    """The largest difference, relative to the value where that is above 1."""
    if a.shape != b.shape:
        return math.inf
    return float(np.max(np.abs(a - b) / np.maximum(1.0, np.abs(b)), initial=0.0))
