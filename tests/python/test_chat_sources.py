# SPDX-License-Identifier: Apache-2.0
"""import_chat's inputs: packed files, arrays and rows of any iterable give the set that JSON lines give; what is wrong
is named by its place; they are read once, and inputs that change meanwhile are noticed."""
import gzip
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest

plimsoll = pytest.importorskip("plimsoll")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from plimsoll.data.importers import _chat_import
from tests.support import chats


@pytest.fixture
def folder(tmp_path):
    chats.make_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def rows_of(count, seed=0):
    return [{"messages": chats.chat(random.Random(f"{seed}/{k}"))} for k in range(count)]


def contents(path):
    with plimsoll.TokenSet(path) as tokens:
        return [(ids.tolist(), mask.tolist()) for ids, mask in tokens]


def imported(folder, files, name, governor, **options):
    made = plimsoll.import_chat(files, folder / name, tokenizer=folder / "tokenizer", governor=governor, **options)
    return contents(folder / name), made


def packed_by_zstd(path, *options):
    if shutil.which("zstd") is None:
        pytest.skip("needs the program zstd")
    out = path.with_name(path.name + ".zst")
    subprocess.run(["zstd", "-q", "-f", *options, path, "-o", out], check=True)
    return out


def test_arrays_packed_files_and_iterables_give_the_rows_of_lines(folder, governor):
    rows = rows_of(120)
    lines = chats.write_lines(folder / "rows.jsonl", rows)
    wanted, _ = imported(folder, lines, "lines", governor)
    array = folder / "rows.json"
    for number, text in enumerate((json.dumps(rows), json.dumps(rows, indent=2, ensure_ascii=False),
                                   "\ufeff \n[" + " , \n".join(json.dumps(row) for row in rows) + "\n]\n\n")):
        array.write_text(text, encoding="utf-8")
        assert imported(folder, array, f"array{number}", governor)[0] == wanted
    packed = folder / "rows.json.gz"
    packed.write_bytes(gzip.compress(array.read_bytes()))
    assert imported(folder, packed, "gzip", governor)[0] == wanted
    assert imported(folder, rows, "list", governor)[0] == wanted
    assert imported(folder, (row for row in rows), "generator", governor)[0] == wanted
    shards = []
    for number, part in enumerate((rows[:50], rows[50:51], rows[51:])):
        shards.append(chats.write_lines(folder / f"{number}.jsonl", part))
    assert imported(folder, shards, "shards", governor)[0] == wanted


