# SPDX-License-Identifier: Apache-2.0
"""`plimsoll store`: import, export, verify and compact, as other programs see the files."""
import csv
import json
import os
import subprocess

import numpy as np
import pytest


@pytest.fixture
def store(program):
    def run(*arguments) -> subprocess.CompletedProcess:
        return subprocess.run([program, "store", *map(str, arguments)], text=True, timeout=300,
                              capture_output=True, check=False)
    return run


@pytest.fixture
def table(store, rows, tmp_path):
    done = store("import", rows[0], "--out", tmp_path / "table")
    assert done.returncode == 0, done.stderr
    return tmp_path / "table"


def test_numpy_rows_go_in_and_come_out_the_same(store, rows, table, tmp_path):
    _, ids, values = rows
    out = tmp_path / "back.npy"
    done = store("export", table, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 500
    np.testing.assert_array_equal(np.load(out), values)
    np.testing.assert_array_equal(np.load(tmp_path / "back.ids.npy"), ids)


def test_csv_is_what_the_csv_module_reads(store, rows, table, tmp_path):
    _, ids, values = rows
    assert store("export", table, "--format", "csv", "--out", tmp_path / "rows").returncode == 0
    with open(tmp_path / "rows", newline="", encoding="ascii") as file:
        lines = list(csv.reader(file))
    assert lines[0][:2] == ["id", "rows_0"]
    assert [int(line[0]) for line in lines[1:]] == ids.tolist()
    read = np.array([[float(x) for x in line[1:]] for line in lines[1:]], dtype=np.float32)
    np.testing.assert_array_equal(read, values)


def test_compact_keeps_the_rows_and_verify_finds_them_sound(store, rows, table, tmp_path):
    done = store("compact", table, "--json")
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout)
    assert 0 < sizes["bytes"] <= sizes["bytes_before"]
    assert store("verify", table).returncode == 0
    assert store("export", table, "--out", tmp_path / "after.npy").returncode == 0
    np.testing.assert_array_equal(np.load(tmp_path / "after.npy"), rows[2])


def test_compact_can_make_room_for_more_rows(store, table):
    def info():
        return json.loads(store("info", table, "--json").stdout)

    assert (info()["rows"], info()["rows_max"]) == (500, 0)
    done = store("compact", table, "--rows-max", 800)
    assert done.returncode == 0, done.stderr
    assert (info()["rows"], info()["rows_max"]) == (500, 800)
    assert "500 (at most 800)" in store("info", table).stdout
    few = store("compact", table, "--rows-max", 499)
    assert few.returncode == 1 and "rows_max is 499, but there are 500 ids" in few.stderr
    assert store("verify", table).returncode == 0


def test_info_states_the_parts_of_the_slab_and_what_the_disk_may_come_to_hold(store, table):
    info = json.loads(store("info", table, "--json").stdout)
    parts = [info[name] for name in ("frame_bytes", "index_bytes", "buffer_bytes", "queue_bytes")]
    assert all(part > 0 for part in parts)
    assert 0 <= info["slab_bytes"] - sum(parts) < 4096  # A slab is whole pages.
    assert info["slab_floor_bytes"] <= info["slab_bytes"]
    assert info["disk_bytes"] <= info["disk_cap_bytes"]
    text = store("info", table).stdout
    for word in ("pages of rows", "index", "buffers", "look-ahead", "at least", "at most"):
        assert word in text, text


@pytest.mark.parametrize("name", ["adam", "adamw", "adamw_fresh", "adagrad", "row_adagrad", "sgd",
                                  "sgd_momentum"])
def test_import_makes_tables_for_every_optimizer(store, rows, tmp_path, name):
    np.save(tmp_path / "some.npy", rows[2])
    done = store("import", tmp_path / "some.npy", "--out", tmp_path / "made", "--optimizer", name,
                 "--number-rows")
    assert done.returncode == 0, done.stderr
    assert json.loads(store("info", tmp_path / "made", "--json").stdout)["optimizer"] == name


