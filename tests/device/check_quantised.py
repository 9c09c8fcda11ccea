# SPDX-License-Identifier: Apache-2.0
"""Weights in fewer bits on the simulated device, which bitsandbytes has no kernels for: the bits of the processor's kernels."""
import gc
import sys

import pytest
import torch

from tests.support import quantised

quantised.needed()
sys.path.append(str(quantised.FOLDER))

import plimsoll

plimsoll.Governor("3GiB", foreign_bytes="1GiB").close()  # Before the first tensor of the device.

from plimsoll.memory import _pinned
from plimsoll.training._quantised import KINDS, QuantisedLinear
from tests import device
from tests.support import chat_models
from tests.support.quick_collections import collections_are_quick, collections_are_whole_again  # noqa: F401  Fixtures.
from tests.support.trained_bits import digest

_pinned.DRIVERS["sim"] = device.host_driver
QUICK = {"memory_limit": "4GiB", "foreign_bytes": "2GiB", "compute_threads": 1, "progress": False, "sequence_length": 64, "lora_r": 4,
         "accumulate": 2, "lr": 1e-2, "seed": 3, "checkpoint_every_n_steps": 4}


@pytest.fixture(autouse=True)
def card():
    device.configure(capacity=1 << 30, context=0, fraction=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_made_again_to_the_bits_of_the_processor(kind):
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(96, 64, bias=False, dtype=dtype)
        part = QuantisedLinear(layer, kind)
        packed, scales = part.quantised(layer.weight.detach())
        with device.order_checked(), device.kernels_late():
            made = part.made_again(packed.to("sim"), scales.to("sim"))
        assert made.device.type == "sim" and torch.equal(made.cpu(), part.rounded(layer.weight.detach()))


@pytest.mark.parametrize("base, dtype", [("nf4", "bfloat16"), ("int8", "float32")])
def test_streamed_to_the_device_it_ends_in_the_bits_of_resident_and_of_the_processor(base, dtype, tmp_path):
    chat_models.make_model(tmp_path / "model")
    chat_models.make_tokens(tmp_path / "chats.tokens", tmp_path / "model", rows=40)
    given = {**QUICK, "model": str(tmp_path / "model"), "data": str(tmp_path / "chats.tokens"), "base": base, "dtype": dtype, "lora_dropout": 0.0}
    plimsoll.train("chat", out=tmp_path / "cpu", **given, device="cpu")
    for weights in ("resident", "streamed"):
        with device.order_checked():
            plimsoll.train("chat", out=tmp_path / weights, **given, device="sim", weights=weights, device_memory_limit="300MiB")
        gc.collect()
        assert torch.accelerator.memory_allocated() == 0
        assert digest(tmp_path / weights) == digest(tmp_path / "cpu")
