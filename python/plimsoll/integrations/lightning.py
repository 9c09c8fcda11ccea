# SPDX-License-Identifier: Apache-2.0
"""A Lightning Trainer as the loop of a plimsoll.Run: pip install plimsoll[lightning].

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

import math
from typing import TYPE_CHECKING, Any

import lightning
from lightning.pytorch.plugins.io import TorchCheckpointIO

from .._batch import Batch
from .._run_loader import RunLoader
from .._run_outer import OuterLoop

if TYPE_CHECKING:
    from .._run import Run

_NOWHERE = "plimsoll:the-run-s-last-commit"  # No file: the run reads it.


class RunCallback(lightning.pytorch.Callback):
    """Last among `callbacks`, it makes fit() a loop of `run`, and fit() with its ckpt_path goes on.

    What holds is what holds of a Run: the limit of the process tree, looked at between two optimizer steps;
    commits, by step and by minute, of everything that Lightning saves (module, optimizers, schedulers,
    precision, callbacks, loops), the random states and the place in the data; `plimsoll status|stop|pause|
    continue|limit`, Ctrl-C and SIGTERM. Killed at any instant, the same program ends in the same bits.

    Training data comes from run.loader(). A commit is made after an optimizer step that no validation
    follows, and that is not an epoch's last: what is asked for there is done one step later. Asked to stop,
    the run commits, and fit() returns: look at run.stopped.

    What does not hold: a step is not a transaction. One that is refused memory ends the program, and the
    last commit stands. Means over an epoch that a module logs begin anew where the program was started
    again, as they do in Lightning.

    commit_every_steps, commit_every_minutes: optimizer steps, minutes; whichever comes first; 0: not by that.
    Errors: ValueError for what a run cannot do yet, by its name; as Run.steps() from fit().
    """

    def __init__(self, run: Run, *, commit_every_steps: int = 0, commit_every_minutes: float = 10.0) -> None:
        self._run = run
        self._loop = OuterLoop(run, commit_every_steps=commit_every_steps,
                               commit_every_minutes=commit_every_minutes)
        self._checkpoint = _Checkpoint()
        self._loss: float | None = None
        self._fitted = False
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
        for found, what in ((trainer.world_size > 1, "several processes or devices"),
                            (not pl_module.automatic_optimization, "manual optimization"),
                            (trainer.reload_dataloaders_every_n_epochs, "reload_dataloaders_every_n_epochs")):
            if found:
                raise ValueError(f"RunCallback: a Trainer of a plimsoll.Run cannot have {what}")
        self._checkpoint.trainer = trainer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        data = trainer.train_dataloader
        if not isinstance(data, RunLoader):
            raise ValueError(f"fit: training data is a {type(data).__name__}; a run goes on in run.loader(dataset, "
                             "batch_size=…)")
        self._window = trainer.accumulate_grad_batches
        self._batches = int(trainer.num_training_batches)
        steps = trainer.estimated_stepping_batches  # By max_epochs or max_steps.
        steps = 0 if math.isinf(steps) else int(steps)
        self._loop.begin({**data.shape(), "accumulate": self._window, "batches": self._batches},
                         batches=self._batches, epochs=-(-steps // -(-self._batches // self._window)), steps=steps)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch > 0:
            trainer.train_dataloader.seek(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._loop.put_back_random()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = batch_idx + 1
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._loss = self._loss if loss is None else float(loss)
        if done % self._window or done == self._batches or self._validates(trainer, done) or self._run.stopped:
            return
        trainer.train_dataloader.seek(trainer.current_epoch, done)  # Though more were fetched.
        if self._loop.made(step=trainer.global_step, epoch=trainer.current_epoch, batch=done,
                           rows=self._window * Batch(batch).rows, loss=self._loss):
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._run.stopped:
            self._loop.finished(step=trainer.global_step, epoch=trainer.current_epoch)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._loop.put_back_random()  # A fit that was done already begins no loop.
            self._loop.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._loop.close()

    @staticmethod
    def _validates(trainer: Any, done: int) -> bool:
        """Whether a validation comes after this batch."""
        every = trainer.val_check_batch
        return bool(trainer.enable_validation and every not in (None, float("inf")) and done % every == 0)


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
