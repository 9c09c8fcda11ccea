# SPDX-License-Identifier: Apache-2.0
"""LiveRows: the whole table as one torch Parameter, for torch.optim.

Threads: the manager's lock; an optimizer's step and the manager's calls may not overlap.
Memory:  the whole table, leased.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from ..memory._buffers import Buffer
from ._files import torch_module
from ._ids import IdMap


class LiveRows:
    """A torch Parameter of all rows, and their current values."""

    def __init__(self, buffer: Buffer, ids: IdMap) -> None:
        """Makes the Parameter from a buffer of all rows. Errors: ImportError without torch."""
        torch = torch_module("get_optimizer_params()")
        self.rows = buffer.array
        self.parameter: Any = torch.nn.Parameter(buffer.tensor.detach())  # The same bytes.
        self._buffer = buffer
        self._ids = ids

    def overlay(self, ids: np.ndarray, out: np.ndarray, frozen: np.ndarray) -> None:
        """Overwrites rows in `out`, read from the table, with the Parameter's values. Frozen rows keep the table's."""
        rows = self.rows[self._ids.positions(ids)]
        out[~frozen] = rows[~frozen]

    def put(self, positions: np.ndarray, rows: np.ndarray) -> None:
        """Copies rows that were written to the table into the Parameter."""
        self.rows[positions] = rows
