# SPDX-License-Identifier: Apache-2.0
"""import_vision: images stay the bytes that they were, whichever way a row names them; what cannot be decoded is an
error with file and line or a counted row; killed anywhere it goes on to the same bytes."""
import base64
import bz2
import gzip
import io
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import tarfile

import numpy as np
import pytest

plimsoll = pytest.importorskip("plimsoll")
Image = pytest.importorskip("PIL.Image")

from plimsoll.cli._program import main
from tests.support import pictures

ASKED = "What is on the receipt?"


def base64_of(encoded):
    return base64.b64encode(encoded).decode()


def uri(encoded, kind="jpeg"):
    return f"data:image/{kind};base64,{base64_of(encoded)}"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def imported(governor, tmp_path, rows, **options):
    made = plimsoll.import_vision(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "set", governor=governor,
                                  **options)
    return plimsoll.ImageSet(tmp_path / "set"), made


def said(text):
    return [{"type": "text", "text": text}]


def test_every_way_to_name_an_image_gives_its_bytes(governor, tmp_path):
    one, other, third = (pictures.random_picture(kind, 3) for kind in ("jpeg", "png", "webp"))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.jpg").write_bytes(one)
    rows = [
        {"text": ASKED, "image": "pictures/a.jpg", "response": "7"},
        {"text": ASKED, "image": str(tmp_path / "pictures" / "a.jpg"), "response": "7"},
        {"text": ASKED, "image": base64_of(one), "response": "7"},
        {"text": ASKED, "image": base64_of(other), "response": "7"},
        {"text": ASKED, "image": uri(third), "response": "7"},
        {"text": ASKED, "image": {"bytes": base64_of(one), "path": None}, "response": "7"},
        {"text": ASKED, "image": {"path": "pictures/a.jpg"}, "response": "7"},
        {"text": ASKED, "image": f"file://{tmp_path}/pictures/a.jpg", "response": "7"},
        {"messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri(one)}},
                                         {"type": "text", "text": ASKED},
                                         {"type": "image_url", "image_url": base64_of(other)}]},
            {"role": "assistant", "content": "7"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ASKED}, {"type": "image"},
                                                   {"type": "image", "image": "pictures/a.jpg", "text": None}]},
                      {"role": "assistant", "content": said("7")}], "images": [{"bytes": base64_of(third)}]},
    ]
    images, made = imported(governor, tmp_path, rows)
    short = [{"role": "user", "content": [{"type": "image"}, *said(ASKED)]}, {"role": "assistant", "content": said("7")}]
    assert all(row.messages == short for row in [images[k] for k in range(8)])
    wanted = [[one], [one], [one], [other], [third], [one], [one], [one], [one, other], [third, one]]
    for number, encoded in enumerate(wanted):
        assert len(images[number].sizes) == len(encoded)
        for k, bytes_ in enumerate(encoded):
            assert images.encoded(number, k).tobytes() == bytes_, number
            assert np.array_equal(images.image(number, k), pictures.pillow(bytes_))
            assert images[number].sizes[k] == images.image(number, k).shape[1::-1]
    assert images[8].messages == [{"role": "system", "content": said("Be brief.")},
                                  {"role": "user", "content": [{"type": "image"}, *said(ASKED), {"type": "image"}]},
                                  {"role": "assistant", "content": said("7")}]
    assert made["kind"] == "image_set" and made["rows"] == 10 and made["images"] == images.images == 12
    assert made["about"]["lines"] == 10 and made["about"]["odd"] == {} and made["reused"] is False
    assert images.decoded_bytes == sum(images.image(n, k).size for n, e in enumerate(wanted) for k in range(len(e)))
    images.verify()


def test_columns_of_other_names_and_another_folder(governor, tmp_path):
    encoded = pictures.random_picture("png", 1)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.png").write_bytes(encoded)
    images, _ = imported(governor, tmp_path, [{"q": ASKED, "pic": "a.png", "a": "7"}], text_field="q", image_field="pic",
                         response_field="a", images=tmp_path / "there")
    assert images.encoded(0).tobytes() == encoded and images[0].messages[1]["content"] == said("7")


