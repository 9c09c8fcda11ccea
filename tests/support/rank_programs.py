# SPDX-License-Identifier: Apache-2.0
"""Training programs of several ranks, for tests: main(run, who, kind, ranks), which lives.py kills.

    python -m tests.support.rank_programs FOLDER SCENARIO…         what each gives, as JSON
    python rank_programs.py PROGRAM RUN LIMIT                      large() or crowded(), for torchrun

The launcher is torchrun's own (elastic_launch); its ranks are forked from it, so that torch is imported once.
"""
import ctypes
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
import warnings

import torch
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import plimsoll
from plimsoll.ranks._rank_watch import state_of
from plimsoll.ranks._ranks import _PR_SET_PDEATHSIG
from tests.support.run_programs import Pictures, digest_of, states

LIMIT = "2GiB"
STOPPED = 2.0  # Seconds that a rank may be.


def launched(train, *arguments, ranks=2):
    """What train(*arguments) gives on each rank.

    None begins before all were forked: the launcher looks up whoever connects, under a lock that a fork would copy. None ends
    before all are done, and none is killed then: the launcher would wait for ever for who died waiting for it.
    """
    forked_all = multiprocessing.get_context("fork").Barrier(ranks)

    def begun(*arguments):
        global _who
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # One rank alone would outlive a launcher that is killed.
        forked_all.wait(60)
        made = train(*arguments)
        _who = ""
        threading.Thread(target=end_stopped, daemon=True).start()
        forked_all.wait(300)
        return made

    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", start_method="fork", max_restarts=0, monitor_interval=0.05)
    made = elastic_launch(config, begun)(*arguments)
    return [made[rank] for rank in range(ranks)]


