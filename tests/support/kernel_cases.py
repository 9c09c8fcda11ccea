# SPDX-License-Identifier: Apache-2.0
"""Cases of plimsoll.kernels: an operator, arguments that a seed makes, and the same formula in torch's operators, in any dtype."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

FLOOR = 1e-8


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator with one kind of arguments. Floating arguments that `trained` names take gradients."""
    name: str
    make: Callable[[int], list[Any]]  # Of a number of rows.
    formula: Callable[..., Any]
    trained: tuple[int, ...] = ()
    rows: tuple[int, ...] = (2, 3, 31, 33, 150)
    tolerance: float = 1e-6  # Of float32 against float64, relative to the norm; each from a measured one.
    grad_tolerance: float = 2e-6
    options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)  # The last arguments, by the names that Python has.

    @property
    def operator(self) -> Any:
        return getattr(torch.ops.plimsoll, self.name).default

    def arguments(self, rows: int, dtype: torch.dtype = torch.float32, device: str = "cpu", trained: bool = True) -> list[Any]:
        made = []
        for place, one in enumerate([*self.make(rows), *self.options.values()]):
            if isinstance(one, torch.Tensor):
                one = (one.to(dtype) if one.is_floating_point() else one).to(device)
                one = one.requires_grad_(trained and place in self.trained)
            elif isinstance(one, list):  # Edges, which are no floats and take no gradient, or layers.
                one = [(each.to(dtype) if each.is_floating_point() else each).to(device) for each in one]
                one = [each.requires_grad_(trained and place in self.trained) for each in one] if place in self.trained else one
            made.append(one)
        return made


