# SPDX-License-Identifier: Apache-2.0
"""Frozen weights that stream to a device, on the simulated one."""
from tests.support import quantised
from tests.support.on_device import run_checks, skip_without_torch

skip_without_torch()


def test_frozen_weights_stream_to_a_device():
    run_checks("streamed")


def test_each_allocation_of_a_streamed_step_is_refused_in_turn():
    run_checks("refused_streams")


def test_what_is_tied_streams_to_a_device():
    run_checks("tied")


def test_weights_in_fewer_bits_on_a_device():
    quantised.needed()
    run_checks("quantised")
