#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Chats into a token set on one core: plimsoll.import_chat() beside datasets.map and beside a streaming loop."""
import argparse
import hashlib
import importlib.util
import json
import os
import pathlib
import pydoc_data.topics
import random
import resource
import sys
import sysconfig
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from bench.chat_bench import SPECIAL, TEMPLATE, add_options, one_side, run, tokenizer_of

BAR_MAP, BAR_LOOP_FAST, BAR_LOOP, BAR_PEAK_MIB = 15.0, 2.5, 1.2, 96
BATCH = 256  # Rows that the loop encodes at a time.


# ---- What is imported: made of the texts that come with Python ----

def passages(smoke: bool) -> list[str]:
    """Paragraphs of Python's own documentation and of its sources."""
    texts = list(pydoc_data.topics.topics.values())
    if not smoke:
        folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
        texts += [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.glob("*.py"))]
    return [part for text in texts for part in text.split("\n\n") if 40 < len(part) < 3000]


def make_tokenizer(folder: pathlib.Path, given: str | None, smoke: bool) -> None:
    """A byte-level BPE of 32,000 tokens, or that of a folder, with the benchmark's template."""
    import tokenizers

    folder.mkdir()
    if given:
        made = tokenizers.Tokenizer.from_file(str(pathlib.Path(given) / "tokenizer.json"))
        made.add_special_tokens(SPECIAL)
    else:
        made = tokenizer_of(passages(smoke)[:20_000], 1000 if smoke else 32_000)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}))


