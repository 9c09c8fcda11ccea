# SPDX-License-Identifier: Apache-2.0
"""Losses of both models, alone and with a teacher.

    autoencoder:  MSE of the ten numbers + 0.1 · cross entropy of the id + 0.05 · binary cross entropy of the neighbours
                  + 0.01 · divergence of the latent from N(0, 1)
    classifier:   cross entropy
    with a teacher, weight a and temperature T:
      autoencoder:  a · (w_z · MSE(P z, z_teacher) + w_x · MSE(x, x_teacher)) + (1 − a) · its own loss
      classifier:   a · T² · KL(teacher ‖ student at temperature T) + (1 − a) · cross entropy

P is a trained map where the latents differ in width. Source: Hinton et al., "Distilling the Knowledge in a Neural Network"
(2015), section 2.
Reading order: _models.py, this file.
Threads: those of torch.   Memory: what autograd keeps.
"""
from __future__ import annotations

import torch
from torch.nn import functional

from ... import kernels
from ._models import Graphs, Reconstruction

ID_WEIGHT = 0.1
_NEIGHBOUR_WEIGHT = 0.05
_DIVERGENCE_WEIGHT = 0.01

Terms = dict[str, torch.Tensor]
"""The parts of a loss, before their weights."""


def autoencoder_loss(made: Reconstruction, graphs: Graphs) -> tuple[torch.Tensor, Terms]:
    """Returns the autoencoder's own loss, and its terms."""
    rows, head = made.neighbours
    mse = kernels.mean_square(made.reconstruction, graphs.features)
    ids = kernels.id_cross_entropy(made.z, made.ids.weight, made.ids.bias, graphs.ids, bf16=made.bf16)
    neighbours = kernels.neighbor_cross_entropy(rows, head.weight, head.bias, graphs.ids, graphs.edges, bf16=made.bf16)
    divergence = kernels.normal_divergence(made.mean, made.log_variance)
    loss = mse + ids * ID_WEIGHT + neighbours * _NEIGHBOUR_WEIGHT + divergence * _DIVERGENCE_WEIGHT
    return loss, {"mse": mse, "id": ids, "neighbours": neighbours, "divergence": divergence}


def distilled_autoencoder_loss(own: torch.Tensor, z: torch.Tensor, made: Reconstruction, taught: torch.Tensor, *, alpha: float,
                               latent_weight: float, reconstruction_weight: float) -> tuple[torch.Tensor, Terms]:
    """Adds a teacher's answer to the autoencoder's own loss.

    z: the student's latent, as wide as the teacher's. taught: [nodes, latent + 10], the teacher's mean and reconstruction.
    """
    latent = kernels.mean_square(z, taught[:, :z.shape[1]].contiguous())
    features = kernels.mean_square(made.reconstruction, taught[:, z.shape[1]:].contiguous())
    loss = alpha * (latent_weight * latent + reconstruction_weight * features) + (1.0 - alpha) * own
    return loss, {"kd_latent": latent, "kd_reconstruction": features}


def distilled_classifier_loss(own: torch.Tensor, logits: torch.Tensor, taught: torch.Tensor, *, alpha: float,
                              temperature: float) -> tuple[torch.Tensor, Terms]:
    """Adds a teacher's logits to the classifier's cross entropy."""
    theirs = torch.softmax(taught / temperature, 1)
    gap = torch.log_softmax(taught / temperature, 1) - torch.log_softmax(logits / temperature, 1)
    kd = (theirs * gap).sum() * (temperature * temperature / len(logits))
    return alpha * kd + (1.0 - alpha) * own, {"kd": kd}


@torch.no_grad()
def graph_errors(made: Reconstruction, graphs: Graphs) -> torch.Tensor:
    """Computes how surprising each graph is: the mean square and 0.1 · the mean cross entropy of its nodes, float32 [graphs]."""
    cross = kernels.id_cross_entropy_rows(made.z, made.ids.weight, made.ids.bias, graphs.ids).double()
    square = (made.reconstruction.double() - graphs.features.double()).square().sum(1)
    nodes = graphs.runs.diff().clamp(min=1)
    sums = torch.zeros(2, len(graphs), dtype=torch.float64, device=cross.device)
    sums[0].index_add_(0, graphs.graph, square)
    sums[1].index_add_(0, graphs.graph, cross)
    return (sums[0] / (nodes * graphs.features.shape[1]) + ID_WEIGHT * sums[1] / nodes).float()


@torch.no_grad()
def graph_cross_entropies(logits: torch.Tensor, graphs: Graphs) -> torch.Tensor:
    """Computes the classifier's loss of each graph, float32 [graphs]."""
    return functional.cross_entropy(logits, graphs.labels, reduction="none")
