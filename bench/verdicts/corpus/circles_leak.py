# SPDX-License-Identifier: Apache-2.0
"""Objects in circles, each with a tensor and its graph, kept in a deque without a bound."""
# /// truth
# leaks = true
# owners = ["native", "tensors"]
# holder = "replay"
# needs = ["torch"]
# ///
import collections

import torch

from watched import steps


class Episode:
    """Its steps know it, and it knows its steps."""

    def __init__(self, net, states):
        self.out = net(states).tanh()  # site
        self.turns = [Turn(self, at) for at in range(4)]  # site


class Turn:
    def __init__(self, episode, at):
        self.episode, self.at = episode, at


net, replay = torch.nn.Linear(128, 256), collections.deque()
for step in steps():
    episode = Episode(net, torch.randn(128, 128))
    (episode.out.square().mean()).backward()
    replay.append(episode)
