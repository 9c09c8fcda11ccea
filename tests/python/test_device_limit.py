# SPDX-License-Identifier: Apache-2.0
"""The limit of a device's memory, on the simulated device."""
import pytest

from tests.support.on_device import run_checks, skip_without_torch

skip_without_torch()


def test_the_limit_of_a_device():
    run_checks("limit")


def test_random_models_and_limits():
    run_checks("random")


@pytest.mark.slow
def test_a_thousand_random_models_and_limits(monkeypatch):
    monkeypatch.setenv("PLIMSOLL_RANDOM_RUNS", "1000")
    monkeypatch.setenv("PLIMSOLL_RANDOM_SEED", "47")
    run_checks("random", seconds=3600)
