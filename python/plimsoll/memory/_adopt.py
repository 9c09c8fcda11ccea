# SPDX-License-Identifier: Apache-2.0
"""adopt(): moves tensors made before the governor into its arena.

Threads: the caller's; no other thread may use the tensors meanwhile.
Memory:  during a move, extra memory of the largest storage or GROUP_BYTES, whichever is more.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .. import _core
from ..core import _torch_gate
from ._memory import Governor

GROUP_BYTES = 16 << 20  # Moved between two measurements of what went back to the system.


def adopt(*parts: Any, governor: Governor | None = None) -> int:
    """Moves tensors that were made before the governor into its arena, and returns their bytes.

    A governor counts memory that the process held before it as baseline. Adopted tensors are leased like new ones: the
    ledger names them, and the baseline falls by the memory that went back to the system, as measured.

    parts: modules (parameters, buffers, gradients), optimizers (their states too), tensors, and dicts
           and sequences of these.
    Tensors stay the same objects with the same values, and tensors that shared a storage still do.
    Not moved: tensors on other devices, pinned, shared with other processes, sparse or quantized, and those in the
    arena already; so a second call moves nothing. Tensors over a mapped file (torch.load(mmap=True)) are read into
    memory. Older views of a tensor (x = layer.weight[0]) keep its old bytes alive.

    Errors: ValueError without a governor that leases tensors, or for a part of another kind;
            BudgetExceeded when there is no room. Tensors moved before the error stay moved.
    """
    governor = governor or Governor.current()
    if governor is None or not governor.arena_attached:
        raise ValueError("adopt: no governor leases tensors; make one after `import torch`")
    import torch

    extension = _torch_gate.load()
    waiting: dict[int, list[Any]] = {}  # By address of the storage, in order of discovery.
    for part in parts:
        for tensor in _tensors_of(part):
            if _may_move(tensor):
                address = tensor.untyped_storage().data_ptr()
                if not extension.owns(address):
                    same = waiting.setdefault(address, [])
                    if all(tensor is not one for one in same):
                        same.append(tensor)
    moved, group, in_group = 0, [], 0
    try:
        for address in list(waiting):
            size, old = _move(waiting.pop(address))
            moved, in_group = moved + size, in_group + size
            group.append(old)
            del old
            if in_group >= GROUP_BYTES:
                _let_go(governor, group, in_group)
                in_group = 0
    except torch.OutOfMemoryError as error:
        raise governor._refusal("tensors", 0, f"adopt: {moved} bytes moved, then: {error}") from None
    finally:
        _let_go(governor, group, in_group)
    return moved


def _tensors_of(part: Any) -> Iterator[Any]:
    import torch

    if isinstance(part, torch.Tensor):
        yield part
        if part.is_leaf and part.grad is not None:
            yield part.grad
    elif isinstance(part, torch.nn.Module):
        for tensor in (*part.parameters(), *part.buffers()):
            yield from _tensors_of(tensor)
    elif isinstance(part, torch.optim.Optimizer):
        for group in part.param_groups:
            yield from _tensors_of(group["params"])
        for state in part.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    elif isinstance(part, Mapping):
        yield from _tensors_of(list(part.values()))
    elif isinstance(part, Iterable) and not isinstance(part, (str, bytes)):
        for one in part:
            yield from _tensors_of(one)
    else:
        raise ValueError(f"adopt: {type(part).__name__} is no module, optimizer or tensor, nor a "
                         "dict or sequence of them")


def _may_move(tensor: Any) -> bool:
    import torch

    return (tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
            and not tensor.is_shared() and not tensor.is_pinned() and tensor.untyped_storage().nbytes() > 0)


def _move(tensors: list[Any]) -> tuple[int, Any]:
    """Moves `tensors`, which share one storage, to a new one. Returns its bytes and the old storage."""
    import torch

    old = tensors[0].untyped_storage()
    new = torch.empty(old.nbytes(), dtype=torch.uint8).untyped_storage()  # UntypedStorage() bypasses the arena.
    new.copy_(old)
    with torch.no_grad():
        for tensor in tensors:
            moved = torch.empty(0, dtype=tensor.dtype).set_(
                new, tensor.storage_offset(), tensor.size(), tensor.stride())
            moved = moved.conj() if tensor.is_conj() else moved  # Flags of the tensor: set_() drops them.
            tensor.data = torch._neg_view(moved) if tensor.is_neg() else moved
    return old.nbytes(), old


def _let_go(governor: Governor, group: list[Any], size: int) -> None:
    """Frees old storages, and lowers the ledger's baseline by the memory that the process gave back."""
    if not group:
        return
    governor.clean_up()  # Memory freed next is that of the old storages.
    before = _core.resident()
    group.clear()
    governor.clean_up()
    after = _core.resident()
    gone = min(max(before.total - after.total, 0), size)
    governor._core.lower_baseline(gone, min(max(before.anonymous - after.anonymous, 0), gone))
