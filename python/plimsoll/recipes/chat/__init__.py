# SPDX-License-Identifier: Apache-2.0
"""The recipe `chat`: fine-tunes a language model of transformers on chats, inside the memory limit.

    plimsoll import chat chats.jsonl --tokenizer MODEL --out chats.tokens
    plimsoll train chat --data chats.tokens --model MODEL --out RUN --memory-limit 2GiB

Models, tokenizers and generation are transformers', adapters peft's. Ours is what is around them: rows that stream
from a token set, frozen weights that may stay on disk, steps that are admitted and survive, runs that go on bit for bit.
Reading order: this file, _choice.py, _model.py, _train.py, _inbox.py, _previews.py, _results.py; docs/recipes/chat.md.

Threads: the thread that trains, and those of plimsoll.Run and stream_frozen.
Memory:  the model's part by _choice.py; of data a batch.
"""
from __future__ import annotations

import dataclasses
from typing import Any

from .. import Recipe, RunOptions, option


@dataclasses.dataclass(kw_only=True)
class Options(RunOptions):
    model: str = option("", "Folder of the model, as transformers saves one, in safetensors files", path=True)
    inbox: str = option("", "Folder in which files of chats are dropped, in place of --data", path=True)
    inbox_wait_seconds: float = option(0.0, "Seconds without a new file after which the run ends; 0: never", least=0.0,
                                       decides_bits=False)
    train_on: str = option("assistant", "Turns of dropped chats that are trained on", choices=("assistant", "last", "all"))
    errors_max: int = option(0, "Number of lines of a dropped file that may be left out for an error")

    profile: str = option("given", "Who chooses method, weights and gradient checkpointing: these options, or model, length "
                                   "and limit", choices=("given", "auto"))
    method: str = option("lora", "What is trained: adapters of low rank, or all weights", choices=("lora", "full"))
    weights: str = option("auto", "Where frozen weights are: in memory, or on disk and read ahead of use",
                          choices=("auto", "resident", "streamed"), decides_bits=False)
    gradient_checkpointing: str = option("auto", "Activations are made again in backward, and not kept",
                                         choices=("auto", "on", "off"), decides_bits=False)
    dtype: str = option("bfloat16", "Type of products, and of frozen weights; trained ones are float32",
                        choices=("bfloat16", "float32"))

    lora_r: int = option(16, "Rank of adapters", least=1)
    lora_alpha: float = option(32.0, "Scale of adapters, over their rank", least=0.0)
    lora_dropout: float = option(0.05, "Dropout before adapters", least=0.0, most=0.99)
    lora_targets: str = option("all-linear", "Modules that get an adapter: all-linear, or names with commas between")
    rslora: bool = option(False, "Adapters are scaled by alpha over the root of their rank")
    dora: bool = option(False, "Magnitudes of weights are trained beside adapters (DoRA); weights are in memory")

    epochs: int = option(1, "Number of passes over the data, or over each dropped file", least=1)
    batch_size: int = option(1, "Number of sequences of a step", least=1)
    accumulate: int = option(8, "Number of steps whose gradients make one update", least=1)
    sequence_length: int = option(2048, "Number of tokens of a sequence; what a longer row has beyond is left out", least=2)
    packing: bool = option(True, "Several chats share a sequence; each sees itself alone")
    lr: float = option(2e-4, "Learning rate of AdamW", least=0.0)
    schedule: str = option("constant", "Course of the learning rate", choices=("constant", "linear", "cosine"))
    warmup_steps: int = option(0, "Number of updates over which the learning rate rises")
    weight_decay: float = option(0.0, "Weight decay of AdamW", least=0.0)
    clip_norm: float = option(1.0, "Most that the norm of an update's gradients may be; 0: any", least=0.0)

    eval_data: str = option("", "Token set to evaluate on, in place of rows held out of the data", path=True)
    held_out: int = option(-1, "Number of rows held out of the data; -1: a twentieth, at most 100", least=-1)
    eval_every_n_steps: int = option(0, "Steps between evaluations; 0: one at the end")
    patience: int = option(0, "Number of evaluations without a lower loss after which the run ends; 0: none ends it")
    previews: str = option("", "File of chats, JSON lines: their last answers are generated, and compared", path=True)
    previews_every_n_steps: int = option(0, "Steps between previews; 0: at the end", decides_bits=False)
    preview_tokens: int = option(128, "Most tokens of a generated answer", least=1, decides_bits=False)
    preview_seconds: float = option(30.0, "Most seconds that an answer may take", least=0.0, decides_bits=False)


def train(run: Any, options: Options) -> dict[str, Any]:
    from ._train import Training

    return Training(run, options).whole()


def evaluate(options: Options) -> dict[str, Any]:
    from ._results import evaluate_run

    return evaluate_run(options)


def plan(options: Options, device: str, device_memory_limit: str) -> dict[str, Any]:
    from ._results import plan_run

    return plan_run(options, device, device_memory_limit)


def export(options: Options, out: str, merge: bool) -> dict[str, Any]:
    from ._results import export_run

    return export_run(options, out, merge)


def before(options: Options) -> None:
    """Loads libraries, and counts what the model takes. Errors: ValueError naming the option; ImportError."""
    if not options.model:
        raise ValueError("model: no folder was given; name the model's with --model DIR")
    if options.data and options.inbox:
        raise ValueError("inbox: data was given, too; a run has the one or the other")
    if options.inbox and (options.patience or options.schedule != "constant"):
        raise ValueError("inbox: nobody knows how many files will come: schedule must be constant, and patience 0")
    if options.patience and not options.eval_every_n_steps:
        raise ValueError("patience: it counts evaluations; say how often with eval_every_n_steps")
    if options.previews_every_n_steps and not options.previews:
        raise ValueError("previews_every_n_steps: no file was given; name it with --previews FILE")
    if options.dora and options.weights == "streamed":
        raise ValueError("weights: adapters of DoRA begin with the weights' norms; say resident, or leave dora out")
    from ._choice import choose

    choose(options, 0)


RECIPE = Recipe(
    "chat", "A language model of transformers, fine-tuned on chats", Options, train, evaluate, plan, export, before,
    unit="sequences", data="Token set to train on, from `plimsoll import chat`", data_or="inbox",
    examples=("plimsoll train chat --data chats.tokens --model MODEL --out run/ --memory-limit 2GiB",
              "plimsoll train chat --inbox drop/ --model MODEL --out run/ --memory-limit 2GiB --profile auto"),
    plan_example="plimsoll plan chat --data chats.tokens --model MODEL --sequence-length 2048 --memory-limit 2GiB")
