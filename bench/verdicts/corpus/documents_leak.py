# SPDX-License-Identifier: Apache-2.0
"""Documents parsed from JSON and kept by their name."""
# /// truth
# leaks = true
# owners = ["python", "native"]
# holder = "documents"
# ///
import json

from watched import steps

documents = {}
for step in steps():
    text = json.dumps([{"role": "user", "content": f"{step} {k} " + "so " * 20} for k in range(300)])
    documents[f"chat {step}"] = json.loads(text)  # site
