# SPDX-License-Identifier: Apache-2.0
"""Initial rows: from features, by projection or by principal components, or from clusters.

zeros, normal, uniform, xavier and kaiming need no pass over the data: the table computes such rows
from (seed, id) when they are first asked for. The strategies of a manager stream the features in
ascending order of id, in blocks of a fixed size, so that a row does not depend on the order of
sample_ids. EmbeddingInitializer is given whole arrays and returns whole arrays.

Threads: pure functions.
Memory:  one block of 4,096 samples; F × F float64 for principal components of F features, 8,192 × F
         float64 for clusters; EmbeddingInitializer: its features once more, as float64.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..core._arrays import _to_numpy
from ._files import chunk_files, read_chunk

NATIVE = ("zeros", "normal", "xavier", "kaiming", "uniform")
FROM_FEATURES = ("imgtxt", "txt", "img", "imgtxt_pca", "txt_pca", "img_pca")
STRATEGIES = NATIVE + FROM_FEATURES
CLUSTERS_WORDS = "imgtxt_clusters_K, txt_clusters_K, img_clusters_K for K clusters"
BLOCK = 4096
SAMPLE = 8192  # Samples that centres are found among.
_CLUSTERS = re.compile(r"(imgtxt|txt|img)_clusters_([1-9]\d{0,3})")

Read = Callable[[np.ndarray, list[str]], dict[str, Any]]
Blocks = Callable[[], Iterator[np.ndarray]]


def needs_features(strategy: str) -> bool:
    """Whether the strategy computes first rows from features. Otherwise the table computes them."""
    return strategy in FROM_FEATURES or _CLUSTERS.fullmatch(strategy) is not None


def is_known(strategy: str) -> bool:
    """Whether `strategy` exists."""
    return strategy in NATIVE or needs_features(strategy)


def _source(strategy: str, read: Read, ids: np.ndarray) -> np.ndarray:
    """Returns the strategy's features as float64 [n, F]: images, texts, or images − texts."""
    what = strategy.removesuffix("_pca")
    names = ["img_features", "txt_features"] if what == "imgtxt" else [f"{what}_features"]
    found = read(ids, names)
    parts = [np.asarray(_to_numpy(found[name], name), np.float64).reshape(len(ids), -1)
             for name in names]
    if len(parts) == 1:
        return parts[0]
    if parts[0].shape != parts[1].shape:
        raise ValueError(f"img_features are {parts[0].shape[1]} wide and txt_features "
                         f"{parts[1].shape[1]}: there is no difference of the two")
    return parts[0] - parts[1]


def projection(features: int, dim: int, seed: int) -> np.ndarray:
    """Makes a seeded random projection. Shape: float64 [features, dim], entries of variance 1/features."""
    random = np.random.Generator(np.random.Philox(key=seed))
    return random.standard_normal((features, dim)) / np.sqrt(features)


