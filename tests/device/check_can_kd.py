# SPDX-License-Identifier: Apache-2.0
"""The recipe can-kd in Python on the simulated device: the losses of the CPU, and the device's limit kept."""
import gc

import pytest
import torch

import plimsoll

plimsoll.Governor("3GiB", foreign_bytes="1GiB").close()  # Before the first tensor of the device.

from plimsoll.memory import _pinned
from tests import device
from tests.support.python_can_kd import NAME, SMALL, events, make_set

_pinned.DRIVERS["sim"] = device.host_driver
MIB = 1 << 20


def test_can_kd_trains_on_the_device_to_the_losses_of_the_cpu(tmp_path):
    device.configure(capacity=1 << 30, context=64 * MIB, fraction=1.0)
    graphs = make_set(tmp_path / "bus")
    given = {**SMALL, "data": str(graphs), "memory_limit": "4GiB", "foreign_bytes": "2GiB"}
    on = {where: plimsoll.train(NAME, out=tmp_path / where, **given, device=where,
                                **({"device_memory_limit": "400MiB"} if where == "sim" else {})) for where in ("sim", "cpu")}
    assert on["sim"]["status"] == "finished"
    there, here = (events(tmp_path / where, "step") for where in ("sim", "cpu"))
    assert [one["task"] for one in there] == [one["task"] for one in here]
    for role, near in (("teacher", 1e-5), ("student", 1e-4)):  # A student is taught by what a teacher of other rounding says.
        losses = [[one["loss"] for one in steps if one["task"].startswith(role)] for steps in (there, here)]
        assert len(losses[0]) > 20 and losses[0] == pytest.approx(losses[1], rel=near, abs=1e-6), role
    for role in ("teacher", "student"):
        for name, found in on["cpu"]["evaluation"][role].items():
            assert on["sim"]["evaluation"][role][name]["test"]["all"]["auc"] == pytest.approx(found["test"]["all"]["auc"], abs=0.01)
    line = plimsoll.status(tmp_path / "sim")["devices"][0]
    assert line["name"] == "sim" and 0 < line["peak_bytes"] <= 400 * MIB
    gc.collect()
    assert torch.accelerator.memory_allocated() == 0  # The run left nothing there.
