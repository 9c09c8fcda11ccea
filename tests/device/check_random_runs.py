# SPDX-License-Identifier: Apache-2.0
"""Random runs and limits of the device: recipes, Trainers and loops of one's own are refused before the first step, or made to the end
within the limit, to the same bits."""
import collections
import gc
import os
import random
import shutil

import torch

import plimsoll

plimsoll.Governor("3GiB", foreign_bytes="1GiB").close()  # Before the first tensor of the device.

from plimsoll.memory import _pinned
from tests import device
from tests.support import chat_models, cosir_python, python_can_kd, trainer_programs, vision_models
from tests.support.quick_collections import collections_are_quick, collections_are_whole_again  # noqa: F401  Fixtures.
from tests.support.run_programs import digest_of, states

_pinned.DRIVERS["sim"] = device.host_driver
MIB = 1 << 20
CONTEXT = 64 * MIB
RUNS = int(os.environ.get("PLIMSOLL_RANDOM_RUNS", "10"))
SEED = int(os.environ.get("PLIMSOLL_RANDOM_SEED", "46"))
ALL = {"memory_limit": "4GiB", "foreign_bytes": "2GiB", "compute_threads": 1, "progress": False}


class Places:
    """Data and models of all kinds; a model that is asked for again is there."""

    def __init__(self, root):
        self.root = root
        chat_models.make_model(root / "tokenizer")
        chat_models.make_tokens(root / "chats.tokens", root / "tokenizer", rows=24)
        vision_models.make_model(root / "vision")
        vision_models.make_set(root / "pictures", 10)
        cosir_python.make_pairs(root / "pairs", groups=150)
        self.graphs = python_can_kd.make_set(root / "bus")

    def chat_model(self, width, layers):
        path = self.root / f"chat-{width}-{layers}"
        return path if path.exists() else chat_models.make_model(path, width=width, layers=layers)


def tuned(places, dice):
    """A run of `chat` or `vision`."""
    vision = dice.random() < 0.3
    full = dice.random() < 0.3
    options = {**ALL, "seed": dice.randrange(1000), "method": "full" if full else "lora", "lora_r": dice.choice([2, 8]),
               "lora_dropout": dice.choice([0.0, 0.2]), "dtype": dice.choice(["float32", "bfloat16"]), "batch_size": dice.choice([1, 2, 4]),
               "accumulate": dice.choice([1, 2]), "gradient_checkpointing": dice.choice(["auto", "on", "off"]),
               "weights": "resident" if full else dice.choice(["auto", "resident", "streamed"]), "lr": 1e-3, "checkpoint_every_n_steps": 3}
    if vision:
        options |= {"model": str(places.root / "vision"), "data": str(places.root / "pictures"), "sequence_length": 96}
    else:
        options |= {"model": str(places.chat_model(dice.choice([32, 128, 256]), dice.choice([2, 4]))), "data": str(places.root / "chats.tokens"),
                    "sequence_length": dice.choice([64, 256])}

    def train(out, limit):
        plimsoll.train("vision" if vision else "chat", out=out, device="sim", device_memory_limit=limit, **options)
        step = plimsoll.status(out)["checkpoint_step"]
        parts = torch.load(out / f"checkpoints/step-{step:09}/parts.pt", weights_only=True, map_location="cpu")["parts"]
        return digest_of([one for name, one in sorted(parts["model"].items()) if one.dtype != torch.int64])  # But for checksums.
    return train


def paired(places, dice):
    """A run of `cosir`."""
    options = {**ALL, "data": str(places.root / "pairs"), "seed": dice.randrange(1000), "epochs": 1, "batch_size": dice.choice([64, 150, 300]),
               "dim": dice.choice([16, 128]), "phase2_epochs": dice.choice([0, 1]), "gradient_caching": dice.random() < 0.5,
               "eval_pairs": 40, "oracle_angles": 3}

    def train(out, limit):
        return plimsoll.train("cosir", out=out, device="sim", device_memory_limit=limit, **options)["state_sha256"]
    return train


