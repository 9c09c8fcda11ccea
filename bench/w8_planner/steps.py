# SPDX-License-Identifier: Apache-2.0
"""The training steps that w8_planner predicts: seven models, each plain, checkpointed, accumulating.

A Step makes its own data, so that its batch is part of what is measured, as in a user's program.
Graph steps are sized by graphs; extent() says the nodes and edges of that many.
"""
import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "w9_plain_pytorch"))
import plain_pytorch as cosir_in_plain_pytorch

WAYS = ("plain", "checkpointed", "accumulating")


class Step:
    """One training step; `way` is one of WAYS. Called with a number of rows, it trains."""

    graphs = False
    parts: list[nn.Module]  # Run in order; the segments that are checkpointed.
    row_bytes = 4           # Raw input of one row, for the original's formula.

    def __init__(self, way: str):
        torch.manual_seed(3)
        self.way = way
        self.teacher: nn.Module | None = None
        self.build()
        self.model = nn.ModuleList(self.parts)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def build(self) -> None:
        raise NotImplementedError

    def loss(self, rows: int) -> torch.Tensor:
        raise NotImplementedError

    def extent(self, rows: int) -> tuple[int, int, int]:
        return rows, 0, 0

    def through(self, x, *others):
        for part in self.parts:
            if self.way == "checkpointed":
                x = checkpoint(part, x, *others, use_reentrant=False)
            else:
                x = part(x, *others)
        return x

    def __call__(self, rows: int) -> None:
        self.optimizer.zero_grad()
        for _ in range(2 if self.way == "accumulating" else 1):
            self.loss(rows).backward()
        self.optimizer.step()


class Mlp(Step):
    row_bytes = 4 * 64

    def build(self):
        def block(wide):
            return nn.Sequential(nn.Linear(wide, 256), nn.LayerNorm(256), nn.GELU(), nn.Dropout(0.1))
        self.parts = [block(64), block(256), block(256), nn.Linear(256, 10)]

    def loss(self, rows):
        return F.cross_entropy(self.through(torch.randn(rows, 64)), torch.randint(10, (rows,)))


class Transformer(Step):
    row_bytes = 8 * 32

    def build(self):
        def layer():
            return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.parts = [nn.Embedding(1000, 64), layer(), layer(), nn.Linear(64, 1000)]

    def loss(self, rows):
        tokens = torch.randint(1000, (rows, 32))
        return F.cross_entropy(self.through(tokens).flatten(0, 1), tokens.flatten())


class ConvNet(Step):
    row_bytes = 4 * 3 * 32 * 32

    def build(self):
        def block(into, out, stride):
            return nn.Sequential(nn.Conv2d(into, out, 3, stride, 1), nn.BatchNorm2d(out), nn.ReLU())
        self.parts = [block(3, 16, 1), block(16, 32, 2), block(32, 32, 1),
                      nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))]

    def loss(self, rows):
        return F.cross_entropy(self.through(torch.randn(rows, 3, 32, 32)),
                               torch.randint(10, (rows,)))


class GatLayer(nn.Module):
    """GATConv with heads side by side and self-loops (Veličković et al., 2018, section 2.1)."""

    def __init__(self, into: int, out: int, heads: int):
        super().__init__()
        self.heads, self.out = heads, out
        self.project = nn.Linear(into, heads * out, bias=False)
        self.source = nn.Parameter(torch.randn(heads, out) / 8)
        self.target = nn.Parameter(torch.randn(heads, out) / 8)
        self.bias = nn.Parameter(torch.zeros(heads * out))

    def forward(self, x, edges):
        nodes = len(x)
        loops = torch.arange(nodes)
        source, target = torch.cat([edges[0], loops]), torch.cat([edges[1], loops])
        h = self.project(x).view(nodes, self.heads, self.out)
        score = (h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target]
        score = F.leaky_relu(score, 0.2)
        index = target.unsqueeze(1).expand_as(score)
        top = torch.zeros(nodes, self.heads).scatter_reduce(0, index, score.detach(), "amax",
                                                            include_self=False)
        weight = (score - top[target]).exp()
        total = torch.zeros(nodes, self.heads).index_add(0, target, weight)
        message = h[source] * (weight / total[target]).unsqueeze(-1)
        out = torch.zeros(nodes, self.heads, self.out).index_add(0, target, message)
        return F.elu(out.flatten(1) + self.bias)


class Graphs(Step):
    """Window graphs of 15 to 40 nodes, as CAN traffic makes them."""

    graphs = True
    row_bytes = 25 * 11 * 4 + 60 * (11 * 4 + 16)

    def __init__(self, way: str):
        generator = np.random.default_rng(11)
        self.nodes = generator.integers(15, 41, 4096)
        self.edges = self.nodes * 2 + generator.integers(0, 30, 4096)
        super().__init__(way)

    def extent(self, rows):
        return rows, int(self.nodes[:rows].sum()), int(self.edges[:rows].sum())

    def batch(self, rows):
        _, nodes, edges = self.extent(rows)
        graph = torch.repeat_interleave(torch.arange(rows), torch.from_numpy(self.nodes[:rows]))
        return (torch.randint(200, (nodes,)), torch.rand(nodes, 10),
                torch.randint(nodes, (2, edges)), graph)


