# SPDX-License-Identifier: Apache-2.0
"""Rows whose keys are renamed, nested, typed otherwise, null or too many: none of them loses a text without a word.

Method: every text of a row has a mark. Behind an import each mark stands in the set, or its row was refused, or a key
above it is among those that were counted; and keys used, refused and counted are all keys of all rows.
"""
import json

import pytest

plimsoll = pytest.importorskip("plimsoll")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from plimsoll.data.importers._row_reader import Fields, RowReader
from tests.support import chats, odd_rows, pictures
from tests.python.test_rows import PRINTS

BLOCK = 2_000
PRINTED = ("tools", "name", "reasoning_content", "tool_calls")
MANY = 10**9
COUNTS = [pytest.param(2_000, id="some"), pytest.param(100_000, id="many", marks=pytest.mark.slow)]


def check(rows, texts, about, lines, read):
    """texts: those of the set's rows, in order. read: reads a row, as the import does."""
    keys = about["keys"]
    total = sum(map(odd_rows.keys_in, rows))
    assert keys["used"] + keys["refused"] + sum(count for _, count in keys["counted"].values()) == total
    assert about["lines"] == lines
    found = {mark: k for k, text in enumerate(texts) for mark in odd_rows.MARK.findall(text)}
    kept = set()
    for row in rows:
        marks = odd_rows.marks_in(row)
        where = {found[mark] for mark, _ in marks if mark in found}
        if not where:
            continue
        assert len(where) == 1
        kept |= where
        counted = {one.rpartition(".")[2] for one in read(json.dumps(row)).counted} if any(mark not in found for mark, _ in marks) else ()
        for mark, path in marks:
            assert mark in found or {*path} & counted, (mark, path, json.dumps(row))
    return kept


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("train", ["assistant", "all"])
def test_s23_no_text_of_a_chat_is_lost_without_a_word(governor, tmp_path, count, train):
    if train == "all" and count > BLOCK:
        pytest.skip("many rows are tried with one")
    import tokenizers

    folder = chats.make_tokenizer(tmp_path / "tokenizer", PRINTS)
    decoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    read = RowReader((), reads=lambda key, role, tools: key in PRINTED).read
    source = odd_rows.OddRows(seed=count + len(train))
    imported = 0
    for _ in range(0, count, BLOCK):
        rows = [source.row() for _ in range(BLOCK)]
        made = plimsoll.import_chat(chats.write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "set", tokenizer=folder, train=train,
                                    errors_max=MANY, governor=governor, rebuild=True)
        with plimsoll.TokenSet(tmp_path / "set") as tokens:
            texts = [decoder.decode(ids.tolist(), skip_special_tokens=False) for ids, _ in tokens]
        kept = check(rows, texts, made["about"], BLOCK, read)
        assert kept == {k for k, text in enumerate(texts) if odd_rows.MARK.search(text)}
        imported += len(texts)
    assert imported > count // 8


@pytest.mark.parametrize("count", COUNTS)
def test_s22_no_text_beside_an_image_is_lost_without_a_word(governor, tmp_path, count):
    (tmp_path / "i.png").write_bytes(pictures.png({"size": (1, 1), "data": bytes(4)}, 8, 2))
    read = RowReader((), Fields("text", "image", "response")).read
    source = odd_rows.OddRows(seed=count, image="i.png")
    imported = 0
    for _ in range(0, count, BLOCK):
        rows = [source.row() for _ in range(BLOCK)]
        made = plimsoll.import_vision(chats.write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "set", errors_max=MANY,
                                      governor=governor, rebuild=True)
        with plimsoll.ImageSet(tmp_path / "set") as images:
            texts = [json.dumps(row.messages) for row in images]
        check(rows, texts, made["about"], BLOCK, read)
        imported += len(texts)
    assert imported > count // 8


@pytest.mark.parametrize("seed", range(3))
def test_s23_rows_of_plain_texts_are_read_alike_here_and_there(governor, tmp_path, seed):
    """C++ reads rows of texts alone, Python all others: a key that both ignore does not change a row."""
    folder = chats.make_tokenizer(tmp_path / "tokenizer", PRINTS)
    source = odd_rows.OddRows(seed)
    rows = [source.row() for _ in range(400)]
    sets, keys = [], []
    for more in ({}, {"meta": None}, {"function_call_": []}):  # The last sends every row to Python.
        files = chats.write_lines(tmp_path / "rows.jsonl", [row | more for row in rows])
        made = plimsoll.import_chat(files, tmp_path / "set", tokenizer=folder, errors_max=MANY, governor=governor, rebuild=True)
        with plimsoll.TokenSet(tmp_path / "set") as tokens:
            sets.append([(ids.tolist(), trained.tolist()) for ids, trained in tokens])
        odd = made["about"]["odd"]
        odd.pop("duplicates", None)  # Of lines.
        keys.append(({key: one["count"] for key, one in odd.items()}, made["about"]["rows"]))
    assert sets[0] == sets[1] == sets[2]
    assert keys[0] == keys[1] == keys[2]


@pytest.mark.parametrize("count", COUNTS)
def test_s29_no_key_of_a_pair_is_lost_without_a_word(governor, tmp_path, monkeypatch, count):
    import numpy as np

    from plimsoll.recipes.cosir import _pairs_import

    class Encoder:
        image_bytes = 1 << 10

        def __init__(self, *_):
            pass

        def rehearse(self, *_):
            pass

        def prepared(self, pixels):
            return {}

        def of_images(self, prepared):
            return np.zeros((len(prepared), 2), np.float32)

        def of_texts(self, texts):
            said.extend(texts)
            return np.zeros((len(texts), 2), np.float32)

    monkeypatch.setattr(_pairs_import, "_Encoder", Encoder)
    monkeypatch.setattr(_pairs_import, "_sums", lambda folder: [])
    monkeypatch.setattr(_pairs_import, "libraries", lambda: None)
    (tmp_path / "i.png").write_bytes(pictures.png({"size": (1, 1), "data": bytes(4)}, 8, 2))
    source = odd_rows.OddRows(seed=count + 1, image="i.png")
    rows = [source.row() for _ in range(count)]
    plimsoll.import_vision(chats.write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "set", errors_max=MANY, governor=governor)
    said: list[str] = []
    made = plimsoll.import_pairs(tmp_path / "set", tmp_path / "pairs", model=tmp_path, errors_max=MANY, governor=governor)
    with plimsoll.ImageSet(tmp_path / "set") as images:
        messages = [row.messages for row in images]
    keys = made["keys"]
    assert keys["used"] + keys["refused"] + sum(count for _, count in keys["counted"].values()) == sum(map(odd_rows.keys_in, messages))
    found = {mark for text in said for mark in odd_rows.MARK.findall(text)}
    for one in messages:
        marks = odd_rows.marks_in(one)
        if any(mark in found for mark, _ in marks):
            for message in one:
                for mark, path in odd_rows.marks_in(message):
                    assert mark in found or {message["role"], f"messages.{path[0]}"} & keys["counted"].keys(), (mark, one)
