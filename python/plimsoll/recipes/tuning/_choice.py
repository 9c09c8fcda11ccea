# SPDX-License-Identifier: Apache-2.0
"""choose(): finds what fits: all weights or adapters, in memory or on disk, activations kept or recomputed.

The bytes of weights, gradients and optimizer are known. Those of activations are counted: the model runs once on
torch's meta device, where tensors have shapes and no values, and the tensors that autograd would keep are added up.
The first choice whose estimated peak fits is taken. The first step is admitted by its real memory.

Threads: the thread that trains.   Memory: none to speak of.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...memory._memory import format_bytes
from ...training._quantised import QuantisedLinear
from ._model import AS_SAVED, CHUNK, adapted, blocks_of, config_of, quantised

if TYPE_CHECKING:
    from ...memory._memory import Governor
    from . import TuningOptions

_MORE = 1.1  # Factor for partly used pages and operators' temporaries. Seen: 1.00 to 1.07 in test_chat.py's models.
_STATES = 3 * 4  # Bytes of a trained number beside itself: gradient and two moments, float32.
_SLOTS = 2  # stream_frozen()'s.


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a run trains: method, place of weights, recomputation. Only `method` decides its bits."""

    method: str
    weights: str
    recomputes: bool
    why: str
    needed_bytes: int
    """Estimated bytes at a step's peak; 0 where the options left no choice."""

    def __str__(self) -> str:
        """Describes the choice and its reason, for people."""
        return (f"{'all weights' if self.method == 'full' else 'adapters'}, weights {self.weights}, activations "
                f"{'made again in backward' if self.recomputes else 'kept'}: {self.why}")


def room_of(governor: Governor, options: TuningOptions) -> int:
    """Returns the bytes left for tensors on the device of the model."""
    device = options.device_name()
    return governor.tensor_room() if device == "cpu" else max(0, governor.devices[device].free_bytes)


def choose(options: TuningOptions, left_bytes: int, method: str = "") -> Choice:
    """Returns the first choice that the options allow and that fits into `left_bytes` for tensors; else the smallest.

    method: the method of the run's earlier start; "": this is its first. Errors: ValueError for a folder without a model.
    """
    open_ = options.profile == "auto"
    methods = [method] if method else ["full", "lora"] if open_ and options.base == AS_SAVED else ["lora"] if open_ else [options.method]
    places = ["resident", "streamed"] if open_ or options.weights == "auto" else [options.weights]
    again = {"auto": [False, True], "on": [True], "off": [False]}["auto" if open_ else options.gradient_checkpointing]
    ways = list(dict.fromkeys(  # Streamed blocks run again, whatever is asked.
        (one, place, anew or place == "streamed") for one in methods for place in places for anew in again
        if not (place == "streamed" and (one == "full" or options.dora))))
    if not ways:
        raise ValueError(f"weights: all weights are trained, and those are in memory, not {options.weights}; say resident")
    if len(ways) == 1:
        return Choice(*ways[0], "the options say so", 0)
    asked = tuple(dataclasses.asdict(options).items())
    kind: Any = type(options)
    sizes = {one: _Sizes.of(kind, asked, one) for one in methods}
    said: list[str] = []
    for one, place, anew in ways:
        needed = sizes[one].needed(place, anew)
        if needed <= left_bytes or (one, place, anew) == ways[-1]:
            break
        said.append(f"{_short(one, place, anew)} would take {format_bytes(needed)}")
    fits = "about" if needed <= left_bytes else "the least there is, about"
    why = "; ".join([f"{fits} {format_bytes(needed)} of {format_bytes(left_bytes)} for tensors", *said])
    return Choice(one, place, anew, why, needed)


def _short(method: str, place: str, anew: bool) -> str:
    return f"{'all weights' if method == 'full' else 'adapters'} {place}{' with checkpointing' if anew else ''}"


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The sizes of a model and a batch, in bytes."""

    weights: int
    blocks: int
    """Bytes of the frozen weights in blocks, which may stream; a part of `weights`."""
    largest_block: int
    trained: int
    kept: int
    """Bytes of activations that autograd keeps when nothing is recomputed."""
    borders: int
    """Bytes that autograd keeps when blocks are recomputed: the inputs of the blocks."""
    block: int
    """Bytes of activations that autograd keeps within one block."""
    loss: int
    again: int
    """Bytes of the largest weight that a product makes again from fewer bits, with what it is made of in float32."""

    @staticmethod
    @functools.lru_cache(maxsize=8)
    def of(kind: type[TuningOptions], asked: tuple[tuple[str, Any], ...], method: str) -> _Sizes:
        """Counts the sizes for options (asked: as pairs). Cached: the first call loads modules, before there is a limit."""
        options = kind(**dict(asked))
        task = options.task()
        config = config_of(options.model)
        full = method == "full"
        dtype = torch.float32 if full else getattr(torch, options.dtype)
        tokens = options.batch_size * options.sequence_length
        with torch.device("meta"):
            model = task.model_class().from_config(config, dtype=dtype)
            if not full:
                quantised(model.requires_grad_(False), options)
                model = adapted(model, options)
            inner = model if full else model.get_base_model()
            blocks = blocks_of(model)
            frozen = [sum(_size(one) for one in block.parameters() if not one.requires_grad) for block in blocks]
            parameters = list(model.parameters())
            with torch.autocast("cpu", torch.bfloat16, enabled=full and options.dtype == "bfloat16"), _attention_as_on_cpu():
                kept = task.kept_bytes(inner)
            text = config.get_text_config()
            hidden = tokens * text.hidden_size * torch.empty((), dtype=dtype).element_size()
            return _Sizes(weights=sum(map(_size, parameters)), blocks=sum(frozen), largest_block=max(frozen, default=0),
                          trained=sum(one.numel() for one in parameters if one.requires_grad), kept=kept,
                          borders=hidden * len(blocks), block=kept // max(len(blocks), 1),
                          loss=CHUNK * text.vocab_size * 6 + 3 * hidden,
                          again=max((part.in_features * part.out_features * (4 + dtype.itemsize) for part in model.modules()
                                     if isinstance(part, QuantisedLinear)), default=0))

    def needed(self, place: str, anew: bool) -> int:
        """Returns the estimated bytes at a step's peak. place: "resident" or "streamed" weights; anew: activations are recomputed."""
        weights = self.weights if place == "resident" else self.weights - self.blocks + _SLOTS * self.largest_block
        activations = self.borders + 2 * self.block if anew else self.kept + self.block
        return int(_MORE * (weights + _STATES * self.trained + activations + self.loss + self.again))


def _size(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def kept_bytes(model: Any, rows: int, length: int) -> int:
    """Returns the bytes that autograd keeps for a forward of a model or decoder, without its head and without weights."""
    weights = {one.untyped_storage()._cdata for one in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            seen[storage._cdata] = storage.nbytes()
        return tensor  # Kept, so that no other storage gets its number.

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = model.base_model(  # A mask of its own, as documents that share a sequence have one.
            input_ids=torch.zeros(rows, length, dtype=torch.int64), position_ids=torch.arange(length).expand(rows, length),
            attention_mask=torch.ones(rows, 1, length, length, dtype=torch.bool), use_cache=False)
    del made
    return sum(seen.values())


@contextlib.contextmanager
def _attention_as_on_cpu() -> Iterator[None]:
    """Replaces attention on the meta device, which keeps all pairs of tokens, by that of the CPU kernel, which does not."""
    before = torch.nn.functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
                  scale: float | None = None, enable_gqa: bool = False) -> Any:
        if dropout_p:  # The CPU kernel has no dropout.
            return before(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]

    torch.nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = before
