# SPDX-License-Identifier: Apache-2.0
"""The state that a training step changes, remembered so that the step can be undone.

Reading order: _reach.py, this file, _backward.py.
Threads: the thread that trains.
Memory:  Before copies buffers. Gradients keeps the earlier gradients, and GradientsBefore copies them.
         OptimizersBefore copies parameters and optimizer states, unless the optimizer is known to allocate all
         its memory before it writes.
"""
from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core._random_states import RandomStates
from ..rows._device_rows import DeviceRows, gradients_of
from ..rows._embedding import Rows
from ._reach import is_generator

if TYPE_CHECKING:
    from ..rows._rank_rows import Owned

_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter)


class ModuleNames:
    """The attributes of modules at one moment: parameters, buffers and plain attributes, modes included.

    put_back() restores tensors as the objects they were. For their values see buffers(). Lists, dicts, sets and deques get
    their entries back, not what is inside these. Parameters without gradients get their .data back; put_back() names those
    that were written in place.

    kept: parameters whose values the caller puts back.
    """

    def __init__(self, modules: Iterable[Any], kept: Iterable[Any] = ()) -> None:
        import torch

        from ._absent import Absent

        internal = _internal()
        parts = {id(part): part for module in modules for part in module.modules()}
        self._parts = []
        self._written = []  # Tensor attributes that are no buffers, and their numbers of writes.
        self._frozen = []  # The same for parameters without gradients, with their data.
        elsewhere = set(map(id, kept))
        for part in parts.values():
            own = dict(vars(part))
            entries = [(value, copy.copy(value)) for name, value in own.items()
                       if type(value) in _CONTAINERS and name not in internal]
            self._written += [(part, name, value, _written(value)) for name, value in own.items()
                              if isinstance(value, torch.Tensor)]
            self._frozen += [(part, name, value, _written(value), value.data) for name, value in part._parameters.items()
                             if value is not None and not value.requires_grad and id(value) not in elsewhere
                             and not isinstance(value, Absent)]
            self._parts.append((part, own, dict(part._parameters.items()),
                                dict(part._buffers.items()), entries))

    def buffers(self) -> Iterator[Any]:
        """Yields each buffer once."""
        seen: set[int] = set()
        for _, _, _, buffers, _ in self._parts:
            for value in buffers.values():
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    yield value

    def put_back(self) -> None:
        """Restores the attributes. Errors: RuntimeError naming a parameter that was written in place; all else is restored."""
        for part, own, parameters, buffers, entries in self._parts:
            vars(part).update(own)
            for name in [name for name in vars(part) if name not in own]:
                del vars(part)[name]
            for names, kept in ((part._parameters, parameters), (part._buffers, buffers)):
                for name, value in kept.items():
                    if names.get(name) is not value:
                        names[name] = value
                for name in [name for name in names if name not in kept]:
                    del names[name]
            for value, kept in entries:
                value.clear()
                (value.extend if isinstance(value, (list, collections.deque)) else value.update)(kept)
        for _, _, value, _, data in self._frozen:
            if value.data_ptr() != data.data_ptr():
                value.data = data
        for part, name, value, version in self._written:
            if _written(value) != version:
                raise RuntimeError(
                    f"{type(part).__name__}.{name} was written in place by a step that memory refused, "
                    "and only buffers are kept: register it with register_buffer(), or assign a new "
                    "tensor")
        for part, name, value, version, _ in self._frozen:
            if _written(value) != version:
                raise RuntimeError(
                    f"{type(part).__name__}.{name} needs no gradient and was written in place by a step that is put "
                    "back, and is not kept: name its module in others=[...]")


@functools.cache
def _internal() -> frozenset[str]:
    """Returns the names of the attributes that torch gives every module, `training` excepted."""
    import torch

    return frozenset(vars(torch.nn.Module()).keys() - {"training"})


def _written(tensor: Any) -> int:
    """Returns the number of writes to `tensor`; 0 where torch does not count them."""
    return 0 if tensor.is_inference() else int(tensor._version)


