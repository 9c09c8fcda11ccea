# SPDX-License-Identifier: Apache-2.0
"""The recipes chat and vision on the simulated device: the bits of the CPU, the device's limit kept, killed and gone on with."""
import functools
import gc
import hashlib
import json
import pathlib
import shutil

import pytest
import torch

import plimsoll

plimsoll.Governor("3GiB", foreign_bytes="1GiB").close()  # Before the first tensor of the device.

from plimsoll.memory import _pinned
from tests import device
from tests.support import chat_models, vision_models
from tests.support.killed_recipes import killed
from tests.support.quick_collections import collections_are_quick, collections_are_whole_again  # noqa: F401  Fixtures.

_pinned.DRIVERS["sim"] = device.host_driver
MIB = 1 << 20
QUICK = {"memory_limit": "4GiB", "foreign_bytes": "2GiB", "compute_threads": 1, "progress": False, "sequence_length": 64, "lora_r": 4,
         "accumulate": 2, "lr": 1e-2, "seed": 3, "lora_dropout": 0.2, "checkpoint_every_n_steps": 4, "held_out": 4}


@pytest.fixture(autouse=True)
def card():
    device.configure(capacity=1 << 30, context=64 * MIB, fraction=1.0)
    yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By recipe: (the model, the data)."""
    root = tmp_path_factory.mktemp("tiny")
    chat_models.make_model(root / "chat")
    chat_models.make_tokens(root / "chats.tokens", root / "chat", rows=18)
    vision_models.make_model(root / "vision")
    vision_models.make_set(root / "pictures", 16)
    return {"chat": (root / "chat", root / "chats.tokens"), "vision": (root / "vision", root / "pictures")}


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    """By recipe: (the folder of an undisturbed run on the device, its summary), made once. Whoever goes on with it takes a copy."""
    device.configure(capacity=1 << 30, context=64 * MIB, fraction=1.0)

    @functools.cache
    def run(recipe):
        out = tmp_path_factory.mktemp(recipe) / "run"
        return out, plimsoll.train(recipe, out=out, **given(folders, recipe, device="sim"))
    return run


def given(folders, recipe, **options):
    model, data = folders[recipe]
    return {**QUICK, "model": str(model), "data": str(data), **({"sequence_length": 96} if recipe == "vision" else {}), **options}


def digest(run):
    step = plimsoll.status(run)["checkpoint_step"]
    parts = torch.load(pathlib.Path(run) / f"checkpoints/step-{step:09}/parts.pt", weights_only=True, map_location="cpu")["parts"]
    found = hashlib.sha256()
    for name, one in sorted(parts["model"].items()):
        if one.dtype == torch.int64:
            continue  # A checksum of frozen weights.
        found.update(name.encode() + one.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def events(run, name):
    return [one for one in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if one["event"] == name]


@pytest.mark.parametrize("recipe, options", [
    ("chat", {}), ("chat", {"method": "full", "dtype": "float32"}), ("chat", {"gradient_checkpointing": "on", "dtype": "float32"}),
    ("vision", {"dtype": "float32"})], ids=str)
def test_a_recipe_trains_on_the_device_to_the_bits_of_the_cpu(recipe, options, folders, tmp_path):
    options = {"lora_dropout": 0.0, **options}  # The CPU's generator makes the adapters, too, so what a device draws is other numbers.
    on_device = plimsoll.train(recipe, out=tmp_path / "device", **given(folders, recipe, **options), device_memory_limit="400MiB")
    on_cpu = plimsoll.train(recipe, out=tmp_path / "cpu", **given(folders, recipe, **options), device="cpu")
    assert on_device["status"] == "finished" and on_device["held_out_loss"] == on_cpu["held_out_loss"]
    assert digest(tmp_path / "device") == digest(tmp_path / "cpu")
    line = plimsoll.status(tmp_path / "device")["devices"][0]
    assert line["name"] == "sim" and line["limit_bytes"] == 400 * MIB and 0 < line["peak_bytes"] <= 400 * MIB
    assert plimsoll.status(tmp_path / "cpu")["devices"] == []
    gc.collect()
    assert torch.accelerator.memory_allocated() == 0  # The run left nothing there.


@pytest.mark.parametrize("recipe", ["chat", pytest.param("vision", marks=pytest.mark.slow)])
def test_killed_on_the_device_it_ends_in_the_same_bits(recipe, folders, whole, tmp_path):
    run, told = whole(recipe)
    killed(recipe, 6, modules=["tests.device"], **given(folders, recipe, device="sim"), out=tmp_path / "killed")
    again = plimsoll.resume(tmp_path / "killed", progress=False)
    assert told["step"] > 6 and told["held_out_loss"] > 0
    assert digest(tmp_path / "killed") == digest(run) and again["held_out_loss"] == told["held_out_loss"]


@pytest.mark.parametrize("recipe", ["chat", "vision"])
def test_streamed_weights_end_in_the_bits_of_resident_ones(recipe, folders, whole, tmp_path):
    options, (resident, _) = given(folders, recipe, device="sim"), whole(recipe)
    with device.order_checked():
        plimsoll.train(recipe, out=tmp_path / "streamed", weights="streamed", **options)
    gc.collect()
    assert torch.accelerator.memory_allocated() == 0  # Nothing keeps the model but itself.
    killed(recipe, 6, modules=["tests.device"], **options, weights="streamed", out=tmp_path / "killed")
    plimsoll.resume(tmp_path / "killed", progress=False)
    assert digest(tmp_path / "streamed") == digest(resident) == digest(tmp_path / "killed")


def test_a_run_of_the_device_goes_on_elsewhere_only_if_told_to(whole, tmp_path):
    shutil.copytree(whole("chat")[0], tmp_path / "run")
    with pytest.raises(ValueError, match="model is on cpu and was on sim"):
        plimsoll.resume(tmp_path / "run", device="cpu", progress=False)
    again = plimsoll.resume(tmp_path / "run", device="cpu", progress=False, accept_other_processor=True)
    assert again["status"] == "finished" and events(tmp_path / "run", "setting")[-1]["is"] == "cpu"


def test_it_is_evaluated_on_the_device_and_exported_from_anywhere(whole, tmp_path):
    run, made = whole("chat")
    shutil.copytree(run, tmp_path / "run")
    assert plimsoll.evaluate(tmp_path / "run")["held_out_loss"] == made["held_out_loss"]
    plimsoll.export(tmp_path / "run", out=tmp_path / "merged", merge=True)
    assert (tmp_path / "merged/config.json").exists()


@pytest.mark.parametrize("options, text", [
    ({"virtual_workers": 2, "device": "sim"}, "device: ranks and virtual workers train on the processor"),
    ({"device": "tpu"}, "'tpu' is no device of torch's"), ({"device_memory_limit": "much"}, "is not a size")])
def test_what_a_device_cannot_do_is_refused_by_name(options, text, folders, tmp_path):
    with pytest.raises(ValueError, match=text):
        plimsoll.train("chat", out=tmp_path / "run", **given(folders, "chat", **options))


def test_auto_is_the_processor_for_what_a_device_cannot_do(folders, tmp_path):
    plimsoll.train("chat", out=tmp_path / "run", **given(folders, "chat", virtual_workers=2))
    assert plimsoll.status(tmp_path / "run")["devices"] == []


def test_a_model_that_does_not_fit_the_device_names_a_limit_to_try(folders, tmp_path):
    limit = 66 * MIB
    for _ in range(12):
        try:
            if (tmp_path / "run").exists():
                plimsoll.resume(tmp_path / "run", device_memory_limit=limit, progress=False)
            else:
                plimsoll.train("chat", out=tmp_path / "run", **given(folders, "chat", method="full", device_memory_limit=limit))
            break
        except plimsoll.BudgetExceeded as refused:
            assert "for sim" in str(refused) and refused.smallest_limit_bytes > limit, refused
            assert refused.tag == "sim" and {"tensors", "cache", "context"} <= refused.held_bytes.keys() and refused.held_bytes["context"] == 64 * MIB
            limit = refused.smallest_limit_bytes
        gc.collect()
        assert torch.accelerator.memory_allocated() == 0
    assert plimsoll.status(tmp_path / "run")["status"] == "finished"
