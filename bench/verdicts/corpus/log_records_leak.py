# SPDX-License-Identifier: Apache-2.0
"""A logging handler that keeps records until an error comes."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 80000
# holder = "buffer|MemoryHandler|LogRecord"
# ///
import logging
import logging.handlers

import numpy as np

from watched import steps

log = logging.getLogger("train")
log.setLevel(logging.INFO)
log.propagate = False
log.addHandler(logging.handlers.MemoryHandler(1_000_000, flushLevel=logging.ERROR))
for step in steps():
    log.info("gradients: %s", np.ones(10_000))  # site