class Before:
    """The state at the beginning of a step: modules, random states and `others`.

    others: generators; and objects with state_dict() and load_state_dict().
    scaler: a GradScaler, or None.
    kept:   as for ModuleNames.
    """

    def __init__(self, modules: Iterable[Any], generators: Iterable[Any], others: Iterable[Any],
                 scaler: Any, kept: Iterable[Any] = ()) -> None:
        self._random = RandomStates([*generators, *filter(is_generator, others)])
        others = list(others)
        self._names = ModuleNames(modules, [*kept, *parameters_of(others)])
        self._values = [(tensor, tensor.clone()) for tensor in self._names.buffers()]
        self._others = [(one, copy.deepcopy(one.state_dict())) for one in others
                        if not is_generator(one)]
        # Its state_dict() lacks the state between unscale_() and update().
        self._scaler_has = vars(scaler) if scaler is not None else {}
        self._scaler_had = {name: (value, _copied(value)) for name, value in self._scaler_has.items()}

    def put_back(self) -> None:
        """Restores everything bit for bit. May be called more than once. Errors: as ModuleNames.put_back()."""
        import torch

        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)
        for one, state in self._others:  # A module copies values; a copy of them could be refused.
            one.load_state_dict(state if isinstance(one, torch.nn.Module) else copy.deepcopy(state))
        for name, (value, kept) in self._scaler_had.items():
            if isinstance(value, torch.Tensor):
                value.copy_(kept)  # A copy of the copy could be refused.
            self._scaler_has[name] = value if isinstance(value, torch.Tensor) else _copied(kept)
        self._random.put_back()
        self._names.put_back()


def parameters_of(others: Iterable[Any]) -> Iterator[Any]:
    """Yields the parameters of the modules among `others`."""
    import torch

    return (parameter for one in others if isinstance(one, torch.nn.Module) for parameter in one.parameters())


def _copied(value: Any) -> Any:
    """Copies a scaler's attribute: a tensor, a dict, or an immutable value as it is."""
    import torch

    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value) if isinstance(value, dict) else value


class Gradients:
    """The earlier gradients of the leaves that a step adds to, set aside until the step has succeeded.

    together: leaves whose gradients add up over a window of batches: parameters and Rows.
    unused:   leaves that keep their earlier gradients: those of this step are dropped.
    """

    def __init__(self, together: Iterable[Any], leaves: Iterable[Any], unused: Iterable[Any] = ()) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._unused = {id(leaf) for leaf in unused}
        for leaf in together:
            self.watch(leaf)
        self._together = set(self._kept)
        for leaf in leaves:
            self.watch(leaf)

    def watch(self, leaf: Any) -> None:
        if leaf.requires_grad and leaf.is_leaf and id(leaf) not in self._kept:
            self._kept[id(leaf)] = (leaf, leaf.grad)
            leaf.grad = None

    def watch_together(self, leaf: Any) -> None:
        """Watches a new leaf whose gradients add up over a window."""
        self.watch(leaf)
        self._together.add(id(leaf))

    def watch_graph(self, value: Any) -> None:
        """Watches every leaf that value.backward() would add to."""
        for leaf in leaves_of(value):
            self.watch(leaf)

    def put_back(self) -> None:
        for leaf, grad in self._kept.values():
            leaf.grad = grad

    def taken(self, share: float) -> dict[int, Any]:
        """Takes the new gradients from their leaves. Returns them times `share`, by id(leaf)."""
        made = {key: leaf.grad for key, (leaf, _) in self._kept.items() if leaf.grad is not None}
        for key, gradient in made.items():
            self._kept[key][0].grad = None
            if share != 1:
                gradient.mul_(share)
        return made

    def give(self, made: dict[int, Any]) -> None:
        """Sets the gradients that taken() returned."""
        for key, gradient in made.items():
            self._kept[key][0].grad = gradient

    def add_up(self, alone: float, together: float | None) -> None:
        """Adds the earlier gradients. Sums of a window are multiplied by `together`, the other new gradients by `alone`.

        together: None while the window goes on: its sums are not multiplied.
        The earlier gradients are not written, so put_back() stays possible.
        """
        for key, (leaf, old) in self._kept.items():
            new = leaf.grad
            if key in self._unused:
                leaf.grad = old
                continue
            if key not in self._together:
                if new is not None and alone != 1:
                    new.mul_(alone)
                leaf.grad = new if old is None else old if new is None else old + new
                continue
            total = new if old is None else old if new is None else old + new
            if total is not None and together is not None:
                if total is old:
                    total = total * together  # Clipping writes it.
                elif together != 1:
                    total.mul_(together)
            leaf.grad = total

    def join(self, before: float, now: float) -> None:
        """Adds the earlier gradients like add_up(), multiplied by `before`, to the new ones, multiplied by `now`."""
        import torch

        with torch.no_grad():
            for key, (leaf, old) in self._kept.items():
                if key in self._unused:
                    leaf.grad = old
                    continue
                new, share = leaf.grad, before if key in self._together else 1.0
                if new is None:
                    leaf.grad = None if old is None else old * share  # Clipping writes it.
                    continue
                if now != 1 and key in self._together:
                    new.mul_(now)
                if old is not None:
                    new.add_(old, alpha=share)


