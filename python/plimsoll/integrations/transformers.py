# SPDX-License-Identifier: Apache-2.0
"""RunMixin: a Hugging Face Trainer as the loop of a plimsoll.Run. It needs transformers and accelerate.

    import plimsoll, transformers
    from plimsoll.integrations.transformers import RunMixin

    class Trainer(RunMixin, transformers.Trainer):
        pass

    with plimsoll.Run("runs/a", memory_limit="8GiB") as run:
        model = ...                                            # made inside the run: its seed is set
        Trainer(model, arguments, train_dataset=data, run=run).train()

Threads: the thread that trains.   Memory: Trainer's; a commit streams tensors from where they are.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.trainer_callback import ExportableState

from .. import _core
from ..core._random_states import RandomStates
from ..errors import BudgetExceeded
from ..memory._garbage import clean_up
from ..run._run_life import Intervals
from ..run._run_outer import OuterLoop
from ..training._reach import reached
from ..training._transaction import Before, GradientsBefore, OptimizersBefore, Unwritten
from ..watch._watch import Watch
from ..watch._watch_loop import LoopWatch

if TYPE_CHECKING:
    from ..run._run import Run

_STATE_FILE = "trainer_state.json"  # Trainer reads it from the folder that it resumes from.


class RunMixin:
    """A mixin that makes train() the loop of `run`. List it before transformers.Trainer among the base classes.

    The same program, started again, resumes the run.

    The loop has a Run's properties. The limit covers the process tree and is checked between two optimizer steps.
    Commits, by step and by minute, hold model, optimizer, scheduler, scaler, random states, place in the data,
    and the Trainer's own state with its callbacks'. `plimsoll status|stop|pause|continue|limit`, Ctrl-C and
    SIGTERM work. Killed at any instant, the same program ends in the same bits.

    A step that is refused memory is repeated from where it was refused (forward and backward of a batch, clipping, or
    the optimizer's step), to the same bits, after its changes were undone and caches were emptied. If it is refused
    twice, BudgetExceeded names a limit to resume with; the steps before are committed. The step undoes the same state as
    TrainingStep, for modules and generators reachable from model and Trainer; compute_loss() then runs twice.
    While the optimizer steps, parameters and optimizer states are copied as in TrainingStep, if the copies fit.

    The order of the data is the run's (RunLoader: from the run's seed, an item's random states from seed,
    epoch and index), for any dataloader_num_workers. Asked to stop, the run commits and train() returns: check
    run.stopped. If the loop is ended while it waits for a batch (by MemoryPressure, or a signal that also ends a
    worker), the last step is committed.

    After an evaluation, unused memory is freed.

    A logged loss is Trainer's mean over the steps since the last log, those before a restart included.
    Callbacks are restored only with restore_callback_states_from_checkpoint=True, as in Trainer.

    torchrun may start several ranks of one run, on the CPU, if the run is made before TrainingArguments; see Run.
    Trainer uses no DistributedDataParallel: gradients are averaged here, as it does. per_device_train_batch_size is the
    size per rank, and each rank draws from (seed, batch, rank). A step refused on one rank is repeated on all. A run
    must resume with the number of ranks that it began with.

    Before a step that an evaluation follows, the run commits, until one evaluation has finished with as little memory
    free. An evaluation that is refused memory loses that step at most.

    Limits: no batch is split (for smaller ones use gradient_accumulation_steps). A refusal of memory outside a step, in
    an evaluation or a collator, ends the program; the last boundary is committed as Run does it.
    Trainer's own checkpoints (save_strategy) are still written, and nothing reads them: turn them off with
    save_strategy="no", unless load_best_model_at_end needs them.

    run:                  an open plimsoll.Run that tracks nothing named model, optimizer,
                          scheduler, scaler or trainer.
    commit_every_steps, commit_every_minutes: optimizer steps, minutes; whichever comes first; 0: not by that.
    cleanup_every_n_steps: optimizer steps; as in Run.steps().
    Errors: ValueError naming what a run cannot do yet: several devices, virtual workers, DeepSpeed,
            FSDP, auto_find_batch_size, model_init, optimizers that step in backward, datasets without a length,
            orders other than random and sequential; train() raises those of Run.steps() and again().
    """

    def __init__(self, *arguments: Any, run: Run, commit_every_steps: int = 0,
                 commit_every_minutes: float = 10.0, cleanup_every_n_steps: int = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.run = run
        self._loop = OuterLoop(run, Intervals.of(
            type(self).__name__, commit_every_steps=commit_every_steps, commit_every_minutes=commit_every_minutes,
            cleanup_every_n_steps=cleanup_every_n_steps))
        self._began = False
        self._micro = 0  # Batches of the step that is being made.
        self._refuse_what_is_not_possible()
        self._boundary = _Boundary(self)
        self.add_callback(self._boundary)  # type: ignore[attr-defined]

    def train(self, resume_from_checkpoint: Any = None, **options: Any) -> Any:
        """Trains from the run's last commit, with Trainer's options. resume_from_checkpoint: None or True; both do the same."""
        if resume_from_checkpoint not in (None, True):
            raise ValueError(f"train: resume_from_checkpoint={resume_from_checkpoint!r}, and {self.run!r} goes on "
                             "from its own last commit: leave it out")
        if self._began:
            raise ValueError(f"train: {self.run!r} had its train(); a Trainer of a run trains once")
        self._began = True
        state = self._run_state = _State(self)
        self.run.track(trainer=state)
        try:
            if not self._loop.goes_on:
                return super().train(**options)  # type: ignore[misc]
            with tempfile.TemporaryDirectory() as folder:
                with open(os.path.join(folder, _STATE_FILE), "w", encoding="utf-8") as file:
                    file.write(state.restored)
                return super().train(resume_from_checkpoint=folder, **options)  # type: ignore[misc]
        finally:
            self._loop.close()

    def get_train_dataloader(self) -> Any:
        """Returns a data loader over train_dataset in the run's order."""
        made: Any = self
        args, dataset, collate = made.args, made.train_dataset, made.data_collator
        if transformers.utils.is_datasets_available() and type(dataset).__module__.startswith("datasets."):
            dataset = made._remove_unused_columns(dataset, description="Training")
        else:
            collate = made._get_collator_with_removed_columns(collate, description="Training")
        self._data = self.run.loader(
            dataset, batch_size=made._train_batch_size, workers=args.dataloader_num_workers, collate_fn=collate,
            shuffle=args.train_sampling_strategy == "random", drop_last=args.dataloader_drop_last,
            prefetch=args.dataloader_prefetch_factor or 2,
            start_method=args.dataloader_multiprocessing_context or "fork")
        return self._data.data_loader()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Reports the previous step, now logged and evaluated, to the run. Returns no batches if the run is to stop."""
        made: Any = self
        self._micro = 0
        if not self._boundary.tell(made.state):
            try:
                batches = self._loop.agreed(lambda: [*itertools.islice(epoch_iterator, num_batches)], "the next batch")
                return super().get_batch_samples(iter(batches), num_batches, device)  # type: ignore[misc]
            except Exception as error:
                if not self._loop.ended_waiting(error, self._data.num_workers):
                    raise
        made.control.should_training_stop = True
        return [], None

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Makes Trainer's step, averaged over all ranks, and repeats it where memory refused it."""
        made: Any = self
        step = super().training_step  # type: ignore[misc]
        number = made.state.global_step * made.args.gradient_accumulation_steps + self._micro

        def averaged() -> Any:
            with self._loop.drawn(number):
                loss = step(model, inputs, *arguments, **options)
            self._loop.average(self._trained.values() if made.accelerator.sync_gradients else (), [model])
            return loss

        loss = self._again(averaged, self._before_step)
        self._micro += 1
        return loss

    def create_accelerator_and_postprocess(self) -> None:
        """Makes Trainer's accelerator, changed to wrap no model: training_step() averages gradients."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        made: Any = self
        made.accelerator.prepare_model = functools.partial(made.accelerator.prepare_model, evaluation_mode=True)

    def evaluate(self, *arguments: Any, **options: Any) -> Any:
        """Evaluates as Trainer does, in the run's phase "evaluation". Its random numbers, with any number of workers, do
        not change the training."""
        before = RandomStates()
        try:
            with self.run.phase("evaluation"), _evaluation():
                return super().evaluate(*arguments, **options)  # type: ignore[misc]
        finally:
            before.put_back()

    def predict(self, *arguments: Any, **options: Any) -> Any:
        """Predicts as Trainer does, in the run's phase "evaluation"."""
        with self.run.phase("evaluation"), _evaluation():
            return super().predict(*arguments, **options)  # type: ignore[misc]

    def _again(self, work: Callable[[], Any], remember: Callable[[], list[Any]]) -> Any:
        made: Any = self
        return self._loop.again(made.state.global_step + 1, work, remember)

    def _prepare_steps(self) -> None:
        """Finds all state that a step changes, and wraps the optimizer's step and clipping to be repeated where memory refuses.

        Called once all of that state exists.
        """
        made: Any = self
        self._modules, self._generators = reached([made.model_wrapped, made.compute_loss, made])
        self._trained = {id(one): one for module in self._modules for one in module.parameters() if one.requires_grad}
        step, clip = made.optimizer.step, made.accelerator.clip_grad_norm_

        @functools.wraps(step)  # A scheduler wants to find its own mark there.
        def step_again(*arguments: Any) -> None:
            before = self._loop.kept(self._before_update)
            self._loop.agreed(lambda: step(*arguments)) if before is None else self._again(lambda: step(*arguments), lambda: before)

        def clip_again(parameters: Any, *arguments: Any, **options: Any) -> Any:
            listed = list(parameters)  # Trainer gives an iterator, which can be read once.
            return self._again(lambda: clip(listed, *arguments, **options), self._before_clipping)

        made.optimizer.step, made.accelerator.clip_grad_norm_ = step_again, clip_again

    def _before_step(self) -> list[Any]:
        made: Any = self
        return [Before(self._modules, self._generators, [], made.accelerator.scaler),
                GradientsBefore(self._trained.values())]

    def _before_clipping(self) -> list[Any]:
        made: Any = self
        gradients = [one.grad for one in self._trained.values() if one.grad is not None]
        before = GradientsBefore(self._trained.values()) if self.run.group.others_may_fail else Unwritten("gradients", gradients)
        return [before, Before([], [], [], made.accelerator.scaler)]  # Another rank may have clipped what this one was refused.

    def _before_update(self) -> list[Any]:
        made: Any = self
        scaler = made.accelerator.scaler
        alone = scaler is None and not self.run.group.others_may_fail
        return [OptimizersBefore([made.optimizer.optimizer], [], alone=alone), Before([], [], [], scaler)]

    # Trainer would restore these from its own checkpoint. In a run all is restored where it is tracked.

    def _load_from_checkpoint(self, *_: Any, **__: Any) -> None:
        pass

    def _load_optimizer_and_scheduler(self, *_: Any) -> None:
        pass

    def _load_scaler(self, *_: Any) -> None:
        pass

    def _load_rng_state(self, *_: Any) -> None:
        self._loop.put_back_random()

    def _refuse_what_is_not_possible(self) -> None:
        made: Any = self
        args = made.args
        order = args.train_sampling_strategy
        ranks = self.run.group.count
        for found, what in ((args.n_gpu > 1, "several devices"),
                            (ranks > 1 and args.device.type != "cpu", "several processes on devices: use_cpu=True"),
                            (args.world_size != ranks, f"{args.world_size} processes where the run has {ranks}"),
                            (made.is_deepspeed_enabled, "DeepSpeed"), (made.is_fsdp_enabled, "FSDP"),
                            (args.auto_find_batch_size, "auto_find_batch_size"),
                            (args.ignore_data_skip, "ignore_data_skip"),
                            (made.model_init is not None, "model_init"),
                            (str(args.optim.value).endswith(("lomo", "_layerwise")), f"optim={args.optim.value!r}"),
                            (isinstance(made.train_dataset, torch.utils.data.IterableDataset),
                             "a dataset that can only be iterated"),
                            (order not in ("random", "sequential"), f"train_sampling_strategy={order!r}")):
            if found:
                raise ValueError(f"RunMixin: a Trainer of a plimsoll.Run cannot have {what}")