def on_machines(train, *arguments, machines=2, ranks=2, restarts=0):
    """What train(*arguments) gives on each rank of each machine: each has a launcher of its own, and a limit; None where that failed.

    They share a disk, and here a kernel, but for all that ranks know they are apart.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_id = uuid.uuid4().hex

    def launch():
        config = LaunchConfig(min_nodes=machines, max_nodes=machines, nproc_per_node=ranks, run_id=run_id, rdzv_backend="c10d",
                              rdzv_endpoint=f"127.0.0.1:{port}", local_addr="127.0.0.1", start_method="fork", max_restarts=restarts,
                              monitor_interval=0.05)
        try:
            made = elastic_launch(config, train)(*arguments)
        except ChildFailedError:
            return None
        return [made[rank] for rank in sorted(made)]

    launchers = [started(launch) for _ in range(machines)]
    return [ended(one) for one in launchers]


def end_stopped():
    """Ends a rank that stopped behind its last word: of the others, which are done, none looks any more."""
    while True:
        time.sleep(5 * STOPPED)
        for pid in pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split():
            if state_of(int(pid)) in "Tt":
                os.kill(int(pid), signal.SIGKILL)


def pictures(path, **options):
    """A convnet with batch statistics and dropout, random augmentation, a last batch that is no whole one; parts
    that are the same on all ranks, and parts that are not."""
    with plimsoll.Run(path, memory_limit=LIMIT, seed=3, rank_stopped_seconds=STOPPED) as run:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
            torch.nn.Dropout(0.2), torch.nn.Linear(288, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        average = torch.optim.swa_utils.AveragedModel(model)
        seen, own = {"items": 0, "loss": 0.0}, torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
        run.track(model=model, optimizer=optimizer, schedule=schedule, average=average, seen=seen, own=own)
        data = run.loader(Pictures(), batch_size=7, workers=options.pop("workers", 0))
        for batch in run.steps(data, epochs=options.get("epochs", 4), commit_every_steps=4,
                               progress=False):
            seen["loss"] = run.step(options.get("loss", lambda x, y: F.cross_entropy(model(x), y)), batch, clip_norm=1.0)
            schedule.step()
            average.update_parameters(model)
            seen["items"] += len(batch[1])
            torch.rand(1, generator=own)
            run.log(loss=seen["loss"])
        ends = [torch.tensor([seen["loss"], seen["items"]], dtype=torch.float64), own.get_state()]
        return digest_of(list(model.state_dict().values()), states(optimizer), list(average.state_dict().values()), ends)


def virtual(path, stop_at=0, items=150, workers=0):
    """Eight virtual workers: batch statistics, dropout, targets that do not count, a last batch that is no whole one."""
    with plimsoll.Run(path, memory_limit="8GiB", seed=13, compute_threads=1, virtual_workers=8,
                      rank_stopped_seconds=STOPPED) as run:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
            torch.nn.Dropout(0.2), torch.nn.Linear(288, 5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen = {"steps": 0, "loss": 0.0}
        run.track(model=model, optimizer=optimizer, seen=seen)
        data = run.loader(Pictures(), batch_size=4, workers=workers)
        largest = torch.zeros(4, 1, 8, 8), torch.ones(4, dtype=torch.int64)  # Of one worker.
        for batch in run.steps(data, epochs=2, commit_every_steps=2, largest=largest, progress=False):
            assert len(batch) == 8 // int(os.environ.get("WORLD_SIZE", "1"))
            seen["loss"] = run.step(lambda x, y: F.cross_entropy(model(x), y, ignore_index=0), batch, loss="mean",
                                    clip_norm=1.0)
            seen["steps"] += 1
            if run.steps_made + 1 == stop_at and os.environ.get("RANK", "0") == "0":
                os.kill(os.getpid(), signal.SIGTERM)
        return digest_of(list(model.state_dict().values()), states(optimizer),
                         torch.tensor([seen["loss"], seen["steps"]], dtype=torch.float64))


def windows(path, stop_at=0):
    """Eight virtual workers, three batches an update, targets that do not count; commits within a window too."""
    with plimsoll.Run(path, memory_limit="8GiB", seed=17, compute_threads=1, virtual_workers=8,
                      rank_stopped_seconds=STOPPED) as run:
        model = torch.nn.Sequential(torch.nn.Embedding(31, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 31))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        run.track(model=model, optimizer=optimizer)

        def loss(words, targets):
            return F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=-1)

        for batch in run.steps(run.loader(Words(), batch_size=1), epochs=2, commit_every_steps=2, progress=False):
            run.step(loss, batch, loss="mean", accumulate=3, clip_norm=1.0)
            if run.steps_made + 1 == stop_at and os.environ.get("RANK", "0") == "0":
                os.kill(os.getpid(), signal.SIGTERM)
        return digest_of(list(model.state_dict().values()), states(optimizer))


class Visits:
    """Of ids that come again within a batch, and in other batches."""

    def __len__(self):
        return 150

    def __getitem__(self, index):
        return {"item": torch.tensor([index * 7 % 60, index % 5, index % 60]), "user": torch.tensor(index % 11),
                "x": torch.rand(6), "y": torch.tensor(index % 3)}


def rows(path, stop_at=0):
    """The README's loop: eight virtual workers, rows of two tables, of which one is looked up by some batches only."""
    with plimsoll.Run(path, memory_limit="8GiB", seed=19, compute_threads=1, virtual_workers=8,
                      rank_stopped_seconds=STOPPED) as run:
        model = torch.nn.Sequential(torch.nn.Linear(24, 9), torch.nn.Dropout(0.1), torch.nn.Linear(9, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        items = run.embedding("items", rows=60, dim=5, optimizer=plimsoll.AdamW(lr=0.03), store_bytes="4MiB")
        users = run.embedding("users", rows=40, dim=3, optimizer=plimsoll.Adagrad(lr=0.1), dtype="bfloat16", store_bytes="4MiB")
        run.track(model=model, optimizer=optimizer)

        def loss(batch):
            own = users(batch["user"]) if int(batch["user"][0]) % 3 else torch.zeros(len(batch["user"]), 3)
            made = model(torch.cat([items(batch["item"]).flatten(1), batch["x"], own], 1))
            return F.cross_entropy(made, batch["y"], ignore_index=0)

        for batch in run.steps(run.loader(Visits(), batch_size=4), epochs=2, commit_every_steps=2, progress=False):
            run.step(loss, batch, loss="mean", clip_norm=1.0)
            if run.steps_made + 1 == stop_at and os.environ.get("RANK", "0") == "0":
                os.kill(os.getpid(), signal.SIGTERM)
        with torch.no_grad():
            tables = [items(torch.arange(60)), users(torch.arange(40))]
        return digest_of(list(model.state_dict().values()), states(optimizer), tables)


def visited(path, size, workers):
    """The rows that a run on Visits has learnt."""
    with plimsoll.Run(path, memory_limit="8GiB", seed=5, virtual_workers=workers) as run:
        model = torch.nn.Linear(5, 1)
        vectors = run.embedding("items", rows=60, dim=5, optimizer=plimsoll.SGD(lr=0.1), store_bytes="4MiB")
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.steps(run.loader(Visits(), batch_size=size), epochs=2, progress=False):
            run.step(lambda one: F.mse_loss(model(vectors(one["item"]).sum(1)).squeeze(1), one["y"].float()), batch,
                     loss="mean")
        with torch.no_grad():
            return vectors(torch.arange(60)).tolist()


def two_rows(path):
    """As rows(), of a table with fewer rows than ranks."""
    with plimsoll.Run(path, memory_limit="8GiB", seed=5, virtual_workers=4) as run:
        model, vectors = torch.nn.Linear(2, 1), run.embedding("items", rows=2, dim=2, store_bytes="4MiB")
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
        for batch in run.steps(run.loader([torch.tensor([1, 0])] * 32, batch_size=2), commit_every_steps=1, progress=False):
            run.step(lambda ids: model(vectors(ids)).mean(), batch)
        with torch.no_grad():
            return digest_of(vectors(torch.arange(2)))


def listed(path, stop_at=0):
    """Eight virtual workers and a list of 21 batches, which each rank reads whole: at the end of an epoch three have none."""
    random = torch.Generator().manual_seed(3)
    batches = [(torch.randn(2 + k % 3, 6, generator=random), torch.randn(2 + k % 3, 1, generator=random)) for k in range(21)]
    with plimsoll.Run(path, memory_limit="8GiB", seed=17, compute_threads=1, virtual_workers=8) as run:
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.Dropout(0.1), torch.nn.Linear(9, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.track(model=model, optimizer=optimizer)
        seen = 0
        for some in run.steps(batches, epochs=2, commit_every_steps=1, progress=False):
            seen += len(some) - some.absent
            run.step(lambda x, y: F.mse_loss(model(x), y), some, loss="mean")
            if run.steps_made + 1 == stop_at and os.environ.get("RANK", "0") == "0":
                os.kill(os.getpid(), signal.SIGTERM)
        return digest_of(list(model.state_dict().values()), states(optimizer)), seen


def texts(path, stop_at=0):
    """Two batches a step, targets of which some do not count, fused AdamW, workers."""
    with plimsoll.Run(path, memory_limit=LIMIT, seed=11, rank_stopped_seconds=STOPPED) as run:
        model = torch.nn.Sequential(torch.nn.Embedding(31, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 31))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        run.track(model=model, optimizer=optimizer)

        def loss(words, targets):
            return F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=-1)

        for batch in run.steps(run.loader(Words(), batch_size=5, workers=1), epochs=3, commit_every_steps=3, progress=False):
            run.step(loss, batch, loss="mean", accumulate=2)
            if run.steps_made + 1 == stop_at and os.environ["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGTERM)
        return digest_of(list(model.state_dict().values()), states(optimizer))


class Words:
    """Some targets are masked by chance."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        words = (torch.arange(12) * (index + 1)) % 31
        return words, torch.where(torch.rand(12) < 0.3 + 0.4 * (index % 2), -1, words)


class Large:
    """A quarter of a mebibyte each."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        return torch.full((64, 1024), index / 1024)


def large(path, limit):
    """Steps that do not fit into a rank's share as they are: activations of 384 MiB, and more in backward. Rank 1 is
    killed once."""
    with plimsoll.Run(path, memory_limit=limit) as run:
        model = torch.nn.Sequential(*[part for _ in range(6) for part in (torch.nn.LayerNorm(1024), torch.nn.Tanh())])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for batch in run.steps(run.loader(Large(), batch_size=128), epochs=3, commit_every_steps=1, progress=False):
            run.step(lambda x: F.mse_loss(model(x), x), batch, loss="mean")
            if run.steps_made == 3 and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
                os.kill(os.getpid(), signal.SIGKILL)
        return run.steps_made, run._steps._made[""][0].parts


class Baskets:
    """Ids of 120,000."""

    def __len__(self):
        return 2048

    def __getitem__(self, index):
        return {"item": torch.arange(64) * (index + 1) * 97 % 120_000, "user": torch.arange(64) * (index + 3) % 4000}


def crowded(path, limit):
    """Two tables, of which the slabs have a part, and activations of some 100 MiB."""
    with plimsoll.Run(path, memory_limit=limit, seed=23) as run:
        model = torch.nn.Sequential(*[part for _ in range(4) for part in (torch.nn.Linear(96, 96), torch.nn.Tanh())])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        items = run.embedding("items", rows=120_000, dim=64, optimizer=plimsoll.AdamW(lr=0.01), store_bytes="40MiB", batch_rows=1 << 15)
        users = run.embedding("users", rows=4000, dim=32, store_bytes="16MiB", dtype="bfloat16", batch_rows=1 << 15)
        run.track(model=model, optimizer=optimizer)
        for batch in run.steps(run.loader(Baskets(), batch_size=256), epochs=2, commit_every_steps=3, progress=False):
            run.step(lambda one: model(torch.cat([items(one["item"]), users(one["user"])], 2)).square().mean(), batch, loss="mean")
        return run.steps_made


# ---- For lives.py ----

def hugging_face(path):
    from tests.support import trainer_programs

    return trainer_programs.hugging_face(path, 0, LIMIT, stopped=STOPPED)


def lightning(path):
    from tests.support import trainer_programs

    return trainer_programs.lightning_trainer(path, 0, LIMIT, stopped=STOPPED)


def prepare(_="each", kind="pictures", *__):
    """Imports what main() needs."""
    if kind in ("hugging_face", "lightning"):
        from tests.support import trainer_programs

        trainer_programs.prepare(kind)


KINDS = {made.__name__: made for made in (pictures, texts, virtual, windows, rows, hugging_face, lightning)}
KILLED = ("0", "1", "all", "launcher", "stopped 0", "stopped 1")
_who = ""


def die():
    """In a rank, whose moment has come."""
    if _who == "launcher":
        os.kill(os.getppid(), signal.SIGKILL)
    elif _who == f"stopped {os.environ['RANK']}" and os.environ["WORLD_SIZE"] != "1":
        os.kill(os.getpid(), signal.SIGSTOP)  # The others end it.
    elif _who in ("all", os.environ["RANK"]):
        os.kill(os.getpid(), signal.SIGKILL)


def main(path, who="each", kind="pictures", ranks="2"):
    """who: one of KILLED, or each in its turn. ranks: as many in each life, "4,1,2" in turn."""
    global _who
    with open(f"{path}.lives", "a+", encoding="utf-8") as lives:
        _who = KILLED[lives.tell() % len(KILLED)] if who == "each" else who
        counts = ranks.split(",")
        ranks = counts[lives.tell() % len(counts)]
        lives.write(".")
    try:
        digests = launched(KINDS[kind], path, ranks=int(ranks))
    except ChildFailedError:
        os.kill(os.getpid(), signal.SIGKILL)  # The launcher has said it; lives.py starts all again.
    return "".join(digests) if len(counts) == 1 else digests[0]


# ---- Scenarios ----

def averaged(folder):
    """One process on batches of 12, and three ranks on batches of 4 each, or two on batches of 6; so with two batches
    an update, and two ranks of two virtual workers each."""
    ends = {}

    def train(path, size, way, accumulate=1, workers=0):
        with plimsoll.Run(path, memory_limit=LIMIT, seed=5, virtual_workers=workers) as run:
            model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 31)).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            run.track(model=model, optimizer=optimizer)

            def loss(words, targets):
                return F.cross_entropy(model(words.double() / 31), targets[:, 0], ignore_index=-1, reduction=way)

            values = [run.step(loss, batch, loss=way, accumulate=accumulate) for batch in run.steps(
                run.loader(Words(), batch_size=size), epochs=2, progress=False)]
            return [values, torch.cat([one.detach().reshape(-1) for one in model.parameters()]).tolist()]

    for way, ranks in (("mean", 3), ("sum", 2)):
        ends[way] = [forked(train, f"{folder}/{way}-1", 12, way)]
        ends[way] += launched(train, f"{folder}/{way}-{ranks}", 12 // ranks, way, ranks=ranks)
        ends[f"{way} of two"] = [forked(train, f"{folder}/{way}-window", 12, way, 2),
                                 *launched(train, f"{folder}/{way}-windows", 3, way, 2, 4)]
    return {way: {"losses": [one[0] for one in some], "apart": [
        max(abs(a - b) for a, b in zip(one[1], some[0][1])) for one in some]} for way, some in ends.items()}


def refused(folder):
    """A step that memory refuses on one rank: in backward, and when the optimizer has written."""
    real = torch.optim.SGD.step

    def train(path, at):
        calls, rank = [0], int(os.environ["RANK"])

        def often(optimizer, *arguments, **options):
            calls[0] += 1
            done = real(optimizer, *arguments, **options)
            if at and calls[0] == 9 and rank == 0:
                raise torch.OutOfMemoryError("refused for the test")
            return done

        torch.optim.SGD.step = often
        backward = torch.Tensor.backward
        passes = [0]

        def sometimes(tensor, *arguments, **options):
            passes[0] += 1
            done = backward(tensor, *arguments, **options)
            if at and passes[0] == 5 and rank == 1:
                raise torch.OutOfMemoryError("refused for the test")
            return done

        torch.Tensor.backward = sometimes
        return [pictures(path, epochs=1), calls[0], passes[0]]

    ends = [launched(train, f"{folder}/{at}", at) for at in (0, 1)]
    events = [json.loads(line) for line in pathlib.Path(folder, "1", "events.jsonl").read_text().splitlines()]
    return {"ends": ends, "refusals": [one for one in events if one["event"] == "refusal"]}


def names(folder):
    """What ranks cannot have, by the texts that say so."""
    def attempt(said, name, work):
        try:
            work()
            said[name] = "nothing was said"
        except (ValueError, RuntimeError, OSError, MemoryError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    def train(path):
        rank, said = int(os.environ["RANK"]), {}
        attempt(said, "seed", lambda: plimsoll.Run(f"{path}/a", seed=rank))
        attempt(said, "accept", lambda: plimsoll.Run(f"{path}/b", memory_limit=LIMIT, accept=["virtual_workers"]))
        attempt(said, "limit", lambda: plimsoll.Run(f"{path}/c", memory_limit="64MiB"))
        with plimsoll.Run(f"{path}/run", memory_limit=LIMIT) as run:
            model = torch.nn.Linear(4, 1)
            torch.distributed.all_reduce(torch.zeros(1))  # The run has made the group.
            attempt(said, "wrapped", lambda: run.track(model=torch.nn.parallel.DistributedDataParallel(model)))
            attempt(said, "last batch", lambda: run.loader([0] * 9, batch_size=4))
            table = torch.nn.Embedding(9, 4, sparse=True)
            run.track(model=model, table=table, optimizer=torch.optim.SGD([*model.parameters(), *table.parameters()]))
            attempt(said, "data", lambda: next(iter(run.steps([torch.zeros(2, 4)], progress=False))))
            data = run.loader([torch.ones(4)] * 8, batch_size=2)

            def body(work):
                for batch in run.steps(data, progress=False):
                    work(batch)

            def fails(one):
                raise KeyError("only here") if rank else StopAsyncIteration("not here")

            attempt(said, "sparse", lambda: body(lambda one: run.step(
                lambda x: model(x + table(torch.tensor([3]))).mean(), one)))
            attempt(said, "no step", lambda: body(lambda one: None))
        return said

    def later(path, ranks):
        said = {}

        def body():
            with plimsoll.Run(path, memory_limit=LIMIT) as run:
                model = torch.nn.Linear(4, 1)
                if ranks == 0:
                    with torch.no_grad():
                        model.weight += int(os.environ["RANK"])
                optimizer = torch.optim.SGD(model.parameters())
                run.track(model=model, optimizer=optimizer)
                for k, batch in enumerate(run.steps(run.loader([torch.ones(4)] * 12, batch_size=2), progress=False)):
                    if k == ranks and k == int(os.environ.get("RANK", 0)):
                        raise ValueError("of one rank")
                    run.step(lambda x: model(x).mean(), batch)
                return "done"

        attempt(said, "it", body)
        return said["it"]

    ends = launched(train, folder)
    ends[0]["model"] = launched(later, f"{folder}/model", 0)
    ends[0]["body"] = launched(later, f"{folder}/body", 1)
    launched(later, f"{folder}/two", 2)
    ends[0]["three"] = launched(later, f"{folder}/two", 3, ranks=3)
    ends[0]["one"] = forked(later, f"{folder}/two", 1)
    return ends


def numbers(folder):
    """Digests of whole runs, by one process and by any number of ranks."""
    return [[forked(made, f"{folder}/{made.__name__}"), *(
        launched(made, f"{folder}/{made.__name__}-{ranks}", ranks=ranks) for ranks in (1, 2, 4, 8))] for made in (virtual, rows)]


def dealt(folder):
    """Digests of one run of one process, and by another number of ranks after each stop."""
    said = {"alone": forked(virtual, f"{folder}/alone"), "workers": forked(virtual, f"{folder}/workers", 0, 150, 2)}
    for ranks, stop_at in ((4, 3), (2, 5), (8, 7), (1, 0)):
        said["went on"] = launched(virtual, f"{folder}/moved", stop_at, ranks=ranks)
    said["windows"] = forked(windows, f"{folder}/window")
    said["listed"] = [forked(listed, f"{folder}/list"), launched(listed, f"{folder}/list of 8", ranks=8)]
    for ranks, stop_at in ((4, 2), (2, 0)):
        said["listed went on"] = launched(listed, f"{folder}/moved list", stop_at, ranks=ranks)
    for ranks, stop_at in ((4, 5), (8, 10), (2, 0)):
        said["windows went on"] = launched(windows, f"{folder}/moved windows", stop_at, ranks=ranks)

    def own(path, differ):
        rank = int(os.environ.get("RANK", 0))
        try:
            with plimsoll.Run(path, memory_limit="8GiB", virtual_workers=4) as run:
                model, mine = torch.nn.Linear(4, 1), {"rank": rank * differ}
                more = {"more": {"of": rank}} if differ == 2 and rank else {}
                run.track(model=model, optimizer=torch.optim.SGD(model.parameters()), mine=mine, **more)
                data = run.loader([torch.ones(4)] * 32, batch_size=1)
                for k, batch in enumerate(run.steps(data, commit_every_steps=1, progress=False)):
                    run.step(lambda x: model(x).mean(), batch)
                    if k == 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                return mine["rank"]
        except ValueError as error:
            return str(error)

    launched(own, f"{folder}/own", 1, ranks=2)
    said["own"] = [launched(own, f"{folder}/own", 1, ranks=ranks) for ranks in (4, 1, 2)]
    said["more"] = launched(own, f"{folder}/more", 2, ranks=2)
    launched(own, f"{folder}/same", 0, ranks=2)
    said["same"] = launched(own, f"{folder}/same", 0, ranks=4)

    def refused(path, **options):
        try:
            with plimsoll.Run(path, memory_limit="8GiB", virtual_workers=options.get("workers", 4)) as run:
                model = torch.nn.Linear(4, 1)
                run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
                vectors = run.embedding("items", rows=4, dim=2, store_bytes="4MiB") if options.get("embedding") else None
                if options.get("embedding") == "outside":
                    vectors(torch.tensor([1]))
                for batch in run.steps(run.loader([torch.ones(4)] * 32, batch_size=2), progress=False):
                    run.step(lambda x: model(x).mean(), batch, loss="mean", accumulate=2 if vectors else 1)
        except ValueError as error:
            return str(error)

    def each(path):
        said = {"3 workers": refused(f"{path}/a", workers=3), "outside": refused(f"{path}/c", embedding="outside"),
                "embedding": refused(f"{path}/b", embedding="inside")}
        return {**said, "other": refused(f"{folder}/alone", workers=16)}

    said["refused"] = forked(each, f"{folder}/names")
    said["refused"]["3 ranks"] = launched(refused, f"{folder}/three", ranks=3)
    return said


def by_sockets(folder):
    """Digests of a run without rows, one rank of which can make no memory, and of one with rows, one rank of which can open no other's."""
    from plimsoll import _core

    def refused(*_):
        raise PermissionError("refused for the test")

    def train(path, made):
        if os.environ["RANK"] == "1":
            setattr(*((_core, "RankMemory") if made is virtual else (_core.RankMemory, "open")), refused)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            return [made(path), [str(one.message) for one in seen if "sockets" in str(one.message)]]

    return [[forked(made, f"{folder}/{made.__name__}"), launched(train, f"{folder}/{made.__name__}-4", made, ranks=4)]
            for made in (virtual, rows)]


def looked_up(folder):
    """Rows dealt to ranks: what they learn, the bits, failures of one rank, and moves that are interrupted."""
    from plimsoll.rows import _rank_rows
    from plimsoll.run import _run_tables

    said = {"alone": forked(rows, f"{folder}/alone")}
    launched(rows, f"{folder}/moved", 3, ranks=4)
    said["info"] = [plimsoll.info(f"{folder}/{name}") for name in ("moved", "moved/embeddings-4-0", "alone")]

    def copy(name):
        shutil.copytree(f"{folder}/moved", f"{folder}/{name}")
        return f"{folder}/{name}"

    def interrupted(path):
        real, calls = _run_tables.moved, [0]

        def moved(*arguments):
            real(*arguments)
            calls[0] += 1
            if os.environ["RANK"] == "1" and calls[0] == 3:  # Of two tables of two ranks each.
                os.kill(os.getpid(), signal.SIGKILL)

        _run_tables.moved = moved
        return rows(path)

    said["interrupted"] = []
    for ranks in (2, 4):
        path = copy(f"then {ranks}")
        try:
            launched(interrupted, path, ranks=2)
        except ChildFailedError:
            left = sorted(one.relative_to(path).as_posix() for one in pathlib.Path(path).glob("embeddings-*/rank-1/*"))
            said["interrupted"].append([left, launched(rows, path, ranks=ranks),
                                        sorted(one.name for one in pathlib.Path(path).glob("embeddings*"))])
    for ranks, stop_at in ((2, 5), (8, 7), (1, 0)):
        said["went on"] = launched(rows, f"{folder}/moved", stop_at, ranks=ranks)

    def refused_once(path):
        real, calls = _rank_rows.DealtTable.gathered, [0]

        def gathered(table, *where):
            calls[0] += 1
            if calls[0] == 7 and os.environ["RANK"] == "1":
                raise torch.OutOfMemoryError("refused for the test")
            return real(table, *where)

        _rank_rows.DealtTable.gathered = gathered
        return rows(path)

    said["refused"] = launched(refused_once, f"{folder}/refused")

    def fails(path, how):
        try:
            with plimsoll.Run(path, memory_limit="8GiB", virtual_workers=4) as run:
                model, vectors = torch.nn.Linear(2, 1), run.embedding("items", rows=9, dim=2, store_bytes="4MiB")
                run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))

                def loss(x):
                    if os.environ["RANK"] == "1" and how == "body":
                        raise ValueError("of one rank")
                    return model(vectors(torch.tensor([1, 9 if os.environ["RANK"] == "1" else 2]))).mean()

                for batch in run.steps(run.loader([torch.ones(4)] * 32, batch_size=2), progress=False):
                    run.step(loss, batch)
        except (ValueError, RuntimeError, KeyError) as error:
            return f"{type(error).__name__}: {error}"

    said["fails"] = [launched(fails, f"{folder}/{how}", how) for how in ("body", "id")]

    said["few"] = [forked(two_rows, f"{folder}/few"), *launched(two_rows, f"{folder}/fewer", ranks=4)]
    said["learnt"] = [forked(visited, f"{folder}/a", 12, 0), launched(visited, f"{folder}/b", 6, 0)[0],
                      launched(visited, f"{folder}/c", 3, 4)[1]]
    return said


def stopped(folder):
    """A rank that is stopped for longer than it may, and one that is continued before."""
    def train(path, allowed, seconds):
        """seconds: until it is continued; negative: it never is; 0: it is not stopped."""
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The launcher's, when rank 1 has ended.
        try:
            with plimsoll.Run(path, memory_limit=LIMIT, seed=3, rank_stopped_seconds=allowed) as run:
                model = torch.nn.Linear(4, 1)
                run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
                for batch in run.steps(run.loader([torch.ones(4)] * 24, batch_size=2), commit_every_steps=1, progress=False):
                    run.step(lambda x: model(x).mean(), batch)
                    if run.steps_made == 2 and os.environ["RANK"] == "1" and seconds:
                        pathlib.Path(f"{path}.at").write_text(str(time.monotonic()))
                        if seconds > 0:
                            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
                        os.kill(os.getpid(), signal.SIGSTOP)
                return digest_of(model.weight)
        except ConnectionError as error:
            took = time.monotonic() - float(pathlib.Path(f"{path}.at").read_text())
            pathlib.Path(f"{path}.said").write_text(json.dumps([took, str(error)]))
            raise

    said = {"continued": launched(train, f"{folder}/continued", 20.0, 1.5), "undisturbed": launched(train, f"{folder}/b", 20.0, 0)}
    try:
        launched(train, f"{folder}/ended", 2.0, -1)
    except ChildFailedError:
        said["ended"] = json.loads(pathlib.Path(folder, "ended.said").read_text())
    said["went on"] = launched(train, f"{folder}/ended", 2.0, 0)
    return said


def apart(folder):
    """Ranks of two machines: their bits, limits, and how one machine's end is the other's."""
    def train(path, kill_at=0):
        with plimsoll.Run(path, memory_limit="3GiB", seed=13, compute_threads=1, virtual_workers=8) as run:
            model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 5))
            vectors = run.embedding("items", rows=60, dim=4, store_bytes="4MiB")
            run.track(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))

            def loss(x, y):
                return F.cross_entropy(model(x.flatten(1)) + vectors(y).sum(1, keepdim=True), y)

            began, share = run.steps_made, run.governor.limit_bytes
            for batch in run.steps(run.loader(Pictures(), batch_size=4), epochs=2, commit_every_steps=2, progress=False):
                run.step(loss, batch)
                if kill_at and run.steps_made == kill_at and os.environ["RANK"] == "3" and not began:
                    os.kill(os.getpid(), signal.SIGKILL)
            with torch.no_grad():
                rows = vectors(torch.arange(60))
            shared = run.group.count > 1 and run.group.memory is not None
            return digest_of(list(model.state_dict().values()), rows), began, share, shared

    alone = forked(train, f"{folder}/alone")
    return {"alone": alone, "apart": on_machines(train, f"{folder}/apart"),
            "killed": on_machines(train, f"{folder}/killed", 5), "went on": launched(train, f"{folder}/killed", ranks=2),
            "restarted": on_machines(train, f"{folder}/restarted", 5, restarts=3)}


