# SPDX-License-Identifier: Apache-2.0
"""A training loop as users write it, of torch alone or under a Governor; random_runs draws the options.

    python -m tests.budget.loop '{"model": "mlp", …, "limit_mib": 500, "folder": "made/for/it"}'

Standard output ends with a line of JSON: outcome "finished" with the digest of all parameters and
rows, or "refused" with the text of Plimsoll's exception, how far the loop had come (`reached`), and
whether the limit that is named is for all of it (`whole`). With "limit_mib" 0 the loop is one without
workers or a limit, and gives the digest that all others must give. Without an argument, loops are
read from standard input, a line each.
"""
import hashlib
import json
import pathlib
import re
import sys
import warnings

import numpy as np
import torch

import plimsoll
from plimsoll import _core

MIB = 1 << 20
WIDTH = 32   # Features of a position of a sequence.
ROW = 16     # Weights of a row of the table, and outputs of a model.


class Samples(torch.utils.data.Dataset):
    """Sequences [length, WIDTH] with a wanted number each; `kind` says what they are kept or made as."""

    def __init__(self, options: dict, frozen: pathlib.Path | None):
        self.frozen, self.rows = frozen, None  # A table that is only read, each worker for itself.
        in_workers = options["limit_mib"] > 0 and options["workers"] > 0
        self.kind, self.length = options["data"], options["length"]
        self.count = options["samples"]
        # What every worker keeps of the samples it decoded, so many bytes at most.
        self.keeps = options["worker_mib"] * MIB if in_workers else 0
        self.kept: list = []
        if self.kind == "tensors":
            dice = torch.Generator().manual_seed(1)
            self.all = torch.randn(self.count, self.length, WIDTH, generator=dice)
        elif self.kind == "numpy":
            self.all = np.random.default_rng(1).standard_normal(
                (self.count, self.length, WIDTH), np.float32)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        if len(self.kept) * MIB < self.keeps:
            self.kept.append(np.ones(MIB, np.uint8))
        wanted = np.float32(index % 7) + self.row_sum(index)
        if self.kind in ("tensors", "numpy"):
            return self.all[index], wanted, index
        dice = np.random.default_rng(index)
        length = self.length if self.kind == "dict" else int(dice.integers(1, self.length + 1))
        x = dice.standard_normal((length, WIDTH), np.float32)
        return {"x": x, "wanted": wanted, "id": index} if self.kind == "dict" else (x, wanted, index)

    def row_sum(self, index: int) -> np.float32:
        if self.frozen is None:
            return np.float32(0)
        if self.rows is None:
            own = torch.utils.data.get_worker_info() is not None
            self.governor = plimsoll.Governor("1GiB") if own else plimsoll.Governor.current()
            self.rows = plimsoll.EmbeddingStore.open(self.governor, self.frozen, store_bytes="2MiB",
                                                     batch_rows=16, pinned=True)
        return self.rows.gather([index]).array.sum(dtype=np.float32)


def padded(samples: list) -> tuple:
    """A batch of sequences of different lengths: [batch, longest, WIDTH] with zeros behind."""
    xs, wanted, ids = zip(*samples)
    batch = torch.zeros(len(xs), max(map(len, xs)), WIDTH)
    for row, x in zip(batch, xs):
        row[:len(x)] = torch.from_numpy(x)
    return batch, torch.tensor(wanted), torch.tensor(ids)


class Order(torch.utils.data.Sampler):
    """An order of samples for each epoch; with a table in sample order, the table's."""

    def __init__(self, options: dict):
        self.count, self.layout, self.epoch = options["samples"], options["table"], 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        if self.layout == "sample_order":
            order = iter(plimsoll.SampleOrder(self.count, 0, self.epoch))
        else:
            dice = torch.Generator().manual_seed(self.epoch)
            order = iter(torch.randperm(self.count, generator=dice).tolist())
        self.epoch += 1
        return order


class Images(torch.nn.Sequential):
    def __init__(self, width: int):
        super().__init__(torch.nn.Conv2d(1, width, 3, padding=1), torch.nn.ReLU(),
                         torch.nn.BatchNorm2d(width), torch.nn.Conv2d(width, width, 3, padding=1),
                         torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
                         torch.nn.Linear(width, ROW))

    def forward(self, x):
        return super().forward(x[:, None])


class Sequences(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.enter = torch.nn.Linear(WIDTH, width)
        self.layers = torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True),
            2, enable_nested_tensor=False)
        self.leave = torch.nn.Linear(width, ROW)

    def forward(self, x):
        return self.leave(self.layers(self.enter(x)).mean(1))


class Flat(torch.nn.Sequential):
    def __init__(self, width: int):
        super().__init__(torch.nn.Linear(WIDTH, width), torch.nn.ReLU(),
                         torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Dropout(0.1),
                         torch.nn.Linear(width, ROW))

    def forward(self, x):
        return super().forward(x).mean(1)


MODELS = {"mlp": Flat, "cnn": Images, "transformer": Sequences}


