# SPDX-License-Identifier: Apache-2.0
"""import_can: the graphs are those of the plain loops in tests/support/can_oracle.py; whatever is
odd in a file is counted, and whatever is wrong refused with its line."""
import gzip
import json
import os
import pathlib
import subprocess

import numpy as np
import pytest

plimsoll = pytest.importorskip("plimsoll")
pytest.importorskip("plimsoll._core")

from tests.support import can_oracle

HEADER = "timestamp,arbitration_id,data_field,attack\n"


def is_test(path):
    return path.name.startswith("test_")


def same_graphs(governor, folder, paths, window, stride):
    """Compares a set with the plain graphs of its files; returns how many there are."""
    wanted, vocabulary = can_oracle.graphs_of(paths, window, stride, is_test)
    with plimsoll.GraphSet.open(governor, folder) as graphs:
        assert graphs.vocabulary.tolist() == vocabulary
        assert len(graphs) == len(wanted)
        for number, (x, edge_index, edge_attr, y) in enumerate(wanted):
            graph = graphs[number]
            assert np.array_equal(graph.x[:, 0], x[:, 0]), number
            assert np.array_equal(graph.edge_index, edge_index), number
            assert can_oracle.relative_difference(graph.x, x) < 1e-6, number
            assert can_oracle.relative_difference(graph.edge_attr, edge_attr) < 1e-6, number
            # Whole numbers are exact.
            assert np.array_equal(graph.edge_attr[:, [0, 8, 9]], edge_attr[:, [0, 8, 9]]), number
            assert graph.y.tolist() == [y], number
    return len(wanted)


@pytest.mark.parametrize("window, stride", [(100, 100), (100, 30), (20, 50), (1, 1), (7, 7),
                                            (300, 200)])
def test_random_traffic_gives_the_graphs_of_plain_loops(governor, tmp_path, window, stride):
    seed = window * 1000 + stride
    numbers = np.random.default_rng(seed)
    # Names whose numbers sort as numbers; a file below a window; one that ends with a window.
    paths = [can_oracle.write_csv(tmp_path / "bus" / name, can_oracle.random_frames(
                 numbers, count, ids)) for name, count, ids in
             [("test_a.csv", 450, 40), ("train_2.csv", 777, 25), ("train_10.csv.gz", 401, 6),
              ("train_30.csv", 19, 3)]]
    made = plimsoll.import_can(tmp_path / "bus", tmp_path / "set", window=window, stride=stride,
                               governor=governor)
    assert made["reused"] is False, seed
    count = same_graphs(governor, tmp_path / "set", paths, window, stride)
    assert made["graphs"] == count and count > 0, seed
    sizes = [made[f"{split}_graphs"] for split in ("train", "validation", "test")]
    assert sum(sizes) == count
    assert sizes[0] == int(0.8 * (sizes[0] + sizes[1]) + 1e-9)


def test_a_window_beyond_255_frames_has_wide_edges(governor, tmp_path):
    frames = can_oracle.random_frames(np.random.default_rng(8), 1500, 900)
    path = can_oracle.write_csv(tmp_path / "train_1.csv", frames)
    plimsoll.import_can(path, tmp_path / "set", window=600, stride=250, governor=governor)
    assert same_graphs(governor, tmp_path / "set", [path], 600, 250) == 4


def real_files(folder):
    root = os.environ.get("PLIMSOLL_CAN_DATA")
    found = sorted(pathlib.Path(root, folder).glob("*.csv.gz")) if root else []
    if not found:
        pytest.skip("PLIMSOLL_CAN_DATA names no folder with can_train_and_test and hcrl_survival")
    return found


@pytest.mark.parametrize("folder", ["can_train_and_test/set_01", "hcrl_survival"])
def test_real_traffic_gives_the_graphs_of_plain_loops(governor, tmp_path, folder):
    paths = []
    for path in real_files(folder):  # The beginning and the end of each: minutes of loops else.
        with gzip.open(path, "rt") as text:
            lines = text.readlines()
        kept = lines[:4001] + lines[-4000:]
        paths.append(tmp_path / "bus" / path.name.removesuffix(".gz"))
        paths[-1].parent.mkdir(exist_ok=True)
        paths[-1].write_text("".join(kept), encoding="utf-8")
    plimsoll.import_can(tmp_path / "bus", tmp_path / "set", governor=governor)
    assert same_graphs(governor, tmp_path / "set", paths, 100, 100) == 79 * len(paths)


