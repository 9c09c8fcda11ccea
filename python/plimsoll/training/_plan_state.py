# SPDX-License-Identifier: Apache-2.0
"""The state that a measured step changes, kept on disk and restored bit for bit.

Threads: the thread that trains.
Memory:  the bytes go to an unlinked file, because a copy in RAM would be part of what is measured;
         putting back maps it and holds one tensor at a time.
"""
from __future__ import annotations

import copy
import mmap
import os
import tempfile
from collections.abc import Iterable
from typing import Any

from ..core._random_states import RandomStates
from ._reach import is_generator, reached
from ._transaction import ModuleNames, parameters_of


class _Saved:
    """The place of a dense tensor's bytes in the file, and its layout."""

    def __init__(self, tensor: Any, offset: int) -> None:
        self.offset = offset
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device
        self.strides = tensor.stride()


class _Sparse:
    """The places of a sparse tensor's indices and values in the file."""

    def __init__(self, indices: _Saved, values: _Saved, tensor: Any) -> None:
        self.indices, self.values = indices, values
        self.shape, self.coalesced = tuple(tensor.shape), tensor.is_coalesced()


class TrainingState:
    """The state of modules (modes, attributes, parameters, buffers, gradients), optimizers and random states, kept on disk.

    Parameters without gradients are kept only if they are no more than the others (a moving average's). If they are more
    (a frozen model's), put_back() names one that was written in place.

    modules:    torch.nn.Module each; a module that appears in another is kept once.
    optimizers: torch.optim.Optimizer each: states, and the values of the parameter groups.
    others:     anything with state_dict() and load_state_dict(): schedulers, GradScaler; and generators.
    directory:  folder of the unlinked file.
    function:   the step's function: modules and generators that are reachable from it are kept, too.
    Errors:     OSError when the disk is full; nothing has been changed.
    """

    def __init__(self, modules: Iterable[Any], optimizers: Iterable[Any], others: Iterable[Any],
                 directory: str | os.PathLike[str], function: Any = None) -> None:
        found, generators = reached([*modules, function])
        self._modules, self._optimizers = found, list(optimizers)
        others = list(others)
        self._file = tempfile.TemporaryFile(dir=directory)
        self._bytes = 0
        parameters = self.parameters = self._parameters()
        """The parameters whose values are kept."""
        self._names = ModuleNames(self._modules, [*parameters, *parameters_of(others)])
        self._tensors: list[tuple[Any, _Saved]] = []
        self._gradients: list[tuple[Any, _Saved | _Sparse | None]] = []
        seen: set[int] = set()
        for parameter in parameters:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                self._tensors.append((parameter, self._save(parameter)))
                grad = parameter.grad
                self._gradients.append((parameter, None if grad is None else self._save_gradient(grad)))
        for buffer in self._names.buffers():
            if id(buffer) not in seen:
                seen.add(id(buffer))
                self._tensors.append((buffer, self._save(buffer)))
        self._states = [self._save_optimizer(optimizer) for optimizer in self._optimizers]
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in others
                        if not is_generator(other)]
        self._file.flush()
        self._random = RandomStates([*generators, *filter(is_generator, others)])

    def leave_gradients(self) -> None:
        """Drops the gradients that put_back() restores: beside a step's own they would count as a part of it."""
        for parameter, _ in self._gradients:
            parameter.grad = None

    def put_back(self) -> None:
        """Restores everything bit for bit. May be called more than once. Errors: as ModuleNames.put_back()."""
        import torch

        with torch.no_grad():
            for tensor, saved in self._tensors:
                tensor.copy_(self._load(saved))
            for parameter, gradient in self._gradients:
                parameter.grad = None if gradient is None else self._load_gradient(gradient)
            for optimizer, states in zip(self._optimizers, self._states):
                self._restore_optimizer(optimizer, *states)
        for other, state in self._others:
            other.load_state_dict(copy.deepcopy(state))
        self._random.put_back()
        self._names.put_back()

    def close(self) -> None:
        """Deletes the file."""
        self._file.close()

    def _parameters(self) -> list[Any]:
        every = [p for module in self._modules for p in in_memory(module.parameters())]
        trained = {id(p): p for p in every if p.requires_grad}
        trained |= {id(p): p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        frozen = {id(p): p for p in every if id(p) not in trained}
        few = sum(p.nbytes for p in frozen.values()) <= sum(p.nbytes for p in trained.values())
        return [*trained.values(), *(frozen.values() if few else ())]

    def _save_gradient(self, grad: Any) -> _Saved | _Sparse:
        import torch

        if grad.layout is not torch.sparse_coo:
            return self._save(grad)
        return _Sparse(self._save(grad._indices()), self._save(grad._values()), grad)

    def _load_gradient(self, saved: _Saved | _Sparse) -> Any:
        import torch

        if isinstance(saved, _Saved):
            return self._load(saved)
        return torch.sparse_coo_tensor(self._load(saved.indices), self._load(saved.values), saved.shape,
                                       is_coalesced=saved.coalesced, check_invariants=False)

    def _save(self, tensor: Any) -> _Saved:
        import torch

        saved = _Saved(tensor, self._bytes)
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if flat.numel() > 0:
            self._file.write(memoryview(flat.view(torch.uint8).numpy()))
        self._bytes += flat.numel() * flat.element_size()
        # Tensors begin at multiples of 64 bytes, as frombuffer() wants aligned offsets.
        padding = -self._bytes % 64
        self._file.write(bytes(padding))
        self._bytes += padding
        return saved

    def _load(self, saved: _Saved) -> Any:
        import torch

        tensor = torch.empty_strided(saved.shape, saved.strides, dtype=saved.dtype,
                                     device=saved.device)
        if tensor.numel() == 0:
            return tensor
        count = 1
        for width in saved.shape:
            count *= width
        page = saved.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = saved.offset - page + count * tensor.element_size()
        with mmap.mmap(self._file.fileno(), length, access=mmap.ACCESS_COPY, offset=page) as view:
            source = torch.frombuffer(view, dtype=saved.dtype, count=count,
                                      offset=saved.offset - page)
            tensor.copy_(source.reshape(saved.shape))
            del source
        return tensor

    def _save_optimizer(self, optimizer: Any) -> tuple[list, list]:
        import torch

        states = []
        for key, values in optimizer.state.items():
            kept = {name: self._save(value) if isinstance(value, torch.Tensor)
                    else copy.deepcopy(value) for name, value in values.items()}
            states.append((key, kept))
        groups = [{name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
                  for group in optimizer.param_groups]
        return states, groups

    def _restore_optimizer(self, optimizer: Any, states: list, groups: list) -> None:
        known = {key for key, _ in states}
        for key in [key for key in optimizer.state if key not in known]:
            del optimizer.state[key]
        for key, kept in states:
            values = optimizer.state[key]
            for name in [name for name in values if name not in kept]:
                del values[name]
            for name, value in kept.items():
                values[name] = self._load(value) if isinstance(value, _Saved) \
                    else copy.deepcopy(value)
        for group, values in zip(optimizer.param_groups, groups):
            group.update(copy.deepcopy(values))


def in_memory(parameters: Iterable[Any]) -> list[Any]:
    """Returns the parameters that are in memory: those on disk (stream_frozen) are left out."""
    from ._absent import Absent

    return [one for one in parameters if not isinstance(one, Absent)]
