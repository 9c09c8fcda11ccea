# SPDX-License-Identifier: Apache-2.0
"""Plays a program of the corpus while somebody looks on, in a process of its own, and reads what was said."""
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from programs import Program

HERE = pathlib.Path(__file__).resolve().parent
TIMEOUT_SECONDS = 300


@dataclasses.dataclass
class Said:
    """Of one program, by one watcher."""

    leaks: bool
    text: str = ""
    owner: str = ""
    bytes_per_step: float = 0.0
    phase: str = ""
    sites: tuple[tuple[str, int], ...] = ()  # File and line, the likeliest first.
    holder: str = ""


@dataclasses.dataclass(frozen=True)
class Pace:
    steps: int
    step_seconds: float


class PlayError(Exception):
    """The program or its watcher failed; says which and why."""


@contextlib.contextmanager
def playing(program: Program, pace: Pace, command: tuple = (), **variables: str) -> Iterator[subprocess.Popen]:
    """A process of the program whose loop has begun; waits for its end, and ends whatever it began."""
    environment = dict(os.environ, VERDICTS_STEPS=str(pace.steps), VERDICTS_STEP_SECONDS=str(pace.step_seconds),
                       OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1",
                       PYTHONPATH=os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])), **variables)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([sys.executable, *command, program.path], text=True, env=environment, stderr=errors,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
        try:
            for line in process.stdout:
                if line == "begin\n":
                    break
            yield process
            status = process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:  # The program, or who watched it from outside.
            raise PlayError(f"{program.name}: not over after {TIMEOUT_SECONDS} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
        if status:
            errors.seek(0)
            raise PlayError(f"{program.name}: status {status}: {errors.read()[-1000:]}")


@dataclasses.dataclass
class Watched:
    """One play, with plimsoll.Watch inside, and `plimsoll watch` and the tracker outside."""

    inside: Said
    outside: Said | None
    resident: list[int]  # Bytes after each step.
    anonymous: list[int]


def watched(program: Program, pace: Pace, outside: bool) -> Watched:
    """With `outside`, `plimsoll watch` looks on too, as often as a step comes."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "told.json"
        looker = None
        with playing(program, pace, VERDICTS_WATCHER="plimsoll", VERDICTS_OUT=str(out)) as process:
            if outside:
                looker = subprocess.Popen([os.environ["PLIMSOLL_PROGRAM"], "watch", str(process.pid), "--json",
                                           "--every", str(pace.step_seconds)], text=True, stdout=subprocess.PIPE)
                try:
                    lines = looker.communicate(timeout=TIMEOUT_SECONDS)[0].splitlines()
                finally:
                    looker.kill()  # Nothing, where it has ended.
        told = json.loads(out.read_text())
    sites = tuple((file, int(line)) for file, _, line in (site.rpartition(":") for site in told["sites"]))
    inside = Said(told["kind"] == "leak", told["text"], told["owner"], told["bytes_per_step"], told["phase"], sites,
                  told["holder"])
    if not looker:
        return Watched(inside, None, told["resident"], told["anonymous"])
    if looker.returncode or not lines:
        raise PlayError(f"{program.name}: plimsoll watch: status {looker.returncode}, {len(lines)} looks")
    found = json.loads(lines[-1])["verdict"]
    from_outside = Said(found["kind"] == "leak", found["text"], found["owner"])
    return Watched(inside, from_outside, told["resident"], told["anonymous"])
