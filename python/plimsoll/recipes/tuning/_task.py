# SPDX-License-Identifier: Apache-2.0
"""Task: the interface by which a recipe plugs its model and data into the training of _train.py.

Threads: the thread that trains.   Memory: that of its data.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from . import TuningOptions
    from ._train import Training

Batch = tuple[dict[str, Any], Any]
"""(the model's keyword arguments, labels): labels are int64 [sequences, tokens], −100 where a token is not trained on."""

# Of batches: so many at most, none shorter but for sequence_length. For each shape of a product in bfloat16 oneDNN keeps some
# 0.6 MB (seen on an AMD EPYC with torch 2.13), and a length gives shapes to every kind of layer.
_LENGTHS, _LENGTH_LEAST = 16, 64


def one_of_few_lengths(length: int, most: int) -> int:
    """Returns the length to pad sequences of `length` tokens to: one of at most 16 lengths up to `most`, the longest allowed."""
    grain = max(_LENGTH_LEAST, -(-most // _LENGTHS))
    return min(most, -(-length // grain) * grain)


class Sequences(Protocol):
    """Data for run.steps() that yields Batches. Its place and seek() let a run resume anywhere."""

    @property
    def place(self) -> Any: ...
    def seek(self, place: Any) -> None: ...
    def __iter__(self) -> Iterator[Batch]: ...


class Task:
    """A recipe's own part of training. It holds no state that a resumed run needs: that is in Training.notes."""

    def __init__(self, options: TuningOptions) -> None:
        self.options = options

    def model_class(self) -> Any:
        """Returns transformers' class AutoModelFor…"""
        raise NotImplementedError

    def targets(self, model: Any) -> Any:
        """Returns target_modules for peft. Errors: ValueError naming the option."""
        return self.options.lora_targets if self.options.lora_targets == "all-linear" else self.named_targets()

    def whole(self, model: Any) -> list[str]:
        """Returns the names of modules that are trained whole beside adapters. Errors: ValueError naming the option."""
        return []

    def named_targets(self) -> list[str]:
        """Returns the names listed in lora_targets."""
        return [name.strip() for name in self.options.lora_targets.split(",")]

    def kept_bytes(self, model: Any) -> int:
        """Returns the bytes that autograd keeps for a step on the largest batch. The model is on the meta device."""
        raise NotImplementedError

    def notes(self) -> dict[str, Any]:
        """Returns the initial values of this task's own entries in Training.notes, which a resumed run gets back."""
        return {}

    def open(self, path: str) -> Any:
        """Opens a set of rows, which has path, fingerprint and length. Errors: those of the set."""
        raise NotImplementedError

    def check(self, data: Any, option: str = "data") -> str:
        """Describes what is odd about the data for this model; "" if nothing is. option: the option that named the data.

        Errors: ValueError for data that the model cannot take.
        """
        raise NotImplementedError

    def sequences(self, data: Any, *, held_out: int = 0, evaluates: bool = False) -> Sequences:
        """Returns batches of the data. held_out: number of rows to leave out.

        evaluates: reads only these rows, or all rows if it is 0, unshuffled.
        """
        raise NotImplementedError

    def count(self, data: Any, held_out: int) -> int:
        """Returns the number of batches in an epoch."""
        raise NotImplementedError

    def largest(self, data: Any, sequences: int) -> Batch:
        """Returns a batch at least as large as any real one of this many sequences, with every token trained on."""
        raise NotImplementedError

    def train(self, training: Training) -> None:
        """Runs all loops of the training."""
        with self.open(self.options.data) as data:
            training.must_be(data)
            training.loop(data)
            training.must_have_updated()

    def begun(self, data: Sequences, notes: dict[str, Any]) -> None:
        """Prepares a loop, before its first batch is taken."""

    def told(self, data: Sequences, notes: dict[str, Any]) -> dict[str, float]:
        """Returns metrics of the last batch, and adds its counts to the notes."""
        return {}

    def summary(self, notes: dict[str, Any]) -> dict[str, Any]:
        """Returns this task's own entries in the run's summary."""
        return {}

    def preview(self, training: Training, step: int, at_end: bool = False) -> None:
        """Shows a preview of the model's answers where one is due. Called after each step and at the end."""