def listed(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def trained_of(arguments: list[Any]) -> list[torch.Tensor]:
    flat = [each for one in arguments for each in (one if isinstance(one, list) else [one])]
    return [one for one in flat if isinstance(one, torch.Tensor) and one.requires_grad]


def forward_and_backward(function: Callable[..., Any], arguments: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(results, gradients of a fixed weighting of those that have one). The weights are exact in float32."""
    results = listed(function(*arguments))
    inputs = trained_of(arguments)
    if not inputs:
        return results, []
    generator = torch.Generator().manual_seed(5)
    total = 0.0
    for one in results:
        weight = torch.randn(one.shape, generator=generator).to(one.device)
        if one.requires_grad:
            total = total + (one * weight.to(one.dtype)).sum()
    return [one.detach() for one in results], list(torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True))


def gap(x: torch.Tensor, y: torch.Tensor) -> float:
    """Distance from y relative to its norm, or to 1e-6 where that is less; exact where numbers are whole."""
    assert x.shape == y.shape
    if not y.is_floating_point():
        return 0.0 if torch.equal(x.cpu(), y.cpu()) else float("inf")
    x, y = x.detach().cpu().double(), y.detach().cpu().double()
    return float((x - y).norm() / y.norm().clamp_min(1e-6))


def normals(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def unit(x):
    return x / x.norm(dim=1, keepdim=True).clamp_min(FLOOR)


def polar(x):
    rest = x[:, 1:].norm(dim=1)
    q = x[:, 1] if x.shape[1] == 2 else torch.where(x[:, 1] < 0, -1.0, 1.0).to(x.dtype) * rest
    return x.norm(dim=1), torch.atan2(q, x[:, 0])


def rotate(x, direction, angle, scale):
    turned = unit(angle.cos()[:, None] * unit(x) + angle.sin()[:, None] * unit(direction))
    return unit(scale[:, None] * x.norm(dim=1, keepdim=True) * turned), unit(x)


def info_nce(a, b, groups, temperature):
    s = a @ b.T / temperature
    own = torch.eye(len(a), dtype=torch.bool, device=a.device)
    s = s.masked_fill((groups[:, None] == groups[None, :]) & ~own, -1e30)
    target = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(s, target) + F.cross_entropy(s.T, target)) / 2


def neighbors(x):
    apart = (x[:, None] - x[None, :]).square().sum(2).fill_diagonal_(torch.inf)
    cosine = (unit(x) @ unit(x).T).fill_diagonal_(-torch.inf)
    order = apart.sort(dim=1, stable=True)[1][:, :3]
    nearest = torch.full((len(x), 3), -1, device=x.device)
    nearest[:, :len(x) - 1] = order[:, :len(x) - 1]
    return nearest, cosine.argmax(1), cosine.max(1)[0]


def displacements(a, b, pairs0, pairs1):
    moved = a - b
    length = moved.norm(dim=1)

    def cosine(pairs):
        return torch.zeros_like(length) if pairs is None else (moved * moved[pairs]).sum(1) / (length * length[pairs]).clamp_min(FLOOR)

    return length, cosine(pairs0), cosine(pairs1)


def ranks(similarity, target):
    return (similarity >= similarity.gather(1, target[:, None])).sum(1, dtype=torch.int32)


def query_ranks(s, p, a, b, least):
    return (a.T[:, :, None] * s[:, None] + b.T[:, :, None] * p[None] >= least[:, :, None]).sum(2, dtype=torch.int32)


def gallery_ranks(s, p, a, b, least, low, high):
    reaches = a[None] * s[:, None] + b[None] * p[:, :, None] >= least[:, :, None]
    place = torch.arange(s.shape[1], device=s.device)
    own = (place >= low[:, None]) & (place < high[:, None])
    return reaches.sum(2, dtype=torch.int32), (reaches & own[:, None]).sum(2, dtype=torch.int32)


def groups_of(rows: int, each: int) -> torch.Tensor:
    return (torch.arange(rows) // each).roll(1)


def others(rows: int, by: int) -> torch.Tensor:
    return torch.arange(rows).roll(by)


CONTRAST = (
    Case("normalize_rows", lambda n: [normals(n, 100, seed=1)], unit, (0,)),
    Case("normalize_rows", lambda n: [normals(n, 5, seed=2, scale=1e3)], unit, (0,)),
    *(Case("polar_coordinates", lambda n, columns=columns: [normals(n, columns, seed=3)], polar, (0,)) for columns in (2, 3, 64)),
    Case("rotate_toward", lambda n: [normals(n, 64, seed=4, scale=3.0), normals(n, 64, seed=5), normals(n, seed=6),
                                     1 + normals(n, seed=7).abs()], rotate, (0, 1, 2)),
    Case("rotate_toward", lambda n: [normals(n, 7, seed=4), normals(n, 7, seed=5), normals(n, seed=6), -1 - normals(n, seed=7).abs()],
         rotate, (1, 2)),
    *(Case("symmetric_info_nce", lambda n, each=each, t=t: [unit(normals(n, 24, seed=8)), unit(normals(n, 24, seed=9)),
                                                            groups_of(n, each), t],
           info_nce, (0, 1), rows=(4, 31, 33, 150), grad_tolerance=5e-6) for each, t in ((1, 0.07), (3, 0.025), (2, 1.0))),
    *(Case("nearest_neighbors", lambda n, columns=columns: [normals(n, columns, seed=10)], neighbors) for columns in (2, 16)),
    Case("displacement_cosines", lambda n: [normals(n, 96, seed=11), normals(n, 96, seed=12), others(n, 1), torch.arange(n) // 4],
         displacements, (0, 1), grad_tolerance=5e-6),
    Case("displacement_cosines", lambda n: [normals(n, 5, seed=11), normals(n, 5, seed=12), None, others(n, 1)], displacements, (0,),
         grad_tolerance=5e-6),
)
RECALL = (
    Case("recall_ranks", lambda n: [normals(n, 77, seed=13), torch.arange(n) % 77], ranks),
    Case("turned_query_ranks", lambda n: [normals(n, 77, seed=14), normals(5, 77, seed=15), normals(5, n, seed=16), normals(5, n, seed=17),
                                          normals(n, 5, seed=18)], query_ranks),
    Case("turned_gallery_ranks", lambda n: [normals(n, 77, seed=14), normals(n, 5, seed=15), normals(5, 77, seed=16), normals(5, 77, seed=17),
                                            normals(n, 5, seed=18), torch.arange(n) - 3, torch.arange(n) + 9], gallery_ranks),
)


def edges_of(nodes: int) -> torch.Tensor:
    """About three edges a node: parallel ones, some from a node to itself, and nodes without any."""
    generator = torch.Generator().manual_seed(nodes)
    edge_index = torch.randint(0, max(1, nodes), (2, 3 * nodes), generator=generator)
    edge_index[:, ::7] = edge_index[:1, ::7]
    return edge_index if nodes < 4 else edge_index.where(edge_index != 1, 0)


def sorted_edges(edge_index, nodes):
    """Sorted by Python's own sort; places behind the last edge are 0."""
    pairs = edge_index.T.tolist()
    into = [[*(s for s, t in pairs if t == v and s != v), v] for v in range(nodes)]
    targets = [v for v, list_ in enumerate(into) for _ in list_]
    sources = [s for list_ in into for s in list_]
    out = sorted(range(len(sources)), key=lambda e: sources[e])

    def ptr(of):
        return torch.tensor([sum(x < v for x in of) for v in range(nodes + 1)], dtype=torch.int32)

    def whole(of):
        return torch.tensor([*of, *[0] * (len(pairs) + nodes - len(of))], dtype=torch.int32)

    self_edge = torch.tensor([(v, v) in {(s, t) for s, t in pairs} for v in range(nodes)], dtype=torch.uint8)
    return ptr(targets), whole(sources), ptr(sources), whole([targets[e] for e in out]), whole(out), self_edge


def attention(x, weight, att_source, att_target, bias, edges, concat=True, dropout=0.0, seed=0, place=0, bf16=False):
    """Edge by edge: a matrix [to, from, head] holds how often an edge is there, and the sum of its factors of dropout."""
    nodes, (heads, out) = len(x), att_source.shape
    in_ptr, in_source = edges[0].tolist(), edges[1].tolist()
    keep = torch.ops.plimsoll.dropout_factors(x.new_zeros(len(in_source), heads, dtype=torch.float32), dropout, seed, place).to(x.dtype)
    count, kept = x.new_zeros(nodes, nodes, heads), x.new_zeros(nodes, nodes, heads)
    for v in range(nodes):
        for e in range(in_ptr[v], in_ptr[v + 1]):
            count[v, in_source[e]] += 1
            kept[v, in_source[e]] += keep[e]
    h = (x @ weight.T).view(nodes, heads, out)
    score = F.leaky_relu((h * att_target).sum(2)[:, None] + (h * att_source).sum(2)[None, :], 0.2)
    share = (score - score.detach().amax()).exp()
    y = torch.einsum("ijh,jhc->ihc", kept * share / (count * share).sum(1, keepdim=True), h)
    return (y.flatten(1) if concat else y.mean(1)) + bias


def neighbors_of(rows, weight, bias, ids, edges, bf16=False):
    out_ptr, out_target, self_edge = (edges[k].tolist() for k in (2, 3, 5))
    target = torch.zeros(len(rows), len(weight), dtype=rows.dtype)
    for v in range(len(rows)):
        for e in range(out_ptr[v], out_ptr[v + 1]):
            if out_target[e] != v or self_edge[v]:
                target[v, ids[out_target[e]]] = 1
    return F.binary_cross_entropy_with_logits(rows @ weight.T + bias, target.to(rows.device))


def divergence(mean, log_variance):
    return torch.distributions.kl_divergence(torch.distributions.Normal(mean, (log_variance / 2).exp()),
                                             torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))).mean()


