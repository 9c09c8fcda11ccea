# SPDX-License-Identifier: Apache-2.0
"""import_chat() and import_vision() by parts: what is joined has the bytes of an import of all files at once, in whichever
order and by however many processes the parts were made; what is missing or of other inputs is named."""
import gzip
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile

import numpy as np
import pytest

plimsoll = pytest.importorskip("plimsoll")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from plimsoll import _core
from plimsoll.data.importers import _parts, _set_import

from tests.support import chats

CONSOLE = "import sys; from plimsoll.cli._program import main; sys.exit(main())"
PART = """
import sys
import plimsoll
from plimsoll.data.importers import _set_import
_set_import._JOIN_COMMIT_BYTES, _set_import._ROWS_AT_ONCE = 4_000, 8
out, tokenizer, part, join, *files = sys.argv[1:]
part = tuple(map(int, part.split("/"))) if part else None
plimsoll.import_chat(files, out, tokenizer=tokenizer, errors_max=9, part=part, join=int(join), governor=plimsoll.Governor("512MiB"))
"""


def program(folder, files, part="", join=0, crash=""):
    return subprocess.Popen([sys.executable, "-c", PART, *map(str, (folder / "set", folder / "tokenizer", part, join)), *map(str, files)],
                            env=os.environ | {"PLIMSOLL_CRASH": crash}, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def files(tmp_path):
    """Of every kind, with lines that are there twice, blank, wrong, or have nothing to train on."""
    chats.make_tokenizer(tmp_path / "tokenizer")

    def rows(seed, count):
        return [{"messages": chats.chat(random.Random(f"{seed}/{k % 20}"))} for k in range(count)]

    question = {"messages": [{"role": "user", "content": "a"}]}
    made = [chats.write_lines(tmp_path / f"{name}.jsonl", rows(name, count))
            for name, count in (("z", 30), ("a", 5), ("m", 60), ("b", 1))]
    made[1].write_text(made[1].read_text("utf-8") + "\n{\n" + json.dumps(question) + "\n", "utf-8")
    made[3].write_text(made[3].read_text("utf-8") + "{\n", "utf-8")
    packed = tmp_path / "p.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows("p", 40)).encode()))
    array = tmp_path / "array.json"
    array.write_text(json.dumps([*rows("array", 25), 7]), "utf-8")
    return [*made, packed, array]


@pytest.mark.parametrize("count", [1, 3, 11])
def test_joined_chats_have_the_bytes_of_one_import(tmp_path, governor, files, count):
    options = {"tokenizer": tmp_path / "tokenizer", "errors_max": 9, "governor": governor}
    whole = plimsoll.import_chat(files, tmp_path / "whole", **options)
    assert whole["about"]["odd"]["not_json"] == {"count": 2, "first": ["a.jsonl:7", "b.jsonl:2"]}
    assert set(whole["about"]["odd"]) >= {"not_an_object", "blank_lines", "no_assistant", "duplicates"}
    order = list(range(1, count + 1))
    random.Random(count).shuffle(order)
    rows = 0
    for k in order:
        made = plimsoll.import_chat(files, tmp_path / "set", part=(k, count), **options)
        assert made["path"] == f"{tmp_path / 'set'}.part-{k}-of-{count}"
        rows += made["rows"]
        assert plimsoll.import_chat(files, tmp_path / "set", part=(k, count), **options)["reused"] is True
    assert rows == whole["rows"]
    joined = plimsoll.import_chat(files, tmp_path / "set", join=count, **options)
    assert (tmp_path / "set").read_bytes() == (tmp_path / "whole").read_bytes()
    assert joined["reused"] is False
    assert plimsoll.import_chat(files, tmp_path / "set", join=count, **options)["reused"] is True
    assert plimsoll.import_chat(files, tmp_path / "set", **options)["reused"] is True
    assert len(list(tmp_path.glob("set.part-*"))) == count  # They stay, and nothing else is beside it.
    assert not list(tmp_path.glob("*.partial"))


def test_parts_are_made_side_by_side_and_a_join_that_is_killed_goes_on(tmp_path, governor, files):
    plimsoll.import_chat(files, tmp_path / "whole", tokenizer=tmp_path / "tokenizer", errors_max=9, governor=governor)
    for side in [program(tmp_path, files, f"{k}/2") for k in (1, 2)]:
        assert side.wait(60) == 0, side.stderr.read()
    killed = 0
    for crash in (5, 14, 23):
        killed += program(tmp_path, files, join=2, crash=f"*:{crash}").wait(60) == -signal.SIGKILL
        assert not (tmp_path / "set").exists()
    assert killed == 3
    journal = json.loads((tmp_path / "set.partial" / "journal").read_text("utf-8").split(" ", 1)[1])
    assert journal["counts"][1] > 0, "it would begin anew"
    last = program(tmp_path, files, join=2)
    assert last.wait(60) == 0, last.stderr.read()
    assert (tmp_path / "set").read_bytes() == (tmp_path / "whole").read_bytes()
    assert not (tmp_path / "set.partial").exists()


def test_one_part_that_goes_by_the_template_and_all_do(tmp_path, governor):
    """Pieces cover the template but for what one message of the second file says."""
    template = chats.TEMPLATES["chatml"].replace(
        "message['content'] +", "(message['content'] if message['content'] | length != 77 else 'odd') +")
    chats.make_tokenizer(tmp_path / "tokenizer", template)
    files = [chats.write_lines(tmp_path / f"{k}.jsonl", [{"messages": [
        {"role": "user", "content": "a" * length}, {"role": "assistant", "content": "b"}]}] * 3)
        for k, length in enumerate((5, 77, 9))]
    options = {"tokenizer": tmp_path / "tokenizer", "governor": governor}
    assert plimsoll.import_chat(files, tmp_path / "whole", **options)["about"]["compiled"] is False
    parts = [plimsoll.import_chat(files, tmp_path / "set", part=(k, 3), **options) for k in (1, 2, 3)]
    assert [part["about"]["compiled"] for part in parts] == [True, False, True]
    plimsoll.import_chat(files, tmp_path / "set", join=3, **options)
    assert (tmp_path / "set").read_bytes() == (tmp_path / "whole").read_bytes()


def test_parts_that_are_missing_or_of_something_else_are_named(tmp_path, governor, files):
    options = {"tokenizer": tmp_path / "tokenizer", "errors_max": 9, "governor": governor}
    out = tmp_path / "set"

    def refused(error, text, **more):
        with pytest.raises(error) as caught:
            plimsoll.import_chat(more.pop("given", files), out, **options | more)
        assert text in str(caught.value)
        assert not out.exists()

    for k in (1, 3):
        plimsoll.import_chat(files, out, part=(k, 3), **options)
    refused(plimsoll.NotFoundError, f"{out}.part-2-of-3: part 2 of 3 is missing: make it (--part 2/3, or part=(2, 3))", join=3)
    plimsoll.import_chat(files, out, part=(2, 3), max_length=9, **options)
    refused(ValueError, f"{out}.part-2-of-3: made with another max_length: make it anew (--part 2/3, or part=(2, 3))", join=3)
    plimsoll.import_chat(files, out, part=(2, 3), **options)
    refused(ValueError, f"{out}.part-1-of-3: made with other files, options or another tokenizer", join=3, given=files[::-1])
    refused(ValueError, f"{out}.part-1-of-3: made with another errors_max", join=3, errors_max=2)
    for k in (1, 2, 3):
        plimsoll.import_chat(files, out, part=(k, 3), **options | {"errors_max": 2})
    refused(ValueError, "3 lines were left out of its parts for an error", join=3, errors_max=2)
    (tmp_path / "set.part-2-of-3").write_bytes(b"PLTOKENS")
    refused(plimsoll.CorruptError, "set.part-2-of-3", join=3, errors_max=2)
    refused(ValueError, "part and join: one or the other", join=3, part=(1, 3))
    refused(ValueError, "part 4 of 3: parts are 1 to 3", part=(4, 3))
    refused(ValueError, "part and join are for files, and these are rows of an iterable", part=(1, 3), given=[{"text": "a"}])
    empty = [chats.write_lines(tmp_path / f"empty{k}.jsonl", []) for k in range(2)]
    for k in (1, 2):
        assert plimsoll.import_chat(empty, out, part=(k, 2), **options)["rows"] == 0
    refused(ValueError, "no row of these files has a token to train on", join=2, given=empty)


def test_a_part_that_is_made_anew_while_it_is_joined_is_noticed(tmp_path, governor, files, monkeypatch):
    options = {"tokenizer": tmp_path / "tokenizer", "errors_max": 9, "governor": governor}
    for k in (1, 2):
        plimsoll.import_chat(files, tmp_path / "set", part=(k, 2), **options)

    def progress(done, total):
        assert total == 2
        if done == 1:
            shutil.copy(tmp_path / "set.part-1-of-2", tmp_path / "set.part-2-of-2")

    with pytest.raises(ValueError, match="set.part-2-of-2: it was made anew meanwhile: join again"):
        plimsoll.import_chat(files, tmp_path / "set", join=2, progress=progress, **options)
    assert not (tmp_path / "set").exists()


def picture(numbers):
    image = pytest.importorskip("PIL.Image")
    packed = io.BytesIO()
    pixels = np.frombuffer(numbers.randbytes(3 * 20 * 30), np.uint8).reshape(20, 30, 3)
    image.fromarray(pixels).save(packed, numbers.choice(["png", "jpeg"]))
    return packed.getvalue()


def vision_rows(folder):
    """Files whose rows name files, here and there the same, or none, or what is not there."""
    numbers, files = random.Random(3), []
    for k, count in enumerate((9, 1, 14, 6)):
        rows = []
        for row in range(count):
            name = f"{k}-{row}.image"
            (folder / name).write_bytes(picture(numbers))
            rows.append(numbers.choice([{"text": "t", "image": name, "response": f"{k}/{row}"},
                                        {"text": "t", "image": [name, "0-0.image"], "response": "r"},
                                        {"text": "t", "response": "no image"}, {"text": "t", "image": "none.jpg"}]))
        files.append(chats.write_lines(folder / f"{k}.jsonl", rows))
    return files


def vision_archives(folder):
    numbers, files = random.Random(4), []
    for k, count in enumerate((7, 2, 9)):
        files.append(folder / f"{k}.tar")
        with tarfile.open(files[-1], "w") as archive:
            for row in range(count):
                for kind, data in (("jpg", picture(numbers) if row % 4 else b"damaged"), ("txt", b"a cat")):
                    member = tarfile.TarInfo(f"{row}.{kind}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return files


@pytest.mark.parametrize("make", [vision_rows, vision_archives])
def test_joined_images_have_the_bytes_of_one_import(tmp_path, governor, monkeypatch, make):
    monkeypatch.setattr(_set_import, "_JOIN_COMMIT_BYTES", 4_000)
    monkeypatch.setattr(_set_import, "_ROWS_AT_ONCE", 2)
    files = make(tmp_path)
    options = {"errors_max": 20, "governor": governor}
    whole = plimsoll.import_vision(files, tmp_path / "whole", **options)
    assert max(one["count"] for one in whole["about"]["odd"].values()) > 3
    for count in (2, 3, 8):
        for k in range(count, 0, -1):
            plimsoll.import_vision(files, tmp_path / "set", part=(k, count), **options)
        plimsoll.import_vision(files, tmp_path / "set", join=count, rebuild=True, **options)
        assert (tmp_path / "set").read_bytes() == (tmp_path / "whole").read_bytes()
    assert plimsoll.import_vision(files, tmp_path / "set", **options)["reused"] is True
    with pytest.raises(ValueError, match="set.part-1-of-2: made with (other files|another errors_max)"):
        plimsoll.import_vision(files[:-1], tmp_path / "set", join=2, **options)
    plimsoll.ImageSet(tmp_path / "set").verify()


def test_shares_are_neighbours_of_about_as_many_bytes():
    numbers = random.Random(1)
    for _ in range(300):
        sizes = [numbers.choice([0, 1, numbers.randrange(1000)]) for _ in range(numbers.randrange(30))]
        count = numbers.randrange(1, 12)
        shares = [range(len(sizes))[_parts.share(sizes, (k, count))] for k in range(1, count + 1)]
        assert [file for one in shares for file in one] == list(range(len(sizes)))
        most = sum(sizes) / count + max(sizes, default=0)
        assert all(sum(sizes[file] for file in one) <= most for one in shares)
    assert [len(range(9)[_parts.share([5] * 9, (k, 3))]) for k in (1, 2, 3)] == [3, 3, 3]
    assert [len(range(9)[_parts.share([0] * 9, (k, 3))]) for k in (1, 2, 3)] == [3, 3, 3]


def test_sums_are_joined():
    numbers = random.Random(2)
    texts = [numbers.randbytes(numbers.choice([0, 1, 1000, 70_000])) for _ in range(20)]
    sums = [{"name": "x", "bytes": len(text), "crc32c": _core.crc32c(np.frombuffer(text, np.uint8), 0)} for text in texts]
    whole = np.frombuffer(b"".join(texts), np.uint8)
    assert _parts.joined_sum(sums) == {"name": "x", "bytes": len(whole), "crc32c": _core.crc32c(whole, 0)}


def command(*arguments):
    return subprocess.run([sys.executable, "-c", CONSOLE, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_the_program_makes_parts_and_joins_them(tmp_path, files):
    asked = ["import", "chat", *files, "--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "set", "--errors-max", 9, "--quiet"]
    for k in (1, 2):
        done = command(*asked, "--part", f"{k}/2")
        assert done.returncode == 0 and f"set.part-{k}-of-2" in done.stdout, done.stderr
    done = command(*asked, "--join", 2)
    assert done.returncode == 0 and "rows" in done.stdout, done.stdout + done.stderr
    done = command(*asked, "--join", 3)
    assert done.returncode == 1 and "set.part-1-of-3: part 1 of 3 is missing: make it (--part 1/3, or" in done.stderr
    for wrong, text in (("0/4", "part 0 of 4: parts are 1 to 4"), ("5/4", "part 5 of 4: parts are 1 to 4"),
                        ("a/b", "'a/b' is not K/N, such as 3/8"), ("3", "'3' is not K/N"), ("1/0", "part 1 of 0")):
        done = command(*asked, "--part", wrong)
        assert done.returncode == 2 and f"argument --part: {text}" in done.stderr
    done = command(*asked, "--part", "1/2", "--join", "2")
    assert done.returncode == 2 and "not allowed with argument --part" in done.stderr
    for kind in ("chat", "vision"):
        told = command("import", kind, "--help").stdout
        assert "--part K/N" in told and "--part 3/8" in told and "--join 8" in told
