# SPDX-License-Identifier: Apache-2.0
"""Made-up CAN traffic: a bus of periodic messages, and floods on it, as CSV files."""
import csv
import pathlib
import random


def write_traffic(path: pathlib.Path, seed: int, frames: int, block: int = 0) -> None:
    """`frames` rows with the columns of can-train-and-test. With `block`, every other `block` rows
    are flooded: half of them are frames of id 0 with an empty-looking payload, labelled attacks."""
    numbers = random.Random(seed)
    ids = [0x100 + 0x21 * k for k in range(12)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["timestamp", "arbitration_id", "data_field", "attack"])
        for frame in range(frames):
            now = f"{0.001 * (frame + 1):.4f}"
            if block and (frame // block) % 2 == 1 and numbers.random() < 0.5:
                rows.writerow([now, "000", "0" * 16, 1])
                continue
            one = ids[(frame + numbers.randrange(3)) % len(ids)]
            noise = [numbers.randrange(40) for _ in range(6)]
            rows.writerow([now, f"{one:03X}", bytes([one & 255, frame & 255, *noise]).hex().upper(), 0])
