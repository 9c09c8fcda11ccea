# SPDX-License-Identifier: Apache-2.0
# The names of __init__.py, for type checkers.
from . import store as store
from ._core import (
    Eviction as Eviction, FeaturePlan as FeaturePlan, Finding as Finding, Ledger as Ledger, LimitCandidate as LimitCandidate, LimitChange as
    LimitChange, LimitReport as LimitReport, PoolState as PoolState, PressureReport as PressureReport, SlabPlan as SlabPlan)
from .cli._program import evaluate as evaluate, export as export, info as info, plan as plan, resume as resume, train as train
from .data._data import Batch as Batch, Loader as Loader, LoaderState as LoaderState, SampleOrder as SampleOrder, Split as Split
from .data._dataset import import_dataset as import_dataset
from .data._features import FeatureStore as FeatureStore, FeatureWriter as FeatureWriter
from .data._graphs import (
    GraphBatch as GraphBatch, GraphBatches as GraphBatches, GraphSet as GraphSet, import_can as import_can, import_graphs as import_graphs)
from .data._image_processor import image_processor as image_processor
from .data._image_set import (
    ImageBatch as ImageBatch, ImageBatchRow as ImageBatchRow, ImageBatches as ImageBatches, ImageRow as ImageRow, ImageSet as ImageSet,
    decode_image as decode_image, resize_image as resize_image)
from .data._token_set import TokenBatch as TokenBatch, TokenBatches as TokenBatches, TokenSet as TokenSet
from .data.importers._chat_import import import_chat as import_chat
from .data.importers._vision_import import import_vision as import_vision
from .errors import (
    BudgetExceeded as BudgetExceeded, CorruptError as CorruptError, InternalError as InternalError, MemoryPressure as MemoryPressure,
    NotFoundError as NotFoundError, PressureWarning as PressureWarning)
from .integrations._mlflow import log_to_mlflow as log_to_mlflow
from .memory._adopt import adopt as adopt
from .memory._buffers import Columns as Columns
from .memory._garbage import clean_up as clean_up
from .memory._memory import Governor as Governor, Lease as Lease, format_bytes as format_bytes, limits as limits, parse_bytes as parse_bytes
from .ranks._tiled import Tiled as Tiled
from .recipes.cosir._pairs_import import import_pairs as import_pairs
from .rows._embedding import (
    Adagrad as Adagrad, Adam as Adam, AdamW as AdamW, AdamWFresh as AdamWFresh, EmbeddingStore as EmbeddingStore, Normal as Normal,
    RowAdagrad as RowAdagrad, Rows as Rows, SGD as SGD, Uniform as Uniform, Zeros as Zeros)
from .run._run import Run as Run
from .run._runs import continue_run as continue_run, limit as limit, pause as pause, report as report, status as status, stop as stop, why as why
from .training._checkpoint import load_checkpoint as load_checkpoint, save_checkpoint as save_checkpoint
from .training._cross_entropy import linear_cross_entropy as linear_cross_entropy
from .training._plan import BatchPlan as BatchPlan, MemoryBudget as MemoryBudget, plan_batch as plan_batch
from .training._step import TrainingStep as TrainingStep
from .training._streamed import StreamedWeights as StreamedWeights, stream_frozen as stream_frozen
from .watch._memory_summary import memory_summary as memory_summary
from .watch._watch import Watch as Watch

__version__: str
