# SPDX-License-Identifier: Apache-2.0
"""A disk that a test may fill: a file system in memory, of a size, as root may make it. And a program that trains on it.

python full_disk.py FOLDER KIND STEP [EVERY [WORKERS [SECONDS]]]: trains in FOLDER/run and fills the disk in the body of this step, 0: never.
KIND: "dense" parts; "rows" of a table beside them; "own", a loop with an optimizer of its own. EVERY: steps from commit to commit; WORKERS
of its loader; SECONDS that a step takes. Prints what the bits are at the end.
"""
import contextlib
import hashlib
import os
import pathlib
import subprocess
import sys
import time

import pytest

import plimsoll

STEPS = 24


@contextlib.contextmanager
def small_disk(folder, size_mib):
    """Mounted at `folder` meanwhile; skips where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", folder], text=True, capture_output=True)
    if done.returncode:
        pytest.skip(f"a disk of a size cannot be made here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder):
    """To the last byte."""
    with open(folder / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def start(folder, kind, step=0, every=4, workers=0, seconds=0.0):
    return subprocess.Popen([sys.executable, __file__, folder, kind, *map(str, (step, every, workers, seconds))], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def wait_until(run, process, wanted):
    """The status, once it begins so. Errors: AssertionError when the process has ended; TimeoutError."""
    until = time.monotonic() + 300
    while process.poll() is None:
        if time.monotonic() > until:
            raise TimeoutError(f"{run}: not {wanted!r} but {plimsoll.status(run)}")
        with contextlib.suppress(plimsoll.NotFoundError):
            if (said := plimsoll.status(run))["status"].startswith(wanted):
                return said
        time.sleep(0.05)
    raise AssertionError(f"it has ended: {process.communicate()}")


def main(folder, kind, fills, every=4, workers=0, seconds=0.0):
    import torch

    with plimsoll.Run(folder / "run", memory_limit="4GiB", seed=3, compute_threads=1) as run:
        net = torch.nn.Linear(300, 300)
        one = torch.optim.AdamW(net.parameters())
        rows = run.embedding("rows", rows=10_000, dim=32, optimizer=plimsoll.AdamW(lr=0.1), store_bytes="2MiB") if kind == "rows" else None
        run.track(net=net, one=one)
        data = run.loader(torch.utils.data.TensorDataset(torch.randn(8 * STEPS, 300)), batch_size=8, workers=workers)

        def loss(x):
            value = (net(x) + torch.rand(())).square().mean()
            return value if rows is None else value + rows(torch.randint(10_000, (1000,))).square().sum()

        for (x,) in run.steps(data, commit_every_steps=every, progress=False):
            time.sleep(seconds)
            if run.steps_made + 1 == fills:
                fill(folder)
            run.log(seen=float(run.steps_made))
            if kind == "own":
                one.zero_grad()
                loss(x).backward()
                one.step()
            else:
                run.step(loss, (x,))
        digest = hashlib.sha256(net.weight.detach().numpy().tobytes())
        if rows is not None:
            with torch.no_grad():
                digest.update(rows(torch.arange(10_000)).numpy().tobytes())
    print(digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6]), *map(float, sys.argv[6:7]))
