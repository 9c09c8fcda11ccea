# SPDX-License-Identifier: Apache-2.0
"""QuantisedLinear: a frozen linear map whose weight takes four or eight bits a number, by the kernels of bitsandbytes.

    nf4    16 levels, the quantiles of a normal distribution; blocks of 64 numbers have a scale. 4.5 bits a number.
    int8   255 levels; a row has a scale.

Numbers and scales are parameters without gradients: stream_frozen() reads them into slots, and commits have their checksums, as
of any. A product makes the weight again in the dtype of its input, and lets it go; so does backward.

A weight is always quantised on the processor, so its bytes are the same wherever it is used. On devices that bitsandbytes has no
kernels for, nf4 is computed by torch's own operators, to the bits of the processor's kernel.

Threads: any.   Memory: during a product one weight as it was; while one is quantised it, and a few MiB.
"""
from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..core._folders import replaced
from ._absent import Absent
from ._weight_files import WeightReader, found_in, made_of, places_in, renamed, write_tensors

KINDS = ("nf4", "int8")
_BLOCK = 64  # Numbers of nf4 that share a scale.
_PIECE = 1 << 20  # Numbers quantised at a time: to the bits of all at once, as blocks and rows know nothing of one another.


def bitsandbytes() -> Any:
    """Returns the module. Errors: ImportError that says how to install it."""
    try:
        import bitsandbytes as module
    except ImportError as error:
        raise ImportError(f"base: nf4 and int8 take {error.name}, which is not installed: pip install bitsandbytes") from None
    return module


