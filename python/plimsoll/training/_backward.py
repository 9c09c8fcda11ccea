# SPDX-License-Identifier: Apache-2.0
"""Gradients of a batch: whole or in parts, of a plain or a contrastive loss, for each virtual worker.

Reading order: _batch.py, _transaction.py, this file, _accumulation.py.
Threads: the thread that trains.
Memory:  for a contrastive batch in parts, all embeddings and a random state per part; for virtual workers, see _virtual_workers.py.
"""
from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..core._numbers import loss_of, with_graph
from ..core._random_states import RandomStates
from ..ranks._messages import Unweighted
from ..ranks._virtual_workers import Buffers, Node, Tree, VirtualWorkers, WorkerBatches
from ..rows._embedding import Rows
from ._batch import Batch, Part, weight_of
from ._reach import is_generator, reached
from ._step_options import Options
from ._transaction import Gradients


class Tally:
    """The weights of a batch's parts, as multiples of the first weight in the window."""

    def __init__(self, gradients: Gradients, first: float) -> None:
        self.gradients, self.first = gradients, first
        self.weight = 0.0
        self._each: float | None = None

    def add(self, weight: float) -> float:
        """Adds a part's weight. Returns the factor for its loss."""
        self.first = self.first or weight
        self.weight += weight
        return weight / self.first

    def add_mean(self, each: float | None) -> None:
        """Checks that the parts' means are over equally many numbers.

        each:   count of numbers per row in a part's mean.
        Errors: Unweighted where another part's count differs.
        """
        if self._each is not None and each is not None and self._each != each:
            raise Unweighted(f"its loss is a mean of {self._each:g} numbers a row in one part and of {each:g} "
                             "in another, so the whole batch's would be another mean; weight= would say "
                             "what a part counts")
        self._each = each


class Work:
    """The batches of this process, one per virtual worker, and the function that makes their gradients."""

    def __init__(self, batches: list[Batch], functions: tuple, how: Callable[..., float], absent: int = 0) -> None:
        self._batches, self.functions, self._how, self._absent = batches, functions, how, absent
        self.batch = max(batches, key=lambda one: one.rows)  # The largest: all workers' batches are cut into the same number of parts.
        self.rows = self.batch.rows

    def gradients(self, parts: int, tally: Tally) -> float:
        """Adds up the gradients, with the batch cut into `parts` parts. Returns the loss."""
        return self._how(self.batch, 1 if self.batch.why_whole else min(parts, self.rows), tally, *self.functions)

    def each(self) -> Iterator[Work | None]:
        """Yields each batch as a Work of its own; None for a worker without a batch."""
        there = len(self._batches) - self._absent
        return (Work([one], self.functions, self._how) if k < there else None for k, one in enumerate(self._batches))

    def tensors(self) -> Iterator[Any]:
        """Yields every tensor of the batches."""
        return (tensor for one in self._batches for tensor in one.tensors())

    def first(self, rows: int) -> Work:
        """Returns a Work of the largest batch's first `rows` rows."""
        return Work([self.batch.first(rows)], self.functions, self._how)


