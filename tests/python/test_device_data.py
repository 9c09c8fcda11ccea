# SPDX-License-Identifier: Apache-2.0
"""Batches and rows that come to a device, and gradients that come back, beside the stream that computes, on the simulated device."""
from tests.support.on_device import run_checks, skip_without_torch

skip_without_torch()


def test_batches_and_rows_on_their_way_to_and_from_a_device():
    run_checks("batches", "rows")
