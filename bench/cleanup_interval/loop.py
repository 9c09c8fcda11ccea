# SPDX-License-Identifier: Apache-2.0
"""One loop over pictures that are decoded as they come: python loop.py FOLDER INTERVAL WORKERS SET_TO_NONE STEPS.

Its last line is JSON: what its steps took, what was resident, what was cleaned up, the digest of the model.
"""
import hashlib
import io
import json
import pathlib
import statistics
import sys
import threading
import time

import numpy as np
import torch
from PIL import Image

import plimsoll

PICTURES, BATCH, SIDE = 256, 8, 128
WARM = 5  # Steps.


class Pictures:
    """JPEG files of 512 to 1,024 pixels a side, which are drawn from a seed and kept encoded."""

    def __init__(self) -> None:
        random, self._files = np.random.default_rng(11), []
        for _ in range(PICTURES):
            height, width = random.integers(512, 1025, 2)
            small = random.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(small).resize((width, height)).save(file, "JPEG")
            self._files.append(file.getvalue())

    def __len__(self) -> int:
        return PICTURES

    def __getitem__(self, index: int):
        picture = Image.open(io.BytesIO(self._files[index])).convert("RGB").resize((SIDE, SIDE))
        pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1).float().div(255)
        return pixels, index % 10


def resident() -> int:
    """Bytes that are this process's own: anonymous and shared."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


class Most(threading.Thread):
    """Looks every 5 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self.start()

    def run(self) -> None:
        while True:
            self.bytes = max(self.bytes, resident())
            time.sleep(0.005)


def main(folder: str, interval: int, workers: int, set_to_none: bool, steps: int) -> None:
    data = Pictures()
    with plimsoll.Run(folder, memory_limit="8GiB", seed=5, compute_threads=1, deterministic=False) as run:
        torch.manual_seed(2)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 5, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 5, stride=2), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(1024, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run.track(model=model, optimizer=optimizer)
        most, spent, last = Most(), [], None
        batches = run.steps(run.loader(data, batch_size=BATCH, workers=workers), epochs=1000, progress=False,
                            commit_every_minutes=0, cleanup_every_n_steps=interval)
        for pixels, labels in batches:
            now = time.perf_counter()
            if last is not None:
                spent.append(now - last)
            last = now
            optimizer.zero_grad(set_to_none=set_to_none)
            torch.nn.functional.cross_entropy(model(pixels), labels).backward()
            optimizer.step()
            if len(spent) == steps + WARM:
                break
        digest = hashlib.sha256()
        for value in model.state_dict().values():
            digest.update(value.numpy().tobytes())
    lines = map(json.loads, (pathlib.Path(folder) / "events.jsonl").read_text().splitlines())
    cleaned = [one for one in lines if one["event"] == "cleanup"]
    print(json.dumps({
        "step_ms": 1e3 * statistics.mean(spent[WARM:]), "most_mib": most.bytes / 2**20, "cleanups": len(cleaned),
        "cleanup_ms": 1e3 * statistics.mean([one["seconds"] for one in cleaned] or [0.0]),
        "freed_mib": statistics.mean([one["freed_bytes"] / 2**20 for one in cleaned] or [0.0]),
        "digest": digest.hexdigest()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1", int(sys.argv[5]))
