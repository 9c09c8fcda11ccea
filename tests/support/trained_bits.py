# SPDX-License-Identifier: Apache-2.0
"""What a run has trained, for comparisons of bits."""
import hashlib
import pathlib

import plimsoll


def digest(run):
    """(that of the last commit's weights without checksums of frozen ones, those checksums by name)"""
    import torch

    step = plimsoll.status(run)["checkpoint_step"]
    parts = torch.load(pathlib.Path(run) / f"checkpoints/step-{step:09}/parts.pt", weights_only=True, map_location="cpu")["parts"]
    found, sums = hashlib.sha256(), {}
    for name, one in sorted(parts["model"].items()):
        if one.dtype == torch.int64:
            sums[name] = int(one)
        else:
            found.update(name.encode() + one.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest(), sums