def test_the_file_is_read_by_the_safetensors_library(governor, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    frames = can_oracle.random_frames(np.random.default_rng(2), 2000, 30)
    path = can_oracle.write_csv(tmp_path / "train_1.csv", frames)
    plimsoll.import_can(path, tmp_path / "set", governor=governor)
    arrays = safetensors.load_file(tmp_path / "set" / "graphs.safetensors")
    with plimsoll.GraphSet.open(governor, tmp_path / "set") as graphs:
        graph = graphs[7]
    nodes = slice(*arrays["node_ptr"][7:9])
    edges = slice(*arrays["edge_ptr"][7:9])
    assert np.array_equal(arrays["x"][nodes], graph.x)
    assert np.array_equal(arrays["edge_attr"][edges], graph.edge_attr)
    assert np.array_equal(arrays["edges"][edges].T, graph.edge_index)
    assert arrays["y"][7] == graph.y[0]


ODD = (HEADER
       + "1600000000.000000,0F1,0102,0\r\n"
       + "  1600000000.5 , 0x0c1 ,\t0304\t, 1 \r\n"    # Spaces, a prefix, lower case.
       + "\n"
       + "1600000000.25,199,,0\n"                      # Back in time, and empty.
       + '"1600000001","1E5","0A 0B 0C",0\n'           # Quotes, and spaces between bytes.
       + "1.6000000015e9,0F1,FFFFFFFFFFFFFFFF,0")      # An exponent; no end of line.


@pytest.mark.parametrize("chunk", [1, 3, 17, 1 << 20])
def test_oddities_are_taken_as_they_come_and_counted(governor, tmp_path, chunk):
    (tmp_path / "train_odd.csv").write_bytes(b"\xef\xbb\xbf" + ODD.encode())
    made = plimsoll.import_can(tmp_path / "train_odd.csv", tmp_path / "set", window=4, chunk=chunk,
                               governor=governor)
    file = made["files"][0]
    assert (file["frames"], file["attack_frames"], file["graphs"]) == (5, 1, 1)
    assert (file["empty_payloads"], file["back_steps"], file["blank_lines"]) == (1, 1, 1)
    with plimsoll.GraphSet.open(governor, tmp_path / "set") as graphs:
        assert graphs.vocabulary.tolist() == [0x0C1, 0x0F1, 0x199, 0x1E5]
        x = graphs[0].x
    assert np.allclose(x[0, 1:4], [3 / 255, 4 / 255, 0])
    assert np.allclose(x[2, 1:9], 0)
    assert np.allclose(x[3, 1:5], [10 / 255, 11 / 255, 12 / 255, 0])


def test_columns_are_found_by_name_and_others_ignored(governor, tmp_path):
    (tmp_path / "train_1.csv").write_text(
        "Label,bus,DATA,can_id,note,Time\n0,1,FF,7,x,1\n1,1,00,8,y,2\n0,1,,7,z,3\n",
        encoding="utf-8")
    made = plimsoll.import_can(tmp_path / "train_1.csv", tmp_path / "set", governor=governor)
    assert made["files"][0]["ignored_columns"] == 2
    assert (made["graphs"], made["ids"], made["attack_graphs"]) == (1, 2, 1)
    (tmp_path / "train_1.csv").write_text("when,who,what,bad\n1,7,FF,0\n2,8,FF,0\n",
                                          encoding="utf-8")
    with pytest.raises(ValueError, match=r"train_1.csv:1: no column \"timestamp\".*--columns"):
        plimsoll.import_can(tmp_path / "train_1.csv", tmp_path / "set", governor=governor)
    made = plimsoll.import_can(tmp_path / "train_1.csv", tmp_path / "set", governor=governor,
                               columns=["when", "who", "what", "bad"])
    assert made["graphs"] == 1


def test_a_file_without_a_header_has_the_usual_columns(governor, tmp_path):
    (tmp_path / "train_1.csv").write_text("1,7,FF,0\n2,8,FF,0\n3,7,FF,1\n", encoding="utf-8")
    made = plimsoll.import_can(tmp_path / "train_1.csv", tmp_path / "set", governor=governor)
    assert made["files"][0]["frames"] == 3


def test_ids_that_only_attacks_made_up_are_unknown_when_normal_ones_are_asked_for(governor, tmp_path, program):
    rows = [f"{k}.0,{0x300 + k if k % 4 == 3 else 0x200 + k % 2:03X},00,{int(k % 4 == 3)}\n" for k in range(400)]
    (tmp_path / "train_1.csv").write_text(HEADER + "".join(rows), encoding="utf-8")
    made = plimsoll.import_can(tmp_path / "train_1.csv", tmp_path / "all", governor=governor)
    assert (made["ids"], made["files"][0]["unknown_id_frames"]) == (102, 0)
    made = plimsoll.import_can(tmp_path / "train_1.csv", tmp_path / "own", governor=governor, normal_ids=True)
    assert (made["ids"], made["files"][0]["unknown_id_frames"]) == (2, 100)
    subprocess.run([program, "import", "can", str(tmp_path / "train_1.csv"), "--out", str(tmp_path / "told"),
                    "--normal-ids", "--quiet"], check=True)
    assert (tmp_path / "told/graphs.safetensors").read_bytes() == \
        (tmp_path / "own/graphs.safetensors").read_bytes()
    with plimsoll.GraphSet.open(governor, tmp_path / "own") as graphs:
        assert graphs.vocabulary.tolist() == [0x200, 0x201]
        assert sorted(graphs[0].x[:, 0]) == [0, 1, 2]  # All made-up ids are one node.
    with pytest.raises(ValueError, match="--normal-ids.*--vocabulary"):
        plimsoll.import_can(tmp_path / "train_1.csv", tmp_path / "no", governor=governor, normal_ids=True,
                            vocabulary=tmp_path / "own")


GOOD = "1600000000.0,0F1,0102,0\n"
BAD_ROWS = [("1600000000.0,0F1,0102\n", "fields", "not as many fields"),
            ("1600000000.0,0F1,0102,0,9\n", "fields", "not as many fields"),
            ("soon,0F1,0102,0\n", "timestamps", "timestamp"),
            ("nan,0F1,0102,0\n", "timestamps", "timestamp"),
            ("1600000000.0,20000000,0102,0\n", "ids", "29 bits"),
            ("1600000000.0,xyz,0102,0\n", "ids", "29 bits"),
            ("1600000000.0,,0102,0\n", "ids", "29 bits"),
            ("1600000000.0,0F1,012,0\n", "payloads", "payload"),
            ("1600000000.0,0F1,01G2,0\n", "payloads", "payload"),
            ("1600000000.0,0F1,010203040506070809,0\n", "payloads", "payload"),
            ("1600000000.0,0F1,0102,2\n", "labels", "label"),
            ("1600000000.0,0F1,0102,\n", "labels", "label"),
            ("\0\1\2\3,\xff\n", "fields", "fields"),
            ("A" * 5000 + "\n", "lines", "longer than")]


@pytest.mark.parametrize("row, count, part", BAD_ROWS, ids=range(len(BAD_ROWS)))
@pytest.mark.parametrize("chunk", [11, 1 << 20])
def test_a_bad_row_is_refused_with_its_line_or_skipped_and_counted(governor, tmp_path, row, count,
                                                                   part, chunk):
    path = tmp_path / "train_1.csv"
    path.write_bytes((HEADER + GOOD * 3).encode() + row.encode("latin1") + (GOOD * 2).encode())
    with pytest.raises(ValueError, match=rf"train_1.csv:5: .*{part}.*--skip-bad"):
        plimsoll.import_can(path, tmp_path / "set", chunk=chunk, governor=governor)
    assert not (tmp_path / "set").exists()
    made = plimsoll.import_can(path, tmp_path / "set", chunk=chunk, skip_bad=True,
                               governor=governor)
    file = made["files"][0]
    assert (file["frames"], file["skipped_rows"], file[f"bad_{count}"]) == (5, 1, 1)


@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_a_truncated_gzip_is_refused_with_its_line_or_its_end_left_out(governor, tmp_path, chunk):
    frames = can_oracle.random_frames(np.random.default_rng(5), 3000, 20)
    whole = can_oracle.write_csv(tmp_path / "whole.csv.gz", frames).read_bytes()
    path = tmp_path / "train_1.csv.gz"
    path.write_bytes(whole[:len(whole) // 2])
    with pytest.raises(plimsoll.CorruptError, match=r"train_1.csv.gz:\d+: truncated gzip"):
        plimsoll.import_can(path, tmp_path / "set", chunk=chunk, governor=governor)
    made = plimsoll.import_can(path, tmp_path / "set", chunk=chunk, skip_bad=True,
                               governor=governor)
    file = made["files"][0]
    assert file["damaged_ends"] == 1 and 1000 < file["frames"] < 2000
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0x55
    path.write_bytes(damaged)
    with pytest.raises((plimsoll.CorruptError, ValueError), match=r"train_1.csv.gz:\d+: "):
        plimsoll.import_can(path, tmp_path / "set2", chunk=chunk, governor=governor)


def test_members_of_a_gzip_follow_one_another_and_a_wrong_name_does_not_matter(governor, tmp_path):
    frames = can_oracle.random_frames(np.random.default_rng(6), 500, 20)
    text = can_oracle.write_csv(tmp_path / "plain.csv", frames).read_bytes()
    path = tmp_path / "train_1.csv"
    path.write_bytes(gzip.compress(text[:999]) + gzip.compress(b"") + gzip.compress(text[999:])
                     + bytes(100))
    made = plimsoll.import_can(path, tmp_path / "set", governor=governor)
    assert made["files"][0]["frames"] == 500


def test_files_are_left_out_by_name_and_split_by_name(governor, tmp_path):
    numbers = np.random.default_rng(7)
    for name in ["train_01/a.csv", "test_01/b.csv", "other/c.csv", "test_02/Masquerade-1.csv",
                 "train_02/suppress.csv.gz", "other/notes.txt"]:
        can_oracle.write_csv(tmp_path / "bus" / name, can_oracle.random_frames(numbers, 300, 9))
    made = plimsoll.import_can(tmp_path / "bus", tmp_path / "set", governor=governor)
    assert [(file["name"], file["test"]) for file in made["files"]] == [
        ("bus/other/c.csv", False), ("bus/test_01/b.csv", True), ("bus/train_01/a.csv", False)]
    assert made["excluded_files"] == ["bus/test_02/Masquerade-1.csv",
                                      "bus/train_02/suppress.csv.gz"]
    made = plimsoll.import_can(tmp_path / "bus", tmp_path / "set", exclude=(), governor=governor)
    assert len(made["files"]) == 5 and made["reused"] is False
    with pytest.raises(plimsoll.NotFoundError, match="--include-all"):
        plimsoll.import_can(tmp_path / "bus" / "train_02", tmp_path / "none", governor=governor)
    with pytest.raises(ValueError, match="given twice"):
        plimsoll.import_can([tmp_path / "bus" / "other", tmp_path / "bus" / "other" / "c.csv"],
                            tmp_path / "none", governor=governor)


def test_an_empty_file_gives_no_graph_and_none_at_all_is_refused(governor, tmp_path):
    (tmp_path / "train_empty.csv").write_bytes(b"")
    (tmp_path / "train_one.csv").write_text(HEADER + GOOD, encoding="utf-8")
    with pytest.raises(ValueError, match="no file has two frames"):
        plimsoll.import_can([tmp_path / "train_empty.csv", tmp_path / "train_one.csv"],
                            tmp_path / "set", governor=governor)
    (tmp_path / "train_two.csv").write_text(HEADER + GOOD * 2, encoding="utf-8")
    made = plimsoll.import_can([tmp_path / "train_empty.csv", tmp_path / "train_one.csv",
                                tmp_path / "train_two.csv"], tmp_path / "set", governor=governor)
    assert [file["graphs"] for file in made["files"]] == [0, 0, 1]


def test_a_folder_with_something_else_in_it_is_refused(governor, tmp_path):
    can_oracle.write_csv(tmp_path / "train_1.csv",
                         can_oracle.random_frames(np.random.default_rng(1), 300, 9))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="thesis.txt"):
        plimsoll.import_can(tmp_path / "train_1.csv", tmp_path / "set", governor=governor)
    assert (tmp_path / "set" / "thesis.txt").read_text(encoding="utf-8") == "mine"


def test_the_program_imports_describes_and_verifies(program, tmp_path):
    can_oracle.write_csv(tmp_path / "bus" / "train_1.csv",
                         can_oracle.random_frames(np.random.default_rng(1), 2300, 9))

    def call(*arguments):
        return subprocess.run([program, *map(str, arguments)], text=True, capture_output=True,
                              check=False)
    done = call("import", "can", tmp_path / "bus", "--out", tmp_path / "set", "--stride", 50,
                "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["kind"], made["graphs"], made["stride"], made["reused"]) == ("graph_set", 44, 50,
                                                                            False)
    again = call("import", "can", tmp_path / "bus", "--out", tmp_path / "set", "--stride", 50)
    assert again.returncode == 0 and "neither inputs nor options have changed" in again.stdout
    shown = call("info", tmp_path / "set")
    assert "bus/train_1.csv (train): 44 graphs" in shown.stdout
    assert call("store", "verify", tmp_path / "set").returncode == 0
    usage = call("import", "can", "--help")
    assert "Example:" in usage.stdout and "--window" in usage.stdout
    missing = call("import", "can", tmp_path / "nothing", "--out", tmp_path / "x")
    assert missing.returncode == 1 and "no such file" in missing.stderr


def test_a_link_to_nothing_in_a_folder_is_an_error_and_not_left_out(governor, tmp_path):
    frames = can_oracle.random_frames(np.random.default_rng(3), 300, 30)
    can_oracle.write_csv(tmp_path / "elsewhere.csv", frames)
    (tmp_path / "set").mkdir()
    can_oracle.write_csv(tmp_path / "set" / "train_1.csv", frames)
    (tmp_path / "set" / "train_2.csv").symlink_to(tmp_path / "elsewhere.csv")
    made = plimsoll.import_can(tmp_path / "set", tmp_path / "out", governor=governor)
    assert len(made["files"]) == 2
    (tmp_path / "elsewhere.csv").unlink()
    with pytest.raises(FileNotFoundError, match="train_2.csv"):
        plimsoll.import_can(tmp_path / "set", tmp_path / "out", governor=governor)


def test_batches_in_python_are_the_graphs_one_by_one(governor, tmp_path):
    can_oracle.write_csv(tmp_path / "train_1.csv",
                         can_oracle.random_frames(np.random.default_rng(3), 20_100, 30))
    plimsoll.import_can(tmp_path / "train_1.csv", tmp_path / "set", governor=governor)
    with plimsoll.GraphSet.open(governor, tmp_path / "set") as graphs:
        seen = []
        for batch in graphs.batches(batch_graphs=16, nodes_max=300, seed=5):
            assert len(batch.x) <= 300 and len(batch) <= 16
            node = edge = 0
            for place, number in enumerate(batch.graphs.tolist()):
                alone = graphs[number]
                nodes, edges = len(alone.x), alone.edge_index.shape[1]
                assert np.array_equal(batch.x[node:node + nodes], alone.x)
                assert np.array_equal(batch.edge_attr[edge:edge + edges], alone.edge_attr)
                assert np.array_equal(batch.edge_index[:, edge:edge + edges],
                                      alone.edge_index + node)
                assert (batch.batch[node:node + nodes] == place).all()
                assert batch.y[place] == alone.y[0]
                node, edge = node + nodes, edge + edges
            assert (node, edge) == (len(batch.x), batch.edge_index.shape[1])
            seen += batch.graphs.tolist()
        assert sorted(seen) == graphs.split("train").tolist()
        sizes = graphs.describe()
        assert sizes["nodes"].sum() == graphs.info["nodes"]
        with pytest.raises(ValueError, match="no graph 100000"):
            graphs.read([100000])
        with pytest.raises(ValueError, match="nodes_max"):
            graphs.batches(nodes_max=2)
        with pytest.raises(ValueError, match="graphs: there are none"):
            graphs.batches(graphs=np.flatnonzero(sizes["y"] > 1))
