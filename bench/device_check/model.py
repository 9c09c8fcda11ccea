# SPDX-License-Identifier: Apache-2.0
"""A language model of Llama's shape with random frozen weights and adapters that are trained, for checks of streamed weights.

Threads: none.   Memory: frozen weights in bfloat16, a block at a time on the device while they are made.
"""
from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    hidden: int
    inner: int
    heads: int
    blocks: int
    vocabulary: int
    rank: int = 16


SEVEN_B = Shape(4096, 11008, 32, 32, 32000)
TINY = Shape(128, 320, 4, 6, 500, 4)


class Adapted(nn.Module):
    """A frozen linear map, and a trained one of low rank beside it."""

    def __init__(self, given: int, made: int, rank: int, device: str) -> None:
        super().__init__()
        # Made on the device, where random numbers are quick, and kept on the host.
        frozen = (torch.randn(made, given, device=device) * given**-0.5).bfloat16().cpu()
        self.weight = nn.Parameter(frozen, requires_grad=False)
        self.a = nn.Linear(given, rank, bias=False)
        self.b = nn.Linear(rank, made, bias=False)

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.weight) + self.b(self.a(x.float())).to(x.dtype)


class Block(nn.Module):
    """Attention and a gated feed-forward part, each behind a norm."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        self._heads = shape.heads
        wide, inner = shape.hidden, shape.inner
        self.norms = nn.ModuleList(nn.RMSNorm(wide, dtype=torch.bfloat16) for _ in range(2)).requires_grad_(False)
        self.qkv = nn.ModuleList(Adapted(wide, wide, shape.rank, device) for _ in range(3))
        self.out = Adapted(wide, wide, shape.rank, device)
        self.up, self.gate = (Adapted(wide, inner, shape.rank, device) for _ in range(2))
        self.down = Adapted(inner, wide, shape.rank, device)

    def forward(self, x: Any) -> Any:
        y = self.norms[0](x)
        q, k, v = (part(y).unflatten(-1, (self._heads, -1)).transpose(1, 2) for part in self.qkv)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Blocks between an embedding and a head, both frozen. forward(tokens [B, T]) returns the mean loss of each next token."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        self.table = nn.Embedding(shape.vocabulary, shape.hidden, dtype=torch.bfloat16).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(shape, device) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.hidden, dtype=torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, tokens: Any, recompute: bool = False) -> Any:
        from torch.utils.checkpoint import checkpoint

        import plimsoll

        x = self.table(tokens)
        for block in self.blocks:  # Streamed blocks run again in backward by themselves.
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return plimsoll.linear_cross_entropy(self.norm(x)[:, :-1], self.head.weight, tokens[:, 1:])

    def trained(self) -> list[Any]:
        """Returns the parameters that are trained."""
        return [one for one in self.parameters() if one.requires_grad]


def block_bytes(shape: Shape) -> int:
    """Returns the bytes of a block's frozen weights."""
    return 2 * (4 * shape.hidden**2 + 3 * shape.hidden * shape.inner + 2 * shape.hidden)
