#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""arena_resident: peak resident bytes and speed of training steps, tensor arena against glibc's heap;
and what tracing a step costs."""
import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "w8_planner"))

PEAK_BAR, SPEED_BAR, TRACE_BAR = 0.85, 1.03, 1.03
MIB = 1 << 20


def status_bytes(key: str) -> int:
    for line in open("/proc/self/status", encoding="utf-8"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def one_process(arguments: list[str]) -> None:
    """child WAY MODEL ROWS STEPS: trains, and prints peak, seconds a step and the last loss."""
    way, model, rows, steps = arguments[0], arguments[1], int(arguments[2]), int(arguments[3])
    import torch

    import plimsoll
    from steps import STEPS

    torch.set_num_threads(2)
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    governor = plimsoll.Governor("8GiB") if way == "arena" else None
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")  # VmHWM begins again from here.
    before = status_bytes("VmRSS")
    step = STEPS[model]("plain")
    losses, seconds = [], []
    plain_loss = step.loss

    def loss(rows):
        value = plain_loss(rows)
        losses.append(value.item())
        return value

    step.loss = loss
    for _ in range(steps):
        begin = time.perf_counter()
        step(rows)
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"peak": status_bytes("VmHWM") - before, "loss": losses[-1],
                      "seconds": statistics.median(seconds[2:])}))
    del governor


def pairs_of(model: str, rows: int, steps: int, count: int) -> dict:
    peaks, speeds = [], []
    for _ in range(count):
        seen = {}
        for way in ("plain", "arena"):
            out = subprocess.run([sys.executable, __file__, "child", way, model, str(rows),
                                  str(steps)], text=True, stdout=subprocess.PIPE, check=True,
                                 env=os.environ)
            seen[way] = json.loads(out.stdout.strip().splitlines()[-1])
        if seen["plain"]["loss"] != seen["arena"]["loss"]:
            sys.exit(f"arena_resident: {model}: losses {seen['plain']['loss']} and "
                     f"{seen['arena']['loss']} differ")
        peaks.append(seen["arena"]["peak"] / seen["plain"]["peak"])
        speeds.append(seen["arena"]["seconds"] / seen["plain"]["seconds"])
    return {"peak": round(statistics.median(peaks), 3), "time": round(statistics.median(speeds), 3),
            "plain_peak_mib": seen["plain"]["peak"] // MIB}


def tracing_cost(pairs: int) -> tuple[float, float]:
    """Mean ratio of traced ÷ untraced steps, and its 95 % bound."""
    import torch

    import plimsoll
    from plimsoll import _torch as extension
    from plimsoll.training._plan import attempted
    from steps import STEPS

    torch.set_num_threads(2)
    governor = plimsoll.Governor("8GiB")
    step = STEPS["transformer"]("plain")
    attempt = attempted(step)
    step(64)
    ratios = []
    traces = extension.StepTraces()
    for k in range(pairs + 2):
        extension.purge()
        step(64)  # As a trace does: a step of the same size right before.
        extension.purge()
        begin = time.perf_counter()
        attempt(64)
        plain = time.perf_counter() - begin
        traced = traces.verify(step.extent(64), attempt)["seconds"]
        if k >= 2:
            ratios.append(traced / plain)
    del governor
    spread = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.mean(ratios), statistics.mean(ratios) + 1.96 * spread


def main() -> int:
    if sys.argv[1:2] == ["child"]:
        one_process(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--smoke", action="store_true", help="seconds; only the answer counts")
    options = parser.parse_args()
    pairs, steps = (1, 4) if options.smoke else (5, 12)
    found = {"transformer": pairs_of("transformer", 48 if options.smoke else 192, steps, pairs),
             "cnn_bn": pairs_of("cnn_bn", 64 if options.smoke else 384, steps, pairs)}
    mean, bound = tracing_cost(4 if options.smoke else 30)
    for model, row in found.items():
        print(f"{model:12} peak {row['peak']:.3f} of glibc's ({row['plain_peak_mib']} MiB), "
              f"time {row['time']:.3f}")
    print(f"tracing      {mean:.4f} of the time, 95 % bound {bound:.4f}")
    worst = max(row["peak"] for row in found.values())
    slowest = max(row["time"] for row in found.values())
    good = worst <= PEAK_BAR and slowest <= SPEED_BAR and bound <= TRACE_BAR
    print(json.dumps({"name": "arena_resident", "value": worst, "unit": "of glibc's peak",
                      "bar": PEAK_BAR, "pass": options.smoke or good,
                      "peers": found, "time": slowest, "time_bar": SPEED_BAR,
                      "tracing": round(mean, 4), "tracing_bound": round(bound, 4),
                      "tracing_bar": TRACE_BAR}))
    return 0 if options.smoke or good else 1


if __name__ == "__main__":
    sys.exit(main())
