# SPDX-License-Identifier: Apache-2.0
"""The recipe can-kd in Python with several ranks, and work that ranks do by chunks: torch is imported once, and the ranks are forked.

    python -m tests.support.can_kd_ranks SET FOLDER SCENARIO…      what each gives, as JSON

DIES=N ends the rank WHO with kill -9 as step N is told.
"""
import json
import os
import pathlib
import signal
import sys

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import plimsoll
from tests.support.python_can_kd import NAME, SMALL, events
from tests.support.rank_programs import launched

OPTIONS = {**SMALL, "memory_limit": "8GiB", "scoring_chunk": 32, "test_every_n_epochs": 1, "checkpoint_every_n_steps": 2}
LIMIT = "4GiB"


def told(run, summary):
    """What any number of ranks has to give alike."""
    looks = [(one["task"], one["held_out_loss"], one.get("test/auc"), one.get("curriculum/threshold")) for one in events(run, "epoch")]
    return {"state": summary["state_sha256"], "evaluation": summary["evaluation"], "models": summary["models"], "step": summary["step"], "looks": looks}


def trained(data, run, options, dies="", who="0"):
    """The summary of this rank. dies: the step at which rank `who` is killed."""
    if dies and os.environ["RANK"] == who:
        event = plimsoll.Run.event

        def kill(self, name, /, **values):
            if name == "step" and values["step"] == int(dies):
                os.kill(os.getpid(), signal.SIGKILL)
            event(self, name, **values)

        plimsoll.Run.event = kill
    if pathlib.Path(run, "run.toml").exists():
        return plimsoll.resume(run, progress=False)
    return plimsoll.train(NAME, data=data, out=run, **options)


def alike(data, folder, counts=(1, 2, 4), **options):
    """The same run by so many ranks."""
    given, ends = {**OPTIONS, **options}, []
    for count in counts:
        run = pathlib.Path(folder, str(count))
        sums = launched(trained, data, str(run), given, ranks=count)
        ends.append(told(run, sums[0]) | {"same": len({one["state_sha256"] for one in sums}), "files": sorted(map(str, run.glob("cache/*")))})
    return ends


def eight(data, folder):
    return alike(data, folder, (1, 8, 3), use_vgae_mining=False, difficulty_cache_update=1, stage="all", model_size="teacher", max_epochs=3)


def killed(data, folder):
    """One rank after the other, and the run goes on with another number of them."""
    run, alone, options = pathlib.Path(folder, "killed"), pathlib.Path(folder, "alone"), {**OPTIONS, "model_size": "student", "use_kd": False}
    ends = [told(alone, launched(trained, data, str(alone), options, ranks=1)[0])]
    for count, dies, who in ((4, "5", "1"), (2, "12", "0"), (8, "23", "7")):
        try:
            launched(trained, data, str(run), options, dies, who, ranks=count)
        except ChildFailedError:
            continue
        raise AssertionError("no rank was killed")
    return [*ends, told(run, launched(trained, data, str(run), options, ranks=2)[0])]


def chunks(data, folder):
    """Rows of work that ranks share, by kind; and what ends it."""
    def work(path):
        rank, said = int(os.environ["RANK"]), {}
        with plimsoll.Run(path, memory_limit=LIMIT, virtual_workers=1) as run:
            made = []

            def rows(begin, end):
                made.append(begin)
                return np.stack([np.arange(begin, end, dtype=np.float64), np.full(end - begin, -0.0)], 1)

            for count in (0, 1, 10, 64):
                said[str(count)] = run.group.by_chunks(count, 10, rows).tolist()
            said["made"] = list(made)
            said["signs"] = bool(np.signbit(run.group.by_chunks(64, 10, rows)[:, 1]).all())

            def refused(begin, end):
                if rank == run.group.count - 1:
                    raise torch.OutOfMemoryError("refused for the test")
                return rows(begin, end)

            def looks():
                raise KeyError("asked to stop")

            for name, arguments in (("refused", (refused,)), ("looks", (rows, looks))):
                try:
                    run.group.by_chunks(64, 10, *arguments)
                except Exception as error:
                    said[name] = f"{type(error).__name__}: {error}"
            said["again"] = len(run.group.by_chunks(64, 10, rows))
            try:
                run.embedding("items", rows=4, dim=2)
            except ValueError as error:
                said["embedding"] = str(error)
        return said

    return [launched(work, f"{folder}/{count}", ranks=count) for count in (1, 2, 3)]


def whole_steps(data, folder):
    """Every rank makes each step whole; one whose loss is another ends all."""
    def train(path, differs=False):
        with plimsoll.Run(path, memory_limit=LIMIT, seed=3, virtual_workers=1, compute_threads=1) as run:
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
            run.track(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
            batches = [torch.arange(4.0 * k, 4.0 * k + 12).reshape(3, 4) for k in range(5)]
            try:
                for batch in run.steps(batches, epochs=2, progress=False):
                    run.step(lambda x: model(x).mean() + differs * run.group.rank, batch)
            except RuntimeError as error:
                return str(error)
            return torch.cat([one.detach().reshape(-1) for one in model.state_dict().values()]).tolist()

    ends = [launched(train, f"{folder}/{count}", ranks=count) for count in (1, 2, 3)]
    return {"ends": [one for some in ends for one in some], "differs": launched(train, f"{folder}/differs", True, ranks=2)}


if __name__ == "__main__":
    given, into, *names = sys.argv[1:]
    seen = {}
    for each in names:
        os.makedirs(f"{into}/{each}")
        seen[each] = globals()[each](given, f"{into}/{each}")
    print(json.dumps(seen))
