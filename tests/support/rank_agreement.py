# SPDX-License-Identifier: Apache-2.0
"""What several ranks have to do together where one of them is disturbed, for test_rank_agreement.py.

    python -m tests.support.rank_agreement FOLDER SCENARIO…     what each gives, as JSON
"""
import json
import os
import pathlib
import signal
import sys
import time
import tracemalloc

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import plimsoll
from plimsoll.core import _torch_gate
from tests.support.rank_programs import LIMIT, forked, launched
from tests.support.run_programs import digest_of


def of_rank(number):
    return os.environ["RANK"] == str(number)


class Counted:
    """Batches of which nobody knows how many will come."""

    def __iter__(self):
        return (torch.full((2, 4), k / 7) for k in range(6))


def counted(path, rank=-1, when="", dies=True, nth=2):
    """Its last step, the sixth, is committed by the interval, and again where the loop ends: the data has moved on. The nth time
    that `rank` writes its file of that step it dies, or its disk is full, "before" or "after"."""
    from plimsoll.run import _run_commit

    write, calls = _run_commit.write, [0]

    def disturbed(content, file, step):
        calls[0] += step == 6
        fatal = step == 6 and calls[0] == nth and of_rank(rank)
        if fatal and when == "before" and not dies:
            raise OSError(28, "full for the test")
        if fatal and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        size = write(content, file, step)
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return size

    _run_commit.write = disturbed
    with plimsoll.Run(path, memory_limit=LIMIT, seed=3, virtual_workers=2) as run:
        model, own = torch.nn.Linear(4, 1), torch.Generator().manual_seed(int(os.environ["RANK"]))
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), own=own)
        began = run.steps_made
        for batches in run.steps(Counted(), epochs=2, commit_every_steps=1, progress=False):
            run.step(lambda x: model(x).square().mean(), batches)
            torch.rand(1, generator=own)
        return began, digest_of(model.weight, own.get_state())


def moved(folder):
    """A step that is committed again, disturbed; and what the next start gives, after each."""
    ends = {"undisturbed": [launched(counted, f"{folder}/undisturbed")]}
    for name, how in {"rank 0 before": (0, "before"), "rank 0 after": (0, "after"), "rank 1 before": (1, "before"),
                      "rank 1 after": (1, "after"), "rank 0 full": (0, "before", False), "rank 1 full": (1, "before", False)}.items():
        ends[name] = [failed(counted, f"{folder}/{name}", *how), launched(counted, f"{folder}/{name}")]
    ends["finished"] = [failed(counted, f"{folder}/undisturbed", 0, "before", True, 1), launched(counted, f"{folder}/undisturbed")]
    return ends


def admitted(folder):
    """How a run ends on each rank where rank 1 has less left than the largest step's margin, or no disk for what the rehearsal keeps, and
    which limit would do; and the last word in its status."""
    def train(path, how):
        from plimsoll.training import _admission

        extension, held, real = _torch_gate.load(), [], _admission.TrainingState
        rows = torch.zeros(1 << 14, 256)

        def crowded():
            if how == "short" and of_rank(1) and len(held) < 2:  # The rehearsal steps twice: first there are no states.
                peak, left = extension.arena_stats()["leased_peak_bytes"], run.governor.tensor_room()
                held.append(run.governor.reserve(left - peak - (1 << 20)) if held else None)

        def kept(*arguments):
            if how == "full" and of_rank(1):
                raise OSError(28, "full for the test")
            return real(*arguments)

        _admission.TrainingState = kept
        try:
            with plimsoll.Run(path, memory_limit=LIMIT) as run:
                model = torch.nn.Linear(256, 256)
                run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
                for batch in run.steps(run.loader([torch.zeros(256)] * 8, batch_size=2), largest=rows, progress=False):
                    run.step(lambda x: model(x).square().mean(), batch, before_update=crowded)
                return "ended", 0
        except (MemoryError, OSError, RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}", getattr(error, "smallest_limit_bytes", 0)

    def ended(name):
        path = f"{folder}/{name}"
        return launched(train, path, name), json.loads(pathlib.Path(path, "status.json").read_text())

    return {name: ended(name) for name in ("short", "full", "whole")}


