# SPDX-License-Identifier: Apache-2.0
"""RunCallback: a Lightning Trainer as the loop of a plimsoll.Run. It needs lightning.

    import lightning, plimsoll
    from plimsoll.integrations.lightning import RunCallback

    with plimsoll.Run("runs/a", memory_limit="8GiB") as run:
        module = ...                                           # made inside the run: its seed is set
        keeper = RunCallback(run)
        trainer = lightning.Trainer(callbacks=[keeper], plugins=[keeper.checkpoint_io()], max_epochs=3)
        trainer.fit(module, run.loader(dataset, batch_size=32), ckpt_path=keeper.ckpt_path)

Threads: the thread that trains.   Memory: Trainer's; a commit streams tensors from where they are.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy

from ..memory._garbage import clean_up
from ..run._run_life import Intervals
from ..run._run_loader import RunLoader
from ..run._run_outer import OuterLoop
from ..training._batch import Batch
from ..training._reach import reached
from ..training._transaction import Before, GradientsBefore, OptimizersBefore, leaves_of
from ..watch._watch import Watch
from ..watch._watch_loop import LoopWatch

if TYPE_CHECKING:
    from ..run._run import Run

_NOWHERE = "plimsoll:the-run-s-last-commit"  # No file: the run reads it.


class RunCallback(lightning.pytorch.Callback):
    """A callback that makes fit() the loop of `run`. It must be the last of `callbacks`; with its ckpt_path, fit() resumes the run.

    The loop has a Run's properties. The limit covers the process tree and is checked between two optimizer steps.
    Commits, by step and by minute, hold everything that Lightning saves (module, optimizers, schedulers,
    precision, callbacks, loops), the random states and the place in the data. `plimsoll status|stop|pause|
    continue|limit`, Ctrl-C and SIGTERM work. Killed at any instant, the same program ends in the same bits.

    A step that is refused memory (training_step(), backward, clipping, the optimizer's step) is repeated, to the same
    bits, after its changes were undone and caches were emptied. If it is refused twice, BudgetExceeded names a limit
    to resume with; the steps before are committed. The step undoes the same state as TrainingStep, for modules and
    generators reachable from the module, and undoes what it logged. Hooks within a step are called again. While the
    optimizer steps, parameters and optimizer states are copied as in TrainingStep, if the copies fit.

    Training data comes from run.loader(). A commit is made after an optimizer step, unless a validation follows or
    the epoch ends there; a commit due at such a step is made one step later. Asked to stop,
    the run commits, and fit() returns: check run.stopped. If the loop is ended while it waits for a batch (by
    MemoryPressure, or a signal that also ends a worker), the last step is committed, unless batches of the next
    step are being accumulated.

    torchrun may start several ranks of one run, with strategy="ddp", accelerator="cpu" and devices= their number; see
    Run. No module is wrapped: gradients are averaged here, as DistributedDataParallel does. batch_size is the size
    per rank, and each rank draws from (seed, batch, rank). A step refused on one rank is repeated on all. A run must
    resume with the number of ranks that it began with.

    Before a step that a validation follows, the run commits, until one validation has finished with as little memory free.

    Limits: no batch is split (for smaller ones use accumulate_grad_batches). A refusal of memory outside a step, in a
    validation or a hook between steps, ends the program; the last boundary is committed as Run does it.
    Means over an epoch that a module logs start anew when the program is started again, as in Lightning.

    commit_every_steps, commit_every_minutes: optimizer steps, minutes; whichever comes first; 0: not by that.
    cleanup_every_n_steps: optimizer steps; as in Run.steps().
    Errors: ValueError naming what a run cannot do yet; fit() raises those of Run.steps().
    """

    def __init__(self, run: Run, *, commit_every_steps: int = 0, commit_every_minutes: float = 10.0,
                 cleanup_every_n_steps: int = 0) -> None:
        self._run = run
        self._loop = OuterLoop(run, Intervals.of(
            "RunCallback", commit_every_steps=commit_every_steps, commit_every_minutes=commit_every_minutes,
            cleanup_every_n_steps=cleanup_every_n_steps))
        self._checkpoint = _Checkpoint()
        self._loss: float | None = None
        self._fitted = False
        self._data: RunLoader | None = None
        run.track(lightning=self._checkpoint)

    @property
    def ckpt_path(self) -> str | None:
        """The ckpt_path for fit(): None at the first start, which has nothing to resume."""
        return _NOWHERE if self._loop.goes_on else None

    def checkpoint_io(self) -> TorchCheckpointIO:
        """Returns the plugin that reads ckpt_path. Other checkpoints are read and written as usual."""
        return _Reads(self._checkpoint)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if self._fitted:
            raise ValueError(f"fit: {self._run!r} had its fit(); a run is fitted once in a program")
        self._fitted = True
        ranks = self._run.group.count
        for found, what in ((ranks > 1 and not (isinstance(trainer.strategy, DDPStrategy) and trainer.strategy.root_device.type == "cpu"),
                             'several processes without strategy="ddp" and accelerator="cpu"'),
                            (trainer.world_size != ranks, f"{trainer.world_size} processes or devices where the run has {ranks}: torchrun "
                                                          "starts several processes"),
                            (not pl_module.automatic_optimization, "manual optimization"),
                            (trainer.reload_dataloaders_every_n_epochs, "reload_dataloaders_every_n_epochs")):
            if found:
                raise ValueError(f"RunCallback: a Trainer of a plimsoll.Run cannot have {what}")
        self._checkpoint.trainer = trainer
        if ranks > 1:  # Gradients are averaged below.
            trainer.strategy._setup_model = lambda model: model
            self._run.group.must_be_same("the parts", {"the module": pl_module.state_dict()}, "make it in the run, whose seed is the same "
                                          "on all ranks, and load the same files")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        data = trainer.train_dataloader
        if not isinstance(data, RunLoader):
            raise ValueError(f"fit: training data is a {type(data).__name__}; a run goes on in run.loader(dataset, "
                             "batch_size=…)")
        self._window = trainer.accumulate_grad_batches
        self._batches = int(trainer.num_training_batches)
        known = trainer.estimated_stepping_batches  # By max_epochs or max_steps.
        steps = None if math.isinf(known) else int(known)
        self._loop.begin({**data.shape(), "accumulate": self._window, "batches": self._batches}, batches=self._batches,
                         epochs=0 if steps is None else -(-steps // -(-self._batches // self._window)), steps=steps)
        own = [value for name, value in vars(pl_module).items() if name != "_trainer"]
        self._modules, self._generators = reached([pl_module, pl_module.training_step, *own])
        self._data = data
        told: Any = data  # By this loop instead of its own.
        told.ended_waiting = functools.partial(self._ended_waiting, trainer)
        told.agreed = lambda work: self._loop.agreed(work, "the next batch")
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        step = loop.run  # All that a batch changes, and the optimizer's step.

        def drawn(optimizer: Any, batch_idx: int, *arguments: Any) -> Any:
            with self._loop.drawn(trainer.current_epoch * self._batches + batch_idx):
                return step(optimizer, batch_idx, *arguments)

        loop.run = lambda *arguments: self._loop.again(
            trainer.global_step + 1, lambda: drawn(*arguments), lambda: [self._remember(trainer)])

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch > 0:
            trainer.train_dataloader.seek(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._loop.put_back_random()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        leaves = {id(one): one for module in self._modules for one in module.parameters()}
        leaves |= {id(one): one for one in leaves_of(loss)}
        self._undo.also("gradients", lambda: GradientsBefore(leaves.values()))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        parameters = (one for module in self._modules for one in module.parameters())
        self._loop.average(() if trainer.fit_loop._should_accumulate() else parameters, self._modules)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        def copied() -> Any:
            return OptimizersBefore([optimizer], [], alone=_scaler(trainer) is None and not self._run.group.others_may_fail)

        self._undo.also("optimizer", lambda: self._loop.kept(copied) or _NotKept())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = batch_idx + 1
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._loss = self._loss if loss is None else float(loss)
        if done % self._window or done == self._batches or self._validates(trainer, done) or self._run.stopped:
            return
        trainer.train_dataloader.seek(trainer.current_epoch, done)  # Though more were fetched.
        if self._loop.made(step=trainer.global_step, epoch=trainer.current_epoch, batch=done,
                           rows=self._window * Batch(batch).rows * trainer.world_size, loss=self._loss,
                           evaluates=self._validates(trainer, min(done + self._window, self._batches))):
            self._stop(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._loop.evaluated()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._run.stopped:
            self._loop.finished(step=trainer.global_step, epoch=trainer.current_epoch)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._loop.put_back_random()  # A fit that was done already begins no loop.
            self._loop.close()
            vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("run", None)
            if self._data is not None:
                vars(self._data).pop("ended_waiting", None)
                vars(self._data).pop("agreed", None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._loop.close()

    def _remember(self, trainer: Any) -> _Undo:
        self._undo = _Undo(trainer, self._modules, self._generators)
        return self._undo

    def _ended_waiting(self, trainer: Any, error: Exception) -> bool:
        """Handles an error raised while Lightning waits for a batch. Returns True where it was a stop, and the run has committed.

        Otherwise the caller raises it. For MemoryPressure the last step is committed, unless batches of the next step are
        being accumulated.
        """
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        if done % self._window and done != self._batches:
            return False  # Gradients of the next step are there, and no part of a commit.
        self._loop.place(step=trainer.global_step, epoch=trainer.current_epoch, batch=done)
        if not self._loop.ended_waiting(error, trainer.train_dataloader.num_workers):
            return False
        self._stop(trainer)
        return True

    @staticmethod
    def _stop(trainer: Any) -> None:
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
        trainer.should_stop = True

    @staticmethod
    def _validates(trainer: Any, done: int) -> bool:
        """Whether a validation follows batch number `done` of the epoch."""
        every = trainer.val_check_batch
        return bool(trainer.enable_validation and every not in (None, float("inf")) and done % every == 0)


class CleanUpCallback(lightning.pytorch.Callback):
    """A callback that frees unused memory, with a run or without. It calls plimsoll.clean_up() after each validation, and
    every `cleanup_every_n_steps` training batches. It changes no gradient and no result.

    cleanup_every_n_steps: number of batches; 0: after validations alone.
    Errors: ValueError for a number below 0.
    """

    def __init__(self, cleanup_every_n_steps: int = 0) -> None:
        self._every = Intervals.of(type(self).__name__, commit_every_steps=0, commit_every_minutes=0,
                                   cleanup_every_n_steps=cleanup_every_n_steps)
        self._steps = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._steps += 1
        if self._every.clean_up_between(self._steps - 1, self._steps):
            clean_up()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        clean_up()


class WatchCallback(lightning.pytorch.Callback):
    """A callback that watches fit() for leaks, with a run or without. A RuntimeWarning, issued once, names the growing
    owner, the line that allocates, the holder, and a remedy. A step is a training batch; a validation is the phase
    "validation".

    watch:             a Watch of your own. `.watch.verdict()` may be called at any time.
    log_every_n_steps: number of steps between lines with each holder's bytes. A summary at the end has the course of
                       memory, the verdict and the largest tensors, with or without a leak. Lines go to the logger
                       "plimsoll.watch" where it has a handler, else they are printed. 0: only leaks are reported.
    Errors: ValueError for a number below 0.
    """

    def __init__(self, watch: Watch | None = None, log_every_n_steps: int = 0) -> None:
        self._loop = LoopWatch(watch, log_every_n_steps)
        self.watch = self._loop.watch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._loop.step()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._loop.enter("validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._loop.leave()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._loop.end()


class _Undo:
    """The state that Lightning changes for a batch: its counts, logged values, modules, random states. put_back() restores it.

    Gradients, and the state that the optimizer writes, are remembered just before they change."""

    def __init__(self, trainer: Any, modules: list[Any], generators: list[Any]) -> None:
        loop = trainer.fit_loop.epoch_loop
        self._logged, self._names = loop._results, set(loop._results)
        self._before = Before([*modules, *loop._results.values()], generators,
                              [loop.automatic_optimization.optim_progress], _scaler(trainer))
        self._also: dict[str, Any] = {}

    def also(self, name: str, remember: Callable[[], Any]) -> None:
        """Remembers a state once per batch, at the first call: an optimizer may take gradients several times."""
        if name not in self._also:
            self._also[name] = remember()

    def put_back(self) -> None:
        for one in self._also.values():
            one.put_back()
        self._also.clear()
        self._before.put_back()
        for name in self._logged.keys() - self._names:
            del self._logged[name]


class _NotKept:
    def put_back(self) -> None:
        raise RuntimeError("the optimizer's step, whose parameters and states memory was refused to copy")


def _scaler(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


class _Checkpoint:
    """A part of the run: the contents of a checkpoint that Lightning itself would write."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.trainer is None:  # Before fit().
            return {}
        made: dict[str, Any] = self.trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        return made

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state


class _Reads(TorchCheckpointIO):
    def __init__(self, checkpoint: _Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path) != _NOWHERE:
            return super().load_checkpoint(path, *arguments, **options)
        restored, self._checkpoint.restored = self._checkpoint.restored, None
        return restored