class QuantisedLinear(torch.nn.Linear):
    """A torch.nn.Linear without gradients for its weight, whose numbers are `packed` and `scales`."""

    def __init__(self, plain: torch.nn.Linear, kind: str) -> None:
        """Has the shape and the device of `plain`, its bias, and no values. kind: one of KINDS. Requires: can_be(plain)."""
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind, self.computes = plain.in_features, plain.out_features, kind, plain.weight.dtype
        count, where = plain.weight.numel(), plain.weight.device
        shape, scales, dtype = ((count // 2, 1), count // _BLOCK, torch.uint8) if kind == "nf4" else \
            (tuple(plain.weight.shape), self.out_features, torch.int8)
        self.packed = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=where), requires_grad=False)
        self.scales = torch.nn.Parameter(torch.empty(scales, dtype=torch.float32, device=where), requires_grad=False)
        self.register_parameter("bias", plain.bias)

    @staticmethod
    def can_be(part: torch.nn.Module) -> bool:
        """Whether a module may become one: a linear map whose weight has whole blocks."""
        return type(part) is torch.nn.Linear and part.weight.numel() % _BLOCK == 0

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's."""
        return self.out_features, self.in_features

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """Has the shape, dtype and device of the weight, which libraries ask for, and no values."""
        return Absent.like(torch.empty(self.shape, dtype=self.computes, device="meta"), f"a weight that is {self.kind}", self.scales.device)

    def forward(self, x: Any) -> Any:
        """Returns the product with the weight as it was, as near as it is kept."""
        return _Product.apply(x, self.bias, self.packed, self.scales, self)

    def made_again(self, packed: Any, scales: Any) -> Any:
        """Returns the weight that these bytes are, in the dtype that is computed with."""
        device = packed.device.type
        if device == "meta":
            return torch.empty(self.shape, dtype=self.computes, device=device)
        module = bitsandbytes()
        if self.kind == "int8":
            return module.functional.int8_vectorwise_dequant(packed, scales).to(self.computes)
        if device in module.supported_torch_devices:  # As one row: rows that are no whole blocks its kernel for processors gets wrong (0.50.2).
            count = packed.numel() * 2
            return torch.ops.bitsandbytes.dequantize_4bit(packed, scales, _BLOCK, "nf4", (count,), self.computes).view(self.shape)
        levels = module.functional.get_4bit_type("nf4", device="cpu").to(packed.device)
        numbers = levels[torch.cat((packed >> 4, packed & 15), 1).reshape(-1).int()]
        return (numbers.view(-1, _BLOCK) * scales.unsqueeze(1)).view(self.shape).to(self.computes)

    def quantised(self, weight: Any) -> tuple[Any, Any]:
        """Returns what `packed` and `scales` are for a weight on the processor."""
        module = bitsandbytes()
        weight = weight.to(self.computes).contiguous()
        packed = torch.empty(self.packed.shape, dtype=self.packed.dtype)
        scales = torch.empty(self.scales.shape, dtype=torch.float32)
        if self.kind == "nf4":
            for begin in range(0, weight.numel(), _PIECE):
                some = weight.view(-1)[begin:begin + _PIECE]
                made = torch.ops.bitsandbytes.quantize_4bit(some, _BLOCK, "nf4", torch.uint8)
                packed[begin // 2:(begin + len(some)) // 2], scales[begin // _BLOCK:(begin + len(some)) // _BLOCK] = made
            return packed, scales
        rows = max(1, _PIECE // self.in_features)
        for begin in range(0, self.out_features, rows):
            some = weight[begin:begin + rows]
            packed[begin:begin + rows], scales[begin:begin + rows], _ = module.functional.int8_vectorwise_quant(some)
        packed[scales == 0] = 0  # Rows of zeros.
        return packed, scales

    def rounded(self, weight: Any) -> Any:
        """Returns the weight that a product is made with, where `weight` is what was quantised. Of its dtype."""
        return self.made_again(*self.quantised(weight)).to(weight.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.kind}"


class _Product(torch.autograd.Function):
    """A product that keeps for backward what is packed, and not the weight."""

    @staticmethod
    def forward(ctx: Any, x: Any, bias: Any, packed: Any, scales: Any, layer: QuantisedLinear) -> Any:
        ctx.layer = layer
        ctx.save_for_backward(packed, scales)
        return torch.nn.functional.linear(x, layer.made_again(packed, scales), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient, = gradients
        bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        x = gradient @ ctx.layer.made_again(*ctx.saved_tensors) if ctx.needs_input_grad[0] else None
        return x, bias, None, None, None


def quantise(blocks: Iterable[torch.nn.Module], kind: str) -> list[QuantisedLinear]:
    """Puts QuantisedLinears without values in the place of the blocks' linear maps. Returns them. Errors: ImportError."""
    bitsandbytes()
    made: dict[int, QuantisedLinear] = {}
    for block in blocks:
        for part in list(block.modules()):
            for name, inner in list(part.named_children()):
                if isinstance(inner, torch.nn.Linear) and QuantisedLinear.can_be(inner):
                    made.setdefault(id(inner), QuantisedLinear(inner, kind))
                    setattr(part, name, made[id(inner)])
    return list(made.values())


def quantised_file(model: Any, files: str | os.PathLike[str], folder: pathlib.Path) -> pathlib.Path:
    """Returns a file with what the model's QuantisedLinears have for the weights in `files`; written to the folder, if it is not there.

    Errors: ImportError; ValueError for a weight that is not in the files; CorruptError; OSError.
    """
    layers = {name: part for name, part in model.named_modules() if isinstance(part, QuantisedLinear)}
    kind = next(iter(layers.values())).kind
    path = folder / f"{kind}.safetensors"
    sources = sorted(pathlib.Path(files).glob("*.safetensors"))
    states = [(one.name, (state := one.stat()).st_size, state.st_mtime_ns) for one in sources]
    says = repr((states, kind, str(next(iter(layers.values())).computes), bitsandbytes().__version__))
    if made_of(path) == says:
        return path
    places = renamed(model, places_in(files))
    tensors: dict[str, torch.Tensor] = {f"{name}.{key}": one for name, part in layers.items() for key, one in (("packed", part.packed), ("scales", part.scales))}

    def values() -> Iterator[Any]:
        reader = WeightReader()
        try:
            for name, part in layers.items():
                found = found_in(f"{name}.weight", part.weight, places)
                if found is None:
                    raise ValueError(f"base: the files of {files} have no {name}.weight")
                weight = torch.empty(part.shape, dtype=part.computes)
                reader.read(found, weight.reshape(-1).view(torch.uint8).numpy())
                yield from part.quantised(weight)
        finally:
            reader.close()

    folder.mkdir(parents=True, exist_ok=True)
    with replaced(path, f"{path.name}.{os.getpid()}") as partial:
        write_tensors(partial, tensors, values(), says)
    return path
