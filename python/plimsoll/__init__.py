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

from . import store
from ._core import (Eviction, FeaturePlan, Finding, Ledger, LimitCandidate, LimitChange, LimitReport, PoolState,
                    PressureReport, SlabPlan)
from ._core import version as __version__
from .cli._program import evaluate, export, info, plan, resume, train
from .data._data import Batch, Loader, LoaderState, SampleOrder, Split
from .data._dataset import import_dataset
from .data._features import FeatureStore, FeatureWriter
from .data._graphs import GraphBatch, GraphBatches, GraphSet, import_can, import_graphs
from .data._image_processor import image_processor
from .data._image_set import ImageBatch, ImageBatches, ImageBatchRow, ImageRow, ImageSet, decode_image, resize_image
from .data._token_set import TokenBatch, TokenBatches, TokenSet
from .data.importers._chat_import import import_chat
from .data.importers._vision_import import import_vision
from .errors import (BudgetExceeded, CorruptError, InternalError, MemoryPressure, NotFoundError,
                     PressureWarning)
from .integrations._mlflow import log_to_mlflow
from .memory._adopt import adopt
from .memory._buffers import Columns
from .memory._garbage import clean_up
from .memory._memory import Governor, Lease, format_bytes, limits, parse_bytes
from .recipes.cosir._pairs_import import import_pairs
from .rows._embedding import (SGD, Adagrad, Adam, AdamW, AdamWFresh, EmbeddingStore, Normal, RowAdagrad,
                              Rows, Uniform, Zeros)
from .run._run import Run
from .run._runs import continue_run, limit, pause, report, status, stop, why
from .training._checkpoint import load_checkpoint, save_checkpoint
from .training._cross_entropy import linear_cross_entropy
from .training._plan import BatchPlan, MemoryBudget, plan_batch
from .training._step import TrainingStep
from .training._streamed import StreamedWeights, stream_frozen
from .watch._children import answer_parent as _answer_parent
from .watch._memory_summary import memory_summary
from .watch._watch import Watch

__all__ = [
    "Adagrad", "Adam", "AdamW", "AdamWFresh", "Batch", "BatchPlan", "BudgetExceeded", "Columns",
    "CorruptError", "EmbeddingStore", "Eviction", "FeaturePlan", "FeatureStore", "FeatureWriter", "Finding", "Governor",
    "GraphBatch", "GraphBatches", "GraphSet", "ImageBatch", "ImageBatchRow", "ImageBatches", "ImageRow", "ImageSet", "InternalError", "Lease", "Ledger", "LimitCandidate",
    "LimitChange", "LimitReport", "Loader", "LoaderState", "MemoryBudget", "MemoryPressure", "Normal",
    "NotFoundError", "PoolState", "PressureReport", "PressureWarning", "RowAdagrad", "Rows", "Run",
    "SGD", "SampleOrder",
    "SlabPlan", "Split", "StreamedWeights", "TokenBatch", "TokenBatches", "TokenSet", "TrainingStep", "Uniform",
    "Watch", "Zeros", "__version__", "adopt",
    "clean_up", "continue_run", "decode_image", "evaluate", "export",
    "format_bytes", "image_processor", "import_can", "import_chat", "import_dataset",
    "import_graphs", "import_pairs", "import_vision", "info", "limit", "limits", "linear_cross_entropy", "load_checkpoint", "log_to_mlflow", "memory_summary",
    "parse_bytes", "pause", "plan", "plan_batch", "report", "resize_image", "resume", "save_checkpoint", "status", "stop", "store",
    "stream_frozen", "train", "why",
]

_answer_parent()  # In a worker that was started afresh, where its parent watches.
