# SPDX-License-Identifier: Apache-2.0
"""TokenSet and its batches: every token of every row once an epoch, in sequences that a resumption continues exactly;
a document's labels and positions are its own."""
import json
import pickle
import random

import numpy as np
import pytest

plimsoll = pytest.importorskip("plimsoll")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tests.support import chats  # noqa: E402
from tests.support.cgroup import MemoryCgroup  # noqa: E402


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    chats.make_tokenizer(folder / "tokenizer")
    rows = [{"messages": chats.chat(random.Random(k), most=12)} for k in range(300)]
    chats.write_lines(folder / "rows.jsonl", rows)
    with plimsoll.Governor("2GiB") as governor:
        plimsoll.import_chat(folder / "rows.jsonl", folder / "set", tokenizer=folder / "tokenizer", governor=governor)
    return folder / "set"


@pytest.fixture
def tokens(made):
    with plimsoll.TokenSet(made) as tokens:
        yield tokens


def documents(batch):
    """(ids, labels, positions) of each document of a batch, padding left out."""
    for k in range(len(batch)):
        for document in range(batch.documents[k].max() + 1):
            here = batch.documents[k] == document
            yield batch.input_ids[k][here], batch.labels[k][here], batch.position_ids[k][here]


def test_info_says_what_it_holds(tokens, made):
    said = plimsoll.info(made)
    assert said["kind"] == "token_set" and said["rows"] == len(tokens) == 300
    assert said["tokens"] == tokens.tokens == sum(len(ids) for ids, _ in tokens)
    assert said["about"] == tokens.about and said["about"]["inputs"][0]["name"] == "rows.jsonl"
    assert pickle.loads(pickle.dumps(tokens)).fingerprint == said["fingerprint"]
    with pytest.raises(IndexError, match="row 300 of 300"):
        tokens[300]
    tokens.verify()


@pytest.mark.parametrize("packing, shuffle", [(True, True), (True, False), (False, True), (False, False)])
def test_t6_every_row_comes_once_an_epoch_with_labels_and_positions_of_its_own(tokens, packing, shuffle):
    wanted = {ids.astype(np.int64).tobytes(): mask for ids, mask in tokens}
    assert len(wanted) == 300
    batches = tokens.batches(4, 512, packing=packing, shuffle=shuffle, window=64, seed=3)
    for epoch in range(2):
        seen, sequences = [], 0
        for batch in batches:
            assert batch.place[0] == epoch
            sequences += len(batch)
            found = list(documents(batch))
            assert batch.rows == len(found) and batch.tokens == sum(len(ids) for ids, _, _ in found)
            for ids, labels, positions in found:
                trained = wanted[ids.tobytes()].copy()
                trained[0] = False  # It would be predicted from the document before it.
                assert np.array_equal(labels, np.where(trained, ids, -100))
                assert np.array_equal(positions, np.arange(len(ids)))
                seen.append(ids.tobytes())
            nothing = batch.documents < 0
            assert (batch.input_ids[nothing] == 0).all() and (batch.labels[nothing] == -100).all()
        assert sorted(seen) == sorted(wanted)
        filled = tokens.tokens / (sequences * 512)
        assert filled > 0.85 if packing else sequences == 300


def test_attention_stays_inside_a_document(tokens):
    batch = tokens.batches(2, 256, window=64).next()
    mask = batch.attention_mask()
    for k in range(2):
        for i in range(0, 256, 17):
            for j in range(256):
                assert mask[k, 0, i, j] == (j <= i and batch.documents[k, i] == batch.documents[k, j])


def test_a_resumption_goes_on_exactly(tokens):
    def digest(batch):
        return batch.input_ids.tobytes() + batch.labels.tobytes() + batch.documents.tobytes()

    options = {"batch_size": 3, "sequence_length": 200, "window": 50, "seed": 9}
    whole = tokens.batches(**options)
    places, batches = [], []
    for _ in range(120):  # More than one epoch.
        places.append(whole.place)
        batches.append(digest(whole.next()))
    assert places[-1][0] > 0 and len(set(batches)) == 120
    for at in range(0, 120, 7):
        again = tokens.batches(**options, place=places[at])
        assert [digest(again.next()) for _ in range(min(5, 120 - at))] == batches[at:at + 5]
    whole.seek(places[2])
    assert digest(whole.next()) == batches[2]
    assert tokens.batches(**options | {"seed": 10}).next().input_ids.tobytes() != batches[0][:4800]


