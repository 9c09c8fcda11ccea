# SPDX-License-Identifier: Apache-2.0
"""Files of rows: what they are is told by their bytes, whatever they are called; what they hold is used, refused or
counted. WebDataset's own rule for samples; Parquet and Arrow by pyarrow."""
import bz2
import gzip
import io
import json
import lzma
import random
import subprocess
import sys
import tarfile

import pytest

plimsoll = pytest.importorskip("plimsoll")
pytest.importorskip("tokenizers")

from tests.support import chats, pictures

PICTURE = pictures.random_picture("png", 3)
OTHER = pictures.random_picture("jpeg", 4)


def tar(members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def pairs(count, kind="txt", first=0):
    return [(f"{k:04d}.{ext}", data) for k in range(first, first + count) for ext, data in
            (("png", PICTURE), (kind, f"caption {k}".encode()))]


@pytest.fixture
def vision(governor, tmp_path):
    """Imports bytes as a file; its rows as (images, texts), and what was odd."""
    def imported(data, name="a.tar", **options):
        (tmp_path / name).write_bytes(data)
        made = plimsoll.import_vision(tmp_path / name, tmp_path / "set", governor=governor, rebuild=True, **options)
        rows = [(len(row.sizes), [part["text"] for message in row.messages for part in message["content"] if part["type"] == "text"])
                for row in plimsoll.ImageSet(tmp_path / "set")]
        return rows, made["about"]["odd"]
    return imported


@pytest.mark.parametrize("kind", ["txt", "text", "caption", "cap", "cls", "TXT"])
def test_s28_the_text_of_a_sample_is_its_member_of_text(vision, kind):
    rows, odd = vision(tar(pairs(3, kind)))
    assert rows == [(1, [f"caption {k}"]) for k in range(3)] and odd == {}


@pytest.mark.parametrize("said", [{"caption": "a cat"}, {"text": "a cat"}, {"captions": ["a cat"]}, {"txt": "a cat"}])
def test_s28_the_caption_of_a_sample_may_be_in_its_json(vision, said):
    rows, odd = vision(tar([("0.jpg", OTHER), ("0.json", json.dumps(said).encode())]))
    assert rows == [(1, ["a cat"])] and odd == {}


def test_s28_what_img2dataset_writes_is_an_image_and_its_caption(vision):
    said = {"caption": "a cat", "url": "https://example.org/a.jpg", "key": "000000000", "status": "success", "width": 9}
    rows, _ = vision(tar([("000000000.jpg", OTHER), ("000000000.json", json.dumps(said).encode()), ("000000000.txt", b"a cat")]))
    assert rows == [(1, ["a cat"])]


@pytest.mark.parametrize("kind, data", [("txt", b"caption %d"), ("json", b'{"caption": "%d"}'), ("cls", b"%d"), ("caption", b"%d")])
def test_s28_names_with_dots_that_join_samples_are_refused_with_archive_and_member(vision, kind, data):
    members = [(f"photo.{k}.5.{ext}", one) for k in range(3) for ext, one in (("png", PICTURE), (kind, data % k))]
    with pytest.raises(ValueError, match=rf"a\.tar: photo\.1\.5\.{kind}: a second .* of sample 'photo'.*first dot"):
        vision(tar(members))


def test_s28_a_key_is_the_folder_and_the_name_up_to_its_first_dot(vision):
    members = [("a.b/0.png", PICTURE), ("a.b/0.txt", b"first"), ("a.c/0.png", PICTURE), ("a.c/0.txt", b"second"),
               ("1.left.png", PICTURE), ("1.right.jpg", OTHER), ("1.txt", b"two images")]
    rows, odd = vision(tar(members))
    assert rows == [(1, ["first"]), (1, ["second"]), (2, ["two images"])] and odd == {}


def test_s28_a_member_that_is_there_twice_and_a_sample_that_is_are_refused(vision):
    with pytest.raises(ValueError, match=r"a\.tar: 0\.png: it is there twice"):
        vision(tar([("0.png", PICTURE), ("0.txt", b"a"), ("0.png", PICTURE)]))
    with pytest.raises(ValueError, match=r"a\.tar: 0\.txt: its sample '0' was there before.*--sort=name"):
        vision(tar([("0.png", PICTURE), ("1.png", PICTURE), ("0.txt", b"a"), ("1.txt", b"b")]))
    with pytest.raises(ValueError, match=r"a\.tar: 0\.caption: another text than that of \.txt.*--text-field caption"):
        vision(tar([("0.png", PICTURE), ("0.txt", b"a"), ("0.caption", b"b")]))
    rows, odd = vision(tar([("0.png", PICTURE), ("0.txt", b"a"), ("0.caption", b"b")]), text_field="caption")
    assert rows == [(1, ["b"])] and odd == {"member .txt": {"count": 1, "first": ["0.txt"]}}


def test_s28_members_that_are_not_used_are_counted_by_extension(vision, tmp_path, capfd):
    members = [(f"{k}.{ext}", data) for k in range(5) for ext, data in
               (("png", PICTURE), ("txt", b"a"), ("npy", b"1"), ("seg.pyd", b"2"), ("cls", b"7"))]
    rows, odd = vision(tar([*members, ("README", b"none"), ("._0.png", b"of macOS")]))
    assert len(rows) == 5
    assert {key: one["count"] for key, one in odd.items()} == {
        "member .npy": 5, "member .seg.pyd": 5, "member .cls": 5, "member without an extension": 1, "hidden member": 1}
    assert odd["member .npy"]["first"] == ["0.npy", "1.npy", "2.npy"]
    from plimsoll.cli._program import main

    assert main(["import", "vision", str(tmp_path / "a.tar"), "--out", str(tmp_path / "again"), "--quiet"]) == 0
    assert "5 member .npy (0.npy, 1.npy, 2.npy" in capfd.readouterr().out


def test_s28_archives_that_are_joined_are_read_and_what_else_follows_is_an_error(vision):
    one, other = tar(pairs(3)), tar(pairs(3, first=3))
    assert len(vision(one + other)[0]) == 6
    assert len(vision(gzip.compress(one) + gzip.compress(other), "b.tar")[0]) == 6
    with pytest.raises(ValueError, match=r"a\.tar: damaged archive: .* at byte \d+"):
        vision(one + b"something else" * 100)
    assert len(vision(one + one)[0]) == 6  # Shards may have the same keys.
    assert len(vision(tar(pairs(1)) + tar(pairs(1)))[0]) == 2
    end = len(one) - len(one.rstrip(b"\0"))
    with pytest.raises(ValueError, match="ends without an archive's end"):  # Cut between two members.
        vision(one[:(len(one) - end + 511) // 512 * 512])


@pytest.mark.parametrize("name, pack", [("a.tgz", gzip.compress), ("a.tar.gz", gzip.compress), ("a.tbz2", bz2.compress),
                                        ("a.tar.xz", lzma.compress), ("a.jsonl", lambda data: data), ("data", gzip.compress)])
def test_s28_a_packed_archive_is_known_by_its_bytes(vision, name, pack):
    assert vision(pack(tar(pairs(2))), name)[0] == [(1, ["caption 0"]), (1, ["caption 1"])]


def test_s28_an_archive_packed_by_zstd_is_read(vision, tmp_path):
    (tmp_path / "plain").write_bytes(tar(pairs(2)))
    packed = subprocess.run(["zstd", "-q", "-c", tmp_path / "plain"], capture_output=True, check=True).stdout
    assert vision(packed, "a.tar.zst")[0] == [(1, ["caption 0"]), (1, ["caption 1"])]


def test_s28_errors_name_archive_and_member(vision):
    with pytest.raises(ValueError, match=r"a\.tar: 0: neither messages"):
        vision(tar([("0.txt", b"x"), ("1.png", PICTURE), ("1.txt", b"x")]))
    with pytest.raises(ValueError, match=r"a\.tar: 0001: "):
        vision(tar([*pairs(1), ("0001.png", b"no image"), ("0001.txt", b"x")]))
    with pytest.raises(ValueError, match=r"a\.tar: 0\.txt: not UTF-8"):
        vision(tar([("0.png", PICTURE), ("0.txt", b"\x80abc")]))
    rows, odd = vision(tar([*pairs(1), ("0001.png", b"no image"), ("0001.txt", b"x")]), errors_max=1)
    assert len(rows) == 1 and odd["bad_image"]["first"] == ["a.tar: 0001"]


def test_s28_parts_of_archives_count_what_they_do_not_use(governor, tmp_path):
    files = []
    for k in range(3):
        files.append(tmp_path / f"{k}.tar")
        files[-1].write_bytes(tar([*pairs(2), ("0009.png", PICTURE), ("0009.npy", b"x")]))
    whole = plimsoll.import_vision(files, tmp_path / "whole", governor=governor)
    for k in (1, 2):
        plimsoll.import_vision(files, tmp_path / "set", part=(k, 2), governor=governor)
    joined = plimsoll.import_vision(files, tmp_path / "set", join=2, governor=governor)
    assert joined["about"]["odd"] == whole["about"]["odd"] and whole["about"]["odd"]["member .npy"]["count"] == 3
    assert (tmp_path / "set").read_bytes() == (tmp_path / "whole").read_bytes()


ROWS = [{"messages": [{"role": "user", "content": f"Question {k}? Überall 数"}, {"role": "assistant", "content": f"Answer {k}."}]}
        for k in range(5)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


@pytest.fixture
def chat(governor, tmp_path):
    """Imports bytes as a file; its rows as ids, and what was made."""
    folder = tmp_path / "tokenizer"
    chats.make_tokenizer(folder)

    def imported(data, name="a.jsonl", rows=None, **options):
        source = rows
        if rows is None:
            source = tmp_path / name
            source.write_bytes(data)
        made = plimsoll.import_chat(source, tmp_path / "set", tokenizer=folder, governor=governor, rebuild=True, **options)
        with plimsoll.TokenSet(tmp_path / "set") as tokens:
            return [tokens.row(k)[0].tolist() for k in range(len(tokens))], made
    return imported


TEXTS = {
    "plain": LINES.encode(), "mark": LINES.encode("utf-8-sig"), "utf-16": LINES.encode("utf-16"),
    "utf-16 big": b"\xfe\xff" + LINES.encode("utf-16-be"), "utf-32": LINES.encode("utf-32"), "bzip2": bz2.compress(LINES.encode()),
    "two bzip2": bz2.compress(LINES[:99].encode()) + bz2.compress(LINES[99:].encode()), "xz": lzma.compress(LINES.encode()),
    "two xz": lzma.compress(LINES[:99].encode()) + bytes(8) + lzma.compress(LINES[99:].encode()),
    "largest xz": lzma.compress(LINES.encode(), preset=9), "gzip": gzip.compress(LINES.encode()),
    "gzip of utf-16": gzip.compress(LINES.encode("utf-16")), "array": json.dumps(ROWS).encode(),
    "indented array": json.dumps(ROWS, indent=2).encode(), "indented objects": "\n".join(json.dumps(row, indent=2) for row in ROWS).encode(),
    "bzip2 of an array": bz2.compress(json.dumps(ROWS, indent=1).encode()),
    "marked objects": "\n".join(json.dumps(row, indent="\t") for row in ROWS).encode("utf-8-sig"),
    "archive": tar([(f"{k}.json", json.dumps(row).encode()) for k, row in enumerate(ROWS)]),
    "table": ("messages\tid\n" + "".join('"' + json.dumps(row["messages"], ensure_ascii=False).replace('"', '""') + f'"\t{k}\n'
                                         for k, row in enumerate(ROWS))).encode()}


@pytest.mark.parametrize("kind, name", list(zip(TEXTS, ["a.jsonl", "a.json", "a.txt.gz", "a"] * len(TEXTS), strict=False)))
def test_s31_rows_are_read_from_what_a_file_is_whatever_it_is_called(chat, kind, name):
    ids, made = chat(TEXTS[kind], name)
    assert ids == chat(b"", rows=ROWS)[0] and made["rows"] == 5


def test_s31_tables_are_rows_by_their_header(chat):
    wanted = [{"instruction": "Say, what?", "input": "", "output": 'a "quoted"\nanswer'}, {"instruction": "Why", "output": "so"}]
    table = 'instruction,input,output\n"Say, what?",,"a ""quoted""\nanswer"\nWhy,,so\n'
    for text in (table.encode(), table.encode("utf-16"), gzip.compress(table.encode()), table.replace("\n", "\r\n").encode()):
        rows = wanted if b"\r\n" not in text else [{**wanted[0], "output": 'a "quoted"\r\nanswer'}, wanted[1]]
        assert chat(text, "a.csv")[0] == chat(b"", rows=rows)[0]
    with pytest.raises(ValueError, match=r"a\.csv:3: 2 fields, where the header names 3"):
        chat(b"instruction,input,output\na,b,c\nd,e\n", "a.csv")
    with pytest.raises(ValueError, match=r"a\.csv: line 2: "):
        chat(b"when,who\n1,2\n", "a.csv")
    long = "x" * 200_000
    assert len(chat(f"instruction,output\na,{long}\n".encode(), "a.csv")[0]) == 1


def arrow_files(folder, rows):
    """Kinds of files that pyarrow and datasets write, by name."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = arrow.Table.from_pylist(rows)
    parquet.write_table(table, folder / "rows.parquet")
    parquet.write_table(table, folder / "groups.parquet", row_group_size=2, compression="zstd")
    parquet.write_table(table, folder / "parquet.jsonl", use_dictionary=False, compression="none")
    for name, options in (("file.arrow", None), ("packed.arrow", arrow.ipc.IpcWriteOptions(compression="lz4"))):
        with arrow.ipc.new_file(folder / name, table.schema, options=options) as writer:
            writer.write_table(table, 2)
    with arrow.ipc.new_stream(folder / "stream.arrow", table.schema) as writer:
        writer.write_table(table, 3)
    return [folder / name for name in ("rows.parquet", "groups.parquet", "parquet.jsonl", "file.arrow", "packed.arrow", "stream.arrow")]


def test_s31_parquet_and_arrow_are_read(chat, tmp_path):
    for path in arrow_files(tmp_path, ROWS):
        assert chat(b"", rows=path)[0] == chat(b"", rows=ROWS)[0], path


def test_s31_what_save_to_disk_writes_is_read_as_a_folder(chat, tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "saved", num_shards=2)
    assert chat(b"", rows=tmp_path / "saved")[0] == chat(b"", rows=ROWS)[0]
    data.select([4, 0, 3]).save_to_disk(tmp_path / "some")
    assert chat(b"", rows=tmp_path / "some")[0] == chat(b"", rows=[ROWS[4], ROWS[0], ROWS[3]])[0]
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"several splits: name one of .*splits/train, .*splits/test"):
        chat(b"", rows=tmp_path / "splits")
    assert len(chat(b"", rows=tmp_path / "splits" / "train")[0]) == 5
    with pytest.raises(ValueError, match="save_to_disk.. did not write: name the files in it"):
        chat(b"", rows=tmp_path / "tokenizer")


def test_s31_images_in_parquet_are_images(governor, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [{"image": {"bytes": PICTURE, "path": "a.png"}, "text": b"a text of bytes"}, {"image": {"bytes": OTHER, "path": None}, "text": b"b"}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    plimsoll.import_vision(tmp_path / "rows.parquet", tmp_path / "set", governor=governor)
    images = plimsoll.ImageSet(tmp_path / "set")
    assert [images.encoded(k).tobytes() for k in range(2)] == [PICTURE, OTHER]
    assert images[0].messages[0]["content"][1]["text"] == "a text of bytes"


def test_s31_a_row_of_parquet_is_named_by_its_number(chat, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.Table.from_pylist([{"text": "a"}, {"text": None}, {"text": "c"}]), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"rows\.parquet\[1\]: "):
        chat(b"", rows=tmp_path / "rows.parquet")
    whole = (tmp_path / "rows.parquet").read_bytes()
    with pytest.raises(ValueError, match=r"a\.parquet\[0\]: damaged, or not as pyarrow reads it"):
        chat(whole[:-20], "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: a Parquet file packed by gzip: unpack it first"):
        chat(gzip.compress(whole), "a.parquet")


FLAT = """
import re, sys
import pyarrow.parquet
import plimsoll
from plimsoll.data.importers._arrow_rows import arrow_rows
with plimsoll.Governor("600MiB") as governor:
    size = sum(len(row["text"]) for _, row in arrow_rows(sys.argv[1], "parquet", governor))
print(size, int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) << 10)
"""


def test_s31_memory_does_not_know_how_many_rows_a_group_has(tmp_path):
    """One row group of Parquet: 80 MB of texts more are read in no more memory."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    peaks = []
    for count in (200, 1_800):
        text = "".join(random.Random(1).choices("abcdefgh ", k=50_000))
        table = arrow.Table.from_pylist([{"text": text}] * count)
        parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=count, use_dictionary=False, write_batch_size=16)
        del table
        run = subprocess.run([sys.executable, "-c", FLAT, tmp_path / "rows.parquet"], capture_output=True, text=True, check=True)
        size, peak = map(int, run.stdout.split())
        assert size == 50_000 * count
        peaks.append(peak)
    assert peaks[1] - peaks[0] <= 16 << 20, peaks


def test_s31_without_pyarrow_the_extra_is_named(chat, monkeypatch, tmp_path, capfd):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"by pyarrow, which is not installed: pip install"):
        chat(b"PAR1" + bytes(100), "a.parquet")
    from plimsoll.cli._program import main

    assert main(["import", "chat", str(tmp_path / "a.parquet"), "--tokenizer", str(tmp_path / "tokenizer"), "--out",
                 str(tmp_path / "none"), "--quiet"]) == 1
    assert "pip install pyarrow" in capfd.readouterr().err


NAMED = {
    "a zip archive": b"PK\x03\x04\x14\x00\x00\x00\x08\x00" + bytes(16) + b"\x07\x00\x00\x00a.jsonl", "NumPy arrays": b"PK\x03\x04" + bytes(22) + b"\x07\0\0\0arr.npy",
    "torch.save": b"PK\x03\x04" + bytes(22) + b"\x10\0\0\0archive/data.pkl", "Microsoft Office": b"PK\x03\x04" + bytes(22) + b"\x13\0\0\0[Content_Types].xml",
    "a NumPy array": b"\x93NUMPY\x01\x00", "a Python pickle": b"\x80\x04\x95", "a PDF document": b"%PDF-1.7\n",
    "a safetensors file": (64).to_bytes(8, "little") + b'{"a": {}}' + bytes(60), "an HDF5 file": b"\x89HDF\r\n\x1a\n", "an SQLite database": b"SQLite format 3\0",
    "an ORC file": b"ORC\x0a\x0b", "an Avro file": b"Obj\x01\x04", "a 7z archive": b"7z\xbc\xaf\x27\x1c", "packed by lz4": b"\x04\x22\x4d\x18",
    "a PNG image": PICTURE, "a JPEG image": OTHER, "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
    "a web page": b"<!DOCTYPE html><html></html>", "without a byte order mark": LINES.encode("utf-16-le")}


@pytest.mark.parametrize("name", NAMED)
def test_s31_files_of_other_formats_are_named_for_what_they_are(chat, vision, name):
    for file in ("a.jsonl", "a.parquet"):
        with pytest.raises(ValueError, match=rf"{file}: .*{name}.*, where rows are read: \w+"):
            chat(NAMED[name], file)
    with pytest.raises(ValueError, match=rf"b.tar: .*{name}"):
        vision(NAMED[name], "b.tar")


def test_s31_a_file_of_tfrecord_is_known_by_its_checksum(chat):
    length = (5).to_bytes(8, "little")
    import numpy as np

    crc = plimsoll._core.crc32c(np.frombuffer(length, np.uint8), 0)
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    with pytest.raises(ValueError, match="a TFRecord file"):
        chat(length + masked.to_bytes(4, "little") + b"hello" + bytes(4))


@pytest.mark.parametrize("damaged", [lambda data: data[:-9], lambda data: data[:40] + b"\x55\xaa" + data[42:], lambda data: data + b"garbage"])
@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress])
def test_s31_a_damaged_file_is_an_error_that_names_it(chat, pack, damaged):
    with pytest.raises(plimsoll.CorruptError, match=r"a\.jsonl: damaged (bzip2|xz)"):
        chat(damaged(pack((LINES * 50).encode())))
    with pytest.raises(ValueError, match=r"a\.jsonl: no text in UTF-16"):
        chat(LINES.encode("utf-16")[:-1])


