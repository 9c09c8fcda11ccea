# SPDX-License-Identifier: Apache-2.0
"""A cache of answers to 60 questions that come at random: it fills ever slower."""
# /// truth
# leaks = false
# ///
import random

from watched import steps

draw = random.Random(11)
answers = {}
for step in steps():
    question = draw.randrange(60)
    if question not in answers:
        answers[question] = b"x" * 100_000
