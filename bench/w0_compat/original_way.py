# SPDX-License-Identifier: Apache-2.0
"""The peer of w0_compat: rows in chunk files, cached as dicts, saved with torch.save at every sync.

Written from the description of the original's way of working, with its order fixed (rows come back
as asked for) so that it computes the same thing. It never calls fsync, as the original did not.
"""
from __future__ import annotations

import pathlib
from collections.abc import Iterable

import torch


class OriginalWay:
    """Dicts of row tensors, by chunk; every dirty chunk is saved whole at a sync."""

    def __init__(self, ids: Iterable[int], dim: int, folder: pathlib.Path, chunk_size: int,
                 sync_batch_size: int = 10, auto_sync: bool = True) -> None:
        self._folder, self._chunk_size, self._dim = folder, chunk_size, dim
        self._sync_batch_size, self._auto_sync = sync_batch_size, auto_sync
        self._ids = list(ids)
        self._chunk_of = {one: at // chunk_size for at, one in enumerate(self._ids)}
        self._cache: dict[int, dict[int, torch.Tensor]] = {}
        self._dirty: set[int] = set()
        self._pending: dict[int, torch.Tensor] = {}
        self._updates = 0
        folder.mkdir(parents=True)
        for chunk in range(-(-len(self._ids) // chunk_size)):
            members = self._ids[chunk * chunk_size:(chunk + 1) * chunk_size]
            torch.save({one: torch.randn(dim) * 0.01 for one in members}, self._file(chunk))

    def _file(self, chunk: int) -> pathlib.Path:
        return self._folder / f"embeddings_chunk_{chunk}.pt"

    def _chunk(self, chunk: int) -> dict[int, torch.Tensor]:
        if chunk not in self._cache:
            self._cache[chunk] = torch.load(self._file(chunk), weights_only=True)
        return self._cache[chunk]

    def get_embeddings(self, ids: list[int]) -> torch.Tensor:
        return torch.stack([self._chunk(self._chunk_of[one])[one] for one in ids])

    def update_embeddings(self, ids: list[int], rows: torch.Tensor) -> None:
        by_chunk: dict[int, list[int]] = {}
        for at, one in enumerate(ids):
            by_chunk.setdefault(self._chunk_of[one], []).append(at)
        for chunk, places in by_chunk.items():
            held = dict(self._chunk(chunk))
            for at in places:
                held[ids[at]] = rows[at].detach().cpu().clone()
                self._pending[ids[at]] = held[ids[at]]
            self._cache[chunk] = held
            self._dirty.add(chunk)
        self._updates += 1
        if self._auto_sync and self._updates >= self._sync_batch_size:
            self.force_sync_all_chunks()

    def force_sync_all_chunks(self) -> None:
        for chunk in sorted(self._dirty):
            torch.save(self._cache[chunk], self._file(chunk))
        self._dirty.clear()
        self._pending.clear()
        self._updates = 0

    def read_files(self) -> torch.Tensor:
        """Every row as the files hold it, in the order of the ids."""
        held: dict[int, torch.Tensor] = {}
        for chunk in range(-(-len(self._ids) // self._chunk_size)):
            held.update(torch.load(self._file(chunk), weights_only=True))
        return torch.stack([held[one] for one in self._ids])
