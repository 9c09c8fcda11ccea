#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One epoch of `cosir` in plain PyTorch, everything in RAM: the peer of w9_plain_pytorch.

The model, losses and optimizers of docs/recipes/cosir.md for aligned features (no projections),
written as a PyTorch user would: a map-style Dataset, a DataLoader with its default collation,
autograd, torch.optim.AdamW. Condition vectors are rows of one tensor; each step takes its rows out,
makes them a leaf, and applies AdamW to them with moments kept per row.

Prints one JSON object: rows_per_second, seconds, losses (one per step), peak_resident_bytes.

Threads: --threads for torch, --workers for the DataLoader (0: in the training process).
Memory:  the whole data, the condition vectors and their moments, and the step's activations.
"""
import argparse
import json
import math
import pathlib
import resource
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

WEIGHTS = {"infonce": 1.0, "laplacian": 0.7, "angular": 0.3, "radius": 0.3, "rotation": 0.3}
NEIGHBOURS = 3
RADIUS_PAIRS = 50
NEAR = math.cos(math.radians(15))
MARGIN = 0.05
ROTATION_TEXTS = 64
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def unit(x: torch.Tensor) -> torch.Tensor:
    return F.normalize(x, dim=-1, eps=1e-8)


def length(x: torch.Tensor) -> torch.Tensor:
    """‖x‖ per row, with gradient 0 at 0."""
    square = x.square().sum(-1)
    zero = square == 0
    return square.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def cosine_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x·y / max(‖x‖‖y‖, 1e-8) per row; F.cosine_similarity floors each length instead."""
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)).clamp_min(1e-8)


class Branch(nn.Module):
    """Linear(1, 64) → ReLU → LayerNorm → Linear(64, 1), plus a skip Linear(1, 1)."""

    def __init__(self):
        super().__init__()
        self.into, self.norm = nn.Linear(1, 64), nn.LayerNorm(64)
        self.out, self.skip = nn.Linear(64, 1), nn.Linear(1, 1)

    def forward(self, x):
        x = x.unsqueeze(1)
        return (self.out(self.norm(F.relu(self.into(x)))) + self.skip(x)).squeeze(1)


class Combiner(nn.Module):
    """Turns texts [B, dim], given with their unit vectors, by conditions [B, 2]."""

    def __init__(self, dim: int):
        super().__init__()
        self.register_buffer("weight", torch.empty(dim, 2))
        self.register_buffer("bias", torch.empty(dim))
        self.radius, self.angle = Branch(), Branch()

    def forward(self, text, text_unit, conditions):
        x, y = conditions.unbind(1)
        origin = (x == 0) & (y == 0)
        phi = torch.atan2(y.masked_fill(origin, 0.0), x.masked_fill(origin, 1.0))
        scale = 0.8 + 0.4 * self.radius(length(conditions))
        theta = (math.pi / 6 * self.angle(phi)).unsqueeze(1)
        toward = unit(F.linear(conditions, self.weight, self.bias))
        size = text.norm(dim=1, keepdim=True)
        turned = unit(theta.cos() * text_unit + theta.sin() * toward)
        return unit(scale.unsqueeze(1) * size * turned)


def infonce(out, image, groups, temperature):
    similarity = out @ image.T / temperature
    same = groups.unsqueeze(1) == groups
    same.fill_diagonal_(False)
    similarity = similarity.masked_fill(same, -math.inf)
    target = torch.arange(len(out))
    return (F.cross_entropy(similarity, target) + F.cross_entropy(similarity.T, target)) / 2


def fast_tables(conditions):
    """Distances and cosines of all pairs, [B, B] each, by torch's own fast operators."""
    direction = unit(conditions)
    return (torch.cdist(conditions, conditions, compute_mode="donot_use_mm_for_euclid_dist"),
            direction @ direction.T)


def exact_tables(conditions):
    """The same but for rounding, which is the program's: no product is fused with a sum.

    Among 2,048 angles many cosines differ in their last bit alone, so that the nearest in angle
    depends on how they were rounded. NumPy rounds each operation as IEEE 754 says; torch's square
    root does not.
    """
    x, y = conditions.numpy().T
    by = np.float32(1) / np.maximum(np.sqrt(x * x + y * y), np.float32(1e-8))
    distance = np.square(x - x[:, None]) + np.square(y - y[:, None])
    x, y = x * by, y * by
    return torch.from_numpy(distance), torch.from_numpy(x * x[:, None] + y * y[:, None])


@torch.no_grad()
def neighbours(conditions, picks, tables):
    """A picked one of the three nearest; the nearest in angle and its cosine. [B] each."""
    distance, cosine = tables(conditions.detach())
    distance.fill_diagonal_(math.inf)
    cosine.fill_diagonal_(-math.inf)
    count = min(NEIGHBOURS, len(conditions) - 1)
    nearest = distance.topk(count, largest=False).indices
    picked = nearest.gather(1, (picks % count).unsqueeze(1)).squeeze(1)
    angular = cosine.argmax(1)
    return picked, angular, cosine.gather(1, angular.unsqueeze(1)).squeeze(1)


def radius_order(moved, radius, angular, cosine):
    pairs = (cosine > NEAR).nonzero().squeeze(1)[:RADIUS_PAIRS]
    if len(pairs) == 0:
        return moved.new_zeros(())
    other = angular[pairs]
    ordered = radius[pairs] <= radius[other]
    low, high = torch.where(ordered, pairs, other), torch.where(ordered, other, pairs)
    size = length(moved)
    return F.relu(MARGIN - (size[high] - size[low])).mean()