def test_rows_are_held_out_and_are_the_same_for_any_seed(tokens):
    def rows(**options):
        return sorted(ids.tobytes() for batch in tokens.batches(4, 512, window=64, **options) for ids, _, _ in documents(batch))

    every, kept, held = rows(), rows(held_out=40), rows(held_out=40, only_held_out=True)
    assert len(held) == 40 and len(kept) == 260 and sorted(kept + held) == every
    assert rows(held_out=40, seed=5) == kept and rows(held_out=40, only_held_out=True, shuffle=False) == held
    first = [tokens[row][0].astype(np.int64).tobytes() for row in (*range(40), *range(260, 300))]
    assert 0 < len(set(first) & set(held)) < 40  # From everywhere.
    options = {"batch_size": 3, "sequence_length": 200, "window": 50, "held_out": 40}
    whole = tokens.batches(**options)
    place = (0, 0, 0)
    while place[0] == 0 or place[2] < 3:
        place = whole.place
        wanted = whole.next().input_ids.tobytes()
    assert tokens.batches(**options, place=place).next().input_ids.tobytes() == wanted


def test_a_sequence_without_a_label_is_left_out(tmp_path, governor):
    chats.make_tokenizer(tmp_path / "tokenizer")
    rows = [{"messages": [{"role": "user", "content": "a " * 40}, {"role": "assistant", "content": "b"}]},
            {"prompt": "a", "completion": "b"}]
    chats.write_lines(tmp_path / "rows.jsonl", rows)
    plimsoll.import_chat(tmp_path / "rows.jsonl", tmp_path / "set", tokenizer=tmp_path / "tokenizer",
                         governor=governor)
    batches = list(plimsoll.TokenSet(tmp_path / "set").batches(1, 16, packing=False))
    assert len(batches) == 1 and (batches[0].labels >= 0).any()


def test_options_and_places_that_are_none_are_refused(tokens):
    for options, what in [({"batch_size": 0}, "batch_size: 0 is below 1"),
                          ({"sequence_length": 1}, "sequence_length: 1 is below 2"),
                          ({"window": 0}, "window: 0 is not 1 to"), ({"pad_id": 10**6}, "pad_id: 1000000 is no id"),
                          ({"held_out": 300}, "held_out: 300 rows leave none"), ({"only_held_out": True}, "held_out: 0 rows"),
                          ({"place": (0, 7, 0)}, "there is no position 7 of 300 rows in windows of 1024"),
                          ({"place": (0, 0, 10**6)}, "there is no sequence 1000000")]:
        with pytest.raises(ValueError, match=what):
            tokens.batches(**options)


MEASURE = """
import json, re, sys
import plimsoll
made = plimsoll.import_chat(sys.argv[1], sys.argv[2], tokenizer=sys.argv[3], governor=plimsoll.Governor(sys.argv[4]))
assert "torch" not in sys.modules
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]  # Its own, not one that it inherited.
print(json.dumps({"rows": made["rows"], "peak": int(peak) << 10}))
"""


def peak_of(folder, rows, limit):
    """Imports so many rows, written as they are made, in a cgroup; its peak and the set's bytes."""
    import sys

    pool = [json.dumps({"messages": chats.chat(random.Random(k), most=20)}, ensure_ascii=False) for k in range(500)]
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as out:
        for k in range(rows):
            out.write(pool[k % 500].replace('"content": "', f'"content": "{k} ', 1) + "\n")
    with MemoryCgroup(limit) as group:
        run = group.run([sys.executable, "-c", MEASURE, folder / "rows.jsonl", folder / f"set{rows}",
                         folder / "tokenizer", str(limit)])
    assert run.returncode == 0 and run.oom_kills == 0, run.stderr
    assert run.last_json["rows"] == rows
    assert 20 << 20 < run.last_json["peak"] < limit
    return run.last_json["peak"]


def compare_peaks(tmp_path, few, many, limit, more=16 << 20):
    """`more`: bytes for caches of the tokenizers library, which are bounded and fill."""
    MemoryCgroup.needed()
    chats.make_tokenizer(tmp_path / "tokenizer")
    assert peak_of(tmp_path, many, limit) <= peak_of(tmp_path, few, limit) + more


def test_t1_importing_takes_the_same_memory_for_any_number_of_rows(tmp_path):
    compare_peaks(tmp_path, 3000, 20_000, 192 << 20)  # 17 MiB of text more.


@pytest.mark.slow
def test_t1_importing_300000_rows_takes_the_memory_of_3000(tmp_path):
    compare_peaks(tmp_path, 3000, 300_000, 384 << 20)
