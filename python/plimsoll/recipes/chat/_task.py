# SPDX-License-Identifier: Apache-2.0
"""ChatTask: the recipe's own part, for token sets and language models.

Threads: the thread that trains.   Memory: a batch.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...data._token_set import TokenSet
from ..tuning._choice import kept_bytes
from ..tuning._model import config_of, libraries
from ..tuning._task import Batch, Task, one_of_few_lengths

if TYPE_CHECKING:
    from ..tuning._train import Training
    from . import Options


class TokenSequences:
    """An iterable of a token set's batches: ({input_ids, position_ids}, labels), each int64 [sequences, tokens]."""

    def __init__(self, tokens: TokenSet, options: Options, *, held_out: int = 0, evaluates: bool = False) -> None:
        """Opens the batches.

        held_out:  number of rows to leave out.
        evaluates: reads only the held-out rows, or all rows where held_out is 0, unshuffled.
        """
        self._packing, self._most, self._evaluates, self._path = options.packing, options.sequence_length, evaluates, tokens.path
        self._batches = tokens.batches(
            options.batch_size, options.sequence_length, packing=options.packing, shuffle=not evaluates,
            seed=options.seed, held_out=held_out, only_held_out=evaluates and held_out > 0)
        self.seek = self._batches.seek

    @property
    def place(self) -> tuple[int, int, int]:
        """The position for seek()."""
        return self._batches.place

    def __iter__(self) -> Iterator[Batch]:
        """Yields the rest of the current epoch. Errors: ValueError where the data is for training and has no token to train on."""
        empty = not self._evaluates and self.place[1:] == (0, 0)
        for batch in self._batches:
            empty = False
            tensors = batch.tensors()
            if not self._packing:
                length = one_of_few_lengths(int((batch.documents >= 0).sum(1).max()), self._most)
                tensors = {name: one[:, :length] for name, one in tensors.items()}
            labels = tensors.pop("labels")
            yield tensors, labels
        if empty:
            raise ValueError(f"sequence_length: no row of {self._path} has a token to train on within {self._most}")


class ChatTask(Task):
    options: Options

    def model_class(self) -> Any:
        return libraries()[0].AutoModelForCausalLM

    def kept_bytes(self, model: Any) -> int:
        return kept_bytes(model, self.options.batch_size, self.options.sequence_length)

    def notes(self) -> dict[str, Any]:
        """Returns the notes about dropped files: the one being trained on, and the number of each outcome."""
        return {"number": 0, "file": "", "stamp": [], "trained": 0, "failed": 0, "skipped": 0}

    def open(self, path: str) -> TokenSet:
        return TokenSet(path)

    def check(self, tokens: TokenSet, option: str = "data") -> str:
        options = self.options
        text = config_of(options.model).get_text_config()
        if tokens.vocabulary > text.vocab_size:
            raise ValueError(f"{option}: {tokens.path} has ids of a vocabulary of {tokens.vocabulary}, and the model's is of "
                             f"{text.vocab_size}: import it again with --tokenizer {options.model}")
        longest = getattr(text, "max_position_embeddings", None)
        if longest and options.sequence_length > longest:
            raise ValueError(f"sequence_length: {options.sequence_length}, and the model knows {longest} positions")
        if tokens.longest_row <= options.sequence_length:
            return ""
        step = max(1, len(tokens) // 10_000)
        lengths = sorted(tokens.length(row) for row in range(0, len(tokens), step))
        longer = sum(one > options.sequence_length for one in lengths) / len(lengths)
        return (f"{100 * longer:.1f} % of the rows are longer than {options.sequence_length} tokens and are cut (half have up "
                f"to {lengths[len(lengths) // 2]}, 95 % up to {lengths[len(lengths) * 95 // 100]}, the longest "
                f"{tokens.longest_row})")

    def sequences(self, tokens: TokenSet, *, held_out: int = 0, evaluates: bool = False) -> TokenSequences:
        return TokenSequences(tokens, self.options, held_out=held_out, evaluates=evaluates)

    def count(self, tokens: TokenSet, held_out: int) -> int:
        return sum(1 for _ in self.sequences(tokens, held_out=held_out))

    def largest(self, tokens: TokenSet | None, sequences: int) -> Batch:
        """Returns a batch of the largest shape, in NumPy's memory like the real ones. Positions restart within a sequence, as at
        a document or padding, so that the model makes a mask of all pairs."""
        shape = (sequences, self.options.sequence_length)
        ids, labels = (torch.from_numpy(np.zeros(shape, np.int64)) for _ in range(2))
        positions = np.tile(np.arange(shape[1]) % -(-shape[1] // 2), (sequences, 1))
        return {"input_ids": ids, "position_ids": torch.from_numpy(positions)}, labels

    def train(self, training: Training) -> None:
        if self.options.previews:
            from ._previews import check

            check(self.options.previews)
        if not self.options.inbox:
            super().train(training)
            return
        if self.options.virtual_workers or training.run.group.count > 1:
            raise ValueError("inbox: a run of virtual workers or of several ranks cannot have it yet; give a token set with --data, or "
                             "start one process without virtual_workers")
        from ._inbox import Inbox

        Inbox(training).train()

    def preview(self, training: Training, step: int, at_end: bool = False) -> None:
        options = self.options
        every = options.previews_every_n_steps
        if options.previews and (at_end or (every and step % every == 0)):
            from ._previews import preview

            with training.run.phase("preview"):
                training.said.update(preview(training.tuned, options, training.run, step))
