# SPDX-License-Identifier: Apache-2.0
"""Task: what a recipe brings of its own to the training of _train.py.

Threads: the thread that trains.   Memory: that of its data.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from . import TuningOptions
    from ._train import Training

Batch = tuple[dict[str, Any], Any]
"""(what the model is called with, labels int64 [sequences, tokens]: −100 where a token is not trained on)."""

# Of batches: so many at most, none shorter but for sequence_length. For each shape of a product in bfloat16 oneDNN keeps some
# 0.6 MB (seen on an AMD EPYC with torch 2.13), and a length gives shapes to every kind of layer.
_LENGTHS, _LENGTH_LEAST = 16, 64


def one_of_few_lengths(length: int, most: int) -> int:
    """Tokens that sequences of `length` are padded to where the longest there may be are `most`: one of 16 lengths."""
    grain = max(_LENGTH_LEAST, -(-most // _LENGTHS))
    return min(most, -(-length // grain) * grain)


class Sequences(Protocol):
    """Batches for run.steps(), each a Batch; with its place and seek() it goes on anywhere."""

    @property
    def place(self) -> Any: ...
    def seek(self, place: Any) -> None: ...
    def __iter__(self) -> Iterator[Batch]: ...


class Task:
    """Of options. It holds no state that a run would have to know again: that is in Training.notes."""

    def __init__(self, options: TuningOptions) -> None:
        self.options = options

    def model_class(self) -> Any:
        """transformers' AutoModelFor…"""
        raise NotImplementedError

    def targets(self, model: Any) -> Any:
        """peft's target_modules. Errors: ValueError naming the option."""
        return self.options.lora_targets if self.options.lora_targets == "all-linear" else self.named_targets()

    def whole(self, model: Any) -> list[str]:
        """Modules that are trained whole beside adapters. Errors: ValueError naming the option."""
        return []

    def named_targets(self) -> list[str]:
        """Names of lora_targets."""
        return [name.strip() for name in self.options.lora_targets.split(",")]

    def kept_bytes(self, model: Any) -> int:
        """What autograd keeps of a model on the meta device, for a step on the largest batch."""
        raise NotImplementedError

    def notes(self) -> dict[str, Any]:
        """What the training must know again beside its own, as it is at the beginning."""
        return {}

    def open(self, path: str) -> Any:
        """A set of rows, with path, fingerprint and length. Errors: of the set."""
        raise NotImplementedError

    def check(self, data: Any, option: str = "data") -> str:
        """What is odd about the data for this model, in words. Errors: ValueError for what the model cannot take; option: that
        named it."""
        raise NotImplementedError

    def sequences(self, data: Any, *, held_out: int = 0, evaluates: bool = False) -> Sequences:
        """held_out: rows left out; `evaluates`: only these rows, or of 0 all, in their order."""
        raise NotImplementedError

    def count(self, data: Any, held_out: int) -> int:
        """Batches of an epoch."""
        raise NotImplementedError

    def largest(self, data: Any, sequences: int) -> Batch:
        """As large as any of so many sequences that will come, every token trained on."""
        raise NotImplementedError

    def train(self, training: Training) -> None:
        """All loops."""
        with self.open(self.options.data) as data:
            training.must_be(data)
            training.loop(data)
            training.must_have_updated()

    def begun(self, data: Sequences, notes: dict[str, Any]) -> None:
        """Before batches of a training are taken, of which told() adds to the notes."""

    def told(self, data: Sequences, notes: dict[str, Any]) -> dict[str, float]:
        """Metrics of the batch that came last, which are added to the notes."""
        return {}

    def summary(self, notes: dict[str, Any]) -> dict[str, Any]:
        """What the run's summary says beside the training's own."""
        return {}

    def preview(self, training: Training, step: int, at_end: bool = False) -> None:
        """After each step, and at the end: shows what the model has learnt, where it is time to."""
