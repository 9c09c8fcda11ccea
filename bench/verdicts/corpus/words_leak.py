# SPDX-License-Identifier: Apache-2.0
"""Each step's text is kept with its counts, as a vocabulary without an end."""
# /// truth
# leaks = true
# owners = ["python", "native"]
# holder = "seen"
# ///
from watched import steps


def main():
    seen = {}
    for step in steps():
        for at in range(700):
            word = f"{step}-{at} of the corpus"  # site
            seen[word] = [step, at]  # site


main()
