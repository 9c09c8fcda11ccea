# SPDX-License-Identifier: Apache-2.0
"""import_pairs: features are those that transformers gives, rows and groups those of the set; killed anywhere it goes on
to the same bytes; memory does not know how many images there are."""
import json
import os
import pathlib
import random
import signal
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
plimsoll = pytest.importorskip("plimsoll")
Image = pytest.importorskip("PIL.Image")
transformers = pytest.importorskip("transformers")
pytest.importorskip("plimsoll._torch")

from tests.support import forked, pictures
from tests.support.cgroup import MemoryCgroup
from tests.support.pair_models import make_pair_model

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS = 23


def captions_of(row):
    return [f"caption {row} the of and", "日本語 of"][:1 + row % 2] if row % 3 else ["the " * 40]


def encoded_of(row):
    return pictures.random_picture(list(pictures.KINDS)[row % 3], row)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_pair_model(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Rows whose captions are a text, texts, or what the assistant says."""
    rows = []
    for row in range(ROWS):
        asked = {"text": captions_of(row)} if row % 4 else {"text": "What is it?", "response": captions_of(row)[0]}
        rows.append({"image": {"bytes": encoded_of(row)}, **asked})
    path = tmp_path_factory.mktemp("images") / "set"
    plimsoll.import_vision(rows, path)
    return path


@pytest.fixture(scope="module")
def first():
    """That imports are forked from."""
    yield from forked.held("transformers.models.clip.modeling_clip", "transformers.models.clip.image_processing_pil_clip")


def kept_captions(row):
    return captions_of(row) if row % 4 else captions_of(row)[:1]


def plain(model, rows, batch_size):
    """Features as transformers gives them: its processor of Pillow's pictures, batches of as many rows."""
    loaded = transformers.AutoModel.from_pretrained(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    processor = transformers.AutoImageProcessor.from_pretrained(model, backend="pil")
    image, text = [], []
    with torch.no_grad():
        for begin in range(0, len(rows), batch_size):
            some = rows[begin:begin + batch_size]
            pixels = processor([Image.fromarray(pictures.pillow(encoded_of(row))) for row in some], return_tensors="pt")
            found = loaded.get_image_features(**pixels).pooler_output.numpy()
            image += [one for row, one in zip(some, found) for _ in kept_captions(row)]
            texts = [caption.strip() for row in some for caption in kept_captions(row)]
            for at in range(0, len(texts), batch_size):
                tokens = tokenizer(texts[at:at + batch_size], padding="max_length", truncation=True, max_length=12,
                                   return_tensors="pt")
                text += list(loaded.get_text_features(**tokens).pooler_output.numpy())
    return {"image": np.stack(image), "text": np.stack(text)}


def read(governor, out):
    with plimsoll.FeatureStore.open(governor, out) as store:
        return {name: array.copy() for name, array in store.read(store.ids()).items()}


def files_of(out):
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_features_are_those_of_transformers(governor, tmp_path, images, kind):
    model = make_pair_model(tmp_path / "model", kind)
    made = plimsoll.import_pairs(images, tmp_path / "out", model=model, batch_size=4, threads=2, governor=governor)
    wanted = plain(model, list(range(ROWS)), 4)
    found = read(governor, tmp_path / "out")
    for name, array in wanted.items():
        assert np.array_equal(found[name], array), name
    groups = [row for row in range(ROWS) for _ in kept_captions(row)]
    assert made["rows"] == len(groups) and made["groups"] == ROWS and made["odd"] == {} and made["reused"] is False
    with plimsoll.FeatureStore.open(governor, tmp_path / "out") as store:
        assert store.ids().tolist() == list(range(len(groups)))
        loader = plimsoll.Loader.open(governor, store, batch_rows=len(groups))
        batch = next(iter(loader.epoch(0)))
        assert batch.groups.tolist() == [groups[pair] for pair in batch.ids]
        loader.close()
    assert not (tmp_path / "out.work").exists()


def test_cosir_trains_on_what_was_made_from_images_directly(first, tmp_path, program, images, model):
    """Done by the command line alone."""
    def call(*words):
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    main = [sys.executable, "-c", "import sys; from plimsoll.cli._program import main; sys.exit(main())"]
    said = call(*main, "import", "pairs", "--images", images, "--model", model, "--out", tmp_path / "data", "--batch-size", 8,
                "--memory-limit", "2GiB", "--quiet")
    assert "feature store" in said and "image" in said
    again = json.loads(first.run(forked.PROGRAM, "import", "pairs", "--images", images, "--model", model, "--out", tmp_path / "data",
                                 "--batch-size", 8, "--quiet", "--json").stdout)
    assert again["reused"] is True and again["kind"] == "feature_store"
    call(program, "train", "cosir", "--data", tmp_path / "data", "--out", tmp_path / "run", "--memory-limit", "1GiB",
         "--epochs", 1, "--batch-size", 8, "--holdout", 2, "--quiet")


def test_a_second_import_is_done_at_once_unless_something_changed(governor, tmp_path, images, model):
    def made(**options):
        return plimsoll.import_pairs(images, tmp_path / "out", model=options.pop("model", model), governor=governor, **options)

    assert made(batch_size=8)["reused"] is False
    first = files_of(tmp_path / "out")
    assert made(batch_size=8)["reused"] is True and made(batch_size=8, threads=2)["reused"] is True
    assert made(batch_size=8, rebuild=True)["reused"] is False and files_of(tmp_path / "out") == first
    assert made(batch_size=5)["reused"] is False
    wide = read(governor, tmp_path / "out")
    assert made(batch_size=5, dtype="float16")["reused"] is False
    half = read(governor, tmp_path / "out")
    assert half["text"].dtype == np.float16 and np.array_equal(half["text"], wide["text"].astype(np.float16))
    other = make_pair_model(tmp_path / "other", seed=9)
    assert made(batch_size=5, model=other)["reused"] is False
    assert not np.array_equal(read(governor, tmp_path / "out")["text"], wide["text"])


def test_rows_that_are_no_pairs_are_errors_by_row_or_counted(governor, tmp_path, model):
    good = {"image": {"bytes": encoded_of(1)}, "text": "a"}
    rows = [good, {"image": {"bytes": encoded_of(1)}, "text": " "}, good, {"text": "b", "response": "c"},
            {"image": [{"bytes": encoded_of(1)}] * 2, "text": "d"}]
    plimsoll.import_vision(rows, tmp_path / "set", governor=governor)

    def made(**options):
        return plimsoll.import_pairs(tmp_path / "set", tmp_path / "out", model=model, governor=governor, **options)

    with pytest.raises(ValueError, match=r"set: row 1: no caption.*errors_max \(--errors-max\)"):
        made()
    with pytest.raises(ValueError, match=r"set: row 4: 2 images, and a pair has one"):
        made(errors_max=2)
    counted = made(errors_max=3)
    assert counted["rows"] == 2 and counted["odd"] == {"no_caption": {"count": 1, "first": ["row 1"]},
                                                       "not_one_image": {"count": 2, "first": ["row 3", "row 4"]}}
    plimsoll.import_vision([rows[1]], tmp_path / "set", governor=governor)
    with pytest.raises(ValueError, match="no row has an image and a caption"):
        plimsoll.import_pairs(tmp_path / "set", tmp_path / "none", model=model, errors_max=1, governor=governor)


def test_what_cannot_be_done_is_named(governor, tmp_path, images, model):
    def made(out="out", **options):
        return plimsoll.import_pairs(images, tmp_path / out, **{"model": model, "governor": governor, **options})

    for options, words in (({"batch_size": 0}, "batch_size: 0 is below 1"), ({"dtype": "int8"}, "dtype: 'int8' is none of"),
                           ({"model": tmp_path}, "has no config.json"), ({"errors_max": -1}, "errors_max: -1")):
        with pytest.raises(ValueError, match=words):
            made(**options)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("kept")
    with pytest.raises(ValueError, match="mine is there, and no import of pairs made it"):
        made("mine")
    (tmp_path / "other.work").mkdir()
    (tmp_path / "other.work" / "thesis").write_text("kept")
    with pytest.raises(ValueError, match=r"other\.work is in the way"):
        made("other")
    assert (tmp_path / "mine" / "thesis").read_text() == (tmp_path / "other.work" / "thesis").read_text() == "kept"
    language = tmp_path / "language"
    transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=600).save_pretrained(language)
    transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=600)).save_pretrained(language)
    with pytest.raises(ValueError, match="model: .*language"):
        made(model=language)


