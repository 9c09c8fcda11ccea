# SPDX-License-Identifier: Apache-2.0
"""One training loop in a plimsoll.Run with somebody looking on: python loop.py HOW KEPT FOLDER STEPS WINDOW_STEPS.

HOW is bare, watch (plimsoll.Watch, a phase in each step, its verdict asked for once a window) or memray; scalene runs
the loop bare. KEPT bytes are kept of each step: a leak, so that sites and holders are looked for. Half of a step parses
JSON, which is many small objects; half is a transformer's.
"""
import hashlib
import json
import pathlib
import resource
import sys
import time
from collections.abc import Callable

import torch

import plimsoll

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from bench.loop_turns import Turns

TEXTS, MESSAGES, BATCH, LENGTH, WIDTH = 256, 60, 24, 24, 192


class Timed:
    """What calls took: of the wall clock, of the processor, and as a stall that is theirs. Where the kernel took the
    processor away meanwhile, a stall is what the call had of it."""

    def __init__(self) -> None:
        self.wall, self.processor, self.stall, self.seconds = 0.0, 0.0, 0.0, 0.0

    def __call__(self, call: Callable[[], object]) -> float:
        """Seconds of the processor that it took."""
        switches, processor, wall = _switches(), time.thread_time(), time.perf_counter()
        call()
        wall, processor = time.perf_counter() - wall, time.thread_time() - processor
        stall = wall if _switches() == switches else processor
        self.wall, self.processor, self.stall = (
            max(self.wall, wall), max(self.processor, processor), max(self.stall, stall))
        self.seconds += processor
        return processor


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


class Bare:
    """Nobody looks on; the calls are timed as if somebody did, so that timing costs both loops the same."""

    def __init__(self, window_steps: int) -> None:
        self.timed, self._window_steps = Timed(), window_steps

    def begin(self) -> None:
        """Before a step."""
        self.timed(self.enter)

    def made(self, step: int) -> None:
        """After that step."""
        self.timed(self.leave)
        self.timed(self.step)
        if step % self._window_steps == 0:
            self.timed(self.verdict)

    def enter(self) -> None:
        pass

    leave = step = verdict = enter

    def said(self) -> dict:
        return {}


class Watched(Bare):
    def __init__(self, window_steps: int) -> None:
        super().__init__(window_steps)
        self._watch = plimsoll.Watch(window_steps=window_steps)
        self._searched = 0.0

    def enter(self) -> None:
        self._phase = self._watch.phase("train")
        self._phase.__enter__()

    def leave(self) -> None:
        self._phase.__exit__(None, None, None)

    def step(self) -> None:
        self._watch.step()

    def verdict(self) -> None:
        self._watch.verdict(wait=False)

    def made(self, step: int) -> None:
        before, searches = self.timed.seconds, self._watch.searching
        super().made(step)
        if searches or self._watch.searching:
            self._searched += self.timed.seconds - before

    def said(self) -> dict:
        return {"kind": self._watch.verdict().kind, "stall_ms": 1e3 * self.timed.stall,
                "stall_wall_ms": 1e3 * self.timed.wall, "stall_cpu_ms": 1e3 * self.timed.processor,
                "calls_ms": 1e3 * self.timed.seconds, "search_ms": 1e3 * self._searched}


class Memray(Bare):
    def __init__(self, window_steps: int, out: pathlib.Path) -> None:
        import memray

        super().__init__(window_steps)
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
        watcher = Memray(window_steps, folder / "capture") if how == "memray" else \
            {"bare": Bare, "watch": Watched}[how](window_steps)
        turns = Turns(steps)
        for step in range(steps):
            watcher.begin()
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
            watcher.made(step + 1)
            turns.made()
        digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.state_dict().values()))
        print(json.dumps({"digest": digest.hexdigest(), **watcher.said()}), flush=True)


def hash_of(word: str) -> int:
    """The same in every process, unlike hash()."""
    return sum(word.encode()) % 256


if __name__ == "__main__":
    main()
