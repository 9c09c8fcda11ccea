# SPDX-License-Identifier: Apache-2.0
"""TorchFile: a file of torch.save as plain values and NumPy arrays. Torch is not needed, and no code in the file is run.

Python's unpickler reads it, with an allowed list: of instructions, and of names. A tensor becomes a note of where its elements
lie, a known class becomes a Record, and any other name is refused. The unpickler is the one written in Python, as the other makes
room for as many values as a file claims to have. Checksums of the zip are compared before anything is unpickled.

Reading order: unpickle(), TorchFile.
Threads: single-owner.   Memory: leased for the directory of the zip and the values; tensors are read one at a time.
"""
from __future__ import annotations

import array
import errno
import io
import math
import os
import pathlib
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ... import _core
from ...errors import CorruptError

_PIECE = 1 << 20
_STEP = 4096  # Tensors between two calls of step().
_DIRECTORY_FACTOR, _PICKLE_FACTOR = 10, 10  # Python's bytes for one byte of the file's: of a zip's entries, and of values.
_EXPANDED_MOST = 4 << 20  # Bytes of a tensor that repeats its elements.
_DIMS_MOST = 4
_NO_ZIP = "no whole zip, so cut short or damaged, or not saved by torch 1.6 or later"
# torch.save and pickle.dump write no other instructions for what such a file may hold.
_INSTRUCTIONS = """PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE
    SHORT_BINBYTES BINBYTES EMPTY_LIST APPEND APPENDS EMPTY_DICT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 GLOBAL STACK_GLOBAL NEWOBJ
    REDUCE BINPERSID BINPUT LONG_BINPUT BINGET LONG_BINGET MEMOIZE"""
_TYPES = {"FloatStorage": "f4", "DoubleStorage": "f8", "HalfStorage": "f2", "BFloat16Storage": "", "LongStorage": "i8", "IntStorage": "i4",
          "ShortStorage": "i2", "CharStorage": "i1", "ByteStorage": "u1", "BoolStorage": "u1"}


class Refused(Exception):
    """A file asks for what an allowed list has not."""


class Tensor(NamedTuple):
    """Where a tensor's elements lie, counted in elements."""

    dtype: str
    """NumPy's name of their type; "" where it has none (bfloat16)."""
    storage: int
    """Its number in the file."""
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Record:
    """An object of a class that is known by name alone."""

    __slots__ = ("state",)
    kind = ""
    state: Any


class _Storage(NamedTuple):
    dtype: str
    number: int


class _NumberType:
    """A NumPy type, of which whole numbers are read."""

    def __init__(self, name: str, *_: object) -> None:
        if not re.fullmatch("[iu][1248]", name):
            raise Refused("holds a NumPy number that is not whole")
        self.name = "<" + name

    def set(self, state: tuple[Any, ...]) -> None:
        self.name = {"<": "<", ">": ">", "|": "<"}[state[1]] + self.name[1:]


def _number(dtype: _NumberType, raw: bytes) -> int:
    return int(np.frombuffer(raw, dtype.name, 1)[0])


def _tensor(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object) -> Tensor:
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or len(shape) > _DIMS_MOST or any(type(one) is not int or not 0 <= one < 1 << 62 for one in numbers):
        raise Refused("holds a tensor of an impossible shape")
    return Tensor(storage.dtype, storage.number, offset, tuple(shape), tuple(strides))


def _ordered() -> dict[Any, Any]:
    return {}


