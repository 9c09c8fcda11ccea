# SPDX-License-Identifier: Apache-2.0
"""The limit of a device's memory, on the simulated device."""
from tests.support.on_device import run_checks, skip_without_torch

skip_without_torch()


def test_the_limit_of_a_device():
    run_checks("limit")
