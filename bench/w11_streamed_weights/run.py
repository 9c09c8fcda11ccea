#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""LoRA steps of a transformer whose frozen blocks stream from disk, beside the same model in memory."""
import argparse
import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

import torch
from torch.utils.checkpoint import checkpoint

import plimsoll

BAR = 0.95
RANK = 16


class Adapted(torch.nn.Module):
    """A frozen linear map in bfloat16, and a trained one of low rank beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(inputs, RANK, bias=False), torch.nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x.float())).to(x.dtype)


class Block(torch.nn.Module):
    """Attention and a gated feed-forward net, as in Llama."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ParameterList(torch.nn.RMSNorm(width, dtype=torch.bfloat16).weight for _ in range(2))
        self.norms.requires_grad_(False)
        self.query, self.value = Adapted(width, width), Adapted(width, width)
        wide = 11 * width // 4
        self.key, self.out, self.gate, self.rise, self.fall = (
            torch.nn.Linear(*shape, bias=False, dtype=torch.bfloat16).requires_grad_(False)
            for shape in ((width, width), (width, width), (width, wide), (width, wide), (wide, width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.rms_norm(x, x.shape[-1:], self.norms[0])
        query, key, value = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                             for part in (self.query, self.key, self.value))
        y = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = torch.nn.functional.rms_norm(x, x.shape[-1:], self.norms[1])
        return x + self.fall(torch.nn.functional.silu(self.gate(y)) * self.rise(y))


class Net(torch.nn.Module):
    def __init__(self, blocks: int, width: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = torch.nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


class Loop:
    """A model, its optimizer, and the times of its steps."""

    def __init__(self, model: Net) -> None:
        self.model, self.seconds = model, []
        self.losses: list[float] = []
        self._trained = [one for one in model.parameters() if one.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=1e-3, fused=True)

    def step(self, x: torch.Tensor) -> None:
        began = time.perf_counter()
        loss = (self.model(x).float() - 1).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - began)

    def bits(self) -> list[torch.Tensor]:
        return self._trained


def made(blocks: int, width: int, recompute: bool) -> Net:
    torch.manual_seed(1)
    return Net(blocks, width, recompute)


def measured(options: argparse.Namespace, folder: pathlib.Path) -> dict:
    with plimsoll.Governor("16GiB", foreign_bytes="512MiB"):
        streamed = Loop(made(options.blocks, options.width, False))
        weights = plimsoll.stream_frozen(streamed.model, weights="streamed", slots=options.slots, directory=folder)
        resident = Loop(made(options.blocks, options.width, True))
        generator = torch.Generator().manual_seed(2)
        waited = 0.0
        for step in range(options.steps + 1):
            x = torch.randn(1, options.tokens, options.width, generator=generator).bfloat16()
            for loop in (streamed, resident) if step % 2 else (resident, streamed):
                loop.step(x)
            waited = waited if step else weights.stall_seconds  # The first step is not counted.
        waited = weights.stall_seconds - waited
        if streamed.losses != resident.losses or not all(map(torch.equal, streamed.bits(), resident.bits())):
            sys.exit("w11_streamed_weights: streamed weights gave other bits than resident ones")
    times = [statistics.median(loop.seconds[1:]) for loop in (streamed, resident)]
    return {"value": round(times[1] / times[0], 3), "peers": {
        "streamed_seconds": round(times[0], 2), "resident_seconds": round(times[1], 2),
        "stall_seconds_a_step": round(waited / options.steps, 4), "weights_mib": weights.bytes >> 20,
        "ring_mib": weights.ring_bytes >> 20, "tokens": options.tokens, "blocks": options.blocks, "width": options.width,
        "slots": options.slots, "steps": options.steps, "threads": options.threads}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="1 MiB of weights; only the answer counts")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256, help="in a step")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--directory", type=pathlib.Path, help="where to put the weights; default: build")
    options = parser.parse_args()
    if options.smoke:
        options.blocks, options.width, options.tokens, options.steps, options.threads = 4, 128, 32, 2, 1
    torch.set_num_threads(options.threads)
    where = options.directory or pathlib.Path(__file__).resolve().parents[2] / "build"
    where.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="w11_streamed_weights-", dir=where))
    try:
        result = {"name": "w11_streamed_weights", "unit": "x speed", "bar": BAR, **measured(options, folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result["pass"] = options.smoke or result["value"] >= BAR
    print(json.dumps(result))
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