def test_a_batch_that_no_memory_holds_is_refused_by_its_option(governor, tmp_path, images, model):
    """Where pixels alone are too many, and where what the model makes of them is."""
    for size in (10_000_000, governor.limit_bytes // (2 * 3 * 32 * 32 * 4)):
        with pytest.raises(plimsoll.BudgetExceeded, match=r"batch_size \(--batch-size\)"):
            plimsoll.import_pairs(images, tmp_path / "out", model=model, batch_size=size, governor=governor)


def test_features_beyond_float16_are_refused_not_stored_as_infinity(governor, tmp_path, images, model):
    loud = make_pair_model(tmp_path / "loud")
    weights = transformers.AutoModel.from_pretrained(loud)
    with torch.no_grad():
        weights.text_projection.weight.mul_(1e6)
    weights.save_pretrained(loud)
    with pytest.raises(ValueError, match=r"row 0: its text features are not finite in float16; use dtype float32"):
        plimsoll.import_pairs(images, tmp_path / "out", model=loud, dtype="float16", governor=governor)
    plimsoll.import_pairs(images, tmp_path / "out", model=loud, governor=governor)


PROGRAM = """
import os, signal, sys
import torch
import plimsoll
from plimsoll.recipes.cosir import _pairs_import
torch.set_num_threads(1)
images, model, out, stop = sys.argv[1:]
_pairs_import._COMMIT_SECONDS = 0
stop, passed = int(stop), 0

def kill_at(real):
    def called(*arguments, **options):
        global passed
        passed += 1
        if passed == stop:
            os.kill(os.getpid(), 9)
        return real(*arguments, **options)
    return called

for module, name in ((os, "fsync"), (os, "replace"), (os, "rename"), (os, "unlink"), (os, "rmdir")):
    setattr(module, name, kill_at(getattr(module, name)))
made = plimsoll.import_pairs(images, out, model=model, batch_size=4, governor=plimsoll.Governor("4GiB"))
print(made["rows"], passed)
"""


@pytest.fixture
def import_killed(first, tmp_path):
    (tmp_path / "imports.py").write_text(PROGRAM)

    def start(images, model, out, stop=0, crash=""):
        return first.run(tmp_path / "imports.py", images, model, out, stop, env=os.environ | {"PLIMSOLL_CRASH": crash})
    return start


def test_killed_anywhere_it_goes_on_to_the_same_bytes(import_killed, tmp_path, images, model):
    """At each sync and change of a name of its own, each time a little later; and while the store is written."""
    whole = import_killed(images, model, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    places = int(whole.stdout.split()[1])
    numbers = random.Random(7)
    kills = 0
    for stop in sorted(numbers.sample(range(1, places + 1), 6)) + [places]:
        kills += import_killed(images, model, tmp_path / "set", stop).returncode == -signal.SIGKILL
    assert kills >= 3
    fresh = tmp_path / "fresh"
    for crash in ("*:2", "*:5", "*:8"):
        assert import_killed(images, model, fresh, crash=crash).returncode == -signal.SIGKILL
    for out in (tmp_path / "set", fresh):
        assert import_killed(images, model, out).returncode == 0
        assert files_of(out) == files_of(tmp_path / "whole") and not out.with_name(out.name + ".work").exists()


def test_two_at_once_are_refused(import_killed, tmp_path, images, model):
    def tried(done, total):
        child = import_killed(images, model, tmp_path / "out")
        assert child.returncode == 1 and "another process is writing there" in child.stderr

    with plimsoll.Governor("3GiB", foreign_bytes="512MiB") as governor:
        plimsoll.import_pairs(images, tmp_path / "out", model=model, batch_size=32, governor=governor,
                              progress=lambda done, total: tried(done, total) if done == total else None)


FLAT = """
import json, re, sys
import torch
import plimsoll
images, model, out = sys.argv[1:]
torch.set_num_threads(1)
import transformers, transformers.models.clip.modeling_clip, transformers.models.clip.image_processing_pil_clip
plimsoll.import_pairs(images, out, model=model, batch_size=4, governor=plimsoll.Governor("900MiB", foreign_bytes="128MiB"))
status = open("/proc/self/status").read()
print(json.dumps({"peak": int(re.search(r"VmHWM:\\s+(\\d+)", status).group(1)) << 10}))
"""


def test_memory_does_not_know_how_many_images_there_are(tmp_path, model):
    """Images of 21 MB decoded, in a cgroup of 1 GiB."""
    MemoryCgroup.needed()
    packed = pictures.saved(Image.fromarray(pictures.picture(random.Random(1), 280, 250)).resize((2800, 2500)), "JPEG",
                            quality=30)
    peaks = []
    for count in (10, 80):
        plimsoll.import_vision([{"image": {"bytes": packed}, "text": f"{k}"} for k in range(count)], tmp_path / f"{count}")
        with MemoryCgroup(1 << 30) as group:
            run = group.run([sys.executable, "-c", FLAT, tmp_path / f"{count}", model, tmp_path / f"out{count}"])
        assert run.returncode == 0 and run.oom_kills == 0, run.stderr
        peaks.append(run.last_json["peak"])
    # Whether decoding or the model is quicker that day decides how full the queue (64 MiB) stands; 70 images are 1,402 MiB.
    assert peaks[1] - peaks[0] <= 64 << 20, peaks


CROWDED = """
import sys
import numpy as np
import torch
import plimsoll
images, model, out, limit = sys.argv[1:]
torch.set_num_threads(1)
import transformers, transformers.models.clip.modeling_clip, transformers.models.clip.image_processing_pil_clip
# A stop of the watcher's could come before the import begins, as memory grows fast here; the import looks for itself.
governor = plimsoll.Governor(int(limit), foreign_bytes="64MiB", on_pressure="warn")
# What has no lease leaves room for the model and its batches, not for the images that are decoded ahead.
held = np.ones((900 << 20) - governor.ledger().baseline_bytes - (84 << 20), np.uint8)
governor.step_boundary()
done = []
try:
    plimsoll.import_pairs(images, out, model=model, batch_size=4, governor=governor, progress=lambda *of: done.append(of))
except MemoryError as error:
    print(type(error).__name__, len(done), getattr(error, "smallest_limit_bytes", 0))
else:
    print("made", len(done), 0)
"""


def test_s48_an_import_is_admitted_or_refused_before_its_first_batch(tmp_path, model):
    packed = pictures.saved(Image.fromarray(pictures.picture(random.Random(1), 280, 250)).resize((2800, 2500)), "JPEG",
                            quality=30)
    plimsoll.import_vision([{"image": {"bytes": packed}, "text": f"{k}"} for k in range(24)], tmp_path / "images")

    def tried(limit):
        run = subprocess.run([sys.executable, "-c", CROWDED, *map(str, (tmp_path / "images", model, tmp_path / f"out{limit}", limit))],
                             capture_output=True, text=True, check=True)
        name, done, enough = run.stdout.split()
        return name, int(done), int(enough)

    name, done, enough = tried(900 << 20)
    assert (name, done < 4, enough > 900 << 20) == ("BudgetExceeded", True, True), done  # Of its four rows, as far as they were read.
    assert tried(enough)[:2] == ("made", 24)


def test_s48_a_stop_before_the_first_batch_is_a_refusal_wherever_it_comes(tmp_path, model, images, monkeypatch):
    def stopped():
        raise plimsoll.MemoryPressure("memory is short", 800 << 20, 900 << 20, 1000 << 20)

    monkeypatch.setattr("plimsoll.recipes.cosir._pairs_import.libraries", stopped)
    with plimsoll.Governor("4GiB") as governor, pytest.raises(plimsoll.BudgetExceeded, match="the import is not admitted") as refused:
        plimsoll.import_pairs(images, tmp_path / "out", model=model, governor=governor)
    assert refused.value.smallest_limit_bytes >= 1000 << 20


def test_the_shipped_features_are_whole():
    """data/coco-mini: 159 images with five captions each, every row finite and in place."""
    folder = ROOT / "data" / "coco-mini"
    ids, groups = np.load(folder / "ids.npy"), np.load(folder / "groups.npy")
    image, text = (np.concatenate([np.load(shard) for shard in sorted((folder / name).iterdir())])
                   for name in ("image", "text"))
    assert image.shape == (795, 1280) and text.shape == (795, 384)
    assert len(set(ids.tolist())) == 795 and groups.tolist() == sorted(groups.tolist())
    assert (np.bincount(groups) == 5).all() and len(np.bincount(groups)) == 159
    assert np.isfinite(image).all() and np.isfinite(text).all()
    assert (image.reshape(159, 5, 1280) == image[::5, None]).all()
    lines = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ids.tolist()
    assert all(line["caption"] for line in lines)
