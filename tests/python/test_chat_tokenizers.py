# SPDX-License-Identifier: Apache-2.0
"""Tokenizers' folders: what is damaged in them is refused by name or makes no difference; masks by tokens' bytes are
those by offsets; gigatoken where it is installed gives the same set, and is caught where it does not."""
import importlib.util
import json
import random
import sys
import types
import unicodedata

import numpy as np
import pytest

plimsoll = pytest.importorskip("plimsoll")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from plimsoll.data.importers import _chat_encoder
from plimsoll.data.importers._chat_template import ChatTokenizer
from tests.support import chats, token_fuzz

ROWS = [{"messages": chats.chat(random.Random(k))} for k in range(6)]


def mutated(numbers, text):
    """A few bytes, or values of the JSON, are others."""
    if numbers.random() < 0.5:
        data = bytearray(text.encode())
        for _ in range(numbers.randrange(1, 4)):
            at = numbers.randrange(len(data))
            what = numbers.randrange(4)
            if what == 0:
                data[at] = numbers.randrange(256)
            elif what == 1:
                del data[at:at + numbers.randrange(1, 200)]
            elif what == 2:
                data[at:at] = numbers.choice((b"{", b"}", b"[", b'"', b",", b"null", b"1e999", b"-1", b"\xff"))
            else:
                del data[at:]
            if not data:
                break
        return bytes(data)
    value = json.loads(text)

    def change(value, depth=0):
        if isinstance(value, dict) and value and numbers.random() < 0.9:
            key = numbers.choice(sorted(value))
            value[key] = change(value[key], depth + 1)
        elif isinstance(value, list) and value and numbers.random() < 0.9:
            at = numbers.randrange(len(value))
            value[at] = change(value[at], depth + 1)
        else:
            return numbers.choice((None, 0, -1, 2**40, 1.5, "", "x", "ByteLevel", [], {}, ["a", "b"], True))
        return value

    return json.dumps(change(value)).encode()


def fuzz_folder(folder, governor, rounds, seed):
    """Every damaged folder is refused with ValueError, or imports into a set that is sound."""
    chats.make_tokenizer(folder / "good")
    texts = {name: (folder / "good" / name).read_text(encoding="utf-8") for name in ("tokenizer.json",
                                                                                    "tokenizer_config.json")}
    config = json.loads(texts["tokenizer_config.json"])
    config["added_tokens_decoder"] = {"3": {"content": "<|im_start|>", "special": True}}
    texts["tokenizer_config.json"] = json.dumps(config)
    bad = folder / "bad"
    bad.mkdir()
    refused = made = 0
    numbers = random.Random(seed)
    for _ in range(rounds):
        name = numbers.choice(sorted(texts))
        for other, text in texts.items():
            (bad / other).write_bytes(mutated(numbers, text) if other == name else text.encode())
        try:
            plimsoll.import_chat(ROWS, folder / "set", tokenizer=bad, governor=governor, errors_max=10, rebuild=True)
            plimsoll.TokenSet(folder / "set").verify()
            made += 1
        except ValueError as error:
            assert str(error), "it does not say what is wrong"
            refused += 1
    assert refused > rounds // 10 and made > 0


def test_a_damaged_tokenizer_is_refused_or_makes_a_sound_set(tmp_path, governor):
    fuzz_folder(tmp_path, governor, 100, 1)


@pytest.mark.slow
def test_many_damaged_tokenizers_are_refused_or_make_sound_sets(tmp_path, governor):
    fuzz_folder(tmp_path, governor, 5000, 2)


@pytest.mark.parametrize("trim, prefix", [(False, False), (True, False), (True, True)])
def test_masks_by_the_bytes_of_tokens_are_those_by_their_offsets(tmp_path, trim, prefix):
    import tokenizers
    from tokenizers import processors

    chats.make_tokenizer(tmp_path / "tokenizer")
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    made.post_processor = processors.ByteLevel(trim_offsets=trim, add_prefix_space=prefix)
    encoder = _chat_encoder.Encoder(made, made.get_vocab_size())
    assert encoder._spans is not None
    numbers = random.Random(4)
    texts = []
    for _ in range(3000):
        text = token_fuzz.fuzzed(numbers)
        count = 2 * numbers.randrange(1, 4)
        ends = sorted(numbers.sample(range(len(text) + 1), count)) if len(text) > 8 else [0, len(text)]
        texts.append((text, list(zip(ends[::2], ends[1::2], strict=True))))
    by_bytes = list(encoder.encode(texts, special=False))
    encoder._spans = None
    for (ids, spans), (right_ids, right), (text, given) in zip(by_bytes, encoder.encode(texts, special=False), texts,
                                                               strict=True):
        assert ids.tolist() == right_ids.tolist() and spans == right, (text, given)


