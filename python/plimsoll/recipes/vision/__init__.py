# SPDX-License-Identifier: Apache-2.0
"""The recipe `vision`: fine-tunes a transformers image-text-to-text model on images and text, inside the limit.

    plimsoll import vision receipts.jsonl --out receipts.images
    plimsoll train vision --data receipts.images --model MODEL --out RUN --memory-limit 8GiB

Images stay encoded on disk and are decoded for their batch: memory does not grow with the number of images.
Reading order: this file, recipes/tuning, _task.py, _rows.py, _selective.py, _processor.py; docs/recipes/vision.md.

Threads: the thread that trains, those that decode, and those of plimsoll.Run and stream_frozen.
Memory:  the model's share, see tuning/_choice.py; one batch of data, and the images decoded ahead.
"""
from __future__ import annotations

import dataclasses
from typing import Any

from .. import Recipe, option, tuning


@dataclasses.dataclass(kw_only=True)
class Options(tuning.TuningOptions):
    lora_alpha: float = option(16.0, "Scale of adapters, over their rank", least=0.0)
    lora_dropout: float = option(0.0, "Dropout before adapters", least=0.0, most=0.99)
    epochs: int = option(3, "Number of passes over the data", least=1)
    lr: float = option(2e-5, "Learning rate of AdamW", least=0.0)
    schedule: str = option("cosine", "Course of the learning rate", choices=("constant", "linear", "cosine"))
    warmup_steps: int = option(10, "Number of updates over which the learning rate rises")
    weight_decay: float = option(0.01, "Weight decay of AdamW", least=0.0)
    finetune_vision: bool = option(True, "Adapters in the part of the model that sees")
    finetune_language: bool = option(True, "Adapters in the part of the model that reads and writes")
    finetune_attention: bool = option(True, "Adapters in attention")
    finetune_mlp: bool = option(True, "Adapters in what is not attention")
    train_whole: str = option("", "Modules that are trained whole beside adapters, such as what joins the parts: names with commas "
                                  "between")
    selective_loss: str = option("none", "What of answers in JSON is not trained on: conservative: structure, white space, "
                                         "keywords of JSON Schema; moderate: null, too; aggressive: keys, too",
                                 choices=("none", "conservative", "moderate", "aggressive"))
    selective_loss_keys: str = option("", "Keys for aggressive, with commas between; empty: those that many answers have")
    masking_start_epoch: float = option(0.0, "Epochs before selective_loss begins", least=0.0)
    decode_threads: int = option(1, "Number of threads that decode images", least=1, most=64, decides_bits=False)

    def task(self) -> Any:
        from ._task import VisionTask

        return VisionTask(self)


RECIPE = Recipe(
    "vision", "An image-text-to-text model of transformers, fine-tuned on images and text", Options, tuning.train,
    tuning.evaluate, tuning.plan, tuning.export, tuning.before, unit="rows",
    data="Image set to train on, from `plimsoll import vision`",
    examples=("plimsoll train vision --data receipts.images --model MODEL --out run/ --memory-limit 8GiB",
              "plimsoll train vision --data receipts.images --model MODEL --out run/ --selective-loss aggressive"),
    plan_example="plimsoll plan vision --data receipts.images --model MODEL --sequence-length 2048 --memory-limit 8GiB")
