# SPDX-License-Identifier: Apache-2.0
"""A recipe in a file of its own on the simulated device: the losses of the CPU, killed, and resumed to the same bits."""
import json
import pathlib

import numpy as np
import pytest

import plimsoll

plimsoll.Governor("3GiB", foreign_bytes="1GiB").close()  # Before the first tensor of the device.

from plimsoll.memory import _pinned
from tests import device
from tests.support.killed_recipes import killed

_pinned.DRIVERS["sim"] = device.host_driver
EXAMPLE = str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "recipe.py")
MIB = 1 << 20


def losses(run):
    return [one["loss"] for one in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if one["event"] == "step"]


def test_a_file_trains_on_the_device(tmp_path):
    device.configure(capacity=1 << 30, context=64 * MIB, fraction=1.0)
    rows = np.random.default_rng(1).standard_normal((400, 5)).astype(np.float32)
    np.save(tmp_path / "table.npy", rows)
    given = {"data": str(tmp_path / "table.npy"), "memory_limit": "4GiB", "foreign_bytes": "2GiB", "compute_threads": 1, "progress": False}
    on_device = plimsoll.train(EXAMPLE, out=tmp_path / "device", **given, device_memory_limit="300MiB")
    plimsoll.train(EXAMPLE, out=tmp_path / "cpu", **given, device="cpu")
    assert losses(tmp_path / "device") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)
    line = plimsoll.status(tmp_path / "device")["devices"][0]
    assert line["name"] == "sim" and 0 < line["peak_bytes"] <= line["limit_bytes"] == 300 * MIB
    killed(EXAMPLE, 20, modules=["tests.device"], **given, device="sim", checkpoint_every_n_steps=4, out=str(tmp_path / "killed"))
    assert plimsoll.resume(tmp_path / "killed", progress=False)["weights"] == on_device["weights"]
