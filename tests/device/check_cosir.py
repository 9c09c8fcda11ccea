# SPDX-License-Identifier: Apache-2.0
"""The recipe cosir of Python on the simulated device: the losses of the CPU, the device's limit kept, killed and gone on with."""
import gc
import json

import pytest
import torch

import plimsoll

plimsoll.Governor("3GiB", foreign_bytes="1GiB").close()  # Before the first tensor of the device.

from plimsoll.memory import _pinned
from tests import device
from tests.support.cosir_python import NAME, make_pairs
from tests.support.killed_recipes import killed

_pinned.DRIVERS["sim"] = device.host_driver
MIB = 1 << 20
QUICK = {"memory_limit": "4GiB", "foreign_bytes": "2GiB", "compute_threads": 1, "progress": False, "eval_pairs": 60, "seed": 3, "epochs": 1,
         "batch_size": 90, "phase2_epochs": 1, "metrics_every_n_steps": 1, "checkpoint_every_n_steps": 2, "oracle_angles": 3}


@pytest.fixture(autouse=True)
def card():
    device.configure(capacity=1 << 30, context=64 * MIB, fraction=1.0)
    yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs") / "data"
    make_pairs(folder, groups=120)
    return str(folder)


def losses(run):
    return [one["loss"] for one in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if one["event"] == "step"]


def test_it_trains_on_the_device_as_on_the_cpu_and_killed_to_the_same_bits(data, tmp_path):
    given = {**QUICK, "data": data}
    on_device = plimsoll.train(NAME, out=tmp_path / "device", **given, device_memory_limit="300MiB")
    on_cpu = plimsoll.train(NAME, out=tmp_path / "cpu", **given, device="cpu")
    assert on_device["status"] == "finished" and on_device["step"] == on_cpu["step"] > 4
    assert losses(tmp_path / "device") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)  # The device composes our kernels of torch's.
    assert on_device["recall_before"]["raw"]["t2i"]["mean_rank"] == pytest.approx(on_cpu["recall_before"]["raw"]["t2i"]["mean_rank"], rel=0.02)
    line = plimsoll.status(tmp_path / "device")["devices"][0]
    assert line["name"] == "sim" and 0 < line["peak_bytes"] <= line["limit_bytes"] == 300 * MIB
    gc.collect()
    assert torch.accelerator.memory_allocated() == 0  # The run left nothing there.

    killed(NAME, 3, modules=["tests.device", "tests.support.cosir_python"], **given, device="sim", out=tmp_path / "killed")
    again = plimsoll.resume(tmp_path / "killed", progress=False)
    assert again["state_sha256"] == on_device["state_sha256"] != on_cpu["state_sha256"]
    assert plimsoll.evaluate(tmp_path / "killed")["recall"] == again["recall"]


def test_a_device_without_room_refuses_the_first_step(data, tmp_path):
    with pytest.raises(plimsoll.errors.BudgetExceeded, match="sim"):
        plimsoll.train(NAME, out=tmp_path / "run", **{**QUICK, "data": data, "eval_pairs": 0}, device_memory_limit="2MiB")