def made_edges(nodes: int) -> list[torch.Tensor]:
    return list(torch.ops.plimsoll.sort_edges(edges_of(nodes), nodes))


def layer_of(nodes: int, inputs: int, heads: int, out: int, concat: bool) -> list[Any]:
    return [normals(nodes, inputs, seed=20), normals(heads * out, inputs, seed=21, scale=0.3), normals(heads, out, seed=22), normals(heads, out, seed=23),
            normals(heads * out if concat else out, seed=24), made_edges(nodes)]


def head_of(rows: int) -> list[Any]:
    return [normals(rows, 12, seed=25), normals(19, 12, seed=26), normals(19, seed=27), torch.arange(rows) * 5 % 19]


GRAPHS = (
    Case("sort_edges", lambda n: [edges_of(n), n], sorted_edges),
    *(Case("gat_conv", lambda n, form=form: layer_of(n, *form), attention, (0, 1, 2, 3, 4), grad_tolerance=5e-6,
           options={"concat": form[3], "dropout": dropout, "seed": 11, "place": 3})
      for form, dropout in (((7, 3, 5, True), 0.0), ((18, 4, 24, True), 0.3), ((9, 2, 8, False), 0.0), ((12, 5, 11, False), 0.5))),
    Case("linear_rows", lambda n: [normals(n, 37, seed=28), normals(21, 37, seed=29), normals(21, seed=30)], F.linear, (0, 1, 2)),
    Case("linear_rows", lambda n: [normals(n, 5, seed=28), normals(3, 5, seed=29), None], F.linear, (1,)),
    Case("mean_square", lambda n: [normals(n, 9, seed=31), normals(n, 9, seed=32)], F.mse_loss, (0, 1)),
    Case("normal_divergence", lambda n: [normals(n, 9, seed=33), normals(n, 9, seed=34)], divergence, (0, 1)),
    Case("id_cross_entropy", head_of, lambda rows, weight, bias, ids: F.cross_entropy(rows @ weight.T + bias, ids), (0, 1, 2), grad_tolerance=5e-6),
    Case("id_cross_entropy_rows", head_of, lambda rows, weight, bias, ids: F.cross_entropy(rows @ weight.T + bias, ids, reduction="none")),
    Case("neighbor_cross_entropy", lambda n: [*head_of(n), made_edges(n)], neighbors_of, (0, 1, 2), grad_tolerance=5e-6),
)


