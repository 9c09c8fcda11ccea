# SPDX-License-Identifier: Apache-2.0
"""Maker: makes a model's inputs from rows of an image set, and labels on the assistant's tokens.

The processor places the tokens of images, and reports where the text moved. The template gives the assistant's
characters, so that ids are never searched.

Threads: the thread that trains.   Memory: a batch, decoded and as the processor's output.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...data._image_set import ImageSet
from ...data.importers._chat_import import chosen
from ...data.importers._chat_template import ChatTemplate, TemplateError
from ...errors import MemoryPressure
from ...memory._memory import Governor
from ..tuning._task import Batch, one_of_few_lengths
from . import _selective
from ._processor import processor_of

if TYPE_CHECKING:
    from . import Options

_IGNORED = -100


@dataclasses.dataclass
class Counts:
    """The counts of answer tokens, of those masked by selective loss, and of rows left out."""

    total: int = 0
    masked: int = 0
    left_out: int = 0
    """Rows without a token to train on within sequence_length, or whose images do not fit it."""


class Maker:
    """A maker of batches from rows. All calls raise ValueError naming the row."""

    def __init__(self, options: Options, keys: frozenset[str] = frozenset()) -> None:
        """Loads the model's processor. keys: the JSON keys that selective_loss leaves out."""
        self._options, self._keys = options, keys
        self.processor = processor_of(options.model)
        tokenizer = self.processor.tokenizer
        self._template = ChatTemplate(self.processor.chat_template, dict(tokenizer.special_tokens_map))
        self._image_ids = [one for one in getattr(self.processor, "image_token_ids", []) or [] if one is not None]
        self._bos = tokenizer.bos_token

    def batch(self, rows: Sequence[Any], counts: Counts, level: int = 0) -> Batch | None:
        """Makes a batch; None where no row has a token to train on. rows: have row, messages and images [height, width, 3]."""
        said = [self._rendered(row) for row in rows]
        made = self._processed([text for text, _ in said], [row.images for row in rows])
        offsets = made.pop("offset_mapping")
        moved = made.pop("text_replacement_offsets", None) or [[] for _ in rows]
        length = min(self._options.sequence_length, made["input_ids"].shape[1])
        cut = made["input_ids"][:, length:]
        labels = torch.full_like(made["input_ids"], _IGNORED)
        masked = 0
        for k, (_, spans) in enumerate(said):
            masked += self._label(labels[k], made["input_ids"][k], offsets[k].numpy(), moved[k], spans, rows[k], length, level)
        labels = labels[:, :length]
        targets = (labels[:, 1:] != _IGNORED).sum(1)
        whole = ~torch.isin(cut, torch.tensor(self._image_ids, dtype=cut.dtype)).any(1) if cut.shape[1] else \
            torch.ones(len(rows), dtype=torch.bool)
        good = [k for k in range(len(rows)) if bool(whole[k]) and int(targets[k])]
        if len(good) < len(rows):
            counts.left_out += len(rows) - len(good)
            return self.batch([rows[k] for k in good], counts, level) if good else None
        counts.masked += masked
        counts.total += masked + int(targets.sum())
        shape = made["input_ids"].shape
        return {name: (one[:, :length] if one.shape == shape else one).clone() for name, one in made.items()}, labels.clone()

    def padded(self, batch: Batch, length: int = 0) -> Batch:
        """Pads a batch to `length`, or to the next of few lengths. The attention mask excludes the padding, as do the labels."""
        inputs, labels = batch
        shape, most = labels.shape, self._options.sequence_length
        more = (0, (length or one_of_few_lengths(shape[1], most)) - shape[1])
        fill = {"input_ids": self.processor.tokenizer.pad_token_id or 0}
        return ({name: torch.nn.functional.pad(one, more, value=fill.get(name, 0)) if one.shape == shape else one
                 for name, one in inputs.items()}, torch.nn.functional.pad(labels, more, value=_IGNORED))

    def _rendered(self, row: Any) -> tuple[str, list[tuple[int, int]]]:
        try:
            text, turns = self._template.render_turns(row.messages)
            untrained = {k for k, one in enumerate(row.messages) if one.get("train") is False}
            spans = chosen(text, turns, row.messages, untrained, "assistant")
        except TemplateError as error:
            raise ValueError(f"row {row.row}: {error}") from None
        token = getattr(self.processor, "image_token", None)
        if token and text.count(token) != len(row.images):
            raise ValueError(f"row {row.row}: {text.count(token)} places for images ({token}) and {len(row.images)} images: its "
                             "text has such a place, or the chat template none for images")
        return text, spans

    def _processed(self, texts: list[str], images: list[list[np.ndarray]]) -> dict[str, Any]:
        more = {"add_special_tokens": False} if self._bos and texts[0].startswith(self._bos) else {}
        made = self.processor(text=texts, images=images if any(images) else None, padding=True, padding_side="right",
                              return_offsets_mapping=True, return_text_replacement_offsets=True, **more)
        try:
            made.convert_to_tensors("pt", skip_tensor_conversion=["text_replacement_offsets"])
        except ValueError as error:  # Which transformers makes of whatever came meanwhile.
            if isinstance(error.__context__, MemoryPressure):
                raise error.__context__ from None
            raise
        if any(images) and "text_replacement_offsets" not in made:
            raise ValueError(f"model: {type(self.processor).__name__} does not say where the tokens of images go; "
                             "transformers' later versions may")
        return dict(made)

    def _label(self, labels: Any, ids: Any, offsets: np.ndarray, moved: list[Any], spans: list[tuple[int, int]], row: Any,
               length: int, level: int) -> int:
        """Sets the labels of the assistant's tokens, in place. Returns how many within `length` the level leaves out."""
        answers = _answers(row.messages)
        masked = 0
        text = self._rendered(row)[0] if level else ""
        for number, (begin, end) in enumerate(spans):
            shift = sum((one["new_span"][1] - one["new_span"][0]) - (one["span"][1] - one["span"][0])
                        for one in moved if one["span"][1] <= begin)
            trained = (offsets[:, 0] < end + shift) & (offsets[:, 1] > begin + shift)
            if level and number < len(answers):
                answer = answers[number]
                at = text.find(answer, begin, end)
                classes = _selective.classes_of(answer, self._keys) if at >= 0 else None
                if classes is not None:
                    out = _selective.left_out(classes, at + shift, offsets, level) & trained
                    masked += int(out[1:length].sum())
                    trained &= ~out
            chosen = torch.from_numpy(trained)
            labels[chosen] = ids[chosen]
        return masked


