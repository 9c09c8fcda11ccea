# SPDX-License-Identifier: Apache-2.0
"""Check 8: check 7 at 4,096 tokens, where a block takes less time than its copy.

At 600 TFLOP/s and 50 GB/s the ratio is 0.54; blocks that stay on the device make it better.

Threads, Memory: as tuned.py.
"""
from __future__ import annotations

from bench.device_check.device import Device
from bench.device_check.result import Result
from bench.device_check.tuned import compared


def check(device: Device) -> Result:
    """Trains resident, then streamed."""
    return compared(device, sequences=2, length=2048, bar=0.54)
