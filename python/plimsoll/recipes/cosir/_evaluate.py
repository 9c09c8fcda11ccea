# SPDX-License-Identifier: Apache-2.0
"""Evaluation of `cosir`: recall and ranks in both directions, raw and under the best condition of a grid.

docs/recipes/cosir.md, section 4, defines each figure. Ranks are counted, never sorted: a turned text is a·text + b·direction, so
one product of texts and images serves every condition.

Threads: the calling one, and torch's.
Memory:  blocks of 512 queries by 2,048 of the gallery, and some numbers a held-out pair; it does not grow with the gallery.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ...kernels import normalize_rows, polar_coordinates, recall_ranks, rotate_toward, turned_gallery_ranks, turned_query_ranks
from ._model import Model
from ._pairs import Held, Pairs

if TYPE_CHECKING:
    from ...rows._embedding import EmbeddingStore

FINAL_ANGLES = 30
_QUERIES, _GALLERY, _CONDITIONS = 512, 2048, 128  # Of a block.
_RADIUS_SHARE, _RADIUS_ROWS = 0.95, 1 << 16
_TRAIN_BATCHES, _TRAIN_ROWS = 25, 2048
_FLOOR = 1e-8
_LAST = torch.iinfo(torch.int32).max

Recall = dict[str, Any]


def reader(table: EmbeddingStore) -> Callable[[np.ndarray], torch.Tensor]:
    """Returns a function that reads the table's rows of ids."""
    return lambda ids: table.gather(ids).tensor.detach()


class Stopped(Exception):
    """Raised where an evaluation is cut short."""


class Turns(NamedTuple):
    """Conditions as the combiner applies them: directions of length 1 [n, dim], cosines, sines, scales [n]. The first is none at all."""

    course: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor
    scale: torch.Tensor


