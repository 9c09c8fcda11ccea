# SPDX-License-Identifier: Apache-2.0
"""One loop of random_pressure.py: python -m tests.budget.pressed_loop JSON, or without words: loops by lines of stdin.

A training run whose memory grows at a given rate, in the place that is named, until something ends it. Prints a line of
JSON: how it ended, how many batches were given to the body, how many steps are committed. A loop with "grows": false makes
the same steps and grows nowhere; it prints the digest of what was trained.
"""
import hashlib
import json
import sys
import time

import numpy as np
import torch

import plimsoll

PIECE = 16 << 20  # Bytes, at most, that are taken at once.
TICK = 0.002


class Grower:
    """Takes `rate` bytes a second of the clock while grow() runs."""

    def __init__(self, rate: float) -> None:
        self.rate, self.kept = rate, []

    def grow(self, seconds: float) -> None:
        end = last = time.monotonic()
        end += seconds
        while (now := time.monotonic()) < end:
            self.kept.append(np.ones(max(1, min(PIECE, int(self.rate * (now - last)))), np.uint8))
            last = now
            time.sleep(min(TICK, max(0.0, end - time.monotonic())))


class Samples(torch.utils.data.Dataset):
    """Draws at random; in workers it may grow, once `first` items of a worker were made."""

    def __init__(self, options: dict) -> None:
        self.options, self.made, self.grower = options, 0, None

    def __len__(self) -> int:
        return self.options["batches"] * 4

    def __getitem__(self, index: int) -> torch.Tensor:
        options = self.options
        self.made += 1
        if options["grows"] and options["where"] == "worker" and self.made * max(1, options["workers"]) > 4 * options["first"]:
            self.grower = self.grower or Grower(options["rate"] / max(1, options["workers"]))
            self.grower.grow(options["seconds"] / 4)
        return torch.randn(options["width"]) + index


def train(options: dict) -> dict:
    """Runs it until it ends."""
    grower, where = Grower(options["rate"]), options["where"]
    limit = f"{options['limit_mib']}MiB" if options["grows"] else "4GiB"
    given, how, text = 0, "finished", ""

    def grow(here: str, seconds: float) -> None:
        if options["grows"] and where == here and run.steps_made >= options["first"]:
            grower.grow(seconds)
        elif options["grows"] and here != "evaluation":
            time.sleep(seconds)

    try:
        with plimsoll.Run(options["folder"], memory_limit=limit, seed=options["seed"], compute_threads=1) as run:
            model = torch.nn.Sequential(torch.nn.Linear(options["width"], options["width"]), torch.nn.Dropout(0.2), torch.nn.Tanh(),
                                        torch.nn.Linear(options["width"], 1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=options["fused"])
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
            counts = {"batches": 0}
            run.track(model=model, optimizer=optimizer, schedule=schedule, counts=counts)

            def loss(x: torch.Tensor) -> torch.Tensor:
                value = model(x).square().mean()
                grow("step", options["seconds"])
                return value

            data = run.loader(Samples(options), batch_size=4, workers=options["workers"], start_method=options["start"])
            for _ in range(options["loops"]):
                for batch in run.steps(data, progress=False, commit_every_steps=options["commit_every"]):
                    given += 1
                    counts["batches"] += 1
                    grow("body", options["seconds"] / 2)
                    noise = torch.randn(batch.shape)  # A body draws, too.
                    if options["own"]:
                        optimizer.zero_grad()
                        loss(batch + noise).backward()
                        optimizer.step()
                    else:
                        run.step(loss, batch + noise)
                    grow("body", options["seconds"] / 2)
                    if run.steps_made % options["evaluates_every"] == 0:
                        with run.phase("evaluate"):
                            grow("evaluation", options["evaluation"])
                    schedule.step()
                with run.phase("decode"):
                    grow("phase", options["evaluation"])
                if not options["keeps"]:
                    grower.kept.clear()
    except MemoryError as error:
        how, text = "pressure" if isinstance(error, plimsoll.MemoryPressure) else "refused", str(error)
    seen = plimsoll.status(options["folder"])
    digest = hashlib.sha256()
    for value in (*model.state_dict().values(), torch.get_rng_state(), torch.tensor(counts["batches"])):
        digest.update(value.numpy().tobytes())
    return {"how": how, "text": text[:300], "given": given, "made": run.steps_made, "committed": seen["checkpoint_step"],
            "step": seen["step"], "digest": digest.hexdigest()}


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(train(json.loads(sys.argv[1]))), flush=True)
        return
    for line in sys.stdin:
        print(json.dumps(train(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
