# SPDX-License-Identifier: Apache-2.0
"""C15: the original evaluation sorted similarities per condition and held features it never used.

Goal: the peak of an evaluation of `cosir` depends neither on the number of conditions nor on the gallery.
Method: features computed when asked for, so that the arena holds the evaluation's own alone.
"""
import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import plimsoll
from plimsoll.core import _torch_gate
from tests.support.on_device import skip_without_torch

skip_without_torch()

from plimsoll.recipes.cosir._evaluate import _CONDITIONS, _GALLERY, _QUERIES, Ranked, Turns
from plimsoll.recipes.cosir._pairs import Held

DIM = 64
SLACK = 256 << 10  # A tail block may round to another class.


class Features:
    """Pairs whose features are made when they are read."""

    device = "cpu"

    def read(self, ids, columns):
        random = torch.Generator().manual_seed(int(ids[0]) + len(columns[0]))
        return [torch.randn((len(ids), DIM), generator=random)]


class Plain:
    """A model that projects nothing."""

    @staticmethod
    def project_image(image):
        return image

    project_text = project_image


def peak_of(pairs, conditions):
    extension, ids = _torch_gate.load(), np.arange(pairs)
    angle = torch.linspace(0.1, 3.0, conditions)
    turns = Turns(torch.nn.functional.normalize(torch.randn((conditions, DIM), generator=torch.Generator().manual_seed(1))), angle.cos(),
                  angle.sin(), torch.ones(conditions))
    gc.collect()  # Else tensors of earlier tests go while this is measured.
    held = extension.arena_stats()["live_bytes"]
    extension.reset_peak()
    with torch.no_grad():
        ranked = Ranked(Plain(), Features(), Held(ids, ids), lambda: False)
        found = [ranked.images(turns), ranked.texts(turns)]
    assert all(len(one.best) == pairs and int(one.best.min()) >= 1 for one in found)
    return extension.arena_stats()["live_peak_bytes"] - held


def test_the_peak_of_an_evaluation_grows_neither_with_conditions_nor_with_the_gallery():
    with plimsoll.Governor("4GiB"):
        usual = peak_of(2 * _GALLERY, _CONDITIONS - 1)
        assert usual > _QUERIES * _GALLERY * 4  # It was measured at all.
        for pairs, conditions in ((4 * _GALLERY, _CONDITIONS - 1), (2 * _GALLERY, 3 * _CONDITIONS)):
            assert peak_of(pairs, conditions) <= usual + SLACK + 20 * (pairs - 2 * _GALLERY)  # Some numbers a pair are its result.
