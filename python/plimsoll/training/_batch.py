# SPDX-License-Identifier: Apache-2.0
"""Batch: a batch of any structure, cut into parts, and the weights of the parts' losses.

Threads: the thread that trains.   Memory: parts are views.
"""
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from ..ranks._messages import Unweighted
from ..rows._embedding import Rows

_MEANS = ("MseLossBackward", "SmoothL1LossBackward", "HuberLossBackward", "SoftMarginLossBackward",
          "BinaryCrossEntropyBackward", "BinaryCrossEntropyWithLogitsBackward")
_MEAN = 1  # torch's number for reduction="mean".


class Batch:
    """A batch of any structure.

    Tensors, NumPy arrays and Rows have rows first; numbers, text, None and tensors without dimensions
    go to every part as they are. Around them: tuples, named tuples, lists, dataclasses and mappings, in
    any depth. A list without any tensor in it, as long as the batch has rows, has an entry a row. A
    PackedSequence has a row for each sequence, and is not cut.

    split: (batch, parts) -> a sequence of batches, for batches that are cut in another way.
    """

    def __init__(self, value: Any, split: Callable[[Any, int], Sequence[Any]] | None = None) -> None:
        self._value, self._split = value, split
        leaves = list(_leaves(value))
        self.handles: list[Rows] = [one for one in leaves if isinstance(one, Rows)]
        """The batch's Rows. The function gets their tensors."""
        rows = [_rows_of(one) for one in leaves if _has_rows(one)]
        sizes = sorted(set(rows))
        self.rows = rows[0] if rows else 1
        self.why_whole = ""
        """The reason why the batch cannot be cut; "": it can."""
        packed = any(map(_is_packed, leaves))
        if split is None and (packed or len(sizes) != 1):
            self.why_whole = ("a PackedSequence is not cut" if packed
                              else f"its tensors have {' and '.join(map(str, sizes))} rows" if sizes
                              else "there is no tensor in it that has rows")
            self.why_whole += "; split=, a function of (batch, parts), would say how it is cut"

    def arguments(self) -> tuple:
        """Returns the arguments of the step's function: the entries of a tuple or list; any other batch as one argument."""
        return _arguments(_mapped(self._value, lambda one: one.tensor if isinstance(one, Rows) else one))

    def tensors(self) -> Iterator[Any]:
        """Yields every tensor of the batch, those of Rows included."""
        import torch

        for one in _leaves(self._value):
            if isinstance(one, Rows):
                yield one.tensor
            elif isinstance(one, torch.Tensor):
                yield one
            elif _is_packed(one):
                yield one.data

    def cut(self, parts: int) -> Iterator[Part]:
        """Yields `parts` parts in order. A part is made when it is asked for."""
        if parts == 1:
            yield Part(self.arguments(), self.rows)
        elif self._split is not None:
            for one in self._split(self._value, parts):
                part = Batch(one, self._split)
                yield Part(part.arguments(), part.rows)
        else:
            for k in range(parts):
                yield self._part(self.rows * k // parts, self.rows * (k + 1) // parts)

    def first(self, rows: int) -> Batch:
        """Returns a batch of the first `rows` rows."""
        return Batch(_Given(self._part(0, rows).arguments))

    def _part(self, begin: int, end: int) -> Part:
        def sliced(one: Any) -> Any:
            if isinstance(one, Rows):
                return one.tensor[begin:end]
            return one[begin:end] if _has_rows(one) or isinstance(one, list) else one

        return Part(_arguments(_mapped(self._value, sliced, self.rows)), end - begin)


@dataclasses.dataclass
class Part:
    """The arguments of the step's function for some rows of a batch, and the number of these rows."""

    arguments: tuple
    rows: int


class _Given(tuple):
    """A tuple whose entries are the arguments, whatever they are."""


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, (tuple, list)) and not _is_packed(value):
        for one in value:
            yield from _leaves(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value


def _mapped(value: Any, change: Callable[[Any], Any], rows: int = -1) -> Any:
    """Returns `value` with change() applied to every leaf. Lists of `rows` entries without tensors are leaves too."""
    if isinstance(value, Mapping):
        changed = {key: _mapped(one, change, rows) for key, one in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return changed
        other: Any = copy.copy(value)
        for name, held in getattr(other, "__dict__", {}).items():  # copy.copy() shares the inner mappings of a class of the program's.
            if isinstance(held, MutableMapping):
                other.__dict__[name] = copy.copy(held)
        for key, one in changed.items():
            other[key] = one
        return other
    if isinstance(value, (tuple, list)) and not _is_packed(value):
        if type(value) is list and len(value) == rows and not any(map(_has_rows, _leaves(value))):
            return change(value)
        each = [_mapped(one, change, rows) for one in value]
        make = getattr(type(value), "_make", type(value))  # A named tuple's constructor may take something else.
        return make(each)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        other = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(other, field.name, _mapped(getattr(value, field.name), change, rows))
        return other
    return change(value)


def _arguments(value: Any) -> tuple:
    return tuple(value) if type(value) in (tuple, list, _Given) else (value,)


def _is_packed(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.utils.rnn.PackedSequence)


def _has_rows(one: Any) -> bool:
    import torch

    return (isinstance(one, Rows) or _is_packed(one)
            or (isinstance(one, (torch.Tensor, np.ndarray)) and one.ndim > 0))


def _rows_of(one: Any) -> int:
    """Returns the number of rows in a leaf."""
    return int(one.batch_sizes[0]) if _is_packed(one) else len(one)


def weight_of(value: Any, part: Part) -> tuple[float, float | None]:
    """Returns (weight, numbers per row) of a mean loss, read from its autograd graph.

    The weight of a cross entropy is the sum of class weights over its counted targets. It differs from row to row, so the second is
    None. The weight of any other mean of torch is its count of numbers.
    Errors: Unweighted when the loss does not end in a mean.
    """
    node = value.grad_fn
    while node is not None and node.name().startswith("ToCopyBackward"):  # A conversion of the dtype.
        node = node.next_functions[0][0]
    name = node.name() if node is not None else "a leaf"
    if name.startswith("NllLoss") and node._saved_reduction == _MEAN:
        return float(node._saved_total_weight), None
    if name == "MeanBackward0":
        numbers = node._saved_self_sym_numel
    elif name.rstrip("0") in _MEANS and node._saved_reduction == _MEAN:
        numbers = node._saved_self.numel()
    else:
        raise Unweighted(
            f"the loss ends in {name}, which does not say how much of a batch a part is; weight=, a "
            "function of what the loss is a function of, would: the number of rows, or of tokens that "
            "are not ignored")
    return float(numbers), numbers / part.rows
