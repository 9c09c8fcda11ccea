# SPDX-License-Identifier: Apache-2.0
"""TokenSet and its batches: every token of every row once an epoch, in sequences that a resumption continues exactly;
a document's labels and positions are its own."""
import filecmp
import json
import pickle
import random
import sys
import time

import numpy as np
import pytest

plimsoll = pytest.importorskip("plimsoll")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tests.support import chats
from tests.support.cgroup import MemoryCgroup


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    chats.make_tokenizer(folder / "tokenizer")
    rows = [{"messages": chats.chat(random.Random(k), most=12)} for k in range(300)]
    chats.write_lines(folder / "rows.jsonl", rows)
    with plimsoll.Governor("4GiB") as governor:
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
import ctypes, json, re, sys
import plimsoll
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages are 2 MiB each, taken as the kernel likes.
made = plimsoll.import_chat(sys.argv[1], sys.argv[2], tokenizer=sys.argv[3], governor=plimsoll.Governor(sys.argv[4]),
                            encoder=sys.argv[5])
assert "torch" not in sys.modules
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]  # Its own, not one that it inherited.
print(json.dumps({"rows": made["rows"], "peak": int(peak) << 10}))
"""


def write_rows(path, rows, most):
    """Chats that all differ, written as they are made."""
    pool = [json.dumps({"messages": chats.chat(random.Random(k), most=most)}, ensure_ascii=False) for k in range(500)]
    with open(path, "w", encoding="utf-8") as out:
        for k in range(rows):
            out.write(pool[k % 500].replace('"content": "', f'"content": "{k} ', 1) + "\n")
    return path


def command(folder, files, out, limit, encoder):
    return [sys.executable, "-c", MEASURE, files, folder / out, folder / "tokenizer", str(limit), encoder]


def peak_of(folder, files, out, limit, rows, encoder="auto"):
    """Imports them in a cgroup of the limit: all rows, without a kill. Returns the peak."""
    with MemoryCgroup(limit) as group:
        run = group.run(command(folder, files, out, limit, encoder))
    assert run.returncode == 0 and run.oom_kills == 0, run.stderr
    assert run.last_json["rows"] == rows and 20 << 20 < run.last_json["peak"] and run.unmapped_peak_bytes < limit
    return run.last_json["peak"]


def test_t1_importing_takes_the_same_memory_for_any_number_of_rows(tmp_path):
    MemoryCgroup.needed()
    chats.make_tokenizer(tmp_path / "tokenizer")
    few, many = (peak_of(tmp_path, write_rows(tmp_path / "rows.jsonl", rows, most=20), "set", 192 << 20, rows)
                 for rows in (3000, 20_000))  # 17 MiB of text more.
    assert many <= few + (16 << 20)  # For caches of the tokenizers library, which are bounded and fill.


LIMIT = 384 << 20


def rows_in(journal):
    return json.loads(journal.read_text(encoding="utf-8")[9:])["counts"][1] if journal.exists() else 0


@pytest.mark.slow
def test_t1_300000_rows_are_the_same_bytes_in_384_mib_in_a_large_limit_and_after_20_kills(tmp_path):
    MemoryCgroup.needed()
    chats.make_tokenizer(tmp_path / "tokenizer")
    files = write_rows(tmp_path / "rows.jsonl", 300_000, most=20)
    peak_of(tmp_path, files, "tight", LIMIT, 300_000)
    peak_of(tmp_path, files, "large", 4 << 30, 300_000)
    assert filecmp.cmp(tmp_path / "tight", tmp_path / "large", shallow=False)
    numbers, often = random.Random(3), "from plimsoll.data.importers import _chat_import\n_chat_import._COMMIT_BYTES = 2 << 20\n"
    program = command(tmp_path, files, "killed", LIMIT, "auto")
    program[2] = often + program[2]
    journal = tmp_path / "killed.partial" / "journal"
    with MemoryCgroup(LIMIT) as group:
        for kill in range(20):
            child = group.start(program)
            while rows_in(journal) < 14_000 * kill:
                assert child.poll() is None
                time.sleep(0.02)
            time.sleep(numbers.uniform(0, 0.5))
            child.kill()
            assert child.wait() == -9
        assert group.oom_kills() == 0
    assert rows_in(journal) >= 266_000
    peak_of(tmp_path, files, "killed", LIMIT, 300_000)
    assert filecmp.cmp(tmp_path / "tight", tmp_path / "killed", shallow=False)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["tokenizers", "gigatoken"])
def test_t1_3000000_rows_take_the_memory_of_300000(tmp_path, encoder):
    MemoryCgroup.needed()
    if encoder == "gigatoken":
        pytest.importorskip("gigatoken")
    chats.make_tokenizer(tmp_path / "tokenizer")
    few, many = (peak_of(tmp_path, write_rows(tmp_path / "rows.jsonl", rows, most=4), "set", LIMIT, rows, encoder)
                 for rows in (300_000, 3_000_000))
    print(f"peaks: {few / 2**20:.1f} MiB, {many / 2**20:.1f} MiB")
    assert many <= few + (2 << 20)


@pytest.mark.slow
def test_t1_long_chats_are_the_same_bytes_in_384_mib_and_in_a_large_limit(tmp_path):
    """1,000 of 61 kB, and one of 60 MB."""
    MemoryCgroup.needed()
    chats.make_tokenizer(tmp_path / "tokenizer")
    words = json.dumps({"messages": chats.chat(random.Random(1), turns=3)}, ensure_ascii=False)
    with open(tmp_path / "rows.jsonl", "w", encoding="utf-8") as out:
        for k in range(1001):
            numbers, messages, held = random.Random(k), [], 0
            while held < (60_000_000 if k == 500 else 61_000):
                turn = chats.chat(numbers, system=False, turns=1, most=400)
                messages += turn
                held += sum(len(one["content"].encode()) for one in turn)
            out.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        out.write(words)
    peak_of(tmp_path, tmp_path / "rows.jsonl", "tight", LIMIT, 1002)
    peak_of(tmp_path, tmp_path / "rows.jsonl", "large", 4 << 30, 1002)
    assert filecmp.cmp(tmp_path / "tight", tmp_path / "large", shallow=False)
    with plimsoll.TokenSet(tmp_path / "tight") as tokens:
        tokens.verify()
        assert tokens.longest_row > 10_000_000