@contextlib.contextmanager
def _evaluation() -> Iterator[None]:
    """Adds advice for an evaluation to a refusal of memory meanwhile, and removes "lower batch_size", which would not help."""
    try:
        yield
    except (torch.OutOfMemoryError, BudgetExceeded) as error:
        text = str(error)
        if _core.EVALUATION_ADVICE not in text:
            error.args = (text.replace(" or lower batch_size", "") + "; " + _core.EVALUATION_ADVICE, *error.args[1:])
        raise


class _State:
    """A part of the run: the state of Trainer and its callbacks, in Trainer's own format, and the losses since its last log."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.restored = ""
        self._since_log: tuple[float, int] | None = None

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        several: dict[str, list[Any]] = {}
        for one in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
            if isinstance(one, ExportableState):
                several.setdefault(type(one).__name__, []).append(one.state())
        state.stateful_callbacks = {name: ones if len(ones) > 1 else ones[0] for name, ones in several.items()}
        made = {"json": json.dumps(dataclasses.asdict(state))}
        if not hasattr(self._trainer, "_tr_loss"):  # Before the first step; transformers 5.0 keeps it to itself.
            return made
        return {**made, "losses": float(self._trainer._tr_loss), "logged": self._trainer._globalstep_last_logged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state["json"]
        if "logged" in state:
            self._since_log = state["losses"], state["logged"]

    def put_back_losses(self) -> None:
        """Restores the losses since the last log, so that the next log counts the steps before the restart. The mean of the whole train() does not
        count them, as in Trainer."""
        if self._since_log is not None:
            losses, self._trainer._globalstep_last_logged = self._since_log
            self._trainer._tr_loss.fill_(losses)
            self._trainer._total_loss_scalar = -losses


class _Boundary(transformers.TrainerCallback):
    """Reports Trainer's steps to the run."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._told = -1
        self._loss: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        parts = {"model": trainer.model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler,
                 "scaler": trainer.accelerator.scaler}
        trainer.run.track(**{name: part for name, part in parts.items() if part is not None})
        self._batches = trainer._data.batches
        self._window = args.gradient_accumulation_steps
        self._updates = -(-self._batches // self._window)  # Updates per epoch.
        trainer._run_state.put_back_losses()
        trainer._prepare_steps()
        trainer._loop.begin({**trainer._data.shape(), "accumulate": self._window}, batches=self._batches,
                            epochs=state.num_train_epochs, steps=state.max_steps)
        self._told = state.global_step

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer._data.seek(state.global_step // self._updates)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        self._loss = numbers.get("loss", self._loss)
        self._trainer._loop.log(state.global_step, int(state.epoch or 0), numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run = self._trainer.run
        if not run.stopped and not self.tell(state):
            self._trainer._loop.end()

    def tell(self, state: Any) -> bool:
        """Reports the steps made so far to the run. Returns True if the run was asked to stop."""
        if state.global_step == self._told:
            return False
        self._told = state.global_step
        epoch, update = divmod(state.global_step, self._updates)
        rows = self._trainer._train_batch_size * self._window * self._trainer.args.world_size
        return bool(self._trainer._loop.made(step=state.global_step, epoch=epoch, batch=update * self._window,
                                             rows=rows, loss=self._loss, evaluates=self._evaluates_after(state.global_step + 1)))

    def _evaluates_after(self, step: int) -> bool:
        """Whether Trainer's arguments ask for an evaluation after this step."""
        args = self._trainer.args
        how = str(args.eval_strategy.value)
        return (how == "steps" and step % self._trainer.state.eval_steps == 0) or (how == "epoch" and step % self._updates == 0)


class CleanUpCallback(transformers.TrainerCallback):
    """A callback that frees unused memory, with a run or without. It calls plimsoll.clean_up() after each evaluation, and
    every `cleanup_every_n_steps` optimizer steps. It changes no gradient and no result.

        Trainer(model, arguments, train_dataset=data, callbacks=[CleanUpCallback(cleanup_every_n_steps=10)])

    cleanup_every_n_steps: number of steps; 0: after evaluations alone.
    Errors: ValueError for a number below 0.
    """

    def __init__(self, cleanup_every_n_steps: int = 0) -> None:
        self._every = Intervals.of(type(self).__name__, commit_every_steps=0, commit_every_minutes=0,
                                   cleanup_every_n_steps=cleanup_every_n_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._every.clean_up_between(state.global_step - 1, state.global_step):
            clean_up()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        clean_up()


class WatchCallback(transformers.TrainerCallback):
    """A callback that watches train() for leaks, with a run or without. A RuntimeWarning, issued once, names the growing
    owner, the line that allocates, the holder, and a remedy. A step is an optimizer step; an evaluation is the phase
    "evaluation".

    watch:             a Watch of your own. `.watch.verdict()` may be called at any time.
    log_every_n_steps: number of steps between lines with each holder's bytes. A summary at the end has the course of
                       memory, the verdict and the largest tensors, with or without a leak. Lines go to the logger
                       "plimsoll.watch" where it has a handler, else they are printed. 0: only leaks are reported.
    Errors: ValueError for a number below 0.
    """

    def __init__(self, watch: Watch | None = None, log_every_n_steps: int = 0) -> None:
        self._loop = LoopWatch(watch, log_every_n_steps)
        self.watch = self._loop.watch

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._loop.step()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._loop.enter("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._loop.leave()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._loop.end()
