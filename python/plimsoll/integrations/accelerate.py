# SPDX-License-Identifier: Apache-2.0
"""parts(): the state of an accelerate.Accelerator as parts of a plimsoll.Run. It needs accelerate.

    import accelerate, plimsoll
    from plimsoll.integrations.accelerate import parts

    with plimsoll.Run("runs/a", memory_limit="8GiB") as run:
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        accelerator.register_for_checkpointing(average)
        run.track(**parts(accelerator))                        # restored here, bit for bit
        for batch in run.steps(run.loader(dataset, batch_size=32), epochs=3):
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

Threads: the thread that trains.   Memory: none; a commit streams tensors from where they are.
"""
from __future__ import annotations

from typing import Any

import accelerate


def parts(accelerator: accelerate.Accelerator) -> dict[str, Any]:
    """Returns the parts that accelerator.save_state() would write, by name, for run.track().

    The names are model, optimizer, scheduler, registered (a second one: model_1, …), scaler and accelerator. The parts
    are the objects passed to accelerator.prepare() and register_for_checkpointing() so far. The part `accelerator` is
    the progress of accumulate(), with its gradients: a commit may come between. Take batches from
    run.loader() directly, not from prepare(), whose loaders have no position. A window of accumulate() continues
    over an epoch's end.

    Errors: ValueError where several processes train, or nothing was prepared.
    """
    if accelerator.num_processes > 1:
        raise ValueError(f"accelerate: {accelerator.num_processes} processes; a plimsoll.Run of several ranks is "
                         "started by torchrun, without an Accelerator")
    if not accelerator._models:
        raise ValueError("accelerate: nothing was prepared: model, optimizer = accelerator.prepare(model, optimizer), "
                         "and then parts(accelerator)")
    listed = {"model": accelerator._models, "optimizer": accelerator._optimizers,
              "scheduler": accelerator._schedulers, "registered": accelerator._custom_objects}
    found = {f"{name}_{k}" if k else name: part for name, ones in listed.items() for k, part in enumerate(ones)}
    scaler = {} if accelerator.scaler is None else {"scaler": accelerator.scaler}
    return {**found, **scaler, "accelerator": _Window(accelerator)}


class _Window:
    """The progress of accumulate(): its step, and the gradients so far."""

    def __init__(self, accelerator: accelerate.Accelerator) -> None:
        self._accelerator = accelerator

    def _parameters(self) -> list[Any]:
        return [one for model in self._accelerator._models for one in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step, "gradients": [one.grad for one in self._parameters()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
        for one, gradient in zip(self._parameters(), state["gradients"], strict=True):
            one.grad = None if gradient is None else gradient.to(one.device)  # A checkpoint is read into host memory.
