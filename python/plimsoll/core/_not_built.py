# SPDX-License-Identifier: Apache-2.0
"""NotBuilt: what an import of plimsoll._torch raises where it was not built."""
from __future__ import annotations


class NotBuilt(ImportError):
    """plimsoll was built without its torch parts."""
