# SPDX-License-Identifier: Apache-2.0
"""Tensors of a governed process kept in a dict of lists."""
# /// truth
# leaks = true
# owners = ["tensors"]
# bytes_per_step = 131072
# holder = "features"
# ///
import torch

import plimsoll

from watched import steps

features = {"train": []}
with plimsoll.Governor("2GiB"):
    for step in steps():
        batch = torch.randn(128, 256)  # site
        features["train"].append(batch)
