# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy: the loss of a language model's head without its logits.

The logits of a step are tokens × vocabulary: 2,048 tokens of 151,936 words are 1.2 GB in float32, several
times over in backward. Here they exist for `chunk` tokens at a time. Their gradient is computed at once, in the
forward pass. Only the gradients of the hidden states, and of a trained head, are kept.

Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024), section 3.2,
"FusedLinearCrossEntropy"; here in torch's operators.

Threads: the caller's.
Memory:  chunk × vocabulary numbers, for bfloat16 with a trained head in float32 too; gradients of what is trained.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_REDUCTIONS = ("mean", "sum")
_BLOCK_BYTES = 4 << 20  # Bytes of the rows in a block; a single row may be larger.
_SHAPES = 16  # Most shapes of products: oneDNN keeps a megabyte for each shape in bfloat16.
_only_one = False  # Within one_chunk().


@contextlib.contextmanager
def one_chunk() -> Iterator[None]:
    """Computes one whole chunk whatever the number of tokens, inside the `with` block. It has the memory of all chunks and a wrong result.

    For plans: their steps then allocate the same at every size.
    """
    global _only_one
    _only_one = True
    try:
        yield
    finally:
        _only_one = False


def linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *,
                         bias: torch.Tensor | None = None, ignore_index: int = -100, chunk: int = 512,
                         label_smoothing: float = 0.0, reduction: str = "mean") -> torch.Tensor:
    """Returns the cross-entropy of `hidden @ weight.T + bias` with `labels`. The logits never exist as a whole.

        hidden = model.model(input_ids=ids).last_hidden_state                  # [batch, length, features]
        loss = plimsoll.linear_cross_entropy(hidden[:, :-1], model.lm_head.weight, ids[:, 1:])

    Within rounding, loss and gradients equal those of torch.nn.functional.cross_entropy() on these logits.
    Gradients are computed only for the inputs that require them. Labels are not shifted.

    hidden:  [..., features] float32, bfloat16 or float64.
    weight:  [vocabulary, features] of the same dtype. bias: [vocabulary], or None.
    labels:  [...] int64, from 0 to vocabulary − 1, or ignore_index. Ignored tokens are not computed.
    chunk:   number of tokens whose logits exist at a time. Another size rounds otherwise: keep it from run to run.
    reduction: "mean" over the tokens that are not ignored, or "sum". Where all are ignored, loss and
             gradients are 0; torch's mean is NaN there.
    Returns: a scalar of float32 (float64 for float64). Products of bfloat16 are summed in float32 and rounded,
             as torch's are; all else, the gradient of a trained weight included, is computed in float32.
             Under autocast hidden and weight are cast as torch.nn.functional.linear() casts them.
    Memory:  chunk × vocabulary × 4 B, beside the gradients. For bfloat16: × 2 B, or × 6 B with a trained weight or
             bias, and 4 MiB or a token's logits in float32, whichever is more. Torch's products take more.
    Errors:  ValueError naming the argument. In a TrainingStep with loss="mean" give `weight=`, such as
             `lambda ids: (ids[:, 1:] != -100).sum()`. A gradient of the gradient is refused by torch.
    Source:  Hsu et al., "Liger Kernel" (2024), section 3.2.
    """
    import torch

    if torch.is_autocast_enabled(hidden.device.type):
        kind = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(kind), weight.to(kind)
    _check(hidden, weight, labels, bias, chunk, label_smoothing, reduction)
    labels = labels.reshape(-1)
    places = (labels != ignore_index).nonzero().squeeze(1)
    wanted = labels[places]
    outside = (wanted < 0) | (wanted >= weight.shape[0])
    if outside.any():
        at = int(places[outside][0])
        raise ValueError(f"labels: {int(labels[at])} at place {at} is neither from 0 to {weight.shape[0] - 1} nor "
                         f"ignore_index, {ignore_index}")
    grad = torch.is_grad_enabled()
    makes = tuple(grad and one is not None and one.requires_grad for one in (hidden, weight, bias))
    with torch.autocast(hidden.device.type, enabled=False):
        return _function().apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, places, wanted, chunk,
                                 label_smoothing, reduction == "mean", makes)


def _check(hidden: Any, weight: Any, labels: Any, bias: Any, chunk: int, label_smoothing: float,
           reduction: str) -> None:
    import torch

    if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ValueError(f"hidden: {hidden.dtype} is none of float32, bfloat16 and float64")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1] or weight.dtype != hidden.dtype:
        raise ValueError(f"weight: {weight.dtype} {list(weight.shape)} does not fit hidden, {hidden.dtype} "
                         f"{list(hidden.shape)}: it is [vocabulary, features] of the same dtype")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: {list(bias.shape)} is not [{weight.shape[0]}], one for each row of weight")
    if labels.dtype != torch.int64 or labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels: {labels.dtype} {list(labels.shape)} is not int64 {list(hidden.shape[:-1])}, one for "
                         "each row of hidden")
    if chunk < 1:
        raise ValueError(f"chunk: {chunk} tokens; it is 1 or more")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: {label_smoothing} is not from 0 to 1")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction: {reduction!r} is none of {', '.join(map(repr, _REDUCTIONS))}")


