# SPDX-License-Identifier: Apache-2.0
"""A recipe in a file of your own: a small network learns the last column of a table from the others.

    plimsoll train examples/recipe.py --data table.npy --out run/ --memory-limit 2GiB
"""
import dataclasses

import numpy as np
import torch

import plimsoll
from plimsoll.recipes import DeviceOptions, Recipe, committed, limited, option


@dataclasses.dataclass(kw_only=True)
class Options(DeviceOptions):
    epochs: int = option(3, "Number of passes over the rows", least=1)
    batch_size: int = option(32, "Batch size, in rows", least=1, most=65536)
    width: int = option(64, "Width of the hidden layer", least=1, most=65536)
    lr: float = option(0.01, "Learning rate", least=0.0)


def work_of(options, device="cpu"):
    """Returns the rows, the model and its loss."""
    table = torch.from_numpy(np.load(options.data))
    rows = torch.utils.data.TensorDataset(table[:, :-1], table[:, -1:])
    model = torch.nn.Sequential(torch.nn.Linear(table.shape[1] - 1, options.width), torch.nn.Tanh(), torch.nn.Linear(options.width, 1))
    model = model.to(device)
    return rows, model, lambda x, y: torch.nn.functional.mse_loss(model(x), y)


def train(run, options):
    device = options.device_name()
    rows, model, loss = work_of(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    run.track(model=model, optimizer=optimizer)
    for batch in run.steps(run.loader(rows, batch_size=options.batch_size, device=device), epochs=options.epochs):
        run.log(loss=run.step(loss, batch))
    return {"weights": sum(one.double().sum().item() for one in model.parameters())}


def evaluate(options):
    with limited(options), torch.no_grad():
        step, parts = committed(options.out)
        rows, model, loss = work_of(options)
        model.load_state_dict(parts["model"])
        return {"step": step, "loss": loss(*rows[:]).item()}


def plan(options, device, device_memory_limit):
    with limited(options) as governor:
        rows, model, loss = work_of(options)
        optimizer = torch.optim.AdamW(model.parameters())
        step = plimsoll.TrainingStep(model, optimizer)
        found = plimsoll.plan_batch(lambda size: step.rehearse(rows[:size], loss), model=model, optimizer=optimizer, governor=governor,
                                    max_batch_size=len(rows), device=device, device_memory_limit=device_memory_limit)
        return {"batch_size": found.batch_size, "peak_bytes": found.peak_bytes}


RECIPE = Recipe("table", "The last column of a table, from the others", Options, train, evaluate, plan, data="File of rows, .npy of float32")