def test_rows_of_an_iterable_are_those_of_a_file(governor, tmp_path):
    encoded = [pictures.random_picture("jpeg", k) for k in range(4)]
    rows = [{"text": f"{k}", "image": {"bytes": one, "path": "x.jpg"}, "response": "r", "other": object()}
            for k, one in enumerate(encoded)]
    plimsoll.import_vision(rows, tmp_path / "rows", governor=governor, ignore_keys=["other"])
    images = plimsoll.ImageSet(tmp_path / "rows")
    assert [images.encoded(k).tobytes() for k in range(4)] == encoded
    picture = Image.open(io.BytesIO(encoded[0]))
    plimsoll.import_vision(iter([{"text": "", "image": picture, "response": "r"}]), tmp_path / "one", governor=governor)
    assert np.array_equal(plimsoll.ImageSet(tmp_path / "one").image(0), pictures.pillow(encoded[0]))


def test_a_picture_of_pillows_that_is_damaged_is_a_bad_row(governor, tmp_path):
    rows = [{"image": Image.open(io.BytesIO(encoded)), "response": "r"} for encoded in (GOOD, GOOD[:-20])]
    with pytest.raises(ValueError, match=r"rows\[1\]: a picture that Pillow cannot save: .*truncated.*--errors-max"):
        plimsoll.import_vision(rows, tmp_path / "set", governor=governor)
    rows = [{"image": Image.open(io.BytesIO(encoded)), "response": "r"} for encoded in (GOOD, GOOD[:-20])]
    made = plimsoll.import_vision(rows, tmp_path / "set", errors_max=1, governor=governor)
    assert made["rows"] == 1 and made["about"]["odd"]["bad_image"] == {"count": 1, "first": ["rows[1]"]}
    assert np.array_equal(plimsoll.ImageSet(tmp_path / "set").image(0), pictures.pillow(GOOD))


def test_a_dataset_of_hugging_faces_is_taken_as_it_is(governor, tmp_path):
    datasets = pytest.importorskip("datasets")
    encoded = [pictures.random_picture("png", k) for k in range(3)]
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "response": ["x", "y", "z"],
                                       "image": [{"bytes": one, "path": None} for one in encoded]})
    rows = rows.cast_column("image", datasets.Image(decode=False))
    made = plimsoll.import_vision(rows, tmp_path / "set", governor=governor)
    images = plimsoll.ImageSet(tmp_path / "set")
    assert [images.encoded(k).tobytes() for k in range(3)] == encoded and images[2].messages[1]["content"] == said("z")
    assert made["reused"] is False
    assert plimsoll.import_vision(rows, tmp_path / "set", governor=governor)["reused"] is True


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_samples_of_webdataset_are_rows(governor, tmp_path):
    encoded = [pictures.random_picture(kind, 5) for kind in ("jpeg", "png", "webp")]
    one = write_tar(tmp_path / "a.tar", [("x/0.jpg", encoded[0]), ("x/0.txt", b"a cat\n"), ("x/0.cls", b"3"),
                                         ("x/1.json", b'{"response": "r", "text": "t"}'), ("x/1.png", encoded[1])])
    other = write_tar(tmp_path / "b.tar", [("0.webp", encoded[2]), ("0.txt", b"b"), ("1.a.jpg", encoded[0]),
                                           ("1.b.png", encoded[1])])
    made = plimsoll.import_vision([one, other], tmp_path / "set", governor=governor)
    images = plimsoll.ImageSet(tmp_path / "set")
    assert made["rows"] == 4 and [len(row.sizes) for row in images] == [1, 1, 1, 2]
    assert [images.encoded(k).tobytes() for k in range(4)] == [*encoded, encoded[0]]
    assert images[0].messages == [{"role": "user", "content": [{"type": "image"}, *said("a cat")]}]
    assert images[1].messages[1]["content"] == said("r")
    assert plimsoll.import_vision([one, other], tmp_path / "set", governor=governor)["reused"] is True
    assert made["about"]["odd"] == {"member .cls": {"count": 1, "first": ["x/0.cls"]}}
    row = {"text": "t", "image": base64_of(encoded[0])}
    assert plimsoll.import_vision([one, write_rows(tmp_path / "rows.jsonl", [row])], tmp_path / "both", governor=governor)["rows"] == 3
    bad = write_tar(tmp_path / "c.tar", [("0.jpg", encoded[0]), ("0.json", b"{")])
    with pytest.raises(ValueError, match=r"c.tar: 0.json: "):
        plimsoll.import_vision(bad, tmp_path / "none", governor=governor)
    with pytest.raises(ValueError, match=r"d.tar: "):
        (tmp_path / "d.tar").write_bytes(one.read_bytes()[:700])
        plimsoll.import_vision(tmp_path / "d.tar", tmp_path / "none", governor=governor)


