# SPDX-License-Identifier: Apache-2.0
"""Gives the peer the program's own start: sample order, neighbour picks, first rows and weights.

The program draws every random number as a pure function of (seed, stream, counter), so that NumPy
can draw the same ones. The formulas are those of src/base/philox.h, src/base/sample_order.cpp,
src/store/row_init.h and python/plimsoll/recipes/cosir/_model.py; equal losses in the first step show that they
still agree.

Memory: about 40 bytes a row.
"""
import ctypes
import ctypes.util

import numpy as np

U64 = np.uint64
MASK32 = U64(0xFFFFFFFF)
# The uses of a run's seed, as `Purpose` in python/plimsoll/recipes/cosir/_random.py numbers them.
MODEL, ROWS, ORDER = 1, 2, 3


def philox(seed: int, stream, counter) -> np.ndarray:
    """Philox-4x32-10: uint64 [n, 4] of 32-bit words for arrays of streams and counters."""
    stream, counter = np.broadcast_arrays(np.asarray(stream, U64), np.asarray(counter, U64))
    x = [counter & MASK32, counter >> U64(32), stream & MASK32, stream >> U64(32)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p0, p1 = U64(0xD2511F53) * x[0], U64(0xCD9E8D57) * x[2]
        x = [(p1 >> U64(32)) ^ x[1] ^ U64(key[0]), p1 & MASK32,
             (p0 >> U64(32)) ^ x[3] ^ U64(key[1]), p0 & MASK32]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(x, -1)


def mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def seed_for(seed: int, purpose: int) -> int:
    return mix64(seed ^ mix64(purpose))


def uniform01(words: np.ndarray) -> np.ndarray:
    return ((words >> U64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def libm(name: str):
    """The C library's float32 function, over arrays; NumPy's own rounds the last bit otherwise."""
    function = getattr(ctypes.CDLL(ctypes.util.find_library("m")), name)
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
    return lambda x: np.fromiter(map(function, x.ravel().tolist()), np.float32,
                                 x.size).reshape(x.shape)


def normals(words: np.ndarray) -> np.ndarray:
    """Box and Muller on pairs of words, [n, 2k]: float32 of the same shape."""
    u = uniform01(words)
    radius = np.sqrt(np.float32(-2) * libm("logf")(u[:, 0::2]))
    angle = np.float32(6.28318530717958647692) * u[:, 1::2]
    return np.stack([radius * libm("cosf")(angle), radius * libm("sinf")(angle)],
                    -1).reshape(words.shape)


def uniform_tensor(shape, width: float, seed: int, stream: int) -> np.ndarray:
    count = int(np.prod(shape))
    words = philox(seed, stream, np.arange(-(-count // 4))).reshape(-1)[:count]
    return (np.float32(width) * (np.float32(2) * uniform01(words) - np.float32(1))).reshape(shape)


def normal_tensor(shape, seed: int, stream: int) -> np.ndarray:
    count = int(np.prod(shape))
    words = philox(seed, stream, np.arange(-(-count // 4)))
    return normals(words).ravel()[:count].reshape(shape)


def orthonormal(dim: int, columns: int, seed: int, stream: int) -> np.ndarray:
    """Gram–Schmidt in double on normal columns: float32 [dim, columns]."""
    x = normal_tensor((columns, dim), seed, stream).astype(np.float64)
    for k in range(columns):
        for _ in range(2):
            for j in range(k):
                x[k] -= (x[k] @ x[j]) * x[j]
        x[k] /= np.sqrt(x[k] @ x[k])
    return np.ascontiguousarray(x.T, np.float32)


def model_weights(seed: int, dim: int, label_dim: int = 2) -> dict[str, np.ndarray]:
    """The combiner of a run with seed `seed`, under the peer's names. Streams count up."""
    seed = seed_for(seed, MODEL)
    weights = {"direction.weight": orthonormal(dim, label_dim, seed, 0),
               "direction.bias": uniform_tensor((dim,), dim**-0.5, seed, 1)}
    stream = 2
    for branch in ("radius", "angle"):
        weights[f"{branch}.norm.weight"] = np.ones(64, np.float32)
        weights[f"{branch}.norm.bias"] = np.zeros(64, np.float32)
        for layer, out, into in (("into", 64, 1), ("out", 1, 64), ("skip", 1, 1)):
            for kind, shape in (("weight", (out, into)), ("bias", (out,))):
                weights[f"{branch}.{layer}.{kind}"] = uniform_tensor(shape, into**-0.5, seed,
                                                                     stream)
                stream += 1
    return weights


def first_rows(seed: int, ids: np.ndarray, scale: float = 0.1) -> np.ndarray:
    """Condition vectors before their first update: float32 [n, 2]."""
    return normals(philox(seed_for(seed, ROWS), ids.astype(U64), 0)[:, :2]) * np.float32(scale)


def neighbour_picks(seed: int, ids: np.ndarray, epoch: int = 0) -> np.ndarray:
    """The word whose remainder picks one of the nearest neighbours: int64 [n]."""
    return philox(seed, ids.astype(U64), epoch)[:, 0].astype(np.int64)


def sample_order(samples: int, seed: int, epoch: int = 0) -> np.ndarray:
    """The whole permutation of SampleOrder(samples, seed, epoch): int64 [samples]."""
    low, high = 4, 4
    while low + high < 62 and 2 ** (low + high) < samples:
        low, high = (low + 1, high) if low == high else (low, high + 1)
    words = philox(seed, epoch, np.arange(6))
    keys = words[:, 0] | (words[:, 1] << U64(32))

    def bits(half, key, count):
        x = (half ^ key) * U64(0xBF58476D1CE4E5B9)
        x ^= x >> U64(32)
        return (x * U64(0x94D049BB133111EB)) >> U64(64 - count)

    def turn(x):
        lows, highs = x & U64(2**low - 1), x >> U64(low)
        for i in range(0, 6, 2):
            lows ^= bits(highs, keys[i], low)
            highs ^= bits(lows, keys[i + 1], high)
        return (highs << U64(low)) | lows

    x = turn(np.arange(samples, dtype=U64))
    while (outside := x >= samples).any():
        x[outside] = turn(x[outside])
    return x.astype(np.int64)


def write_start(path, seed: int, ids: np.ndarray, groups: np.ndarray, dim: int) -> None:
    """The .npz that plain_pytorch.py starts from, for a run that holds nothing out.

    `order` gives the record at each position of the first epoch; the other rows are as the records.
    """
    # With nothing held out a record's training rank is its place in the store.
    np.savez(path, order=sample_order(len(ids), seed_for(seed, ORDER)), groups=groups,
             picks=neighbour_picks(seed, ids), rows=first_rows(seed, ids),
             **model_weights(seed, dim))