def test_r43_an_import_numbers_no_rows_unasked_and_keeps_the_users_ids(store, table, tmp_path):
    assert store("export", table, "--out", tmp_path / "made.npy").returncode == 0
    ids = (tmp_path / "made.ids.npy").read_bytes()
    for out in ("made", "again"):
        done = store("import", tmp_path / "made.npy", "--out", tmp_path / out)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "made.ids.npy").read_bytes() == ids
    (tmp_path / "made.ids.npy").unlink()
    refused = store("import", tmp_path / "made.npy", "--out", tmp_path / "third")
    assert refused.returncode == 1 and "made.ids.npy is not there" in refused.stderr
    assert "--number-rows" in refused.stderr and not (tmp_path / "third").exists()


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil-was-here",))


def test_import_reads_the_originals_chunk_files_and_runs_nothing_of_them(store, rows, tmp_path):
    torch = pytest.importorskip("torch")
    ids, vectors = np.arange(7, 307) * 11, np.arange(300 * 6, dtype=np.float32).reshape(300, 6)
    whole = torch.from_numpy(vectors)
    for chunk in range(3):  # Rows of their own, and views of one tensor.
        some = range(100 * chunk, 100 * chunk + 100)
        torch.save({int(ids[i]): whole[i].clone() if chunk else whole[i] for i in some},
                   tmp_path / f"embeddings_chunk_{chunk}.pt")
    files = [tmp_path / f"embeddings_chunk_{chunk}.pt" for chunk in (0, 1, 2)]
    done = store("import", *files, "--out", tmp_path / "made")
    assert done.returncode == 0, done.stderr
    store("export", tmp_path / "made", "--out", tmp_path / "back.npy")
    assert np.array_equal(np.load(tmp_path / "back.npy"), vectors)
    assert np.array_equal(np.load(tmp_path / "back.ids.npy"), ids)
    for content, words in (({1: Evil()}, "mkdir"), ([1, 2], "no dict of rows"),
                           ({"a": whole[0]}, "no whole number"), ({4: whole}, "id 4"),
                           ({4: whole[0], 5: whole[0, :3]}, "id 5"), ({4: 2.5}, "id 4")):
        torch.save(content, tmp_path / "wrong.pt")
        refused = store("import", tmp_path / "wrong.pt", "--out", tmp_path / "none")
        assert refused.returncode == 1 and words in refused.stderr, refused.stderr
        assert "wrong.pt" in refused.stderr and not (tmp_path / "none").exists()
    assert not os.path.exists("evil-was-here")


def test_verify_says_what_it_found_and_names_what_is_wrong(store, table):
    sound = store("verify", table, "--quiet")
    assert sound.returncode == 0 and sound.stderr == ""
    assert "every checksum matches" in sound.stdout
    data = (table / "rows.dat").read_bytes()
    (table / "rows.dat").write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    broken = store("verify", table)
    assert broken.returncode == 1 and broken.stderr.startswith("plimsoll: error: ")
    assert "rows.dat" in broken.stderr and "page 0" in broken.stderr


@pytest.mark.parametrize("arguments, words", [
    (["export", "TABLE", "--out", "DIR/x.csv", "--since", "9"], ["no commit at step 9"]),
    (["export", "TABLE", "--out", "DIR/x.csv", "--step", "9"], ["no commit at step 9"]),
    (["export", "TABLE", "--out", "DIR/x.xls"], ["--format"]),
    (["import", "DIR/nothing.npy", "--out", "DIR/made"], ["nothing.npy"]),
    (["compact", "DIR/nowhere"], ["nowhere"]),
])
def test_what_cannot_be_done_is_named(store, table, tmp_path, arguments, words):
    done = store(*[word.replace("TABLE", str(table)).replace("DIR", str(tmp_path))
                   for word in arguments])
    assert done.returncode == 1
    assert done.stderr.startswith("plimsoll: error: ")
    for word in words:
        assert word in done.stderr, done.stderr
    assert not (tmp_path / "made").exists()


def test_a_limit_is_an_option_only_where_it_bounds_something(store, table):
    for command in ("info", "verify"):
        done = store(command, table, "--memory-limit", "1KiB")
        assert done.returncode == 2 and "unknown option '--memory-limit'" in done.stderr, done.stderr
