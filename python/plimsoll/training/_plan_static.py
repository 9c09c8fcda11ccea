# SPDX-License-Identifier: Apache-2.0
"""plan_batch(mode="static"): a conservative estimate from shapes; no operator computes anything.

The model's forward runs on torch's meta device, where tensors have shapes and no bytes. What autograd
saves for backward is counted at two batch sizes; the rest (parameters, gradients, states) is known.

Threads: any.   Memory: none of the model's; shapes only.
"""
from __future__ import annotations

from typing import Any

_STATES = {  # Number of states of a parameter's size, by optimizer; others count as three.
    "SGD": 0, "Adagrad": 1, "RMSprop": 1, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2,
    "Adadelta": 2, "SparseAdam": 2,
}
_STATES_UNKNOWN = 3
_CAUTION = 1.25  # For kernels' scratch, alignment, and backward's own tensors.


def states_of(optimizer: Any) -> tuple[int, str]:
    """Returns the bytes of an optimizer's states once they exist, and a warning where its kind is unknown."""
    name = type(optimizer).__name__
    warning = ""
    if name not in _STATES:
        warning = (f"optimizer {name}: not known, taken for {_STATES_UNKNOWN} states a parameter")
    total = 0
    for group in optimizer.param_groups:
        count = _STATES.get(name, _STATES_UNKNOWN)
        count += 1 if group.get("amsgrad") else 0
        count += 1 if name in ("SGD", "RMSprop") and group.get("momentum", 0) else 0
        count += 1 if name == "RMSprop" and group.get("centered") else 0
        total += sum(count * p.numel() * p.element_size() for p in group["params"]
                     if p.requires_grad)
    return total, warning


def estimate(models: list[Any], optimizers: list[Any], teachers: list[Any], sample: Any, room: int,
             least: int, most: int, multiple: int) -> dict[str, Any]:
    """Returns the fields of a BatchPlan that do not depend on the process. Errors: ValueError."""
    if len(models) != 1 or sample is None:
        raise ValueError("mode=\"static\" wants one model, and sample= a tensor or tuple of tensors "
                         "of one row, [1, …]")
    if not (1 <= least <= most and multiple >= 1):
        raise ValueError(f"a batch between {least} and {most} rows, in multiples of {multiple}: no such size: "
                         "min_batch_size, max_batch_size")
    model, notes = models[0], []
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    states = 0
    for optimizer in optimizers:
        size, warning = states_of(optimizer)
        states += size
        notes += [warning] if warning else []
    if not optimizers:
        notes.append("no optimizer was given: its states are not counted")
    teacher = sum(t.numel() * t.element_size() for one in teachers
                  for t in [*one.parameters(), *one.buffers()])
    low, high = _forward_bytes(model, sample, 8), _forward_bytes(model, sample, 16)
    for one in teachers:  # Its activations are freed operator by operator; its outputs stay.
        try:
            low += _forward_bytes(one, sample, 8, saved=False)
            high += _forward_bytes(one, sample, 16, saved=False)
        except (TypeError, ValueError):
            notes.append(f"teacher {type(one).__name__}: does not take the sample, so its outputs "
                         "are not counted")
    per_row = max(1.0, (high - low) / 8 * _CAUTION)
    constant = max(0, low - (high - low)) * _CAUTION
    static = parameters + buffers + states + teacher
    fixed = static + gradients + constant
    rows = int(min(most, (room - fixed) // per_row)) if room > fixed else 0
    if rows < least:
        rows = least
        notes.append(f"the estimate for {least} rows is above what is available: measure it")
    rows = max(rows // multiple * multiple, min(rows, least))
    moving = int(constant + per_row * rows)
    larger = -(-6 * rows // (5 * multiple)) * multiple
    return {
        "batch_size": rows, "label": "estimate", "peak_bytes": int(static + gradients + moving),
        "leased_bytes": int(static + gradients + moving), "available_bytes": room,
        "bytes_per_row": int(per_row), "operator": "", "phase": "",
        "parts": {"static": static, "gradients": gradients, "activations": moving, "optimizer": 0,
                  "temporaries": 0, "other threads": 0},
        "step_seconds": 0.0, "at_most_rows": rows == most, "larger_rows": larger,
        "larger_leased_bytes": int(static + gradients + constant + per_row * larger),
        "traced_rows": [], "verified": [],
        "advice": "an estimate from shapes: nothing was run; mode=\"measured\" says what is true",
        "warnings": notes,
    }


def _forward_bytes(model: Any, sample: Any, rows: int, saved: bool = True) -> int:
    """Returns the bytes that a forward of `rows` rows saves for backward, inputs included. saved=False: the bytes of its outputs."""
    import torch

    inputs = tuple(torch.empty((rows, *one.shape[1:]), dtype=one.dtype, device="meta")
                   for one in (sample if isinstance(sample, (tuple, list)) else (sample,)))
    kept: dict[int, Any] = {}
    own: set[int] = set()
    values = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        values[name] = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        own.add(values[name].untyped_storage()._cdata)
    running: list[str] = []

    def note(name: str):
        return lambda *_: running.append(name)

    hooks = [part.register_forward_pre_hook(note(f"{name or 'model'} ({type(part).__name__})"))
             for name, part in model.named_modules()]
    largest = 0
    storages: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage.nbytes()
            kept[storage._cdata] = tensor  # Kept alive, so that the key is not reused.
        return tensor

    def measure(_part: Any, _inputs: Any, output: Any) -> None:
        nonlocal largest
        for one in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(one, torch.Tensor):
                largest = max(largest, one.untyped_storage().nbytes())

    hooks += [part.register_forward_hook(measure) for part in model.modules()]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), \
                torch.random.fork_rng(devices=[]):
            output = torch.func.functional_call(model, values, inputs)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"mode=\"static\" does not know the shapes that {running[-1] if running else 'the model'} "
            f"makes ({str(error).splitlines()[0]}): use mode=\"measured\"") from error
    finally:
        for hook in hooks:
            hook.remove()
    outputs = sum(one.untyped_storage().nbytes()
                  for one in (output if isinstance(output, (tuple, list)) else (output,))
                  if isinstance(one, torch.Tensor))
    given = sum(one.untyped_storage().nbytes() for one in inputs)
    # Backward holds the gradient of one output and of its input beside what was saved.
    return given + outputs + (sum(storages.values()) + 2 * largest if saved else largest)
