# SPDX-License-Identifier: Apache-2.0
"""Check 5: steps with dropout and fused AdamW, refused in their middle at random, end in the bits of undisturbed steps.

The limit falls to what is reserved at a random point of a step: before or behind a layer, in forward or in backward, or before the
optimizer. It is lifted when the step has been refused.

Threads: autograd's.   Memory: a small model's steps, on the device.
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import random
from typing import Any

from bench.device_check.device import HOST_LIMIT, Device, plimsoll_or_not
from bench.device_check.result import Result

SEED = 5
LAYERS = 4
STEPS_PER_REFUSAL = 3  # At most: a step whose memory is there already is not refused.


def check(device: Device) -> Result:
    """Makes undisturbed steps, then the same steps with a random refusal in each."""
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    wanted, most = device.pick(100, 10), device.pick(100, 10) * STEPS_PER_REFUSAL
    with plimsoll_or_not().Governor(HOST_LIMIT[device.name], foreign_bytes="1GiB"):
        with contextlib.closing(_Training(device)) as undisturbed:
            bits = [undisturbed.bits() for _ in range(most) if undisturbed.act(None) == 0]
        points = undisturbed.points
        del undisturbed
        refused, other, first, at, dice = 0, 0, "", 0, random.Random(SEED)
        with contextlib.closing(_Training(device)) as training:
            while refused < wanted and at < most:
                point = dice.randrange(points)
                refused += training.act(point)
                if training.bits() != bits[at]:
                    other += 1
                    first = first or f"; first at step {at}, point {point}"
                at += 1
    result = Result(other, "steps of other bits", 0)
    result.add("steps refused in their middle", f"{wanted}", f"{refused} of {at} steps, {points} points in each", refused >= wanted)
    result.add("steps that end in other bits", "0", f"{other} of {at}{first}", other == 0)
    result.add("steps whose bits repeat", "none", f"{len(bits) - len(set(bits))}", len(set(bits)) == len(bits))
    result.peers = {"refused": refused, "steps": at, "points": points}
    return result


class _Training:
    """A model on the device, its step, and the point of it where memory ends."""

    def __init__(self, device: Device) -> None:
        import torch
        from torch import nn

        rows, width = device.pick((8192, 512), (512, 64))
        torch.manual_seed(1)
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(width)) for _ in range(LAYERS)]
        self._model = nn.Sequential(*layers).to(device.name)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=True)
        self._step = plimsoll_or_not().TrainingStep(self._model, self._optimizer, events=self._heard)
        self._batch = torch.randn(rows, width).to(device.name)
        self._device, self._at, self._is_low, self.points = device, None, False, 0
        self._passed = 0
        self._hooks = [self._model.register_forward_pre_hook(self._begun), self._optimizer.register_step_pre_hook(lambda *_: self._point())]
        for layer in (one for several in layers for one in several):
            self._hooks.append(layer.register_forward_hook(self._ahead))

    def close(self) -> None:
        """Removes the hooks, which hold this object in a circle."""
        for one in self._hooks:
            one.remove()
        self._device.limit_reserved(None)

    def act(self, point: int | None) -> int:
        """Makes a step; memory ends at `point`. Returns how often it was refused."""
        before, self._at = self._step.refusals, point
        self._step(self._batch, lambda x: self._model(x).square().mean())
        self.points = max(self.points, self._passed)
        self._raise()
        return int(self._step.refusals - before)

    def bits(self) -> str:
        """Returns a digest of all that a step changes, and of the random numbers that come next."""
        import torch

        states = [value for state in self._optimizer.state.values() for value in state.values()]
        values = [*self._model.state_dict().values(), *states, torch.get_rng_state(), self._device.module.get_rng_state()]
        return hashlib.sha256(b"".join(one.detach().cpu().numpy().tobytes() for one in values)).hexdigest()

    def _begun(self, *_: Any) -> None:
        self._passed = 0

    def _ahead(self, layer: Any, given: Any, made: Any) -> None:
        self._point()
        if made.requires_grad:
            made.register_hook(lambda _: self._point())

    def _point(self) -> None:
        if self._at == self._passed:
            self._at, self._is_low = None, True
            self._device.module.synchronize()
            self._device.module.empty_cache()
            self._device.limit_reserved(self._device.module.memory_reserved())
        self._passed += 1

    def _heard(self, event: dict[str, Any]) -> None:
        if event["event"] == "refusal":
            self._raise()

    def _raise(self) -> None:
        if self._is_low:
            self._device.limit_reserved(None)
        self._at, self._is_low = None, False