def loader_of(options: dict, samples: Samples) -> torch.utils.data.DataLoader:
    workers = options["workers"] if options["limit_mib"] else 0
    words = {} if workers == 0 else {
        "num_workers": workers, "multiprocessing_context": options["start"],
        "persistent_workers": options["persistent"], "prefetch_factor": options["prefetch"]}
    return torch.utils.data.DataLoader(
        samples, options["batch"], sampler=Order(options), pin_memory=options["pin"],
        generator=torch.Generator(),  # Else how often workers start would move dropout's numbers.
        collate_fn=padded if options["data"] == "ragged" else None, **words)


def train(options: dict, folder: pathlib.Path, governor: plimsoll.Governor | None,
          reached: list[int]) -> dict:
    """The loop. `reached`: [1 with a governor, tables made, steps made]."""
    reached[0] = 1
    torch.manual_seed(options["torch_seed"])
    model = MODELS[options["model"]](options["width"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    table = None
    if options["table"]:
        table = plimsoll.EmbeddingStore.open(
            governor, folder / "table", rows=options["samples"], dim=ROW, store_bytes=f"{options['store_mib']}MiB",
            optimizer=plimsoll.AdamW(lr=0.01), init=plimsoll.Normal(0.1, 3), layout=options["table"],
            batch_rows=options["batch"])
    reached[1] = 1
    frozen = None
    if options["reads"]:
        frozen = folder / "frozen"
        with plimsoll.EmbeddingStore.open(governor, frozen, rows=options["samples"], dim=ROW, store_bytes="4MiB",
                                          init=plimsoll.Normal(0.1, 5), batch_rows=16) as made:
            made.update(np.arange(16), np.ones((16, ROW), np.float32))
            made.commit(1)
    reached[1] = 2
    loader = loader_of(options, Samples(options, frozen))
    transaction = options["step"] in ("transaction", "admitted")
    whole = plimsoll.TrainingStep(model, optimizer) if transaction else None

    def loss_of(x, wanted, *rows):
        out = model(x)
        return torch.nn.functional.mse_loss((out * rows[0]).sum(1) if rows else out.sum(1), wanted)

    cache, shared = [], []  # What a loop of one's own keeps beside the model.
    for epoch in range(options["epochs"]):
        if table is not None:
            table.begin_epoch(epoch)
        for batch in loader:
            x, wanted, ids = batch.values() if isinstance(batch, dict) else batch
            rows = None if table is None else table.gather(ids)
            parts = (x, wanted) if rows is None else (x, wanted, rows.tensor)
            if whole is not None:
                if options["step"] == "admitted" and reached[2] == 0 and governor is not None:
                    whole.admit(parts, loss_of)
                whole(parts, loss_of)
            else:
                optimizer.zero_grad()
                loss_of(*parts).backward()
                optimizer.step()
            if rows is not None:
                table.apply(rows)
            reached[2] += 1
            if len(cache) < options["cache_mib"] // 4:
                cache.append(np.ones(4 * MIB, np.uint8))
            if len(shared) < options["shared_mib"] // 4:
                shared.append(torch.ones(MIB).share_memory_())
            if options["step"] == "boundary" and governor is not None:
                report = governor.step_boundary()
                if report.stop:
                    need = -(-report.needed_bytes // MIB)
                    raise plimsoll.BudgetExceeded(
                        f"step_boundary() asks to stop: a limit of {need} MiB would do", "other", 0, 0)
            if table is not None and reached[2] % 16 == 0:
                table.commit(reached[2])
    return {"outcome": "finished", "digest": digest(model, table)}


def digest(model: torch.nn.Module, table: plimsoll.EmbeddingStore | None) -> str:
    sha = hashlib.sha256()
    for name, value in model.state_dict().items():
        sha.update(name.encode() + value.numpy().tobytes())
    for begin in range(0, 0 if table is None else table.rows, 256):
        sha.update(table.gather(np.arange(begin, min(begin + 256, table.rows))).array.tobytes())
    return sha.hexdigest()


def run(options: dict) -> dict:
    limit, folder, reached = options["limit_mib"], pathlib.Path(options["folder"]), [0, 0, 0]
    if limit == 0 and not options["table"] and not options["reads"]:
        return train(options, folder, None, reached)  # Plimsoll has no part in this one.
    code = None
    try:
        with plimsoll.Governor(f"{limit}MiB" if limit else "",
                               foreign_bytes=f"{options['foreign_mib']}MiB") as governor:
            code = _core.resident().file
            return {**train(options, folder, governor, reached), "code_bytes": code}
    except (plimsoll.BudgetExceeded, plimsoll.MemoryPressure, torch.OutOfMemoryError) as error:
        return {"outcome": "refused", "error": type(error).__name__, "text": str(error),
                "reached": reached, **({} if code is None else {"code_bytes": code}),
                # Of a whole step, done before the first one or when it did not fit.
                "whole": re.search(r"(step \d+|a step) of \d+ rows.* would do", str(error)) is not None}


def main() -> int:
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    torch.set_num_threads(1)
    for line in sys.argv[1:] or sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
