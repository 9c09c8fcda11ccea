# SPDX-License-Identifier: Apache-2.0
"""Operators of plimsoll.kernels are composed on a device, and are what the CPU's kernels compute."""
import pytest
import torch

import plimsoll.kernels
from tests import device
from tests.support.kernel_cases import CONTRAST, GRAPHS, LAYERS, RECALL, forward_and_backward, gap

CASES = [pytest.param(case, id=f"{case.name}-{number}") for number, case in enumerate((*CONTRAST, *RECALL, *GRAPHS, *LAYERS))]
DEV = "sim"


@pytest.fixture(autouse=True)
def card():
    device.configure(capacity=1 << 30)
    assert plimsoll.kernels.__all__


@pytest.mark.parametrize("case", CASES)
def test_a_device_equals_the_cpu(case):
    for rows in case.rows:
        there = forward_and_backward(case.operator, case.arguments(rows, device=DEV))
        here = forward_and_backward(case.operator, case.arguments(rows))
        for x, y in zip([*there[0], *there[1]], [*here[0], *here[1]], strict=True):
            assert x.device.type == DEV and x.dtype == y.dtype and gap(x, y) < 1e-5


def test_tensors_of_two_devices_are_refused():
    x = torch.ones(4, 8)
    with pytest.raises(ValueError, match="b: on cpu, but a is on sim:0"):
        plimsoll.kernels.symmetric_info_nce(x.to(DEV), x, torch.arange(4), 0.1)