class Evaluation:
    """Evaluates a model and its conditions as they are now."""

    def __init__(self, model: Model, pairs: Pairs, read: Callable[[np.ndarray], torch.Tensor], *, batch_size: int, eval_pairs: int,
                 asked: Callable[[], bool] = lambda: False) -> None:
        """Chooses the held-out pairs. read: reads the conditions of ids. eval_pairs: most held-out pairs. asked: whether to end early."""
        self._model, self._pairs, self._read = model, pairs, read
        self._batch_rows, self._asked = min(batch_size, _TRAIN_ROWS), asked
        self._held = pairs.held_out(eval_pairs)

    @torch.no_grad()
    def make(self, angles: int) -> Recall | None:
        """Returns raw, oracle, diff, chance, pairs and train_mean_rank; None if it was cut short. angles: of the grid."""
        try:
            return self._made(angles)
        except Stopped:
            return None

    def _made(self, angles: int) -> Recall:
        trained = self._train_mean_rank()
        held, nothing = self._held, _summary(torch.empty(0), torch.empty(0))
        raw, oracle = {"t2i": nothing, "i2t": nothing}, {"t2i": nothing, "i2t": nothing}
        chance = {"t2i": 0.0, "i2t": 0.0}
        if len(held.ids):
            most = self.radius_quantile(_RADIUS_SHARE)
            turns = self._turns(polar_grid(angles, (most / 3, most * 2 / 3, most), self._model.shape.label_dim, self._pairs.device))
            ranked = Ranked(self._model, self._pairs, held, self._asked)
            for way, found in (("t2i", ranked.images(turns)), ("i2t", ranked.texts(turns))):
                raw[way], oracle[way] = _summary(found.first, found.first_precision), _summary(found.best, found.best_precision)
            chance = _chance(held)
        diff = {way: {name: oracle[way][name] - raw[way][name] for name in raw[way]} for way in raw}
        return {"raw": raw, "oracle": oracle, "diff": diff, "chance": chance, "pairs": len(held.ids), "train_mean_rank": trained}

    def conditions(self, ids: np.ndarray) -> torch.Tensor:
        """Reads conditions. Shape: int64 [n] → float32 [n, label_dim]."""
        return self._read(ids).to(self._pairs.device)

    @torch.no_grad()
    def radius_quantile(self, share: float) -> float:
        """Returns the quantile of the conditions' lengths, over at most 65,536 rows that lie evenly spaced."""
        ids = self._pairs.sampled(_RADIUS_ROWS)
        lengths = [polar_coordinates(self.conditions(ids[begin:begin + _GALLERY]))[0] for begin in range(0, len(ids), _GALLERY)]
        return float(torch.cat(lengths).kthvalue(int(share * (len(ids) - 1)) + 1)[0]) if len(ids) else 0.0

    def _turns(self, conditions: torch.Tensor) -> Turns:
        direction, angle, scale = self._model.turn(conditions)
        course, one = normalize_rows(direction), torch.ones(1, device=direction.device)
        return Turns(torch.cat([torch.zeros_like(course[:1]), course]), torch.cat([one, angle.cos()]), torch.cat([one - 1, angle.sin()]),
                     torch.cat([one, scale]))

    def _train_mean_rank(self) -> float:
        """Returns the mean rank of training pairs' own images among their batches', each text under its own condition."""
        model, pairs = self._model, self._pairs
        rows = min(self._batch_rows, pairs.rows)
        batches = min(_TRAIN_BATCHES, pairs.rows // rows) if rows >= 2 else 0
        total = 0.0
        for batch in range(batches):
            if self._asked():
                raise Stopped
            ids = pairs.shuffled(batch * rows, (batch + 1) * rows)
            image, text = pairs.read(ids)
            out, _ = rotate_toward(model.project_text(text), *model.turn(self.conditions(ids)))
            gallery = normalize_rows(model.project_image(image)).T
            for begin in range(0, rows, _QUERIES):
                own = torch.arange(begin, min(rows, begin + _QUERIES), device=out.device)
                total += float(recall_ranks(out[begin:begin + _QUERIES] @ gallery, own).sum())
        return total / (batches * rows) if batches else 0.0


class Found:
    """Ranks and precisions of each query: under no condition (first), and the best over all."""

    def __init__(self, queries: int, device: str) -> None:
        self.first = torch.full((queries,), _LAST, dtype=torch.int32, device=device)
        self.best = self.first.clone()
        self.first_precision = torch.zeros(queries, device=device)
        self.best_precision = torch.zeros(queries, device=device)

    def fold(self, queries: torch.Tensor, ranks: torch.Tensor, raw: bool) -> None:
        """Takes ranks [n, conditions] of queries, which may come more than once. raw: the first condition is none at all."""
        self.best.scatter_reduce_(0, queries, ranks.amin(1), "amin")
        if raw:
            self.first.scatter_reduce_(0, queries, ranks[:, 0].contiguous(), "amin")

    def fold_precision(self, queries: torch.Tensor, precision: torch.Tensor, raw: bool) -> None:
        """Takes precisions [n, conditions] of queries, each of which comes once a block of conditions."""
        self.best_precision[queries] = self.best_precision[queries].maximum(precision.amax(1))
        if raw:
            self.first_precision[queries] = precision[:, 0]


class Ranked:
    """Ranks held-out pairs. The right answer's own similarity is of the block that it is compared with, so that it counts itself once."""

    def __init__(self, model: Model, pairs: Pairs, held: Held, asked: Callable[[], bool]) -> None:
        self._model, self._pairs, self._ids, self._asked = model, pairs, held.ids, asked
        begins = np.flatnonzero(np.diff(held.groups, prepend=held.groups[:1] - 1))
        self._firsts = held.ids[begins]  # One image a group: its first pair's.
        device = pairs.device
        self._group = torch.from_numpy(np.repeat(np.arange(len(begins)), np.diff(begins, append=len(held.ids)))).to(device)
        self._begin = torch.from_numpy(np.append(begins, len(held.ids))).to(device)  # First pair of each group, and the end.

    def images(self, turns: Turns) -> Found:
        """Ranks, for each text, its image among one image per group."""
        found = Found(len(self._ids), self._pairs.device)
        for part, raw in _parts(turns):
            for begin, end in _blocks(0, len(self._ids), len(self._ids), _QUERIES):
                ranks = self._ranks_of_texts(part, raw, begin, end)
                queries = torch.arange(begin, end, device=ranks.device)
                found.fold(queries, ranks, raw)
                found.fold_precision(queries, 1 / ranks.float(), raw)
        return found

    def _ranks_of_texts(self, turns: Turns, raw: bool, begin: int, end: int) -> torch.Tensor:
        unit, a, b = self._turned(self._ids[begin:end], turns, raw)
        own, groups = self._group[begin:end], len(self._firsts)

        def compared(low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
            images = self._images(self._firsts[low:high]).T
            return unit @ images, turns.course @ images

        least = a.new_empty(end - begin, len(a))
        for low, high in self._looked(int(own[0]), int(own[-1]) + 1, groups):
            here = ((own >= low) & (own < high)).nonzero().squeeze(1)
            s, p = compared(low, high)
            place = own[here] - low
            least[here] = (a[:, here] * s[here, place] + b[:, here] * p[:, place]).T
        ranks = torch.zeros(least.shape, dtype=torch.int32, device=least.device)
        for low, high in self._looked(0, groups, groups):
            ranks += turned_query_ranks(*compared(low, high), a, b, least)
        return ranks

    def texts(self, turns: Turns) -> Found:
        """Ranks, for each image, its texts among all. Its rank is that of its best text, its precision the mean over its texts."""
        found, counts = Found(len(self._firsts), self._pairs.device), self._begin.diff().unsqueeze(1)
        for part, raw in _parts(turns):
            begun = part.cosine.new_zeros(len(part.cosine))  # Sums of the group that the block before ended within.
            for begin, end in _blocks(0, len(self._ids), len(self._ids), _QUERIES):
                ranks, same = self._ranks_of_images(part, raw, begin, end)
                queries = self._group[begin:end]
                found.fold(queries, ranks, raw)
                first, last = int(queries[0]), int(queries[-1])
                sums = begun.new_zeros(last + 1 - first, len(begun))
                sums[0] = begun
                sums.index_add_(0, queries - first, same.float() / ranks.float())
                ended = last + int(self._begin[last + 1] == end)  # Groups before this one are whole.
                found.fold_precision(torch.arange(first, ended, device=sums.device), sums[:ended - first] / counts[first:ended], raw)
                begun = sums[-1].clone() if ended == last else torch.zeros_like(begun)
        return found

    def _ranks_of_images(self, turns: Turns, raw: bool, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the ranks of pairs' texts for their images: among all texts, and among the image's own."""
        own = self._group[begin:end]
        images, rows = self._images(self._firsts[own.cpu().numpy()]), len(self._ids)
        p = images @ turns.course.T
        least = p.new_empty(p.shape)
        for low, high in self._looked(begin, end, rows):
            here = torch.arange(max(low, begin) - begin, min(high, end) - begin, device=p.device)
            unit, a, b = self._turned(self._ids[low:high], turns, raw)
            s, place = images @ unit.T, here + (begin - low)
            least[here] = a[:, place].T * s[here, place].unsqueeze(1) + b[:, place].T * p[here]
        every = torch.zeros(p.shape, dtype=torch.int32, device=p.device)
        same = every.clone()
        for low, high in self._looked(0, rows, rows):
            unit, a, b = self._turned(self._ids[low:high], turns, raw)
            first, last = ((self._begin[own + k] - low).clamp(0, high - low) for k in (0, 1))
            counts = turned_gallery_ranks(images @ unit.T, p, a, b, least, first, last)
            every, same = every + counts[0], same + counts[1]
        return every, same

    def _looked(self, begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
        for block in _blocks(begin, end, size, _GALLERY):
            if self._asked():
                raise Stopped
            yield block

    def _images(self, ids: np.ndarray) -> torch.Tensor:
        return normalize_rows(self._model.project_image(self._pairs.read(ids, ("image",))[0]))

    def _turned(self, ids: np.ndarray, turns: Turns, raw: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns texts of length 1 [n, dim], and a, b [conditions, n]: a·text + b·direction is the text as a condition turns it."""
        text = self._model.project_text(self._pairs.read(ids, ("text",))[0])
        length = text.norm(dim=1)
        cosine, sine, scale = (one.unsqueeze(1) for one in (turns.cosine, turns.sine, turns.scale))
        unit = (length / _FLOOR).clamp_max(1.0)  # The length of norm(text).
        along = turns.course @ text.T / length.clamp_min(_FLOOR)
        square = cosine * cosine * unit * unit + 2 * cosine * sine * along + sine * sine * turns.course.square().sum(1, keepdim=True)
        turned = square.clamp_min(0).sqrt()
        by, stretch = 1 / turned.clamp_min(_FLOOR), scale * length
        factor = stretch / (stretch.abs() * turned * by).clamp_min(_FLOOR) * by
        a, b = factor * cosine, factor * sine
        if raw:
            a[0], b[0] = 1, 0
        return normalize_rows(text), a, b


def polar_grid(angles: int, radii: tuple[float, ...], label_dim: int, device: str) -> torch.Tensor:
    """Makes conditions of angles × radii in the plane of the first two axes. Shape: [angles × radii, label_dim]."""
    turn = 2 * math.pi * torch.arange(angles, dtype=torch.float64) / angles
    grid = torch.zeros(len(radii) * angles, label_dim)
    grid[:, 0] = torch.cat([radius * turn.cos() for radius in radii])
    grid[:, 1] = torch.cat([radius * turn.sin() for radius in radii])
    return grid.to(device)


def _parts(turns: Turns) -> Iterator[tuple[Turns, bool]]:
    """Yields blocks of conditions, and whether their first is none at all."""
    for begin in range(0, len(turns.cosine), _CONDITIONS):
        yield Turns(*(one[begin:begin + _CONDITIONS] for one in turns)), begin == 0


def _blocks(begin: int, end: int, size: int, of: int) -> Iterator[tuple[int, int]]:
    """Yields the blocks of `size` rows that have any of the rows begin … end − 1. A block begins at a multiple of `of`."""
    for low in range(begin // of * of, end, of):
        yield low, min(size, low + of)


def _summary(ranks: torch.Tensor, precision: torch.Tensor) -> dict[str, float]:
    if not len(ranks):
        return dict.fromkeys(("r1", "r5", "r10", "mean_rank", "median_rank", "map"), 0.0)
    ordered, middle = ranks.double().sort()[0], len(ranks) // 2
    median = ordered[middle] if len(ranks) % 2 else (ordered[middle] + ordered[middle - 1]) / 2
    return {**{f"r{most}": 100 * float((ranks <= most).double().mean()) for most in (1, 5, 10)}, "mean_rank": float(ordered.mean()),
            "median_rank": float(median), "map": float(precision.double().mean())}


def _chance(held: Held) -> dict[str, float]:
    """Returns mean ranks in a random order: the best of k among n stands at (n + 1) / (k + 1)."""
    texts = np.diff(np.flatnonzero(np.diff(held.groups, prepend=held.groups[:1] - 1)), append=len(held.ids))
    return {"t2i": (len(texts) + 1) / 2, "i2t": float(((len(held.ids) + 1) / (texts + 1)).mean())}


def text_of(recall: Recall) -> str:
    """Returns a table of an evaluation."""
    lines = [f"{'':14}{'R@1':>8}{'R@5':>8}{'R@10':>8}{'mean rank':>12}{'median':>9}{'mAP':>8}   {recall['pairs']} held-out pairs"]
    for form in ("raw", "oracle"):
        for way, r in recall[form].items():
            lines.append(f"{form + ' ' + way:14}{r['r1']:>7.1f}%{r['r5']:>7.1f}%{r['r10']:>7.1f}%{r['mean_rank']:>12.1f}"
                         f"{r['median_rank']:>9.1f}{r['map']:>8.3f}")
    chance = recall["chance"]
    own = f"; training batches' own mean rank {recall['train_mean_rank']:.1f}" if recall["train_mean_rank"] > 0 else ""
    return "\n".join([*lines, f"chance         mean rank {chance['t2i']:.1f} t2i, {chance['i2t']:.1f} i2t{own}"])
