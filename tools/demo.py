#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `make demo` runs, with nothing to download.

1. Trains `cosir` on data/coco-mini (features of real photographs and captions, split by image) for
   five seeds and prints recall and mean rank on held-out images before and after.
2. Makes more than 4 GiB of synthetic pairs and trains one epoch on them inside a real memory cgroup
   of 768 MiB, with the kernel's killer armed.
3. Runs README.md's first Python loop with a commit every 10 steps: once undisturbed, once ended with kill -9
   behind a random step and started again. Compares every bit of model, optimizer, schedule, random state
   and rows.
4. Fine-tunes a language model on real chats (data/gsm8k-mini) inside a memory cgroup in which loading its weights is
   killed; merges the adapters and loads what comes of it.
Exit status 0 when all did what they claim. Output stays in demo/, which may be deleted.
"""
import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support import readme
from tests.support.cgroup import MemoryCgroup

MIB, GIB = 1 << 20, 1 << 30
LIMIT_MIB = 768
COCO = ROOT / "data" / "coco-mini"


def call(program, *arguments) -> dict:
    """Runs the program with its progress on the terminal; returns its last line, parsed."""
    done = subprocess.run([program, *map(str, arguments)], stdout=subprocess.PIPE, text=True,
                          check=False)
    if done.returncode:
        sys.exit(f"demo: plimsoll {' '.join(map(str, arguments))}: status {done.returncode}")
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


def row(*cells) -> str:
    return "  ".join(f"{cell:>12}" for cell in cells)


def real_input(program, out: pathlib.Path, seeds: int) -> bool:
    """Part 1. True when every seed's held-out mean rank is below chance, ≤ 0.75 × on average."""
    data = out / "coco-mini"
    print("== real input: photographs and captions of data/coco-mini, held out by image ==",
          flush=True)
    call(program, "import", "cosir", "--image-features", COCO / "image", "--text-features",
         COCO / "text", "--ids", COCO / "ids.npy", "--groups", COCO / "groups.npy", "--out", data)
    table, ratios = [], []
    for seed in range(seeds):
        summary = call(program, "train", "cosir", "--data", data, "--out", out / f"coco-{seed}",
                       "--config", COCO / "cosir.toml", "--seed", seed, "--memory-limit",
                       f"{LIMIT_MIB}MiB", "--json")
        before, after = summary["recall_before"], summary["recall"]
        chance = after["chance"]["t2i"]
        ratios.append(after["raw"]["t2i"]["mean_rank"] / chance)
        for name, recall in (("before", before), ("after", after)):
            raw = recall["raw"]["t2i"]
            table.append(row(seed, name, f"{raw['r1']:.1f}", f"{raw['r5']:.1f}",
                             f"{raw['r10']:.1f}", f"{raw['mean_rank']:.2f}", f"{chance:.2f}"))
    print("\nheld-out caption → image, without the trained conditions (raw)")
    print(row("seed", "training", "R@1 %", "R@5 %", "R@10 %", "mean rank", "chance"))
    print("\n".join(table))
    average = sum(ratios) / len(ratios)
    good = all(ratio < 1 for ratio in ratios) and average <= 0.75
    print(f"mean rank ÷ chance: {average:.2f} on average, {max(ratios):.2f} at worst "
          f"({'as claimed: ≤ 0.75, each < 1' if good else 'NOT as claimed'})\n", flush=True)
    return good