class _Chunk:
    """A buffer for the logits of `chunk` tokens, overwritten by the gradient of their losses. A few rows at a time are widened."""

    def __init__(self, rows: int, weight: Any, bias: Any, smoothing: float, kind: Any, keeps_wide: bool) -> None:
        self._weight, self._bias, self._smoothing = weight, bias, smoothing
        self._products = weight.new_empty(rows, weight.shape[0])
        self._block = min(rows, max(1, _BLOCK_BYTES // (weight.shape[0] * kind.itemsize)))
        self._keeps_wide = keeps_wide or weight.dtype == kind
        self._wide = self._products if weight.dtype == kind else self._products.new_empty(
            (rows if keeps_wide else self._block, weight.shape[0]), dtype=kind)

    def losses(self, hidden: Any, labels: Any) -> Any:
        """Returns the losses [labels]. Afterwards narrow() and wide() hold their gradient in the logits, 0 in rows of `hidden` beyond the labels."""
        import torch

        count, self._count = len(labels), len(hidden)
        torch.mm(hidden, self._weight.t(), out=self._products[:self._count])
        losses = torch.empty(count, dtype=self._wide.dtype, device=labels.device)
        for begin in range(0, count, self._block):
            rows = slice(begin, min(begin + self._block, count))
            losses[rows] = self._losses_of(rows, labels[rows])
        self._products[count:self._count] = 0
        if self._keeps_wide:
            self._wide[count:self._count] = 0
        return losses

    def _losses_of(self, rows: slice, labels: Any) -> Any:
        """Computes a block's losses and gradient. The block stays in the processor's cache from its logits to its gradient."""
        import torch

        products = self._products[rows]
        wide = self._wide[rows] if self._keeps_wide else self._wide[:len(labels)]
        if self._wide is not self._products:
            wide.copy_(products)
        if self._bias is not None:
            wide.add_(self._bias)
        places = torch.arange(len(labels), device=labels.device), labels
        own, highest = wide[places], wide.amax(1)
        mean = wide.mean(1) if self._smoothing else own
        torch.softmax(wide, 1, out=wide)
        every = highest - wide.amax(1).log()  # The logarithm of the sum: the highest is exp(0) of it.
        if self._smoothing:
            wide.sub_(self._smoothing / wide.shape[1])
        wide[places] -= 1 - self._smoothing
        if self._wide is not self._products:
            products.copy_(wide)
        return every - (1 - self._smoothing) * own - self._smoothing * mean

    def narrow(self) -> Any:
        """Returns the gradient [tokens, vocabulary] in the weight's dtype."""
        return self._products[:self._count]

    def wide(self) -> Any:
        """Returns the gradient [tokens, vocabulary] in the dtype it was computed in. Requires: keeps_wide."""
        return self._wide[:self._count]


def _padded(count: int, chunk: int) -> int:
    grain = -(-chunk // _SHAPES)
    return min(chunk, -(-count // grain) * grain)


def _rows_of(hidden: Any, places: Any, chunk: int) -> Any:
    """Returns the rows of `hidden` at `places`, [tokens, features], padded with rows of 0 to one of few counts."""
    count = _padded(len(places), chunk)
    if count == len(places):
        return hidden[places]
    rows = hidden.new_zeros(count, hidden.shape[1])
    rows[:len(places)] = hidden[places]
    return rows


def _chunks(places: Any, labels: Any, chunk: int) -> list[tuple[Any, Any, slice]]:
    """Returns (places, labels, slice of their losses) for each chunk."""
    import torch

    if _only_one:
        some = torch.from_numpy(np.zeros(chunk, np.int64))  # Not counted by the plan: NumPy's memory.
        return [(some, some, slice(0, chunk))]
    parts = (slice(begin, begin + chunk) for begin in range(0, len(labels), chunk))
    return [(places[part], labels[part], part) for part in parts]


@functools.cache
def _function() -> Any:
    """Returns the autograd function. It is made late, once torch is imported."""
    import torch

    class LinearCrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, places: Any, labels: Any, chunk: int,
                    smoothing: float, mean: bool, makes: tuple[bool, bool, bool]) -> Any:
            kind = torch.promote_types(hidden.dtype, torch.float32)
            of_hidden = torch.zeros_like(hidden) if makes[0] else None
            of_weight = torch.zeros_like(weight, dtype=kind) if makes[1] else None
            of_bias = torch.zeros_like(bias, dtype=kind) if makes[2] else None
            losses = hidden.new_zeros(len(labels), dtype=kind)
            scale = 1 / max(len(labels), 1) if mean else 1.0
            chunks = _chunks(places, labels, chunk)
            logits = _Chunk(_padded(len(chunks[0][0]), chunk) if chunks else 0, weight, bias, smoothing, kind,
                            makes[1] or makes[2])
            for own, wanted, out in chunks:
                rows = _rows_of(hidden, own, chunk)
                losses[out] = logits.losses(rows, wanted)[:len(labels)]
                if of_hidden is not None:
                    of_hidden[own] = (logits.narrow() @ weight)[:len(own)]
                if of_weight is not None:
                    of_weight.addmm_(logits.wide().t(), rows.to(kind))
                if of_bias is not None:
                    of_bias.add_(logits.wide().sum(0))
                del rows  # Before the next are made.
            made = (of_hidden, None if of_weight is None else of_weight.to(weight.dtype),
                    None if of_bias is None else of_bias.to(bias.dtype))
            ctx.save_for_backward(*made)
            ctx.scale = scale
            return losses.sum() * scale

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Any) -> Any:
            scale = grad * ctx.scale  # A number of its own precision: products with it are rounded once.
            return (*(None if one is None else one * scale for one in ctx.saved_tensors),
                    None, None, None, None, None, None)

    return LinearCrossEntropy
