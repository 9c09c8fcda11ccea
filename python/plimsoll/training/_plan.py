# SPDX-License-Identifier: Apache-2.0
"""plan_batch: the largest batch whose training step fits, before the first step is trained.

Threads: the thread that trains.
Memory:  the measured steps themselves, 6 MiB of events, and state kept on disk (_plan_state.py).
"""
from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from .. import _core
from ..core import _torch_gate
from ..core._arrays import byte_size
from ..core._folders import replaced
from ..errors import BudgetExceeded
from ..memory._memory import Governor, format_bytes
from ..memory._refusal import Refusal, unless_refused
from ..memory._scratch import scratch_folder
from . import _plan_static
from ._plan_state import TrainingState, in_memory

_MIB = 1 << 20
_PLANS_KEPT = 256  # Most files of plans in the cache directory.
_KEPT_ROOM = 1.05  # A cached plan is replaced if there is so much more room now.


@dataclasses.dataclass
class MemoryBudget:
    """A plan with the fields of KD-GAT's `compute_batch_size`. Sizes are in MiB, shares from 0 to 1.

    total_gpu_mb:    the memory limit of the planned device; here, of the process.
    cuda_context_mb: memory of the process before its first tensor.
    """

    total_gpu_mb: float
    cuda_context_mb: float
    model_params_mb: float
    embedding_mb: float
    optimizer_mb: float
    gradient_mb: float
    activation_mb: float
    teacher_mb: float
    per_graph_mb: float
    available_for_data_mb: float
    recommended_batch_size: int
    target_utilization: float
    estimation_mode: str
    warnings: list[str]

    @property
    def static_memory_mb(self) -> float:
        """Parameters, embeddings, optimizer states, gradients, teacher and context."""
        return (self.cuda_context_mb + self.model_params_mb + self.embedding_mb
                + self.optimizer_mb + self.gradient_mb + self.teacher_mb)

    def __str__(self) -> str:
        return (f"MemoryBudget(total={self.total_gpu_mb:.0f}MB "
                f"static={self.static_memory_mb:.0f}MB [params={self.model_params_mb:.1f} "
                f"embed={self.embedding_mb:.1f} opt={self.optimizer_mb:.1f} "
                f"grad={self.gradient_mb:.1f} teacher={self.teacher_mb:.1f}] "
                f"activation={self.activation_mb:.1f}MB per_graph={self.per_graph_mb:.4f}MB "
                f"available={self.available_for_data_mb:.0f}MB "
                f"batch_size={self.recommended_batch_size} mode={self.estimation_mode})")


