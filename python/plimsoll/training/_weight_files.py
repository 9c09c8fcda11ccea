# SPDX-License-Identifier: Apache-2.0
"""Tensors in safetensors files: their places, reads past the page cache, and writing a new file.

Source: github.com/huggingface/safetensors, README, "Format": u64 header length | JSON header | tensor bytes.

Threads: WeightReader is single-owner.   Memory: headers; a reader has one piece of a file, READER_BYTES in all.
"""
from __future__ import annotations

import dataclasses
import json
import mmap
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..core._folders import replaced
from ..errors import CorruptError, NotFoundError

if TYPE_CHECKING:
    import torch

_PIECE = 4 << 20
_IN_PLACE = 64 << 10  # Bytes: a smaller tensor is copied, which wastes less than pages of its own.
_CONVERTED = 32 << 10  # Bytes converted at a time: too few for torch to use several threads.
READER_BYTES = _PIECE + _CONVERTED
_MADE_OF = "made_of"
_PAGE = 4096  # What direct reads are multiples of.
ALIGNED = 64  # Bytes: tensors begin there in memory, as torch's own do, and kernels compute the same.
_NUMBER = 8  # Bytes of the widest one.
_NUMBERS = {"float64", "float32", "float16", "bfloat16"}  # Which are converted to one another.
_SETTLED_NS = 2_000_000_000  # Clocks of file systems tick in seconds at worst.
_HEADER_MAX = 100_000_000
_KINDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
          "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}


@dataclasses.dataclass
class Place:
    """The place of a tensor in a safetensors file."""

    name: str
    path: pathlib.Path
    begin: int
    """Offset in the file, in bytes."""
    size: int
    dtype: str
    """The tensor's dtype in the file, by torch's name: "bfloat16"."""
    shape: tuple[int, ...]
    wanted: str = ""
    """The dtype wanted in memory; "": the file's."""
    checksum: int = -1
    """CRC-32C of the file's bytes at the first read; −1: not read yet. The reader writes it."""
    seen: tuple[int, ...] = ()
    """The file's state when the checksum was computed: see _state_of()."""
    expected: int = -1
    """The checksum that the tensor must have; −1: unknown. Written by expect()."""

    @property
    def memory_bytes(self) -> int:
        """The bytes of the tensor in memory."""
        import torch

        if not self.wanted:
            return self.size
        return self.size // getattr(torch, self.dtype).itemsize * getattr(torch, self.wanted).itemsize

    @property
    def in_place(self) -> bool:
        """Whether pages of the file may be read to the tensor's final place."""
        return not self.wanted and self.begin % ALIGNED == 0 and self.size >= _IN_PLACE

    def expect(self, checksum: int) -> None:
        """Sets the checksum that the tensor must have. Errors: CorruptError where another was read already."""
        self.expected = checksum
        if self.checksum >= 0:
            self.compare(self.checksum)

    def compare(self, checksum: int) -> None:
        """Compares `checksum` with the known ones. Errors: CorruptError."""
        for other in (self.expected, self.checksum):
            if other >= 0 and checksum != other:
                raise CorruptError(f"{self.path}: {self.name} is not what training began with: its checksum is "
                                   f"{checksum:08x} and was {other:08x}. Put the file back, or train anew")


