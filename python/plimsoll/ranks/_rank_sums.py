# SPDX-License-Identifier: Apache-2.0
"""RankSums: adds up the gradients of all ranks in the tree of their virtual workers, in buckets of a fixed size.

    through memory   each rank writes the others' slices to its room, adds up its own slice in rank 0's room, where all read it
    over gloo        each rank sends the others their slices, adds up its own, and sends the sum to all

Both ways join the same nodes by the same operations, so the bits are the same (decisions 0048, 0050).

Reading order: _virtual_workers.py, _ranks.py, this file.
Threads: the thread that trains.
Memory:  at most two buckets of 2 MiB, which stay, and mapped pages of other ranks; over gloo 8 MiB during an exchange.
"""
from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .._core import RankMemory
from ._virtual_workers import Node, Tree

if TYPE_CHECKING:
    from ._ranks import Ranks

_BUCKET_BYTES = 8 << 20
_PIECE_LEAST = 1 << 14  # Elements. Smaller pieces of a slice are copied together and sent as one.
_PIECES = 1  # The tag of pieces; messages (Said) have 0.


class RankSums:
    """The sums of gradients, losses and weights over the ranks of a run."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def gradients(self, graded: Callable[[], tuple[float, float, float]], parameters: list[Any],
                  models: list[Any], sums: bool) -> Node:
        """Calls graded() on all ranks and averages the gradients over all their batches, in place. Returns the loss and weight of
        all batches together. Buffers of the models become rank 0's.

        graded:     computes (loss, weight of the batch, weight of the gradients).
        parameters: the parameters whose gradients are averaged; none within a window of batches.
        sums:       loss and gradients are sums, not means by weight.
        """
        ranks = self._ranks
        wanted = list({id(one): one for one in parameters if one.requires_grad}.values())
        buffers: list[torch.Tensor] = []

        def work() -> tuple[tuple[float, float, float], torch.Tensor | None]:
            made = graded()
            for one in wanted:
                _must_be_exchangeable(one)
            buffers.extend(one for model in models for one in model.buffers())
            if ranks.memory is not None and ranks.first:
                ranks.memory.grow_room(2 * _buffer_bytes(buffers), ranks.core_governor)
            return made, self.room([one for one in wanted if one.grad is not None])

        def says(done: tuple[tuple[float, float, float], torch.Tensor | None]) -> tuple[float, ...]:
            there = bytes(one.grad is not None for one in wanted)
            return *done[0], float(sum(there)), float(zlib.crc32(there))

        (_, room), said = ranks.agreed("run.step()", work, says)
        if len({one.numbers[3:5] for one in said}) > 1:
            room = self._with_all_gradients(wanted)
        if room is not None:
            self.add_up([one.grad.view(-1) for one in wanted if one.grad is not None], room,
                        [one.numbers[2] for one in said], sums)
        self._as_on_first(buffers)
        tree = Tree(sums)
        for one in said:
            tree.add(Node(one.numbers[0], one.numbers[1], {}))
        return tree.whole()

    def same(self, graded: Callable[[], tuple[float, float, float]]) -> Node:
        """Calls graded() on all ranks, of which each computes the gradients of the whole step. Returns the loss and weight.

        Errors: those of graded(); RuntimeError naming a rank whose loss is another.
        """
        made, said = self._ranks.agreed("run.step()", graded, lambda made: made)
        bits = [struct.pack("<3d", *one.numbers[:3]) for one in said]
        other = next((rank for rank, one in enumerate(bits) if one != bits[0]), None)
        if other is not None:
            raise RuntimeError(f"run.step(): the loss of rank {other} is {said[other].numbers[0]!r}, and that of rank 0 {said[0].numbers[0]!r}: with "
                               "virtual_workers=1 all ranks make the same steps of the same data")
        return Node(made[0], made[1], {})

    def _with_all_gradients(self, wanted: list[Any]) -> torch.Tensor | None:
        """Gives a gradient of zeros to each parameter that only other ranks' batches use. Returns room()."""
        there = torch.tensor([one.grad is not None for one in wanted], dtype=torch.uint8)
        self._ranks.exchange(lambda: dist.all_reduce(there, dist.ReduceOp.MAX, group=self._ranks.group))

        def made() -> torch.Tensor | None:
            for one, used in zip(wanted, there.tolist()):
                if used and one.grad is None:
                    one.grad = torch.zeros_like(one, memory_format=torch.contiguous_format)
            return self.room([one for one in wanted if one.grad is not None])

        room: torch.Tensor | None = self._ranks.agreed("run.step()", made)[0]
        return room

    def room(self, parameters: list[Any]) -> torch.Tensor | None:
        """Returns memory for two buckets of the parameters' gradients; None if there are none. Errors: BudgetExceeded."""
        memory = self._ranks.memory
        size = _room_bytes(parameters, self._ranks.count, _BUCKET_BYTES if memory is None else RankMemory.ROOM_BYTES // 2)
        if size == 0 or memory is None:
            return torch.empty(size, dtype=torch.uint8) if size else None
        memory.grow_room(size, self._ranks.core_governor)
        return torch.from_numpy(memory.room(self._ranks.rank)[:size])

    def add_up(self, flat: list[torch.Tensor], room: torch.Tensor, weights: list[float], sums: bool) -> None:
        """Adds up the tensors `flat` over all ranks in place, as Tree does. Each rank sums one slice of a bucket. room: from room()."""
        if self._ranks.memory is None:
            self._by_sockets(flat, room, weights, sums)
        else:
            self._by_rooms(self._ranks.memory, flat, len(room) // 2, weights, sums)

    def _by_sockets(self, flat: list[torch.Tensor], room: torch.Tensor, weights: list[float], sums: bool) -> None:
        ranks = self._ranks
        for kind in dict.fromkeys(one.dtype for one in flat):
            staging, theirs = room.view(kind).chunk(2)
            for some in _buckets([one for one in flat if one.dtype == kind], len(theirs)):
                slices, staged = _slices(some, ranks.count, staging)
                own = slices[ranks.rank]
                lengths = list(map(len, own))
                got = theirs[:ranks.count * sum(lengths)].view(ranks.count, sum(lengths))
                rows = [row.split(lengths) if own else () for row in got]

                def given(slices: Any = slices, staged: Any = staged) -> Any:
                    for places, pieces in staged:
                        torch._foreach_copy_(places, pieces)
                    return slices

                def summed(rows: Any = rows, own: Any = own) -> Any:
                    tree = Tree(sums)
                    for rank, weight in enumerate(weights):
                        tree.add(Node(0.0, weight, dict(enumerate(own if rank == ranks.rank else rows[rank]))))
                    whole = list(tree.whole().gradients.values())  # In the memory of rank 0's node.
                    if own and ranks.rank:
                        torch._foreach_copy_(own, whole)
                    return [whole] * ranks.count

                ranks.exchange(functools.partial(self._pass_pieces, rows, given))
                ranks.exchange(functools.partial(self._pass_pieces, slices, summed))
                for places, pieces in staged:
                    torch._foreach_copy_(pieces, places)

    def _by_rooms(self, memory: RankMemory, flat: list[torch.Tensor], half: int, weights: list[float], sums: bool) -> None:
        """Writes the other ranks' slices to this rank's room, sums its own slice into rank 0's room, and reads all sums there."""
        ranks = self._ranks
        rooms, turn = [torch.from_numpy(memory.room(rank)) for rank in range(ranks.count)], 0
        for kind in dict.fromkeys(one.dtype for one in flat):
            for some in _buckets([one for one in flat if one.dtype == kind], half // kind.itemsize):
                # Other ranks may still read the other half.
                turn, places = 1 - turn, [room[turn * half:(turn + 1) * half].view(kind) for room in rooms]
                length = -(-sum(map(len, some)) // ranks.count)
                slices = list(_buckets(some, length))

                def pieces_in(rank: int, which: int, places: Any = places, slices: Any = slices, length: int = length) -> Any:
                    lengths = list(map(len, slices[which]))
                    return places[rank][which * length:which * length + sum(lengths)].split(lengths)

                for which, pieces in enumerate(slices):
                    if which != ranks.rank:
                        torch._foreach_copy_(pieces_in(ranks.rank, which), pieces)
                ranks.exchange(memory.meet)
                if ranks.rank < len(slices):
                    own, tree = slices[ranks.rank], Tree(sums)
                    for rank, weight in enumerate(weights):
                        tree.add(Node(0.0, weight, dict(enumerate(own if rank == ranks.rank else pieces_in(rank, ranks.rank)))))
                    whole = list(tree.whole().gradients.values())  # In the memory of rank 0's node.
                    if ranks.first:
                        torch._foreach_copy_(pieces_in(0, 0), whole)
                ranks.exchange(memory.meet)
                for which, pieces in enumerate(slices):
                    if which or not ranks.first:
                        torch._foreach_copy_(pieces, pieces_in(0, which))
        ranks.exchange(memory.meet)

    def _pass_pieces(self, come: Sequence[Sequence[torch.Tensor]], given: Callable[[], Sequence[Sequence[torch.Tensor]]]) -> None:
        """Receives `come` from each other rank, and sends it given() for it. Receives are posted first: see Ranks._await_rows()."""
        ranks = self._ranks
        others = [(ranks.rank + k) % ranks.count for k in range(1, ranks.count)]
        works: list[Any] = [dist.irecv(one, rank, group=ranks.group, tag=_PIECES) for rank in others for one in come[rank]]
        try:
            made = given()
            works += [dist.isend(one, rank, group=ranks.group, tag=_PIECES) for rank in others for one in made[rank]]
            for work in works:
                work.wait()
        finally:
            works.clear()  # Works keep connections open, and an error keeps this frame.

    def _as_on_first(self, buffers: list[torch.Tensor]) -> None:
        """Copies rank 0's buffers to all ranks, as DistributedDataParallel does; so batch statistics are rank 0's."""
        if not buffers:
            return
        flat = [one.detach().contiguous().view(-1).view(torch.uint8) for one in buffers]
        copied = self._broadcast if self._ranks.memory is None else self._read_from_first
        copied(flat, _buffer_bytes(buffers))
        with torch.no_grad():
            for one, values in zip(buffers, flat):
                if not one.is_contiguous():
                    one.copy_(values.view(one.dtype).view(one.shape))

    def _broadcast(self, flat: list[torch.Tensor], size: int) -> None:
        ranks, room = self._ranks, torch.empty(size, dtype=torch.uint8)
        for some in _buckets(flat, size):
            used = room[:sum(map(len, some))]
            parts = list(used.split([len(one) for one in some]))
            if ranks.first:
                torch._foreach_copy_(parts, some)
            ranks.exchange(functools.partial(dist.broadcast, used, 0, group=ranks.group))
            if not ranks.first:
                torch._foreach_copy_(some, parts)

    def _read_from_first(self, flat: list[torch.Tensor], half: int) -> None:
        ranks, memory = self._ranks, self._ranks.memory
        assert memory is not None
        for turn, some in enumerate(_buckets(flat, half)):
            lengths, begin = list(map(len, some)), turn % 2 * half  # Other ranks may still read the other half.
            if not ranks.first:
                ranks.exchange(memory.meet)
            parts = torch.from_numpy(memory.room(0))[begin:begin + sum(lengths)].split(lengths)
            if ranks.first:
                torch._foreach_copy_(parts, some)
                ranks.exchange(memory.meet)
            else:
                torch._foreach_copy_(some, parts)
        ranks.exchange(memory.meet)


def _must_be_exchangeable(parameter: Any) -> None:
    """Makes the parameter's gradient contiguous. Raises ValueError for a gradient that gloo cannot add up."""
    grad = parameter.grad
    if parameter.device.type != "cpu" or (grad is not None and grad.layout != torch.strided):
        raise ValueError(f"step: a parameter of {list(parameter.shape)} is on {parameter.device} and its gradient "
                         f"{'none' if grad is None else grad.layout}: ranks exchange dense gradients on the CPU yet; "
                         "without sparse=True, and on the CPU")
    if grad is not None and not grad.is_contiguous():
        parameter.grad = grad.contiguous()


def _room_bytes(parameters: list[Any], ranks: int, most: int) -> int:
    """Returns the bytes of two buckets for the gradients of `parameters`. Each bucket has at most `most` bytes, in equal slices for the ranks."""
    size = sum(one.grad.numel() * one.grad.element_size() for one in parameters)
    even = 16 * ranks
    return 2 * min(most // even, -(-size // even)) * even


def _buffer_bytes(buffers: list[torch.Tensor]) -> int:
    """Returns the bytes of `buffers` that are copied from rank 0 at a time."""
    return min(RankMemory.ROOM_BYTES // 2, sum(one.numel() * one.element_size() for one in buffers))


def _buckets(flat: Iterable[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Yields pieces of the tensors, in order, in lists of at most `most` elements together."""
    some: list[torch.Tensor] = []
    left = most
    for one in flat:
        begin = 0
        while begin < len(one):
            piece = one[begin:begin + left]
            some.append(piece)
            begin, left = begin + len(piece), left - len(piece)
            if left == 0:
                yield some
                some, left = [], most
    if some:
        yield some


def _slices(some: list[torch.Tensor], ranks: int, staging: torch.Tensor) -> tuple[
        list[list[torch.Tensor]], list[tuple[list[torch.Tensor], list[torch.Tensor]]]]:
    """Splits a bucket among the ranks. Returns (the tensors to send for each rank, (places in `staging`, pieces to copy there first))."""
    slices, staged, at = list(_buckets(some, -(-sum(map(len, some)) // ranks))), [], 0
    for k, pieces in enumerate(slices):
        if len(pieces) > 1 and min(map(len, pieces)) < _PIECE_LEAST:
            place = staging[at:at + sum(map(len, pieces))]
            staged.append((list(place.split(list(map(len, pieces)))), pieces))
            slices[k], at = [place], at + len(place)
    return slices + [[]] * (ranks - len(slices)), staged
