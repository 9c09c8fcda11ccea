# SPDX-License-Identifier: Apache-2.0
"""Loops as users write them, each under a Governor: python loops.py NAME LIMIT_MIB [fork|spawn].

Memory grows where no lease is until the loop is ended: at half a gigabyte a second at most where no step
looks at it. Prints a line of JSON: how it ended, after how many steps, and with which text; "finished" when
it never was.
"""
import json
import mmap
import os
import sys
import time
import warnings

import numpy as np

import plimsoll

MIB = 1 << 20


def told(how: str, steps: int, text: str = "", **more) -> None:
    print(json.dumps({"how": how, "steps": steps, "text": text, **more}), flush=True)


class Samples:
    """A data set that keeps what it has decoded, in each worker."""

    def __init__(self, seconds: float = 0.001) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int):
        import torch

        if not hasattr(self, "kept"):
            self.kept = []
        self.kept.append(np.ones(256 << 10, np.uint8))
        time.sleep(self.seconds)
        return torch.ones(256)


def numpy_alone(_):
    """Knows of the governor, and of nothing else of ours."""
    kept = []
    for step in range(4000):
        yield step
        kept.append(np.ones(MIB, np.uint8))
        time.sleep(0.002)


def shared(_):
    """Pages of shared memory, as batches of workers are."""
    kept = []
    for step in range(4000):
        yield step
        block = mmap.mmap(-1, MIB)
        block.write(b"x" * MIB)
        kept.append(block)
        time.sleep(0.002)


def _trained(batches):
    import torch

    model = torch.nn.Linear(256, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    train = plimsoll.TrainingStep(model, optimizer, loss="mean")
    for step, batch in enumerate(batches):
        train((batch,), lambda x: model(x).square().mean())
        yield step


def numpy_and_steps(_):
    """Trains with TrainingStep; arrays grow beside it."""
    import torch

    kept, batch = [], torch.ones(32, 256)

    def batches():
        for _ in range(4000):
            kept.append(np.ones(4 * MIB, np.uint8))
            yield batch

    yield from _trained(batches())


def _loader(how: str, batch: int = 32, seconds: float = 0.001):
    import torch

    return torch.utils.data.DataLoader(Samples(seconds), batch_size=batch, num_workers=2,
                                       multiprocessing_context=how)


def workers_and_steps(how: str):
    """Workers that keep samples; TrainingStep."""
    yield from _trained(_loader(how))


def workers_between_steps(how: str):
    """Workers whose next batch takes minutes, 20 MiB a second."""
    governor = plimsoll.Governor.current()
    governor.step_boundary()
    for step, _ in enumerate(_loader(how, 1 << 14, 0.025)):
        governor.step_boundary()
        yield step


def workers_alone(how: str):
    """The same in a loop of torch alone."""
    import torch

    model = torch.nn.Linear(256, 1)
    for step, batch in enumerate(_loader(how)):
        model(batch).mean().backward()
        yield step


def sleeping_fork(folder: str):
    """An embedding table that trains beside a forked child that does nothing."""
    rows, dim = 250_000, 128
    store = plimsoll.EmbeddingStore.open(plimsoll.Governor.current(), folder, rows=rows, dim=dim,
                                         optimizer=plimsoll.SGD(lr=0.1), store_bytes="136MiB")
    ids = np.arange(rows)
    for child in (0, 1):
        for step, part in enumerate(np.array_split(ids, 100)):
            store.apply(part, np.ones((len(part), dim), np.float32))
            yield step
        if child == 0:
            sleeper = os.fork()
            if sleeper == 0:
                os.closerange(0, 3)  # The test reads what they say to the end.
                time.sleep(600)
                os._exit(0)
    if os.waitpid(sleeper, os.WNOHANG) != (0, 0):
        raise RuntimeError("the child did not sleep until the end")


def main() -> None:
    name, limit, how = sys.argv[1], int(sys.argv[2]), (sys.argv[3:] or ["fork"])[0]
    loop = globals()[name]
    if name not in ("numpy_alone", "shared", "sleeping_fork"):
        import torch

        torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # Imports its modules before the baseline.
    steps = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", plimsoll.PressureWarning)
        try:
            with plimsoll.Governor(f"{limit}MiB"):
                for steps in loop(how):
                    pass
                told("finished", steps)
        except plimsoll.MemoryPressure as error:
            told("pressure", steps, str(error), held=error.held_bytes, limit=error.limit_bytes,
                 smallest=error.smallest_limit_bytes,
                 warned=sum(issubclass(one.category, plimsoll.PressureWarning) for one in caught))


if __name__ == "__main__":
    main()
