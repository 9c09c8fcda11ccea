# SPDX-License-Identifier: Apache-2.0
"""Tensors of a governed process that are let go of."""
# /// truth
# leaks = false
# ///
import torch

import plimsoll

from watched import steps

features = {"train": []}
with plimsoll.Governor("2GiB"):
    for step in steps():
        features["train"] = [torch.randn(128, 256)]
