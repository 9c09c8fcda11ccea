# SPDX-License-Identifier: Apache-2.0
"""A cache of answers to questions that do not come again."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 100000
# holder = "answers"
# ///
import random

from watched import steps

draw = random.Random(11)
answers = {}
for step in steps():
    question = step, draw.randrange(60)
    if question not in answers:
        answers[question] = b"x" * 100_000  # site
