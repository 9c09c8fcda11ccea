# SPDX-License-Identifier: Apache-2.0
"""Tasks of a run, its graphs, and finished models' files.

    autoencoder, curriculum, normal, fusion    of the teacher, then of the student; then evaluation

Threads: the thread that trains.
Memory:  48 bytes per graph of the set; a batch; the weights of the models that are loaded.
"""
from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ... import kernels
from ..._core import crc32c
from ...core._folders import replaced
from ...data._graphs import GraphSet
from ...errors import BudgetExceeded, NotFoundError
from ...ranks._group import Solo
from ._models import Autoencoder, Classifier, Graphs, Model, graphs_of
from ._teacher_file import check_sum, filled, read_weights

if TYPE_CHECKING:
    from ...memory._memory import Governor
    from ...ranks._group import Group
    from . import Options

ROLES = ("teacher", "student")
TRAINED = ("autoencoder", "curriculum", "normal", "fusion")
_NAMES = {"autoencoder": "vgae", "curriculum": "gat_curriculum", "normal": "gat_normal", "fusion": "fusion"}
_WEIGHTS, _NOISE = 0x77656967, 0x6E6F6973  # Streams: no two uses share a random number.
_WORD = (1 << 64) - 1


class Task(NamedTuple):
    """A stage of the teacher's or of the student's."""

    role: str
    stage: str

    @property
    def name(self) -> str:
        return "evaluation" if self.stage == "evaluation" else f"{self.role}_{_NAMES[self.stage]}"

    @property
    def number(self) -> int:
        return ROLES.index(self.role) * 16 + [*TRAINED, "evaluation"].index(self.stage)


def all_tasks() -> list[Task]:
    """Returns every task, in order."""
    return [*(Task(role, stage) for role in ROLES for stage in TRAINED), Task("student", "evaluation")]


def wanted_tasks(options: Options) -> list[Task]:
    """Returns the tasks that `stage`, `model_size` and `run_test` choose."""
    def wanted(task: Task) -> bool:
        if options.stage not in ("all", task.stage):
            return False
        if task.stage == "evaluation":
            return options.stage == "evaluation" or options.run_test
        return options.model_size in ("both", task.role)

    return [task for task in all_tasks() if wanted(task)]


def weight_seed(options: Options, task: Task) -> int:
    """Returns the seed of a task's first weights and of its order."""
    return kernels.mix64((kernels.mix64(options.seed ^ _WEIGHTS) + task.number) & _WORD)


def step_noise(options: Options, task: Task, epoch: int, position: int) -> int:
    """Returns the seed of a batch's dropout and sampling."""
    high, low, *_ = kernels.philox(options.seed ^ _NOISE, (task.number << 32) | epoch, position).tolist()
    return int(high << 32 | low)


class Stopped(Exception):
    """The run was asked to stop, and what was being computed left no trace."""