def rotation(combiner, text, text_unit, radius):
    text, text_unit = text[:ROTATION_TEXTS], text_unit[:ROTATION_TEXTS]
    anchors = radius.mean() * text.new_tensor([[1, 0], [0, 1], [-1, 0], [0, -1]])
    turned = combiner(text.repeat(4, 1), text_unit.repeat(4, 1),
                      anchors.repeat_interleave(len(text), 0))
    moved = (turned.view(4, len(text), -1) - text_unit).mean(1)
    return cosine_of(moved, moved.roll(-1, 0)).square().mean()


def total_loss(combiner, image, text, conditions, groups, picks, options):
    text_unit = unit(text)
    out = combiner(text, text_unit, conditions)
    moved = out - text_unit
    tables = exact_tables if options.exact_neighbours else fast_tables
    picked, angular, cosine = neighbours(conditions, picks, tables)
    radius = length(conditions).detach()
    near = torch.exp(-length(conditions - conditions[picked]))
    terms = {
        "infonce": infonce(out, unit(image), groups, options.temperature),
        "laplacian": ((1 - cosine_of(moved, moved[picked])) * near).mean(),
        "angular": (1 - cosine_of(moved, moved[angular])).mean(),
        "radius": radius_order(moved, radius, angular, cosine),
        "rotation": rotation(combiner, text, text_unit, radius),
    }
    return sum(WEIGHTS[name] * term for name, term in terms.items())


class Rows:
    """Condition vectors with AdamW moments, one row per sample."""

    def __init__(self, values: torch.Tensor, lr: float, weight_decay: float):
        self.values, self.lr, self.weight_decay = values, lr, weight_decay
        self.first, self.second = torch.zeros_like(values), torch.zeros_like(values)
        self.steps = torch.zeros(len(values), 1)

    def take(self, ids):
        return self.values[ids].requires_grad_()

    @torch.no_grad()
    def apply(self, ids, rows):
        gradient = rows.grad
        first = self.first[ids].lerp_(gradient, 1 - BETA1)
        second = self.second[ids].mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        steps = self.steps[ids] + 1
        size = second.sqrt() / (1 - BETA2**steps).sqrt() + EPSILON
        self.values[ids] = (rows.detach() * (1 - self.lr * self.weight_decay)
                            - self.lr * first / (1 - BETA1**steps) / size)
        self.first[ids], self.second[ids], self.steps[ids] = first, second, steps


class Pairs(torch.utils.data.Dataset):
    """The pairs of one record file: image and text features, id and group."""

    def __init__(self, image, text, groups):
        self.image, self.text, self.groups = image, text, groups

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return self.image[i], self.text[i], i, self.groups[i]


def direct_batches(pairs, order, batch_size):
    """Batches by indexing the tensors, for users who do without a DataLoader."""
    for ids in torch.from_numpy(order).split(batch_size):
        yield pairs.image[ids], pairs.text[ids], ids, pairs.groups[ids]


def load_combiner(start) -> Combiner:
    combiner = Combiner(start["direction.weight"].shape[0])
    names = {"direction.weight": "weight", "direction.bias": "bias"}
    state = {names.get(name, name): torch.from_numpy(start[name]) for name in start.files
             if name.startswith(("direction.", "radius.", "angle."))}
    combiner.load_state_dict(state)
    return combiner


def train(options, pairs, start) -> dict:
    order, picks = start["order"], torch.from_numpy(start["picks"])
    combiner = load_combiner(start)
    rows = Rows(torch.from_numpy(start["rows"]), options.label_lr, options.label_weight_decay)
    optimizer = torch.optim.AdamW(combiner.parameters(), lr=options.lr, fused=True,
                                  weight_decay=options.weight_decay)
    steps = -(-len(order) // options.batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(
        0.5 * (1 + math.cos(math.pi * step / steps)), 1e-9 / options.lr))
    if options.loader == "direct":
        batches = direct_batches(pairs, order, options.batch_size)
    else:
        batches = torch.utils.data.DataLoader(
            pairs, batch_size=options.batch_size, sampler=order.tolist(),
            num_workers=options.workers)
    losses, done = [], 0
    started = time.perf_counter()
    for image, text, ids, groups in batches:
        conditions = rows.take(ids)
        loss = total_loss(combiner, image, text, conditions, groups, picks[ids], options)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        rows.apply(ids, conditions)
        losses.append(loss.item())
        done += len(ids)
    seconds = time.perf_counter() - started
    return {"rows_per_second": done / seconds, "seconds": seconds, "losses": losses}


def load_pairs(folder: pathlib.Path, groups: np.ndarray) -> Pairs:
    """Reads all features of a `plimsoll synth cosir` folder into RAM."""
    description = json.loads((folder / "features.json").read_text())
    width = 512
    records = np.fromfile(folder / "records.dat", np.float32)[: description["rows"] * 2 * width]
    records = torch.from_numpy(records).view(-1, 2, width)
    return Pairs(records[:, 0].clone(), records[:, 1].clone(), torch.from_numpy(groups))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("data", type=pathlib.Path, help="folder made by plimsoll synth cosir")
    parser.add_argument("--start", type=pathlib.Path, required=True,
                        help=".npz of the order, neighbour picks, first rows and weights")
    parser.add_argument("--loader", choices=("dataloader", "direct"), default="dataloader")
    parser.add_argument("--exact-neighbours", action="store_true",
                        help="round neighbours as the program does, to compare losses; slower")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--temperature", type=float, default=0.07)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--label-lr", type=float, default=0.1)
    parser.add_argument("--label-weight-decay", type=float, default=0.05)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = np.load(options.start)
    result = train(options, load_pairs(options.data, start["groups"]), start)
    result["peak_resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(result))


if __name__ == "__main__":
    main()
