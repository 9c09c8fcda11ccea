# SPDX-License-Identifier: Apache-2.0
"""Weights that `teacher_path` names: our own, or those that the original saved.

A finished model of ours says by its tensors what shape it has, so a teacher may have other sizes than this run's options. So do
the original's weights: a state dict of torch.save, alone or within a checkpoint, or safetensors with its names
(id_embedding.weight, convs.0.lin.weight, encoder_bns.0.running_var, …). Prefixes that wrappers put before names are dropped.
Nothing of a pickle is run.

Threads: pure functions.   Memory: names and shapes; a tensor at a time while a model is filled.
"""
from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from ..._core import crc32c
from ...errors import CorruptError, NotFoundError
from ._models import Autoencoder, Classifier, file_tensors

_ADVICE = "give --teacher-path weights of GATWithJK or GraphAutoencoderNeighborhood, or a finished can-kd run"
_WITHIN = ("state_dict", "model_state_dict", "model")  # Where checkpoints keep the state dict.
_PIECE = 1 << 20
# More than any model of these kinds has, so that no file's claim is too large to count with.
_TENSORS_MOST, _NAME_MOST, _WIDTH_MOST, _HEADS_MOST, _LAYERS_MOST, _PICKLE_MOST = 4096, 256, 65536, 256, 64, 64 << 20
_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # Anything else is a counter.
# From the original's names to ours, each step on what the one before left. torch_geometric called a layer's matrix lin_src before 2.5.
_RENAMED = [(re.compile(theirs), ours) for theirs, ours in (
    (r"^(?:module\.|model\.|_orig_mod\.|input_encoder\.)+", ""), (r"^id_embedding\.weight$", "embedding"),
    (r"^(en|de)coder_layers\.", r"\1coder."), (r"^(en|de)coder_bns\.(\d{1,3})\.", r"\1coder.\2.norm."),
    (r"^((?:convs|encoder|decoder)\.\d{1,3})\.lin(?:_src)?\.weight$", r"\1.weight"), (r"\.att_src$", ".att_source"),
    (r"\.att_dst$", ".att_target"), (r"\.running_var$", ".running_variance"), (r"^z_mean\.", "mean."),
    (r"^z_logvar\.", "log_variance."), (r"^canid_classifier\.", "id."), (r"^jk\.att\.", "jk.score."),
    (r"^jk\.lstm\.(\w+)_l0_reverse$", r"jk.backward.\1"), (r"^jk\.lstm\.(\w+)_l0$", r"jk.forward.\1"),
    (r"^(jk\.\w+)\.weight_ih$", r"\1.input"), (r"^(jk\.\w+)\.weight_hh$", r"\1.hidden"), (r"^(jk\.\w+)\.bias_ih$", r"\1.input_bias"),
    (r"^(jk\.\w+)\.bias_hh$", r"\1.hidden_bias"))]
# Dense layers stand in a list with their activation and their dropout.
_DENSE = re.compile(r"^(fc_layers|neighborhood_decoder)\.(\d{1,3})\.")


@dataclasses.dataclass
class Saved:
    """A tensor in a file of weights."""

    name: str
    """Its name in the file."""
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """Reads the tensor."""


def find_teacher(teacher_path: str, name: str) -> pathlib.Path:
    """Returns the file of the model `name` ("teacher_vgae") that teacher_path is, or that is in the run or folder it names.

    Errors: NotFoundError.
    """
    given = pathlib.Path(teacher_path)
    for file in (given, given / "models" / f"{name}.safetensors", given / f"{name}.safetensors", given / f"{name}.pt"):
        if file.is_file():
            return file
    raise NotFoundError(f"teacher_path = {teacher_path}: no {name}.safetensors there; name a finished can-kd run, its models folder, or "
                        "a file of weights")


