# SPDX-License-Identifier: Apache-2.0
"""The recipes chat and vision on the simulated device."""
import pytest

from tests.support.on_device import run_checks, skip_without_torch

skip_without_torch()
for name in ("transformers", "peft", "safetensors", "accelerate", "tokenizers", "jinja2", "PIL"):
    pytest.importorskip(name)


def test_recipes_on_a_device():
    run_checks("recipes")


@pytest.mark.slow
def test_more_recipes_on_a_device():
    run_checks("recipes", which="slow")
