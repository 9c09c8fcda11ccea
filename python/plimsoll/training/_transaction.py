# SPDX-License-Identifier: Apache-2.0
"""State that a training step changes, remembered so that all of it can be put back.

Reading order: _reach.py, this file, _backward.py.
Threads: the thread that trains.
Memory:  Before copies buffers; Gradients keeps the gradients there were, GradientsBefore copies them;
         OptimizersBefore copies parameters and optimizer states, unless the optimizer is known to write
         nothing before it has all its memory.
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
    """Everything that modules have by name: parameters, buffers and plain attributes, modes included.

    Tensors are put back as the objects they were; buffers() are for callers that keep their values too. Lists,
    dicts, sets and deques that are attributes get their entries back, not what is inside these. Parameters that need
    no gradient get back what they had as .data; one that was written in place is named.

    kept: parameters whose values somebody else puts back.
    """

    def __init__(self, modules: Iterable[Any], kept: Iterable[Any] = ()) -> None:
        import torch

        from ._absent import Absent

        internal = _internal()
        parts = {id(part): part for module in modules for part in module.modules()}
        self._parts = []
        self._written = []  # Attributes that are tensors and no buffers, and how often they were written.
        self._frozen = []  # The same of parameters, and their data.
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
        """Each once."""
        seen: set[int] = set()
        for _, _, _, buffers, _ in self._parts:
            for value in buffers.values():
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    yield value

    def put_back(self) -> None:
        """Errors: RuntimeError naming what was written in place and is not kept; all else is as it was."""
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
    """Attributes that every module has for itself; `training` is its user's."""
    import torch

    return frozenset(vars(torch.nn.Module()).keys() - {"training"})


def _written(tensor: Any) -> int:
    """How often, where torch counts it."""
    return 0 if tensor.is_inference() else int(tensor._version)


class Before:
    """Modules, random states and `others` at the beginning of a step.

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
        # Its state_dict() has nothing of what it knows between unscale_() and update().
        self._scaler_has = vars(scaler) if scaler is not None else {}
        self._scaler_had = {name: (value, _copied(value)) for name, value in self._scaler_has.items()}

    def put_back(self) -> None:
        """Everything is as it was, bit for bit. May be called more than once. Errors: as ModuleNames.put_back()."""
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
    """An attribute of a scaler: a tensor, a dict, or what does not change."""
    import torch

    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value) if isinstance(value, dict) else value


class Gradients:
    """Gradients of the leaves that a step adds to, set aside until it is known to have been made.

    together: leaves whose gradients add up over a window of batches: parameters and Rows.
    unused:   leaves whose gradients of this step nobody uses: they stay as they were.
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
        """A leaf made meanwhile, whose gradients add up over a window."""
        self.watch(leaf)
        self._together.add(id(leaf))

    def watch_graph(self, value: Any) -> None:
        """Every leaf that value.backward() would add to, wherever the user has it."""
        for leaf in leaves_of(value):
            self.watch(leaf)

    def put_back(self) -> None:
        for leaf, grad in self._kept.values():
            leaf.grad = grad

    def taken(self, share: float) -> dict[int, Any]:
        """The new gradients multiplied by `share`, by the identity of what they are of, which has none now."""
        made = {key: leaf.grad for key, (leaf, _) in self._kept.items() if leaf.grad is not None}
        for key, gradient in made.items():
            self._kept[key][0].grad = None
            if share != 1:
                gradient.mul_(share)
        return made

    def give(self, made: dict[int, Any]) -> None:
        """Sets the gradients that taken() returned as the new ones."""
        for key, gradient in made.items():
            self._kept[key][0].grad = gradient

    def add_up(self, alone: float, together: float | None) -> None:
        """Adds what was set aside; the new are multiplied by `alone`, or with what was there by `together`.

        together: None while the window goes on: nothing is multiplied.
        Nothing that was set aside is written, so put_back() goes on being possible.
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
        """Adds up like add_up(), but multiplies what was set aside by `before` and the new gradients by `now`."""
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
    """Gradients that a loop of others adds to in place, copied."""

    def __init__(self, leaves: Iterable[Any]) -> None:
        self._kept = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves]

    def put_back(self) -> None:
        """May be called more than once."""
        import torch

        with torch.no_grad():
            for leaf, grad, kept in self._kept:
                if grad is not None:
                    grad.copy_(kept)
                leaf.grad = grad


class Unwritten:
    """Tensors that are not copied: what can fail comes before the first write to any."""

    def __init__(self, what: str, tensors: Iterable[Any]) -> None:
        self._what, self._seen = what, [(tensor, tensor._version) for tensor in tensors]

    def put_back(self) -> None:
        """Errors: RuntimeError when one was written."""
        if any(tensor._version != version for tensor, version in self._seen):
            raise RuntimeError(f"{self._what} were being written when memory was refused, and are not kept")


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of the graph that ends in `value`."""
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
    """Parameters, states and groups of optimizers before they step.

    Copies of parameters and states are kept, unless they are all that is changed and
    writes_at_the_end(): then only of step counts.
    alone: nothing else is changed with them.
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
        """Everything is as it was, bit for bit."""
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

    So of torch's fused optimizers when everything is one call of their kernel. Of all others some
    allocate between their writes (torch's unfused Adam does, and so do fused ones between two groups),
    and those of the user's own cannot be known.
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
    """Calls of a batch, until it is known that all of its calls can be made."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] | None = []  # In reverse; None: that cannot be.

    def add(self, undo: list[Callable[[], Any]] | None, before: Before) -> None:
        """A call that was made. undo: puts it back; None: nothing does."""
        if undo is None:
            self._undo = None
        elif self._undo == []:  # Of several calls of a batch the first one's.
            self._undo = [*undo, before.put_back]

    def keep(self) -> None:
        """The calls so far are not to be put back any more."""
        self._undo = []

    def put_back(self) -> bool:
        """Everything is as before the first call since keep(). False: it is not, as rows were written."""
        undo, self._undo = self._undo, []
        for put_back in undo or ():
            put_back()
        return undo is not None


class Together:
    """Optimizers and Rows as one optimizer, so that a GradScaler decides for all of them."""

    def __init__(self, optimizers: list[Any], rows: list[Rows | Owned]) -> None:
        self._optimizers, self._rows = optimizers, rows
        self._changes: list[tuple[Any, np.ndarray, np.ndarray]] = []
        self._brought: dict[int, np.ndarray] = {}  # Gradients of rows on devices, by what they are of.
        self.param_groups = [group for one in optimizers for group in one.param_groups]

    def unscale(self, scaler: Any) -> None:
        """Unscales by scaler.unscale_(). A leaf of one number tells it whether the rows' gradients are finite. Errors: ValueError (no gradient).

        Rows are unscaled here instead: the scaler copies its scale from the device to where a gradient is, and does not wait for it.
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
        """Returns the gradient in host memory; of rows on devices all are brought at once. Errors: ValueError where there is none."""
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
        """Cannot be refused memory. Errors: of EmbeddingStore.apply()."""
        for store, ids, grads in self._changes:
            if len(ids):
                store.apply(ids, grads)
