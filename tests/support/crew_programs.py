# SPDX-License-Identifier: Apache-2.0
"""A crew whose ranks compute tiles together, for test_tiled.py.

    python -m tests.support.crew_programs      by way and number of ranks, what they computed, as JSON
"""
import hashlib
import json
import os
import sys

import torch

import plimsoll
from plimsoll.ranks import _crew, _ranks
from tests.support.rank_programs import launched

ROWS, TILE, WIDTH = 23, 4, 700
SHORT, WRONG = 7.0, 8.0  # Rows that memory refuses once, and that are wrong.


class Wide(torch.nn.Module):
    """Weights of more than two halves of a room; a buffer; a weight without gradient, and one that nothing uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.wide, self.low, self.idle = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(2, WIDTH), torch.nn.Linear(1, 1)
        self.low.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x, y):
        CALLS.append(len(x))
        if (x == SHORT).any() and not REFUSED:
            REFUSED.append(True)
            raise torch.OutOfMemoryError("refused for the test")
        if (x == WRONG).any():
            raise ValueError("wrong for the test")
        return (self.wide(x).tanh() * self.low(y) * self.scale), x.square()


CALLS, REFUSED = [], []


def digest(tensors):
    found = hashlib.sha256()
    for one in tensors:
        found.update(b"none" if one is None else one.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def graded(encode, model, mark=0.0):
    """The digest of loss and gradients. mark: a value in the second tile."""
    draws = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, WIDTH, generator=draws), torch.randn(ROWS, 2, generator=draws).requires_grad_()
    x[TILE, 0] = mark
    model.zero_grad()
    one, other = encode(x, y)
    loss = (one @ one.T).logsumexp(1).mean() + (one * other).mean()
    loss.backward()
    return digest([loss, y.grad, *(one.grad for one in model.parameters())])


def lead(group):
    """What the first rank computes."""
    model = Wide()
    kept, again = (plimsoll.Tiled(model, TILE, recompute=recompute, group=group) for recompute in (False, True))
    said = {"kept": graded(kept, model), "again": graded(again, model)}
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(0.5)
        model.scale.mul_(3)
        said["changed"] = digest(kept(torch.ones(ROWS, WIDTH), torch.ones(ROWS, 2)))
    said["after"], calls = graded(kept, model), len(CALLS)
    said["short"] = graded(kept, model, SHORT) if group is None or group.crew is None else refused(kept, model, SHORT)
    said["short again"] = graded(kept, model, SHORT)
    said["wrong"] = refused(kept, model, WRONG)
    said["last"] = graded(again, model)
    return said, calls


def refused(*arguments):
    try:
        return graded(*arguments)
    except (ValueError, MemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def train(way):
    _ranks._THROUGH_MEMORY = way == "memory"
    place = _crew.join()
    if isinstance(place, _crew.Helper):
        place.serve(torch.set_num_threads, "8GiB")
        return [len(CALLS), os.environ["RANK"]]
    governor = place.governor("8GiB")
    try:
        said = lead(place)
        place._said_at -= 1000
        assert place.any("the boundary of a step", False) is False  # Says that it stays.
        return [*said, governor.limit_bytes]
    finally:
        place.close()
        governor.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    REFUSED.append(True)
    found = {"alone": lead(None)}
    REFUSED.clear()
    CALLS.clear()
    for way, ranks in (("memory", 2), ("memory", 3), ("sockets", 2), ("memory", 7)):
        found[f"{way} {ranks}"] = launched(train, way, ranks=ranks)
    sys.stdout.write(json.dumps(found) + "\n")
