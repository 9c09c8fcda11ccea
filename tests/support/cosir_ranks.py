# SPDX-License-Identifier: Apache-2.0
"""The recipe `cosir` of Python by one process and by several ranks, for test_cosir_ranks.py.

    python -m tests.support.cosir_ranks FOLDER      what each way ends with, as JSON

Ranks are forked from a launcher in this process, so that torch is imported once. Kernels are loaded by each: they have an arena, which
no fork shares.
"""
import json
import os
import pathlib
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import plimsoll
import plimsoll.errors
from plimsoll.ranks import _crew, _dealt_tiles  # noqa: F401  Before ranks are forked.
from tests.support.cosir_python import NAME
from tests.support.rank_programs import forked, launched

OPTIONS = {"memory_limit": "4GiB", "epochs": 2, "batch_size": 2048, "dim": 16, "eval_pairs": 100, "compute_threads": 1, "phase2_epochs": 1,
           "checkpoint_every_n_steps": 1, "metrics_every_n_steps": 1, "progress": False}
TOLD = ("state_sha256", "step", "loss", "recall", "phase2", "status", "limit_bytes")


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def at_step(step, does):
    """Does something at a step of rank 0, before it is whole."""
    log = plimsoll.Run.log

    def also(run, **values):
        if run.steps_made == step:
            does(run)
        log(run, **values)

    plimsoll.Run.log = also


def at_tiles(step, name, does):
    """Does something at a step of another rank, before it is asked for its outputs or gradients. It has counted those of the rehearsal."""
    real, calls = getattr(_dealt_tiles.HelpedTiles, name), []

    def also(tiles, *arguments):
        calls.append(1)
        if len(calls) > step:
            does()
        real(tiles, *arguments)

    setattr(_dealt_tiles.HelpedTiles, name, also)


def stop_all(_):
    """Sends SIGTERM to all ranks, as torchrun passes it on."""
    for pid in pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split():
        if pathlib.Path(f"/proc/{pid}/status").read_text().count("State:\tZ") == 0:
            os.kill(int(pid), signal.SIGTERM)


def ask_for_limits(run):
    plimsoll.limit(run.path, "6GiB")


def ask_for_little(run):
    plimsoll.limit(run.path, "100MiB")


HOW = {"": lambda: None, "rank 3 backward": lambda: os.environ["RANK"] == "3" and at_tiles(3, "backward", end),
       "rank 1 forward": lambda: os.environ["RANK"] == "1" and at_tiles(1, "forward", end), "rank 0": lambda: at_step(4, lambda _: end()),
       "stop": lambda: at_step(2, stop_all), "limit": lambda: (at_step(1, ask_for_limits), at_step(3, ask_for_little))}


def train(out, how="", **options):
    HOW[how]()
    try:
        if (pathlib.Path(out) / "run.toml").exists():
            made = plimsoll.resume(out, progress=False)
        else:
            made = plimsoll.train(NAME, data=DATA, out=out, **{**OPTIONS, **options})
    except (ValueError, plimsoll.errors.BudgetExceeded) as error:
        return f"{type(error).__name__}: {error}"
    return {name: made[name] for name in TOLD if name in made}


def killed(*arguments, ranks):
    try:
        return launched(train, *arguments, ranks=ranks)
    except ChildFailedError:
        return "killed"


def caching(out):
    return train(out, gradient_caching=True)


def planned(out):
    return train(out, batch_size="auto")


def small(out):
    return train(out, memory_limit="600MiB")


if __name__ == "__main__":
    folder = sys.argv[1]
    DATA = f"{folder}/data"
    found = {"alone": forked(train, f"{folder}/1")}
    found["2"], found["3"] = launched(train, f"{folder}/2", ranks=2), launched(caching, f"{folder}/3", ranks=3)
    found["kills"] = [killed(f"{folder}/killed", how, ranks=ranks) for how, ranks in (("rank 3 backward", 4), ("rank 0", 2), ("rank 1 forward", 3))]
    found["after kills"] = launched(train, f"{folder}/killed", ranks=8)
    found["stopped"] = launched(train, f"{folder}/stopped", "stop", ranks=4)
    found["after a stop"] = [forked(train, f"{folder}/stopped")]
    found["limit"] = launched(train, f"{folder}/limit", "limit", ranks=2)
    found["auto"] = launched(planned, f"{folder}/auto", ranks=2)
    found["small"] = launched(small, f"{folder}/small", ranks=4)
    sys.stdout.write(json.dumps(found) + "\n")
