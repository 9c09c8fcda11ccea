# SPDX-License-Identifier: Apache-2.0
"""The naive way: load every feature into memory, then train. Killed where Plimsoll is not.

python naive.py DIR: DIR is a `plimsoll synth cosir` directory with float32 features.
"""
import json
import pathlib
import sys

import numpy as np
import torch

folder = pathlib.Path(sys.argv[1])
description = json.loads((folder / "features.json").read_text())
features = torch.from_numpy(np.fromfile(folder / "records.dat", dtype=np.float32))
weights = torch.nn.Linear(1024, 1)
loss = weights(features[: features.numel() // 1024 * 1024].view(-1, 1024)[:2048]).mean()
loss.backward()
print(json.dumps({"status": "loaded", "rows": description["rows"], "loss": loss.item()}))
