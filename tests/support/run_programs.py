# SPDX-License-Identifier: Apache-2.0
"""Training programs as users write them, for tests that kill them: main(run, kind, workers, limit)."""
import hashlib
import random
import time

import numpy as np
import torch
import torch.nn.functional as F

import plimsoll


def digest_of(*parts):
    """Of tensors, and of what random generators would give next."""
    seen = hashlib.sha256()
    for part in parts:
        for one in part if isinstance(part, (list, tuple)) else [part]:
            seen.update(one.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    seen.update(torch.rand(4).numpy().tobytes() + np.random.rand(4).tobytes())
    seen.update(str(random.random()).encode())
    return seen.hexdigest()


def states(optimizer):
    return [value for state in optimizer.state.values() for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim() > 0]


class Pictures:
    """8 × 8, augmented with numbers of all three generators."""

    def __len__(self):
        return 150

    def __getitem__(self, index):
        picture = torch.full((1, 8, 8), index / 150.0) + 0.1 * torch.randn(1, 8, 8)
        if random.random() < 0.5:
            picture = picture.flip(2)
        return torch.roll(picture, int(np.random.randint(3)), 1), index % 5


def pictures(path, workers, limit):
    """A convnet with batch statistics and dropout, random augmentation, its own loss function."""
    with plimsoll.Run(path, memory_limit=limit, seed=3) as run:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
            torch.nn.Dropout(0.2), torch.nn.Linear(288, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        average = torch.optim.swa_utils.AveragedModel(model)
        run.track(model=model, optimizer=optimizer, average=average)
        data = run.loader(Pictures(), batch_size=10, workers=workers)
        for batch in run.steps(data, epochs=3, commit_every_steps=4, progress=False):
            run.log(loss=run.step(lambda x, y: F.cross_entropy(model(x), y), batch))
            average.update_parameters(model)
        return digest_of(list(model.state_dict().values()), list(average.state_dict().values()),
                         states(optimizer))


class Texts:
    """Dicts; some words are masked by chance."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        words = (torch.arange(12) * (index + 1)) % 31
        return {"words": torch.where(torch.rand(12) < 0.15, 0, words), "targets": words}


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(31, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
        self.out = torch.nn.Linear(16, 31)

    def forward(self, words):
        return self.out(self.layer(self.words(words)))


def texts(path, workers, limit):
    """A transformer: dict batches, bfloat16 autocast, two batches a step, clipping, a schedule."""
    with plimsoll.Run(path, memory_limit=limit, seed=11, options={"lr": 1e-3}) as run:
        model = Reader()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9])
        own = torch.Generator().manual_seed(1)
        seen = {"words": 0}
        halves = torch.zeros(4, dtype=torch.bfloat16)
        run.track(model=model, optimizer=optimizer, schedule=schedule, own=own, seen=seen, halves=halves)

        def loss(batch):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(batch["words"])
            return F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())

        data = run.loader(Texts(), batch_size=7, workers=workers)
        for batch in run.steps(data, epochs=3, commit_every_steps=3, progress=False):
            run.step(loss, batch, loss="mean", accumulate=2, clip_norm=0.5, scheduler=schedule)
            seen["words"] += batch["words"].numel()
            halves += torch.rand(4, generator=own).bfloat16()
        assert seen["words"] == 3 * 96 * 12
        return digest_of(list(model.state_dict().values()), states(optimizer), halves,
                         torch.tensor(schedule.get_last_lr()))


class Clicks:
    """Ids that come more than once in a batch."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return {"item": torch.tensor([index % 40, (index * 7) % 40]), "y": float(index % 2)}


def vectors(path, workers, limit):
    """Two tables, one of them looked up twice in a step; two batches a step."""
    with plimsoll.Run(path, memory_limit=limit, seed=5) as run:
        items = run.embedding("items", rows=40, dim=8, optimizer=plimsoll.AdamW(lr=0.02))
        users = run.embedding("users", rows=50, dim=8, optimizer=plimsoll.Adagrad(lr=0.05))
        model = torch.nn.Linear(16, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)

        def loss(batch):
            both = items(batch["item"])
            first = items(batch["item"][:, 0]) * users(batch["item"][:, 1] + 5)
            x = torch.cat([both.sum(1), first], 1)
            return F.binary_cross_entropy_with_logits(model(x).squeeze(1), batch["y"].float())

        data = run.loader(Clicks(), batch_size=16, workers=workers)
        largest = {"item": torch.zeros(16, 2, dtype=torch.int64), "y": torch.zeros(16)}
        for batch in run.steps(data, epochs=4, largest=largest, commit_every_steps=5, progress=False):
            run.log(loss=run.step(loss, batch, loss="mean", accumulate=2))
        with torch.no_grad():
            tables = [items(torch.arange(40)), users(torch.arange(50))]
        return digest_of(list(model.state_dict().values()), states(optimizer), tables)


def stateful(path, workers, limit):
    """Others' objects: torchdata's loader, and a part as torch.distributed.checkpoint's guide writes it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.stateful import Stateful
    from torchdata.stateful_dataloader import StatefulDataLoader

    with plimsoll.Run(path, memory_limit=limit, seed=9) as run:
        model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1),
                                    torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        class Everything(Stateful):
            def state_dict(self):
                of_model, of_optimizer = get_state_dict(model, optimizer)
                return {"model": of_model, "optimizer": of_optimizer}

            def load_state_dict(self, state):
                set_state_dict(model, optimizer, model_state_dict=state["model"],
                               optim_state_dict=state["optimizer"])

        run.track(everything=Everything())
        data = StatefulDataLoader(Clicks(), batch_size=16, shuffle=True, num_workers=workers)
        order = torch.zeros(1, dtype=torch.float64)
        run.track(order=order)

        for batch in run.steps(data, epochs=3, commit_every_steps=4, progress=False):
            logits = model(batch["item"] / 40.0).squeeze(1)
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(logits, batch["y"].float()).backward()
            optimizer.step()
            order.mul_(0.9).add_(batch["item"].double().mul(torch.arange(1.0, 3.0)).sum())
        return digest_of(list(model.state_dict().values()), states(optimizer), order)


class Keeping:
    """Samples of which the later ones take a second each, and 40 MiB that the worker keeps."""

    def __init__(self, keeps):
        self.keeps, self.kept = keeps, []

    def __len__(self):
        return 200

    def __getitem__(self, index):
        for _ in range(20 if self.keeps and index >= 40 else 0):
            self.kept.append(np.ones(2 << 20, np.uint8))
            time.sleep(0.05)
        return {"x": torch.randn(4), "y": torch.tensor(index / 200.0)}


def keeping(path, workers, limit):
    """Its workers grow while the loop waits for its fifth batch, unless there are none."""
    with plimsoll.Run(path, memory_limit=limit, seed=13) as run:
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2),
                                    torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Keeping(workers > 0), batch_size=10, workers=workers, shuffle=False, prefetch=2)
        for batch in run.steps(data, epochs=2, progress=False):
            run.step(lambda one: F.mse_loss(model(one["x"]).squeeze(1), one["y"]), batch)
        return digest_of(list(model.state_dict().values()), states(optimizer))


def on_device(path, workers, limit, device="", device_limit=None):
    """A model, an optimizer, a scaler and batches on the GPU, where there is one, and rows that are not; half precision, dropout."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with plimsoll.Run(path, memory_limit=limit, device_memory_limit=device_limit, seed=17) as run:
        items = run.embedding("items", rows=40, dim=64, optimizer=plimsoll.AdamW(lr=0.02))
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.2),
                                    torch.nn.Linear(256, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(device, init_scale=2.0 ** 10, growth_interval=5)
        seen = torch.zeros(64, device=device)
        run.track(model=model, optimizer=optimizer, scaler=scaler, seen=seen)

        def loss(batch):
            rows = items(batch["item"]).sum(1)
            with torch.autocast(device, torch.bfloat16 if device == "cpu" else torch.float16):
                logits = model(rows + 0.1 * torch.randn_like(rows)).squeeze(1)
            seen.mul_(0.9).add_(rows.detach().mean(0))
            return F.binary_cross_entropy_with_logits(logits.float(), batch["y"].float())

        data = run.loader(Clicks(), batch_size=16, workers=workers, device=device)
        for batch in run.steps(data, epochs=4, commit_every_steps=5, progress=False):
            run.log(loss=run.step(loss, batch, clip_norm=1.0))
        with torch.no_grad():
            rows = items(torch.arange(40))
        return digest_of(list(model.state_dict().values()), states(optimizer), rows, seen, torch.rand(4, device=device))


def on_simulated_device(path, workers, limit):
    """The same on the simulated device (tests/device), which is there from its import to the end of the process; within 64 MiB of it."""
    import tests.device  # noqa: F401

    return on_device(path, workers, limit, "sim", "64MiB")


class Large:
    """A mebibyte each."""

    def __len__(self):
        return 320

    def __getitem__(self, index):
        return {"x": torch.randn(1 << 18), "item": index}


def large(path, workers, limit):
    """16 MiB a batch, of which workers have several in flight; layers and rows of tens of MiB."""
    with plimsoll.Run(path, memory_limit=limit) as run:
        items = run.embedding("items", rows=200_000, dim=64, store_bytes="64MiB")
        model = torch.nn.Sequential(torch.nn.Linear(1 << 18, 32), torch.nn.ReLU(), torch.nn.Linear(32, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        run.track(model=model, optimizer=optimizer)

        def loss(batch):
            return (model(batch["x"]) - items(batch["item"])).square().mean()

        data = run.loader(Large(), batch_size=16, workers=workers)
        largest = {"x": torch.zeros(16, 1 << 18), "item": torch.arange(16)}
        for batch in run.steps(data, largest=largest, commit_every_steps=8, progress=False):
            run.step(loss, batch)
        return run.steps_made


KINDS = {made.__name__: made for made in (pictures, texts, vectors, on_device, on_simulated_device, stateful, keeping, large)}


def main(path, kind, workers="0", limit="2GiB"):
    return KINDS[kind](path, int(workers), limit)


if __name__ == "__main__":
    import sys

    print(main(*sys.argv[1:]))