def places_in(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> dict[str, Place]:
    """Returns the tensors' places by name. files: a file, a folder with *.safetensors, or several files.

    Errors: NotFoundError; CorruptError (not a safetensors file, or cut off); ValueError for a name that occurs twice.
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


def _header_of(path: pathlib.Path) -> tuple[dict[str, Any], int, int]:
    """Returns (the header, its bytes, the file's bytes)."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_MAX):
                raise CorruptError(f"{path}: is no safetensors file, or was cut off")
            return json.loads(file.read(length)), length, size
    except FileNotFoundError:
        raise NotFoundError(f"files: {path} is not there") from None
    except ValueError as error:
        raise CorruptError(f"{path}: its header is damaged: {error}") from None


def _places_of(path: pathlib.Path) -> Iterator[Place]:
    header, length, size = _header_of(path)
    for name, one in header.items():
        if name != "__metadata__":
            begin, end = one["data_offsets"]
            if not 0 <= begin <= end <= size - 8 - length:
                raise CorruptError(f"{path}: was cut off: {name} ends at byte {8 + length + end} of {size}")
            yield Place(name, path, 8 + length + begin, end - begin, _KINDS.get(one["dtype"], one["dtype"]),
                        tuple(one["shape"]))


def laid_out(places: Iterable[Place]) -> tuple[list[int], int]:
    """Returns (begin of each tensor, bytes of all) in page-aligned memory. A tensor that is read in place has pages of its own,
    and begins at the same offset in its page as in the file."""
    begins, end = [], 0
    for place in places:
        if place.in_place:
            begin = -(-end // _PAGE) * _PAGE + place.begin % _PAGE
            end = -(-(begin + place.memory_bytes) // _PAGE) * _PAGE
        else:
            begin = -(-end // ALIGNED) * ALIGNED
            end = begin + place.memory_bytes
        begins.append(begin)
    return begins, end


def names_in(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Returns the model's name for each of the `names` in its files. transformers saves some tensors under the names of their first
    release (GPT-NeoX's lm_head as "embed_out"); its renaming rules give the new ones. Tensors that it merges keep their names.
    """
    loaded = sys.modules.get("transformers.modeling_utils")
    inner = next((part for part in model.modules() if isinstance(part, loaded.PreTrainedModel)), None) if loaded else None
    if inner is None:
        return {name: name for name in names}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [one for one in get_model_conversion_mapping(inner) if isinstance(one, WeightRenaming)]
    own = {name.replace(".base_layer", "") for named in (inner.named_parameters, inner.named_buffers)
           for name, _ in named(remove_duplicate=False)}
    found = {}
    for name in sorted(names):  # Some renamings depend on this order.
        renamed = name
        for one in renamings:
            renamed, _ = one.rename_source_key(renamed)
        found[name] = name if renamed not in own and name in own else renamed
    return found


def renamed(model: Any, places: dict[str, Place]) -> dict[str, Place]:
    """Returns the places by the model's names."""
    names = names_in(model, places)
    return {names[name]: place for name, place in places.items()}


def plain(name: str) -> str:
    """Returns the name without PEFT's additions."""
    return name.replace("base_model.model.", "", 1).replace(".base_layer", "")


def found_in(full_name: str, tensor: Any, places: dict[str, Place]) -> Place | None:
    """Returns the place with the values of a tensor of this dtype and shape, or None. Errors: ValueError where dtype or shape differ."""
    short = plain(full_name)
    found = places.get(full_name) or places.get(short)
    if found is None:
        ends = [place for name, place in places.items() if name.endswith("." + short) or short.endswith("." + name)]
        if len(ends) != 1:
            return None
        found = ends[0]
    kind = str(tensor.dtype).removeprefix("torch.")
    if found.shape != tuple(tensor.shape) or (found.dtype != kind and not {found.dtype, kind} <= _NUMBERS):
        raise ValueError(f"files: {found.name} of {found.path} is {found.dtype} {list(found.shape)}, and the model's is "
                         f"{kind} {list(tensor.shape)}: these are the files of another model")
    found.wanted = kind if found.dtype != kind else ""
    return found


def write_tensors(path: pathlib.Path, tensors: dict[str, torch.Tensor], values: Iterable[torch.Tensor] | None = None, made_of: str = "") -> None:
    """Writes `tensors` to one safetensors file, which appears whole. Errors: OSError; ValueError for a dtype that safetensors lacks.

    values: the values, in the order of `tensors`, which then may be on the meta device. made_of: text that made_of() returns for the file.
    """
    names = {kind: text for text, kind in _KINDS.items()}
    header: dict[str, Any] = {"__metadata__": {_MADE_OF: made_of}} if made_of else {}
    at = 0
    for name, tensor in tensors.items():
        kind, size = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()
        if kind not in names:
            raise ValueError(f"{name}: safetensors files have no {kind}")
        header[name] = {"dtype": names[kind], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    with replaced(path, durable=False) as partial, open(partial, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values() if values is None else values:
            file.write(bytes_of(tensor).data)


def made_of(path: pathlib.Path) -> str:
    """Returns the text that write_tensors() stored in the file; "" for none, or for no file."""
    try:
        return str(_header_of(path)[0].get("__metadata__", {}).get(_MADE_OF, ""))
    except (NotFoundError, CorruptError):
        return ""


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Returns a tensor's bytes, uint8; copied where it is not contiguous."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


class WeightReader:
    """A reader of tensors that checks their checksums. It uses direct reads where the file system has them."""

    def __init__(self) -> None:
        self._files: dict[pathlib.Path, int] = {}
        self._piece = mmap.mmap(-1, _PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = np.frombuffer(self._piece, dtype=np.uint8)
        self._aligned = np.empty(_CONVERTED, dtype=np.uint8)

    def read(self, place: Place, into: np.ndarray) -> None:
        """Reads a whole tensor into `into`, uint8 [memory_bytes], converted to the wanted dtype as Tensor.to() does.

        The first read stores the checksum in `place`. Later reads compare it where the file has changed.
        Errors: CorruptError naming file and tensor; OSError.
        """
        made = 0

        def copy(piece: np.ndarray, done: int) -> None:
            nonlocal made
            if place.wanted:
                made += self._convert(piece, place, into[made:])
            else:
                into[done:done + len(piece)] = piece

        self._read(place, lambda _, span: self._view[:span], copy)

    def read_in_place(self, place: Place, memory: np.ndarray, begin: int) -> None:
        """Reads a tensor that is in_place to `begin` of memory laid out by laid_out(). Otherwise as read()."""
        origin = begin - place.begin
        self._read(place, lambda first, span: memory[origin + first:origin + first + span], lambda *_: None)

    def _read(self, place: Place, memory_of: Callable[[int, int], np.ndarray],
              take: Callable[[np.ndarray, int], None]) -> None:
        file = self.open(place.path)
        state, done, checksum = _state_of(file), 0, 0
        known = place.seen == state != ()
        while done < place.size:
            at = place.begin + done
            first = at // _PAGE * _PAGE
            span = min(_PIECE, -(-(at - first + place.size - done) // _PAGE) * _PAGE)
            memory = memory_of(first, span)
            got = os.preadv(file, [memory.data], first)
            size = min(got - (at - first), place.size - done)
            if size < place.size - done:
                size -= size % _NUMBER  # Numbers are not cut.
            if size <= 0:
                raise CorruptError(f"{place.path}: was cut off within {place.name}")
            piece = memory[at - first:at - first + size]
            take(piece, done)
            if not known:  # The piece is still in the processor's cache.
                checksum = _core.crc32c(piece, checksum)
            done += size
        if not known:
            place.compare(checksum)
            place.checksum, place.seen = checksum, state
            place.compare(checksum)  # expect() may have been called meanwhile.

    def _convert(self, piece: np.ndarray, place: Place, into: np.ndarray) -> int:
        """Converts a piece of numbers. Returns the bytes written."""
        import torch

        kind, made = getattr(torch, place.wanted), 0
        for begin in range(0, len(piece), _CONVERTED):
            part = self._aligned[:min(_CONVERTED, len(piece) - begin)]
            part[:] = piece[begin:begin + len(part)]  # The piece may begin at an unaligned address.
            numbers = torch.from_numpy(part).view(getattr(torch, place.dtype))
            size = numbers.numel() * kind.itemsize
            torch.from_numpy(into[made:made + size]).view(kind).copy_(numbers)
            made += size
        return made

    def open(self, path: pathlib.Path, name: pathlib.Path | None = None) -> int:
        """Returns the file's descriptor; opens it at the first call. name: the path that places have for it."""
        name = name or path
        if name not in self._files:
            try:
                self._files[name] = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                if isinstance(error, FileNotFoundError):
                    raise
                self._files[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # A tmpfs has no direct reads.
        return self._files[name]

    def close(self) -> None:
        for one in self._files.values():
            os.close(one)
        self._files.clear()


def _state_of(file: int) -> tuple[int, ...]:
    """Returns a state that changes with every write to an open file. (): the last write is so recent that another might not show."""
    now = os.fstat(file)
    return () if time.time_ns() - now.st_mtime_ns < _SETTLED_NS else (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns,
                                                                      now.st_ctime_ns)
