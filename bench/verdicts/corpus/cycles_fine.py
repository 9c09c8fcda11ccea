# SPDX-License-Identifier: Apache-2.0
"""Nodes that know their parents: garbage that waits for the collector, which comes seldom."""
# /// truth
# leaks = false
# ///
import gc

import numpy as np

from watched import steps

gc.set_threshold(100_000)


class Node:
    def __init__(self, parent):
        self.children, self.parent = [], parent
        self.state = np.zeros(10_000) + 1


for step in steps():
    root = Node(None)
    root.state = None
    root.children.append(Node(root))
