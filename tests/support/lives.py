# SPDX-License-Identifier: Apache-2.0
"""Lives of a training program: started, killed at a random moment, started again, until it is done.

    python -m tests.support.lives PROGRAM.py OUT KILLS SEED [ARGUMENT…]

PROGRAM has main(RUN, *arguments), which trains in a plimsoll.Run and returns a digest; and die() where it
dies otherwise. Each life is a process
forked from one that has imported torch, and what PROGRAM's prepare(*arguments) imports, and used nothing
of it, so that a life costs a second and not four. Its last line is JSON: {"digest", "undisturbed", "killed_at": [the published step at each kill]}.

A life is killed by SIGKILL from a thread, at a moment drawn from SEED and counted from where its loop
begins. With KILLS "stages" each life is killed in its second commit instead, one before or after each stage.
"""
import faulthandler
import functools
import importlib.util
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[2]
LONGEST = 240  # Seconds of a life: one that hangs says where.
STAGES = ("write before", "write after", "sync_folder before", "sync_folder after", "commit before",
          "commit after", "publish before", "publish after")


def told(program, out, kills, seed, *arguments):
    """For tests: what this program's last line says."""
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"}
    with tempfile.TemporaryFile("w+") as told:  # No pipe: a worker that outlives a life would hold it open.
        done = subprocess.run([sys.executable, "-m", "tests.support.lives", program, out, str(kills), str(seed),
                               *map(str, arguments)], stdout=told, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        told.seek(0)
        lines = told.read().splitlines()
    print(*lines[-60:], sep="\n")  # Which pytest shows where a test fails.
    assert done.returncode == 0
    return json.loads(lines[-1])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(seconds):
    from plimsoll.run._run_life import Life

    signals = Life.signals  # Entered by every loop.

    def counted(self):
        timer = threading.Timer(seconds, die)
        timer.daemon = True
        timer.start()
        return signals(self)

    Life.signals = counted


def kill_in(stage):
    """In the second commit of this life: write, sync_folder and publish come once in each, and so does the
    first of two tables."""
    import plimsoll
    from plimsoll import _core
    from plimsoll.run import _run_commit

    name, when = stage.split()
    owner = {"publish": _core.RunFolder, "commit": plimsoll.EmbeddingStore}.get(name, _run_commit)
    real, calls = getattr(owner, name), [0]
    fatal = 3 if name == "commit" else 2

    def counted(*arguments, **options):
        calls[0] += 1
        if calls[0] == fatal and when == "before":
            die()
        done = real(*arguments, **options)
        if calls[0] == fatal:
            die()
        return done

    setattr(owner, name, counted)


def live(program, arguments, end=None):
    """The digest, or None when it was killed. `end` is called in the new process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        try:
            if end is not None:
                end()
            os.write(write, str(program.main(*arguments)).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    os.close(write)
    digest = os.read(read, 1000).decode() if status == 0 else None
    os.close(read)
    if status not in (0, signal.SIGKILL):
        raise SystemExit(f"a life ended with status {status}")
    return digest


def ends(kills, seed, longest, killed_at):
    """Until so many were killed. A moment that comes too late makes those after it earlier."""
    if kills == "stages":
        yield from (functools.partial(kill_in, stage) for stage in STAGES)
    else:
        moments, before = random.Random(seed), -1
        while len(killed_at) < int(kills):
            longest *= 0.7 if len(killed_at) == before else 1.0
            before = len(killed_at)
            yield functools.partial(kill_after, moments.uniform(0.0, 0.7 * longest))


def main(path, out, kills, seed, *arguments):
    import torch._dynamo  # noqa: F401  What the first optimizer imports.

    import plimsoll  # noqa: F401

    spec = importlib.util.spec_from_file_location("program", path)
    program = importlib.util.module_from_spec(spec)
    sys.modules["program"] = program
    spec.loader.exec_module(program)
    getattr(program, "prepare", lambda *_: None)(*arguments)
    if hasattr(program, "die"):
        globals()["die"] = program.die
    began = time.monotonic()
    undisturbed = live(program, (os.path.join(out, "undisturbed"), *arguments))
    longest = time.monotonic() - began
    run, killed_at, digest = pathlib.Path(out) / "killed", [], undisturbed
    for end in ends(kills, int(seed), longest, killed_at):
        digest = live(program, (str(run), *arguments), end)
        if digest is None:
            manifest = run / "checkpoints" / "manifest.json"
            killed_at.append(json.loads(manifest.read_text())["step"] if manifest.exists() else -1)
        elif digest == undisturbed:  # Done before its moment: begun anew for the kills that are left.
            os.rename(run, run.with_name(f"done-{len(killed_at)}-{time.monotonic_ns()}"))
        else:
            break
    else:
        digest = live(program, (str(run), *arguments))
    print(json.dumps({"digest": digest, "undisturbed": undisturbed, "killed_at": killed_at}))


if __name__ == "__main__":
    main(*sys.argv[1:])
