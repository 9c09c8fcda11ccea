# SPDX-License-Identifier: Apache-2.0
"""Fusion: a network learns by trial which mixture of both models' answers to believe of a graph.

Each step ("episode") looks at fusion_batch training graphs. The network, or with a chance that decays a dice, chooses one of 21
weights; the fused score says attack or not, and the reward is +3 or −3. Steps are kept in a ring. The network follows Huber's
loss of a sample of the ring towards reward + gamma · (best value of the next graph's state, by a target network).
All choices are functions of (seed, episode, place).

Source: Mnih et al., "Human-level control through deep reinforcement learning" (2015), methods.
Reading order: _models.py, _tasks.py, this file.
Threads: the thread that trains.
Memory:  68 bytes for each of at most 65,536 graphs; 140 bytes for each place of the ring; two small networks.
"""
from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ... import kernels
from ...data._data import SampleOrder
from ._losses import graph_errors
from ._models import Dense, Draws, Graphs, Pass
from ._scores import youden_threshold
from ._tasks import Data, Task, load_model, model_path, read_tensors, save_model, weight_seed

if TYPE_CHECKING:
    from . import Options

STATES, _ACTIONS = 15, 21  # Numbers of a state; mixing weights 0, 0.05, … 1.
_ERROR, _ATTACK = 0, 11  # Places in a state: the graph's error, its probability of an attack.
_GRAPHS_MOST, _REWARD = 65_536, 3.0
_SEEN, _DICE, _DARED, _RECALLED = 1, 2, 3, 4  # Streams of random numbers, by what they decide.
_SIDES = 1 << 20  # Of the dice.
_HOW = Pass(training=False, noise=0, rate=0.0, bf16=False)


class FusionNetwork(nn.Module):
    """Says what each mixing weight is worth in a state: dense 15 → hidden → hidden → 21."""

    threshold: torch.Tensor
    """The error that counts as one half, float64 [1]."""

    def __init__(self, hidden: int, seed: int | None) -> None:
        super().__init__()
        draws = Draws(seed)
        self.layers = nn.ModuleList(Dense(*widths, draws) for widths in ((STATES, hidden), (hidden, hidden), (hidden, _ACTIONS)))
        self.register_buffer("threshold", torch.zeros(1, dtype=torch.float64))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.layers[0](states, _HOW))
        x = torch.relu(self.layers[1](x, _HOW))
        return self.layers[2](x, _HOW)

    def best(self, states: np.ndarray) -> np.ndarray:
        """Returns the action of most worth in each state, int64 [rows]."""
        with torch.no_grad():
            return self(torch.from_numpy(states).to(self.threshold.device)).argmax(1).cpu().numpy()

    def scores(self, states: np.ndarray) -> np.ndarray:
        """Returns scores, float32 [graphs]: above one half means attack."""
        return fused_scores(states, self.best(states), float(self.threshold))


def load_fusion(options: Options, data: Data, role: str, folder: str | pathlib.Path) -> FusionNetwork:
    """Reads the finished fusion of a run. Errors: NotFoundError; ValueError naming what does not fit."""
    path = model_path(folder, Task(role, "fusion"))
    network = FusionNetwork(options.fusion_hidden, None)
    try:
        network.load_state_dict(read_tensors(path))
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from None
    return network.to(data.device).eval().requires_grad_(False)


@torch.no_grad()
def fusion_states(autoencoder: nn.Module, classifier: nn.Module, graphs: Graphs) -> np.ndarray:
    """Returns what the network sees of each graph, float32 [graphs, 15]; a graph's numbers depend on that graph alone.

    0 … 7   of the autoencoder: error, its square and identity parts; mean, deviation, least and most of the latent over the graph's
            nodes; mean log variance.
    8 … 14  of the classifier: both logits, both probabilities, their margin, entropy, confidence.
    """
    made, logits = autoencoder(graphs), classifier(graphs)
    chances = _doubles(torch.softmax(logits, 1))
    errors, runs = _doubles(graph_errors(made, graphs)), graphs.runs.cpu().numpy().astype(np.int64)
    mse = _figures(np.square(_doubles(graphs.features) - _doubles(made.reconstruction)), runs)[0]
    entropy = -(chances * np.log(np.where(chances > 0, chances, 1.0))).sum(1)
    columns = [errors, mse, errors - mse, *_figures(_doubles(made.mean), runs), _figures(_doubles(made.log_variance), runs)[0],
               *_doubles(logits).T, *chances.T, chances[:, 1] - chances[:, 0], entropy, chances.max(1)]
    return np.stack(columns, 1).astype(np.float32)


