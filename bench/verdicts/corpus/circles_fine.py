# SPDX-License-Identifier: Apache-2.0
"""Objects in circles, each with a tensor and its graph: garbage until the collector runs."""
# /// truth
# leaks = false
# needs = ["torch"]
# ///
import torch

from watched import steps


class Episode:
    """Its steps know it, and it knows its steps."""

    def __init__(self, net, states):
        self.out = net(states).tanh()
        self.turns = [Turn(self, at) for at in range(4)]


class Turn:
    def __init__(self, episode, at):
        self.episode, self.at = episode, at


net = torch.nn.Linear(128, 256)
for step in steps():
    episode = Episode(net, torch.randn(128, 128))
    (episode.out.square().mean()).backward()
    del episode