def asked(folder):
    """A signal to one rank, and `plimsoll limit`."""
    def train(path, signalled):
        rank, limits = int(os.environ["RANK"]), []
        with plimsoll.Run(path, memory_limit=LIMIT) as run:
            model = torch.nn.Linear(4, 1)
            run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
            for k, batch in enumerate(run.steps(run.loader([torch.ones(4)] * 40, batch_size=2), progress=False)):
                run.step(lambda x: model(x).mean(), batch)
                limits.append(run.governor.limit_bytes)
                if k == 2 and rank == 0 and signalled:
                    pathlib.Path(path, ".limit").write_text("1536MiB\n")
                if k == 4 and rank == 1 and signalled:
                    os.kill(os.getpid(), signal.SIGTERM)
            return run.steps_made, run.stopped, limits[0], limits[-1], digest_of(model.weight)

    launched(texts, f"{folder}/window", 5)
    return {"windows": [launched(texts, f"{folder}/{name}") for name in ("window", "windows")],
            "stopped": launched(train, f"{folder}/a", True), "went on": launched(train, f"{folder}/a", False),
            "undisturbed": launched(train, f"{folder}/b", False)}


def forked(train, *arguments):
    """train() as one process of its own."""
    return ended(started(train, *arguments))


def started(train, *arguments):
    """train() as one process of its own, for ended()."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with os.fdopen(write, "w") as told:
                json.dump(train(*arguments), told)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(write)
    return pid, read


def ended(process):
    """What it gave."""
    pid, read = process
    with os.fdopen(read) as said:
        text = said.read()
    os.waitpid(pid, 0)
    return json.loads(text)


if __name__ == "__main__":
    import torch._dynamo  # What the first optimizer imports, and the first run.

    from plimsoll.ranks import _ranks  # noqa: F401
    from plimsoll.run import _run_embedding, _run_loader, _run_parts, _run_settings, _run_sources, _run_tables  # noqa: F401

    if "RANK" in os.environ:
        made = {"large": large, "crowded": crowded}[sys.argv[1]](*sys.argv[2:])
    else:
        scenarios = {made.__name__: made for made in (averaged, refused, names, asked, numbers, dealt, by_sockets, looked_up, stopped, apart)}
        made = json.dumps({name: scenarios[name](os.path.join(sys.argv[1], name)) for name in sys.argv[2:]})
    sys.stdout.write(f"{made}\n")
