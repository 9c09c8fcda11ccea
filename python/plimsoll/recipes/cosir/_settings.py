# SPDX-License-Identifier: Apache-2.0
"""Settings of `cosir` as its options say: the loss, the optimizers and their rates, the table of conditions.

Threads: the calling one.   Memory: none.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ...rows._embedding import Adagrad, AdamW, AdamWFresh, Normal, Uniform, Zeros
from ._losses import TERMS, Loss
from ._model import Model
from ._random import Purpose, seed_for

if TYPE_CHECKING:
    from ...memory._memory import Governor
    from ...ranks._group import Group
    from . import Options

STORE_USUAL = 64 << 20
_LEAST_RATE = 1e-9  # Where the cosine schedule ends.
_STORE_SHARE = 4
_TABLE = {"adamw": AdamW, "adamw_fresh": AdamWFresh, "adagrad": Adagrad}


def loss_of(model: Model, options: Options, group: Group | None = None) -> Loss:
    """Makes the loss that the options describe. group: run.group, whose ranks share the tiles of a batch."""
    weights = {name: float(getattr(options, f"loss_{name}")) for name in TERMS}
    return Loss(model, weights, options.temperature, options.seed, recompute=options.gradient_caching, group=group)


def optimizer_of(model: Model, options: Options) -> torch.optim.AdamW:
    """Makes the optimizer of combiner and projections, each with a rate of its own."""
    groups = [{"params": model.combiner(), "lr": options.lr}]
    groups += [{"params": model.projections(), "lr": options.projection_lr}] if model.projections() else []
    return torch.optim.AdamW(groups, weight_decay=options.weight_decay, fused=True)


def cosine_scale(step: int, steps: int, rate: float) -> float:
    """Returns the factor of the learning rate for a step: half a cosine over all steps, down to a rate of 1e-9."""
    least = _LEAST_RATE / rate if rate > 0 else 0.0
    return max(0.5 * (1 + math.cos(math.pi * step / max(1, steps))), least)


def table_optimizer(options: Options) -> Adagrad | AdamW | AdamWFresh:
    """Makes the optimizer of the conditions."""
    return _TABLE[options.label_optimizer](lr=options.label_lr, eps=1e-8, weight_decay=options.label_weight_decay)


def table_init(options: Options) -> Normal | Uniform | Zeros:
    """Says how conditions begin."""
    seed = seed_for(options.seed, Purpose.ROWS)
    if options.label_init == "zeros":
        return Zeros()
    return Normal(options.label_init_scale, seed) if options.label_init == "normal" else Uniform(options.label_init_scale, seed)


def table_place(options: Options, rows: int, governor: Governor) -> dict[str, Any]:
    """Returns store_bytes and layout of the conditions: the option's, or a quarter of what is free and no more than all rows take."""
    weight, moments = 2 if options.label_dtype == "bfloat16" else 4, 1 if options.label_optimizer == "adagrad" else 2
    whole = rows * (24 + options.label_dim * (weight + 4 * moments)) * 5 // 4
    share = min(governor.ledger().free_bytes // _STORE_SHARE, whole + STORE_USUAL)
    size = options.store_bytes or (share if share > STORE_USUAL else 0)  # 0: as much, or the least that works.
    fits = whole + (STORE_USUAL // 2) <= (size or STORE_USUAL)
    layout = options.label_layout if options.label_layout != "auto" else "any_order" if fits else "sample_order"
    return {"store_bytes": size, "layout": layout}
