# SPDX-License-Identifier: Apache-2.0
"""The limit of a device's memory, on the simulated device."""
import pytest

from tests.support.on_device import run_checks, skip_without_torch

skip_without_torch()


def test_the_limit_of_a_device():
    run_checks("limit")


def test_random_models_and_limits():
    run_checks("random")


def test_random_runs_of_recipes_trainers_and_loops():
    run_checks("random_runs")


@pytest.mark.slow
def test_a_thousand_random_models_and_limits(monkeypatch):
    monkeypatch.setenv("PLIMSOLL_RANDOM_RUNS", "1000")
    monkeypatch.setenv("PLIMSOLL_RANDOM_SEED", "47")
    run_checks("random", seconds=3600)


@pytest.mark.slow
def test_two_hundred_random_runs_of_recipes_trainers_and_loops(monkeypatch):
    monkeypatch.setenv("PLIMSOLL_RANDOM_RUNS", "200")
    monkeypatch.setenv("PLIMSOLL_RANDOM_SEED", "47")
    run_checks("random_runs", seconds=3600)
