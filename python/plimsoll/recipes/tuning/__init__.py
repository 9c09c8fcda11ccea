# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a transformers model inside the limit, by peft's adapters or whole: the common part of `chat` and `vision`.

Each recipe provides options that derive from TuningOptions, and a Task: its model's class, its data, its batches.
Reading order: this file, _task.py, _choice.py, _model.py, _train.py, _results.py.

Threads: the thread that trains, and those of plimsoll.Run and stream_frozen.
Memory:  the model's share, see _choice.py; one batch of data.
"""
from __future__ import annotations

import dataclasses
import gc
import os
from typing import TYPE_CHECKING, Any

from .. import DeviceOptions, option

if TYPE_CHECKING:
    from ._task import Task


@dataclasses.dataclass(kw_only=True)
class TuningOptions(DeviceOptions):
    model: str = option("", "Folder of the model, as transformers saves one, in safetensors files", path=True)
    profile: str = option("given", "Who chooses method, weights and gradient checkpointing: these options, or model, length "
                                   "and limit", choices=("given", "auto"))
    method: str = option("lora", "What is trained: adapters of low rank, or all weights", choices=("lora", "full"))
    weights: str = option("auto", "Where frozen weights are: in memory, or on disk and read ahead of use",
                          choices=("auto", "resident", "streamed"), decides_bits=False)
    base: str = option("as-saved", "Frozen linear maps of blocks: as the model's files have them, or in 4.5 (nf4) or 8 (int8) bits a number, by "
                                   "bitsandbytes", choices=("as-saved", "nf4", "int8"))
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

    epochs: int = option(1, "Number of passes over the data", least=1)
    batch_size: int = option(1, "Number of sequences of a step", least=1)
    accumulate: int = option(8, "Number of steps whose gradients make one update", least=1)
    # plimsoll.Run's identity has it: another number is refused.
    virtual_workers: int = option(0, "Number of workers that have batch_size sequences of a step each, a power of two: any "
                                     "number of ranks that divides it ends in the same bits", decides_bits=False)
    sequence_length: int = option(2048, "Number of tokens of a sequence; what a longer row has beyond is left out", least=2)
    lr: float = option(2e-4, "Learning rate of AdamW", least=0.0)
    schedule: str = option("constant", "Course of the learning rate", choices=("constant", "linear", "cosine"))
    warmup_steps: int = option(0, "Number of updates over which the learning rate rises")
    weight_decay: float = option(0.0, "Weight decay of AdamW", least=0.0)
    clip_norm: float = option(1.0, "Most that the norm of an update's gradients may be; 0: any", least=0.0)

    eval_data: str = option("", "Set to evaluate on, in place of rows held out of the data", path=True)
    held_out: int = option(-1, "Number of rows held out of the data; -1: a twentieth, at most 100", least=-1)
    eval_every_n_steps: int = option(0, "Steps between evaluations; 0: one at the end")
    patience: int = option(0, "Number of evaluations without a lower loss after which the run ends; 0: none ends it")
    cleanup_every_n_steps: int = option(0, "Steps after which what nobody uses is given back to the system; 0: under "
                                           "pressure only", decides_bits=False)

    def on_processor_because(self) -> str:
        """Returns why the run must train on the CPU; "" where it need not."""
        if self.virtual_workers or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return "device: ranks and virtual workers train on the processor"
        return ""

    def task(self) -> Task:
        """Makes the recipe's Task from these options."""
        raise NotImplementedError


def train(run: Any, options: TuningOptions) -> dict[str, Any]:
    from ._train import Training

    return Training(run, options).whole()


def evaluate(options: TuningOptions) -> dict[str, Any]:
    from ._results import evaluate_run

    return evaluate_run(options)


def plan(options: TuningOptions, device: str, device_memory_limit: str) -> dict[str, Any]:
    from ._results import plan_run

    try:
        return plan_run(options, device, device_memory_limit)
    finally:
        gc.collect()  # Models are in cycles, and a run that follows would hold this one beside its own.


def export(options: TuningOptions, out: str, merge: bool) -> dict[str, Any]:
    from ._results import export_run

    return export_run(options, out, merge)


def before(options: TuningOptions) -> None:
    """Checks the options, loads libraries, and counts the model's memory. Errors: ValueError naming the option; ImportError."""
    if not options.model:
        raise ValueError("model: no folder was given; name the model's with --model DIR")
    if options.patience and not options.eval_every_n_steps:
        raise ValueError("patience: it counts evaluations; say how often with eval_every_n_steps")
    if options.dora and options.weights == "streamed":
        raise ValueError("weights: adapters of DoRA begin with the weights' norms; say resident, or leave dora out")
    if options.base != "as-saved":
        if options.method == "full" and options.profile != "auto":
            raise ValueError(f"base: all weights are trained, and none of them is {options.base}; say as-saved, or --method lora")
        if options.dora:
            raise ValueError(f"base: adapters of DoRA begin with the weights' norms, which {options.base} has not; say as-saved, or leave dora out")
        from ...training._quantised import bitsandbytes

        bitsandbytes()
    if options.device_name() != "cpu" and (why := options.on_processor_because()):
        raise ValueError(f"{why}, or --device cpu")
    from ._choice import choose

    choose(options, 0)