@dataclasses.dataclass
class BatchPlan:
    """The result of plan_batch(). Sizes are in bytes; str() is a table."""

    batch_size: int
    label: str
    """"exact": a real step of this size allocated, block by block, what steps of two or more other sizes predicted, or what
    a second step of this size did. "bounded": a real step fitted, but another allocated differently. "estimate": no step was run."""
    peak_bytes: int
    """Highest sum of tensors during a step, as the arena counts them."""
    leased_bytes: int
    """Bytes to reserve for these tensors, the arena's cache and partly used pages included."""
    available_bytes: int
    bytes_per_row: int
    operator: str
    """The operator that allocates at the peak: "aten::addmm"."""
    phase: str
    parts: dict[str, int]
    """The peak by holder: static, gradients, activations, optimizer, temporaries, other threads."""
    step_seconds: float
    at_most_rows: bool
    """Whether more rows than max_batch_size would fit."""
    larger_rows: int
    """A batch size a fifth larger, rounded up to the next multiple."""
    larger_leased_bytes: int
    """The bytes predicted for `larger_rows`."""
    traced_rows: list[int]
    verified: list[dict[str, Any]]
    advice: str
    held: dict[str, int]
    """The static part by holder: parameters, embeddings, optimizer, buffers, teacher."""
    limit_bytes: int
    baseline_bytes: int
    warnings: list[str] = dataclasses.field(default_factory=list)
    from_cache: bool = False
    device: dict[str, Any] | None = None
    """The step's predicted memory on `device`: name, limit_bytes, reserved_bytes, bound_bytes (reserved_bytes and
    room for the device's own kernels, at most limit_bytes), allocated_bytes, fragmentation_bytes (reserved and
    free at the peak), static_bytes (reserved from step to step), steady (a repeated step reserves no more)."""

    def memory_budget(self) -> MemoryBudget:
        """Returns the plan with the fields of KD-GAT's `compute_batch_size`."""
        held, parts = self.held, self.parts
        moving = parts["activations"] + parts["temporaries"] + parts["other threads"]
        embeddings = held["embeddings"]

        def mb(value: int) -> float:
            return value / _MIB

        return MemoryBudget(
            total_gpu_mb=mb(self.limit_bytes), cuda_context_mb=mb(self.baseline_bytes),
            model_params_mb=mb(held["parameters"] + held["buffers"] - embeddings),
            embedding_mb=mb(embeddings), optimizer_mb=mb(held["optimizer"]),
            gradient_mb=mb(held["gradients"]), activation_mb=mb(moving), teacher_mb=mb(held["teacher"]),
            per_graph_mb=mb(self.bytes_per_row),
            available_for_data_mb=mb(self.available_bytes - self.parts["static"]),
            recommended_batch_size=self.batch_size,
            target_utilization=self.peak_bytes / max(1, self.available_bytes),
            estimation_mode="static" if self.label == "estimate" else "measured",
            warnings=list(self.warnings))

    def __str__(self) -> str:
        lines = [f"batch size {self.batch_size} ({self.label}): peak {format_bytes(self.peak_bytes)}"
                 f" of {format_bytes(self.available_bytes)} for tensors"]
        for name, size in self.parts.items():
            if size > 0:
                lines.append(f"  {name:<14}{format_bytes(size):>12}  {100 * size / max(1, self.peak_bytes):5.1f} %")
        if self.operator:
            lines.append(f"  at the peak: {self.operator} in {self.phase}")
        if self.bytes_per_row:
            lines.append(f"  one row more: {format_bytes(self.bytes_per_row)}")
        lines.append(f"  {self.larger_rows} rows: {format_bytes(self.larger_leased_bytes)} to admit, as predicted")
        lines += [f"  {self.device_text()}"] if self.device else []
        lines += [f"  {self.advice}"] if self.advice else []
        lines += [f"  warning: {text}" for text in self.warnings]
        return "\n".join(lines)

    def device_text(self) -> str:
        """Returns a line about `device`; "" where there is none."""
        if not self.device:
            return ""
        on = {name: format_bytes(size) if name.endswith("_bytes") else size for name, size in self.device.items()}
        return (f"{on['name']}: {on['reserved_bytes']} reserved, {on['allocated_bytes']} allocated, {on['fragmentation_bytes']} fragments; "
                f"{on['bound_bytes']} of its {on['limit_bytes']} with room for its kernels")


