# SPDX-License-Identifier: Apache-2.0
"""Training: the epochs of an autoencoder or a classifier.

    choose the epoch's graphs → batches in a seeded order → a step: loss, gradients, clipping, Adam
    → at an epoch's end validation: the best weights so far are kept, patience counts the other epochs

The curriculum's difficulty is the autoencoder's error. With use_vgae_mining = false it is the classifier's own loss, scored
again every difficulty_cache_update epochs. Neither depends on scoring_chunk.
Reading order: _models.py, _losses.py, _tasks.py, this file, _run.py.

Threads: the thread that trains.
Memory:  the model, a copy of its best weights, 4 bytes per normal graph; a step's tensors.
"""
from __future__ import annotations

import copy
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ... import kernels
from ...data._data import SampleOrder
from ._losses import (
    Terms,
    autoencoder_loss,
    distilled_autoencoder_loss,
    distilled_classifier_loss,
    graph_cross_entropies,
    graph_errors,
)
from ._models import Dense, Draws, Graphs, Model, Pass, again_in_backward, file_tensors, graphs_of
from ._scores import score, youden_threshold
from ._tasks import Data, Task, load_model, model_of, save_model, step_noise, weight_seed

if TYPE_CHECKING:
    from . import Options
    from ._teacher import Teacher

_ORDER, _PROJECTION, _POOL, _BELOW = 0x6F72646572, 0x70726F6A, 0x706F6F6C, 0x62656C6F  # Keys: no two uses share a random number.
_CLIP_EPSILON = 1e-6
_ROW = 4096  # Numbers that one thread sums up.


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """Returns the norm of all numbers, which are summed up row by row: torch divides one long sum among its threads, and their number is in its bits."""
    sums: list[float] = []
    for one in tensors:
        numbers = one.detach().reshape(-1)
        rows = len(numbers) // _ROW
        for part in (numbers[:rows * _ROW].view(rows, _ROW), numbers[None, rows * _ROW:]):
            if part.numel():
                sums += torch.linalg.vector_norm(part, dim=1, dtype=torch.float64).square().tolist()
    return math.sqrt(math.fsum(sums))


# ---- The curriculum ----

def quantile(values: np.ndarray, share: float) -> float:
    """Returns the smallest value that at least `share` of the others do not exceed; NaN is the highest, and that of no values."""
    if not len(values):
        return math.nan
    rank = math.ceil(max(0.0, share * (len(values) - 1) - 1e-6))  # 0.95 · 20 is 19 although 0.95 is not exact.
    return float(np.partition(values, rank)[rank])


@dataclasses.dataclass
class Choice:
    """The graphs of an epoch of the curriculum."""

    graphs: np.ndarray
    normals: int
    threshold: float


def choose(difficulties: np.ndarray, normals: np.ndarray, attacks: np.ndarray, options: Options, epoch: int) -> Choice:
    """Chooses all attacks, and normal graphs by difficulty, as docs/recipes/can-kd-scores.md says.

    difficulties: float32, one for each of `normals`.
    """
    progress = min(1.0, epoch / (options.max_epochs - 1)) if options.max_epochs > 1 else 0.0
    ratio = options.curriculum_start_ratio + (options.curriculum_end_ratio - options.curriculum_start_ratio) * progress
    percentile = options.difficulty_percentile + (options.difficulty_percentile_end - options.difficulty_percentile) * progress
    count = min(len(normals), math.floor(ratio * len(attacks) + 0.5)) if len(attacks) else len(normals)
    threshold = quantile(difficulties, percentile / 100.0)
    in_pool = np.isnan(difficulties) | (difficulties >= threshold)
    pool, below = np.flatnonzero(in_pool), np.flatnonzero(~in_pool)
    from_below = max(0, count - len(pool))
    chosen = np.concatenate([_sample(pool, count - from_below, options.seed ^ _POOL, epoch),
                             _sample(below, from_below, options.seed ^ _BELOW, epoch)])
    return Choice(np.sort(np.concatenate([attacks, normals[chosen]])), count, threshold)