def test_zstd_is_unpacked(folder, governor):
    rows = rows_of(200)
    lines = chats.write_lines(folder / "rows.jsonl", rows)
    wanted, _ = imported(folder, lines, "lines", governor)
    packed = packed_by_zstd(lines)
    assert imported(folder, packed, "packed", governor)[0] == wanted
    packed.write_bytes(packed.read_bytes() * 2)  # Two frames.
    assert imported(folder, packed, "two", governor)[0] == wanted * 2
    packed.write_bytes(packed.read_bytes()[:-30])
    with pytest.raises(plimsoll.CorruptError, match=r"rows.jsonl.zst:\d+: truncated zstd"):
        imported(folder, packed, "cut", governor)
    broken = bytearray(packed_by_zstd(lines).read_bytes())
    broken[len(broken) // 2] ^= 0x55
    packed.write_bytes(broken)
    with pytest.raises((plimsoll.CorruptError, ValueError), match="rows.jsonl.zst"):
        imported(folder, packed, "broken", governor)


def test_a_zstd_whose_window_is_too_wide_is_refused_before_it_takes_the_memory(folder, governor):
    lines = folder / "rows.jsonl"
    lines.write_bytes(os.urandom(9 << 20))
    packed = packed_by_zstd(lines, "-1", "--long=27", "--single-thread")
    with pytest.raises(ValueError, match="packed with a window above 8 MiB.*without --ultra and --long"):
        imported(folder, packed, "set", governor)


def test_datasets_of_hugging_face_are_rows(folder, governor):
    datasets = pytest.importorskip("datasets")
    rows = rows_of(60)
    wanted, _ = imported(folder, rows, "list", governor)
    table = datasets.Dataset.from_list([row | {"score": k * 0.5, "note": None} for k, row in enumerate(rows)])
    assert imported(folder, table, "table", governor)[0] == wanted
    table.to_parquet(folder / "rows.parquet")
    stream = datasets.load_dataset("parquet", data_files=str(folder / "rows.parquet"), split="train", streaming=True,
                                   cache_dir=str(folder / "cache"))
    assert imported(folder, stream, "stream", governor)[0] == wanted


def test_what_is_wrong_is_named_by_its_place(folder, governor):
    good, bad = {"prompt": "a", "completion": "b"}, {"messages": [{"role": "king", "content": "a"}]}
    array = folder / "rows.json"
    array.write_text(json.dumps([good, good, bad, good]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows.json\[2\]: unknown role: king"):
        imported(folder, array, "set", governor)
    found, made = imported(folder, array, "set", governor, errors_max=1)
    assert len(found) == 3 and made["about"]["odd"]["unknown_role"]["first"] == ["rows.json[2]"]
    with pytest.raises(ValueError, match=r"rows\[2\]: unknown role: king"):
        imported(folder, [good, good, bad], "set", governor)
    with pytest.raises(ValueError, match=r"rows\[1\]: not a JSON object"):
        imported(folder, [good, ["a"]], "set", governor)
    with pytest.raises(ValueError, match=r"rows\[1\]: Object of type object is not JSON serializable"):
        imported(folder, [good, {"messages": object()}], "set", governor)
    for text, what in (("[1, 2", "it ends within its array"), ("[", "it ends within its array"),
                       ('[{"a', "it ends within its array"), ("[1] 2", "there is more behind the end of its array")):
        array.write_text(text, encoding="utf-8")
        with pytest.raises(plimsoll.CorruptError, match=f"rows.json: {what}"):
            imported(folder, array, "set", governor, errors_max=9)
    for text in ('[{"prompt": "a", "completion": "b"},, 7]', '[{"prompt": "a", "completion": "b"} 1, {]}, 2]'):
        array.write_text(text, encoding="utf-8")
        with pytest.raises((ValueError, plimsoll.CorruptError), match=r"rows.json"):
            imported(folder, array, "set", governor)
    for nothing in ([], "", 7, b"rows"):
        with pytest.raises((ValueError, TypeError, plimsoll.NotFoundError)):
            imported(folder, nothing, "set", governor)
    with pytest.raises(ValueError, match="paths and rows are mixed"):
        imported(folder, ["rows.json", good], "set", governor)


def test_an_error_of_the_iterable_is_the_callers_own(folder, governor):
    class Broken(Exception):
        pass

    def rows():
        yield from rows_of(5)
        raise Broken("the server is gone")

    with pytest.raises(Broken, match="the server is gone"):
        imported(folder, rows(), "set", governor)


class Killed(BaseException):
    pass


def stopped_after(pieces):
    """Progress that ends an import as a signal would."""
    def progress(done, total):
        nonlocal pieces
        pieces -= 1
        if pieces < 0:
            raise Killed

    return progress


@pytest.mark.parametrize("kind", ["lines", "array", "gzip", "zstd", "list", "stream"])
def test_every_kind_of_input_is_gone_on_with_and_changes_are_noticed(folder, governor, monkeypatch, kind):
    monkeypatch.setattr(_chat_import, "_COMMIT_BYTES", 6_000)
    monkeypatch.setattr(_chat_import, "_PIECE_BYTES", 3_000)
    rows = rows_of(100) + rows_of(50)  # What is there twice is counted, wherever it was killed.

    class Stream:  # Can be asked again, and has no length.
        asked = 0

        def __init__(self, rows):
            self.rows = rows

        def __iter__(self):
            for row in self.rows:
                Stream.asked += 1
                yield row

    def given(rows):
        lines = chats.write_lines(folder / "rows.jsonl", rows)
        if kind == "array":
            lines.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        if kind == "gzip":
            packed = folder / "rows.jsonl.gz"
            packed.write_bytes(gzip.compress(lines.read_bytes(), mtime=0))
            return packed
        if kind == "zstd":
            return packed_by_zstd(lines)
        return {"list": rows, "stream": Stream(rows)}.get(kind, lines)

    options = {"tokenizer": folder / "tokenizer", "governor": governor}
    plimsoll.import_chat(given(rows), folder / "whole", **options)
    seen = []
    for pieces in (5, 9, 14):
        with pytest.raises(Killed):
            plimsoll.import_chat(given(rows), folder / "set", progress=stopped_after(pieces), **options)
        journal = (folder / "set.partial" / "journal").read_text(encoding="utf-8")
        seen.append(json.loads(journal.split(" ", 1)[1])["counts"][1])
    assert seen == sorted(seen) and len(set(seen)) == 3, "it began anew"
    plimsoll.import_chat(given(rows), folder / "set", **options)
    assert (folder / "set").read_bytes() == (folder / "whole").read_bytes()
    assert plimsoll.import_chat(given(rows), folder / "set", **options)["reused"] is True
    # Rows that were read already have other contents now, of the same length.
    other = json.loads(json.dumps(rows))
    first = other[0]["messages"][-1]
    first["content"] = "".join(chr(ord(c) ^ 1) if c.isascii() and c.isalpha() else c for c in first["content"])
    assert other != rows
    assert plimsoll.import_chat(given(other), folder / "set", **options)["reused"] is False
    with pytest.raises(Killed):
        plimsoll.import_chat(given(rows), folder / "third", progress=stopped_after(12), **options)
    plimsoll.import_chat(given(other), folder / "third", **options)
    assert contents(folder / "third") == contents(folder / "set") != contents(folder / "whole")


def test_an_iterator_that_can_be_asked_once_is_imported_from_its_beginning(folder, governor, monkeypatch):
    monkeypatch.setattr(_chat_import, "_COMMIT_BYTES", 6_000)
    monkeypatch.setattr(_chat_import, "_PIECE_BYTES", 3_000)
    rows = rows_of(80)
    wanted, _ = imported(folder, rows, "whole", governor)
    with pytest.raises(Killed):
        imported(folder, iter(rows), "set", governor, progress=stopped_after(9))
    found, made = imported(folder, iter(rows), "set", governor)
    assert found == wanted and made["reused"] is False
    assert imported(folder, iter(rows), "set", governor)[1]["reused"] is False


def read_so_far():
    """Bytes that this process has read, those of the watcher's looks at memory left out: they come by the clock."""
    watchers = [task for task in pathlib.Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "pl-watch\n"]

    def read_by(folder):
        return next(int(line.split()[1]) for line in (folder / "io").read_text(encoding="ascii").splitlines() if line.startswith("rchar"))

    return read_by(pathlib.Path("/proc/self")) - sum(map(read_by, watchers))


def test_inputs_are_read_once(folder, governor):
    lines = chats.write_lines(folder / "rows.jsonl", rows_of(200) * 20)
    size = lines.stat().st_size
    assert size > 3_000_000
    imported(folder, rows_of(3), "first", governor)  # Python reads modules that it needs once.
    before = read_so_far()
    _, made = imported(folder, lines, "set", governor)
    # Beside the file: the tokenizer, and the set as it is compared here.
    assert read_so_far() - before < size + (folder / "set").stat().st_size * 1.5 + 500_000
    assert made["about"]["inputs"] == [{"name": "rows.jsonl", "bytes": size,
                                        "crc32c": made["about"]["inputs"][0]["crc32c"]}]


def test_progress_is_of_bytes_or_rows(folder, governor):
    rows = rows_of(900)
    lines = chats.write_lines(folder / "rows.jsonl", rows)
    for given, total in ((lines, os.path.getsize(lines)), (rows, 900), (iter(rows), 0)):
        seen = []
        imported(folder, given, f"set{total}", governor, progress=lambda *one: seen.append(one))
        assert {one[1] for one in seen} == {total} and seen == sorted(seen)
        assert seen[-1][0] == (total or 900)


def test_t2_an_import_forks_nobody(folder):
    program = """
import os, resource, sys
def forked():
    raise SystemExit("forked")
os.register_at_fork(before=forked)
import plimsoll
plimsoll.import_chat(sys.argv[1], sys.argv[2], tokenizer=sys.argv[3], governor=plimsoll.Governor("512MiB"))
used = resource.getrusage(resource.RUSAGE_CHILDREN)
assert used.ru_utime == used.ru_stime == 0 and used.ru_maxrss == 0
"""
    lines = chats.write_lines(folder / "rows.jsonl", rows_of(300))
    subprocess.run([sys.executable, "-c", program, lines, folder / "set", folder / "tokenizer"], check=True, timeout=60)


def test_t3_no_more_rows_are_alive_than_a_block(folder, governor):
    class Row(dict):
        alive = most = made = 0

        def __init__(self, row):
            super().__init__(row)
            Row.alive, Row.made = Row.alive + 1, Row.made + 1
            Row.most = max(Row.most, Row.alive)

        def __del__(self):
            Row.alive -= 1

    pool = rows_of(100)
    found, _ = imported(folder, (Row(pool[k % 100]) for k in range(3000)), "set", governor)
    assert len(found) == Row.made == 3000 and Row.alive == 0 and Row.most <= 2


def test_t12_rows_are_on_disk_while_more_are_asked_for(folder, governor, monkeypatch):
    monkeypatch.setattr(_chat_import, "_COMMIT_BYTES", 200_000)
    pool, seen = rows_of(100), []

    def rows():
        for k in range(6000):
            if k % 500 == 0 and k:
                journal = folder / "set.partial" / "journal"
                text = journal.read_text(encoding="utf-8") if journal.exists() else ""
                seen.append(json.loads(text.split(" ", 1)[1])["counts"][1] if text else 0)
            yield pool[k % 100]

    imported(folder, rows(), "set", governor)
    # Behind what was asked for by a commit, a piece and a block at most.
    assert all(500 * (k + 1) - 2500 <= done <= 500 * (k + 1) for k, done in enumerate(seen)) and seen[-1] > 3000
    assert sorted(path.name for path in folder.iterdir()) == ["set", "tokenizer"]


def test_a_line_that_a_file_has_twice_is_counted(folder, governor):
    rows = rows_of(3)
    files = [chats.write_lines(folder / "a.jsonl", [*rows, rows[0]]), chats.write_lines(folder / "b.jsonl", rows)]
    assert imported(folder, files, "set", governor)[1]["about"]["odd"]["duplicates"] == {"count": 1, "first": ["a.jsonl:4"]}
