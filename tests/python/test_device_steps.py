# SPDX-License-Identifier: Apache-2.0
"""Steps on the simulated device: each allocation refused in turn, and the same bits."""
from tests.support.on_device import run_checks, skip_without_torch

skip_without_torch()


def test_steps_that_the_device_refuses():
    run_checks("steps")
