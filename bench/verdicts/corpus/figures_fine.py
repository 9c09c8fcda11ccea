# SPDX-License-Identifier: Apache-2.0
"""Figures of matplotlib that are closed."""
# /// truth
# leaks = false
# needs = ["matplotlib"]
# ///
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from watched import steps

for step in steps():
    if step % 5 == 0:
        figure = plt.figure(figsize=(5, 4))
        figure.add_subplot().plot(range(step))
        figure.canvas.draw()
        plt.close(figure)
