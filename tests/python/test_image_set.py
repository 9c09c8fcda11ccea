# SPDX-License-Identifier: Apache-2.0
"""ImageSet and its batches: every image of every row once an epoch, decoded as Pillow would, in an order that a
resumption continues exactly; what is held does not depend on how many images there are or were seen (M1)."""
import base64
import json
import os
import pickle
import random
import sys

import numpy as np
import pytest

plimsoll = pytest.importorskip("plimsoll")
Image = pytest.importorskip("PIL.Image")

from tests.support import pictures
from tests.support.cgroup import MemoryCgroup


def encoded_of(number):
    return pictures.random_picture(list(pictures.KINDS)[number % 3], number)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """40 rows of 0 to 2 images."""
    folder = tmp_path_factory.mktemp("images")
    rows = [{"text": f"{k}", "image": [{"bytes": encoded_of(100 * k + i)} for i in range(k % 3)], "response": "r"}
            for k in range(40)]
    plimsoll.import_vision(rows, folder / "set")
    return folder / "set"


@pytest.fixture
def images(made):
    with plimsoll.ImageSet(made) as images:
        yield images


def test_info_says_what_it_holds(images, made):
    said = plimsoll.info(made)
    assert said["kind"] == "image_set" and said["rows"] == len(images) == 40 and said["images"] == images.images == 39
    assert said["encoded_bytes"] == images.encoded_bytes == sum(len(encoded_of(100 * k + i)) for k in range(40)
                                                                for i in range(k % 3))
    assert said["about"] == images.about and pickle.loads(pickle.dumps(images)).fingerprint == said["fingerprint"]
    with pytest.raises(IndexError, match="row 40 of 40"):
        images[40]
    with pytest.raises(IndexError, match="image 1 of 1 of row 1"):
        images.encoded(1, 1)
    images.verify()


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_image_comes_once_an_epoch_as_pillow_has_it(governor, images, shuffle):
    batches = images.batches(3, governor=governor, shuffle=shuffle, seed=5, threads=2)
    orders = []
    for epoch in range(2):
        order = []
        for batch in batches:
            assert batch.place[0] == epoch and len(batch) == (3 if len(order) < 39 else 1)
            for row in batch:
                order.append(row.row)
                assert row.messages == images[row.row].messages
                for i, pixels in enumerate(row.images):
                    assert np.array_equal(pixels, pictures.pillow(encoded_of(100 * row.row + i)))
        assert sorted(order) == list(range(40)) and (order == list(range(40))) is not shuffle
        orders.append(order)
    assert (orders[0] == orders[1]) is not shuffle


def order_of(batches, count):
    return [row.row for _ in range(count) for row in batches.next()]


def test_threads_and_queue_change_nothing_and_a_place_goes_on(governor, images):
    wanted = order_of(images.batches(3, governor=governor, seed=1), 20)
    assert order_of(images.batches(3, governor=governor, seed=1, threads=3, queue_bytes=0), 20) == wanted
    assert order_of(images.batches(3, governor=governor, seed=2), 20) != wanted
    batches = images.batches(3, governor=governor, seed=1)
    begun = order_of(batches, 7)
    place = batches.place
    assert place == (0, 21) and begun == wanted[:21]
    batches.close()
    assert order_of(images.batches(3, governor=governor, seed=1, place=place), 13) == wanted[21:]
    with pytest.raises(ValueError, match="there is no position 40 of 40 rows"):
        images.batches(3, governor=governor, place=(0, 40))


def test_rows_that_are_held_out_are_the_same_for_any_seed(governor, images):
    held = {seed: set(order_of(images.batches(5, governor=governor, seed=seed, held_out=10, only_held_out=True), 2))
            for seed in (1, 2)}
    assert held[1] == held[2] and len(held[1]) == 10
    assert set(order_of(images.batches(5, governor=governor, held_out=10), 6)) == set(range(40)) - held[1]


def test_a_batch_is_leased_until_its_last_array_goes(governor, images):
    batches = images.batches(40, governor=governor, shuffle=False)
    pixels = batches.next().rows[1].images[0]
    batches.close()
    pixels[0, 0] = 7  # Yours to change.
    assert governor.ledger().leased_bytes > 0 and pixels[0, 0].tolist() == [7, 7, 7]
    del pixels
    assert governor.ledger().leased_bytes == 0


@pytest.mark.parametrize("first", ["loader", "images"])
def test_they_go_beside_a_loader_of_features_under_one_governor(governor, images, tmp_path, first):
    plimsoll.import_dataset([{"x": float(k)} for k in range(8)], tmp_path / "features", governor=governor)
    open_ = {"loader": lambda: plimsoll.Loader.open(governor, tmp_path / "features", batch_rows=2),
             "images": lambda: images.batches(3, governor=governor)}
    opened = {name: open_[name]() for name in sorted(open_, key=lambda name: name != first)}
    held = [opened[name].next() for _ in range(3) for name in opened]
    opened["images"].close()
    assert len(opened["loader"].next()["x"]) == 2 and len(held) == 6
    opened["loader"].close()


