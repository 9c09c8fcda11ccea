# SPDX-License-Identifier: Apache-2.0
"""Teacher: the answers of a trained model, for a student to learn from.

An answer depends on its graph alone. So it is the same from weights that stay, from weights that are read for each step, and
from a file of answers that were given before. The teacher is always in evaluation mode.
Reading order: _models.py, _teacher_file.py, this file.

Threads: the thread that trains.
Memory:  the weights, none between steps where they are released; 9 bytes per graph of the set with a cache. Its file has
         4 · width bytes per graph or node of the set.
"""
from __future__ import annotations

import hashlib
import os
import pathlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from ._models import FEATURES, Autoencoder, Graphs, Model
from ._tasks import Data, Task, model_of
from ._teacher_file import load_teacher

if TYPE_CHECKING:
    from ...memory._memory import Governor
    from . import Options


class Teacher:
    """The teacher of one task."""

    def __init__(self, options: Options, data: Data, task: Task, weights: pathlib.Path | None, governor: Governor,
                 cache: pathlib.Path | None) -> None:
        """Loads the teacher. weights: a file of its weights; None: an untrained one, for plans. cache: a file for its answers, made anew.

        Errors: those of load_teacher(); OSError; ValueError where the cache exceeds the disk limit.
        """
        self._options, self._task, self._data, self._weights = options, task, data, weights
        self._released, self._every = options.offload_teacher_to_cpu, options.clear_cache_every_n
        self.stats = {"asked": 0, "cached": 0, "cleared": 0, "loads": 0}
        """Graphs that were asked, those of them answered from the cache, and how often pages and weights were let go and read."""
        self._model: Model | None = None
        model = self._loaded()
        self._by_node = isinstance(model, Autoencoder)
        self.width = model.mean.bias.numel() + FEATURES if isinstance(model, Autoencoder) else 2
        """Columns of an answer."""
        self.parameters = sum(one.numel() for one in model.state_dict().values())
        self._steps, self._file = 0, -1
        if cache is not None:
            rows = data.nodes if self._by_node else np.ones(len(data.labels), np.int64)
            self._first = np.concatenate([[0], rows.cumsum()])
            self._known = np.zeros(len(rows), bool)
            size = int(self._first[-1]) * 4 * self.width
            if size > governor.disk_limit_bytes:
                raise ValueError(f"disk_limit: the teacher's answers take {size} bytes in {cache.parent}, and {governor.disk_limit_bytes} are "
                                 "left; raise disk_limit, or train with --use-teacher-cache false")
            self._file = os.open(cache, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            os.truncate(self._file, size)

    def answers(self, graphs: Graphs, rehearsal: bool = False) -> torch.Tensor:
        """Answers a batch, without gradient: logits [graphs, 2], or the latent's mean beside the reconstruction [nodes, latent + 10].

        rehearsal: neither counts it nor keeps it.
        """
        if rehearsal:
            return self._computed(graphs)
        self.stats["asked"] += len(graphs)
        if self._file < 0:
            return self._computed(graphs)
        numbers = graphs.numbers.numpy()
        if self._known[numbers].all():
            self.stats["cached"] += len(graphs)
            return self._read(numbers).to(self._data.device)
        made = self._computed(graphs)
        self._keep(numbers, made.cpu().numpy())
        return made

    def end_step(self) -> None:
        """Lets released weights go, and now and then the cache's pages. Call it after each step."""
        if self._released:
            self._model = None
        self._steps += 1
        if self._file >= 0 and self._every and self._steps % self._every == 0:
            os.fsync(self._file)  # Only what is written can be given back.
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
            self.stats["cleared"] += 1

    def sha256(self) -> str:
        """Returns the digest of the file of weights: a resumed task asks the same teacher."""
        assert self._weights is not None
        digest = hashlib.sha256()
        with open(self._weights, "rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
        return digest.hexdigest()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that are in memory now."""
        return 0 if self._model is None else sum(one.numel() * one.element_size() for one in self._model.state_dict().values())

    def close(self) -> None:
        """Closes the file of answers. A second close does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _loaded(self) -> Model:
        if self._model is None:
            model: Model = model_of(self._options, self._data, Task("teacher", self._task.stage), 0) if self._weights is None else load_teacher(
                self._weights, self._data.ids, autoencoder=self._task.stage == "autoencoder", task=self._task.name)
            self._model = model.to(self._data.device).eval().requires_grad_(False)
            self.stats["loads"] += 1
        return self._model

    @torch.no_grad()
    def _computed(self, graphs: Graphs) -> torch.Tensor:
        made = self._loaded()(graphs)
        return torch.cat([made.mean, made.reconstruction], 1) if self._by_node else made.contiguous()

    def _read(self, numbers: np.ndarray) -> torch.Tensor:
        parts = [os.pread(self._file, 4 * self.width * int(end - begin), 4 * self.width * int(begin))
                 for begin, end in zip(self._first[numbers], self._first[numbers + 1], strict=True)]
        return torch.frombuffer(bytearray().join(parts), dtype=torch.float32).reshape(-1, self.width)

    def _keep(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        at = 0
        for number in numbers:
            begin, end = self._first[number], self._first[number + 1]
            if not self._known[number]:
                os.pwrite(self._file, rows[at:at + end - begin].tobytes(), 4 * self.width * int(begin))
                self._known[number] = True
            at += int(end - begin)
