# SPDX-License-Identifier: Apache-2.0
"""Operators of plimsoll.kernels on the simulated device."""
from tests.support.on_device import run_checks, skip_without_torch

skip_without_torch()


def test_kernels_on_a_device():
    run_checks("kernels")
