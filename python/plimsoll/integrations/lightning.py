# SPDX-License-Identifier: Apache-2.0
"""A Lightning Trainer as the loop of a plimsoll.Run: it needs lightning.

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
    """Last among `callbacks`, it makes fit() a loop of `run`, and fit() with its ckpt_path goes on.

    What holds is what holds of a Run: the limit of the process tree, looked at between two optimizer steps;
    commits, by step and by minute, of everything that Lightning saves (module, optimizers, schedulers,
    precision, callbacks, loops), the random states and the place in the data; `plimsoll status|stop|pause|
    continue|limit`, Ctrl-C and SIGTERM. Killed at any instant, the same program ends in the same bits.

    A step that memory refuses (training_step(), backward, clipping, the optimizer's step) is done again, after
    everything was put back and caches were emptied; to the same bits. Refused twice, BudgetExceeded names a limit
    to go on with; the steps before are committed. Put back is what TrainingStep puts back, of modules and generators that can
    be got at from the module, and what it logs; hooks within a step are called again. While the optimizer
    steps, parameters and its states are copied as TrainingStep does it, if that fits.

    Training data comes from run.loader(). A commit is made after an optimizer step that no validation
    follows, and that is not an epoch's last: what is asked for there is done one step later. Asked to stop,
    the run commits, and fit() returns: look at run.stopped. What ends the loop while it waits for a batch
    (MemoryPressure, or a signal that ends a worker, too) finds the last step committed, unless batches of the next
    are being accumulated.

    Started by torchrun, with strategy="ddp", accelerator="cpu" and devices= as many as torchrun starts, ranks are one run, as Run says
    of them: no module is wrapped, and gradients are averaged here, as DistributedDataParallel does it; batch_size is of each rank, each
    draws from (seed, batch, rank), and what one rank is refused, all do again. As many ranks go on as began.

    A step that a validation follows has a commit before it, until one has come to its end with as little memory free.

    What does not hold: no batch is cut into parts (accumulate_grad_batches is the way to smaller ones), and what
    memory refuses elsewhere, in a validation or a hook between steps, ends the program; the last boundary is committed as Run does it.
    Means over an epoch that a module logs begin anew where the program was started again, as they do in Lightning.

    commit_every_steps, commit_every_minutes: optimizer steps, minutes; whichever comes first; 0: not by that.
    cleanup_every_n_steps: optimizer steps; as Run.steps().
    Errors: ValueError for what a run cannot do yet, by its name; as Run.steps() from fit().
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
        """For fit(): None at the first start, which has nothing to go on from."""
        return _NOWHERE if self._loop.goes_on else None

    def checkpoint_io(self) -> TorchCheckpointIO:
        """The plugin that reads ckpt_path. Other checkpoints are read and written as ever."""
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
        """As Life's: Lightning waits for a batch."""
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
        """Whether a validation comes after this batch."""
        every = trainer.val_check_batch
        return bool(trainer.enable_validation and every not in (None, float("inf")) and done % every == 0)


class CleanUpCallback(lightning.pytorch.Callback):
    """Gives back what nobody uses, with a run or without: plimsoll.clean_up() after each validation, and every
    `cleanup_every_n_steps` training batches. Touches no gradient; no result depends on it.

    cleanup_every_n_steps: 0: after validations alone.
    Errors: ValueError for one below 0.
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
    """Watches fit() for leaks, with a run or without: a RuntimeWarning says once whose memory grows, where it is
    allocated, who holds it and what to do. A step is a training batch; validation is the phase "validation".

    watch:             one of your own; `.watch.verdict()` may be asked for at any time.
    log_every_n_steps: a line says who holds how much so often, and at the end a summary says what memory became, the
                       verdict and the largest tensors, whether anything leaks or not. By logging ("plimsoll.watch")
                       where that has a handler, else printed. 0: only leaks are told.
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
    """What Lightning changes for a batch: its counts, what is logged, modules, random states. Gradients and what the
    optimizer writes are remembered where they are about to be changed."""

    def __init__(self, trainer: Any, modules: list[Any], generators: list[Any]) -> None:
        loop = trainer.fit_loop.epoch_loop
        self._logged, self._names = loop._results, set(loop._results)
        self._before = Before([*modules, *loop._results.values()], generators,
                              [loop.automatic_optimization.optim_progress], _scaler(trainer))
        self._also: dict[str, Any] = {}

    def also(self, name: str, remember: Callable[[], Any]) -> None:
        """As it was when it was first asked for: an optimizer may take gradients several times."""
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
    """A part of the run: what Lightning would write into a checkpoint of its own."""

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