def _answers(messages: list[dict[str, Any]]) -> list[str]:
    return ["".join(part["text"] for part in one.get("content", []) if part["type"] == "text").strip()
            for one in messages if one["role"] == "assistant" and one.get("train", True)]


class ImageSequences:
    """An iterable of an image set's batches; implements tuning._task.Sequences."""

    def __init__(self, images: ImageSet, maker: Maker, options: Options, *, held_out: int, evaluates: bool) -> None:
        governor = Governor.current()
        assert governor is not None
        self._maker, self._options, self._level = maker, options, 0 if evaluates else _selective.LEVELS[options.selective_loss]
        self._rows = held_out if evaluates and held_out else len(images) - held_out
        self._batches = images.batches(
            options.batch_size, governor=governor, shuffle=not evaluates, seed=options.seed, held_out=held_out,
            only_held_out=evaluates and held_out > 0, threads=options.decode_threads, queue_bytes=0)
        self.counts = Counts()
        """Counts since they were last taken."""
        self.ended: Callable[[], None] = lambda: None
        """Called at the end of an epoch: rows after its last batch may have been left out."""

    @property
    def place(self) -> tuple[int, int]:
        """The position for seek()."""
        return self._batches.place

    def seek(self, place: Any) -> None:
        self._batches.seek(tuple(place[:2]))

    def __iter__(self) -> Iterator[Batch]:
        """Yields the rest of the current epoch."""
        for batch in self._batches:
            began = batch.place[0] + batch.place[1] / self._rows >= self._options.masking_start_epoch
            made = self._maker.batch(batch.rows, self.counts, self._level if began else 0)
            del batch  # Its pixels.
            if made is not None:
                made = self._maker.padded(made)
                yield made
            del made
        self.ended()


def answers_of(images: ImageSet) -> Iterator[str]:
    """Yields the answers of all rows, in order."""
    for row in images:
        yield from _answers(row.messages)