def _bytes(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


_KNOWN: dict[str, Any] = {
    "collections.OrderedDict": _ordered, "torch._utils._rebuild_tensor": _tensor, "torch._utils._rebuild_tensor_v2": _tensor,
    "numpy.dtype": _NumberType, "numpy.core.multiarray.scalar": _number, "numpy._core.multiarray.scalar": _number, "_codecs.encode": _bytes,
    **{f"torch.{name}": dtype for name, dtype in _TYPES.items()}}


class _Memo(list[Any]):
    """Values by their number, which counts up: a file cannot claim a far one."""

    def __setitem__(self, at: Any, value: Any) -> None:
        if at == len(self):
            self.append(value)
        else:
            super().__setitem__(at, value)


class _Instructions(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise Refused(f"has an instruction {code:#04x} that torch.save does not write")


class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Any]] = _Instructions(
        (code[0], pickle._Unpickler.dispatch[code[0]]) for code in (getattr(pickle, name) for name in _INSTRUCTIONS.split()))

    def __init__(self, data: bytes, keep: Callable[[str, Any], Any] | None, is_record: Callable[[str, str], bool],
                 step: Callable[[], object]) -> None:
        super().__init__(io.BytesIO(data))
        self.memo = _Memo()
        self._keep = keep
        self._is_record = is_record
        self._step = step
        self._seen = 0
        self._records: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        whole = f"{module}.{name}"
        if whole in _KNOWN:
            return _KNOWN[whole]
        if not self._is_record(module, name):
            raise Refused(f"asks for {whole}, which is not among what such a file may hold")
        if whole not in self._records:
            self._records[whole] = type(name, (Record,), {"kind": whole, "__slots__": ()})
        return self._records[whole]

    def persistent_load(self, pid: Any) -> _Storage:
        word, dtype, name, _, _ = pid
        if word != "storage" or dtype not in _TYPES.values() or not re.fullmatch("[0-9]{1,19}", name):
            raise Refused("holds a storage of a kind or name that is not known")
        self._seen += 1
        if self._seen % _STEP == 0:
            self._step()
        return _Storage(dtype, int(name))

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]  # type: ignore[attr-defined]
        if isinstance(made, Record):
            made.state = state if self._keep is None else self._keep(made.kind, state)
        elif isinstance(made, _NumberType):
            made.set(state)
        else:
            raise Refused("has a state for what can have none")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()  # type: ignore[attr-defined]
        self._set([key, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())  # type: ignore[attr-defined]

    def _set(self, items: list[Any]) -> None:
        made = self.stack[-1]  # type: ignore[attr-defined]
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(made) is not dict or type(key) not in (str, int, float, bool, type(None)):  # Not a tuple of a million tuples.
                raise Refused("has items for what takes none")
            made[key] = value

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


def unpickle(data: bytes, path: pathlib.Path, advice: str, *, is_record: Callable[[str, str], bool] = lambda module, name: False,
             keep: Callable[[str, Any], Any] | None = None, step: Callable[[], object] = lambda: None) -> Any:
    """Returns the plain value of a pickle.

    is_record: whether the class NAME of a MODULE becomes a Record. keep: gives what a record's state is, of its kind and the state.
    step:      called now and then; it may raise KeyboardInterrupt.
    Errors: CorruptError naming the file: damage, or a name that is not allowed.
    """
    try:
        return _Unpickler(data, keep, is_record, step).load()
    except Refused as error:
        raise CorruptError(f"{path}: {error}; nothing of it was run; {advice}") from None
    except MemoryError:
        raise
    except Exception as error:  # Of damage, any kind.
        raise CorruptError(f"{path}: a pickle that is damaged ({type(error).__name__}: {error}); {advice}") from None


class TorchFile:
    """An open file of torch.save, all of whose checksums match; a context manager."""

    def __init__(self, path: pathlib.Path, governor: _core.Governor, advice: str, step: Callable[[], object] = lambda: None) -> None:
        """Opens a file, and reads all of it once.

        advice: what its errors say to do. step: called now and then; it may raise KeyboardInterrupt.
        Errors: CorruptError naming the file; BudgetExceeded; OSError.
        """
        self.path = path
        self._advice = advice
        self._step = step
        self._file = open(path, "rb", buffering=0)
        self._lease = governor.reserve(_core.Tag.OTHER, 2 * _PIECE)
        self._parts: dict[str, tuple[int, int]] = {}  # Where each lies, and how long it is.
        self._begins = self._sizes = array.array("q")  # Of storages, by number.
        try:
            self._lease.grow(2 * _PIECE + _DIRECTORY_FACTOR * self._directory_bytes())
            self._read_directory()
            self._lease.shrink(2 * _PIECE + 32 * len(self._sizes))
            if "data.pkl" not in self._parts:
                raise self._bad("a zip without data.pkl, so not what torch.save writes")
            if self._bytes("byteorder") == b"big":
                raise self._bad("its numbers are big-endian; save it anew on a little-endian machine")
        except BaseException:
            self.close()
            raise

    def value(self, is_record: Callable[[str, str], bool], keep: Callable[[str, Any], Any] | None = None) -> Any:
        """Returns what was saved, as unpickle() does. Errors: CorruptError; BudgetExceeded; OSError."""
        self._lease.grow(self._lease.bytes + _PICKLE_FACTOR * self._parts["data.pkl"][1])
        return unpickle(self._bytes("data.pkl"), self.path, self._advice, is_record=is_record, keep=keep, step=self._step)

    def array(self, tensor: Tensor) -> np.ndarray:
        """Reads a tensor's elements. Shape: the tensor's. Errors: CorruptError where they lie outside of its storage; OSError."""
        size = np.dtype(tensor.dtype).itemsize
        count = math.prod(tensor.shape)
        if count == 0:
            return np.empty(tensor.shape, tensor.dtype)
        known = tensor.storage < len(self._sizes)
        begin, held = (self._begins[tensor.storage], self._sizes[tensor.storage]) if known else (0, -1)
        elements = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.strides, strict=True))
        if held < 0:
            raise self._bad(f"storage {tensor.storage} is missing")
        if (tensor.offset + elements) * size > held or count * size > max(held, _EXPANDED_MOST):
            raise self._bad(f"a tensor reaches behind the end of storage {tensor.storage}")
        raw = np.frombuffer(self._read(begin + tensor.offset * size, elements * size), "<" + tensor.dtype)
        return np.lib.stride_tricks.as_strided(raw, tensor.shape, [stride * size for stride in tensor.strides], writeable=False)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        self._lease.close()

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bad(self, what: str) -> CorruptError:
        return CorruptError(f"{self.path}: {what}; {self._advice}")

    def _directory_bytes(self) -> int:
        """Returns how long the directory claims to be; no claim is beyond the file."""
        whole = os.fstat(self._file.fileno()).st_size
        end = self._read(max(0, whole - 22), min(22, whole))
        if end[:4] != b"PK\x05\x06":  # Torch writes no comment behind it.
            raise self._bad(_NO_ZIP)
        return min(whole, int.from_bytes(end[12:16], "little"))

    def _read_directory(self) -> None:
        try:
            with zipfile.ZipFile(self._file) as records:
                count = len(records.infolist())
                self._begins, self._sizes = array.array("q", [0]) * count, array.array("q", [-1]) * count
                for at, one in enumerate(records.infolist()):
                    self._add(one)
                    with records.open(one) as record:
                        while record.read(_PIECE):  # Compares the checksum at the end.
                            pass
                    if at % _STEP == 0 or one.file_size > _PIECE:
                        self._step()
        except (CorruptError, MemoryError):
            raise
        except Exception as error:  # Of damage, zipfile raises many kinds.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise
            if isinstance(error, zipfile.BadZipFile) and "CRC" in str(error):
                raise self._bad(f"{error}: another checksum than was written") from None
            raise self._bad(f"{_NO_ZIP} ({error})") from None

    def _add(self, one: zipfile.ZipInfo) -> None:
        """Keeps where a part lies. Errors: CorruptError."""
        if one.compress_type != zipfile.ZIP_STORED:
            raise self._bad(f"its part {one.filename} is compressed, which torch.save does not do")
        name, extra = struct.unpack("<HH", self._read(one.header_offset + 26, 4))
        begin = one.header_offset + 30 + name + extra
        part = one.filename.partition("/")[2]  # Without the name of the archive.
        if not part.startswith("data/"):
            if self._parts.setdefault(part, (begin, one.file_size)) != (begin, one.file_size):
                raise self._bad(f"two parts {one.filename}")
            return
        number = int(part[5:])  # They count up from 0.
        if self._sizes[number] >= 0:
            raise self._bad(f"two parts {one.filename}")
        self._begins[number], self._sizes[number] = begin, one.file_size

    def _bytes(self, name: str) -> bytes:
        begin, held = self._parts.get(name, (0, 0))
        return self._read(begin, held)

    def _read(self, begin: int, count: int) -> bytes:
        raw = os.pread(self._file.fileno(), count, begin)
        if len(raw) != count:
            raise self._bad("is cut short")
        return raw