def test_s31_an_empty_file_is_counted_and_alone_it_is_an_error_that_says_so(governor, chat, tmp_path):
    with pytest.raises(ValueError, match=r'no row of these files.*"empty_files": \{"count": 1, "first": \["a\.jsonl"\]\}'):
        chat(b"")
    with pytest.raises(ValueError, match=r'"empty_files": '):
        chat(gzip.compress(b""))
    (tmp_path / "b.jsonl").write_text(LINES, encoding="utf-8")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    made = plimsoll.import_chat([tmp_path / "empty.jsonl", tmp_path / "b.jsonl"], tmp_path / "both", tokenizer=tmp_path / "tokenizer",
                                governor=governor)
    assert made["rows"] == 5 and made["about"]["odd"]["empty_files"] == {"count": 1, "first": ["empty.jsonl"]}


def test_s31_killed_within_a_packed_file_it_goes_on_to_the_same_bytes(governor, tmp_path, monkeypatch):
    from plimsoll.data.importers import _chat_import

    folder = tmp_path / "tokenizer"
    chats.make_tokenizer(folder)
    monkeypatch.setattr(_chat_import, "_COMMIT_BYTES", 1)
    monkeypatch.setattr(_chat_import, "_PIECE_BYTES", 2_000)
    rows = [{"text": f"{k} " + "word " * 50} for k in range(200)]
    files = [tmp_path / "a.bz2", tmp_path / "b.tar", *arrow_files(tmp_path, rows)[1:2]]
    files[0].write_bytes(bz2.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    files[1].write_bytes(tar([(f"{k}.txt", row["text"].encode()) for k, row in enumerate(rows)]))
    plimsoll.import_chat(files, tmp_path / "whole", tokenizer=folder, governor=governor)
    for stop in (3, 20, 15):
        calls = iter(range(stop))

        def stopped(done, total, calls=calls):
            if next(calls, None) is None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            plimsoll.import_chat(files, tmp_path / "set", tokenizer=folder, governor=governor, progress=stopped)
    plimsoll.import_chat(files, tmp_path / "set", tokenizer=folder, governor=governor)
    assert (tmp_path / "set").read_bytes() == (tmp_path / "whole").read_bytes()
    assert plimsoll.import_chat(files, tmp_path / "set", tokenizer=folder, governor=governor)["reused"]