def plan_batch(step: Callable[[int], Any] | None = None, *, model: Any = None,
               optimizer: Any = None, teacher: Any = None, others: Iterable[Any] = (),
               governor: Governor | None = None, available: int | str = "",
               min_batch_size: int = 1, max_batch_size: int = 8192, multiple_of: int = 1,
               extent: Callable[[int], tuple[int, int]] | None = None, mode: str = "measured",
               sample: Any = None, key: str = "",
               directory: str | os.PathLike[str] | None = None, device: str = "cpu",
               device_memory_limit: int | str = "") -> BatchPlan:
    """Returns the largest batch size whose training step fits into the memory left for tensors.

        def step(batch_size):                       # One whole step on the largest samples.
            optimizer.zero_grad()
            loss(model(x_of(batch_size)), y_of(batch_size)).backward()
            optimizer.step()

        plan = plimsoll.plan_batch(step, model=model, optimizer=optimizer)
        print(plan)                                 # The size, what holds the peak, what would help.

    Real steps of a few small sizes are traced and replayed at larger ones. Then a step of the planned size is run
    (docs/decisions/0011-plans-from-replayed-traces.md). Afterwards modes, parameters, buffers, gradients,
    optimizer states and random states are bit for bit as before. Anything else that `step` changes has to be in
    `others`; so have frozen parameters that it writes, where they outnumber the trained ones.

    step:      runs one whole training step of the given batch size. Its result is ignored.
    model:     a torch.nn.Module or several; optimizer: a torch.optim.Optimizer or several.
    teacher:   a frozen module, counted separately in the plan.
    others:    schedulers, GradScaler, modules: anything with state_dict() and load_state_dict().
    available: bytes for tensors; "": all that the governor's limit leaves.
    extent:    for graphs: batch size -> (nodes, edges) of the largest such batch that `step` runs.
    mode:      "measured"; or "static", a quick conservative estimate from shapes. "static" runs no step and
               needs `model` and `sample`: a tensor of one row, [1, …], or a tuple of such tensors.
    key:       names everything that shapes the step beside model and optimizer (data set, loss, sample shape).
               With a key the plan is cached on disk. A later process with the same key, model, options,
               versions and limit returns it without a step.
    directory: folder of the cache and of the state kept meanwhile; default: $PLIMSOLL_CACHE_DIR or
               ~/.cache/plimsoll.
    device:    "cuda" or "simulated": plans also for such a device's caching allocator. The step still runs on
               the CPU, so the label is "bounded" at best. The device's context and its libraries'
               workspaces are not counted: leave them out of the limit.
    device_memory_limit: most that the device's allocator may reserve: "8GiB"; for "cuda" also "80%".
               Default for "cuda": the free memory.
    Errors:    BudgetExceeded, with a sufficient limit, where not even min_batch_size fits; ValueError (options;
               a layer unknown to mode="static", by name); errors of `step`, except refusals of memory.
    """
    extension = _torch_gate.load()
    governor = governor or Governor.current()
    if governor is None or not governor.arena_attached:
        raise ValueError("plan_batch: there is no Governor that tensors are leased from: make one "
                         "first, after importing torch: plimsoll.Governor(\"8GiB\")")
    if mode not in ("measured", "static"):
        raise ValueError(f"mode: {mode!r} is neither \"measured\" nor \"static\"")
    models, optimizers = _listed(model), _listed(optimizer)
    teachers = _listed(teacher)
    device_limit = str(device_memory_limit)
    extension.check_device(device, device_limit)
    if device != "cpu" and mode == "static":
        raise ValueError(f"device: {device!r} wants a step that is replayed; mode=\"static\" runs none")
    available_bytes = byte_size(available, "available") if available != "" else 0
    held = _held(models, optimizers, teachers, extension.block_bytes)
    if mode == "static":
        room = available_bytes or governor.tensor_room()
        found = _plan_static.estimate(models, optimizers, teachers, sample, room,
                                      min_batch_size, max_batch_size, multiple_of)
        return _finished(found, held, governor)
    if step is None:
        raise ValueError("step: plan_batch(step) wants a callable that runs one training step; "
                         "mode=\"static\" does without")
    folder = pathlib.Path(scratch_folder(directory or _cache_directory(), "directory"))
    file = None
    if key:
        options = [min_batch_size, max_batch_size, multiple_of, governor.limit_bytes,
                   available_bytes, *([device, device_limit] if device != "cpu" else [])]
        file = folder / "plans" / f"{_stable_key(key, models + teachers, optimizers, options)}.json"
        kept = _read_kept(file, available_bytes or governor.tensor_room())
        if kept is not None:
            return kept

    def on_device() -> tuple[str, str, list[tuple[int, int]]]:
        return device, device_limit, _staying(models, optimizers, teachers)

    found = _measure(extension, governor, step, TrainingState([*models, *teachers], optimizers, others,
                                                             folder, step),
                     extent, min_batch_size, max_batch_size, multiple_of, available_bytes, on_device)
    plan = _finished(found, held, governor)
    if file is not None:
        _write_kept(file, plan)
    return plan


def _measure(extension: Any, governor: Governor, step: Callable[[int], Any], state: TrainingState,
             extent: Callable[[int], tuple[int, int]] | None, least: int, most: int, multiple: int,
             available: int,
             on_device: Callable[[], tuple[str, str, list[tuple[int, int]]]]) -> dict[str, Any]:
    sizes = (lambda rows: (rows, *extent(rows))) if extent else None
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # Collections run between steps only, so that no trace has one.
    try:
        attempt = attempted(step)
        # Optimizer states and kernels' caches exist from here on.
        refusal = attempt(min(most, max(least, 8)))
        if refusal:
            refusal = attempt(least)
        if refusal:
            room = governor.tensor_room()
            raise BudgetExceeded(
                f"not even a step of {least} rows fits: {refusal}", "tensors", 0, room,
                governor.limit_bytes, None, "raise the limit, or lower min_batch_size")
        return extension.plan_batch(governor._core, attempt, sizes, least, most, multiple, available,
                                    *on_device())
    finally:
        if collecting:
            gc.enable()
        try:
            state.put_back()
        finally:
            state.close()


