# SPDX-License-Identifier: Apache-2.0
"""Processes forked from one that has imported torch and what recipes import, and has used nothing of it.

A process that computes costs four seconds of a processor before it does anything, and a forked one next to nothing. It has an
environment, a folder, streams and an end of its own; what Python and libgomp read when they are loaded (PYTHONPATH,
PYTHONHASHSEED, OMP_*) is as it was in the first one. Where a test is about that, or about how the program starts, it takes
the program.
"""
import atexit
import functools
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading

import pytest

import plimsoll

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = "plimsoll.cli._program:main"
# None of these loads plimsoll._torch, which counts the bytes of the process that loads it. The last two are loaded by torch itself, and late.
MODULES = ("torch", PROGRAM.partition(":")[0], "plimsoll.recipes", "plimsoll.run._run", "torch.profiler._cupti_monitor", "torch.utils.serialization.config")
COMPILER = "torch._dynamo"
SPINS = "1000"  # GOMP_SPINCOUNT of the program plimsoll, which is read when torch is loaded.


class Process:
    """One of them, as subprocess.Popen has it: pid, poll(), communicate(), send_signal(), kill(), returncode."""

    def __init__(self, first, pid, streams):
        self.pid, self.returncode, self._first, self._streams = pid, None, first, streams
        self._ended = os.pidfd_open(pid)

    def poll(self, seconds=0.0):
        if self.returncode is None and select.select([self._ended], [], [], seconds)[0]:
            self.returncode = self._first.ask(ended=self.pid)
            os.close(self._ended)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=300):
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        told = []
        for stream in self._streams:
            with stream:
                stream.seek(0)
                told.append(stream.read())
        return tuple(told)


class First:
    """The one that others are forked from. modules: what it imports besides; folders: where else it finds modules."""

    def __init__(self, *modules, folders=(), **environment):
        ours, theirs = socket.socketpair()
        spins = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": SPINS}
        path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", ""), str(ROOT)])
        # An orphan at once: it is no child whose memory a Governor of this process counts. It ends when nobody can ask it any more.
        program = f"import os\nif os.fork():\n    os._exit(0)\nfrom {__name__} import serve\nserve({theirs.fileno()}, {modules!r})()"
        with theirs:
            subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path, **spins, **environment},
                           pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, check=True)
        self._socket, self._asks = ours, ours.makefile("rw", encoding="utf-8")

    def ask(self, **what):
        self._asks.write(json.dumps(what) + "\n")
        self._asks.flush()
        answer = self._asks.readline()
        assert answer, "the process that others are forked from has ended"
        return json.loads(answer)

    def start(self, what, *words, cwd=None, env=None):
        """what: "module:function", which is called with the words, or a program's file."""
        streams = [tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2)]
        names = [f"/proc/{os.getpid()}/fd/{stream.fileno()}" for stream in streams]
        pid = self.ask(what=str(what), words=[str(word) for word in words], cwd=str(cwd or os.getcwd()), env=dict(env or os.environ), streams=names)
        return Process(self, pid, streams)

    def run(self, what, *words, timeout=300, **more):
        """As subprocess.run() has it."""
        process = self.start(what, *words, **more)
        try:
            out, err = process.communicate(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess([str(what), *words], process.returncode, out, err)

    def close(self):
        self._socket.shutdown(socket.SHUT_WR)
        assert self._asks.readline() == ""  # It has ended.
        self._asks.close()
        self._socket.close()


def serve(number, modules):
    """Answers until nobody asks. In each process that it forks it returns what this one is there for."""
    for name in (*MODULES, *modules):
        importlib.import_module(name)
    assert "plimsoll._torch" not in sys.modules
    import gc

    gc.freeze()  # No page is copied because a collection has looked at it.
    ours = socket.socket(fileno=number)
    asks = ours.makefile("rw", encoding="utf-8")
    for line in asks:
        asked = json.loads(line)
        if "ended" in asked:
            _, status = os.waitpid(asked["ended"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                asks.close()
                ours.close()
                return lambda: become(**asked)
        asks.write(f"{answer}\n")
        asks.flush()
    return lambda: None


def become(what, words, cwd, env, streams):
    """Ends as the interpreter does, but takes none of it apart, which would copy its every page."""
    for number, name in zip((1, 2), streams):
        stream = os.open(name, os.O_RDWR | os.O_APPEND)
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator begins anew by itself.
    sys.argv = [what, *words]
    module, colon, name = what.partition(":")
    try:
        if colon:
            sys.exit(getattr(importlib.import_module(module), name)(*([words] if what == PROGRAM else words)))
        sys.path[0] = os.path.dirname(what)
        runpy.run_path(what, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # Waits for threads that are not daemons.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 255)


def skip_where_nothing_computes():
    pytest.importorskip("torch")
    if not plimsoll._core.torch_version:
        pytest.skip("plimsoll was built without torch")


def held(*modules):
    """For fixtures of a file's own: yields one, and ends it."""
    skip_where_nothing_computes()
    one = First(*modules)
    yield one
    one.close()


@functools.cache
def shared(*modules):
    """One for all files, each of which has the fixture anew. It ends with this process, as nobody can ask it then."""
    return First(*modules)


@pytest.fixture(scope="session")
def first():
    """For recipes."""
    skip_where_nothing_computes()
    return shared()


@pytest.fixture(scope="session")
def first_of_loops():
    """For loops of the user's own, whose first optimizer imports torch's compiler."""
    skip_where_nothing_computes()
    return shared(COMPILER)


def told(first, program, out, kills, seed, *arguments):
    """As tests.support.lives.told()."""
    done = first.run("tests.support.lives:main", program, out, kills, seed, *arguments)
    print(done.stderr, done.stdout, sep="\n")  # Which pytest shows where a test fails.
    assert done.returncode == 0
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def forked(first):
    """What the fixture `call` of test_cli.py does with the program."""
    from test_cli import Done

    def call(*words, timeout=300, **more):
        done = first.run(PROGRAM, *words, timeout=timeout, **more)
        return Done(done.returncode, done.stdout, done.stderr)
    return call
