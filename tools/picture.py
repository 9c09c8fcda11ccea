#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/picture.svg, the README's picture, from two real runs in cgroups of one size.

    tools/picture.py DATA [--limit-mib 768] [--out docs/picture.svg]

DATA is a `plimsoll synth cosir` directory larger than the limit. One run is `plimsoll train cosir`,
the other loads everything first (tests/budget/naive.py). Both are sampled from /proc while they run.
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.cgroup import MemoryCgroup

MIB = 1 << 20
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 300, 64, 16, 28, 40


def sample(group: MemoryCgroup, command: list) -> tuple[list[tuple[float, float]], int]:
    """Runs a command in the group; → ([(seconds, resident MiB)], exit status)."""
    began, points = time.monotonic(), []
    child = group.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None:
        try:
            status = pathlib.Path(f"/proc/{child.pid}/status").read_text()
            resident = next((int(line.split()[1]) for line in status.splitlines()
                             if line.startswith("VmRSS")), 0)
            if resident:
                points.append((time.monotonic() - began, resident / 1024))
        except OSError:
            pass
        time.sleep(0.02 if time.monotonic() - began < 5 else 0.25)
    return points, child.returncode


def draw(ours, naive, limit_mib: int, data_bytes: int) -> str:
    end = ours[-1][0]
    top = limit_mib * 1.25

    def at(seconds, mib):
        # The square root of time shows both the first second and the last minute.
        x = LEFT + (WIDTH - LEFT - RIGHT) * (seconds / end) ** 0.5
        return f"{x:.1f},{HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * mib / top:.1f}"

    def line(points, color, width=2.5):
        text = " ".join(at(*point) for point in points)
        return f'<polyline points="{text}" fill="none" stroke="{color}" stroke-width="{width}"/>'

    def words(x, y, text, color="#444", anchor="start", weight="normal"):
        return (f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}" '
                f'font-weight="{weight}">{text}</text>')

    limit_y = float(at(0, limit_mib).split(",")[1])
    naive_x, naive_y = map(float, at(naive[-1][0], limit_mib).split(","))
    ticks = [second for second in (1, 5, 15, 30, 60, 120, 300, 600) if second < end * 0.97]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        words(LEFT, 18, f"Training on {data_bytes / (1 << 30):.1f} GiB inside {limit_mib} MiB: resident memory",
              "#111", weight="bold"),
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{limit_y}" y2="{limit_y}" stroke="#b00" '
        'stroke-width="1.5" stroke-dasharray="6 4"/>',
        words(WIDTH - RIGHT, limit_y - 6, f"the limit: {limit_mib} MiB (cgroup, killer armed)", "#b00", "end"),
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}" stroke="#999"/>',
        line(ours, "#06c"), line(naive + [(naive[-1][0], limit_mib)], "#888"),
        words(naive_x, naive_y + 5, "✕", "#b00", "middle", "bold"),
        words(naive_x + 12, naive_y + 22, f"load everything: killed after {naive[-1][0]:.1f} s", "#666"),
        words(WIDTH - RIGHT, float(at(end, ours[-1][1]).split(",")[1]) - 8,
              f"plimsoll: peak {max(m for _, m in ours):.0f} MiB, finished", "#06c", "end", "bold"),
        *[words(at(second, 0).split(",")[0], HEIGHT - BOTTOM + 18, f"{second} s", anchor="middle")
          for second in ticks],
        *[words(LEFT - 8, float(at(0, mib).split(",")[1]) + 4, mib, anchor="end")
          for mib in range(0, int(top), 256)],
        words(8, TOP + 4, "MiB"), "</svg>"]
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("--limit-mib", type=int, default=768)
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build/release/bin/plimsoll")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs/picture.svg")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.data.parent) as scratch:
        with MemoryCgroup(options.limit_mib * MIB) as group:
            naive, status = sample(group, [sys.executable, ROOT / "tests/budget/naive.py", options.data])
            if status != -9:
                sys.exit(f"picture: the naive way ended with {status}, not killed: DATA is too small")
        with MemoryCgroup(options.limit_mib * MIB) as group:
            ours, status = sample(group, [options.program, "train", "cosir", "--data", options.data, "--out",
                                          f"{scratch}/run", "--epochs", "1", "--memory-limit",
                                          f"{options.limit_mib}MiB", "--json"])
            if status:
                sys.exit(f"picture: training ended with status {status}")
    size = sum(path.stat().st_size for path in options.data.rglob("*") if path.is_file())
    options.out.write_text(draw(ours, naive, options.limit_mib, size), encoding="utf-8")
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
