# SPDX-License-Identifier: Apache-2.0
"""Checks of tools/device_check.sh on the simulated device: each finds a fault that was planted in what it checks.

tests/python/test_device_script.py runs them all without a fault.
"""
import gc
import importlib
import json
import time
import types

import pytest
import torch

from bench.device_check.device import Device, opened

SIM = opened("sim")

import plimsoll
from bench.device_check.requests import ByRules
from plimsoll.core._random_states import RandomStates
from plimsoll.memory._device_memory import DeviceMemory
from tests import device


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    torch.use_deterministic_algorithms(False)
    device.configure(**device.DEFAULTS)
    gc.collect()
    torch.accelerator.empty_cache()
    opened("sim")


def missed(name):
    """The lines of a check whose bars are missed."""
    result = importlib.import_module(f"bench.device_check.{name}").check(SIM)
    wrong = [line.what for line in result.lines if line.holds is False]
    assert result.holds == (not wrong)
    return wrong, result


def test_a_limit_that_nobody_imposes(monkeypatch):
    monkeypatch.setattr(torch.sim, "set_per_process_memory_fraction", lambda *_: None)
    wrong, result = missed("limit")
    assert "context + reserved above the limit" in wrong and "refused at the limit, one stream" in wrong and result.value > 1000


def test_an_allocator_by_other_rules(monkeypatch):
    monkeypatch.setattr(ByRules, "statistics", lambda self: (lambda allocated, reserved, segments: (allocated + 512, reserved, segments))(
        *map(sum, zip(*(one.statistics() for one in self._rules)))))
    wrong, result = missed("limit")
    assert [one.split(":")[0] for one in wrong] == ["allocated, reserved, segments"] * 2 and result.value == 6000


def test_a_context_of_another_size():
    device.configure(context=64 << 20)
    assert missed("context")[0] == ["context"]


def test_a_copy_that_was_never_made(monkeypatch):
    from bench.device_check.copies import _Copies

    monkeypatch.setattr(_Copies, "down", lambda self: None)
    wrong, result = missed("copies")
    assert wrong == ["bytes that differ after a copy there and back"] and result.value > 1_000_000


def test_random_numbers_that_are_not_put_back(monkeypatch):
    monkeypatch.setattr(RandomStates, "put_back", lambda self, *_, **__: None)
    wrong, result = missed("refusals")
    assert wrong == ["steps that end in other bits"] and result.value > 0


def test_steps_that_are_never_refused(monkeypatch):
    monkeypatch.setattr(type(SIM), "limit_reserved", lambda self, size: None)
    assert missed("refusals")[0] == ["steps refused in their middle"]


@pytest.mark.parametrize("margins", [-1, 3])
def test_an_admission_of_too_little_or_too_much(monkeypatch, margins):
    real = DeviceMemory.margin_bytes
    monkeypatch.setattr(DeviceMemory, "peak_bytes", lambda self: (peak := torch.sim.max_memory_reserved()) + margins * real(self, peak))
    assert len(missed("admission")[0]) == 3


def test_a_cross_entropy_that_is_wrong(monkeypatch):
    real = plimsoll.linear_cross_entropy
    monkeypatch.setattr(plimsoll, "linear_cross_entropy", lambda *given, **options: 1.05 * real(*given, **options))
    assert missed("cross_entropy")[0] == ["loss, off float64's", "gradient, off float64's"]


def test_a_cross_entropy_that_takes_torchs_memory(monkeypatch):
    from bench.device_check import cross_entropy

    monkeypatch.setattr(cross_entropy, "_chunked", cross_entropy._plain)
    assert missed("cross_entropy")[0] == ["memory beside inputs"]


def test_a_run_that_ends_in_other_bits_and_one_that_was_killed_too_rarely(monkeypatch):
    from tests.support import lives

    def told(digest, kills):
        return lambda *_: print("a life\n" + json.dumps({"digest": digest, "undisturbed": "a" * 64, "killed_at": [5] * kills}))

    monkeypatch.setattr(lives, "main", told("b" * 64, 3))
    assert missed("kills")[0] == ["the resumed run's digest"]
    monkeypatch.setattr(lives, "main", told("a" * 64, 2))
    assert missed("kills")[0] == ["kills"]
    monkeypatch.setattr(lives, "main", told("a" * 64, 3))
    assert missed("kills")[0] == []


class Card(Device):
    """The simulated device, taken for a card: what only a card runs, at small sizes."""

    def pick(self, card, simulated):
        return simulated


class Event:
    """As torch.cuda.Event, by the clock."""

    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        torch.accelerator.synchronize()
        self.at = time.perf_counter()

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


@pytest.mark.parametrize(("name", "may_miss"), [
    ("context", ("context",)), *(pytest.param(name, (), marks=pytest.mark.slow) for name in ("limit", "refusals", "admission", "cross_entropy")),
    ("copies", ("host to device", "device to host", "both at once", "a matrix product beside copies"))])
def test_what_only_a_card_runs(monkeypatch, name, may_miss):
    registered = []
    cudart = types.SimpleNamespace(cudaHostRegister=lambda address, size, flags: registered.append(address) or 0,
                                   cudaHostUnregister=registered.remove)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    result = importlib.import_module(f"bench.device_check.{name}").check(Card("sim", torch.sim, False, "a card"))
    assert {one.what for one in result.lines if one.holds is False} <= set(may_miss) and not registered
    assert not any("not compared" in one.measured for one in result.lines)
    json.dumps(result.as_json())
