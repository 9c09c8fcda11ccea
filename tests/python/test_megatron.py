# SPDX-License-Identifier: Apache-2.0
"""Megatron's files of a token set and back: what is written is what its published format says, read here by NumPy
alone; what is damaged is refused."""
import json
import random
import struct
import subprocess

import numpy as np
import pytest

plimsoll = pytest.importorskip("plimsoll")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tests.support import chats

DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def read_megatron(prefix):
    """Documents of an indexed dataset, as NVIDIA's megatron/core/datasets/indexed_dataset.py lays them out."""
    index = (prefix.parent / (prefix.name + ".idx")).read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, documents = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    dtype = np.dtype(DTYPES[code])
    at = 9 + 8 + 1 + 8 + 8
    lengths = np.frombuffer(index, np.int32, sequences, at)
    places = np.frombuffer(index, np.int64, sequences, at + lengths.nbytes)
    begins = np.frombuffer(index, np.int64, documents, at + lengths.nbytes + places.nbytes)
    assert len(index) == at + lengths.nbytes + places.nbytes + begins.nbytes
    ids = (prefix.parent / (prefix.name + ".bin")).read_bytes()
    rows = [np.frombuffer(ids, dtype, length, place) for length, place in zip(lengths, places, strict=True)]
    assert sum(row.nbytes for row in rows) == len(ids)
    return dtype, [np.concatenate(rows[a:b]) if b > a else np.empty(0, dtype) for a, b in zip(begins, begins[1:])]


def write_megatron(prefix, documents, dtype):
    """Each document a list of sequences."""
    code = next(code for code, one in DTYPES.items() if one == dtype)
    sequences = [np.array(one, dtype) for document in documents for one in document]
    begins = np.cumsum([0, *(len(document) for document in documents)]).astype(np.int64)
    places = np.cumsum([0, *(one.nbytes for one in sequences)])[:-1].astype(np.int64)
    (prefix.parent / (prefix.name + ".idx")).write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(begins))
        + np.array([len(one) for one in sequences], np.int32).tobytes() + places.tobytes() + begins.tobytes())
    (prefix.parent / (prefix.name + ".bin")).write_bytes(b"".join(one.tobytes() for one in sequences))


@pytest.fixture
def made(tmp_path, governor):
    chats.make_tokenizer(tmp_path / "tokenizer")
    rows = [{"messages": chats.chat(random.Random(k))} for k in range(200)]
    plimsoll.import_chat(rows, tmp_path / "set", tokenizer=tmp_path / "tokenizer", governor=governor)
    return plimsoll.TokenSet(tmp_path / "set")


def test_a_set_written_and_made_again_has_the_ids_of_every_row(made, tmp_path):
    assert plimsoll.store.export(made.path, tmp_path / "out.idx") == 200
    dtype, documents = read_megatron(tmp_path / "out")
    assert dtype == np.uint16 and len(documents) == 200
    for document, (ids, _) in zip(documents, made, strict=True):
        assert document.tolist() == ids.tolist()
    assert plimsoll.store.import_rows(tmp_path / "out.idx", tmp_path / "again") == 200
    again = plimsoll.TokenSet(tmp_path / "again")
    again.verify()
    for (ids, mask), (wanted, _) in zip(again, made, strict=True):
        assert ids.tolist() == wanted.tolist() and mask.all()
    assert again.vocabulary == 1 + max(ids.max() for ids, _ in made)
    assert again.batches(2, 256).next().trained > 0
    with pytest.raises(ValueError, match="out.idx exists"):
        plimsoll.store.export(made.path, tmp_path / "out.bin")
    with pytest.raises(ValueError, match="a token set is written in Megatron's form"):
        plimsoll.store.export(made.path, tmp_path / "rows.npy")
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("dtype", list(DTYPES.values()))
def test_documents_of_several_sequences_of_every_type_are_rows(tmp_path, dtype):
    random_ids = random.Random(3)
    most = min(np.iinfo(dtype).max, 100_000)
    documents = [[[random_ids.randrange(most) for _ in range(random_ids.randrange(40))]
                  for _ in range(random_ids.randrange(4))] for _ in range(300)]
    documents[7] = [[most - 1] * 50_000]
    write_megatron(tmp_path / "in", documents, dtype)
    plimsoll.store.import_rows(tmp_path / "in.bin", tmp_path / "set")
    wanted = [[token for sequence in document for token in sequence] for document in documents]
    assert [ids.tolist() for ids, _ in plimsoll.TokenSet(tmp_path / "set")] == [row for row in wanted if row]
    plimsoll.store.export(tmp_path / "set", tmp_path / "out", format="megatron")
    _, again = read_megatron(tmp_path / "out")
    assert [row.tolist() for row in again] == [row for row in wanted if row]


def test_what_is_damaged_is_refused(tmp_path):
    write_megatron(tmp_path / "in", [[[1, 2, 3]], [[4]]], np.int32)
    index = bytearray((tmp_path / "in.idx").read_bytes())

    def refused(change, what, error=plimsoll.CorruptError):
        damaged = bytearray(index)
        change(damaged)
        (tmp_path / "in.idx").write_bytes(damaged)
        with pytest.raises(error, match=what):
            plimsoll.store.import_rows(tmp_path / "in.idx", tmp_path / "set")
        assert not (tmp_path / "set").exists()

    refused(lambda d: d.__setitem__(0, 0), "no index of Megatron's")
    refused(lambda d: d.__setitem__(17, 7), "which are no whole numbers", ValueError)
    refused(lambda d: d.__setitem__(24, 9), "it is shorter than what it says it holds")
    refused(lambda d: d.__setitem__(34, 9), "sequence 0 is not in")
    refused(lambda d: d.__setitem__(45, 9), "sequence 0 is not in")
    refused(lambda d: d.__setitem__(58, 9), "document 0 is of sequences")
    refused(lambda d: d.__delitem__(slice(50, None)), "it is shorter than what it says it holds")
    (tmp_path / "in.idx").write_bytes(index)
    ids = np.array([1, -2, 3, 4], np.int32)
    (tmp_path / "in.bin").write_bytes(ids.tobytes())
    with pytest.raises(ValueError, match="an id of document 0 is below 0, or too large"):
        plimsoll.store.import_rows(tmp_path / "in.idx", tmp_path / "set")
    (tmp_path / "in.bin").unlink()
    with pytest.raises((plimsoll.NotFoundError, OSError)):
        plimsoll.store.import_rows(tmp_path / "in.idx", tmp_path / "set")


def test_the_program_writes_reads_and_verifies(made, program, tmp_path):
    def run(*words):
        done = subprocess.run([program, "store", *map(str, words)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "every checksum matches" in run("verify", made.path)
    assert json.loads(run("export", made.path, "--out", tmp_path / "out.idx", "--json"))["rows"] == 200
    said = run("import", tmp_path / "out.idx", "--out", tmp_path / "again")
    assert f"token set {tmp_path / 'again'}\n  rows      200, " in said
    assert json.loads(run("info", tmp_path / "again", "--json"))["about"]["format"] == "megatron"
    data = bytearray((tmp_path / "again").read_bytes())
    data[5000] ^= 1
    (tmp_path / "again").write_bytes(data)
    done = subprocess.run([program, "store", "verify", tmp_path / "again"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the checksum of row" in done.stderr