class Backward:
    """Computes the gradients of a step's batches."""

    def __init__(self, options: Options) -> None:
        self._options, self._workers = options, options.handed.workers

    def work(self, batch: Any, *functions: Callable[..., Any]) -> Work:
        """Returns the Work of `batch`.

        functions: `f`; or `embed` and `loss` of a contrastive step.
        Errors:    ValueError where the functions do not fit the option `loss`.
        """
        together = batch if isinstance(batch, WorkerBatches) else WorkerBatches([batch])
        given, absent = [Batch(one, self._options.split) for one in together], together.absent
        self._refuse_rows([rows for one in given for rows in one.handles])
        if len(functions) == 2:
            return Work(given, functions, self._contrastive, absent)
        if len(functions) != 1:
            raise ValueError("a step is of one function of the batch, or of embed and loss")
        if self._options.loss == "contrastive":
            raise ValueError("a contrastive loss is of the whole batch: use contrastive()")
        return Work(given, functions, self._plain, absent)

    def make(self, work: Work, parts: int, tally: Tally, batch: int, looked_up: list[Any]) -> float:
        """Adds up the gradients of `work` and of the rows that it looks up. Returns the loss.

        batch: the batch's number, which seeds the virtual workers.
        """
        if self._workers is None:
            return work.gradients(parts, tally)
        if self._workers.told:
            return self._of_workers(self._workers, work, parts, tally, batch, looked_up)
        with self._workers.seeded(0, batch):  # A single virtual worker, whose window may have earlier batches.
            value = work.gradients(parts, tally)
        for rows in looked_up:
            rows.take(self.share(tally.first, tally.weight), self.weight(work, tally.weight))
        return value

    def share(self, first: float, weight: float) -> float:
        """Returns the factor that turns gradients in multiples of `first` into those of a mean by `weight`."""
        return 1.0 if self._options.loss == "sum" or weight == 0 else first / weight

    def weight(self, work: Work, weight: float) -> float:
        """Returns the batch's weight among others: `weight` where the loss is a mean, else its number of rows."""
        return weight if self._options.loss == "mean" else float(work.rows)

    def _of_workers(self, workers: VirtualWorkers, work: Work, parts: int, tally: Tally, batch: int, looked_up: list[Any]) -> float:
        """Adds up gradients and weights of this process's virtual workers. Returns the loss. Gradients of looked-up rows stay per worker."""
        tree, buffers = Tree(self._options.loss == "sum"), Buffers(self._options.models if workers.own > 1 else ())
        for number, one in enumerate(work.each()):
            if one is None:
                tree.add(Node(0.0, 0.0, {}))
                continue
            buffers.turn(number)
            own, before = Tally(tally.gradients, 0.0), len(looked_up)
            with workers.seeded(number, batch):
                value = one.gradients(parts, own)
            share, weight = self.share(own.first, own.weight), self.weight(one, own.weight)
            for rows in looked_up[before:]:
                rows.take(share, weight)
            tree.add(Node(value, weight, tally.gradients.taken(share)))
        buffers.end()
        whole = tree.whole()
        tally.gradients.give(whole.gradients)
        tally.first = tally.weight = whole.weight
        return whole.loss

    def _refuse_rows(self, handles: list[Rows]) -> None:
        """Refuses Rows in a batch where there are several workers, on all ranks. Errors: ValueError."""
        workers, name = self._workers, os.path.basename(handles[0]._store.directory) if handles else ""
        if workers is None or not handles:
            return

        def refused() -> None:
            workers.refuse(f"step: Rows of the table {name!r} in a batch", f"use run.embedding({name!r}, …), and look ids up in the "
                           "step's function")

        self._options.handed.group.alone(refused)

    def _plain(self, batch: Batch, parts: int, tally: Tally, f: Callable[..., Any]) -> float:
        total, mean = 0.0, self._options.loss == "mean"
        for part in batch.cut(parts):
            value = loss_of(f(*part.arguments))
            weight = self._weigh(value, part, parts, tally)
            tally.gradients.watch_graph(value)
            if weight == 0:
                continue  # The part has no weight, so its mean is NaN.
            factor = tally.add(weight)
            self._backward(value if factor == 1 else value * factor)
            total += float(value.detach()) * (weight if mean else 1)
        return total / tally.weight if mean and tally.weight else total

    def _weigh(self, value: Any, part: Part, parts: int, tally: Tally) -> float:
        """Returns the weight of `part` in a mean; 1 where the loss is no mean. Errors: Unweighted."""
        if self._options.loss != "mean":
            return 1.0
        if self._options.weight is not None:
            return float(self._options.weight(*part.arguments))
        if parts == 1 and self._options.accumulate == 1 and self._workers is None:
            return 1.0
        weight, each = weight_of(value, part)
        tally.add_mean(each)
        return weight

    def _backward(self, value: Any) -> None:
        import torch

        with_graph(value)
        scaler = self._options.scaler
        (value if scaler is None else scaler.scale(value)).backward()
        torch.clear_autocast_cache()  # Its casts belong to a graph that is gone.

    def _contrastive(self, batch: Batch, parts: int, tally: Tally, embed: Callable[..., Any], loss: Callable[..., Any]) -> float:
        import torch

        tally.add(1.0)
        if parts == 1:
            value = loss_of(loss(*_tuple(embed(*batch.arguments()))))
            tally.gradients.watch_graph(value)
            self._backward(value)
            return float(value.detach())
        states: list[RandomStates] = []
        made = []
        generators = [*reached([embed, loss, *self._options.models])[1], *filter(is_generator, self._options.others)]
        with torch.no_grad():
            for part in batch.cut(parts):
                states.append(RandomStates(generators, like=states[-1] if states else None))
                made.append(_tuple(embed(*part.arguments)))
        whole: list[Any] = [torch.cat(column).requires_grad_() for column in zip(*made)]
        sizes = [len(columns[0]) for columns in made]
        made.clear()
        value = loss_of(loss(*whole))
        self._backward(value)
        after, begin = RandomStates(generators), 0
        for part, state, size in zip(batch.cut(parts), states, sizes):
            state.put_back()
            again = _tuple(embed(*part.arguments))
            for one in again:
                tally.gradients.watch_graph(one)
            torch.autograd.backward(again, [one.grad[begin:begin + size] for one in whole])
            begin += size
        after.put_back()
        return float(value.detach())


@contextlib.contextmanager
def recomputed(modules: Iterable[Any]) -> Iterator[None]:
    """Makes `modules` recompute their activations in backward, inside the `with` block. Dropout draws the same numbers again."""
    from torch.utils.checkpoint import checkpoint

    patched = []
    try:
        for module in modules:
            patched.append((module, module.__dict__.get("forward")))
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
        yield
    finally:
        for module, own in patched:
            if own is None:
                del module.forward  # The class's forward is used again.
            else:
                module.forward = own


def _tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
