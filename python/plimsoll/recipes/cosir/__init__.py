# SPDX-License-Identifier: Apache-2.0
"""The recipe `cosir`: learns one small condition vector per image-text pair, for retrieval, inside the memory limit.

    plimsoll import pairs --images captions.images --model MODEL --out DIR
    plimsoll train cosir --data DIR --out RUN --memory-limit 2GiB

A condition turns its pair's text, so that one caption can look for an image in more than one way. Conditions are rows of a
table on disk, one a training pair; features stream from a feature store.
Reading order: this file, _model.py, _losses.py, _settings.py, _train.py, _pairs.py, _evaluate.py,
_phase2.py, _plan.py, _random.py; docs/recipes/cosir.md.
import_pairs() of _pairs_import.py makes the data.

Threads: the thread that trains, and those of loader and stores.
Memory:  the slabs of features and conditions, the loader's ring, and a step's tensors.
"""
from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from .. import DeviceOptions, Recipe, option

if TYPE_CHECKING:
    from ...run._run import Run

_TEMPERATURE_LEAST = 0.025  # Below it exponentials of symmetric_info_nce() underflow.
_COUNT, _WEIGHT, _RATE = 1e12, 1e6, 1e3


@dataclasses.dataclass(kw_only=True)
class Options(DeviceOptions):
    epochs: int = option(30, "Number of passes over the training pairs", least=1, most=1e6)
    batch_size: int = option(2048, "Batch size, in pairs; auto: the largest that fits, planned once (`plimsoll plan cosir`)", least=2,
                             most=1 << 20, auto=True)
    gradient_caching: bool = option(False, "Gradient caching: encodes 512 pairs at a time, twice; less memory, the same bits",
                                    decides_bits=False)
    dim: int = option(0, "Width of the shared embedding space; 0: the width of the features", most=65536)
    label_dim: int = option(2, "Width of the trainable row (condition vector) of each pair", least=2, most=4096)
    projections: str = option("auto", "Trainable linear projections of image and text features to dim; auto: if widths differ",
                              choices=("auto", "true", "false"))
    temperature: float = option(0.07, "Softmax temperature of the contrastive loss", least=1e-6, most=1e3)
    loss_infonce: float = option(1.0, "Weight of the contrastive (InfoNCE) loss", least=0, most=_WEIGHT)
    loss_laplacian: float = option(0.7, "Weight of the Laplacian loss: close rows act alike", least=0, most=_WEIGHT)
    loss_angular: float = option(0.3, "Weight of the angular loss: rows of equal angle act alike", least=0, most=_WEIGHT)
    loss_radius: float = option(0.3, "Weight of the radius loss: a row of larger radius acts more", least=0, most=_WEIGHT)
    loss_rotation: float = option(0.3, "Weight of the rotation loss: rows a quarter turn apart act orthogonally", least=0, most=_WEIGHT)
    loss_boundary: float = option(0.0, "Weight of the boundary loss: the radius of a row stays below 10", least=0, most=_WEIGHT)
    lr: float = option(1e-5, "Learning rate of the combiner (the network that applies a row to a text)", least=0, most=_RATE)
    projection_lr: float = option(1e-3, "Learning rate of the projections", least=0, most=_RATE)
    weight_decay: float = option(0.05, "Weight decay of the combiner and the projections", least=0, most=_RATE)
    label_dtype: str = option("float32", "Number format of the rows, on disk and in memory; bfloat16 halves them",
                              choices=("float32", "bfloat16"))
    label_optimizer: str = option("adamw", "Optimizer of the rows", choices=("adamw", "adamw_fresh", "adagrad"))
    label_lr: float = option(0.1, "Learning rate of the rows", least=0, most=_RATE)
    label_weight_decay: float = option(0.05, "Weight decay of the rows", least=0, most=_RATE)
    label_init: str = option("normal", "Distribution of the rows' initial values", choices=("normal", "zeros", "uniform"))
    label_init_scale: float = option(0.1, "Scale of the rows' initial values: standard deviation (normal), half-width (uniform)", least=0,
                                     most=_WEIGHT)
    label_schedule: str = option("constant", "Schedule of label_lr over the steps", choices=("constant", "cosine"))
    label_layout: str = option("auto", "Order of a new run's rows on disk; auto: any_order if the rows fit into memory",
                               choices=("auto", "any_order", "sample_order"), decides_bits=False)
    drop_last: bool = option(False, "Last batch of an epoch is skipped when it is not full")
    holdout: int = option(-1, "Number of images (groups) held out for evaluation; -1: 5,000 pairs' worth, at most a fifth", least=-1,
                          most=_COUNT)
    eval_pairs: int = option(5000, "Number of held-out pairs evaluated, at most", most=_COUNT, decides_bits=False)
    eval_every_n_epochs: int = option(5, "Epochs between evaluations; 0: only before and after training", most=1e6, decides_bits=False)
    oracle_angles: int = option(12, "Number of angles of the grid that the oracle evaluation searches", least=1, most=3600,
                                decides_bits=False)
    phase2_epochs: int = option(0, "Number of epochs of phase 2, a classifier that predicts rows; 0: no phase 2", most=1e6, may_grow=True)
    phase2_lr: float = option(1e-5, "Learning rate of the classifier of phase 2", least=0, most=_RATE)
    cleanup_every_n_steps: int = option(0, "Steps after which what nobody uses is given back to the system; 0: after evaluations, and "
                                           "under pressure, only", most=_COUNT, decides_bits=False)
    queue_bytes: int = option(0, "Memory of the queue of batches read ahead; 0: chosen", size=True, decides_bits=False)
    store_bytes: int = option(0, "Memory of the rows (their page cache); 0: chosen", size=True, decides_bits=False)
    cache_bytes: int = option(0, "Memory of the features (their page cache); 0: chosen", size=True, decides_bits=False)
    loader_threads: int = option(2, "Number of threads that read batches", least=1, most=256, decides_bits=False)
    io_threads: int = option(8, "Number of threads that read and write rows", least=1, most=256, decides_bits=False)
    metrics_every_n_steps: int = option(10, "Steps between recorded losses", least=1, most=_COUNT, decides_bits=False)

    def on_processor_because(self) -> str:
        """Returns why the run must train on the CPU; "" where it need not."""
        return "several ranks share the tiles of a batch" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""


