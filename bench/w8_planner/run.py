#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Peaks of whole training steps, predicted from four small ones and then measured.

Every held-out size is predicted before it runs. Printed beside it: what a straight line through the
peaks of 8 and 16 rows says, and what KD-GAT's formula says (parameters, gradients, states, teacher,
activations of one row as 2.5 × the outputs of its modules, and raw input bytes for every further
row).
"""
import argparse
import json
import statistics
import sys

import torch

import plimsoll
from plimsoll import _torch as extension
from plimsoll.training._plan import attempted
from steps import STEPS, WAYS

TRACED = (16, 24, 32, 48)
HELD_OUT = (18, 27, 37, 60, 75, 96, 128, 150, 192, 200, 256)
SMOKE = (37, 64)
MIB = 1 << 20


def original_formula(step, rows: int) -> float:
    """KD-GAT's compute_batch_size in mode "measured": its terms at a batch of `rows`."""
    parameters = sum(p.numel() * p.element_size() for p in step.model.parameters())
    teacher = sum(p.numel() * p.element_size() for p in step.teacher.parameters()) \
        if step.teacher is not None else 0
    outputs = 0

    def count(_module, _inputs, output):
        nonlocal outputs
        for one in output if isinstance(output, tuple) else (output,):
            outputs += one.numel() * one.element_size() if torch.is_tensor(one) else 0

    hooks = [part.register_forward_hook(count) for part in step.model.modules()]
    step.model.eval()  # As theirs: forward only, batch statistics off.
    with torch.no_grad():
        try:
            step.loss(2)
            outputs //= 2
        except NotImplementedError:  # cosir's loss is not a module's forward.
            outputs = 4 * 128 * 8
    step.model.train()
    for hook in hooks:
        hook.remove()
    return 4 * parameters + teacher + 2.5 * outputs + rows * step.row_bytes


def judge(name: str, way: str, sizes) -> list[dict]:
    step = STEPS[name](way)
    attempt = attempted(step)
    attempt(8)
    traces = extension.StepTraces()
    ends = {rows: extension.StepTraces().add(step.extent(rows), attempt)["live_peak_bytes"]
            for rows in (8, 16)}
    slope = (ends[16] - ends[8]) / 8
    for rows in TRACED:
        traces.add(step.extent(rows), attempt)
    cases = []
    for rows in sizes:
        said = traces.predict(step.extent(rows))
        truth = traces.verify(step.extent(rows), attempt)
        cases.append({
            "model": name, "way": way, "rows": rows, "truth": truth["live_peak_bytes"],
            "predicted": said["peak_bytes"], "bound": said["bound_bytes"],
            "exact": truth["exact"], "leased": truth["leased_peak_bytes"],
            "leased_bound": said["leased_bytes"], "line": ends[8] + slope * (rows - 8),
            "original": original_formula(step, rows),
        })
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--smoke", action="store_true", help="two sizes a case, plain steps only")
    parser.add_argument("--only", choices=STEPS, help="one model")
    parser.add_argument("--sizes", type=lambda text: [int(s) for s in text.split(",")],
                        help="other held-out sizes: 300,512")
    options = parser.parse_args()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    governor = plimsoll.Governor("8GiB")
    sizes = options.sizes or (SMOKE if options.smoke else HELD_OUT)
    cases = []
    print(f"{'':26}{'cases':>6}{'exact':>7}{'error if exact':>16}{'below truth':>13}"
          f"{'bound/truth':>13}{'line':>9}{'original':>10}")
    for name in [options.only] if options.only else STEPS:
        for way in WAYS[:1] if options.smoke else WAYS:
            some = judge(name, way, sizes)
            cases += some
            print(line_of(f"{name}, {way}", some), flush=True)
    print(line_of("all", cases))
    del governor
    exact = [c for c in cases if c["exact"]]
    wrong = sum(c["predicted"] != c["truth"] for c in exact)
    below = sum((c["predicted"] if c["exact"] else c["bound"]) < c["truth"]
                or c["leased_bound"] < c["leased"] for c in cases)
    enough = len(cases) >= (10 if options.smoke or options.only or options.sizes else 200)
    result = {
        "name": "w8_planner", "value": below + wrong, "unit": "wrong answers",
        "bar": 0, "pass": wrong == 0 and below == 0 and enough,
        "cases": len(cases), "exact_cases": len(exact), "exact_with_error": wrong,
        "below_truth": below,
        "bound_over_truth": round(statistics.median(c["bound"] / c["truth"] for c in cases), 4),
        "peers": {"straight line, worst": round(worst(cases, "line"), 4),
                  "original formula, worst": round(worst(cases, "original"), 4),
                  "straight line, below truth": sum(c["line"] < c["truth"] for c in cases),
                  "original formula, below truth": sum(c["original"] < c["truth"] for c in cases)},
        "torch": torch.__version__, "seed": 3,
    }
    print(json.dumps(result))
    return 0 if result["pass"] else 1


def worst(cases: list[dict], key: str) -> float:
    """The relative error furthest from nothing."""
    return max(((c[key] - c["truth"]) / c["truth"] for c in cases), key=abs)


def line_of(name: str, cases: list[dict]) -> str:
    exact = [c for c in cases if c["exact"]]
    error = max((abs(c["predicted"] - c["truth"]) for c in exact), default=0)
    below = sum((c["predicted"] if c["exact"] else c["bound"]) < c["truth"] for c in cases)
    bound = statistics.median(c["bound"] / c["truth"] for c in cases)
    return (f"{name:26}{len(cases):6}{len(exact):7}{error:14} B{below:13}{bound:13.3f}"
            f"{100 * worst(cases, 'line'):8.1f}%{100 * worst(cases, 'original'):9.1f}%")


if __name__ == "__main__":
    sys.exit(main())
