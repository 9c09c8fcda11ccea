# SPDX-License-Identifier: Apache-2.0
"""Tensors in safetensors files: where each lies, how they are read past the page cache, and one file of new ones.

Source: github.com/huggingface/safetensors, README, "Format": u64 header length | JSON header | tensor bytes.

Threads: WeightReader is single-owner.   Memory: headers; a reader has one piece of a file, READER_BYTES in all.
"""
from __future__ import annotations

import dataclasses
import json
import mmap
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from ._folders import replaced
from .errors import CorruptError, NotFoundError

if TYPE_CHECKING:
    import torch

_PIECE = 4 << 20
_CONVERTED = 32 << 10  # Bytes converted at a time: fewer numbers than torch would share among threads.
READER_BYTES = _PIECE + _CONVERTED
_PAGE = 4096  # What direct reads are multiples of.
_NUMBER = 8  # Bytes of the widest one.
_HEADER_MAX = 100_000_000
_KINDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
          "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}


@dataclasses.dataclass
class Place:
    """Of one tensor."""

    name: str
    path: pathlib.Path
    begin: int
    """Bytes, from the beginning of the file."""
    size: int
    dtype: str
    """As torch calls it: "bfloat16"."""
    shape: tuple[int, ...]
    wanted: str = ""
    """The dtype it is to have in memory; "": the same."""
    checksum: int = -1
    """CRC-32C of the file's bytes, when they were read last; −1: never. Written by who reads."""
    expected: int = -1
    """What it must be; −1: nobody knows yet. Written by expect()."""

    @property
    def memory_bytes(self) -> int:
        """Of its numbers in memory."""
        import torch

        if not self.wanted:
            return self.size
        return self.size // getattr(torch, self.dtype).itemsize * getattr(torch, self.wanted).itemsize

    def expect(self, checksum: int) -> None:
        """Errors: CorruptError where another was read; else whoever reads it will meet that."""
        self.expected = checksum
        if self.checksum >= 0:
            self.compare(self.checksum)

    def compare(self, checksum: int) -> None:
        """Errors: CorruptError."""
        for other in (self.expected, self.checksum):
            if other >= 0 and checksum != other:
                raise CorruptError(f"{self.path}: {self.name} is not what training began with: its checksum is "
                                   f"{checksum:08x} and was {other:08x}. Put the file back, or train anew")


def places_in(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> dict[str, Place]:
    """By name, of a file, a folder's *.safetensors, or several files.

    Errors: NotFoundError; CorruptError (no such file, or one that was cut off); ValueError for a name twice.
    """
    if isinstance(files, (str, os.PathLike)):
        one = pathlib.Path(files)
        paths = sorted(one.glob("*.safetensors")) if one.is_dir() else [one]
        if not paths:
            raise NotFoundError(f"files: {one} has no *.safetensors")
    else:
        paths = [pathlib.Path(one) for one in files]
    found: dict[str, Place] = {}
    for path in paths:
        for place in _places_of(path):
            if place.name in found:
                raise ValueError(f"files: {place.name} is in {found[place.name].path} and in {path}")
            found[place.name] = place
    return found


def _places_of(path: pathlib.Path) -> Iterator[Place]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_MAX):
                raise CorruptError(f"{path}: is no safetensors file, or was cut off")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise NotFoundError(f"files: {path} is not there") from None
    except ValueError as error:
        raise CorruptError(f"{path}: its header is damaged: {error}") from None
    for name, one in header.items():
        if name != "__metadata__":
            begin, end = one["data_offsets"]
            if not 0 <= begin <= end <= size - 8 - length:
                raise CorruptError(f"{path}: was cut off: {name} ends at byte {8 + length + end} of {size}")
            yield Place(name, path, 8 + length + begin, end - begin, _KINDS.get(one["dtype"], one["dtype"]),
                        tuple(one["shape"]))


def write_tensors(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    """One file of them, beside its name first. Errors: OSError; ValueError for a dtype that has no name there."""
    names = {kind: text for text, kind in _KINDS.items()}
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        kind, size = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()
        if kind not in names:
            raise ValueError(f"{name}: safetensors files have no {kind}")
        header[name] = {"dtype": names[kind], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replaced(path, durable=False) as partial, open(partial, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(memoryview(bytes_of(tensor)))


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Those of a tensor, uint8; copied where they are not in order."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


class WeightReader:
    """Reads tensors with direct reads, where the file system has them, and checks their sums."""

    def __init__(self) -> None:
        self._files: dict[pathlib.Path, int] = {}
        self._piece = mmap.mmap(-1, _PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = np.frombuffer(self._piece, dtype=np.uint8)
        self._aligned = np.empty(_CONVERTED, dtype=np.uint8)

    def read(self, place: Place, into: np.ndarray) -> None:
        """All of a tensor, uint8 [memory_bytes], converted to the dtype that is wanted as Tensor.to() does.

        The first time its checksum is kept in `place`, and afterwards compared.
        Errors: CorruptError naming file and tensor; OSError.
        """
        done, made, checksum = 0, 0, 0
        while done < place.size:
            at = place.begin + done
            first = at // _PAGE * _PAGE
            span = min(_PIECE, -(-(at - first + place.size - done) // _PAGE) * _PAGE)
            got = os.preadv(self._file(place.path), [memoryview(self._piece)[:span]], first)
            size = min(got - (at - first), place.size - done)
            if size < place.size - done:
                size -= size % _NUMBER  # Numbers are not cut.
            if size <= 0:
                raise CorruptError(f"{place.path}: was cut off within {place.name}")
            piece = self._view[at - first:at - first + size]
            if place.wanted:
                made += self._convert(piece, place, into[made:])
                checksum = _core.crc32c(piece, checksum)
            else:
                into[done:done + size] = piece
                checksum = _core.crc32c(into[done:done + size], checksum)
            done += size
        place.compare(checksum)
        place.checksum = checksum
        place.compare(checksum)  # With what has come to be expected meanwhile.

    def _convert(self, piece: np.ndarray, place: Place, into: np.ndarray) -> int:
        """Bytes that a piece of numbers has become."""
        import torch

        kind, made = getattr(torch, place.wanted), 0
        for begin in range(0, len(piece), _CONVERTED):
            part = self._aligned[:min(_CONVERTED, len(piece) - begin)]
            part[:] = piece[begin:begin + len(part)]  # It may begin anywhere in the file.
            numbers = torch.from_numpy(part).view(getattr(torch, place.dtype))
            size = numbers.numel() * kind.itemsize
            torch.from_numpy(into[made:made + size]).view(kind).copy_(numbers)
            made += size
        return made

    def _file(self, path: pathlib.Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                if isinstance(error, FileNotFoundError):
                    raise
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # Such as on a tmpfs.
        return self._files[path]

    def close(self) -> None:
        for one in self._files.values():
            os.close(one)
        self._files.clear()