def over_limit(program, out: pathlib.Path, rows: int) -> bool:
    """Part 2. True when the run finished inside the cgroup with its peak below the limit."""
    data, run = out / "large", out / "large-run"
    print(f"== {rows:,} synthetic pairs inside {LIMIT_MIB} MiB ==", flush=True)
    if shutil.disk_usage(out).free < rows * 4096 * 1.5:
        sys.exit(f"demo: needs {rows * 4096 * 1.5 / GIB:.0f} GiB of free disk in {out}")
    call(program, "synth", "cosir", "--rows", rows, "--out", data)
    train = [program, "train", "cosir", "--data", data, "--out", run, "--epochs", "1",
             "--memory-limit", f"{LIMIT_MIB}MiB", "--json"]
    reason = MemoryCgroup.why_not()
    if reason:
        print(f"no cgroup: {reason}; running without the kernel's limit")
        summary = call(program, *train[1:])
        peak, kills, held = summary["peak_resident_bytes"], "not armed", "(no cgroup)"
    else:
        with MemoryCgroup(LIMIT_MIB * MIB) as group:
            done = group.run(train, echo=True)
        if done.returncode:
            sys.exit(f"demo: training ended with status {done.returncode}, "
                     f"{done.oom_kills} kills by the kernel")
        summary, peak, kills = done.last_json, done.peak_resident_bytes, done.oom_kills
        held = "(cgroup, kernel's killer armed)"
    on_disk = sum(path.stat().st_blocks * 512 for folder in (data, run)
                  for path in folder.rglob("*") if path.is_file())
    print(f"\nbytes on disk   {on_disk:,}  ({on_disk / GIB:.2f} GiB)")
    print(f"limit           {LIMIT_MIB * MIB:,}  ({LIMIT_MIB} MiB) {held}")
    print(f"peak resident   {peak:,}  ({peak / MIB:.0f} MiB), as the kernel counted it")
    print(f"kills           {kills}")
    print(f"status          {summary['status']}, {summary['step']} steps, "
          f"{summary['rows_per_second']:,.0f} rows/s, loss {summary['loss']:.4f}")
    return summary["status"] == "finished" and peak <= LIMIT_MIB * MIB and on_disk > 4 * GIB \
        and kills in (0, "not armed")


def killed_loop(package: pathlib.Path, out: pathlib.Path) -> bool:
    """Part 3. True when the loop that was killed ended in the bits of the one that was not."""
    print("\n== README's Python loop: kill -9 at a random step, and the same bits ==", flush=True)
    environment = {"PYTHONPATH": str(package)}
    calm = readme.bits_of(readme.live(out / "loop", environment))
    # Behind the second commit, which has waited for the first to be written.
    after = random.randint(2 * readme.COMMIT_EVERY + 1, readme.RUN_STEPS - readme.COMMIT_EVERY)
    killed = readme.live(out / "loop-killed", environment, after)
    again = readme.live(out / "loop-killed", environment)
    print(f"undisturbed     {readme.RUN_STEPS} steps, bits {calm}")
    print(f"kill -9         behind step {after}: status {killed.returncode}")
    went_on = re.search(r"goes on at step \d+", again.stderr)
    print(f"started again   {went_on.group(0) if went_on else 'from the beginning'}; bits {readme.bits_of(again)}")
    good = killed.returncode == -signal.SIGKILL and went_on is not None and readme.bits_of(again) == calm
    print("model, optimizer, schedule, random state and rows: "
          f"{'the same bits' if good else 'NOT the same bits'}", flush=True)
    return good


LOADS = """
import sys, peft, torch, transformers
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
model(input_ids=torch.ones(1, 64, dtype=torch.int64), labels=torch.ones(1, 64, dtype=torch.int64)).loss.backward()
print("trained")
"""
OPENS = """
import sys, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(f"transformers loads it: {sum(one.numel() for one in model.parameters()):,} parameters")
"""
CONSOLE = "import sys; from plimsoll.cli._program import main; sys.exit(main())"


