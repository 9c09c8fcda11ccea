# SPDX-License-Identifier: Apache-2.0
"""KD-GAT's pipeline.memory and PipelineConfig: the largest batch size, and the settings it depends on.

Threads: the thread that trains.   Memory: what plan_batch() takes; static: a forward of three graphs.
"""
from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

from ..core import _torch_gate
from ..memory._memory import Governor
from ..training._plan import MemoryBudget, plan_batch
from ..training._plan_static import states_of
from ._kd_gat import Converted, _check_known, _of_config, from_kd_gat
from ._table import governor_for

_MIB = 1 << 20
_CAUTION = 1.25
_DEFAULTS = {"gradient_checkpointing": True, "offload_teacher_to_cpu": False, "use_teacher_cache": True,
             "clear_cache_every_n": 100, "optimize_batch_size": True, "memory_estimation": "measured",
             "safety_factor": 0.5, "batch_size": 4096}


class PipelineConfig:
    """A namespace of KD-GAT's settings. Those of its memory page have defaults.

        config = PipelineConfig(batch_size=2048, lr=0.001)
        plimsoll.train("can-kd", data="graphs", out="runs/a", **config.converted().options)

    Errors: ValueError naming a setting that KD-GAT does not have.
    """

    def __init__(self, **settings: Any) -> None:
        for key in settings:
            _check_known(key, "PipelineConfig")
        self.__dict__.update({**_DEFAULTS, **settings})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PipelineConfig:
        """Reads a .json file, flat or nested. Errors: ValueError; OSError."""
        return cls(**{key: one.text for key, one in _of_config(path).items()})

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings."""
        return dict(self.__dict__)

    def converted(self) -> Converted:
        """Converts the settings to options of the recipe can-kd. Errors: ValueError naming a setting whose value it does not accept."""
        return from_kd_gat(self.to_dict())

    def __setattr__(self, key: str, value: Any) -> None:
        _check_known(key, "PipelineConfig")
        self.__dict__[key] = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipelineConfig) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PipelineConfig({', '.join(f'{key}={value!r}' for key, value in self.__dict__.items())})"


def compute_batch_size(model: Any, sample_graph: Any, device: Any = "cpu", mode: str = "measured",
                       target_utilization: float = 0.7, min_batch_size: int = 1, max_batch_size: int = 8192, *,
                       optimizer: Any = None, teacher: Any = None, governor: Governor | None = None) -> MemoryBudget:
    """Returns the largest number of graphs per training step, found by plan_batch(), as KD-GAT's MemoryBudget.

        budget = compute_batch_size(model, dataset[0], max_batch_size=config.batch_size)
        loader = DataLoader(dataset, batch_size=budget.recommended_batch_size)

    A step is a forward of copies of the sample, the mean of the outputs as loss, backward, and the optimizer's step.
    "measured" runs such steps; "static" runs one forward of three graphs and computes the rest.

    Args:
        sample_graph: the largest graph to expect: an object with x, edge_index and more tensors (of PyG, say), or a
            tensor, tuple or dict of tensors of one row [1, …].
        device: "cpu"; or "cuda", to plan for such a device's allocator, too.
        target_utilization: the share of the memory left for tensors that may be used.
        governor: None: the process's governor, or a new one.

    Errors: ValueError (an argument); BudgetExceeded when not even min_batch_size fits.
    """
    torch = _torch_gate.torch_if_imported()
    if torch is None:
        raise ValueError("compute_batch_size: import torch first")
    if mode not in ("measured", "static"):
        raise ValueError(f'mode: {mode!r} is neither "measured" nor "static"')
    if not 0 < target_utilization <= 1:
        raise ValueError(f"target_utilization: {target_utilization} is not in (0, 1]")
    if not 1 <= min_batch_size <= max_batch_size:
        raise ValueError(f"min_batch_size, max_batch_size: there is no size from {min_batch_size} to {max_batch_size}")
    governor = governor_for(governor)
    room = int(target_utilization * governor.tensor_room())
    if mode == "static":
        return _static(torch, model, sample_graph, optimizer, teacher, room, target_utilization,
                       (min_batch_size, max_batch_size), governor)

    def step(graphs: int) -> None:
        batch = _copies(torch, sample_graph, graphs)
        if teacher is not None:
            with torch.no_grad():
                _call(teacher, batch)
        losses = [one.float().mean() for one in _floats(torch, _call(model, batch)) if one.requires_grad]
        if losses:
            sum(losses).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        else:
            model.zero_grad(set_to_none=True)

    plan = plan_batch(step, model=model, optimizer=optimizer, teacher=teacher, governor=governor, available=room,
                      min_batch_size=min_batch_size, max_batch_size=max_batch_size, device=str(device).split(":")[0])
    return dataclasses.replace(plan.memory_budget(), target_utilization=target_utilization)


def log_memory_state(label: str = "") -> str:
    """Prints and returns one line on used and free memory (Governor.log_memory_state())."""
    return governor_for(None).log_memory_state(label)


def _call(model: Any, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _floats(torch: Any, out: Any) -> Iterable[Any]:
    """Yields the tensors of floats in a model's output."""
    if isinstance(out, torch.Tensor):
        yield from [out] if out.is_floating_point() else []
    elif isinstance(out, Mapping):
        for one in out.values():
            yield from _floats(torch, one)
    elif isinstance(out, (tuple, list)):
        for one in out:
            yield from _floats(torch, one)


