# SPDX-License-Identifier: Apache-2.0
"""Teacher: the answers of a trained model, for a student to learn from.

An answer depends on its graph alone. So it is the same from weights that stay, from weights that are read for each step, and
from a file of answers that were given before. The teacher is always in evaluation mode.
Ranks share the file of answers: the first one writes it, and all read what was written in earlier steps.
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

from ._models import FEATURES, Autoencoder, Graphs, Model, file_tensors
from ._tasks import Data, Task, model_of, save_model
from ._teacher_file import is_ours, load_teacher

if TYPE_CHECKING:
    from ...memory._memory import Governor
    from . import Options


class Teacher:
    """The teacher of one task."""

    def __init__(self, options: Options, data: Data, task: Task, weights: pathlib.Path | None, governor: Governor,
                 folder: pathlib.Path | None) -> None:
        """Loads the teacher. weights: a file of its weights; None: an untrained one, for plans. folder: for its answers, and for a copy of
        weights that are read for each step; both are made anew. None: nothing is kept.

        Errors: those of load_teacher(); OSError; ValueError where a file exceeds the disk limit.
        """
        self._options, self._task, self._data, self._weights, self._read_from = options, task, data, weights, weights
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
        self.files: list[pathlib.Path] = []
        """Files that were made in the folder, and are of no use after the task."""
        self._room = governor.disk_limit_bytes
        self._answers: pathlib.Path | None = None
        if folder is not None and options.use_teacher_cache:
            self._answers = self._begin_answers(folder)
        if folder is not None and self._released and weights is not None and not is_ours(weights):
            self._read_from = self._copied(folder, model)

    def _begin_answers(self, folder: pathlib.Path) -> pathlib.Path:
        rows = self._data.nodes if self._by_node else np.ones(len(self._data.labels), np.int64)
        self._first = np.concatenate([[0], rows.cumsum()])
        self._known = np.zeros(len(rows), bool)
        self._fresh: list[np.ndarray] = []  # Numbers of graphs that this step's batches have answers of.
        path = self._placed(folder, "answers", int(self._first[-1]) * 4 * self.width, "train with --use-teacher-cache false")
        if self._data.group.first:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            os.truncate(self._file, int(self._first[-1]) * 4 * self.width)
        return path

    def _copied(self, folder: pathlib.Path, model: Model) -> pathlib.Path:
        """Writes weights of another format as our own, so that each step reads numbers alone."""
        path = self._placed(folder, "teacher.safetensors", 4 * self.parameters, "train with --offload-teacher-to-cpu false")
        if self._data.group.first:
            save_model(path, file_tensors(model), {"task": self._task.name})
        return path

    def _placed(self, folder: pathlib.Path, suffix: str, size: int, advice: str) -> pathlib.Path:
        """Returns a file's name, where it fits into the disk limit. Errors: ValueError."""
        if size > self._room:
            raise ValueError(f"disk_limit: the teacher's {suffix.partition('.')[0]} take {size} bytes in {folder}, and {self._room} are left; "
                             f"raise disk_limit, or {advice}")
        self._room -= size
        folder.mkdir(exist_ok=True)
        self.files.append(folder / f"{self._task.name}.{suffix}")
        return self.files[-1]

    def answers(self, graphs: Graphs, rehearsal: bool = False) -> torch.Tensor:
        """Answers a batch, without gradient: logits [graphs, 2], or the latent's mean beside the reconstruction [nodes, latent + 10].

        rehearsal: neither counts it nor keeps it.
        """
        if rehearsal:
            return self._computed(graphs)
        self.stats["asked"] += len(graphs)
        if self._answers is None:
            return self._computed(graphs)
        numbers = graphs.numbers.numpy()
        if self._known[numbers].all():
            self.stats["cached"] += len(graphs)
            return self._read(numbers).to(self._data.device)
        made = self._computed(graphs)
        self._fresh.append(numbers)
        if self._data.group.first:
            self._keep(numbers, made.cpu().numpy())
        return made

    def made(self) -> None:
        """Counts this step's answers as known. Call it after a step that all ranks have made."""
        if self._answers is not None:
            for numbers in self._fresh:
                self._known[numbers] = True
            self._fresh.clear()

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
            model: Model = model_of(self._options, self._data, Task("teacher", self._task.stage), 0) if self._read_from is None else load_teacher(
                self._read_from, self._data.ids, autoencoder=self._task.stage == "autoencoder", task=self._task.name)
            self._model = model.to(self._data.device).eval().requires_grad_(False)
            self.stats["loads"] += 1
        return self._model

    @torch.no_grad()
    def _computed(self, graphs: Graphs) -> torch.Tensor:
        made = self._loaded()(graphs)
        return torch.cat([made.mean, made.reconstruction], 1) if self._by_node else made.contiguous()

    def _read(self, numbers: np.ndarray) -> torch.Tensor:
        if self._file < 0:
            assert self._answers is not None
            self._file = os.open(self._answers, os.O_RDONLY)
        parts = [os.pread(self._file, 4 * self.width * int(end - begin), 4 * self.width * int(begin))
                 for begin, end in zip(self._first[numbers], self._first[numbers + 1], strict=True)]
        return torch.frombuffer(bytearray().join(parts), dtype=torch.float32).reshape(-1, self.width)

    def _keep(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        at = 0
        for number in numbers:
            begin, end = self._first[number], self._first[number + 1]
            if not self._known[number]:
                os.pwrite(self._file, rows[at:at + end - begin].tobytes(), 4 * self.width * int(begin))
            at += int(end - begin)