class Gat(Graphs):
    def build(self):
        self.embed = nn.Embedding(200, 8)
        self.parts = [GatLayer(18, 24, 4), GatLayer(96, 24, 4)]
        self.head = nn.Linear(96, 2)

    def __init__(self, way):
        super().__init__(way)
        self.model.extend([self.embed, self.head])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def logits(self, rows, batch):
        ids, values, edges, graph = batch
        hidden = self.through(torch.cat([self.embed(ids), values], 1), edges)
        sums = torch.zeros(rows, hidden.shape[1]).index_add(0, graph, hidden)
        return self.head(sums / torch.bincount(graph, minlength=rows).unsqueeze(1))

    def loss(self, rows):
        return F.cross_entropy(self.logits(rows, self.batch(rows)), torch.randint(2, (rows,)))


class Distilled(Gat):
    """A small student, and a teacher whose softened answers it learns."""

    def build(self):
        super().build()
        self.teacher = TeacherGat()

    def loss(self, rows):
        batch = self.batch(rows)
        with torch.no_grad():
            wanted = self.teacher(rows, batch)
        logits = self.logits(rows, batch)
        soft = F.kl_div((logits / 4).log_softmax(1), (wanted / 4).softmax(1),
                        reduction="batchmean")
        return 0.7 * 16 * soft + 0.3 * F.cross_entropy(logits, torch.randint(2, (rows,)))


class TeacherGat(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(200, 32)
        self.layers = nn.ModuleList([GatLayer(42, 64, 4), GatLayer(256, 64, 4)])
        self.head = nn.Linear(256, 2)
        self.eval().requires_grad_(False)

    def forward(self, rows, batch):
        ids, values, edges, graph = batch
        hidden = torch.cat([self.embed(ids), values], 1)
        for layer in self.layers:
            hidden = layer(hidden, edges)
        return self.head(torch.zeros(rows, 256).index_add(0, graph, hidden))


class Vgae(Graphs):
    """Variational graph autoencoder: reconstruction, ids, neighbour sets, divergence."""

    def build(self):
        self.embed = nn.Embedding(200, 8)
        self.parts = [GatLayer(18, 32, 2)]
        self.mean, self.log_variance = GatLayer(64, 16, 1), GatLayer(64, 16, 1)
        self.decode = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
        self.ids, self.neighbours = nn.Linear(16, 200), nn.Linear(16, 200)

    def __init__(self, way):
        super().__init__(way)
        self.model.extend([self.embed, self.mean, self.log_variance, self.decode, self.ids,
                           self.neighbours])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def loss(self, rows):
        ids, values, edges, _ = self.batch(rows)
        hidden = self.through(torch.cat([self.embed(ids), values], 1), edges)
        mean = self.mean(hidden, edges)
        spread = self.log_variance(hidden, edges).clamp(-10, 10)
        z = mean + torch.randn_like(mean) * (spread / 2).exp()
        near = torch.zeros(len(ids), 200)  # Dense, as the original's: [nodes, ids].
        near[edges[1], ids[edges[0]]] = 1.0
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
        return (F.mse_loss(self.decode(z).sigmoid(), values) + 0.1 * F.cross_entropy(self.ids(z), ids)
                + 0.05 * F.binary_cross_entropy_with_logits(self.neighbours(z), near)
                + 0.01 * divergence)


class Cosir(Step):
    """The step of `cosir` as w9_plain_pytorch writes it: [B, B] tables, rows with moments."""

    row_bytes = 4 * 2 * 128

    def build(self):
        self.parts = [cosir_in_plain_pytorch.Combiner(128)]
        self.parts[0].weight.normal_()
        self.parts[0].bias.zero_()
        self.rows = cosir_in_plain_pytorch.Rows(0.1 * torch.randn(8192, 2), 0.1, 0.05)
        self.exact_neighbours, self.temperature = False, 0.07

    def __call__(self, rows):
        self.optimizer.zero_grad()
        for _ in range(2 if self.way == "accumulating" else 1):
            ids = torch.randperm(8192)[:rows]
            conditions = self.rows.take(ids)
            inputs = (torch.randn(rows, 128), torch.randn(rows, 128), conditions)

            def loss(image, text, conditions):
                return cosir_in_plain_pytorch.total_loss(
                    self.parts[0], image, text, conditions, ids, ids % 3, self)

            total = checkpoint(loss, *inputs, use_reentrant=False) \
                if self.way == "checkpointed" else loss(*inputs)
            total.backward()
            self.rows.apply(ids, conditions)
        self.optimizer.step()


STEPS = {"mlp": Mlp, "transformer": Transformer, "cnn_bn": ConvNet, "gat": Gat, "vgae": Vgae,
         "cosir": Cosir, "distillation": Distilled}
