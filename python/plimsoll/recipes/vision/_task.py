# SPDX-License-Identifier: Apache-2.0
"""VisionTask: the recipe's own part, for image sets and models of images and text.

Threads: the thread that trains.   Memory: a batch.
"""
from __future__ import annotations

import functools
import heapq
import types
from typing import TYPE_CHECKING, Any

import torch

from ...data._image_set import ImageSet
from ..tuning._choice import kept_bytes
from ..tuning._model import config_of, libraries
from ..tuning._task import Batch, Task
from . import _selective
from ._rows import Counts, ImageSequences, Maker, answers_of

if TYPE_CHECKING:
    from . import Options

_TRIED = 16  # Rows with the largest images, until one fits sequence_length.


class VisionTask(Task):
    options: Options
    _largest_row: Any = None

    def model_class(self) -> Any:
        return libraries()[0].AutoModelForImageTextToText

    def targets(self, model: Any) -> list[str]:
        """Returns the linear modules that finetune_… and lora_targets allow. Errors: ValueError where there is none."""
        options = self.options
        named = None if options.lora_targets == "all-linear" else self.named_targets()
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        reads = {id(part) for part in decoder.modules()}
        whole = {id(part) for name in self.whole(model) for part in model.get_submodule(name).modules()}
        found = []
        for name, part in model.named_modules():
            if not isinstance(part, torch.nn.Linear) or part is head or id(part) in whole:
                continue
            attends = any("attn" in one or "attention" in one for one in name.lower().split("."))
            if (options.finetune_language if id(part) in reads else options.finetune_vision) \
                    and (options.finetune_attention if attends else options.finetune_mlp) \
                    and (named is None or any(name == one or name.endswith("." + one) for one in named)):
                found.append(name)
        if not found:
            raise ValueError(f"lora_targets: {options.lora_targets} and finetune_vision, finetune_language, finetune_attention "
                             "and finetune_mlp leave no module of the model")
        return found

    def whole(self, model: Any) -> list[str]:
        """Returns the full names of the modules in train_whole. Errors: ValueError where there is no such module, or it may stream."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        found: list[str] = []
        for asked in filter(None, map(str.strip, self.options.train_whole.split(","))):
            named = {name: part for name, part in model.named_modules() if name == asked or name.endswith("." + asked)}
            blocks = [name for name, part in model.named_modules() if isinstance(part, GradientCheckpointingLayer)]
            if not named:
                parts = ", ".join(name for name, _ in model.base_model.named_children())
                raise ValueError(f"train_whole: no module of the model is called {asked}; its parts are {parts}")
            if bad := [name for name in named for block in blocks if f"{name}.".startswith(block) or block.startswith(f"{name}.")]:
                raise ValueError(f"train_whole: {bad[0]} has blocks, or is in one, whose weights may be on disk; say method full")
            found += named
        return found

    def kept_bytes(self, model: Any) -> int:
        """Adds up the decoder's kept bytes and, where vision modules are trained, their linear layers' inputs and outputs."""
        options = self.options
        decoder = model.get_decoder()
        kept = kept_bytes(decoder, options.batch_size, options.sequence_length)
        reads = {id(part) for part in decoder.modules()}
        seeing = [part for part in model.modules() if isinstance(part, torch.nn.Linear) and id(part) not in reads
                  and part is not model.get_output_embeddings()]
        if any(one.requires_grad for part in seeing for one in part.parameters()) or options.finetune_vision:
            patches = _patches_a_token(model.config) * options.batch_size * options.sequence_length
            kept += sum(patches * (part.in_features + part.out_features) * part.weight.element_size() for part in seeing)
        return kept

    def notes(self) -> dict[str, Any]:
        return {"total_tokens": 0, "masked_tokens": 0, "batch_count": 0, "rows_left_out": 0}

    def open(self, path: str) -> ImageSet:
        return ImageSet(path)

    def check(self, images: ImageSet, option: str = "data") -> str:
        longest = getattr(config_of(self.options.model).get_text_config(), "max_position_embeddings", None)
        if longest and self.options.sequence_length > longest:
            raise ValueError(f"sequence_length: {self.options.sequence_length}, and the model knows {longest} positions")
        if self.options.selective_loss == "aggressive":
            return f"selective_loss leaves out the keys {', '.join(sorted(self._keys(images))) or '(none)'}"
        return ""

    @functools.cached_property
    def _makers(self) -> dict[frozenset[str], Maker]:
        return {}

    def _keys(self, images: ImageSet) -> frozenset[str]:
        if self.options.selective_loss_keys:
            return frozenset(one.strip() for one in self.options.selective_loss_keys.split(","))
        return _selective.common_keys(answers_of(images))

    def _maker(self, images: ImageSet) -> Maker:
        keys = self._keys(images) if self.options.selective_loss == "aggressive" else frozenset()
        if keys not in self._makers:
            self._makers[keys] = Maker(self.options, keys)
        return self._makers[keys]

    def sequences(self, images: ImageSet, *, held_out: int = 0, evaluates: bool = False) -> ImageSequences:
        return ImageSequences(images, self._maker(images), self.options, held_out=held_out, evaluates=evaluates)

    def count(self, images: ImageSet, held_out: int) -> int:
        return -(-(len(images) - held_out) // self.options.batch_size)

    def largest(self, images: ImageSet, sequences: int) -> Batch:
        """Returns a batch of the row with the most pixels for the model, repeated, padded to sequence_length.

        Errors: ValueError where none of the rows with the largest images fits sequence_length.
        """
        maker = self._maker(images)
        if self._largest_row is None:
            self._largest_row = self._row_of_most(images, maker)
        length = self.options.sequence_length
        inputs, _ = maker.padded(maker.batch([self._largest_row] * sequences, Counts()), length)  # type: ignore[arg-type]
        return inputs, torch.zeros(sequences, length, dtype=torch.int64)

    def _row_of_most(self, images: ImageSet, maker: Maker) -> Any:
        patches = functools.lru_cache(maxsize=4096)(functools.partial(_patches, maker.processor.image_processor))
        sizes = ((sum(patches(*size) for size in images[row].sizes), row) for row in range(len(images)))
        for _, row in heapq.nlargest(_TRIED, sizes):
            found = images[row]
            made = types.SimpleNamespace(row=row, messages=found.messages,
                                         images=[images.image(row, one) for one in range(len(found.sizes))])
            if maker.batch([made], Counts()) is not None:
                return made
        raise ValueError(f"sequence_length: none of the {min(_TRIED, len(images))} rows of {images.path} with the largest images "
                         f"has a token to train on within {self.options.sequence_length}")

    def begun(self, data: Any, notes: dict[str, Any]) -> None:
        data.ended = functools.partial(self._count, data, notes)

    def told(self, data: Any, notes: dict[str, Any]) -> dict[str, float]:
        self._count(data, notes)
        notes["batch_count"] += 1
        return self.summary(notes)

    def _count(self, data: Any, notes: dict[str, Any]) -> None:
        counts, data.counts = data.counts, Counts()
        notes["total_tokens"] += counts.total
        notes["masked_tokens"] += counts.masked
        notes["rows_left_out"] += counts.left_out

    def summary(self, notes: dict[str, Any]) -> dict[str, Any]:
        return {"total_tokens": notes["total_tokens"], "masked_tokens": notes["masked_tokens"],
                "mask_percentage": 100 * notes["masked_tokens"] / max(1, notes["total_tokens"]),
                "batch_count": notes["batch_count"], "rows_left_out": notes["rows_left_out"]}


def _patches(processor: Any, width: int, height: int) -> int:
    """Returns the number of patches or tiles that the processor makes of a picture, or its pixels where it cannot tell."""
    count = getattr(processor, "get_number_of_image_patches", None)
    made = count(height, width, {}) if count is not None else width * height
    return int(made[0] if isinstance(made, tuple) else made)


def _patches_a_token(config: Any) -> int:
    """Returns the number of patches per image token, for the estimate of choose() alone: a square of the model's merge size."""
    side: Any = getattr(config, "scale_factor", None) or getattr(config.vision_config, "spatial_merge_size", 1)
    return int(side) ** 2