class Data:
    """The graphs of a run, which are for what, and the ranks that score them."""

    def __init__(self, governor: Governor, options: Options, group: Group | None = None, stop_asked: Callable[[], object] = lambda: False) -> None:
        """Opens the graph set. Errors: ValueError where it has no graph to train on; those of GraphSet.open()."""
        self.group, self._stop_asked = group or Solo(), stop_asked
        self.set = GraphSet.open(governor, options.data, cache_bytes=None if options.cache_bytes < 0 else options.cache_bytes)
        self.ids = self.set.table_rows
        self.train, self.test = self.set.split("train"), self.set.split("test")
        if not len(self.train):
            raise ValueError(f"{options.data}: no graph to train on; import train_* files with `plimsoll import can`")
        held_out = self.set.split("validation")
        self.held_out = held_out if len(held_out) else self.train
        about = self.set.describe()
        self.labels, self.sizes, self.file = about["y"], about["nodes"] + about["edges"], about["file"]
        self.nodes, self.edges = about["nodes"], about["edges"]
        self.normals = self.train[self.labels[self.train] == 0]
        self.attacks = self.train[self.labels[self.train] == 1]
        self.device = torch.device(options.device_name())

    def read(self, graphs: np.ndarray, noise: int = 0) -> Graphs:
        """Reads graphs as one batch for a model."""
        return graphs_of(self.set.read(graphs), self.device, noise)

    def score(self, graphs: np.ndarray, chunk: int, ask: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Returns ask() of `chunk` graphs at a time, given by their numbers; ranks share the chunks. Errors: Stopped."""
        with torch.no_grad():
            return self.group.by_chunks(len(graphs), chunk, lambda begin, end: ask(graphs[begin:end]), self.look)

    def look(self) -> None:
        """Gives up what leaves no trace, where the run is asked to stop. Errors: Stopped."""
        if self._stop_asked():
            raise Stopped

    def largest(self, graphs: np.ndarray, count: int) -> np.ndarray:
        """Returns the `count` largest of these graphs by nodes and edges."""
        return graphs[np.lexsort((graphs, -self.sizes[graphs]))][:count]

    def close(self) -> None:
        self.set.close()


# ---- Models ----

def autoencoder_of(options: Options, data: Data, role: str, seed: int | None) -> Autoencoder:
    """Makes an autoencoder with the role's sizes."""
    widths = [int(word) for word in options.size(role, "vgae_hidden_dims").split(",")]
    return Autoencoder(data.ids, options.size(role, "vgae_embedding_dim"), widths, options.size(role, "vgae_heads"), options.vgae_dropout, seed)


def classifier_of(options: Options, data: Data, role: str, seed: int | None) -> Classifier:
    """Makes a classifier with the role's sizes."""
    def size(name: str) -> int:
        return int(options.size(role, f"gat_{name}"))

    return Classifier(data.ids, size("embedding_dim"), size("hidden"), size("layers"), size("heads"), size("fc_layers"), options.gat_jk == "lstm",
                      options.gat_dropout, seed)


def model_of(options: Options, data: Data, task: Task, seed: int | None) -> Model:
    """Makes the model that a task trains."""
    return (autoencoder_of if task.stage == "autoencoder" else classifier_of)(options, data, task.role, seed)


def model_path(folder: str | os.PathLike[str], task: Task) -> pathlib.Path:
    """Returns RUN/models/TASK.safetensors."""
    return pathlib.Path(folder) / "models" / f"{task.name}.safetensors"


def load_model(options: Options, data: Data, task: Task, folder: str | os.PathLike[str]) -> Model:
    """Reads a finished model of a run, to be asked. Errors: as filled()."""
    path = model_path(folder, task)
    saved = read_weights(path)
    with torch.device("meta"):
        model = model_of(options, data, task, None)
    return filled(path, model, saved).to(data.device)


def read_tensors(path: pathlib.Path) -> dict[str, torch.Tensor]:
    """Reads the tensors of a safetensors file. Errors: NotFoundError; ValueError for a damaged one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise NotFoundError(f"{path}: no such file")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged: {error}") from None


def save_model(path: pathlib.Path, tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    """Writes a finished model as safetensors, with a checksum: whole or not at all, the same bytes of the same tensors. Errors: OSError."""
    rows = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}
    told = {"format": "plimsoll.can_kd.1", **{key: str(value) for key, value in about.items()}, "crc32c": "0" * 8}
    header: dict[str, Any] = {"__metadata__": told}
    end = 0
    for name, values in rows.items():
        header[name] = {"dtype": f"F{8 * values.itemsize}", "shape": list(values.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    text = json.dumps(header, separators=(",", ":"))
    text += " " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text.encode()
    parts = [values.reshape(-1).view(np.uint8) for values in rows.values()]
    found = functools.reduce(lambda sum_, part: crc32c(part, sum_), parts, crc32c(np.frombuffer(begin, np.uint8), 0))
    path.parent.mkdir(exist_ok=True)
    with replaced(path) as partial, open(partial, "wb") as file:
        file.write(begin.replace(b'"crc32c":"00000000"', f'"crc32c":"{found:08x}"'.encode()))
        for part in parts:
            file.write(part.data)


@contextlib.contextmanager
def fits(task: Task, options: Options, data: Data, governor: Governor) -> Iterator[None]:
    """Names a task that is refused memory, and the limit that its models need where they do not fit. Errors: BudgetExceeded."""
    try:
        yield
    except BudgetExceeded as error:
        error.args = (error.args[0] if task.name in str(error) else f"{task.name}: {error}", *error.args[1:])
        raise
    except torch.OutOfMemoryError as error:
        if data.device.type != "cpu":
            raise
        with torch.device("meta"):
            model = model_of(options, data, task, None)
        needed = 5 * sum(one.numel() * one.element_size() for one in model.parameters())  # Best weights, gradients and Adam's, too.
        raise governor.refusal("tensors", needed, f"{task.name}: its model does not fit: {error}") from None


def about_model(path: pathlib.Path) -> dict[str, str]:
    """Returns what save_model() wrote beside the tensors, all of which are compared with their checksum. Errors: CorruptError."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        about = dict(file.metadata() or {})
    check_sum(path, about["crc32c"].encode())
    return about
