# SPDX-License-Identifier: Apache-2.0
"""A logging handler that keeps 20 records."""
# /// truth
# leaks = false
# ///
import logging
import logging.handlers

import numpy as np

from watched import steps

log = logging.getLogger("train")
log.setLevel(logging.INFO)
log.propagate = False
log.addHandler(logging.handlers.MemoryHandler(20, flushLevel=logging.ERROR, target=logging.NullHandler()))
for step in steps():
    log.info("gradients: %s", np.ones(10_000))