def test_members_whose_names_begin_with_a_dot_are_of_no_sample(governor, tmp_path):
    members = [("x/._0.jpg", b"Mac OS X"), ("x/0.jpg", GOOD), ("x/._0.txt", b"Mac OS X"), ("x/0.txt", b"a cat")]
    made = plimsoll.import_vision(write_tar(tmp_path / "a.tar", members), tmp_path / "set", governor=governor)
    assert made["rows"] == 1 and made["about"]["odd"]["hidden member"]["count"] == 2
    assert plimsoll.ImageSet(tmp_path / "set")[0].messages[0]["content"] == [{"type": "image"}, *said("a cat")]


def test_what_json_says_of_a_sample_is_behind_its_members_wherever_it_stands(governor, tmp_path):
    encoded = pictures.random_picture("png", 5)
    members = [("0.json", b'{"image": "0.png", "text": "name", "response": "r"}'), ("0.png", encoded), ("0.txt", b"a cat")]
    for order in (members, members[::-1]):
        plimsoll.import_vision(write_tar(tmp_path / "a.tar", order), tmp_path / "set", governor=governor)
        images = plimsoll.ImageSet(tmp_path / "set")
        assert images.encoded(0).tobytes() == encoded and len(images[0].sizes) == 1
        assert [one["content"] for one in images[0].messages] == [[{"type": "image"}, *said("a cat")], said("r")]


