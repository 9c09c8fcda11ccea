# SPDX-License-Identifier: Apache-2.0
"""Files: replaced whole and durably, mapped arrays, and the original's chunk files.

A chunk file `embeddings_chunk_<k>.pt` is a torch.save of {id: float32 [dim]}. They are read with
torch.load(weights_only=True), which builds tensors and plain containers and runs no code. They are
written with one storage per file, so a file is as large as its rows and a few bytes per row.

Threads: pure functions.   Memory: one file at a time.
"""
from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import re
from typing import Any

import numpy as np

from ..core._folders import replaced
from ..errors import CorruptError

_CHUNK = re.compile(r"embeddings_chunk_(\d+)\.pt")


def replace_bytes(path: pathlib.Path, *pieces: Any) -> None:
    """Replaces a file durably: it is written whole or not at all. Errors: OSError."""
    with replaced(path) as partial, open(partial, "wb") as file:
        for piece in pieces:
            file.write(piece)


def replace_npy(path: pathlib.Path, array: np.ndarray) -> None:
    """Replaces a .npy file by `array`, as replace_bytes() does."""
    header = io.BytesIO()
    array = np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(
        header, {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False,
                 "shape": array.shape})
    replace_bytes(path, header.getvalue(), array.reshape(-1).view(np.uint8).data)


def replace_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    """Replaces a JSON file by `value`, indented, as replace_bytes() does."""
    replace_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the object that replace_json() wrote; None where the file does not exist. Errors: CorruptError; OSError."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CorruptError(f"{path}: not JSON ({error}); restore the file") from None
    if not isinstance(value, dict):
        raise CorruptError(f"{path}: not a JSON object; restore the file")
    return value


def map_npy(path: pathlib.Path, raw: bool = False) -> np.ndarray:
    """Maps a .npy file for reading. raw: a file of plain bytes, as uint8. Errors: CorruptError; OSError."""
    try:
        if raw:
            empty = path.stat().st_size == 0
            return (np.empty(0, np.uint8) if empty
                    else np.asarray(np.memmap(path, np.uint8, mode="r")))
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except ValueError as error:
        raise CorruptError(f"{path}: {error}; restore the file") from None


def torch_module(why: str) -> Any:
    """Imports torch. Errors: ImportError with `why` it is needed."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"{why} needs torch, which is not installed ({error})") from None
    return torch


def chunk_files(folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Returns the original's chunk files in `folder`, by number."""
    found = [(int(match[1]), path) for path in pathlib.Path(folder).glob("embeddings_chunk_*.pt")
             if (match := _CHUNK.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def load_safely(path: pathlib.Path) -> Any:
    """Loads a file of torch.save() without running code from it. Errors: CorruptError; OSError."""
    torch = torch_module(f"reading {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else "damaged"
        raise CorruptError(
            f"{path}: not tensors and plain containers only, or damaged ({first})") from None


def read_chunk(path: pathlib.Path, dim: int) -> tuple[list[Any], np.ndarray]:
    """Returns (ids, float32 [n, dim]) of one chunk file.

    Errors: ValueError (another dim, or not floats), CorruptError, OSError.
    """
    rows = load_safely(path)
    if not isinstance(rows, dict):
        raise CorruptError(f"{path}: {type(rows).__name__} where a dict of rows is expected")
    out = np.empty((len(rows), dim), np.float32)
    for at, (one, row) in enumerate(rows.items()):
        if not hasattr(row, "detach") or tuple(row.shape) != (dim,):
            shape = list(row.shape) if hasattr(row, "shape") else type(row).__name__
            raise ValueError(f"{path}: the row of {one!r} is {shape}, but embedding_dim is {dim}")
        out[at] = row.detach().float().numpy()
    return list(rows), out


def write_chunk(path: pathlib.Path, ids: list[Any], rows: np.ndarray) -> None:
    """Writes one chunk file durably. Errors: ImportError without torch; OSError."""
    torch = torch_module("writing chunk files (.pt)")
    whole = torch.from_numpy(rows)  # One storage: a row's tensor is its place in it.
    buffer = io.BytesIO()
    torch.save({one: whole[at] for at, one in enumerate(ids)}, buffer)
    replace_bytes(path, buffer.getbuffer())