def test_ids_that_are_not_those_of_the_text_are_noticed(tmp_path):
    chats.make_tokenizer(tmp_path / "tokenizer")
    loaded = ChatTokenizer(tmp_path / "tokenizer")
    encoder = _chat_encoder.Encoder(loaded.tokenizer, loaded.vocabulary)
    (ids, _), = encoder.encode([("hello there", [])], special=False)
    assert encoder._spans.find(ids, "hello there", [(0, 5)]) is not None
    for wrong in (ids[:-1], ids[::-1].copy(), ids + 1, ids + 10**6):
        assert encoder._spans.find(wrong, "hello there", [(0, 5)]) is None


@pytest.mark.parametrize("family", list(token_fuzz.FAMILIES))
def test_fuzzed_texts_have_the_ids_masks_and_batches_of_the_reference(tmp_path, family):
    pytest.importorskip("transformers")
    assert token_fuzz.run(family, 1200, 7, None, tmp_path)["texts"] == 1200


class FakeGigatoken:
    """A module in gigatoken's place: the library itself, but for texts with `wrong` in them."""

    wrong = ""
    seen: list[str] = []

    class Tokenizer:
        @classmethod
        def from_json(cls, said):
            import tokenizers

            made = cls()
            made.library = tokenizers.Tokenizer.from_str(said)
            return made

        def encode_batch(self, texts, parallel):
            FakeGigatoken.seen += texts
            ids = [np.array(self.library.encode(text, add_special_tokens=False).ids, np.uint32) for text in texts]
            if FakeGigatoken.wrong:
                ids = [one[::-1] if FakeGigatoken.wrong in text else one for one, text in zip(ids, texts, strict=True)]
            ends = np.cumsum([0, *map(len, ids)])
            content = types.SimpleNamespace(data=np.concatenate([np.empty(0, np.uint32), *ids]))
            return types.SimpleNamespace(layout=types.SimpleNamespace(offsets=ends, content=content))


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", FakeGigatoken)
    monkeypatch.setattr(FakeGigatoken, "seen", [])
    monkeypatch.setattr(FakeGigatoken, "wrong", "")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name == "gigatoken" or real(name, *more))
    return FakeGigatoken


def test_gigatoken_encodes_what_it_may_to_the_same_bytes(tmp_path, governor, fake):
    chats.make_tokenizer(tmp_path / "tokenizer")
    rows = [{"messages": chats.chat(random.Random(k))} for k in range(200)]
    options = {"tokenizer": tmp_path / "tokenizer", "governor": governor}
    assert plimsoll.import_chat(rows, tmp_path / "one", encoder="tokenizers", **options)["encoder"] == "tokenizers"
    assert not fake.seen
    assert plimsoll.import_chat(rows, tmp_path / "other", **options)["encoder"] == "gigatoken"
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    assert plimsoll.import_chat(rows, tmp_path / "one", **options)["reused"] is True
    contents = [one["content"] for row in rows for one in row["messages"]]
    odd = [text for text in contents if not unicodedata.is_normalized("NFC", text)]
    assert odd, "no text tells"
    new = "what is \U0003FFF0?"  # Of no script yet: tables of different years part texts at it in different ways.
    contents, odd = [*contents, new], [*odd, new]
    fake.seen.clear()
    encoder = _chat_encoder.Encoder(ChatTokenizer(tmp_path / "tokenizer").tokenizer, 600, "gigatoken")
    list(encoder.encode([(text, []) for text in contents], special=False))
    assert not set(odd) & set(fake.seen) and set(contents) - set(odd) <= set(fake.seen)


