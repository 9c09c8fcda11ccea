# SPDX-License-Identifier: Apache-2.0
"""The recipe `chat`: fine-tunes a transformers language model on chats, inside the memory limit.

    plimsoll import chat chats.jsonl --tokenizer MODEL --out chats.tokens
    plimsoll train chat --data chats.tokens --model MODEL --out RUN --memory-limit 2GiB

Models, tokenizers and generation come from transformers, adapters from peft. Plimsoll adds rows that stream
from a token set, frozen weights that may stay on disk, steps that survive a refusal of memory, and runs that resume bit
for bit.
Reading order: this file, recipes/tuning, _task.py, _inbox.py, _previews.py; docs/recipes/chat.md.

Threads: the thread that trains, and those of plimsoll.Run and stream_frozen.
Memory:  the model's share, see tuning/_choice.py; one batch of data.
"""
from __future__ import annotations

import dataclasses
from typing import Any

from .. import Recipe, option, tuning


@dataclasses.dataclass(kw_only=True)
class Options(tuning.TuningOptions):
    inbox: str = option("", "Folder in which files of chats are dropped, in place of --data", path=True)
    inbox_wait_seconds: float = option(0.0, "Seconds without a new file after which the run ends; 0: never", least=0.0,
                                       decides_bits=False)
    train_on: str = option("assistant", "Turns of dropped chats that are trained on", choices=("assistant", "last", "all"))
    errors_max: int = option(0, "Number of lines of a dropped file that may be left out for an error")
    ignore_keys: str = option("", "Keys of a dropped file's rows that are read as if they were not there, with commas between")
    epochs: int = option(1, "Number of passes over the data, or over each dropped file", least=1)
    packing: bool = option(True, "Several chats share a sequence; each sees itself alone")
    previews: str = option("", "File of chats, JSON lines: their last answers are generated, and compared", path=True)
    previews_every_n_steps: int = option(0, "Steps between previews; 0: at the end", decides_bits=False)
    preview_tokens: int = option(128, "Most tokens of a generated answer", least=1, decides_bits=False)
    preview_seconds: float = option(30.0, "Most seconds that an answer may take", least=0.0, decides_bits=False)

    def task(self) -> Any:
        from ._task import ChatTask

        return ChatTask(self)


def before(options: Options) -> None:
    """Checks the options of this recipe, then calls tuning.before(). Errors: ValueError naming the option; ImportError."""
    if options.data and options.inbox:
        raise ValueError("inbox: data was given, too; a run has the one or the other")
    if options.inbox and (options.patience or options.schedule != "constant"):
        raise ValueError("inbox: nobody knows how many files will come: schedule must be constant, and patience 0")
    if options.previews_every_n_steps and not options.previews:
        raise ValueError("previews_every_n_steps: no file was given; name it with --previews FILE")
    tuning.before(options)


RECIPE = Recipe(
    "chat", "A language model of transformers, fine-tuned on chats", Options, tuning.train, tuning.evaluate, tuning.plan,
    tuning.export, before, unit="sequences", data="Token set to train on, from `plimsoll import chat`", data_or="inbox",
    examples=("plimsoll train chat --data chats.tokens --model MODEL --out run/ --memory-limit 2GiB",
              "plimsoll train chat --inbox drop/ --model MODEL --out run/ --memory-limit 2GiB --profile auto"),
    plan_example="plimsoll plan chat --data chats.tokens --model MODEL --sequence-length 2048 --memory-limit 2GiB")