def factors(x, rate, seed, place):
    return torch.ops.plimsoll.dropout_factors(x.detach(), rate, seed, place)


def norm_relu(x, weight, bias, mean, variance, of_batch=True, rate=0.0, seed=0, place=0):
    y = F.batch_norm(x, None if of_batch else mean, None if of_batch else variance, weight, bias, training=of_batch)
    return torch.relu(y) * factors(x, rate, seed, place)


def columns_of(rows: int) -> list[Any]:
    return [normals(rows, 13, seed=41, scale=2.0) + 1, normals(13, seed=42), normals(13, seed=43)]


def normed(rows: int) -> list[Any]:
    x = columns_of(rows)[0].double()
    return [*columns_of(rows), x.mean(0).float(), x.var(0, unbiased=False).float()]


def sampled(mean, log_variance, seed, place):
    zeros = torch.zeros(mean.shape)
    noise = torch.ops.plimsoll.sample_normal(zeros, zeros, seed, place)
    return mean + noise.to(mean) * (log_variance / 2).exp()


def runs_of(rows: int) -> torch.Tensor:
    """Runs of 0, 1, 2, … rows, and an empty one at the end."""
    ends = torch.arange(rows + 2).cumsum(0).clamp_max(rows)
    return torch.cat([ends, ends[-1:]]).int()


def means(x, ptr):
    return torch.stack([x[a:b].sum(0) / max(1, b - a) for a, b in zip(ptr.tolist(), ptr.tolist()[1:])])


def lstm(gates, before=None):
    """torch's own cell, with weights that hand the gates through."""
    hidden = gates.shape[1] // 4
    cell = torch.zeros_like(gates[:, :hidden]) if before is None else before
    through, none = torch.eye(4 * hidden).to(gates), gates.new_zeros(4 * hidden, hidden)
    return torch.lstm_cell(gates, (torch.zeros_like(cell), cell), through, none)


def mixed(layers, scores):
    return sum(w[:, None] * x for w, x in zip(scores.softmax(1).unbind(1), layers))


MASK = {"rate": 0.4, "seed": 7, "place": 2}
LAYERS = (
    Case("relu_dropout", lambda n: [normals(n, 9, seed=44), *MASK.values()], lambda x, *mask: torch.relu(x) * factors(x, *mask), (0,)),
    Case("column_moments", lambda n: [normals(n, 13, seed=45, scale=3.0) + 1], lambda x: (x.mean(0), x.var(0, unbiased=False))),
    Case("norm_relu_dropout", normed, norm_relu, (0, 1, 2), rows=(3, 31, 33, 150), grad_tolerance=2e-5, options={"of_batch": True, **MASK}),
    Case("norm_relu_dropout", lambda n: [*columns_of(n), normals(13, seed=46), normals(13, seed=47).abs()], norm_relu, (0, 1, 2), grad_tolerance=5e-6,
         options={"of_batch": False, "rate": 0.0, "seed": 0, "place": 0}),
    Case("logistic", lambda n: [normals(n, 7, seed=48, scale=4.0)], torch.sigmoid, (0,)),
    Case("sample_normal", lambda n: [normals(n, 7, seed=49), normals(n, 7, seed=50), 7, 2], sampled, (0, 1)),
    Case("segment_mean", lambda n: [normals(n, 11, seed=51), runs_of(n)], means, (0,)),
    Case("lstm_cell", lambda n: [normals(n, 20, seed=52), normals(n, 5, seed=53)], lstm, (0, 1)),
    Case("lstm_cell", lambda n: [normals(n, 20, seed=52), None], lstm, (0,)),
    Case("mix_layers", lambda n: [[normals(n, 9, seed=54), normals(n, 9, seed=55), normals(n, 9, seed=56)], normals(n, 3, seed=57)], mixed, (0, 1)),
)
