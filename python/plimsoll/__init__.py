# SPDX-License-Identifier: Apache-2.0
"""Plimsoll: trains on data many times larger than memory, inside one stated memory limit.

    Run                            a training run around a PyTorch loop of your own: the limit, commits,
                                   resumption bit for bit, stop, pause, status (needs torch)
    Governor                       the limit, and who holds what of it
    EmbeddingStore, Rows           one trainable row per id, on disk
    AdamW, AdamWFresh, Adam,       how rows are updated
    Adagrad, RowAdagrad, SGD
    Zeros, Normal, Uniform         how they begin
    FeatureStore, FeatureWriter    read-only named columns per id
    Loader, Split, SampleOrder     batches in a seeded order
    import_can, GraphSet           graphs of CAN-bus frames, and batches of them
    import_chat, TokenSet          chats as token ids, and batches of them (needs tokenizers, jinja2)
    import_vision, ImageSet        messages with images, which stay encoded
    import_pairs                   features of images and captions, for the recipe cosir (needs torch, transformers)
    decode_image, resize_image     a JPEG, PNG or WebP as Pillow has it
    image_processor                a processor of transformers, the same bits sooner (needs transformers, Pillow)
    import_dataset                 a dataset of fixed-shape arrays becomes a FeatureStore
    plan, train, resume,           whole recipes (need torch)
    evaluate, export
    status, why, report, stop,     what is asked of a run that trains elsewhere, or has ended
    pause, continue_run, limit
    store                          tools for stores: info, verify, export, import_rows, compact
    plan_batch, BatchPlan          the largest batch that fits, before the first step (needs torch)
    adopt                          a model made before the governor is leased from it (needs torch)
    save_checkpoint,               model, optimizer and random states, whole or not there
    load_checkpoint
    linear_cross_entropy           the loss of a language model's head without its logits
    stream_frozen                  frozen weights of a model stay on disk, and are read ahead of use
    Tiled                          a module applied to tiles of a batch, which ranks may share
    TrainingStep                   a step that survives a refusal of memory, or leaves no trace
    Watch                          whose memory grows in a loop of your own, and whether it is a leak
    clean_up                       gives back what nobody uses, with a Governor or without
    memory_summary                 who holds how much of this process's memory, and what would help
    info, limits, parse_bytes, format_bytes
    log_to_mlflow                  a run's parameters and metrics, through MLflow's own library
    plimsoll.plots                 plots of a run of can-kd, through matplotlib
    plimsoll.recipes               recipes of your own, which the program then trains by name
    plimsoll.compat                TrainableEmbeddingManager and FeatureManager, as they were called; KD-GAT's options

`import plimsoll` works without torch. With a Governor and torch, in either order, tensors are leased
as well. Errors are in plimsoll.errors.
"""
from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from ._core import version as __version__  # noqa: F401  In __all__, which is made below.

# Each name is imported when it is asked for: `plimsoll status` needs nearly none of them. Type checkers read __init__.pyi.
_NAMES = {
    "_core": "Eviction FeaturePlan Finding Ledger LimitCandidate LimitChange LimitReport PoolState PressureReport SlabPlan",
    "cli._program": "evaluate export info plan resume train",
    "data._data": "Batch Loader LoaderState SampleOrder Split",
    "data._dataset": "import_dataset",
    "data._features": "FeatureStore FeatureWriter",
    "data._graphs": "GraphBatch GraphBatches GraphSet import_can import_graphs",
    "data._image_processor": "image_processor",
    "data._image_set": "ImageBatch ImageBatchRow ImageBatches ImageRow ImageSet decode_image resize_image",
    "data._token_set": "TokenBatch TokenBatches TokenSet",
    "data.importers._chat_import": "import_chat",
    "data.importers._vision_import": "import_vision",
    "errors": "BudgetExceeded CorruptError InternalError MemoryPressure NotFoundError PressureWarning",
    "integrations._mlflow": "log_to_mlflow",
    "memory._adopt": "adopt",
    "memory._buffers": "Columns",
    "memory._garbage": "clean_up",
    "memory._memory": "Governor Lease format_bytes limits parse_bytes",
    "ranks._tiled": "Tiled",
    "recipes.cosir._pairs_import": "import_pairs",
    "rows._embedding": "Adagrad Adam AdamW AdamWFresh EmbeddingStore Normal RowAdagrad Rows SGD Uniform Zeros",
    "run._run": "Run",
    "run._runs": "continue_run limit pause report status stop why",
    "training._checkpoint": "load_checkpoint save_checkpoint",
    "training._cross_entropy": "linear_cross_entropy",
    "training._plan": "BatchPlan MemoryBudget plan_batch",
    "training._step": "TrainingStep",
    "training._streamed": "StreamedWeights stream_frozen",
    "watch._memory_summary": "memory_summary",
    "watch._watch": "Watch",
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", "store", *_PLACES])


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        value = getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    elif not name.startswith("__") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "PLIMSOLL_WATCH_BOARD" in os.environ:  # In a worker that was started afresh, where its parent watches.
    from .watch._children import answer_parent as _answer_parent

    _answer_parent()