def _sample(among: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    if count >= len(among) or not count:
        return among[:count]
    return among[SampleOrder(len(among), kernels.mix64(seed), epoch).at(np.arange(count, dtype=np.int64))]


def is_taught(options: Options, task: Task) -> bool:
    """Whether a teacher's answers are part of a task's loss."""
    return task.role == "student" and options.use_kd and task.stage in ("autoencoder", "curriculum", "normal")


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Adam:
    """Makes Adam, whose weight decay is added to the gradients. Each step sets its learning rate and weight decay."""
    return torch.optim.Adam(parameters, lr=0.0, weight_decay=0.0, fused=True)


# ---- A step ----

@dataclasses.dataclass
class Step:
    """The batches of one optimizer step, and the place behind them in their epoch."""

    batches: list[Graphs]
    position: int
    ends_epoch: bool
    rehearsal: bool = False


@dataclasses.dataclass
class LookBack:
    """Figures from the end of an epoch, before anything is changed by them."""

    held_out_loss: float
    tests: dict[str, float]
    """Figures of the test files."""
    difficulty: np.ndarray | None
    """Difficulties of the normal graphs, for the next epoch; None: as before."""
    scoring_seconds: float


class Training:
    """Trains the autoencoder or the classifier of one task."""

    def __init__(self, options: Options, data: Data, task: Task, folder: pathlib.Path, teacher: Teacher | None = None) -> None:
        """Makes the model and optimizer of a task. folder: that of the run. teacher: the one to learn from."""
        self.options, self.task, self._data, self._folder, self.teacher = options, task, data, folder, teacher
        self._autoencoder = task.stage == "autoencoder"
        seed = weight_seed(options, task)
        self.model = self._set(model_of(options, data, task, seed))
        self._projection: Dense | None = None
        if teacher is not None and self._autoencoder and teacher.width - 10 != self.model.mean.bias.numel():
            self._projection = Dense(self.model.mean.bias.numel(), teacher.width - 10, Draws(seed ^ _PROJECTION)).to(data.device)
        best = copy.deepcopy(self.model).requires_grad_(False)
        self.module = nn.ModuleDict({"model": self.model, "best": best})
        """Everything that a commit holds of this task, beside `notes`."""
        if self._projection is not None:
            self.module["projection"] = self._projection
        if task.stage == "curriculum":
            self.module.register_buffer("difficulty", torch.zeros(len(data.normals)))
        # due: all steps of the epoch were made, and it was not looked back at yet.
        self.notes: dict[str, Any] = {"epoch": 0, "best_loss": 0.0, "best_epoch": -1, "loss_sum": 0.0, "loss_steps": 0, "scored_epoch": -1,
                                      "due": False}
        self.epochs = options.max_epochs
        self.parameters = sum(one.numel() for one in self.model.parameters())
        self.weight_decay = options.weight_decay
        self._choice: Choice | None = None
        self._scoring_seconds = 0.0
        self._terms: Terms = {}

    def _set(self, model: Model) -> Any:
        model.checkpointing = self.options.gradient_checkpointing
        model.bf16 = self.options.precision != "32"
        return model.to(self._data.device).train()

    def trained(self) -> list[nn.Parameter]:
        """Returns the parameters that the optimizer steps."""
        return [*self.model.parameters(), *(self._projection.parameters() if self._projection is not None else ())]

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        options, epoch = self.options, self.notes["epoch"]
        base = options.vgae_lr if self._autoencoder else options.gat_lr
        if not options.use_scheduler:
            return base
        if options.scheduler_type == "step":
            return base * options.scheduler_gamma ** (epoch // options.scheduler_step_size)
        if options.scheduler_type == "exponential":
            return base * options.scheduler_gamma ** epoch
        turn = epoch / (options.scheduler_t_max if options.scheduler_t_max > 0 else options.max_epochs)
        return base * (0.5 * (1.0 + math.cos(math.pi * turn)))

    @property
    def finished(self) -> bool:
        """Whether no epoch is left, or patience is over."""
        return self._finished(self.notes["epoch"], self.notes["best_epoch"])

    def _finished(self, epoch: int, best_epoch: int) -> bool:
        student = self.task.role == "student" and not self._autoencoder
        patience = self.options.student_gat_patience if student else self.options.patience
        return epoch >= self.epochs or epoch - 1 - best_epoch >= patience

    # ---- The graphs of an epoch ----

    def _candidates(self) -> np.ndarray:
        return self._data.normals if self._autoencoder and len(self._data.normals) else self._data.train

    def _graphs(self, epoch: int) -> np.ndarray:
        if self.task.stage != "curriculum":
            return self._candidates()
        difficulties = self.module.get_buffer("difficulty").cpu().numpy()
        self._choice = choose(difficulties, self._data.normals, self._data.attacks, self.options, epoch)
        return self._choice.graphs

    def begin(self) -> None:
        """Scores what the first epoch needs. Errors: Stopped."""
        if self.task.stage == "curriculum" and self.notes["scored_epoch"] < 0:
            self._take_difficulty(0, *self._difficulty())

    def _difficulty(self) -> tuple[np.ndarray, float]:
        """Returns the difficulty of each normal graph, and the seconds that took. Errors: Stopped."""
        began = time.monotonic()
        if self.options.use_vgae_mining:
            scorer = load_model(self.options, self._data, Task(self.task.role, "autoencoder"), self._folder)
            found = self._answers(self._data.normals, lambda graphs: graph_errors(scorer(graphs), graphs))
        else:
            found = self._answers(self._data.normals, self._losses)
        return found, time.monotonic() - began

    def _take_difficulty(self, epoch: int, found: np.ndarray, seconds: float) -> None:
        self.module.get_buffer("difficulty").copy_(torch.from_numpy(found))
        self.notes["scored_epoch"] = epoch
        self._scoring_seconds = seconds

    def _scores_anew(self, epoch: int) -> bool:
        """Whether an epoch begins with the classifier's own losses, found anew."""
        every = self.options.difficulty_cache_update
        return (self.task.stage == "curriculum" and not self.options.use_vgae_mining and 0 < every <= epoch - self.notes["scored_epoch"])

    def batches(self, epoch: int, position: int) -> Iterator[Step]:
        """Yields the steps of an epoch, from a place in it on."""
        options, graphs = self.options, self._graphs(epoch)
        batches = self._data.set.batches(
            graphs=graphs, batch_graphs=options.batch_size, nodes_max=options.batch_nodes, edges_max=options.batch_edges,
            min_steps=min(options.min_steps_per_epoch, len(graphs)), seed=weight_seed(options, self.task) ^ _ORDER, epoch=epoch,
            position=position)
        try:
            step: list[Graphs] = []
            while position < len(graphs):
                batch = batches.next()
                noise = step_noise(options, self.task, epoch, batch.position)
                step.append(graphs_of(batch, self._data.device, noise))
                position = batch.position + len(batch)
                if len(step) == options.accumulate_grad_batches or batch.ends_epoch:
                    yield Step(step, position, batch.ends_epoch)
                    step = []
        finally:
            batches.close()

    def after(self, step: Step) -> int:
        """Returns the place in the epoch behind a step."""
        return step.position

    def graphs(self, step: Step) -> int:
        """Returns how many graphs a step has."""
        return sum(map(len, step.batches))

    def ends_epoch(self, step: Step) -> bool:
        """Whether a step is the last of its epoch."""
        return step.ends_epoch

    def largest(self, count: int = 0) -> Step:
        """Returns the largest step that will come, to be rehearsed with the largest evaluation. count: of a batch; 0: batch_size."""
        graphs = self._largest(count or self.options.batch_size)
        batch = self._data.read(graphs)
        return Step([batch] * min(self.options.accumulate_grad_batches, 2), 0, False, rehearsal=True)

    def extent(self, count: int) -> tuple[int, int]:
        """Returns the nodes and edges of the largest batch of so many graphs."""
        graphs = self._largest(count)
        return int(self._data.nodes[graphs].sum()), int(self._data.edges[graphs].sum())

    def _largest(self, count: int) -> np.ndarray:
        graphs = self._data.largest(self._candidates(), count)
        for most, sizes in ((self.options.batch_nodes, self._data.nodes), (self.options.batch_edges, self._data.edges)):
            if most:
                graphs = graphs[:max(1, int((sizes[graphs].cumsum() <= most).sum()))]
        return graphs

    # ---- A step ----

    def loss(self, step: Step) -> torch.Tensor:
        """Computes the loss of a step: the mean over its batches."""
        if step.rehearsal:
            self._answer_largest(len(step.batches[0]))
        losses, terms = [], []
        for graphs in step.batches:
            taught = self.teacher.answers(graphs, step.rehearsal) if self.teacher is not None else None
            loss, parts = self._loss(graphs, taught) if len(step.batches) == 1 else again_in_backward(self._loss, graphs, taught)
            self.model.remember()
            losses.append(loss)
            terms.append(parts)
        self._terms = {name: torch.stack([one[name].detach() for one in terms]).mean() for name in terms[0]}
        if self.teacher is not None:
            self.teacher.end_step()
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _loss(self, graphs: Graphs, taught: torch.Tensor | None) -> tuple[torch.Tensor, Terms]:
        options = self.options
        made = self.model(graphs)
        if not self._autoencoder:
            loss = functional.cross_entropy(made, graphs.labels)
            terms = {"cross_entropy": loss}
            if taught is not None:
                loss, more = distilled_classifier_loss(loss, made, taught, alpha=options.kd_alpha, temperature=options.kd_temperature)
                terms.update(more)
            return loss, terms
        loss, terms = autoencoder_loss(made, graphs)
        if taught is not None:
            z = made.z if self._projection is None else self._projection(made.z, Pass(True, 0, 0.0, made.bf16))
            loss, more = distilled_autoencoder_loss(
                loss, z, made, taught, alpha=options.kd_alpha, latent_weight=options.kd_vgae_latent_weight,
                reconstruction_weight=options.kd_vgae_recon_weight)
            terms.update(more)
        return loss, terms

    def clip(self) -> None:
        """Scales the gradients down to the norm gradient_clip. Errors: ValueError where they are not finite."""
        gradients = [one.grad for one in self.trained() if one.grad is not None]
        norm = norm_of(gradients)
        if not math.isfinite(norm):
            raise ValueError(f"{self.task.name}, epoch {self.notes['epoch']}: the gradient's norm is {norm}; lower the learning rate (vgae_lr, "
                             "gat_lr), or train with --precision 32")
        most = self.options.gradient_clip
        if 0.0 < most < norm:
            for one in gradients:
                one.mul_(most / (norm + _CLIP_EPSILON))

    def made(self, loss: float, step: Step) -> dict[str, float]:
        """Counts a step that was made. Returns the terms of its loss."""
        self.notes.update(loss_sum=self.notes["loss_sum"] + loss, loss_steps=self.notes["loss_steps"] + 1, due=step.ends_epoch)
        if self.teacher is not None:
            self.teacher.made()
        return {name: float(value) for name, value in self._terms.items()}

    # ---- An epoch's end ----

    def _answers(self, graphs: np.ndarray, answer: Callable[[Graphs], torch.Tensor]) -> np.ndarray:
        """Returns float32 [graphs], chunk by chunk. The model is as before. Errors: Stopped."""
        self.model.eval()
        try:
            return self._data.score(graphs, self.options.scoring_chunk, lambda chunk: answer(self._data.read(chunk)).cpu().numpy())
        finally:
            self.model.train()

    def _losses(self, graphs: Graphs) -> torch.Tensor:
        made = self.model(graphs)
        return graph_errors(made, graphs) if self._autoencoder else graph_cross_entropies(made, graphs)

    def _scores(self, graphs: Graphs) -> torch.Tensor:
        made = self.model(graphs)
        return graph_errors(made, graphs) if self._autoencoder else torch.softmax(made, 1)[:, 1]

    def _answer_largest(self, count: int) -> None:
        chunk = self.options.scoring_chunk if not self.options.batch_size else max(1, self.options.scoring_chunk * count // self.options.batch_size)
        self.model.eval()
        try:
            with torch.no_grad():
                for graphs in (self._data.held_out, self._data.test):
                    if len(graphs):
                        self._losses(self._data.read(self._data.largest(graphs, min(chunk, self.options.scoring_chunk))))
        finally:
            self.model.train()

    def look_back(self) -> LookBack:
        """Validates, looks at the test files, and scores what the next epoch needs. Nothing is changed. Errors: Stopped."""
        epoch = self.notes["epoch"]
        losses = self._answers(self._data.held_out, self._losses).astype(np.float64)
        if self._autoencoder:
            losses = losses[self._data.labels[self._data.held_out] == 0]
        held_out = float(losses.sum() / len(losses)) if len(losses) else 0.0
        tests = self._test_figures(epoch)
        goes_on = not self._finished(epoch + 1, epoch if self._is_best(held_out) else self.notes["best_epoch"])
        scored = self._difficulty() if goes_on and self._scores_anew(epoch + 1) else (None, 0.0)
        return LookBack(held_out, tests, *scored)

    def _is_best(self, held_out_loss: float) -> bool:
        return self.notes["best_epoch"] < 0 or held_out_loss < self.notes["best_loss"]

    def end_epoch(self, seen: LookBack) -> dict[str, Any]:
        """Ends an epoch that was looked back at, and keeps the weights of the best. Returns the figures of the epoch."""
        notes, epoch = self.notes, self.notes["epoch"]
        best, graphs = self._is_best(seen.held_out_loss), self._graphs(epoch)
        figures: dict[str, Any] = {"epoch": epoch, "loss": notes["loss_sum"] / max(1, notes["loss_steps"]), "held_out_loss": seen.held_out_loss,
                                   "best": best, **seen.tests, "graphs": float(len(graphs)), **self._curriculum_figures()}
        if best:
            notes.update(best_loss=seen.held_out_loss, best_epoch=epoch)
            self.module["best"].load_state_dict(self.model.state_dict())
        notes.update(epoch=epoch + 1, loss_sum=0.0, loss_steps=0, due=False)
        if seen.difficulty is not None:
            self._take_difficulty(epoch + 1, seen.difficulty, seen.scoring_seconds)
        return figures

    def _test_figures(self, epoch: int) -> dict[str, float]:
        """Looks at the test files, which decides nothing."""
        every, graphs = self.options.test_every_n_epochs, self._data.test
        if not every or (epoch + 1) % every or not len(graphs):
            return {}
        scores, labels = self._answers(graphs, self._scores), self._data.labels[graphs]
        found = score(scores, labels, youden_threshold(scores, labels) if self._autoencoder else 0.5)
        return {"test/f1": found["f1"], "test/auc": found["auc"]}

    def _curriculum_figures(self) -> dict[str, float]:
        if self._choice is None:
            return {}
        difficulties = self.module.get_buffer("difficulty").cpu().numpy()
        figures: dict[str, float] = {
            "curriculum/attacks": float(len(self._data.attacks)), "curriculum/normals": float(self._choice.normals),
            "curriculum/threshold": self._choice.threshold,
            **{f"curriculum/difficulty_{percent}": quantile(difficulties, percent / 100.0) for percent in (5, 25, 50, 75, 95)}}
        if self._scoring_seconds:
            figures.update(scored=len(difficulties), scoring_seconds=self._scoring_seconds)
            self._scoring_seconds = 0.0
        return figures

    def save(self, path: pathlib.Path) -> None:
        """Writes the finished model: that of the best epoch, or with save_top_k = 0 of the last."""
        notes = self.notes
        best = self.options.save_top_k > 0 and notes["best_epoch"] >= 0
        save_model(path, file_tensors(self.module["best"] if best else self.model), {
            "task": self.task.name, "parameters": self.parameters, "epochs": notes["epoch"], "best_epoch": notes["best_epoch"],
            "held_out_loss": notes["best_loss"]})
