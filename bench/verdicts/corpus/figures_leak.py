# SPDX-License-Identifier: Apache-2.0
"""Figures of matplotlib that are never closed."""
# /// truth
# leaks = true
# needs = ["matplotlib"]
# owners = ["native", "python", "unexplained"]
# holder = "figs|Gcf|[Ff]igure"
# ///
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from watched import steps

for step in steps():
    if step % 5 == 0:
        figure = plt.figure(figsize=(5, 4))  # site
        figure.add_subplot().plot(range(step))
        figure.canvas.draw()  # site
