# SPDX-License-Identifier: Apache-2.0
"""The run: task by task, each a loop of plimsoll.Run; then the evaluation, and the summary.

    the graphs, and how far the last commit had come → what each task needs is there
    → per task: its model and teacher, the loop, the finished model's file, one more step that notes the end
    → evaluation

A commit holds the model, the best weights and the optimizer of the task in progress alone. Between two tasks it holds none.
Every rank makes each step whole, since a batch's graphs share batch statistics; ranks share the graphs that are scored.
A stop ends a validation at once. The epoch then stays due, and the resumed run looks back at it before its next step.
Reading order: _tasks.py, _training.py, _teacher.py, _fusion.py, this file.

Threads: the thread that trains.
Memory:  one task's, see _training.py and _teacher.py; the graph set's cache.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import BudgetExceeded, NotFoundError
from ...ranks._virtual_workers import WorkerBatches
from ...training._step import TrainingStep
from ._evaluate import evaluate, originals_of
from ._fusion import Fusion
from ._plan import plan_tasks, tightest
from ._tasks import Data, Stopped, Task, about_model, all_tasks, fits, model_path, wanted_tasks
from ._teacher import Teacher
from ._teacher_file import find_teacher
from ._training import Training, is_taught, optimizer_of

if TYPE_CHECKING:
    from ...run._run import Run
    from . import Options

__all__ = ["CanKd", "evaluate_run", "originals_of"]

Work = Training | Fusion


class Epochs:
    """Batches of a task for run.steps(), which begin at any place."""

    def __init__(self, work: Work, before: int) -> None:
        """Begins the count at epoch 0 of a task. before: epochs of the run before this task."""
        self._work: Any = work
        self._before = before
        self._epoch = self._position = 0
        self.seen: Any = None
        """The look back of a resumed run at an epoch whose steps were all made. The loop puts back what was committed, and then ends the epoch."""

    @property
    def place(self) -> tuple[int, int, int]:
        """The place behind the last batch, for seek()."""
        return self._before + self._epoch, self._position, 0

    def seek(self, place: tuple[int, int, int]) -> None:
        self._epoch, self._position = place[0] - self._before, place[1]

    def __iter__(self) -> Iterator[Any]:
        """Yields the rest of the epoch."""
        if self.seen is not None:
            self._work.end_epoch(self.seen)
            self.seen = None
            return
        for batch in self._work.batches(self._epoch, self._position):
            self._position = self._work.after(batch)
            yield batch


class Bench(nn.Module):
    """Holds the tensors, the optimizer and the notes of the task in progress, for commits."""

    work: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.zeros(1))  # The optimizer's, between two tasks.
        self.optimizer = optimizer_of([self.idle])
        self.notes: dict[str, Any] = {}

    def put(self, work: Work | None) -> None:
        """Puts a task's tensors and notes in place of the last one's."""
        if "work" in dict(self.named_children()):
            del self.work
        self.notes.clear()
        self.optimizer.state.clear()
        group = self.optimizer.param_groups[0]
        group.update(params=[self.idle] if work is None else work.trained(), lr=0.0, weight_decay=0.0)
        if work is not None:
            self.work = work.module
            self.notes.update(work.notes)
            work.notes = self.notes


class CanKd:
    """One life of a run."""

    def __init__(self, run: Run, options: Options) -> None:
        """Opens the data. Errors: those of the graph set, on all ranks."""
        self.run, self.options, self.folder = run, options, pathlib.Path(run.path)
        self.data: Data = run.group.on_all("the beginning", lambda: Data(run.governor, options, run.group, lambda: run.stop_asked))
        self.bench = Bench()
        # Which task is in progress, with which teacher; tasks that ended, in order, with their epochs.
        self.notes: dict[str, Any] = {"task": "", "teacher_sha256": "", "ended": [], "data": self.data.set.info["fingerprint"], "batch_size": 0,
                                      "admitted": []}
        self._graphs = 0
        self._began = time.monotonic()
        self._evaluated: tuple[dict[str, Any], str] = {}, ""

    def train(self) -> dict[str, Any]:
        """Does the tasks that `stage` and `model_size` choose, the interrupted one first. Returns the entries of the summary."""
        run, fingerprint = self.run, self.notes["data"]
        try:
            run.track(notes=self.notes)
            if self.notes["data"] != fingerprint:
                raise ValueError(f"data: {self.options.data} is another set than the run began with ({fingerprint}, and was {self.notes['data']})")
            tasks = self._tasks()
            self._unless_stopped(functools.partial(self._prepare, tasks))
            if tasks and tasks[0].stage != "evaluation" and not run.stopped:
                self._train(tasks)
            if tasks and tasks[-1].stage == "evaluation" and not run.stopped:
                self._evaluate()
            return self._summary()
        finally:
            self.data.close()

    # ---- Which tasks ----

    def _tasks(self) -> list[Task]:
        """Returns what is asked for and not done, what was interrupted first. Errors: NotFoundError naming what a task lacks."""
        named, wanted = self.notes["task"], wanted_tasks(self.options)
        tasks = [task for task in all_tasks() if task.name == named or (task in wanted and not self._is_done(task))]
        tasks.sort(key=lambda task: task.name != named)
        for at, task in enumerate(tasks):
            before = tasks[:at]
            if task.stage == "fusion":
                self._require(Task(task.role, "autoencoder"), task, before)
                self._require(Task(task.role, self.options.fusion_gat), task, before)
            if task.stage == "curriculum" and self.options.use_vgae_mining:
                self._require(Task(task.role, "autoencoder"), task, before)
            if is_taught(self.options, task) and self.options.teacher_path:
                find_teacher(self.options.teacher_path, Task("teacher", task.stage).name)
            elif is_taught(self.options, task):
                self._require(Task("teacher", task.stage), task, before)
        return tasks

    def _is_done(self, task: Task) -> bool:
        return task.name in dict(self.notes["ended"])

    def _require(self, needed: Task, by: Task, before: list[Task]) -> None:
        if not self._is_done(needed) and needed not in before:
            raise NotFoundError(
                f"{by.name} needs {needed.name}, which {self.folder} does not have; first run --stage {needed.stage} --model-size {needed.role}"
                + ("; or give --teacher-path, or train without a teacher: --use-kd false" if needed.role != by.role else ""))

    def _prepare(self, tasks: list[Task]) -> None:
        """Plans and rehearses what comes before the first step. Errors: Stopped; BudgetExceeded."""
        if not self.options.batch_size:
            self._choose_batch_size()
        self._admit(tasks)

    def _choose_batch_size(self) -> None:
        """Replaces batch_size = auto, which is 0, by the planned number, once. It is part of the run from the first commit on."""
        if not self.notes["batch_size"]:
            plans = plan_tasks(self.options, self.data, self.run.governor)
            name = tightest(plans)
            least = plans.pop(name)
            size = self._proved(next(task for task in wanted_tasks(self.options) if task.name == name), least.batch_size)
            self.notes["batch_size"] = size
            self.run.event("batch_size", batch_size=size, task=name, label=least.label, peak_bytes=least.peak_bytes)
        self.options = dataclasses.replace(self.options, batch_size=self.notes["batch_size"])

    def _proved(self, task: Task, size: int) -> int:
        """Returns the planned size, or sixteenths less where its step is refused beside what planning left. Errors: BudgetExceeded; Stopped."""
        while True:
            self.data.look()
            self.options = dataclasses.replace(self.options, batch_size=size)
            try:
                self.run.group.on_all("the parts", functools.partial(self._rehearse, task))
                self.notes["admitted"] = sorted({*self.notes["admitted"], task.name})
                return size
            except BudgetExceeded as error:
                if error.tag != "tensors" or size <= 16:
                    raise
                size -= size // 16

    def _admit(self, tasks: list[Task]) -> None:
        """Rehearses the largest step of each task that no life has rehearsed yet, so that none is refused when its turn comes.

        The first task's own step rehearses it. Errors: BudgetExceeded naming the task.
        """
        trained = [task for task in tasks if task.stage not in ("fusion", "evaluation")]
        for task in trained[1:]:
            if task.name not in self.notes["admitted"]:
                self.data.look()
                self.run.group.on_all("the parts", functools.partial(self._rehearse, task))
        self.notes["admitted"] = sorted({*self.notes["admitted"], *(task.name for task in trained)})

    def _rehearse(self, task: Task) -> None:
        work, run = self._training(task, rehearsal=True), self.run
        largest = work.largest()
        step = TrainingStep(work.module, optimizer_of(work.trained()), before_update=work.clip)
        with fits(task, self.options, self.data, self.run.governor):  # Its state, which the rehearsal puts back, may not.
            admitted = step.admit(largest, work.loss)
        run.event("rehearsed", task=task.name, graphs=work.graphs(largest), admitted_bytes=admitted)

    # ---- The tasks ----

    def _train(self, tasks: list[Task]) -> None:
        run = self.run
        work = None
        if self.notes["task"] and (work := self._begin(tasks[0])) is None:
            return
        run.track(model=self.bench, optimizer=self.bench.optimizer, work=self.bench.notes)
        if work is not None and self.notes["teacher_sha256"] != self._teacher_sha256(work):
            raise ValueError(f"{self.folder}: {tasks[0].name} was begun with another teacher; name the one it was begun with (--teacher-path), or "
                             "train anew")
        before = 0
        for _, epochs in self.notes["ended"]:  # Their loops are over: the task's, and that of its last step.
            for each in (epochs, 1):
                before += each
                for _ in run.steps([0], epochs=each, progress=False):
                    raise AssertionError("a loop that has ended gives no batch")
        for task in tasks:
            if task.stage == "evaluation":
                break
            resumed, work = work is not None, work or self._begin(task)
            if work is None:
                break
            ended = self._unless_stopped(functools.partial(self._loop, task, work, before, resumed))
            if run.stopped:
                break
            before, work = ended, None

    def _unless_stopped(self, work: Callable[[], Any]) -> Any:
        """Returns work(), which a stop may give up; None where the run was asked to stop."""
        while True:
            try:
                return work()
            except Stopped:
                if self.run.idle(0):
                    return None

    def _begin(self, task: Task) -> Work | None:
        """Makes a task's work, and lays it on the bench. None: the run was asked to stop meanwhile.

        Errors: BudgetExceeded where its models alone do not fit.
        """
        work: Work | None = self._unless_stopped(lambda: Fusion(self.options, self.data, task.role, self.folder)) if task.stage == "fusion" else \
            self.run.group.on_all("the parts", lambda: self._training(task))
        if work is not None:
            self.bench.put(work)
        return work

    def _training(self, task: Task, rehearsal: bool = False) -> Training:
        with fits(task, self.options, self.data, self.run.governor):
            teacher = self._teacher(task, rehearsal) if is_taught(self.options, task) else None
            return Training(self.options, self.data, task, self.folder, teacher)

    def _teacher(self, task: Task, rehearsal: bool) -> Teacher:
        named = Task("teacher", task.stage)
        weights: pathlib.Path | None = model_path(self.folder, named)
        if self.options.teacher_path:
            weights = find_teacher(self.options.teacher_path, named.name)
        elif not self._is_done(named):
            weights = None  # Its turn comes before this task's.
        return Teacher(self.options, self.data, task, weights, self.run.governor, None if rehearsal else self.folder / "cache")

    @staticmethod
    def _teacher_sha256(work: Work) -> str:
        return work.teacher.sha256() if isinstance(work, Training) and work.teacher is not None else ""

    def _loop(self, task: Task, work: Work, before: int, resumed: bool) -> int:
        """Trains a task to its end, or until the run is asked to stop. Returns the epochs of the run so far. Errors: Stopped before its loop."""
        run, options, epochs, over = self.run, self.options, Epochs(work, before), False
        self.notes.update(task=task.name, teacher_sha256=self._teacher_sha256(work))
        run.event("task", step=run.steps_made, task=task.name, resumed=resumed, parameters=work.parameters)
        work.begin()
        if work.notes.get("due"):
            epochs.seen = self._look_back(work)
            self._end_epoch(task, work, epochs.seen, run.steps_made)
            over = work.finished
        largest = work.largest() if isinstance(work, Training) else None
        batches = run.steps(epochs, epochs=work.epochs, largest=largest, cleanup_every_n_steps=options.cleanup_every_n_steps)
        for batch in () if over else batches:
            largest = None
            self._step(task, work, batch[0] if isinstance(batch, WorkerBatches) else batch)
            if work.finished:
                break
        if not run.stopped:
            run.end_loop()
            self._end(task, work)
        return before + work.epochs + 1

    def _step(self, task: Task, work: Any, batch: Any) -> None:
        run, bench = self.run, self.bench
        epoch = bench.notes.get("epoch", 0)
        bench.optimizer.param_groups[0].update(lr=work.rate, weight_decay=work.weight_decay)
        loss = run.step(work.loss, batch, before_update=work.clip)
        terms, graphs = work.made(loss, batch), work.graphs(batch)
        self._graphs += graphs
        run.event("step", step=run.steps_made + 1, task=task.name, epoch=epoch, loss=loss, graphs=graphs, **terms)
        if (run.steps_made + 1) % self.options.log_every_n_steps == 0:
            figures = {"loss": loss, **{f"loss/{name}": value for name, value in terms.items()}}
            run.scalars({**_tagged(task, figures), "speed/graphs_per_second": self._speed()})
        if work.ends_epoch(batch):
            with contextlib.suppress(Stopped):  # The boundary obeys, and the epoch stays due.
                self._end_epoch(task, work, self._look_back(work), run.steps_made + 1)

    def _look_back(self, work: Any) -> Any:
        with self.run.phase("evaluate"):
            return work.look_back()

    def _end_epoch(self, task: Task, work: Any, seen: Any, step: int) -> None:
        run, epoch = self.run, work.notes.get("epoch", 0)
        figures = work.end_epoch(seen)
        run.event("epoch", **{"step": step, "task": task.name, "epoch": epoch, **figures, "graphs_per_second": self._speed(),
                              "leased_bytes": run.governor.ledger().leased_bytes})
        run.scalars(_tagged(task, {"epoch_loss" if name == "loss" else name: one for name, one in figures.items() if name not in ("epoch", "best")}))

    def _end(self, task: Task, work: Work) -> None:
        """Writes the finished model. Then comes a step that notes the end: a kill between them trains nothing again."""
        run, files = self.run, []
        if run.is_writer:
            work.save(model_path(self.folder, task))
        if isinstance(work, Training) and work.teacher is not None:
            files = work.teacher.files
            run.event("teacher", step=run.steps_made, task=task.name, parameters=work.teacher.parameters, **work.teacher.stats,
                      weight_bytes=work.teacher.weight_bytes)
            work.teacher.close()
        run.event("task_done", step=run.steps_made, task=task.name, parameters=work.parameters)
        for _ in run.steps([0], progress=False):
            self.bench.put(None)
            self.notes.update(task="", teacher_sha256="", ended=[*self.notes["ended"], [task.name, work.epochs]])
        for file in files if run.is_writer else ():
            file.unlink(missing_ok=True)

    def _evaluate(self) -> None:
        run = self.run

        def evaluated() -> tuple[dict[str, Any], str]:
            with run.phase("evaluate"):
                return evaluate(self.options, self.data, self.folder, run.is_writer)

        said = self._unless_stopped(evaluated)
        if said is not None:
            self._evaluated = said
            run.event("eval", step=run.steps_made, file="evaluation.json")

    # ---- The summary ----

    def _speed(self) -> float:
        return self._graphs / max(time.monotonic() - self._began, 1e-9)

    def _summary(self) -> dict[str, Any]:
        models = {}
        for task in all_tasks():
            if self._is_done(task):
                about = about_model(model_path(self.folder, task))
                models[task.name] = {"parameters": int(about["parameters"]), "epochs": int(about.get("epochs", 0)),
                                     "held_out_loss": float(about.get("held_out_loss", 0.0))}
        return {"models": models, "graphs_per_second": self._speed(), "evaluation": self._evaluated[0], "state_sha256": self._digest()}

    def _digest(self) -> str:
        """Returns the SHA-256 of the finished models, and of the task in progress."""
        digest = hashlib.sha256()
        for task in all_tasks():
            if self._is_done(task):
                digest.update(task.name.encode() + model_path(self.folder, task).read_bytes())
        if self.notes["task"]:
            for name, tensor in self.bench.state_dict().items():
                digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


def _tagged(task: Task, figures: dict[str, Any]) -> dict[str, Any]:
    """Returns a task's figures by their tags for TensorBoard."""
    return {f"{task.name}/{name}": one for name, one in figures.items()}


def evaluate_run(options: Options) -> tuple[dict[str, Any], str]:
    """Evaluates a run's finished models, and changes nothing in it. Errors: NotFoundError where there is none."""
    from ...memory._memory import Governor

    with Governor(options.memory_limit, foreign_bytes=options.foreign_bytes, directory=options.out) as governor:
        data = Data(governor, options)
        told, text = evaluate(options, data, options.out, False)
        data.close()
    if not told:
        raise NotFoundError(f"{options.out}: no finished model to evaluate; train it first")
    return told, text
