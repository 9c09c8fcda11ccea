# SPDX-License-Identifier: Apache-2.0
"""The callbacks of the programs that Plimsoll replaces. Each is made at its first use.

Threads: the thread that trains.   Memory: none to speak of.
"""
from __future__ import annotations

from typing import Any

from .. import _core
from ._table import governor_for

NAMES = ("MemoryCleanupCallback", "MemoryMonitorCallback", "create_memory_logging_callback")


def make(name: str) -> Any:
    """Makes the callback `name`, one of NAMES. Errors: ImportError where its library is not installed."""
    if name == "MemoryMonitorCallback":
        return _monitor()
    from ..integrations import transformers

    class MemoryCleanupCallback(transformers.CleanUpCallback):
        """CleanUpCallback of plimsoll.integrations.transformers, every ten steps. Zeroes no gradient."""

        def __init__(self, cleanup_every_n_steps: int = 10) -> None:
            super().__init__(cleanup_every_n_steps)

    def create_memory_logging_callback(log_every_n_steps: int = 10) -> transformers.WatchCallback:
        """Makes a WatchCallback that logs every ten steps and ends with a summary and the largest tensors."""
        return transformers.WatchCallback(log_every_n_steps=log_every_n_steps)

    return MemoryCleanupCallback if name == "MemoryCleanupCallback" else create_memory_logging_callback


def _monitor() -> Any:
    import lightning

    class MemoryMonitorCallback(lightning.pytorch.Callback):
        """A callback that logs memory after each training epoch and each validation: a line, and metrics of the Trainer's logger
        (memory/held_mb, memory/limit_mb, memory/used_percent; memory/peak_mb beside the predicted peak).

        log_every_n_epochs: epochs from one line to the next.
        predicted_peak_mb:  the prediction of compute_batch_size(); a higher peak is warned of. 0: none.
        """

        def __init__(self, log_every_n_epochs: int = 1, predicted_peak_mb: float = 0.0) -> None:
            if log_every_n_epochs < 1:
                raise ValueError(f"log_every_n_epochs: {log_every_n_epochs} is less than 1")
            self._every, self._predicted = log_every_n_epochs, predicted_peak_mb
            self._governor = governor_for(None)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self._log(trainer, "after epoch")

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                self._log(trainer, "after validation of epoch")

        def _log(self, trainer: Any, when: str) -> None:
            if (trainer.current_epoch + 1) % self._every:
                return
            line = self._governor.log_memory_state(f"{when} {trainer.current_epoch}")
            ledger = self._governor.ledger()
            now, mib = _core.resident(), 1 << 20
            metrics = {"memory/held_mb": now.total / mib, "memory/limit_mb": ledger.limit_bytes / mib,
                       "memory/used_percent": 100 * now.total / ledger.limit_bytes, "memory/peak_mb": now.peak / mib}
            if 0 < self._predicted < metrics["memory/peak_mb"]:
                print(f"peak {metrics['memory/peak_mb']:.0f} MB, more than the {self._predicted:.0f} MB predicted: {line}")
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    return MemoryMonitorCallback