def chats_over_limit(package: pathlib.Path, out: pathlib.Path) -> bool:
    """Part 4. True when the run finished inside the cgroup, learned, and left a model that transformers loads."""
    from tests.support.chat_models import make_wide_model

    print(f"\n== a chat fine-tune inside {LIMIT_MIB} MiB: problems of data/gsm8k-mini ==", flush=True)
    chats, model, run = ROOT / "data" / "gsm8k-mini" / "chats.jsonl", out / "model", out / "chat"
    make_wide_model(model, chats, width=768, layers=16)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    print(f"model           {size / MIB:.0f} MiB of bfloat16, {2 * size / MIB:.0f} in the float32 it is trained in", flush=True)
    python = [sys.executable, "-c", CONSOLE]
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}"}

    def program(*words, group=None) -> dict:
        words = [*python, *map(str, words), "--json"]
        if group is not None:
            done = group.run(words, env=environment)
            kills, peak = done.oom_kills, done.peak_resident_bytes
        else:
            done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
            kills, peak = 0, 0
        if done.returncode:
            sys.exit(f"demo: {' '.join(words[3:])}: status {done.returncode}: {done.stderr[-2000:]}")
        return {**json.loads(done.stdout.strip().splitlines()[-1]), "kills": kills, "peak": peak}

    few = out / "chats.jsonl"
    few.write_text("".join(chats.read_text(encoding="utf-8").splitlines(keepends=True)[:16]), encoding="utf-8")
    program("import", "chat", few, "--tokenizer", model, "--out", out / "chats.tokens", "--quiet")
    train = ["train", "chat", "--data", out / "chats.tokens", "--model", model, "--out", run, "--memory-limit",
             f"{LIMIT_MIB}MiB", "--foreign-bytes", "64MiB", "--sequence-length", "192", "--accumulate", "1", "--lr", "1e-2",
             "--dtype", "float32", "--lora-r", "8", "--held-out", "4", "--eval-every-n-steps", "6", "--compute-threads", "2", "--quiet"]
    reason = MemoryCgroup.why_not()
    if reason:
        print(f"no cgroup: {reason}; running without the kernel's limit")
        killed, summary = "not armed", program(*train)
    else:
        with MemoryCgroup(LIMIT_MIB * MIB) as group:
            loading = group.run([sys.executable, "-c", LOADS, model], env=environment)
        killed = f"status {loading.returncode}, {loading.oom_kills} kills by the kernel"
        with MemoryCgroup(LIMIT_MIB * MIB) as group:
            summary = program(*train, group=group)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    losses = [one["held_out_loss"] for one in events if "held_out_loss" in one]
    print(f"loading it all  {killed}")
    print(f"plimsoll        {summary['profile']}")
    print(f"peak resident   {summary['peak'] / MIB:.0f} MiB, as the kernel counted it; {summary['kills']} kills")
    print(f"training        {summary['step']} steps in {summary['seconds']:.0f} s, of which {summary['stall_seconds']:.1f} s waiting "
          f"for the disk; held-out loss {' → '.join(f'{loss:.3f}' for loss in losses)}")
    program("export", run, "--merge", "--out", out / "tuned")
    done = subprocess.run([sys.executable, "-c", OPENS, out / "tuned"], capture_output=True, text=True, check=False)
    print(f"merged model    {done.stdout.strip() or done.stderr[-500:]}", flush=True)
    return (reason is not None or (loading.returncode != 0 and loading.oom_kills > 0)) and summary["status"] == "finished" \
        and summary["kills"] == 0 and losses[-1] < losses[0] and done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build/release/bin/plimsoll")
    parser.add_argument("--package", type=pathlib.Path, default=ROOT / "build/release/python",
                        help="the folder that the Python package plimsoll is in")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "demo")
    parser.add_argument("--rows", type=int, default=1_100_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="keep the large data afterwards")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    good = real_input(options.program, options.out, options.seeds)
    good = over_limit(options.program, options.out, options.rows) and good
    good = killed_loop(options.package, options.out) and good
    good = chats_over_limit(options.package, options.out) and good
    if not options.keep:
        shutil.rmtree(options.out / "large", ignore_errors=True)
        shutil.rmtree(options.out / "large-run" / "embeddings", ignore_errors=True)
        shutil.rmtree(options.out / "model", ignore_errors=True)
        shutil.rmtree(options.out / "tuned", ignore_errors=True)
    print("\ndemo: everything held" if good else "\ndemo: something did not hold; see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
