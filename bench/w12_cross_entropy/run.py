#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""plimsoll.linear_cross_entropy() beside torch's linear and cross_entropy: peak memory and time."""
import argparse
import ctypes
import json
import statistics
import sys
import time

import torch

import plimsoll

BAR_PEAK, BAR_TIME = 0.13, 0.6


def chunked(hidden, weight, labels):
    return plimsoll.linear_cross_entropy(hidden, weight, labels)


def plain(hidden, weight, labels):
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight).float(), labels)


def inputs(tokens: int, vocabulary: int, features: int, trained: bool):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, features, generator=generator).to(torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, features, generator=generator) * 0.03).to(torch.bfloat16)
    return hidden, weight.requires_grad_(trained), torch.randint(vocabulary, (tokens,), generator=generator)


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def measured(loss_of, hidden, weight, labels) -> tuple[float, int]:
    """Seconds of forward and backward, and the bytes that they took at their peak beside what was there."""
    hidden.grad = weight.grad = None
    ctypes.CDLL(None).malloc_trim(0)  # What an earlier measurement freed would be taken again unseen.
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # VmHWM begins again.
    before, began = resident("VmRSS"), time.perf_counter()
    loss_of(hidden, weight, labels).backward()
    return time.perf_counter() - began, resident("VmHWM") - before


def check(hidden, weight, labels) -> dict[str, float]:
    """Distance to float64, relative, of the loss and of each gradient: ours is at most 1.5 × torch's."""
    found = {}
    for name, loss_of in (("chunked", chunked), ("plain", plain)):
        hidden.grad = weight.grad = None
        loss = loss_of(hidden, weight, labels)
        loss.backward()
        found[name] = [loss.detach(), hidden.grad.clone(), *([weight.grad.clone()] if weight.requires_grad else [])]
    wide = [one.detach().double().requires_grad_(one.requires_grad) for one in (hidden, weight)]
    true = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*wide), labels)
    true.backward()
    exact = [true.detach(), wide[0].grad, *([wide[1].grad] if weight.requires_grad else [])]
    errors = {name: [float((got.double() - one).norm() / one.norm()) for got, one in zip(values, exact)]
              for name, values in found.items()}
    for what, ours, theirs in zip(("loss", "gradient of hidden", "gradient of weight"), errors["chunked"], errors["plain"]):
        if ours > 1.5 * theirs + 1e-6:
            sys.exit(f"w12_cross_entropy: {what} is {ours:.2g} off in float64's measure, torch's {theirs:.2g}")
    return {"error_of_gradient": errors["chunked"][1], "plain_error_of_gradient": errors["plain"][1]}


def compared(tokens: int, vocabulary: int, features: int, trained: bool, pairs: int) -> dict[str, float]:
    """Medians over interleaved pairs, ours by torch's."""
    ours, theirs, given = [], [], inputs(tokens, vocabulary, features, trained)
    for pair in range(pairs + 1):
        for loss_of, into in ((chunked, ours), (plain, theirs)) if pair % 2 else ((plain, theirs), (chunked, ours)):
            into.append(measured(loss_of, *given))
    seconds, peaks = ([statistics.median(one[k] for one in found[1:]) for found in (ours, theirs)] for k in (0, 1))
    return {"time_ratio": round(seconds[0] / seconds[1], 3), "peak_ratio": round(peaks[0] / peaks[1], 4),
            "seconds": round(seconds[0], 2), "plain_seconds": round(seconds[1], 2),
            "peak_mib": round(peaks[0] / 2**20), "plain_peak_mib": round(peaks[1] / 2**20)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a vocabulary of 20,000; only the answer counts")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--features", type=int, default=896)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--directory", help="not used: nothing is written")
    options = parser.parse_args()
    if options.smoke:
        options.tokens, options.vocabulary, options.features, options.pairs = 1024, 20_000, 16, 1
        options.threads = 1
    torch.set_num_threads(options.threads)
    errors = [check(*inputs(min(options.tokens, 640), min(options.vocabulary, 20_000), options.features, trained))
              for trained in (False, True)]
    shape = options.tokens, options.vocabulary, options.features
    frozen = compared(*shape, trained=False, pairs=options.pairs)
    trained = compared(*shape, trained=True, pairs=1 if options.smoke else 2)
    result = {
        "name": "w12_cross_entropy", "value": frozen["peak_ratio"], "unit": "x peak", "bar": BAR_PEAK,
        "pass": options.smoke or (frozen["peak_ratio"] <= BAR_PEAK and frozen["time_ratio"] <= BAR_TIME),
        "time_bar": BAR_TIME,
        "peers": {**frozen, "trained": trained, "tokens": options.tokens, "vocabulary": options.vocabulary,
                  "features": options.features, "threads": options.threads, "pairs": options.pairs,
                  **{name: float(f"{value:.3g}") for name, value in errors[1].items()}}}
    print(json.dumps(result))
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
