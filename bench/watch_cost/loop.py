# SPDX-License-Identifier: Apache-2.0
"""One training loop in a plimsoll.Run with somebody looking on: python loop.py HOW KEPT FOLDER STEPS WINDOW_STEPS.

HOW is bare, watch (plimsoll.Watch, a phase in each step, its verdict asked for once a window) or memray; scalene runs
the loop bare. KEPT bytes are kept of each step: a leak, so that sites and holders are looked for. Half of a step parses
JSON, which is many small objects; half is a transformer's. TURN steps are made for each line of standard input.
WINDOW_STEPS are those of the watch: after eight windows there is a verdict, and what it suspects is looked into before.
"""
import contextlib
import hashlib
import json
import pathlib
import sys
import time

import torch

import plimsoll

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from bench.loop_turns import Turns  # noqa: E402

TURN = 4  # Steps.
TEXTS, MESSAGES, BATCH, LENGTH, WIDTH = 256, 60, 24, 24, 192


class Bare:
    """Nobody looks on."""

    def step(self, made: int) -> contextlib.AbstractContextManager:
        """What goes around the step of that number."""
        return contextlib.nullcontext()

    def said(self) -> dict:
        return {}


class Watched(Bare):
    def __init__(self, window_steps: int) -> None:
        self._watch = plimsoll.Watch(window_steps=window_steps)
        self._window_steps = window_steps
        self._wall: list[float] = []  # Seconds that calls took, and of the processor.
        self._processor: list[float] = []

    @contextlib.contextmanager
    def step(self, made: int):
        with self._timed():
            phase = self._watch.phase("train")
            phase.__enter__()
        yield
        with self._timed():
            phase.__exit__(None, None, None)
        with self._timed():
            self._watch.step()
        if made % self._window_steps == 0:
            with self._timed():
                self._watch.verdict(wait=False)

    @contextlib.contextmanager
    def _timed(self):
        wall, processor = time.perf_counter(), time.thread_time()
        yield
        self._wall.append(time.perf_counter() - wall)
        self._processor.append(time.thread_time() - processor)

    def said(self) -> dict:
        return {"kind": self._watch.verdict().kind, "stall_ms": 1e3 * max(self._wall),
                "stall_cpu_ms": 1e3 * max(self._processor)}


class Memray(Bare):
    def __init__(self, out: pathlib.Path) -> None:
        import memray

        out.unlink(missing_ok=True)
        self._tracker = memray.Tracker(out)
        self._tracker.__enter__()

    def said(self) -> dict:
        self._tracker.__exit__(None, None, None)
        return {}


def texts() -> list[str]:
    return [json.dumps([{"role": "user", "content": f"{text} {k} " + "so it goes " * 4} for k in range(MESSAGES)])
            for text in range(TEXTS)]


def made_model():
    torch.manual_seed(5)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(256, WIDTH), torch.nn.TransformerEncoder(layer, 2),
                                torch.nn.Linear(WIDTH, 256))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def main() -> None:
    how, folder = sys.argv[1], pathlib.Path(sys.argv[3])
    kept_bytes, steps, window_steps = (int(sys.argv[at]) for at in (2, 4, 5))
    torch.set_num_threads(1)
    lines, kept = texts(), []
    with plimsoll.Governor("4GiB"):
        model, optimizer = made_model()
        watcher = {"bare": Bare, "watch": lambda: Watched(window_steps),
                   "memray": lambda: Memray(folder / "capture")}[how]()
        turns = Turns(TURN)
        for step in range(steps):
            with watcher.step(step + 1):
                words = []
                for text in range(BATCH):
                    chat = json.loads(lines[(step * BATCH + text) % TEXTS])
                    spoken = [word for message in chat for word in message["content"].split()]
                    words.append([hash_of(word) for word in spoken[:LENGTH]])
                batch = torch.tensor(words)
                loss = torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(1, 1).flatten())
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                if kept_bytes:
                    kept.append(bytearray(kept_bytes))
            turns.made()
        digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.state_dict().values()))
        print(json.dumps({"digest": digest.hexdigest(), **watcher.said()}), flush=True)


def hash_of(word: str) -> int:
    """The same in every process, unlike hash()."""
    return sum(word.encode()) % 256


if __name__ == "__main__":
    main()
