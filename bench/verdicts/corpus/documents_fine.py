# SPDX-License-Identifier: Apache-2.0
"""Documents parsed from JSON, one at a time."""
# /// truth
# leaks = false
# ///
import json

from watched import steps

for step in steps():
    text = json.dumps([{"role": "user", "content": f"{step} {k} " + "so " * 20} for k in range(300)])
    document = json.loads(text)