def test_gigatoken_is_left_out_where_it_differs_and_named_when_it_is_asked_for(tmp_path, governor, fake):
    chats.make_tokenizer(tmp_path / "tokenizer")
    options = {"tokenizer": tmp_path / "tokenizer", "governor": governor}
    fake.wrong = "don't"
    assert plimsoll.import_chat(ROWS, tmp_path / "set", **options)["encoder"] == "tokenizers"
    with pytest.raises(ValueError, match="encoder: gigatoken cannot be used: it gives other ids than tokenizers for"):
        plimsoll.import_chat(ROWS, tmp_path / "set", encoder="gigatoken", **options)
    chats.make_tokenizer(tmp_path / "words", family="words")
    with pytest.raises(ValueError, match="the tokenizer is no byte-level BPE"):
        plimsoll.import_chat(ROWS, tmp_path / "set", encoder="gigatoken", **options | {"tokenizer": tmp_path / "words"})
    with pytest.raises(ValueError, match="encoder: 'x' is none of auto"):
        plimsoll.import_chat(ROWS, tmp_path / "set", encoder="x", **options)


def test_odd_texts_are_those_that_unicode_says_are():
    """Of few characters of one block, which compose with one another, and of any."""
    blocks = [range(0x80, 0x600), [*range(0x41, 0x7B), *range(0x300, 0x370)], [*range(0x1100, 0x1200), *range(0xAC00, 0xAC40)],
              range(0x900, 0xE00), range(0x1E00, 0x2100), range(0x3040, 0x3100), range(0x1F300, 0x1FB00),
              range(0x20000, 0x20100), [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]]
    chance, odd = random.Random(4), 0
    for _ in range(20000):
        block = chance.choice(blocks)
        text = "".join(chr(chance.choice(block)) for _ in range(chance.randrange(1, 7)))
        expected = (any(unicodedata.category(one) == "Cn" for one in text)
                    or not unicodedata.is_normalized("NFC", text))
        assert _chat_encoder._is_odd(text) == expected, ascii(text)
        odd += expected
    assert 4000 < odd < 16000


def test_a_sampled_difference_is_an_error_that_names_the_row(tmp_path, governor, fake, monkeypatch):
    chats.make_tokenizer(tmp_path / "tokenizer")
    rows = [{"messages": [{"role": "user", "content": f"{k} zebra" if k == 1024 else str(k)},
                          {"role": "assistant", "content": "b c"}]} for k in range(1100)]
    files = chats.write_lines(tmp_path / "rows.jsonl", rows)
    options = {"tokenizer": tmp_path / "tokenizer", "governor": governor}
    fake.wrong = "zebra"
    # In another order the tokens are not the text's bytes: that is noticed of every row, and set right.
    made = plimsoll.import_chat(files, tmp_path / "set", **options)
    assert made["encoder"] == "gigatoken"
    monkeypatch.setattr(_chat_encoder.Encoder, "encode", lambda self, texts, special: iter(
        [(ids, []) for ids in self._ids([text for text, _ in texts])] if texts else []))
    with pytest.raises(ValueError, match=r"rows.jsonl:1025: gigatoken gives other ids than tokenizers: pass enc"):
        plimsoll.import_chat(files, tmp_path / "set", rebuild=True, **options)


def test_the_real_gigatoken_gives_the_reference(tmp_path):
    pytest.importorskip("gigatoken")
    pytest.importorskip("transformers")
    assert token_fuzz.run("gpt2", 1200, 3, None, tmp_path, encoder="gigatoken")["texts"] == 1200


def test_t1_the_words_that_gigatoken_keeps_have_a_bound(tmp_path, monkeypatch):
    """600,000 different ones."""
    pytest.importorskip("gigatoken")
    import tokenizers

    made = tokenizers.Tokenizer.from_file(str(chats.make_tokenizer(tmp_path) / "tokenizer.json"))
    monkeypatch.setattr(_chat_encoder, "_GROWS_MOST", 4 << 20)
    encode = _chat_encoder._Gigatoken(made.to_str())
    least = most = _chat_encoder._anonymous_bytes()
    for k in range(40):
        text = " ".join(map(str, range(15_000 * k, 15_000 * (k + 1))))
        ids = encode([text])[0]
        most = max(most, _chat_encoder._anonymous_bytes())
        assert k % 10 or np.array_equal(ids, _chat_encoder._library_ids(made, [text])[0])
    print(f"grown by {(most - least) / 2**20:.1f} MiB")
    assert most - least < 56 << 20  # 35 MiB, with what the first texts make; 99 without a bound.
