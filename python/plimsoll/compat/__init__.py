# SPDX-License-Identifier: Apache-2.0
"""plimsoll.compat: the classes of the system that Plimsoll replaces, on Plimsoll's stores; other systems' options.

    TrainableEmbeddingManager   one trainable vector per sample
    FeatureManager              features by sample, in chunks
    EmbeddingInitializer        first rows from features, clusters or earlier rows
    EmbeddingScheduler          constraints and regularisers by epoch
    PRESETS, preset             settings by memory size
    from_kd_gat, Converted      a configuration of KD-GAT as options of the recipe can-kd

The names and arguments are the original's; docs/compat.md says what each does now.
"""
from __future__ import annotations

from ._constraints import EmbeddingScheduler, constraint_gradient, constraint_loss
from ._embeddings import CacheView, TrainableEmbeddingManager
from ._features import FeatureManager
from ._initial import EmbeddingInitializer
from ._kd_gat import Converted, from_kd_gat
from ._reports import PRESETS, preset

__all__ = [
    "CacheView", "Converted", "EmbeddingInitializer", "EmbeddingScheduler", "FeatureManager", "PRESETS",
    "TrainableEmbeddingManager", "constraint_gradient", "constraint_loss", "from_kd_gat", "preset",
]
