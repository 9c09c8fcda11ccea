# SPDX-License-Identifier: Apache-2.0
"""`plimsoll import cosir`: what goes in comes out by id, and bad input leaves nothing behind."""
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file

plimsoll = pytest.importorskip("plimsoll")
pytest.importorskip("plimsoll._core")

ROWS, IMAGE_DIM, TEXT_DIM = 1000, 24, 16


@pytest.fixture
def arrays():
    numbers = np.random.default_rng(3)
    return {"image": numbers.standard_normal((ROWS, IMAGE_DIM)).astype(np.float32),
            "text": numbers.standard_normal((ROWS, TEXT_DIM)).astype(np.float16),
            "ids": numbers.permutation(10 * ROWS)[:ROWS].astype(np.int64) * 1_000_003 - 5,
            "groups": np.arange(ROWS, dtype=np.int64) // 4}


def call(program, out, *flags, **columns):
    options = {"image": "--image-features", "text": "--text-features", "ids": "--ids",
               "groups": "--groups"}
    command = [program, "import", "cosir", "--out", out, *flags]
    for name, path in columns.items():
        command += [options[name], path]
    return subprocess.run(list(map(str, command)), text=True, capture_output=True, check=False)


def test_pairs_are_added_to_a_store_without_rewriting_it(program, tmp_path, arrays):
    for name, part in (("old", slice(0, 700)), ("new", slice(700, ROWS))):
        for column, array in arrays.items():
            np.save(tmp_path / f"{name}-{column}.npy", array[part])
    files = {name: {column: tmp_path / f"{name}-{column}.npy" for column in arrays} for name in ("old", "new")}
    assert call(program, tmp_path / "set", **files["old"]).returncode == 0
    before = (tmp_path / "set" / "records.dat").read_bytes()
    refused = call(program, tmp_path / "set", **files["new"])
    assert refused.returncode != 0 and "already there" in refused.stderr
    done = call(program, tmp_path / "set", "--append", **files["new"])
    assert done.returncode == 0, done.stderr
    assert "parts     2" in done.stdout and (tmp_path / "set" / "records.dat").read_bytes() == before
    with plimsoll.Governor("4GiB") as governor, plimsoll.FeatureStore.open(governor, tmp_path / "set") as store:
        read = store.read(arrays["ids"])
        assert np.array_equal(read["image"], arrays["image"]) and np.array_equal(read["text"], arrays["text"])
    again = call(program, tmp_path / "set", "--append", **files["new"])
    assert again.returncode != 0 and "already, as record 700" in again.stderr
    wrong = call(program, tmp_path / "set", "--append",
                 **{column: path for column, path in files["new"].items() if column != "groups"})
    assert wrong.returncode != 0 and "its columns or groups are not those of the files" in wrong.stderr
    packed = call(program, tmp_path / "set", "--append", "--compression", "lz4", **files["new"])
    assert packed.returncode != 0 and "--compression" in packed.stderr


def shards(folder, array, name, sizes, suffix):
    """Writes `array` as a folder of shards of the given sizes; returns the folder."""
    folder.mkdir()
    at = 0
    for number, size in enumerate(sizes):
        piece = np.ascontiguousarray(array[at:at + size])
        at += size
        if suffix == "npy":
            np.save(folder / f"{number:05d}.npy", piece)
        else:
            save_file({name: piece, "other": np.zeros(1, np.float32)},
                      folder / f"{number:05d}.safetensors")
    assert at == len(array)
    return folder


def test_shards_of_both_formats_come_out_by_id(program, tmp_path, arrays):
    image = shards(tmp_path / "image", arrays["image"], "image", [1, 600, 399], "npy")
    text = shards(tmp_path / "text", arrays["text"], "text", [300, 700], "safetensors")
    np.save(tmp_path / "ids.npy", arrays["ids"])
    np.save(tmp_path / "groups.npy", arrays["groups"])
    done = call(program, tmp_path / "set", image=image, text=text, ids=tmp_path / "ids.npy",
                groups=tmp_path / "groups.npy")
    assert done.returncode == 0, done.stderr
    with plimsoll.Governor("4GiB") as governor:
        store = plimsoll.FeatureStore.open(governor, tmp_path / "set")
        order = np.random.default_rng(4).permutation(ROWS)
        read = store.read(arrays["ids"][order])
        assert np.array_equal(read["image"], arrays["image"][order])
        assert np.array_equal(read["text"], arrays["text"][order])
        del store, read


def wrong(arrays, what):
    """Arrays with one thing wrong, and what the error must say."""
    arrays = {name: array.copy() for name, array in arrays.items()}
    if what == "rows":
        arrays["text"] = arrays["text"][:-1]
        return arrays, ["1000 rows", "999", "image.npy", "text.npy"]
    if what == "nan":
        arrays["image"][517, 3] = np.nan
        return arrays, ["row 517", "image.npy"]
    if what == "infinite":
        arrays["text"][2, 1] = np.inf
        return arrays, ["row 2", "text.npy"]
    if what == "duplicate":
        arrays["ids"][900] = arrays["ids"][12]
        return arrays, [str(arrays["ids"][12])]
    if what == "dtype":
        arrays["image"] = arrays["image"].astype(np.float64)
        return arrays, ["float64", "float32 or float16", "image.npy"]
    if what == "ids dtype":
        arrays["ids"] = arrays["ids"].astype(np.int32)
        return arrays, ["int32", "int64", "ids.npy"]
    if what == "dimensions":
        arrays["text"] = arrays["text"].reshape(ROWS, 4, 4)
        return arrays, ["[rows, width]", "[4, 4]", "text.npy"]
    if what == "groups":
        arrays["groups"][800] = 0
        return arrays, ["a group returns"]
    raise AssertionError(what)


@pytest.mark.parametrize("what", ["rows", "nan", "infinite", "duplicate", "dtype", "ids dtype",
                                  "dimensions", "groups"])
def test_bad_input_is_named_and_leaves_nothing(program, tmp_path, arrays, what):
    arrays, words = wrong(arrays, what)
    paths = {}
    for name, array in arrays.items():
        paths[name] = tmp_path / f"{name}.npy"
        np.save(paths[name], array)
    done = call(program, tmp_path / "set", **paths)
    assert done.returncode == 1, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(p.name for p in paths.values())


def test_truncated_and_missing_shards_are_named(program, tmp_path, arrays):
    np.save(tmp_path / "image.npy", arrays["image"])
    np.save(tmp_path / "text.npy", arrays["text"])
    whole = (tmp_path / "text.npy").read_bytes()
    (tmp_path / "text.npy").write_bytes(whole[:-7])
    done = call(program, tmp_path / "set", image=tmp_path / "image.npy", text=tmp_path / "text.npy")
    assert done.returncode == 1 and "text.npy" in done.stderr, done.stderr
    done = call(program, tmp_path / "set", image=tmp_path / "image.npy", text=tmp_path / "no.npy")
    assert done.returncode == 1 and "no.npy" in done.stderr, done.stderr
    assert not (tmp_path / "set").exists()


def test_s31_arrays_are_known_by_their_bytes_and_other_files_are_named(program, tmp_path, arrays):
    np.save(tmp_path / "image.npy", arrays["image"])
    (tmp_path / "image.npy").rename(tmp_path / "image.safetensors")
    save_file({"text": arrays["text"]}, tmp_path / "text.npy")
    np.save(tmp_path / "ids.npy", arrays["ids"])
    files = {"image": tmp_path / "image.safetensors", "text": tmp_path / "text.npy", "ids": tmp_path / "ids.npy"}
    done = call(program, tmp_path / "set", **files)
    assert done.returncode == 0, done.stderr
    np.savez(tmp_path / "all.npz", **arrays)
    for name, head in (("NumPy arrays (npz)", (tmp_path / "all.npz").read_bytes()), ("a Parquet file", b"PAR1" + bytes(60)),
                       ("a Python pickle", b"\x80\x04\x95" + bytes(60))):
        (tmp_path / "ids.npy").write_bytes(head)
        refused = call(program, tmp_path / "none", **files)
        assert refused.returncode == 1 and f"ids.npy: {name}, where an array is read" in refused.stderr
