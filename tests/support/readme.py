# SPDX-License-Identifier: Apache-2.0
"""README.md's Python block and three of docs/guide as printed, and the bits in which two of them end.

For tests/python/test_readme.py, tests/python/test_wheel.py and tools/demo.py.
"""
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUN, PIECES, PLANS = ("README.md", 0), ("docs/guide/rows.md", 0), ("docs/guide/batch.md", 1)  # A page, and which of its blocks.
RUN_STEPS = 96
COMMIT_EVERY = 10

_DIGEST = """
import hashlib
digest = hashlib.sha256()
def add(value):
    if isinstance(value, torch.Tensor):
        digest.update(value.detach().numpy().tobytes())
    elif isinstance(value, dict):
        for key in value:
            digest.update(repr(key).encode())
            add(value[key])
    elif isinstance(value, list):
        for one in value:
            add(one)
    else:
        digest.update(repr(value).encode())
for part in ({parts}):
    add(part)
with plimsoll.Governor("4GiB") as governor:
    again = plimsoll.EmbeddingStore.open(governor, "{table}", rows={rows})
    assert again.last_commit == {step}
    again.scan(lambda ids, sequences, values: [digest.update(part.tobytes()) for part in (ids, sequences, values)])
print("bits", digest.hexdigest())
"""
# Go behind a block: print "bits" and a SHA-256 of all that a resumption has to bring back.
RUN_BITS = _DIGEST.format(parts="model.state_dict(), optimizer.state_dict(), schedule.state_dict(), torch.get_rng_state()",
                          table="quickstart/run/embeddings/items", rows=1000, step=RUN_STEPS)
PIECES_BITS = _DIGEST.format(parts="model.state_dict(), optimizer.state_dict(), torch.get_rng_state()",
                             table="quickstart/items", rows="items", step=300)


def block(of: tuple[str, int]) -> str:
    """A Python block, as its page prints it."""
    page, number = of
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)[number]


def run_program() -> str:
    """The first block and its bits, with a commit every COMMIT_EVERY steps: it is done within seconds."""
    program = block(RUN)
    assert "commit_every_minutes=5" in program
    return program.replace("commit_every_minutes=5", f"commit_every_steps={COMMIT_EVERY}") + RUN_BITS


def live(folder: pathlib.Path, environment: dict[str, str] | None = None,
         steps: int = 0) -> subprocess.CompletedProcess:
    """run_program() in `folder`, in a process of its own. steps: kill -9 once it has logged that many."""
    folder.mkdir(exist_ok=True)
    with subprocess.Popen([sys.executable, "-c", run_program()], cwd=folder, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env={**os.environ, **(environment or {})}) as process:
        begun = logged(folder)
        while steps and process.poll() is None:
            if logged(folder) - begun >= steps:
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(0.002)
        out, error = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def logged(folder: pathlib.Path) -> int:
    """Steps that the run in `folder` has logged in all its lives."""
    try:
        return (folder / "quickstart" / "run" / "events.jsonl").read_text(encoding="utf-8").count('"event":"step"')
    except FileNotFoundError:
        return 0


def bits_of(done: subprocess.CompletedProcess) -> str:
    """Fails where the program did not come to its end."""
    assert done.returncode == 0, done.stderr
    found = re.search(r"^bits (\w{64})$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return found.group(1)
