# SPDX-License-Identifier: Apache-2.0
"""A model with torch.utils.checkpoint around parts of its frozen blocks."""
import torch
from torch.utils.checkpoint import checkpoint

HOW = ("one", "two")


class Block(torch.nn.Module):
    """A frozen map with a scale of the block's own, and trained ones of rank 4 beside it. around: what is called with each part, and its input."""

    def __init__(self, width, parts, around):
        super().__init__()
        self.norm, self.base = torch.nn.LayerNorm(width), torch.nn.Linear(width, width)
        self.scale = torch.nn.Parameter(torch.randn(width))
        self.requires_grad_(False)
        self.a, self.b = torch.nn.Linear(width, 4, bias=False), torch.nn.Linear(4, width, bias=False)
        self.parts, self.around = parts, around

    def mapped(self, x):
        y = self.norm(x)
        return torch.nn.functional.dropout(self.base(y) + self.b(self.a(y)), 0.1, self.training)

    def scaled(self, y):
        return torch.nn.functional.gelu(torch.stack([y, self.scale.expand_as(y)]).prod(0))

    def forward(self, x):
        if self.parts == "one":
            return x + self.around(lambda one: self.scaled(self.mapped(one)), x)
        return x + self.around(self.scaled, self.around(self.mapped, x))


class Net(torch.nn.Module):
    def __init__(self, parts, around, width=32, blocks=5):
        super().__init__()
        self.first = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(Block(width, parts, around) for _ in range(blocks))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def made(parts, reentrant=None):
    """The model; without `reentrant` its parts run once."""
    torch.manual_seed(4)
    return Net(parts, (lambda part, x: part(x)) if reentrant is None else lambda part, x: checkpoint(part, x, use_reentrant=reentrant))


def bits_of(model, steps=3, device="cpu"):
    """Losses of some steps, and what was trained."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    torch.manual_seed(5)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(16, 8).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [torch.tensor(losses), *(one.detach().cpu() for one in model.parameters() if one.requires_grad)]