def distilled(places, dice):
    """A run of `can-kd`."""
    options = {**python_can_kd.SMALL, **ALL, "data": str(places.graphs), "seed": dice.randrange(1000), "batch_size": dice.choice([16, 64, 200]),
               "max_epochs": 1, "min_steps_per_epoch": 1, "fusion_episodes": 4, "teacher_gat_hidden": dice.choice([8, 32])}

    def train(out, limit):
        return plimsoll.train("can-kd", out=out, device="sim", device_memory_limit=limit, **options)["state_sha256"]
    return train


def hugging_face(_, dice):
    """A Trainer of transformers."""
    options = {"per_device_train_batch_size": dice.choice([2, 23, 200]), "gradient_accumulation_steps": dice.choice([1, 2]), "num_train_epochs": 1,
               "dropout": dice.choice([0.0, 0.1]), "data": trainer_programs.Lines(460), "optim": dice.choice(["adamw_torch", "adamw_torch_fused", "sgd"])}

    def train(out, limit):
        return trainer_programs.hugging_face(out, 0, "4GiB", use_cpu=False, device_limit=limit, **options)
    return train


class Numbers:
    def __init__(self, count, width):
        self.count, self.width = count, width

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((self.width,), index / self.count) + 0.1 * torch.randn(self.width)


def looped(_, dice):
    """A loop of one's own around plimsoll.Run."""
    seed, width, rows, layers = dice.randrange(1000), dice.choice([64, 300, 1000]), dice.choice([8, 64, 500]), dice.randint(1, 4)
    brought, fused, clip_norm = dice.random() < 0.5, dice.random() < 0.5, dice.choice([None, 1.0])

    def train(out, limit):
        with plimsoll.Run(out, memory_limit="4GiB", foreign_bytes="2GiB", device_memory_limit=limit, seed=seed, compute_threads=1) as run:
            torch.manual_seed(seed)
            parts = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(layers)]
            model = torch.nn.Sequential(*parts).to("sim")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
            run.track(model=model, optimizer=optimizer)
            loader = run.loader(Numbers(6 * rows - 1, width), batch_size=rows, device="sim" if brought else None)
            for batch in run.steps(loader, epochs=1, progress=False, largest=torch.zeros(rows, width, device="sim" if brought else "cpu")):
                run.step(lambda x: model(x.to("sim")).square().mean(), batch, loss="mean", clip_norm=clip_norm)
            return digest_of(list(model.state_dict().values()), states(optimizer))
    return train


KINDS = [tuned, tuned, paired, distilled, hugging_face, looped, looped]


def outcome(places, seed):
    """Of one run under a limit: "refused" before its first step, or "made"."""
    dice = random.Random(seed)
    kind = dice.choice(KINDS)
    train = kind(places, dice)
    out = places.root / "run"
    bits = train(out, 900 * MIB)
    peak = plimsoll.status(out)["devices"][0]["peak_bytes"] - CONTEXT
    shutil.rmtree(out)
    gc.collect()
    limit = CONTEXT + max(2 * MIB, int(peak * dice.uniform(0.6, 3)))
    try:
        again = train(out, limit)
    except (torch.OutOfMemoryError, plimsoll.BudgetExceeded) as refused:
        if out.exists():
            ended = plimsoll.status(out)  # Its step is the one that it ended in.
            assert ended["step"] <= 1 and ended["checkpoint_step"] <= 0, (seed, kind.__name__, limit, refused)
        return kind.__name__, "refused"
    else:
        assert again == bits, (seed, kind.__name__, limit)
        return kind.__name__, "made"
    finally:
        gc.collect()
        assert torch.accelerator.memory_allocated() == 0, (seed, kind.__name__)
        if out.exists():
            assert plimsoll.status(out)["devices"][0]["peak_bytes"] <= limit, (seed, kind.__name__)
            shutil.rmtree(out)


def test_random_runs_are_refused_before_the_first_step_or_keep_the_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "sim")
    device.configure(capacity=1 << 30, context=CONTEXT, fraction=1.0)
    places = Places(tmp_path)
    outcomes = collections.Counter(outcome(places, SEED * 1_000_000 + run) for run in range(RUNS))
    print(dict(outcomes))
    assert sum(outcomes.values()) == RUNS
    assert min(sum(count for (_, how), count in outcomes.items() if how == each) for each in ("made", "refused")) > RUNS / 10