def is_ours(path: pathlib.Path) -> bool:
    """Whether a file of weights is a finished model of ours, which is read without looking for what it holds."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return "crc32c" in (file.metadata() or {})
    except SafetensorError:
        return False


def load_teacher(path: pathlib.Path, ids: int, *, autoencoder: bool, task: str) -> Autoencoder | Classifier:
    """Makes the model that a file of weights holds, in eval mode.

    ids:         GraphSet.table_rows. autoencoder: the kind of model that `task` learns from.
    Errors: CorruptError; ValueError for another kind of model or another vocabulary, and naming a tensor that is missing, or of
            another shape or type; NotFoundError; OSError.
    """
    saved = read_weights(path)
    kind = "autoencoder" if autoencoder else "classifier"
    if ("encoder.0.att_source" if autoencoder else "convs.0.att_source") not in saved:
        raise _bad(path, f"no {kind}, which {task} learns from")
    table = saved.get("embedding")
    if table is None or len(table.shape) != 2 or not 1 <= table.shape[1] <= _WIDTH_MOST:
        raise _bad(path, "no table of ids")
    if table.shape[0] != ids:
        raise ValueError(f"{path}: a teacher of {table.shape[0]} ids (the unknown one is one of them), but the set has {ids}; import the "
                         "graphs that it was trained on")
    with torch.device("meta"):
        model = (_autoencoder if autoencoder else _classifier)(path, saved, ids, table.shape[1])
    return filled(path, model, saved)


Filled = TypeVar("Filled", bound=torch.nn.Module)


def filled(path: pathlib.Path, model: Filled, saved: dict[str, Saved], advice: str = _ADVICE) -> Filled:
    """Reads the tensors of a model on the meta device from a file, and returns it to be asked, on the CPU.

    advice: what to do where they do not fit.
    Errors: ValueError naming a tensor that is missing, or of another shape or type; nothing was allocated then.
    """
    for name, wanted in file_tensors(model).items():
        found = saved.get(name)
        if found is None:
            raise _bad(path, f"no tensor {name}", advice)
        if found.shape != tuple(wanted.shape):
            raise _bad(path, f"{found.name} is of shape {list(found.shape)}, where the others say {list(wanted.shape)}", advice)
        if found.dtype != "F32":
            raise ValueError(f"{path}: {found.name} is {found.dtype}, not F32; save the model in float32: "
                             "torch.save(model.float().state_dict(), …)")
    model.load_state_dict({name: torch.empty(one.shape, dtype=one.dtype) for name, one in model.state_dict().items()}, assign=True)
    model.eval().requires_grad_(False)
    for name, tensor in file_tensors(model).items():
        tensor.copy_(saved[name].read().reshape(tensor.shape))
    return model


def _classifier(path: pathlib.Path, saved: dict[str, Saved], ids: int, embedding: int) -> Classifier:
    heads, hidden = _sizes(path, saved, "convs.0.att_source", 2)
    layers, dense = _count(saved, "convs.{}.att_source"), _count(saved, "dense.{}.weight")
    if heads > _HEADS_MOST or layers > _LAYERS_MOST:
        raise _bad(path, f"more than {_HEADS_MOST} heads or {_LAYERS_MOST} layers")
    width = _sizes(path, saved, "dense.0.weight", 2)[0]
    return Classifier(ids, embedding, hidden, layers, heads, dense, "jk.score.weight" in saved, 0.0, None, width if dense > 1 else 0)


def _autoencoder(path: pathlib.Path, saved: dict[str, Saved], ids: int, embedding: int) -> Autoencoder:
    heads = _sizes(path, saved, "encoder.0.att_source", 2)[0]
    if heads > _HEADS_MOST:
        raise _bad(path, f"more than {_HEADS_MOST} heads")
    layers = range(max(1, _count(saved, "encoder.{}.bias")))
    widths = [_sizes(path, saved, f"encoder.{layer}.bias", 1)[0] for layer in layers] + [_sizes(path, saved, "mean.weight", 2)[0]]
    return Autoencoder(ids, embedding, widths, heads, 0.0, None)


def _count(saved: dict[str, Saved], name: str) -> int:
    return next(number for number in range(_TENSORS_MOST + 1) if name.format(number) not in saved)


def _sizes(path: pathlib.Path, saved: dict[str, Saved], name: str, dims: int) -> tuple[int, ...]:
    if name not in saved:
        raise _bad(path, f"no tensor {name}")
    found = saved[name]
    if len(found.shape) != dims or any(not 1 <= size <= _WIDTH_MOST for size in found.shape):
        raise _bad(path, f"{found.name} is of shape {list(found.shape)}")
    return found.shape


def _bad(path: pathlib.Path, what: str, advice: str = _ADVICE) -> ValueError:
    return ValueError(f"{path}: {what}; {advice}")


# ---- Files ----

def read_weights(path: pathlib.Path) -> dict[str, Saved]:
    """Returns the tensors of a file of torch.save or safetensors, by our names.

    Errors: CorruptError for damage, and for a class that no file of weights holds; ValueError where it has no tensors;
            NotFoundError; OSError.
    """
    try:
        with open(path, "rb") as file:
            archive = file.read(2) == b"PK"
        found = list(_in_archive(path) if archive else _in_safetensors(path))
    except FileNotFoundError:
        raise NotFoundError(f"{path}: there is no such file") from None
    if not found:
        raise _bad(path, "no tensors in it")
    if len(found) > _TENSORS_MOST:
        raise _bad(path, f"{len(found)} tensors, where {_TENSORS_MOST} are the most")
    saved: dict[str, Saved] = {}
    for one in found:
        if len(one.name) <= _NAME_MOST:
            name = our_name(one.name)
            if ".att_" in name and one.shape[:1] == (1,) and len(one.shape) == 3:
                one.shape = one.shape[1:]  # [1, heads, width]
            saved.setdefault(name, one)
    return saved


def our_name(name: str) -> str:
    """Returns our name of a tensor that the original named. Our own names stay."""
    for theirs, ours in _RENAMED:
        name = theirs.sub(ours, name)
    dense = _DENSE.match(name)
    return name if dense is None else f"{'dense' if dense[1] == 'fc_layers' else 'neighbours'}.{int(dense[2]) // 3}.{name[dense.end():]}"


def _in_archive(path: pathlib.Path) -> Iterator[Saved]:
    try:
        state = _state_of(path)
    except (MemoryError, torch.OutOfMemoryError, CorruptError):
        raise
    except Exception as error:  # Torch and zipfile raise many kinds for a damaged file.
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise CorruptError(f"{path}: is damaged, or no file of torch.save: {error}") from error
    for key in _WITHIN:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict):
        raise _bad(path, "no state dict")
    for name, tensor in state.items():
        if isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            dtype = _TYPES.get(str(tensor.dtype).removeprefix("torch."), "I64")
            yield Saved(name, dtype, tuple(tensor.shape), functools.partial(torch.detach, tensor))


def _state_of(path: pathlib.Path) -> Any:
    """Loads what torch.save wrote; its tensors are pages of the file."""
    with zipfile.ZipFile(path) as records:
        for one in records.infolist():
            if one.compress_type != zipfile.ZIP_STORED:
                raise CorruptError(f"{path}: {one.filename} is compressed, which torch.save does not do")
            if one.filename.endswith("data.pkl") and one.file_size > _PICKLE_MOST:
                raise CorruptError(f"{path}: {one.file_size} bytes of names, where {_PICKLE_MOST} are the most")
        for one in records.infolist():  # torch.load does not compare checksums.
            with records.open(one) as record:
                try:
                    while record.read(_PIECE):
                        pass
                except zipfile.BadZipFile:
                    raise CorruptError(f"{path}: {one.filename} has another checksum than was written; copy the file again") from None
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        raise CorruptError(f"{path}: it holds {', '.join(sorted(unsafe))}, which no file of weights does; nothing of it was run; {_ADVICE}")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _in_safetensors(path: pathlib.Path) -> Iterator[Saved]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, "pt")
        if "crc32c" in (file.metadata() or {}):
            check_sum(path, file.metadata()["crc32c"].encode())
        for name in file.keys():
            tensor = file.get_slice(name)
            yield Saved(name, tensor.get_dtype(), tuple(tensor.get_shape()), functools.partial(file.get_tensor, name))
    except SafetensorError as error:
        raise CorruptError(f"{path}: is damaged, or no safetensors file: {error}") from None


def check_sum(path: pathlib.Path, digits: bytes) -> None:
    """Compares a file with the checksum in its header: CRC-32C of all its bytes, whose eight digits count as zeros.

    Errors: CorruptError.
    """
    key = b'"crc32c":"'
    with open(path, "rb") as file:
        length = file.read(8)
        before, _, after = file.read(int.from_bytes(length, "little")).partition(key + digits)
        found = crc32c(np.frombuffer(length + before + key + b"0" * len(digits) + after, np.uint8), 0)
        while piece := file.read(_PIECE):
            found = crc32c(np.frombuffer(piece, np.uint8), found)
    if f"{found:08x}".encode() != digits:
        raise CorruptError(f"{path}: its checksum is {found:08x}, and {digits.decode()} was written; copy the file again")
