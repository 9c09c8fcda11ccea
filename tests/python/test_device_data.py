# SPDX-License-Identifier: Apache-2.0
"""What comes to a device and goes from it beside the step that computes, on the simulated device."""
from tests.support.on_device import run_checks, skip_without_torch

skip_without_torch()


def test_batches_come_one_ahead_of_use():
    run_checks("batches")
