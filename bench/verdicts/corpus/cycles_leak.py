# SPDX-License-Identifier: Apache-2.0
"""Nodes that know their parents, and a registry that knows the nodes."""
# /// truth
# leaks = true
# owners = ["native"]
# bytes_per_step = 80000
# holder = "nodes|Node"
# ///
import numpy as np

from watched import steps


class Node:
    nodes = []

    def __init__(self, parent):
        self.children, self.parent = [], parent
        self.state = np.zeros(10_000) + 1  # site
        Node.nodes.append(self)


for step in steps():
    root = Node(None)
    root.state = None
    root.children.append(Node(root))
