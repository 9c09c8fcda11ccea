# SPDX-License-Identifier: Apache-2.0
"""Plimsoll: trains on data many times larger than memory, inside one stated memory limit.

    Governor                       the limit, and who holds what of it
    EmbeddingStore, Rows           one trainable row per id, on disk
    AdamW, AdamWFresh, Adam,       how rows are updated
    Adagrad, RowAdagrad, SGD
    Zeros, Normal, Uniform         how they begin
    FeatureStore, FeatureWriter    read-only named columns per id
    Loader, Split, SampleOrder     batches in a seeded order
    import_dataset                 any Python dataset becomes a FeatureStore
    train, resume, evaluate        whole recipes (need torch)
    info, limits, parse_bytes, format_bytes
    plimsoll.compat                TrainableEmbeddingManager and FeatureManager, as they were called

`import plimsoll` works without torch. Import torch first, then make a Governor, and tensors are
leased from it as well. Errors are in plimsoll.errors.
"""
from __future__ import annotations

from ._arrays import Columns
from ._core import (Eviction, Ledger, LimitCandidate, LimitChange, LimitReport, PoolState,
                    PressureReport, SlabPlan)
from ._core import version as __version__
from ._data import Batch, Loader, LoaderState, SampleOrder, Split
from ._dataset import import_dataset
from ._embedding import (SGD, Adagrad, Adam, AdamW, AdamWFresh, EmbeddingStore, Normal, RowAdagrad,
                         Rows, Uniform, Zeros)
from ._features import FeatureStore, FeatureWriter
from ._memory import Governor, Lease, format_bytes, limits, parse_bytes
from ._program import evaluate, info, resume, train
from .errors import BudgetExceeded, CorruptError, InternalError, NotFoundError

__all__ = [
    "Adagrad", "Adam", "AdamW", "AdamWFresh", "Batch", "BudgetExceeded", "Columns", "CorruptError",
    "EmbeddingStore", "Eviction", "FeatureStore", "FeatureWriter", "Governor", "InternalError", "Lease",
    "Ledger", "LimitCandidate", "LimitChange", "LimitReport", "Loader", "LoaderState", "Normal", "NotFoundError",
    "PoolState", "PressureReport", "RowAdagrad", "Rows", "SGD", "SampleOrder", "SlabPlan", "Split",
    "Uniform", "Zeros", "__version__", "evaluate", "format_bytes", "import_dataset", "info", "limits", "parse_bytes",
    "resume", "train",
]