def test_a_batch_that_does_not_fit_the_limit_is_refused_and_the_next_call_tries_again(tmp_path):
    program = """
import sys, plimsoll
images = plimsoll.ImageSet(sys.argv[1])
governor = plimsoll.Governor("160MiB", foreign_bytes="24MiB")
batches = images.batches(4, governor=governor, shuffle=False, place=(0, 0))
try:
    batches.next()
    raise SystemExit("it fitted")
except plimsoll.BudgetExceeded as error:
    assert error.tag == "loader", error
assert batches.place == (0, 0)
batches.close()
print(images.batches(1, governor=governor, shuffle=False).next().rows[0].images[0].shape)
"""
    rows = [{"image": {"bytes": pictures.saved(Image.new("RGB", (3000, 3000)), "PNG")}} for _ in range(4)]
    plimsoll.import_vision(rows, tmp_path / "set")
    import subprocess

    done = subprocess.run([sys.executable, "-c", program, tmp_path / "set"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(3000, 3000, 3)\n"


def _read_in_child(path, expected):
    with plimsoll.ImageSet(path) as images:
        return [images.image(k).sum() for k in (1, 4)] == expected


def test_forked_and_spawned_workers_read_it(images, made):
    import multiprocessing

    expected = [images.image(k).sum() for k in (1, 4)]
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply(_read_in_child, (made, expected))
    child = os.fork()
    if child == 0:  # The one that its parent opened, too.
        os._exit(0 if [images.image(k).sum() for k in (1, 4)] == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


EPOCHS = """
import json, re, sys, time
import plimsoll

def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) << 10

images = plimsoll.ImageSet(sys.argv[1])
governor = plimsoll.Governor("512MiB")
batches = images.batches(2, governor=governor, seed=3, threads=2, queue_bytes="64MiB")
after, total = [], 0
for epoch in range(3):
    for batch in batches:
        total += sum(int(one[::64].sum()) for row in batch for one in row.images)
    del batch
    before = same = 0
    while same < 20 or governor.ledger().leased_bytes < 2 * 21_000_000:  # Until the next batch is decoded, as it always is.
        time.sleep(0.05)
        same = same + 1 if resident() == before else 0
        before = resident()
    after.append(before)
print(json.dumps({"after": after, "total": total, "images": images.images}))
"""


def epochs(folder, count, limit=1 << 30):
    """Images of 21 MB decoded and 0.1 encoded: resident memory after each of three epochs, in a cgroup."""
    files = folder / f"rows{count}.jsonl"
    numbers = random.Random(1)
    packed = [base64.b64encode(pictures.saved(Image.fromarray(pictures.picture(numbers, 280, 250)).resize((2800, 2500)),
                                              "JPEG", quality=30)).decode() for _ in range(4)]
    with open(files, "w", encoding="utf-8") as out:
        for k in range(count):
            out.write(json.dumps({"text": f"{k}", "image": packed[k % 4], "response": "r"}) + "\n")
    program = "import plimsoll, sys; plimsoll.import_vision(sys.argv[1], sys.argv[2], governor=plimsoll.Governor('512MiB'))"
    with MemoryCgroup(limit) as group:
        run = group.run([sys.executable, "-c", program, files, folder / f"set{count}"])
        assert run.returncode == 0 and run.oom_kills == 0, run.stderr
        run = group.run([sys.executable, "-c", EPOCHS, folder / f"set{count}"])
    assert run.returncode == 0 and run.oom_kills == 0, run.stderr
    assert run.last_json["images"] == count
    return run.last_json["after"]


def check_flat(after):
    every = [bytes_ for one in after for bytes_ in one]
    assert max(every) - min(every) <= 8 << 20, after


def test_m1_resident_memory_does_not_know_how_many_images_there_are_or_were_seen(tmp_path):
    MemoryCgroup.needed()
    check_flat([epochs(tmp_path, count) for count in (10, 60)])
    kept = "import sys, plimsoll; images = plimsoll.ImageSet(sys.argv[1]); kept = [images.image(k) for k in range(60)]"
    with MemoryCgroup(1 << 30) as group:  # As the original did: 1.2 GiB.
        run = group.run([sys.executable, "-c", kept, tmp_path / "set60"])
    assert run.returncode == -9 and run.oom_kills == 1


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(100, 300, 663), (100, 6630)], ids=str)
def test_m1_any_number_of_images_of_21_mb_decoded_takes_what_100_take(counts, tmp_path):
    """6,630 are 140 GB decoded, three times over: half an hour of two cores."""
    MemoryCgroup.needed()
    after = [epochs(tmp_path, count) for count in counts]
    print({count: [one >> 20 for one in each] for count, each in zip(counts, after)}, "MiB after each epoch")
    check_flat(after)


def test_batches_refuse_in_a_forked_child_and_go_on_in_the_parent(governor, images):
    batches = images.batches(3, governor=governor, seed=1)
    child = os.fork()
    if child == 0:  # The threads that decode are not there: it would wait for ever.
        try:
            batches.next()
        except ValueError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert len(batches.next()) == 3