def test_a_damaged_packed_archive_is_an_error_that_names_it(governor, tmp_path):
    members = [(f"{k}.jpg", pictures.random_picture("jpeg", k)) for k in range(3)]
    whole = write_tar(tmp_path / "a.tar", members).read_bytes()
    for name, pack in (("a.tar.gz", gzip.compress), ("a.tar.bz2", bz2.compress), ("a.tar.xz", lzma.compress)):
        packed = pack(whole)
        (tmp_path / name).write_bytes(packed)
        assert plimsoll.import_vision(tmp_path / name, tmp_path / name.replace(".", "_"), governor=governor)["rows"] == 3
        # In the middle, in the checksum at the end, and cut within that.
        for damaged in (_flipped(packed, len(packed) // 2), _flipped(packed, len(packed) - 6), packed[:-3]):
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(plimsoll.CorruptError, match=f"{name}: (damaged|truncated) "):
                plimsoll.import_vision(tmp_path / name, tmp_path / "none", governor=governor)
    assert not (tmp_path / "none").exists()


def test_a_damaged_header_within_an_archive_is_an_error_and_not_its_end(governor, tmp_path):
    members = [(f"{k}.jpg", pictures.random_picture("jpeg", k)) for k in range(3)]
    whole = write_tar(tmp_path / "a.tar", members).read_bytes()
    header = next(at for at in range(0, len(whole), 512) if whole[at:at + 5] == b"2.jpg")
    for damaged in (_flipped(whole, header + 150), whole[:header + 100]):
        (tmp_path / "a.tar").write_bytes(damaged)
        with pytest.raises(ValueError, match=f"a.tar: damaged archive: .* at byte {header}"):
            plimsoll.import_vision(tmp_path / "a.tar", tmp_path / "none", governor=governor)
    assert not (tmp_path / "none").exists()


def _flipped(data, at):
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1:]


def test_files_and_members_that_are_too_long_are_refused_and_name_the_option(governor, tmp_path):
    (tmp_path / "a.jpg").write_bytes(GOOD)
    row, size = {"text": "t", "image": "a.jpg", "response": "r"}, len(GOOD)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*a\.jpg: longer than image_bytes_max \(--image-bytes-max\)"):
        imported(governor, tmp_path, [row], image_bytes_max=size - 1)
    assert imported(governor, tmp_path, [row], image_bytes_max=size)[1]["images"] == 1
    archive = write_tar(tmp_path / "a.tar", [("0.jpg", GOOD), ("0.txt", b"a")])
    with pytest.raises(ValueError, match=rf"a\.tar: 0\.jpg: {size} bytes, longer than image_bytes_max"):
        plimsoll.import_vision(archive, tmp_path / "tar", image_bytes_max=size - 1, governor=governor)
    assert plimsoll.import_vision(archive, tmp_path / "tar", image_bytes_max=size, governor=governor)["rows"] == 1


def test_several_texts_of_a_row_are_parts(governor, tmp_path):
    images, _ = imported(governor, tmp_path, [{"image": uri(GOOD), "text": ["one", "two"]}])
    assert images[0].messages == [{"role": "user", "content": [{"type": "image"}, *said("one"), *said("two")]}]
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: text is not text"):
        imported(governor, tmp_path, [{"image": uri(GOOD), "text": ["one", 2]}])


GOOD = pictures.random_picture("jpeg", 2)
BAD = {
    "bad_image": ({"image": base64_of(GOOD[:len(GOOD) // 2]), "response": "r"}, r"damaged image: the file is truncated"),
    "bad_image, text": ({"image": {"bytes": base64_of(b"GIF89a")}, "response": "r"}, r"neither JPEG, PNG nor WebP"),
    "missing_image": ({"image": "no/such.jpg", "response": "r"}, r"no/such\.jpg: No such file.*--images"),
    "remote_image": ({"image": "https://example.org/a.jpg", "response": "r"}, r"on the network.*download it first"),
    "bad_base64": ({"image": "data:image/png;base64,!!!!", "response": "r"}, r"not base64"),
    "no_shape": ({"text": "a"}, r"neither messages nor image or response"),
    "bad_message": ({"messages": [{"role": "user", "content": [{"type": "video", "video": "a"}]}]}, r"type 'video'"),
    "bad_message, few": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"fewer images than"),
    "bad_message, many": ({"messages": [{"role": "user", "content": "<image>"}], "images": ["x", "y"]}, r"more images than"),
    "bad_message, response": ({"image": base64_of(GOOD), "response": 0}, r"response is not text"),
    "bad_message, text": ({"image": base64_of(GOOD), "text": 0, "response": "r"}, r"text is not text"),
    "not_utf8": ({"image": base64_of(GOOD), "response": "a \ud83d"}, r"a text with half a character, \\ud83d"),
    "unknown_role": ({"messages": [{"role": "judge", "content": "a"}]}, r"unknown role: judge"),
    "not_an_object": ([1], r"not a JSON object"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_m10_a_row_that_cannot_be_used_is_an_error_with_file_and_line_or_counted(governor, tmp_path, name):
    row, words = BAD[name]
    good = {"text": "t", "image": uri(GOOD), "response": "r"}
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: .*" + words + r".*--errors-max"):
        imported(governor, tmp_path, [good, row, good])
    images, made = imported(governor, tmp_path, [good, row, good], errors_max=1)
    assert len(images) == 2 and made["about"]["odd"] == {name.split(",")[0]: {"count": 1, "first": ["rows.jsonl:2"]}}
    assert all(images.encoded(k).tobytes() == GOOD for k in range(2)), "none is blank"
    with pytest.raises(ValueError, match=r"rows\.jsonl:3: .*\(1 rows before it were left out\)"):
        imported(governor, tmp_path, [good, row, row], errors_max=1, rebuild=True)


def test_m10_a_decompression_bomb_is_refused_by_name_and_option(governor, tmp_path):
    bomb = pictures.png({"size": (40_000, 40_000), "data": b""}, 8, 2)
    rows = [{"image": uri(GOOD), "response": "r"}, {"image": uri(bomb, "png"), "response": "r"}]
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: PNG of 40000 x 40000 pixels, more than 89478485 \(pixels_max\)"
                                         r".*--pixels-max"):
        imported(governor, tmp_path, rows)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*more than 1 \(pixels_max\)"):
        imported(governor, tmp_path, rows, pixels_max=1)


def test_an_image_larger_than_the_limit_is_refused_and_not_left_out(tmp_path):
    packed = pictures.saved(Image.new("RGB", (6000, 6000)), "PNG")
    files = write_rows(tmp_path / "rows.jsonl", [{"image": uri(packed, "png"), "response": "r"}])
    refused = run([files, tmp_path / "set", "176MiB"])
    assert refused.returncode == 1 and "BudgetExceeded" in refused.stderr
    assert run([files, tmp_path / "set", "320MiB"]).returncode == 0


def test_lines_that_are_too_long_blank_or_without_an_image_are_counted(governor, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(["", *(json.dumps(row) for row in ({"text": "t", "response": "r"}, {"image": uri(GOOD)},
                                                     {"image": uri(GOOD) * 9}))]))
    made = plimsoll.import_vision(tmp_path / "rows.jsonl", tmp_path / "set", governor=governor, errors_max=1,
                                  line_bytes_max=2 * len(uri(GOOD)))
    assert made["rows"] == 2 and made["images"] == 1
    assert {key: odd["count"] for key, odd in made["about"]["odd"].items()} == {
        "blank_lines": 1, "no_image": 1, "line_too_long": 1}
    with pytest.raises(ValueError, match="no row of these files has an image"):
        (tmp_path / "empty.jsonl").write_text("\n")
        plimsoll.import_vision(tmp_path / "empty.jsonl", tmp_path / "none", governor=governor)


def test_a_second_import_is_done_at_once_unless_something_changed(governor, tmp_path):
    (tmp_path / "a.jpg").write_bytes(GOOD)
    rows = [{"text": "t", "image": "a.jpg", "response": "r"}]
    assert imported(governor, tmp_path, rows)[1]["reused"] is False
    assert imported(governor, tmp_path, rows)[1]["reused"] is True
    assert imported(governor, tmp_path, rows, rebuild=True)[1]["reused"] is False
    other = pictures.random_picture("jpeg", 9)
    (tmp_path / "a.jpg").write_bytes(other)  # The file of rows is the same.
    images, made = imported(governor, tmp_path, rows)
    assert made["reused"] is False and images.encoded(0).tobytes() == other
    assert imported(governor, tmp_path, rows, errors_max=3)[1]["reused"] is False


def test_packed_files_and_arrays_are_read(governor, tmp_path):
    rows = [{"text": "t", "image": uri(GOOD), "response": f"{k}"} for k in range(3)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(write_rows(tmp_path / "x", rows).read_bytes()))
    (tmp_path / "b.target.json").write_text(json.dumps(rows))
    made = plimsoll.import_vision([tmp_path / "a.jsonl.gz", tmp_path / "b.target.json"], tmp_path / "set", governor=governor)
    assert made["rows"] == 6 and [one["name"] for one in made["about"]["inputs"]] == ["a.jsonl.gz",
                                                                                      "b.target.json", "image files"]


PROGRAM = """
import sys
import plimsoll
from plimsoll.data.importers import _vision_import
_vision_import._COMMIT_BYTES = 20_000
files, out, limit = sys.argv[1:]
made = plimsoll.import_vision(files, out, errors_max=100, governor=plimsoll.Governor(limit))
assert not {"torch", "transformers", "PIL"} & set(sys.modules)
print(made["rows"])
"""


def run(arguments, crash=""):
    return subprocess.run([sys.executable, "-c", PROGRAM, *map(str, arguments)], timeout=120, capture_output=True,
                          text=True, env=os.environ | {"PLIMSOLL_CRASH": crash})


def test_killed_anywhere_it_goes_on_to_the_same_bytes(tmp_path):
    numbers = random.Random(4)
    rows = []
    for k in range(120):
        encoded = pictures.random_picture(numbers.choice(list(pictures.KINDS)), k)
        rows.append({"text": f"{k}", "image": uri(encoded if k % 11 else encoded[:60]), "response": "r"})
    files = write_rows(tmp_path / "rows.jsonl", rows)
    whole = run([files, tmp_path / "whole", "512MiB"])
    assert whole.returncode == 0 and whole.stdout == "109\n", whole.stderr
    killed = sum(run([files, tmp_path / "set", "256MiB"], f"*:{crash}").returncode == -signal.SIGKILL
                 for crash in (9, 20, 40))
    assert killed == 3 and (tmp_path / "set.partial" / "journal").exists()
    assert run([files, tmp_path / "set", "1GiB"]).returncode == 0
    assert (tmp_path / "set").read_bytes() == (tmp_path / "whole").read_bytes()
    assert not (tmp_path / "set.partial").exists()


@pytest.mark.parametrize("change", ["nothing", "another folder", "other files"])
def test_begun_again_it_goes_on_unless_files_of_images_are_others(governor, tmp_path, monkeypatch, change):
    monkeypatch.setattr("plimsoll.data.importers._vision_import._COMMIT_BYTES", 1)
    rows = 6
    for folder in ("small", "large"):
        (tmp_path / folder).mkdir()
        for k in range(rows):
            (tmp_path / folder / f"{k}.jpg").write_bytes(pictures.random_picture("jpeg", k if folder == "small" else 9 + k))
    files = write_rows(tmp_path / "rows.jsonl", [{"image": f"{k}.jpg", "response": "r"} for k in range(rows)])
    done = []

    def stop(*_):
        done.append(1)
        if len(done) == 3:
            raise KeyboardInterrupt

    def started(folder, progress):
        return plimsoll.import_vision(files, tmp_path / "set", images=tmp_path / folder, governor=governor,
                                      progress=progress)

    with pytest.raises(KeyboardInterrupt):
        started("small", stop)
    done.clear()
    if change == "other files":
        (tmp_path / "small").rename(tmp_path / "gone")
        (tmp_path / "large").rename(tmp_path / "small")
    folder = "large" if change == "another folder" else "small"
    started(folder, lambda *_: done.append(1))
    images = plimsoll.ImageSet(tmp_path / "set")
    assert [images.encoded(k).tobytes() for k in range(rows)] == [
        (tmp_path / folder / f"{k}.jpg").read_bytes() for k in range(rows)]
    assert len(done) == (rows - 3 if change == "nothing" else rows)
    assert started(folder, None)["reused"] is True


def test_the_command_says_what_it_made(tmp_path):
    rows = [{"text": "t", "image": uri(GOOD), "response": "r"}, {"image": "none.jpg", "response": "r"}]
    files = write_rows(tmp_path / "rows.jsonl", rows)

    def command(*options):
        return subprocess.run([sys.executable, "-c", "import sys; from plimsoll.cli._program import main; sys.exit(main())",
                               "import", "vision", files, "--out", tmp_path / "set", "--quiet", *options],
                              capture_output=True, text=True, timeout=120)

    refused = command()
    assert refused.returncode == 1 and f"{files}:2: " in refused.stderr and "--errors-max" in refused.stderr
    done = command("--errors-max", "1", "--memory-limit", "512MiB")
    assert done.returncode == 0, done.stderr
    assert "image set" in done.stdout and "1 missing_image (rows.jsonl:2)" in done.stdout
    again = command("--errors-max", "1", "--json")
    assert json.loads(again.stdout)["reused"] is True and json.loads(again.stdout)["images"] == 1
    assert command("--pixels-max", "1").returncode == 1
    assert command("--image-field", "x").returncode == 1


def test_the_program_names_its_own_option_in_a_limit_that_cannot_be_read(tmp_path, capfd):
    for size, status, words in (("much", 2, "error: --memory-limit: \"much\" is not a size"), ("1MiB", 1, "1.0 MiB")):
        assert main(["import", "vision", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "set"),
                     "--memory-limit", size]) == status
        assert words in capfd.readouterr().err