def attempted(step: Callable[[int], Any]) -> Callable[[int], Refusal | None]:
    """Wraps `step` for the planner: the result is None after a success, else the refusal of memory.

    Garbage is collected between steps, so that no collection runs inside one.
    """

    def attempt(rows: int) -> Refusal | None:
        _, refusal = unless_refused(lambda: step(rows))
        gc.collect()
        return refusal

    return attempt


def _finished(found: dict[str, Any], held: dict[str, int], governor: Governor) -> BatchPlan:
    ledger = governor.ledger()
    return BatchPlan(held=held, limit_bytes=ledger.limit_bytes,
                     baseline_bytes=ledger.baseline_bytes, **found)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _held(models: list[Any], optimizers: list[Any], teachers: list[Any],
          block_bytes: Callable[[int], int]) -> dict[str, int]:
    """Returns the bytes that stay from step to step, by kind. Shared storages count once."""
    import torch

    seen: set[int] = set()

    def size(tensors: Iterable[Any]) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += block_bytes(storage.nbytes()) if storage.nbytes() else 0
        return total

    embeddings = size(part.weight for model in models for part in model.modules()
                      if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)))
    parameters = size(p for model in models for p in in_memory(model.parameters())) + embeddings
    trained = [p for optimizer in optimizers for group in optimizer.param_groups
               for p in group["params"]]
    parameters += size(trained)
    return {
        "parameters": parameters, "embeddings": embeddings,
        "buffers": size(b for model in models for b in model.buffers()),
        "optimizer": max(size(v for optimizer in optimizers for values in optimizer.state.values()
                              for v in values.values() if isinstance(v, torch.Tensor)),
                         sum(_plan_static.states_of(o)[0] for o in optimizers)),
        "gradients": sum(block_bytes(p.numel() * p.element_size()) for p in
                         {id(p): p for p in trained}.values() if p.requires_grad),
        "teacher": size(t for teacher in teachers
                        for t in [*in_memory(teacher.parameters()), *teacher.buffers()]),
    }


def _staying(models: list[Any], optimizers: list[Any],
             teachers: list[Any]) -> list[tuple[int, int]]:
    """Returns (address, bytes) of every storage that stays from step to step: parameters, buffers, states."""
    import torch

    tensors = [t for module in models + teachers for t in [*in_memory(module.parameters()), *module.buffers()]]
    for optimizer in optimizers:
        tensors += [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [v for values in optimizer.state.values() for v in values.values()
                    if isinstance(v, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return [(address, size) for address, size in storages.items() if size]


# ---- Answers kept on disk ----


def _cache_directory() -> pathlib.Path:
    given = os.environ.get("PLIMSOLL_CACHE_DIR", "")
    if given:
        return pathlib.Path(given)
    base = os.environ.get("XDG_CACHE_HOME", "") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "plimsoll"


def _stable_key(key: str, models: list[Any], optimizers: list[Any], options: list[Any]) -> str:
    """Returns a key of model, options and versions that is the same in every process: it uses no hash() (K6)."""
    import torch

    described = {
        "key": key, "options": options, "plimsoll": _core.version, "torch": torch.__version__,
        "python": list(sys.version_info[:2]), "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "models": [str(model) for model in models],
        "parameters": [[(name, list(p.shape), str(p.dtype), p.requires_grad)
                        for name, p in model.named_parameters()] for model in models],
        "optimizers": [[type(o).__name__, [{k: repr(v) for k, v in group.items() if k != "params"}
                                           for group in o.param_groups]] for o in optimizers],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _read_kept(file: pathlib.Path, available: int) -> BatchPlan | None:
    try:
        plan = BatchPlan(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        warnings.warn(f"{file}: not a plan of this version ({error}); it is made again",
                      stacklevel=4)
        return None
    if plan.leased_bytes > available or available > _KEPT_ROOM * plan.available_bytes:
        return None  # There is less room now, or so much more that a larger batch may fit.
    plan.from_cache = True
    return plan


def _write_kept(file: pathlib.Path, plan: BatchPlan) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with replaced(file, f"{file.name}.{os.getpid()}", durable=False) as partial:
        partial.write_text(json.dumps(dataclasses.asdict(plan)), encoding="utf-8")
    kept = sorted(file.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)
    for old in kept[:-_PLANS_KEPT]:
        old.unlink(missing_ok=True)
