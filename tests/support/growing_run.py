# SPDX-License-Identifier: Apache-2.0
"""A training run of its own whose samples grow eightfold in length, as a child process under a limit.

    python -m tests.support.growing_run --memory-limit 900MiB --out DIR [--admit 512]

Twelve steps of a small Transformer encoder on 16 sequences each; goes on from DIR's commit. Prints one
line of JSON: the summary, with the sha256 of the weights. Exit status 3 when it stopped for memory.
"""
import argparse
import hashlib
import json
import pathlib
import sys

import torch

import plimsoll

LENGTHS = [64, 64, 64, 128, 128, 128, 256, 256, 256, 512, 512, 512]
ROWS = 16


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(256, 64)
        self.layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.head = torch.nn.Linear(64, 256)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens)))


def batch_of(step: int, length: int) -> tuple:
    """The tokens of a step, and what follows each."""
    tokens = torch.randint(256, (ROWS, length + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def resident_peak() -> int:
    """Of this process since it began; what wait4() says counts the process it was forked from too."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--memory-limit", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--admit", type=int, default=0, help="length of the longest samples")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    commit = options.out / "commit.pt"
    torch.set_num_threads(1)
    torch.manual_seed(3)
    # The first optimizer alone imports 70 MiB of torch's modules.
    with plimsoll.Governor(options.memory_limit, foreign_bytes="128MiB") as governor:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def loss(x, y):
            return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

        def save():
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "random": torch.get_rng_state(), "step": step.state_dict()}, commit)

        with plimsoll.TrainingStep(model, optimizer, commit=save,
                                   events=options.out / "events.jsonl") as step:
            if commit.exists():
                saved = torch.load(commit)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                torch.set_rng_state(saved["random"])
                step.load_state_dict(saved["step"])
            try:
                if options.admit:
                    step.admit(batch_of(0, options.admit), loss)
                while step.steps < len(LENGTHS):
                    step(batch_of(step.steps, LENGTHS[step.steps]), loss)
            except plimsoll.BudgetExceeded as refusal:
                print(json.dumps({**step.summary(), "why": str(refusal),
                                  "resident_peak_bytes": resident_peak(),
                                  "smallest_limit_bytes": refusal.smallest_limit_bytes}))
                return 3
            save()
            digest = hashlib.sha256()
            for value in model.state_dict().values():
                digest.update(value.numpy().tobytes())
            print(json.dumps({**step.summary(), "sha256": digest.hexdigest(),
                              "resident_peak_bytes": resident_peak(),
                              "begins_bytes": governor.ledger().baseline_bytes + (128 << 20)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
