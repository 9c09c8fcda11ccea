# SPDX-License-Identifier: Apache-2.0
"""Training programs of several ranks, for tests: main(run, who, kind, ranks), which lives.py kills.

    python -m tests.support.rank_programs FOLDER                   what each scenario gives, as JSON
    python rank_programs.py RUN LIMIT                              large(), for torchrun

The launcher is torchrun's own (elastic_launch); its ranks are forked from it, so that torch is imported once.
"""
import contextlib
import json
import os
import pathlib
import signal
import sys
import uuid

import torch
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import plimsoll
from tests.support.run_programs import Pictures, digest_of, states

LIMIT = "2GiB"


def launched(train, *arguments, ranks=2, restarts=0):
    """What train(*arguments) gives on each rank."""
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", start_method="fork", max_restarts=restarts, monitor_interval=0.05)
    made = elastic_launch(config, train)(*arguments)
    return [made[rank] for rank in range(ranks)]


def pictures(path, **options):
    """A convnet with batch statistics and dropout, random augmentation, a last batch that is no whole one; parts
    that are the same on all ranks, and parts that are not."""
    with plimsoll.Run(path, memory_limit=LIMIT, seed=3) as run:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
            torch.nn.Dropout(0.2), torch.nn.Linear(288, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        average = torch.optim.swa_utils.AveragedModel(model)
        seen, own = {"items": 0}, torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
        run.track(model=model, optimizer=optimizer, schedule=schedule, average=average, seen=seen, own=own)
        data = run.loader(Pictures(), batch_size=7, workers=options.pop("workers", 0))
        for batch in run.steps(data, epochs=options.get("epochs", 4), commit_every_steps=4,
                               progress=False):
            value = run.step(options.get("loss", lambda x, y: F.cross_entropy(model(x), y)), batch, clip_norm=1.0)
            schedule.step()
            average.update_parameters(model)
            seen["items"] += len(batch[1])
            torch.rand(1, generator=own)
            run.log(loss=value)
        ends = [torch.tensor([value, float(seen["items"])], dtype=torch.float64), own.get_state()]
        return digest_of(list(model.state_dict().values()), states(optimizer), list(average.state_dict().values()), ends)


def texts(path):
    """Two batches a step, targets of which some do not count, fused AdamW, workers."""
    with plimsoll.Run(path, memory_limit=LIMIT, seed=11) as run:
        model = torch.nn.Sequential(torch.nn.Embedding(31, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 31))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        run.track(model=model, optimizer=optimizer)

        def loss(words, targets):
            return F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=-1)

        for batch in run.steps(run.loader(Words(), batch_size=5, workers=1), epochs=3, commit_every_steps=3, progress=False):
            run.step(loss, batch, loss="mean", accumulate=2)
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
        return run.steps_made, run._step.parts


# ---- For lives.py ----

KINDS = {made.__name__: made for made in (pictures, texts)}
KILLED = ("0", "1", "all", "launcher")
_who = ""


def die():
    """In a rank, whose moment has come."""
    if _who == "launcher":
        os.kill(os.getppid(), signal.SIGKILL)
    elif _who in ("all", os.environ["RANK"]):
        os.kill(os.getpid(), signal.SIGKILL)


def main(path, who="each", kind="pictures", ranks="2"):
    """who: one of KILLED, or each in its turn."""
    global _who
    with open(f"{path}.lives", "a+", encoding="utf-8") as lives:
        _who = KILLED[lives.tell() % len(KILLED)] if who == "each" else who
        lives.write(".")
    try:
        digests = launched(KINDS[kind], path, ranks=int(ranks))
    except ChildFailedError:
        os.kill(os.getpid(), signal.SIGKILL)  # The launcher has said it; lives.py starts all again.
    return "".join(digests)


# ---- Scenarios ----

def averaged(folder):
    """One process on batches of 12, and three ranks on batches of 4 each, or two on batches of 6."""
    ends = {}

    def train(path, size, way):
        with plimsoll.Run(path, memory_limit=LIMIT, seed=5) as run:
            model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 31)).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            run.track(model=model, optimizer=optimizer)

            def loss(words, targets):
                return F.cross_entropy(model(words.double() / 31), targets[:, 0], ignore_index=-1, reduction=way)

            values = [run.step(loss, batch, loss=way) for batch in run.steps(
                run.loader(Words(), batch_size=size), epochs=2, progress=False)]
            return [values, torch.cat([one.detach().reshape(-1) for one in model.parameters()]).tolist()]

    for way, ranks in (("mean", 3), ("sum", 2)):
        ends[way] = [forked(train, f"{folder}/{way}-1", 12, way)]
        ends[way] += launched(train, f"{folder}/{way}-{ranks}", 12 // ranks, way, ranks=ranks)
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
        attempt(said, "accept", lambda: plimsoll.Run(f"{path}/b", memory_limit=LIMIT, accept=["ranks"]))
        attempt(said, "limit", lambda: plimsoll.Run(f"{path}/c", memory_limit="64MiB"))
        with plimsoll.Run(f"{path}/run", memory_limit=LIMIT) as run:
            model = torch.nn.Linear(4, 1)
            torch.distributed.all_reduce(torch.zeros(1))  # The run has made the group.
            attempt(said, "embedding", lambda: run.embedding("items", rows=4, dim=2))
            attempt(said, "wrapped", lambda: run.track(model=torch.nn.parallel.DistributedDataParallel(model)))
            attempt(said, "last batch", lambda: run.loader([0] * 9, batch_size=4))
            from plimsoll._run_life import Intervals
            from plimsoll._run_outer import OuterLoop

            attempt(said, "trainer", lambda: OuterLoop(run, Intervals(0, 60, 0)))
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

    return {"stopped": launched(train, f"{folder}/a", True), "went on": launched(train, f"{folder}/a", False),
            "undisturbed": launched(train, f"{folder}/b", False)}


def forked(train, *arguments):
    """train() as one process of its own."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException), os.fdopen(write, "w") as told:
            json.dump(train(*arguments), told)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    os.waitpid(pid, 0)
    return json.loads(text)


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  What the first optimizer imports.

    if "RANK" in os.environ:
        made = large(*sys.argv[1:])
    else:
        made = json.dumps({scenario.__name__: scenario(os.path.join(sys.argv[1], scenario.__name__))
                           for scenario in (averaged, refused, names, asked)})
    sys.stdout.write(f"{made}\n")