class PrincipalComponents:
    """The mean and covariance of a stream of rows, and its directions of largest variance."""

    def __init__(self, features: int) -> None:
        """Makes an empty stream of rows with `features` columns."""
        self._count = 0
        self._sum = np.zeros(features)
        self._products = np.zeros((features, features))

    def add(self, rows: np.ndarray) -> None:
        """Adds rows. Shape: float64 [n, features]."""
        self._count += len(rows)
        self._sum += rows.sum(axis=0)
        self._products += rows.T @ rows

    def directions(self, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (mean [F], directions [F, dim], standard deviation along each [dim]).

        A direction's largest entry is positive, so that signs do not depend on the solver.
        Errors: ValueError when there are fewer than `dim` columns.
        """
        if dim > len(self._sum):
            raise ValueError(f"embedding_dim: {dim}, but the features have only {len(self._sum)} "
                             "columns to find principal components in")
        mean = self._sum / self._count
        covariance = self._products / self._count - np.outer(mean, mean)
        values, vectors = np.linalg.eigh(covariance)
        vectors = vectors[:, ::-1][:, :dim]
        largest = np.abs(vectors).argmax(axis=0)
        vectors = vectors * np.where(vectors[largest, np.arange(dim)] < 0, -1.0, 1.0)
        return mean, vectors, np.sqrt(np.maximum(values[::-1][:dim], 0.0))


def from_features(strategy: str, dim: int, seed: int, factor: float, blocks: Blocks,
                  read: Read) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (ids, float32 [n, dim]) for each block of ids.

    projection:  features · W · factor;
    components:  the principal components, each divided by its standard deviation, · factor;
    clusters:    the projection of the cluster centre nearest to the sample's features.
    """
    if clusters := _CLUSTERS.fullmatch(strategy):
        yield from _from_clusters(clusters[1], int(clusters[2]), dim, seed, factor, blocks, read)
        return
    if not strategy.endswith("_pca"):
        weights = None
        for ids in blocks():
            rows = _source(strategy, read, ids)
            if weights is None:
                weights = projection(rows.shape[1], dim, seed)
            yield ids, (rows @ weights * factor).astype(np.float32)
        return
    components = None
    for ids in blocks():
        rows = _source(strategy, read, ids)
        components = components or PrincipalComponents(rows.shape[1])
        components.add(rows)
    if components is None:
        return
    mean, vectors, deviation = components.directions(dim)
    scale = np.divide(factor, deviation, out=np.zeros(dim), where=deviation > 1e-12)
    for ids in blocks():
        rows = _source(strategy, read, ids) - mean
        yield ids, (rows @ vectors * scale).astype(np.float32)


def _chance(ids: np.ndarray, seed: int) -> np.ndarray:
    """Computes a pseudo-random number per id from the seed, uniform over 64 bits. Shape: uint64 [n].

    Source: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    z = ids.astype(np.uint64) + np.uint64((seed * 2 + 1) * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(31))


def _from_clusters(source: str, clusters: int, dim: int, seed: int, factor: float, blocks: Blocks,
                   read: Read) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    # The centres are those of a sample: the ids of the lowest chances, whoever is asked first.
    # Source: Cohen and Kaplan, "Summarizing data using bottom-k sketches", PODC 2007, section 2.
    ids, rows = np.empty(0, np.int64), None
    for some in blocks():
        new = _source(source, read, some)
        ids = np.concatenate([ids, some])
        rows = new if rows is None else np.concatenate([rows, new])
        if len(ids) > SAMPLE:
            kept = np.sort(np.argpartition(_chance(ids, seed), SAMPLE)[:SAMPLE])
            ids, rows = ids[kept], rows[kept]
    if rows is None:
        return
    if clusters > len(rows):
        raise ValueError(f"initialization_strategy: {clusters} clusters of {len(rows)} samples")
    centres, _ = k_means(rows, clusters, seed)
    first = (centres @ projection(rows.shape[1], dim, seed) * factor).astype(np.float32)
    for some in blocks():
        yield some, first[_squares(_source(source, read, some), centres).argmin(axis=1)]


class EmbeddingInitializer:
    """A source of first rows: from features, from clusters of features, or from rows trained before.

        rows = EmbeddingInitializer(64, seed=1).from_clusters(features, clusters=20)
        manager.update_embeddings(ids, rows)
    """

    def __init__(self, embedding_dim: int, seed: int = 0) -> None:
        """Makes a source of rows with `embedding_dim` floats. The same seed gives the same rows."""
        self.embedding_dim = embedding_dim
        self.seed = seed

    def from_features(self, features: Any, method: str = "pca") -> np.ndarray:
        """Computes rows from features. method: "identity" copies them; "pca": principal components; "random": a seeded projection.

        Shape:  features [n, F] in; float32 [n, embedding_dim] out.
        Errors: ValueError (another method; identity with F ≠ embedding_dim; pca with too small F).
        """
        rows = np.asarray(_to_numpy(features, "features"), np.float64)
        if rows.ndim != 2:
            raise ValueError(f"features: shape {rows.shape} where (samples, columns) is needed")
        if method == "identity":
            if rows.shape[1] != self.embedding_dim:
                raise ValueError(f"features: {rows.shape[1]} columns, but embedding_dim is "
                                 f"{self.embedding_dim}; use method='pca' or 'random'")
            return rows.astype(np.float32)
        if method == "random":
            return (rows @ projection(rows.shape[1], self.embedding_dim, self.seed)).astype(
                np.float32)
        if method != "pca":
            raise ValueError(f"method: {method!r} is none of identity, pca, random")
        components = PrincipalComponents(rows.shape[1])
        components.add(rows)
        mean, vectors, _ = components.directions(self.embedding_dim)
        return ((rows - mean) @ vectors).astype(np.float32)

    def from_clusters(self, features: Any, clusters: int, kind: str = "kmeans",
                      method: str = "pca", iterations: int = 50) -> np.ndarray:
        """Sets each sample's row to the centre of its cluster, reduced to embedding_dim by `method`.

        kind: "kmeans"; or "gmm", a mixture of normals with diagonal covariance, whose centre is the
        mean of the components weighted by their probabilities.

        Shape:  as from_features().
        Errors: as from_features(); ValueError for more clusters than samples.
        """
        rows = np.asarray(_to_numpy(features, "features"), np.float64)
        if not 1 <= clusters <= len(rows):
            raise ValueError(f"clusters: {clusters} for {len(rows)} samples")
        centres, nearest = k_means(rows, clusters, self.seed, iterations)
        if kind == "kmeans":
            return self.from_features(centres[nearest], method)
        if kind != "gmm":
            raise ValueError(f"kind: {kind!r} is none of kmeans, gmm")
        return self.from_features(_mixture(rows, centres, nearest, iterations), method)

    def from_pretrained(self, folder: str, sample_ids: Any) -> np.ndarray:
        """Returns rows from the chunk files `embeddings_chunk_<k>.pt` in `folder`, in the order of sample_ids.

        Errors: KeyError naming an id that no file holds; ValueError (another dim); CorruptError.
        """
        wanted = list(sample_ids.tolist() if hasattr(sample_ids, "tolist") else sample_ids)
        places: dict[Any, list[int]] = {}
        for at, one in enumerate(wanted):
            places.setdefault(one, []).append(at)
        out = np.empty((len(wanted), self.embedding_dim), np.float32)
        for path in chunk_files(folder):
            ids, rows = read_chunk(path, self.embedding_dim)
            for one, row in zip(ids, rows, strict=True):
                for at in places.pop(one, ()):
                    out[at] = row
        if places:
            raise KeyError(f"{folder}: no chunk file holds sample {next(iter(places))!r}")
        return out


def _squares(rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Computes squared distances, [n, k]."""
    squares = ((rows ** 2).sum(1)[:, None] - 2.0 * rows @ centres.T + (centres ** 2).sum(1))
    return np.maximum(squares, 0.0)


def k_means(rows: np.ndarray, clusters: int, seed: int,
            iterations: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Computes (centres [k, F], index of the centre nearest to each row [n]).

    Source: Arthur and Vassilvitskii, "k-means++", 2007, for the first centres; then Lloyd's steps
    until nothing moves, at most `iterations`. A centre without rows does not move.
    """
    random = np.random.Generator(np.random.Philox(key=seed))
    centres = rows[[int(random.random() * len(rows))]]
    for _ in range(clusters - 1):
        nearest = _squares(rows, centres).min(axis=1)
        total = nearest.cumsum()
        pick = np.searchsorted(total, random.random() * total[-1], side="right")
        centres = np.concatenate([centres, rows[[min(int(pick), len(rows) - 1)]]])
    assigned = _squares(rows, centres).argmin(axis=1)
    for _ in range(iterations):
        for cluster in range(clusters):
            members = rows[assigned == cluster]
            if len(members):
                centres[cluster] = members.mean(axis=0)
        moved = _squares(rows, centres).argmin(axis=1)
        if np.array_equal(moved, assigned):
            break
        assigned = moved
    return centres, assigned


def _mixture(rows: np.ndarray, centres: np.ndarray, nearest: np.ndarray,
             iterations: int) -> np.ndarray:
    """Runs expectation-maximisation from k-means. Returns the expected centre of each row."""
    floor = 1e-6 * max(float(rows.var()), 1e-12)
    means = centres.copy()
    weights = np.bincount(nearest, minlength=len(means)) / len(rows) + 1e-12
    variances = np.tile(rows.var(axis=0) + floor, (len(means), 1))
    likely = np.zeros((len(rows), len(means)))
    before = -np.inf
    for _ in range(iterations):
        scores = np.stack([
            np.log(weight) - 0.5 * (((rows - mean) ** 2 / variance).sum(1)
                                    + np.log(2 * np.pi * variance).sum())
            for weight, mean, variance in zip(weights, means, variances, strict=True)], axis=1)
        top = scores.max(axis=1)
        total = top + np.log(np.exp(scores - top[:, None]).sum(1))
        likely = np.exp(scores - total[:, None])
        mass = likely.sum(0) + 1e-12
        weights = mass / mass.sum()
        means = likely.T @ rows / mass[:, None]
        variances = likely.T @ rows ** 2 / mass[:, None] - means ** 2
        variances = np.maximum(variances, floor)
        if abs(total.mean() - before) < 1e-9:
            break
        before = total.mean()
    return likely @ means
