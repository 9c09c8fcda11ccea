# SPDX-License-Identifier: Apache-2.0
"""Made-up CAN traffic: a bus of periodic messages, and floods on it, as CSV files."""
import csv
import pathlib
import random

BLOCK_ROWS = 200_000
IDS = 48

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


def write_block(seed: int, flooded_share: float) -> list[str]:
    """The rows of one block without their times: id, payload but for its last byte, label."""
    numbers = random.Random(seed)
    payloads = [[f"{numbers.getrandbits(56):014X}" for _ in range(64)] for _ in range(IDS)]
    rows = []
    for row in range(BLOCK_ROWS):
        flooded = row % 20_000 >= 20_000 * (1 - flooded_share) and numbers.random() < 0.4
        one = 0 if flooded else int(IDS * numbers.random() ** 2)
        rows.append((f"{0x80 + 7 * one:03X}", "0" * 14 if flooded else
                     payloads[one][numbers.randrange(64)], int(flooded)))
    return [f",{one},{payload}{{:02X}},{label}\n" for one, payload, label in rows]


def write_repeated_traffic(path: pathlib.Path, seed: int, repeats: int, flooded_share: float = 0.25) -> None:
    """A block of BLOCK_ROWS frames again and again, its times and last bytes drawn anew by (seed,
    repetition); about `flooded_share` of the windows have attacks."""
    block = write_block(seed, flooded_share)
    path.parent.mkdir(parents=True)
    with open(path, "w", encoding="ascii") as file:
        file.write("timestamp,arbitration_id,data_field,attack\n")
        for repeat in range(repeats):
            numbers = random.Random(seed * 1_000_003 + repeat)
            jitter = numbers.randbytes(len(block))
            begin = repeat * len(block)
            file.write("".join([f"{(begin + k + byte / 512) * 5e-4:.6f}" + rest.format(byte)
                                for k, (rest, byte) in enumerate(zip(block, jitter))]))