def _doubles(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().cpu().numpy()


def _figures(values: np.ndarray, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns mean, deviation, least and most of each run of rows, summed in order; zeros for an empty run."""
    begins, sizes = runs[:-1] * values.shape[1], np.diff(runs) * values.shape[1]
    flat, counts, filled = values.reshape(-1), np.maximum(sizes, 1), sizes > 0
    run = np.repeat(np.arange(len(sizes)), sizes)
    mean, square = (np.bincount(run, weights, len(sizes)) / counts for weights in (flat, flat * flat))
    least, most = np.zeros(len(sizes)), np.zeros(len(sizes))
    if filled.any():
        least[filled], most[filled] = (end.reduceat(flat, begins[filled]) for end in (np.minimum, np.maximum))
    return mean, np.sqrt(np.maximum(0.0, square - mean * mean)), least, most


def fused_scores(states: np.ndarray, actions: np.ndarray, threshold: float) -> np.ndarray:
    """Returns w · p(attack) + (1 − w) · error/(error + threshold) with w = action/20, float32 [graphs]."""
    weights, errors = actions / (_ACTIONS - 1.0), states[:, _ERROR].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        anomalies = errors / (errors + threshold) if np.isfinite(threshold) else np.zeros_like(errors)
    return (weights * states[:, _ATTACK] + (1.0 - weights) * anomalies).astype(np.float32)


class Fusion:
    """The fusion stage of a role: a task's work, as _training.Training is."""

    weight_decay = 0.0
    epochs = 1

    def __init__(self, options: Options, data: Data, role: str, folder: str | pathlib.Path) -> None:
        """Asks both finished models about the training graphs, or a sample of them. Errors: of load_model(); Stopped."""
        self.options, self.task = options, Task(role, "fusion")
        self.seed = weight_seed(options, self.task)
        self.rate = options.fusion_lr
        self.notes: dict[str, float] = {"episode": 0, "reward_sum": 0.0}
        self._states, self._labels = self._look(data, folder)
        self.network = FusionNetwork(options.fusion_hidden, self.seed)
        self.network.threshold.fill_(youden_threshold(self._states[:, _ERROR], self._labels))
        self.target = FusionNetwork(options.fusion_hidden, self.seed).requires_grad_(False)
        self.ring, places = nn.Module(), options.fusion_replay
        for name, empty in (("states", torch.zeros(places, STATES)), ("following", torch.zeros(places, STATES)),
                            ("actions", torch.zeros(places, dtype=torch.int64)), ("rewards", torch.zeros(places))):
            self.ring.register_buffer(name, empty)
        self.module = nn.ModuleDict({"network": self.network, "target": self.target, "ring": self.ring}).to(data.device)
        self._reward = 0.0

    def _look(self, data: Data, folder: str | pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
        options, role = self.options, self.task.role
        autoencoder, classifier = (load_model(options, data, Task(role, stage), folder) for stage in ("autoencoder", options.fusion_gat))
        order = SampleOrder(len(data.train), self.seed)
        graphs = data.train[order.at(np.arange(min(len(data.train), _GRAPHS_MOST)))]
        states = data.score(graphs, options.scoring_chunk, lambda chunk: fusion_states(autoencoder, classifier, data.read(chunk)))
        return states, data.labels[graphs]

    # ---- A step ----

    def batches(self, epoch: int, position: int) -> Iterator[int]:
        """Yields the episodes from `position` on."""
        yield from range(position, self.options.fusion_episodes)

    def after(self, episode: int) -> int:
        return episode + 1

    def graphs(self, episode: int) -> int:
        return self.options.fusion_batch

    def ends_epoch(self, episode: int) -> bool:
        return self.after(episode) == self.options.fusion_episodes

    def trained(self) -> list[nn.Parameter]:
        return [one for one in self.network.parameters() if one.requires_grad]

    def clip(self) -> None:
        """Does nothing: Huber's loss bounds the gradients."""

    def loss(self, episode: int) -> torch.Tensor:
        """Plays an episode into the ring, and returns the loss of a sample of the ring. Made again it is the same."""
        options, device = self.options, self.network.threshold.device
        with torch.no_grad():
            seen = self._act(episode)
            self._reward = float(seen["rewards"].mean())
            self._remember(episode, seen)
            held = min((episode + 1) * options.fusion_batch, options.fusion_replay)
            rows = torch.from_numpy(self._draw(_RECALLED, episode, options.fusion_batch, held)).to(device)
            states, following, actions, rewards = (getattr(self.ring, name)[rows] for name in seen)
            wanted = rewards
            if options.fusion_gamma > 0:
                wanted = rewards + options.fusion_gamma * self.target(following).max(1).values
        return functional.huber_loss(self.network(states).gather(1, actions[:, None]).squeeze(1), wanted)

    def _act(self, episode: int) -> dict[str, torch.Tensor]:
        """Chooses weights for fusion_batch graphs: states, the states after them, actions, rewards."""
        rows = self.options.fusion_batch
        picked = self._draw(_SEEN, episode, rows + 1, len(self._states))  # One more: the state after the last.
        states, attacks = self._states[picked], self._labels[picked[:-1]] != 0
        actions = self.network.best(states[:-1])
        dared = self._draw(_DICE, episode, rows, _SIDES) < self.epsilon(episode) * _SIDES
        actions[dared] = self._draw(_DARED, episode, rows, _ACTIONS)[dared]
        right = (fused_scores(states[:-1], actions, float(self.network.threshold)) > 0.5) == attacks
        return {"states": torch.from_numpy(states[:-1]), "following": torch.from_numpy(states[1:]), "actions": torch.from_numpy(actions),
                "rewards": torch.from_numpy(np.where(right, np.float32(_REWARD), np.float32(-_REWARD)))}

    def _remember(self, episode: int, seen: dict[str, torch.Tensor]) -> None:
        rows, room = self.options.fusion_batch, self.options.fusion_replay
        kept = torch.arange(max(0, rows - room), rows)  # A smaller ring keeps the last of them.
        for name, values in seen.items():
            ring = getattr(self.ring, name)
            ring[((episode * rows + kept) % room).to(ring.device)] = values[kept].to(ring.device)

    def _draw(self, use: int, episode: int, count: int, most: int) -> np.ndarray:
        """Returns whole numbers below `most`, each of (seed, use, episode, place)."""
        words = kernels.philox(self.seed, use << 48 | episode, torch.arange(count)).numpy().astype(np.uint64)
        return ((words[:, 0] << np.uint64(32) | words[:, 1]) % np.uint64(most)).astype(np.int64)

    def epsilon(self, episode: int) -> float:
        """Returns the chance that a weight is chosen by the dice."""
        options = self.options
        return max(options.fusion_epsilon_min, options.fusion_epsilon * options.fusion_epsilon_decay ** episode)

    def made(self, loss: float, episode: int) -> dict[str, float]:
        """Counts a step that was made. Returns the terms of its event."""
        self.notes["episode"] = episode + 1
        self.notes["reward_sum"] += self._reward
        if (episode + 1) % self.options.fusion_target_update == 0:
            self.target.load_state_dict(self.network.state_dict())
        return {"reward": self._reward, "epsilon": self.epsilon(episode + 1)}

    # ---- The end ----

    @property
    def finished(self) -> bool:
        return self.notes["episode"] >= self.options.fusion_episodes

    @property
    def parameters(self) -> int:
        return sum(one.numel() for one in self.trained())

    def begin(self) -> None:
        """Does nothing: the graphs were looked at when this was made."""

    def look_back(self) -> None:
        """Does nothing: an episode's reward is known when it is played."""

    def end_epoch(self, seen: None) -> dict[str, Any]:
        """Returns the figures of the event "epoch"."""
        return {"loss": 0.0, "held_out_loss": 0.0, "best": True, "reward": self.notes["reward_sum"] / self.options.fusion_episodes}

    def save(self, path: pathlib.Path) -> None:
        """Writes the network of the last episode. Errors: OSError."""
        save_model(path, self.network.state_dict(), {"task": self.task.name, "parameters": self.parameters})
