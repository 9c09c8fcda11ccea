# SPDX-License-Identifier: Apache-2.0
"""plimsoll.compat: the classes of the system that Plimsoll replaces, on Plimsoll's stores; other systems' options.

    TrainableEmbeddingManager   one trainable row per sample
    FeatureManager              features by sample, in chunks
    EmbeddingInitializer        first rows from features, clusters or earlier rows
    EmbeddingScheduler          constraints and regularisers by epoch
    PRESETS, preset             settings by memory size
    from_kd_gat, Converted      a configuration of KD-GAT as options of the recipe can-kd
    PipelineConfig              the same, as an object with KD-GAT's defaults
    compute_batch_size, log_memory_state
                                KD-GAT's pipeline.memory: the largest batch size, and the memory in use
    MemoryMonitorCallback       for Lightning: logs memory after each epoch
    MemoryCleanupCallback, create_memory_logging_callback
                                for Hugging Face: frees unused memory every n steps; a log and a summary

The names and arguments are the original's; docs/compat.md says what each does now.
"""
from __future__ import annotations

from typing import Any

from . import _callbacks
from ._constraints import EmbeddingScheduler, constraint_gradient, constraint_loss
from ._embeddings import CacheView, TrainableEmbeddingManager
from ._features import FeatureManager
from ._initial import EmbeddingInitializer
from ._kd_gat import Converted, from_kd_gat
from ._pipeline import PipelineConfig, compute_batch_size, log_memory_state
from ._reports import PRESETS, preset

__all__ = [
    "CacheView", "Converted", "EmbeddingInitializer", "EmbeddingScheduler", "FeatureManager", "PRESETS",
    "PipelineConfig", "TrainableEmbeddingManager", "compute_batch_size", "constraint_gradient", "constraint_loss",
    "from_kd_gat", "log_memory_state", "preset",
]


def __getattr__(name: str) -> Any:
    if name not in _callbacks.NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = _callbacks.make(name)
    return made
