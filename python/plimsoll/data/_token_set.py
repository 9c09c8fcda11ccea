# SPDX-License-Identifier: Apache-2.0
"""TokenSet and TokenBatches: rows of token ids from one file, and sequences of fixed length from them.

Threads: any number of threads may read a TokenSet; a TokenBatches' calls run one at a time.
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import numpy as np

from .. import _core
from ..core._arrays import not_pickled
from ._row_set import RowSet

if TYPE_CHECKING:
    import torch

Place = tuple[int, int, int]


class TokenSet(RowSet[tuple[np.ndarray, np.ndarray]]):
    """Rows of token ids in one file (docs/formats/token_set.md), with a flag per token: trained on or not.

        tokens = plimsoll.TokenSet("chats.tokens")
        ids, trained = tokens[0]
        for batch in tokens.batches(batch_size=4, sequence_length=2048, seed=7):
            loss = model(**batch.tensors()).loss

    Errors: NotFoundError, CorruptError, OSError.
    Memory: a descriptor, and a row while it is read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.fspath(path), _core.TokenSet.open(os.fspath(path)))
        (self.tokens, self.trained_tokens, self.longest_row, self.vocabulary, self.id_bytes,
         self.fingerprint) = self._core.counts

    def length(self, row: int) -> int:
        """Returns the number of tokens in a row. Errors: IndexError."""
        return self._core.length(self._number(row))

    def row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids, mask of the tokens to train on) of a row. Shape: int32 [tokens], bool [tokens].

        Errors: IndexError; CorruptError naming the row; OSError.
        """
        ids = np.empty(self.length(row), np.int32)
        trained = np.empty(len(ids), np.uint8)
        self._core.read(self._number(row), ids, trained)
        return ids, trained.view(np.bool_)

    def batches(self, batch_size: int = 1, sequence_length: int = 2048, *, packing: bool = True, window: int = 1024,
                shuffle: bool = True, seed: int = 0, pad_id: int = 0, held_out: int = 0, only_held_out: bool = False,
                place: Place = (0, 0, 0)) -> TokenBatches:
        """Returns batches of sequences of fixed length, for training; epochs follow one another without end.

        packing: puts several rows into a sequence, best fit decreasing among `window` rows of the order; without it each
                 row is a sequence. Tokens of a row beyond sequence_length are left out.
        held_out: number of rows to leave out, chosen by chance and the same for any seed.
        only_held_out: reads only these rows instead of all others.
        place:   where to begin: an earlier TokenBatches.place.
        Errors:  ValueError naming the option.
        """
        return TokenBatches(_core.TokenBatches.open(self._core, batch_size, sequence_length, packing, window,
                                                    shuffle, seed, pad_id, held_out, only_held_out, place),
                            (batch_size, sequence_length))


class TokenBatch:
    """A batch of sequences as NumPy arrays that you may keep.

    Shape: each int64 [sequences, sequence_length]. input_ids; labels, −100 where a token is not trained on, and at
           the first token of each document; position_ids, from 0 in every document; documents, the number of each
           token's document in its sequence, −1 for padding. Attention is confined to tokens of the same document.
    """

    __slots__ = ("input_ids", "labels", "position_ids", "documents", "place", "tokens", "trained", "rows",
                 "left_out", "ends_epoch")

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    documents: np.ndarray
    place: Place
    tokens: int
    trained: int
    rows: int
    left_out: int
    ends_epoch: bool

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns input_ids, labels and position_ids as tensors over the same bytes, for a transformers model."""
        import torch

        return {name: torch.from_numpy(getattr(self, name)) for name in ("input_ids", "labels", "position_ids")}

    def attention_mask(self) -> np.ndarray:
        """Returns the attention mask: a token attends to itself and to earlier tokens of its document.

        Shape: bool [sequences, 1, sequence_length, sequence_length].
        """
        same = self.documents[:, :, None] == self.documents[:, None, :]
        return (same & np.tri(self.documents.shape[1], dtype=np.bool_))[:, None]

    def __len__(self) -> int:
        return len(self.input_ids)


class TokenBatches:
    """Batches of a TokenSet in a seeded order; made by TokenSet.batches()."""

    def __init__(self, core: _core.TokenBatches, shape: tuple[int, int]) -> None:
        """Takes what TokenSet.batches() made; call that instead."""
        self._core = core
        self._shape = shape

    __reduce_ex__ = not_pickled

    def next(self) -> TokenBatch:
        """Returns the next batch. Errors: CorruptError naming the row; OSError; the place is then unchanged."""
        batch = TokenBatch()
        arrays = [np.empty(self._shape, np.int64) for _ in range(4)]
        (batch.place, sequences, batch.tokens, batch.trained, batch.rows, batch.left_out,
         batch.ends_epoch) = self._core.next(*(array.reshape(-1) for array in arrays))
        batch.input_ids, batch.labels, batch.position_ids, batch.documents = (array[:sequences] for array in arrays)
        return batch

    def __iter__(self) -> Iterator[TokenBatch]:
        """Yields the remaining batches of the current epoch."""
        while True:
            batch = self.next()
            if len(batch):
                yield batch
            if batch.ends_epoch:
                return

    @property
    def place(self) -> Place:
        """The position for seek(): (epoch, rows before the window, sequences of the window already returned)."""
        return self._core.place

    def seek(self, place: Place) -> None:
        """Moves to an earlier `place` of batches with the same options. Errors: ValueError."""
        self._core.seek(cast(Place, tuple(place)))

    def close(self) -> None:
        """Ends the batches and releases the set."""
        self._core.close()