def make_chats(path: pathlib.Path, rows: int, smoke: bool) -> None:
    """About 2.4 kB a row: one to eight questions and answers, each made distinct by a few words and numbers."""
    numbers, pool = random.Random(7), passages(smoke)
    words = " ".join(pool[:200]).split()
    accents = ["naïve café", "東京の天気", "“quoted” — so", "😀", "Привет"]

    def varied() -> str:
        text = numbers.choice(pool)
        while len(text) > 700:
            text = numbers.choice(pool)
        parts = text.split(" ")
        for _ in range(max(1, len(parts) // 25)):
            parts.insert(numbers.randrange(len(parts) + 1), numbers.choice(words) if numbers.random() < 0.7
                         else str(numbers.randrange(10 ** numbers.randrange(1, 8))))
        return " ".join(parts) + (" " + numbers.choice(accents) if numbers.random() < 0.1 else "")

    with open(path, "w", encoding="utf-8") as out:
        for _ in range(rows):
            messages = [{"role": "system", "content": "You are a helpful assistant."}]
            for _ in range(numbers.choice([1, 1, 2, 2, 3, 4, 6, 8])):
                messages += [{"role": "user", "content": varied()}, {"role": "assistant", "content": varied()}]
            out.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


# ---- The sides; each in a process of its own ----

def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


class Digest:
    """Of ids and masks of all rows, and of the ids of the first."""

    def __init__(self, first: int) -> None:
        self.all, self.ids, self._first, self.rows, self.tokens = hashlib.sha256(), hashlib.sha256(), first, 0, 0

    def add(self, ids: np.ndarray, mask: np.ndarray | None) -> None:
        self.rows, self.tokens = self.rows + 1, self.tokens + len(ids)
        data = len(ids).to_bytes(4, "little") + np.asarray(ids, np.uint32).tobytes()
        if self.rows <= self._first:
            self.ids.update(data)
        self.all.update(data)
        if mask is not None:
            self.all.update(np.packbits(np.asarray(mask, np.uint8)).tobytes())

    def said(self) -> dict[str, object]:
        return {"rows": self.rows, "tokens": self.tokens, "ids": self.ids.hexdigest(), "all": self.all.hexdigest()}


def ours(chats: str, folder: str, work: pathlib.Path, first: int, encoder: str) -> dict[str, object]:
    import plimsoll

    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        reset = file.fileno()
        before = []

        def progress(done: int, total: int) -> None:
            if not before:  # Loaded, and a first piece done: the highest begins again here.
                before.append(resident("VmRSS"))
                os.write(reset, b"5")

        began, wall = processor_seconds(), time.perf_counter()
        options = {"encoder": encoder} if encoder else {}
        plimsoll.import_chat(chats, work / "set", tokenizer=folder, progress=progress,
                             governor=plimsoll.Governor("2GiB"), **options)
        took, wall = processor_seconds() - began, time.perf_counter() - wall
    peak = resident("VmHWM")
    digest = Digest(first)
    for ids, mask in plimsoll.TokenSet(work / "set"):
        digest.add(ids, mask)
    return {"seconds": took, "wall": wall, "peak": peak, **digest.said()}


def loaded(chats: str, folder: str, work: pathlib.Path, first: int, encoder: str) -> dict[str, object]:
    """What the interpreter holds with the tokenizer, and with what else an import loads."""
    import plimsoll  # noqa: F401
    from plimsoll.data.importers._chat_template import ChatTokenizer

    kept = ChatTokenizer(folder)
    return {"resident": resident("VmRSS"), "vocabulary": kept.vocabulary}


def loop(chats: str, folder: str, work: pathlib.Path, first: int, encoder: str) -> dict[str, object]:
    """Line by line, a batch of rows at a time, ids and mask bits to two files, synced at the end."""
    import tokenizers
    from transformers.utils.chat_template_utils import render_jinja_template

    template = json.loads((pathlib.Path(folder) / "tokenizer_config.json").read_text())["chat_template"]
    library = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    encode = fast_loop(library) if encoder == "gigatoken" else plain_loop(library)
    began, wall = processor_seconds(), time.perf_counter()
    with open(chats, encoding="utf-8") as lines, open(work / "ids", "wb") as ids_file, \
            open(work / "masks", "wb") as masks_file, open(work / "lengths", "wb") as lengths_file:
        batch = []

        def flush() -> None:
            texts, spans = render_jinja_template(conversations=batch, chat_template=template,
                                                 return_assistant_tokens_mask=True)
            for ids, mask in encode(texts, spans):
                ids_file.write(ids.tobytes())
                masks_file.write(np.packbits(mask).tobytes())
                lengths_file.write(len(ids).to_bytes(4, "little"))
            batch.clear()

        for line in lines:
            batch.append(json.loads(line)["messages"])
            if len(batch) == BATCH:
                flush()
        if batch:
            flush()
        for file in (ids_file, masks_file, lengths_file):
            file.flush()
            os.fsync(file.fileno())
    took, wall = processor_seconds() - began, time.perf_counter() - wall
    digest = Digest(first)
    with open(work / "ids", "rb") as ids_file, open(work / "masks", "rb") as masks_file:
        for length in np.fromfile(work / "lengths", np.uint32).tolist():
            ids = np.frombuffer(ids_file.read(4 * length), np.uint32)
            mask = np.unpackbits(np.frombuffer(masks_file.read((length + 7) // 8), np.uint8))[:length]
            digest.add(ids, mask)
    return {"seconds": took, "wall": wall, "peak": resident("VmHWM"), **digest.said()}


def plain_loop(library):
    """tokenizers, and its offsets as transformers uses them for masks."""
    def encode(texts, spans):
        for encoding, of_text in zip(library.encode_batch(texts, add_special_tokens=False), spans):
            ids = np.array(encoding.ids, np.uint32)
            mask = np.zeros(len(ids), np.uint8)
            for begin, end in of_text:
                mask[encoding.char_to_token(begin):encoding.char_to_token(end - 1) + 1] = 1
            yield ids, mask

    return encode


def fast_loop(library):
    """gigatoken, and for masks the ends of tokens in bytes."""
    import awkward
    import gigatoken

    fast = gigatoken.Tokenizer.from_json(library.to_str())
    sizes = np.zeros(fast.vocab_size, np.int64)
    for number, token in fast.vocab.items():
        sizes[number] = len(token)

    def encode(texts, spans):
        for ids, text, of_text in zip(fast.encode_batch(texts), texts, spans):
            ids = awkward.to_numpy(ids).astype(np.uint32, copy=False)
            ends = np.cumsum(sizes[ids])
            mask = np.zeros(len(ids), np.uint8)
            for begin, end in of_text:
                if not text.isascii():
                    begin, end = len(text[:begin].encode()), len(text[:end].encode())
                mask[np.searchsorted(ends, begin, "right"):np.searchsorted(ends, end, "left") + 1] = 1
            yield ids, mask

    return encode


def mapped(chats: str, folder: str, work: pathlib.Path, first: int, encoder: str) -> dict[str, object]:
    """As the original did it: the data set in Arrow, two maps of 1,000 rows at a time; it had no masks."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    began, wall = processor_seconds(), time.perf_counter()
    rows = datasets.load_dataset("json", data_files=chats, split="train", cache_dir=str(work / "cache"))
    rows = rows.select(range(min(first, len(rows))))
    texts = rows.map(lambda row: {"text": tokenizer.apply_chat_template(row["messages"], tokenize=False)},
                     remove_columns=["messages"])
    made = texts.map(lambda batch: tokenizer(batch["text"], add_special_tokens=False), batched=True, batch_size=1000,
                     remove_columns=["text"], writer_batch_size=1000, load_from_cache_file=False)
    took, wall = processor_seconds() - began, time.perf_counter() - wall
    peak, digest = resident("VmHWM"), Digest(first)
    for row in made:
        digest.add(np.array(row["input_ids"], np.uint32), None)
    return {"seconds": took, "wall": wall, "peak": peak, **digest.said()}


SIDES = {"ours": ours, "loop": loop, "map": mapped, "loaded": loaded}


def first_lines(source: pathlib.Path, out: pathlib.Path, rows: int) -> pathlib.Path:
    with open(source, encoding="utf-8") as lines, open(out, "w", encoding="utf-8") as few:
        for _, line in zip(range(rows), lines):
            few.write(line)
    return out


def fail(why: str) -> None:
    sys.exit(f"w10_token_set: {why}")


def compare(options: argparse.Namespace, work: pathlib.Path) -> dict[str, object]:
    folder, chats = work / "tokenizer", work / "chats.jsonl"
    make_tokenizer(folder, options.tokenizer, options.smoke)
    make_chats(chats, options.rows, options.smoke)
    megabytes = chats.stat().st_size / 1e6
    few = first_lines(chats, work / "few.jsonl", options.map_rows)
    fast = importlib.util.find_spec("gigatoken") is not None

    def of(side: str, encoder: str, source: pathlib.Path = chats) -> dict:
        return one_side(side, ["--encoder", encoder, "--chats", source, "--tokenizer", folder, "--first", options.map_rows],
                        work, threads=1)

    found = {"ours": of("ours", "tokenizers" if fast else ""), "loop": of("loop", "tokenizers"), "map": of("map", "", few)}
    if fast:
        found |= {"ours_fast": of("ours", "gigatoken"), "loop_fast": of("loop", "gigatoken")}
    for name, side in found.items():
        if name != "map" and (side["rows"], side["all"]) != (options.rows, found["loop"]["all"]):
            fail(f"{name} has other ids or masks than the loop around tokenizers")
        if side["ids"] != found["loop"]["ids"]:
            fail(f"{name} has other ids than the loop around tokenizers")
    speed = {name: (few.stat().st_size / 1e6 if name == "map" else megabytes) / side["seconds"]
             for name, side in found.items()}
    base = of("loaded", "", few)["resident"]
    best = "ours_fast" if fast else "ours"
    peaks = {name: round((side["peak"] - base) / 2**20, 1) for name, side in found.items()}
    peers = {"rows": options.rows, "megabytes": round(megabytes, 1), "map_rows": options.map_rows,
             "mb_per_second": {name: round(one, 2) for name, one in speed.items()},
             "wall_seconds": {name: round(side["wall"], 1) for name, side in found.items()},
             "peak_mib_above_the_tokenizer": peaks, "tokenizer_mib": round(base / 2**20, 1),
             "x_map_library": round(speed["ours"] / speed["map"], 2),
             "x_loop_library": round(speed["ours"] / speed["loop"], 2)}
    passed = speed[best] / speed["map"] >= BAR_MAP and peers["x_loop_library"] >= BAR_LOOP and \
        peaks[best] <= BAR_PEAK_MIB
    if fast:
        peers["x_loop_fast"] = round(speed["ours_fast"] / speed["loop_fast"], 2)
        passed = passed and peers["x_loop_fast"] >= BAR_LOOP_FAST
    return {"name": "w10_token_set", "value": round(speed[best] / speed["map"], 2), "unit": "x datasets.map",
            "bar": BAR_MAP, "pass": options.smoke or passed, "peers": peers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--map-rows", type=int, default=20_000, help="rows that datasets.map is timed with [20,000]")
    parser.add_argument("--tokenizer", help="folder with a tokenizer.json of your own [one trained here]")
    add_options(parser)
    for hidden in ("--encoder", "--chats", "--first"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.map_rows = 300, 200
    return run(options, lambda: SIDES[options.side](options.chats, options.tokenizer, pathlib.Path(options.directory),
                                                    int(options.first), options.encoder),
               lambda work: compare(options, work))


if __name__ == "__main__":
    sys.exit(main())
