# SPDX-License-Identifier: Apache-2.0
"""One training loop, as anybody writes it or inside plimsoll.Run: python loop.py bare|run FOLDER STEPS [WORKERS].

The order of the samples is FOLDER/order.npy for the bare loop, and the run's own: the same. TURN steps are made for
each line of standard input, so that two loops take turns; each answers with a line of JSON: the seconds of each, from
batch to batch. The last line has the digest of the model.
"""
import hashlib
import json
import pathlib
import sys

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from bench.loop_turns import Turns

SAMPLES, BATCH, WIDTH, LAYERS = 4096, 32, 256, 2
LENGTH, WORDS = 24, 256
SEED = 5
TURN = 4  # Steps.


class Texts:
    """Sequences of words, each to be told again."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        words = (torch.arange(LENGTH) * (index + 1) + index) % WORDS
        return {"words": words, "targets": words.roll(1)}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.body = torch.nn.TransformerEncoder(layer, LAYERS)
        self.out = torch.nn.Linear(WIDTH, WORDS)

    def loss(self, batch):
        logits = self.out(self.body(self.words(batch["words"])))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def made():
    torch.manual_seed(SEED)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def bare(folder: pathlib.Path, steps: int, workers: int):
    model, optimizer = made()
    order = np.load(folder / "order.npy")[:steps * BATCH]
    loader = torch.utils.data.DataLoader(Texts(), batch_size=BATCH, sampler=order.tolist(), num_workers=workers,
                                         persistent_workers=workers > 0)
    turns = Turns(TURN)
    for batch in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = model.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        turns.made()
    return model


def run(folder: pathlib.Path, steps: int, workers: int):
    import plimsoll

    with plimsoll.Run(folder / "run", memory_limit="4GiB", seed=SEED, compute_threads=1, deterministic=False) as one:
        model, optimizer = made()
        one.track(model=model, optimizer=optimizer)
        data = one.loader(Texts(), batch_size=BATCH, workers=workers)
        turns = Turns(TURN)
        for batch in one.steps(data, progress=False):
            one.log(loss=one.step(model.loss, batch, clip_norm=1.0))
            turns.made()
            if one.steps_made == steps - 1:  # This one is the last.
                break
    return model


def main() -> int:
    how, folder, steps = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    model = {"bare": bare, "run": run}[how](folder, steps, int((sys.argv[4:] or ["0"])[0]))
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.state_dict().values()))
    print(json.dumps(digest.hexdigest()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