class _Graphs:
    """A batch of copies of one graph: the sample's tensors joined, batch, ptr, num_graphs and num_nodes."""

    batch: Any
    ptr: Any
    num_graphs: int
    num_nodes: int

    def to(self, *_: Any, **__: Any) -> _Graphs:
        return self


def _copies(torch: Any, sample: Any, count: int) -> Any:
    """Returns `count` copies of the sample as one batch."""
    if isinstance(sample, torch.Tensor):
        return sample.expand(count, *sample.shape[1:]).contiguous()
    if isinstance(sample, dict):
        return {name: _copies(torch, one, count) for name, one in sample.items()}
    if isinstance(sample, (tuple, list)):
        return tuple(_copies(torch, one, count) for one in sample)
    if not (hasattr(sample, "edge_index") and hasattr(sample, "x")):
        raise ValueError(f"sample_graph: a {type(sample).__name__} has no x and edge_index, and is no tensor, tuple or "
                         "dict of tensors")
    if type(sample).__module__.startswith("torch_geometric"):
        from torch_geometric.data import Batch
        return Batch.from_data_list([sample] * count)
    batch, nodes = _Graphs(), len(sample.x)
    named = sample.to_dict() if hasattr(sample, "to_dict") else {
        name: getattr(sample, name) for name in (*getattr(sample, "__slots__", ()), *getattr(sample, "__dict__", ()))}
    for name, value in named.items():
        if name.startswith("_") or name in ("batch", "ptr", "num_graphs", "num_nodes"):
            continue
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            setattr(batch, name, value)
            continue
        if name == "edge_index":
            joined = torch.cat([tensor + k * nodes for k in range(count)], dim=1)
        else:
            joined = tensor.reshape(1).expand(count).clone() if tensor.ndim == 0 else torch.cat([tensor] * count)
        setattr(batch, name, joined)
    batch.batch = torch.arange(count).repeat_interleave(nodes)
    batch.ptr = torch.arange(count + 1) * nodes
    batch.num_graphs, batch.num_nodes = count, count * nodes
    return batch


def _saved(torch: Any, model: Any, sample: Any, graphs: int) -> int:
    """Returns the bytes of a batch and of the tensors that its forward saves for backward."""
    own = {one.untyped_storage().data_ptr() for one in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        batch = _copies(torch, sample, graphs)
        out = list(_floats(torch, _call(model, batch)))
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else (
        [batch] if isinstance(batch, torch.Tensor) else vars(batch).values())
    for one in [*out, *values]:
        if isinstance(one, torch.Tensor):
            pack(one)
    return sum(kept.values())


def _static(torch: Any, model: Any, sample: Any, optimizer: Any, teacher: Any, room: int, share: float,
            sizes: tuple[int, int], governor: Governor) -> MemoryBudget:
    def size_of(tensors: Iterable[Any]) -> int:
        return sum(one.numel() * one.element_size() for one in tensors)

    state = {name: one.clone() for name, one in model.named_buffers()}  # BatchNorm's move in a forward.
    one, two = (_saved(torch, model, sample, graphs) for graphs in (1, 2))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(state[name])
    embeddings = size_of(part.weight for part in model.modules() if isinstance(part, torch.nn.Embedding))
    parameters = size_of([*model.parameters(), *model.buffers()])
    trained = size_of(p for p in model.parameters() if p.requires_grad)
    states, warning = (2 * trained, "no optimizer was given: it is taken for Adam") if optimizer is None else (
        states_of(optimizer))
    teachers = 0 if teacher is None else size_of([*teacher.parameters(), *teacher.buffers()])
    per_graph = max(1.0, (two - one) * _CAUTION)
    constant = max(0, 2 * one - two) * _CAUTION
    left = room - parameters - trained - states - teachers - constant
    least, most = sizes
    graphs = max(least, min(most, int(left // per_graph)))
    warnings = [warning] if warning else []
    if left < least * per_graph:
        warnings.append(f"the estimate for {least} graphs is above what is available: measure it")
    ledger = governor.ledger()
    return MemoryBudget(
        total_gpu_mb=ledger.limit_bytes / _MIB, cuda_context_mb=ledger.baseline_bytes / _MIB,
        model_params_mb=(parameters - embeddings) / _MIB, embedding_mb=embeddings / _MIB, optimizer_mb=states / _MIB,
        gradient_mb=trained / _MIB, activation_mb=(constant + per_graph * graphs) / _MIB, teacher_mb=teachers / _MIB,
        per_graph_mb=per_graph / _MIB, available_for_data_mb=max(0.0, left) / _MIB, recommended_batch_size=graphs,
        target_utilization=share, estimation_mode="static", warnings=warnings)