def handed(folder):
    """Rows of a table of the program's own in a batch: of all ranks, of one of them, and of one process's virtual workers."""
    def train(path, workers, whose):
        rank = os.environ.get("RANK", "0")
        try:
            with plimsoll.Run(path, memory_limit=LIMIT, virtual_workers=workers) as run:
                table = plimsoll.EmbeddingStore.open(run.governor, f"{path}.{rank}/items", rows=9, dim=4, store_bytes="4MiB")
                model = torch.nn.Linear(4, 1)
                run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))

                def given(x):
                    return (x, table.gather([1, 2])) if rank in whose else (x, torch.ones(2, 4))

                for batch in run.steps(run.loader([torch.ones(4)] * 8, batch_size=2), progress=False):
                    run.step(lambda x, rows: model(x + rows).mean(), type(batch)(map(given, batch)) if workers else given(batch))
                return "ended"
        except (OSError, RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    return {"ranks": launched(train, f"{folder}/a", 0, "01"), "one": launched(train, f"{folder}/b", 0, "1"),
            "workers": forked(train, f"{folder}/c", 2, "0"), "none": launched(train, f"{folder}/d", 2, "")}


def idled(folder):
    """Waits between two loops, which rank 1 begins later by half of what is slept between two looks."""
    from plimsoll.run._run_life import _PAUSE_LOOKS_EVERY

    def train(path):
        try:
            with plimsoll.Run(path, memory_limit=LIMIT) as run:
                model = torch.nn.Linear(4, 1)
                run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
                for _ in range(3):
                    for batch in run.steps(run.loader([torch.ones(4)] * 8, batch_size=2), progress=False):
                        run.step(lambda x: model(x).mean(), batch)
                    for part in range(10):
                        if of_rank(1):
                            time.sleep(0.5 * _PAUSE_LOOKS_EVERY)
                        run.idle((1 + part / 10) * _PAUSE_LOOKS_EVERY)
                return run.steps_made
        except (OSError, RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    return launched(train, f"{folder}/run")


class Slow:
    """One item of rank 0's takes a second."""

    def __init__(self, at):
        self._at, self._read = at, 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self._read += 1
        time.sleep(float(self._read == self._at and of_rank(0)))
        return torch.ones(4)


def pressed(folder):
    """The watcher's stop in the middle of a wait of rank 1, for rank 0's next batch or in an agreement within another: how each
    rank ends, after how many seconds, and at which step the next start goes on."""
    def train(path, where):
        began = time.monotonic()

        def rings(*_):
            if of_rank(1) and time.monotonic() - began < 5:
                raise plimsoll.MemoryPressure("memory is short")
            raise TimeoutError("for the test")

        def within():
            """As where a Trainer's backward exchanges gradients."""
            if where == "within" and run.steps_made == 3:
                disturb()
                time.sleep(float(of_rank(0)))
                run.group.agreed("run.step()", lambda: None)
                run.group.exchange(run.group.memory.meet)

        def disturb():
            nonlocal began
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.3 if of_rank(1) else 10, 10)

        signal.signal(signal.SIGALRM, rings)
        try:
            with plimsoll.Run(path, memory_limit=LIMIT) as run:
                model, first = torch.nn.Linear(4, 1), run.steps_made
                run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
                data = Slow(7 if where == "batch" else 0)
                for batch in run.steps(run.loader(data, batch_size=2), commit_every_steps=2, progress=False):
                    run.step(lambda x: model(x).mean(), batch, before_update=within)
                    if where == "batch" and run.steps_made == 2:
                        disturb()
                return first
        except (MemoryError, OSError, RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - began
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    return {where: [launched(train, f"{folder}/{where}", where), launched(train, f"{folder}/{where}", "")] for where in ("batch", "within")}


def tables(folder):
    """Of small and of large tables: what Python and NumPy hold at most while each rank's is made, and while it is opened again;
    its rows; and what is left in the run's folder."""
    def train(path, rows):
        with plimsoll.Run(path, memory_limit=LIMIT, virtual_workers=2) as run:
            tracemalloc.start()
            vectors = run.embedding("items", rows=rows, dim=1)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            model = torch.nn.Linear(1, 1)
            run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
            for batches in run.steps(run.loader(torch.arange(0, rows, rows // 16), batch_size=4), progress=False):
                run.step(lambda ids: model(vectors(ids)).mean(), batches)
            return peak, vectors.store.rows

    def twice(rows):
        path = f"{folder}/{rows}"
        both = [launched(train, path, rows) for _ in range(2)]
        return both, sorted(one.name for one in pathlib.Path(path).iterdir() if not one.name.startswith("embeddings"))

    return {rows: twice(rows) for rows in (300_000, 3_000_000)}


def failed(*how):
    """Whether a launch did."""
    try:
        launched(*how)
    except ChildFailedError:
        return True
    return False


if __name__ == "__main__":
    import torch._dynamo  # What the first optimizer imports, and the first run.

    from plimsoll.ranks import _ranks  # noqa: F401
    from plimsoll.run import _run_embedding, _run_loader, _run_parts, _run_settings, _run_sources, _run_tables  # noqa: F401

    scenarios = {made.__name__: made for made in (moved, admitted, handed, idled, pressed, tables)}
    done = {}
    for name in sys.argv[2:]:
        os.makedirs(os.path.join(sys.argv[1], name))
        done[name] = scenarios[name](os.path.join(sys.argv[1], name))
    sys.stdout.write(f"{json.dumps(done)}\n")
