# SPDX-License-Identifier: Apache-2.0
"""Frozen weights that stream to the simulated device from models some of whose parameters are in several places."""
import gc

import pytest
import torch

import plimsoll

plimsoll.Governor("3GiB", foreign_bytes="1GiB").close()  # Before the first tensor of the device.

from plimsoll.memory import _pinned
from tests import device
from tests.support import tied_models
from tests.support.quick_collections import collections_are_quick, collections_are_whole_again  # noqa: F401  Fixtures.
from tests.support.tied_models import TIES, Net, trained

_pinned.DRIVERS["sim"] = device.host_driver


@pytest.fixture(autouse=True)
def governor():
    device.configure(capacity=1 << 30, context=0, fraction=1.0)
    with plimsoll.Governor("3GiB", foreign_bytes="1GiB", devices={"sim": "900MiB"}) as governor:
        yield governor
        gc.collect()  # A model is a circle.
    assert torch.accelerator.memory_allocated() == 0


@pytest.mark.parametrize("tie", [tie for tie in TIES if tie not in tied_models.VIEWS], ids=lambda tie: tie.__name__)
def test_what_is_tied_trains_to_the_bits_of_the_cpu(tie, tmp_path):
    on_cpu, _ = trained(tie, lambda model: None)
    resident, held = trained(tie, lambda model: plimsoll.stream_frozen(model, weights="resident", device="sim"), "sim")
    with device.order_checked():
        streamed, left = trained(tie, lambda model: plimsoll.stream_frozen(model, weights="streamed", device="sim", directory=tmp_path), "sim")
    for bits in (resident, streamed):
        assert len(bits) == len(on_cpu) and all(map(torch.equal, bits, on_cpu))
    assert len(left) == TIES[tie] < len(held), left


def test_a_view_of_a_trained_parameter_is_refused_by_its_name():
    tied_models.a_view_of_a_trained_one(model := Net())
    with pytest.raises(ValueError, match="blocks.0.trained and another parameter are views of the same values"):
        plimsoll.stream_frozen(model, weights="streamed", device="sim")