def before(options: Options) -> None:
    """Checks the options, and loads what a run needs. Errors: ValueError naming the option."""
    if options.temperature < _TEMPERATURE_LEAST:
        raise ValueError(f"temperature = {options.temperature} is below {_TEMPERATURE_LEAST}; raise temperature")
    if (why := options.on_processor_because()) and options.device_name() != "cpu":
        raise ValueError(f"device = {options.device}: {why}, which is for the processor; leave device out, or start one process")
    from . import _plan, _train  # noqa: F401  Their memory counts as held before the run.


def train(run: Run, options: Options) -> dict[str, Any]:
    from ._train import Training

    return Training(run, options).whole()


def evaluate(options: Options) -> dict[str, Any]:
    from ._train import evaluate_run

    return evaluate_run(options)


def plan(options: Options, device: str, device_memory_limit: str) -> dict[str, Any]:
    from ._plan import plan_run

    return plan_run(options, device, device_memory_limit)


RECIPE = Recipe(
    "cosir", "One trainable condition vector per image-text pair, for retrieval", Options, train, evaluate, plan, before=before, helped=True,
    data="Feature store to train on (plimsoll import, plimsoll synth)", choices={"gradient_caching": (True, False)},
    examples=("plimsoll train cosir --data data/ --out run/ --memory-limit 768MiB --epochs 1",
              "plimsoll train cosir --config cosir.toml --set label_dim=128 --json"),
    plan_example="plimsoll plan cosir --data data/ --memory-limit 768MiB --label-dim 128")
