# SPDX-License-Identifier: Apache-2.0
"""Stands where the extension module plimsoll._torch would be, and is found only without it."""
from .core._not_built import NotBuilt

raise NotBuilt(
    "plimsoll was built without its torch parts (plimsoll._torch). With torch installed, rebuild "
    "with `pip install .` in Plimsoll's source folder."
)
