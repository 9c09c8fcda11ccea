# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy: the loss of a language model's head without its logits.

The logits of a step are tokens × vocabulary: 2,048 tokens of 151,936 words are 1.2 GB in float32, several
times over in backward. Here they exist for `chunk` tokens at a time. Their gradient is made right there, in
the forward pass, and what stays of it is as large as the hidden states (and the head, where that is trained).

Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024), section 3.2,
"FusedLinearCrossEntropy"; here in torch's operators.

Threads: the caller's.
Memory:  chunk × vocabulary numbers of float32 and, for bfloat16, of that too; gradients of what is trained.
"""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_REDUCTIONS = ("mean", "sum")


def linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *,
                         bias: torch.Tensor | None = None, ignore_index: int = -100, chunk: int = 256,
                         label_smoothing: float = 0.0, reduction: str = "mean") -> torch.Tensor:
    """The cross-entropy of `hidden @ weight.T + bias` with `labels`, whose logits are never there as a whole.

        hidden = model.model(input_ids=ids).last_hidden_state                  # [batch, length, features]
        loss = plimsoll.linear_cross_entropy(hidden[:, :-1], model.lm_head.weight, ids[:, 1:])

    The same as torch.nn.functional.cross_entropy() of these logits, within rounding; its gradients too, for
    hidden states, weight and bias, of which only what requires one is made. Nothing is shifted.

    hidden:  [..., features] float32, bfloat16 or float64.
    weight:  [vocabulary, features] of the same dtype. bias: [vocabulary], or None.
    labels:  [...] int64, from 0 to vocabulary − 1, or ignore_index: such tokens cost nothing.
    chunk:   tokens whose logits are there at a time. Other chunks round otherwise: keep it from run to run.
    reduction: "mean" over the tokens that are not ignored, or "sum". Where all are ignored both are 0, and so
             are the gradients; torch's mean is NaN there.
    Returns: a scalar of float32 (float64 for float64). Products of bfloat16 are summed in float32 and rounded,
             as torch's are; all else, the gradient of a trained weight included, is computed in float32.
             Under autocast hidden and weight are cast as torch.nn.functional.linear() casts them.
    Memory:  beside the gradients, chunk × vocabulary × 4 B; × 6 B for bfloat16.
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
    """Logits of some tokens, their loss, and the gradient of that."""

    def __init__(self, rows: int, weight: Any, bias: Any, smoothing: float, kind: Any) -> None:
        self._weight, self._bias, self._smoothing = weight, bias, smoothing
        self._products = weight.new_empty(rows, weight.shape[0])
        self._wide = self._products if weight.dtype == kind else self._products.new_empty(
            self._products.shape, dtype=kind)

    def losses(self, hidden: Any, labels: Any) -> Any:
        """[tokens]. The gradient can then be asked for."""
        import torch

        count = len(labels)
        products, wide = self._products[:count], self._wide[:count]
        torch.mm(hidden, self._weight.t(), out=products)
        if self._wide is not self._products:
            wide.copy_(products)
        if self._bias is not None:
            wide.add_(self._bias)
        self._places = torch.arange(count, device=labels.device), labels
        own, highest = wide[self._places], wide.amax(1)
        mean = wide.mean(1) if self._smoothing else own
        torch.softmax(wide, 1, out=wide)
        every = highest - wide.amax(1).log()  # The logarithm of the sum: the highest is exp(0) of it.
        self._count = count
        return every - (1 - self._smoothing) * own - self._smoothing * mean

    def gradient(self) -> tuple[Any, Any]:
        """Of the losses in the logits, [tokens, vocabulary]: as wide as it was made, and as the weight is."""
        products, wide = self._products[:self._count], self._wide[:self._count]
        if self._smoothing:
            wide.sub_(self._smoothing / wide.shape[1])
        wide[self._places] -= 1 - self._smoothing
        return wide, products if self._products is self._wide else products.copy_(wide)


@functools.cache
def _function() -> Any:
    """The autograd function; torch is imported by now."""
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
            logits = _Chunk(min(chunk, len(labels)), weight, bias, smoothing, kind)
            for begin in range(0, len(labels), chunk):
                own, wanted = places[begin:begin + chunk], labels[begin:begin + chunk]
                rows = hidden[own]
                losses[begin:begin + chunk] = logits.losses(rows, wanted)
                if any(makes):
                    wide, narrow = logits.gradient()
                if of_hidden is not None:
                    of_hidden[own] = narrow @ weight
                if of_weight is not None:
                    of_weight.addmm_(wide.t(), rows.to(kind))
                if of_bias is not None:
                    of_bias.add_(wide.sum(0))
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
