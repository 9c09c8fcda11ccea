# SPDX-License-Identifier: Apache-2.0
"""Vectors: rows of an EmbeddingStore as a torch.nn.Module. DealtVectors: the same for rows divided among ranks.

Reading order: _lookups.py, _device_rows.py, _rank_rows.py, this file, _accumulation.py.

Threads: the thread that trains; backward may call it again (recomputing).
Memory:  the rows of a step's lookups, leased until the step was made.
"""
from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..rows._device_rows import RowsWay, gradients_of
from ..rows._embedding import EmbeddingStore, Rows
from ..rows._rank_rows import DealtTable, LookedUp
from ..training import _lookups
from ._run_parts import Parts


class Vectors(torch.nn.Module):
    """One trainable row for each id: vectors(ids) -> float32 [*ids.shape, dim], on the ids' device.

    Made by plimsoll.Run.embedding(). It has no parameters: a lookup reads rows from the table, and Run.step() has
    the table update them within the step's transaction. Ids may occur more than once, and in several lookups of a
    step: their gradients are summed, in the order of lookup. A lookup under torch.no_grad() only reads. A copy
    (copy.deepcopy) looks up in the same table. With ids on a device, a lookup waits until they are computed; rows and
    their gradients are copied through pinned host memory.

    In a loop with a backward and an optimizer of your own, call vectors.step() after optimizer.step(). A
    torch.amp.GradScaler of such a loop must be tracked, run.track(scaler=scaler), and scale every loss that uses rows.
    Errors: NotFoundError naming the first unknown id; BudgetExceeded; ValueError in a forked worker.
    """

    def __init__(self, name: str, store: EmbeddingStore, parts: Parts) -> None:
        """Takes what Run.embedding() made. parts: those of the run, among which a GradScaler is looked for."""
        super().__init__()
        self.name, self._store, self._parts = name, store, parts
        self._waiting: list[Rows] = []  # Looked up outside Run.step(), and not applied yet.
        self._scale = 0.0  # The GradScaler's scale for the gradients that wait.

    @property
    def store(self) -> EmbeddingStore:
        """The table of the rows."""
        return self._store

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows of ids. Shape: ids int64, any; the rows float32 [*ids.shape, dim]."""
        if ids.dtype != torch.int64:
            raise ValueError(f"{self.name}: ids are int64, not {ids.dtype}: use ids.long()")
        rows = self._gathered(ids.detach().reshape(-1))
        if not torch.is_grad_enabled():
            return rows.tensor.detach().view(*ids.shape, self._store.dim).to(ids.device)
        if not _lookups.add(rows):
            self._waiting.append(rows)
            rows.tensor.register_hook(self._unscaled)
        return rows.tensor.view(*ids.shape, self._store.dim).to(ids.device)

    def _gathered(self, ids: torch.Tensor) -> Rows:
        wanted = ids.cpu().contiguous().numpy()
        if ids.device.type in ("cpu", "meta") or not len(wanted):
            return self._store.gather(wanted)
        return RowsWay.of(self._store._governor, ids.device).gather(self._store, wanted) or self._store.gather(wanted)

    def step(self, *, rate_scale: float = 1.0) -> None:
        """Applies the gradients of all lookups since the last call, in one step. Run.step() does this by itself.
        rate_scale: multiplies the learning rate. If a tracked GradScaler skips the optimizer's step, or one of these
        gradients is not finite, nothing is applied, and the scaler is informed.

        Errors: those of EmbeddingStore.apply().
        """
        waiting = self._with_gradients()
        grads = gradients_of(waiting)
        if waiting and not self._skipped(grads):
            self._store.apply(np.concatenate([one.ids for one in waiting]), np.concatenate(grads),
                              rate_scale=rate_scale)
        self._waiting.clear()

    def _scaler(self) -> Any:
        """Returns the tracked GradScaler that has scaled a loss, or None."""
        return next((one for one in self._parts.those(torch.amp.GradScaler) if one.is_enabled() and one._scale is not None), None)

    def _unscaled(self, grad: torch.Tensor) -> torch.Tensor:
        """Unscales a gradient during backward, as the scale may have changed when step() is called."""
        scaler = self._scaler()
        if scaler is None:
            return grad
        self._scale = scaler.get_scale()
        return grad * (1.0 / self._scale)

    def _skipped(self, grads: list[np.ndarray]) -> bool:
        scaler = self._scaler()
        if scaler is None:
            return False
        if scaler.get_scale() < self._scale:
            return True  # update() was called before, and lowered the scale.
        states = scaler._per_optimizer_states  # The states since the last update().
        if not all(np.isfinite(grad).all() for grad in grads):
            states[id(self)]["found_inf_per_device"] = {scaler._scale.device: torch.ones((), device=scaler._scale.device)}
            return True
        return any(bool(found) for state in states.values() for found in state["found_inf_per_device"].values())

    def _with_gradients(self) -> list[Rows]:
        return [one for one in self._waiting if one.tensor.grad is not None]

    def _between_steps(self) -> None:
        """Raises RuntimeError for gradients that were not applied."""
        forgotten = self._with_gradients()
        if forgotten:
            raise RuntimeError(
                f"{self.name}: gradients of {sum(map(len, forgotten))} looked-up rows were not applied: "
                f"use run.step(), or call {self.name}.step() after your optimizer's step()")
        self._waiting.clear()

    def __deepcopy__(self, _: Any) -> Vectors:
        return Vectors(self.name, self._store, self._parts)

    def extra_repr(self) -> str:
        return f"{self.name!r}, rows={self._store.rows}, dim={self._store.dim}, optimizer={self._store.optimizer}"


class DealtVectors(Vectors):
    """Rows divided among ranks. Each rank's `store` has the rows of its virtual shards; a lookup may ask for any row.

    In run.step(), ranks may look up different ids, and a different number of times. Outside it they must do the same,
    under torch.no_grad(). An id that occurs several times in a lookup is read and sent once.
    """

    def __init__(self, name: str, table: DealtTable, parts: Parts) -> None:
        """Takes what Run.embedding() made."""
        super().__init__(name, table.store, parts)
        self._table = table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.dtype != torch.int64:
            raise ValueError(f"{self.name}: ids are int64, not {ids.dtype}: use ids.long()")
        if torch.is_grad_enabled() and not _lookups.is_running():
            raise ValueError(f"{self.name}: looked up outside run.step(), where no gradient is applied: use run.step(), or "
                             "torch.no_grad() to read")
        flat = ids.detach().reshape(-1).cpu()
        wanted, tensor = self._table.look_up(flat.contiguous().numpy())
        if torch.is_grad_enabled():
            _lookups.add(LookedUp(self._table, wanted, tensor.requires_grad_()))
        rows = torch.nn.functional.embedding(torch.from_numpy(wanted.places), tensor)
        return rows.view(*ids.shape, self._table.dim).to(ids.device)

    def step(self, *, rate_scale: float = 1.0) -> None:
        raise ValueError(f"{self.name}: with virtual_workers, or several ranks, run.step() applies gradients")

    def __deepcopy__(self, _: Any) -> DealtVectors:
        return DealtVectors(self.name, self._table, self._parts)

    def extra_repr(self) -> str:
        return f"{self.name!r}, rows={self._table.rows}, dim={self._table.dim}, optimizer={self._store.optimizer}"
