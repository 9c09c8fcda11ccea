# SPDX-License-Identifier: Apache-2.0
"""Fuzzed texts through import_chat(), compared with transformers' apply_chat_template: ids, masks and packed batches.

    PYTHONPATH=build/dev/python .venv/bin/python -m tests.support.token_fuzz --family gpt2 --count 1000000 --seed 1

Families: gpt2 and llama3 (byte-level BPE), llama2 (SentencePiece), bert (WordPiece), of --data, a folder with
tok_gpt2, tok_llama3, tok_llama2_sp and tok_bert; trained ones of a few hundred tokens without it. A chat has two
texts; what is imported is made anew every 20,000 texts. Rows with a lone surrogate are among them, which must be
refused. Ends with one line of JSON; a difference ends it at once.
"""
import argparse
import json
import pathlib
import random
import struct
import sys
import tempfile
import time
import unicodedata

import numpy as np

from tests.support import chats

TEMPLATE = ("{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
            "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
            "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
FAMILIES = {"gpt2": "bytes", "llama3": "bytes", "llama2": "metaspace", "bert": "words"}
_BLOCK = 20_000
_ALPHABETS = [range(0x20, 0x7F), range(0x20, 0x7F), range(0xA0, 0x250), range(0x300, 0x370), range(0x370, 0x600),
              range(0x900, 0xE80), range(0x2000, 0x2070), range(0x3040, 0x30FF), range(0x4E00, 0x4F00),
              range(0xAC00, 0xAD00), range(0xFE00, 0xFE10), range(0xFF00, 0xFF60), range(0x1F300, 0x1F650),
              range(0x20), range(0x7F, 0xA0), range(0xE000, 0xE010), range(0x1D400, 0x1D450),
              range(0xE000, 0x20000), range(0xE0000, 0xE0080), range(0xD800)]
_WORDS = ("the", " of", " and", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", "don't", "I'LL", "3.14159", "1000000",
          "#include", "<|im_end|>", "<|im_start|>", "<|im_start|>assistant\n", "<s>", "</s>", "[CLS]", "[MASK]",
          "<unk>", "<|im_end", "|>", "<|IM_END|>", "<\uff5cim_end\uff5c>", "<s", "</s >", "[ CLS ]", "##ing", "<0x0A>",
          "<|endoftext|>", "<|eot_id|>", "<|begin_of_text|>", "▁", "Ġ", "naïve", "e\u0301", "\u1100\u1161", "\u200d",
          "\ufeff", "\u00a0", "{{ x }}", "😀", "👨‍👩‍👧", "東京", "Ünï", "\u2028", "…", "--", "____", "''", "0x1F", "ß", "İ")


def fuzzed(numbers: random.Random) -> str:
    """Words, runs of one script or of any characters, markup like special tokens; some long runs, some normalized."""
    parts = []
    for _ in range(numbers.choice((0, 1, 2, 3, 5, 8, 13))):
        if numbers.random() < 0.5:
            parts.append(numbers.choice(_WORDS) * numbers.choice((1, 1, 1, 2, 5)))
        else:
            alphabet = numbers.choice(_ALPHABETS)
            parts.append("".join(chr(numbers.choice(alphabet)) for _ in range(numbers.randrange(1, 9))))
        if numbers.random() < 0.4:
            parts.append(" ")
    kind = numbers.random()
    if kind < 0.02 and parts:
        parts[-1] = (parts[-1] or " ")[:numbers.choice((1, 4))] * numbers.randrange(20, 300)
    text = "".join(parts)
    return unicodedata.normalize(numbers.choice(("NFC", "NFD", "NFKC", "NFKD")), text) if kind > 0.9 else text


def sentencepiece_pieces(path: pathlib.Path) -> list[tuple[str, float, int]]:
    """(text, score, kind) of a SentencePiece model: field 1 of its protobuf, with fields 1, 2 and 3."""
    data, pieces = path.read_bytes(), []

    def varint(data, at):
        value = shift = 0
        while True:
            byte = data[at]
            value, at, shift = value | (byte & 0x7F) << shift, at + 1, shift + 7
            if byte < 0x80:
                return value, at

    def fields(data):
        at = 0
        while at < len(data):
            tag, at = varint(data, at)
            if tag & 7 == 0:
                value, at = varint(data, at)
            elif tag & 7 == 2:
                size, at = varint(data, at)
                value, at = data[at:at + size], at + size
            else:
                value, at = data[at:at + (4 if tag & 7 == 5 else 8)], at + (4 if tag & 7 == 5 else 8)
            yield tag >> 3, value

    for number, value in fields(data):
        if number == 1:
            piece = dict(fields(value))
            pieces.append((piece[1].decode(), struct.unpack("<f", piece[2])[0], piece.get(3, 1)))
    return pieces


def llama2_tokenizer(path: pathlib.Path):
    """The BPE of a SentencePiece model as tokenizers has it: merges in the order of their results' scores."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    pieces = sentencepiece_pieces(path)
    vocabulary = {text: number for number, (text, _, _) in enumerate(pieces)}
    merges = []
    for text, score, _ in pieces:
        parts = [(text[:k], text[k:]) for k in range(1, len(text))]
        found = [pair for pair in parts if pair[0] in vocabulary and pair[1] in vocabulary]
        found.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(score, pair) for pair in found]
    merges.sort(key=lambda one: (one[0], len(one[1][0]), len(one[1][1])), reverse=True)
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [pair for _, pair in merges], unk_token="<unk>", fuse_unk=True,
                                           byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def make_family(folder: pathlib.Path, family: str, data: pathlib.Path | None) -> pathlib.Path:
    """A tokenizer's folder with TEMPLATE."""
    import tokenizers

    if data is None:
        return chats.make_tokenizer(folder, TEMPLATE, FAMILIES[family])
    folder.mkdir()
    if family == "llama2":
        made = llama2_tokenizer(data / "tok_llama2_sp" / "tokenizer.model")
    else:
        place = {"gpt2": "tok_gpt2/tokenizer.json", "llama3": "tok_llama3/tokenizer.json",
                 "bert": "tok_bert/bert-wiki.json"}[family]
        made = tokenizers.Tokenizer.from_file(str(data / place))
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    ends = {"gpt2": ("<|endoftext|>", "<|endoftext|>"), "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
            "llama2": ("<s>", "</s>"), "bert": ("[CLS]", "[SEP]")}[family]
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": ends[0], "eos_token": ends[1],
         "chat_template": TEMPLATE}), encoding="utf-8")
    return folder