class GradientsBefore:
    """Copies of gradients, for a training loop that adds to them in place."""

    def __init__(self, leaves: Iterable[Any]) -> None:
        self._kept = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves]

    def put_back(self) -> None:
        """Restores the gradients. May be called more than once."""
        import torch

        with torch.no_grad():
            for leaf, grad, kept in self._kept:
                if grad is not None:
                    grad.copy_(kept)
                leaf.grad = grad


class Unwritten:
    """A check that tensors were not written. They are not copied, as all that can fail comes before the first write."""

    def __init__(self, what: str, tensors: Iterable[Any]) -> None:
        self._what, self._seen = what, [(tensor, tensor._version) for tensor in tensors]

    def put_back(self) -> None:
        """Raises RuntimeError where a tensor was written."""
        if any(tensor._version != version for tensor, version in self._seen):
            raise RuntimeError(f"{self._what} were being written when memory was refused, and are not kept")


def leaves_of(value: Any) -> Iterator[Any]:
    """Yields the leaves of the autograd graph of `value`."""
    if value.grad_fn is None:
        if value.requires_grad:
            yield value
        return
    seen, waiting = {value.grad_fn}, [value.grad_fn]
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)


class OptimizersBefore:
    """The parameters, states and groups of optimizers before a step.

    Parameters and states are copied. Step counts alone are copied where `alone` holds and writes_at_the_end().
    alone: the step changes nothing else.
    """

    def __init__(self, optimizers: list[Any], schedulers: Iterable[Any], alone: bool) -> None:
        import torch

        self._whole = not (alone and writes_at_the_end(optimizers))
        self._tensors: dict[int, tuple[Any, Any]] = {}
        self._optimizers = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    self._keep(tensor)
            states = [(values, self._entries(values)) for values in optimizer.state.values()]
            groups = [(group, self._entries({**group, "params": list(group["params"])}))
                      for group in optimizer.param_groups]
            own = {name: self._entry(value) for name, value in vars(optimizer).items()
                   if isinstance(value, (int, float, str, type(None), torch.Tensor))}
            self._optimizers.append((optimizer, set(optimizer.state), states, groups, own))
        self._schedulers = [(one, copy.deepcopy(one.state_dict())) for one in schedulers]

    def put_back(self) -> None:
        """Restores everything bit for bit."""
        import torch

        with torch.no_grad():
            for tensor, kept in self._tensors.values():
                tensor.copy_(kept)
        for optimizer, known, states, groups, own in self._optimizers:
            for key in [key for key in optimizer.state if key not in known]:
                del optimizer.state[key]
            for values, kept in (*states, *groups):
                values.clear()
                values.update(kept)
            vars(optimizer).update(own)
        for one, state in self._schedulers:
            one.load_state_dict(state)

    def _entries(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value if name == "params" else self._entry(value)
                for name, value in values.items()}

    def _entry(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            self._keep(value)
            return value
        return copy.deepcopy(value)

    def _keep(self, tensor: Any) -> None:
        if id(tensor) not in self._tensors and (self._whole or tensor.dim() == 0):
            self._tensors[id(tensor)] = (tensor, tensor.detach().clone())


def writes_at_the_end(optimizers: list[Any]) -> bool:
    """Whether a step takes all its memory before it writes anything but step counts.

    It holds for torch's fused optimizers where one kernel call does everything. Others may allocate between their
    writes: torch's unfused Adam, a fused one with two groups, optimizers of the user's own.
    """
    from torch.optim.optimizer import _global_optimizer_post_hooks

    import torch

    if len(optimizers) != 1 or len(optimizers[0].param_groups) != 1 or type(optimizers[0]) not in (
            torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        return False
    one, group = optimizers[0], optimizers[0].param_groups[0]
    kinds = {(p.dtype, p.device, p.layout) for p in group["params"]}
    hooked = one._optimizer_step_post_hooks or _global_optimizer_post_hooks
    replaced = "step" in vars(one) and not getattr(one.step, "_wrapped_by_lr_sched", False)
    return (bool(group.get("fused")) and not isinstance(group["lr"], torch.Tensor)
            and len(kinds) == 1 and not hooked and not replaced)


class CallsMade:
    """The calls on a batch that can still be undone."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] | None = []  # Functions in the order to call them; None: the calls cannot be undone.

    def add(self, undo: list[Callable[[], Any]] | None, before: Before) -> None:
        """Adds a call. undo: functions that undo it; None: it cannot be undone."""
        if undo is None:
            self._undo = None
        elif self._undo == []:  # The first call of a batch: its `before` undoes all of them.
            self._undo = [*undo, before.put_back]

    def keep(self) -> None:
        """Makes the calls so far final."""
        self._undo = []

    def put_back(self) -> bool:
        """Undoes the calls since keep(). Returns False where it cannot, as rows were written."""
        undo, self._undo = self._undo, []
        for put_back in undo or ():
            put_back()
        return undo is not None


class Together:
    """Optimizers and Rows with the interface of one optimizer, so that a GradScaler decides for all of them."""

    def __init__(self, optimizers: list[Any], rows: list[Rows | Owned]) -> None:
        self._optimizers, self._rows = optimizers, rows
        self._changes: list[tuple[Any, np.ndarray, np.ndarray]] = []
        self._brought: dict[int, np.ndarray] = {}  # Gradients of rows on devices, by id(rows).
        self.param_groups = [group for one in optimizers for group in one.param_groups]

    def unscale(self, scaler: Any) -> None:
        """Unscales all gradients. Errors: ValueError (no gradient).

        The optimizers' gradients are unscaled by scaler.unscale_(). Rows are unscaled here, as the scaler would copy its scale from the
        device without waiting. A leaf of one number tells the scaler whether the rows' gradients are finite.
        """
        import torch

        finite = True
        for one in self._rows:
            grad = self._gradient(one)
            np.multiply(grad, np.float32(1.0 / scaler.get_scale()), out=grad)
            finite = finite and bool(np.isfinite(grad).all())
            if not isinstance(one, DeviceRows):
                one.tensor.grad = torch.from_numpy(grad)
        leaf = torch.zeros(1, device=scaler._scale.device)
        leaf.grad = torch.full_like(leaf, 0.0 if finite else float("inf"))
        self.param_groups.append({"params": [leaf]})
        scaler.unscale_(self)

    def prepare(self, check: bool, applies: bool) -> None:
        """Computes everything that can fail, before anything is written. Errors: ValueError (no gradient; NaN or infinity in one)."""
        stores = {id(one._store): one._store for one in self._rows}
        for key, store in stores.items():
            own = [one for one in self._rows if id(one._store) == key]
            ids = [one.ids for one in own]
            grads = [self._gradient(one) for one in own]
            for wanted, grad in zip(ids, grads):
                if check and not np.isfinite(grad).all():
                    bad = int(wanted[~np.isfinite(grad).all(axis=1)][0])
                    raise ValueError(f"rows: the gradient of id {bad} is NaN or infinite")
            if applies:
                one_of = len(own) == 1
                self._changes.append((store, ids[0] if one_of else np.concatenate(ids),
                                      grads[0] if one_of else np.concatenate(grads)))

    def _gradient(self, one: Rows | Owned) -> np.ndarray:
        """Returns the gradient of `one` in host memory. Gradients on devices are copied in one go. Errors: ValueError where there is none."""
        if not isinstance(one, DeviceRows):
            return one._gradient()
        if not self._brought:
            those = [rows for rows in self._rows if isinstance(rows, DeviceRows)]
            self._brought = dict(zip(map(id, those), gradients_of(those), strict=True))
        return self._brought[id(one)]

    def step(self) -> bool:
        """Steps the optimizers. apply_rows() must follow."""
        for optimizer in self._optimizers:
            optimizer.step()
        return True

    def apply_rows(self) -> None:
        """Applies the prepared changes of rows. Memory cannot be refused here. Errors: as EmbeddingStore.apply()."""
        for store, ids, grads in self._changes:
            if len(ids):
                store.apply(ids, grads)
