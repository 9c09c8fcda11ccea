# SPDX-License-Identifier: Apache-2.0
"""NotBuilt: what an import of plimsoll._torch raises where it was not built."""
from __future__ import annotations


class NotBuilt(ImportError):
    """The error of an import that needs torch parts of plimsoll which were not built."""