def reference(wanted, rows):
    """Ids and masks of chats as transformers makes them."""
    made = wanted.apply_chat_template(rows, chat_template=TEMPLATE, tokenize=True, return_dict=True,
                                      return_assistant_tokens_mask=True)
    return [(np.array(ids, np.int64), np.array(mask, np.bool_))
            for ids, mask in zip(made["input_ids"], made["assistant_masks"], strict=True)]


def check_batches(tokens, rows, seed):
    """Every document of packed batches is a row, with labels and positions of its own; each row comes once."""
    wanted = {}
    for ids, mask in rows:
        wanted.setdefault(ids.tobytes() + mask.tobytes(), [0, ids, mask])[0] += 1
    longest = max(2, max(len(ids) for ids, _ in rows))
    for batch in tokens.batches(8, max(256, longest), seed=seed):
        for k in range(len(batch)):
            documents = batch.documents[k]
            ends = np.flatnonzero(np.diff(documents, append=-2)) + 1
            begin = 0
            for end in ends.tolist():
                if documents[begin] >= 0:
                    ids, labels = batch.input_ids[k][begin:end], batch.labels[k][begin:end]
                    assert np.array_equal(batch.position_ids[k][begin:end], np.arange(end - begin))
                    mask = labels >= 0
                    assert np.array_equal(labels[mask], ids[mask])
                    entry = wanted[ids.tobytes() + mask.tobytes()]
                    entry[0] -= 1
                begin = end
    assert not any(entry[0] for entry in wanted.values())


def run(family: str, count: int, seed: int, data: pathlib.Path | None, work: pathlib.Path, **options) -> dict:
    """Compares `count` texts; AssertionError names the first row that differs."""
    import plimsoll

    folder = make_family(work / "tokenizer", family, data)
    wanted = chats.reference(folder)
    numbers = random.Random(f"{family}/{seed}")
    done = tokens = 0
    began = time.monotonic()
    with plimsoll.Governor("4GiB") as governor:
        while done < count:
            texts = min(_BLOCK, count - done)
            rows = [[{"role": "user", "content": fuzzed(numbers)}, {"role": "assistant", "content": fuzzed(numbers)}]
                    for _ in range((texts + 1) // 2)]
            given = [{"messages": row} for row in rows]
            for spoilt in range(3):
                at = numbers.randrange(len(given) + 1)
                given.insert(at, {"messages": [{"role": "user", "content": fuzzed(numbers)},
                                               {"role": "assistant", "content": "a" + chr(0xD800 + spoilt) + "b"}]})
            said = plimsoll.import_chat(given, work / "set", tokenizer=folder, governor=governor, rebuild=True,
                                        errors_max=3, **options)
            assert said["about"]["odd"]["not_utf8"]["count"] == 3
            with plimsoll.TokenSet(work / "set") as made:
                assert len(made) == len(rows)
                right = reference(wanted, rows)
                for number, ((ids, mask), (right_ids, right_mask)) in enumerate(zip(made, right, strict=True)):
                    assert np.array_equal(ids, right_ids), f"ids of {json.dumps(rows[number])}"
                    assert np.array_equal(mask, right_mask), f"mask of {json.dumps(rows[number])}"
                check_batches(made, right, seed)
                tokens += made.tokens
            done += texts
    return {"family": family, "texts": done, "tokens": tokens, "seed": seed,
            "of": "trained" if data is None else "real", "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=list(FAMILIES), required=True)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=pathlib.Path)
    parser.add_argument("--encoder", help="as of import_chat()")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        more = {"encoder": options.encoder} if options.encoder else {}
        print(json.dumps(run(options.family, options.count, options.seed, options.data, pathlib.Path(work), **more)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
