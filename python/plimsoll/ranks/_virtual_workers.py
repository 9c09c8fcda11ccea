# SPDX-License-Identifier: Apache-2.0
"""Virtual workers: the fixed number of shares that a step's batch is cut into, whatever the number of ranks.

    one process, 8 of them     g0 g1 g2 g3 g4 g5 g6 g7, one after another
    rank 1 of 4                      g2 g3
    the gradient of a step     ((g0 g1)(g2 g3))((g4 g5)(g6 g7)), each pair's mean by weight, or its sum

Each worker has its own rows, its own random numbers, and the buffers with which the step began. Gradients of neighbours
are added first. So a step has the same bits for any number of ranks that have whole subtrees.

Reading order: this file, _backward.py, _ranks.py.
Threads: the thread that trains.
Memory:  during a step, log2(workers of this rank) + 1 gradients, and two copies of the models' buffers.
"""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from ..core._random_states import kept_random, mixed, seed_main

_STEP = 2  # The purpose of a random state; _run_loader.py has 0 and 1.


class WorkerBatches(tuple):
    """The batches of this process's virtual workers, in their order. run.step() calls its function with each in turn."""

    absent = 0
    """The number of last workers without rows, at the end of an epoch. Their entries are placeholders, which run.step() skips."""


@dataclasses.dataclass(frozen=True)
class VirtualWorkers:
    """The virtual workers of a run, and those that this process does."""

    count: int
    """The number of workers of the run."""
    first: int = 0
    """The number of this process's first worker."""
    own: int = 1
    """The number of this process's workers."""
    seed: int = 0
    told: bool = False
    """Whether the program set their number, and gets WorkerBatches."""

    @classmethod
    def dealt(cls, told: int, rank: int, ranks: int, seed: int) -> VirtualWorkers | None:
        """Returns the share of one rank in `told` workers; 0 means one per rank. None: one process, for which no number is set.
        The work of one worker is done by every rank.

        Errors: ValueError for numbers that cannot be divided so.
        """
        if told == 1:
            return cls(1, seed=seed, told=True)  # Each rank does the work of the one.
        if told < 0 or (told and told & (told - 1)):
            raise ValueError(f"Run: virtual_workers {told} must be a power of two, such as 8")
        if told % ranks:
            fitting = ", ".join(str(1 << k) for k in range(told.bit_length()))
            raise ValueError(f"Run: virtual_workers {told} cannot be dealt to {ranks} ranks: start {fitting} of them")
        if not told and ranks == 1:
            return None
        own = max(told // ranks, 1)
        return cls(max(told, ranks), rank * own, own, seed, told > 0)

    def cut(self, begin: int, rows: int) -> list[tuple[int, int]]:
        """Returns [from, to) for each of this process's workers. All workers of the run divide the `rows` rows from `begin`; their
        shares differ by at most one.
        """
        edges = [begin + rows * worker // self.count for worker in range(self.first, self.first + self.own + 1)]
        return list(zip(edges, edges[1:]))

    def refuse(self, what: str, advice: str) -> NoReturn:
        """Raises ValueError for a feature that virtual workers do not support."""
        whose = "virtual workers" if self.told else "ranks"
        raise ValueError(f"{what}: a run of {self.count} {whose} cannot have it yet; {advice}")

    def each(self, batch: Any) -> Any:
        """Returns the batch for run.step() in which each worker has this same one."""
        return WorkerBatches([batch] * self.own) if self.told and not isinstance(batch, WorkerBatches) else batch

    @contextlib.contextmanager
    def seeded(self, number: int, step: int) -> Iterator[None]:
        """Seeds the main generators for this process's worker `number` in a step. They are restored after the block."""
        with kept_random(devices=True):
            seed_main(mixed(self.seed, step, self.first + number, _STEP), devices=True)
            yield


@dataclasses.dataclass
class Node:
    """The gradients of some workers by id(parameter), their loss, and their weight."""

    loss: float
    weight: float
    gradients: dict[int, Any]


class Tree:
    """Adds up nodes as they come, by pairs of neighbours: ((0 1)(2 3))(4 …). A subtree that was summed elsewhere gives the same
    bits.

    sums: losses and gradients are sums; else means by weight. The gradients of nodes are overwritten.
    """

    def __init__(self, sums: bool) -> None:
        self._sums = sums
        self._waiting: list[tuple[int, Node]] = []  # (number of nodes, their sum) for each subtree.

    def add(self, node: Node) -> None:
        self._waiting.append((1, node))
        while len(self._waiting) > 1 and self._waiting[-1][0] == self._waiting[-2][0]:
            self._join()

    def whole(self) -> Node:
        """Returns the sum of all nodes."""
        while len(self._waiting) > 1:
            self._join()
        return self._waiting.pop()[1]

    def _join(self) -> None:
        (count, left), (more, right) = self._waiting[-2:]
        self._waiting[-2:] = [(count + more, joined(left, right, self._sums))]


def joined(left: Node, right: Node, sums: bool) -> Node:
    """Adds two nodes, in the memory of `left`. A gradient that only one has is added to zero."""
    import torch

    shares = shares_of(left.weight, right.weight, sums)
    with torch.no_grad():
        for node, share in zip((left, right), shares):
            if share != 1.0 and node.gradients:
                torch._foreach_mul_(list(node.gradients.values()), share)
        both = [key for key in left.gradients if key in right.gradients]
        if both:
            torch._foreach_add_([left.gradients[key] for key in both], [right.gradients[key] for key in both])
        for mine, other in ((left.gradients, right.gradients), (right.gradients, left.gradients)):
            alone = [gradient for key, gradient in mine.items() if key not in other]
            if alone:
                torch._foreach_add_(alone, 0.0)  # The same bits as adding zeros: −0 becomes 0.
    loss = left.loss * shares[0] + right.loss * shares[1]
    return Node(loss, left.weight + right.weight, {**right.gradients, **left.gradients})


def shares_of(left: float, right: float, sums: bool) -> tuple[float, float]:
    """Returns the factors of two nodes, by their weights, before the nodes are added. sums: both factors are 1."""
    whole = left + right
    return (1.0, 1.0) if sums else (left / whole, right / whole) if whole else (0.5, 0.5)


class Buffers:
    """Buffers of models while workers take turns. Each worker begins with the step's buffers; the first worker's stay at the end."""

    def __init__(self, models: Iterable[Any]) -> None:
        self._models = list(models)
        self._begun = [one.clone() for one in self._all()]
        self._kept = self._begun

    def _all(self) -> Iterator[Any]:
        return (one for model in self._models for one in model.buffers())

    def turn(self, number: int) -> None:
        """Restores the step's buffers before worker `number` begins."""
        if number == 1:
            self._kept = [one.clone() for one in self._all()]
        if number:
            self._write(self._begun)

    def end(self) -> None:
        """Restores the first worker's buffers after the last turn."""
        if self._kept is not self._begun:
            self._write(self._kept)

    def _write(self, values: Sequence[Any]) -> None:
        import torch

        with torch.no_grad():
            for one, value in zip(self._all(), values):
                one.copy_(value)
