# SPDX-License-Identifier: Apache-2.0
"""The simulated device does as a device: its allocator, its bits, its order of streams."""
from tests.support.on_device import run_checks, skip_without_torch

skip_without_torch()


def test_allocator_bits_and_order():
    run_checks("allocator", "bits", "order")
