# SPDX-License-Identifier: Apache-2.0
"""Random numbers of plimsoll.kernels: the published ones of Philox and splitmix64, functions of seed, stream and index."""
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.support.on_device import skip_without_torch

skip_without_torch()

from plimsoll import kernels

LAST = 2**64 - 1


def test_philox_gives_the_published_words():
    """Known answers of Random123 1.14.0 for philox4x32-10."""
    assert [f"{word:08x}" for word in kernels.philox(0, 0, 0)] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert [f"{word:08x}" for word in kernels.philox(LAST, LAST, LAST)] == [
        "408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


def test_mix64_gives_the_first_number_of_splitmix64():
    assert kernels.mix64(0) == 0xE220A8397B1DCDAF


def test_a_value_depends_on_seed_stream_and_index_alone():
    for draw in (kernels.random_uniform, kernels.random_normal):
        many = draw((40, 25), 0.5, 7, 3)
        assert many.dtype == torch.float32 and torch.equal(many.flatten()[:333], draw((333,), 0.5, 7, 3))
        assert not torch.equal(many, draw((40, 25), 0.5, 8, 3)) and not torch.equal(many, draw((40, 25), 0.5, 7, 4))


def test_uniform_values_fill_their_range_and_normal_ones_have_their_deviation():
    uniform, normal = kernels.random_uniform((200_000,), 0.5, 1, 0), kernels.random_normal((200_000,), 0.5, 1, 0)
    assert -0.5 < float(uniform.min()) < -0.4999 and 0.4999 < float(uniform.max()) < 0.5 and abs(float(uniform.mean())) < 2e-3
    assert abs(float(normal.mean())) < 5e-3 and abs(float(normal.std()) - 0.5) < 5e-3 and float(normal.abs().max()) > 1.5


def test_parts_that_are_drawn_at_once_join_without_a_seam():
    long = kernels.random_uniform((4 * (1 << 18) + 10,), 1.0, 5, 5)
    words = kernels.philox(5, 5, torch.arange((1 << 18) - 1, (1 << 18) + 3)).numpy().astype(np.uint32).reshape(-1)[:14]
    assert torch.equal(long[-14:], torch.from_numpy(2 * ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23) - 1))
