# SPDX-License-Identifier: Apache-2.0
"""import_can: the dialects in which CAN logs are shared give the frames that they hold, by themselves or by name."""
import gzip
import json

import numpy as np
import pytest

plimsoll = pytest.importorskip("plimsoll")
pytest.importorskip("plimsoll._core")

FRAMES = [(0x316, bytes.fromhex("052168092121006f"), 0), (0x18f, bytes.fromhex("fe5b"), 1), (0x260, b"", 0),
          (0x316, bytes.fromhex("00"), 0), (0x7ff, bytes(range(8)), 1), (0x043, bytes.fromhex("ffffff"), 0)] * 4


def usual(frames):
    rows = (f"{k}.5,{ident:03X},{payload.hex()},{attack}\n" for k, (ident, payload, attack) in enumerate(frames))
    return "timestamp,arbitration_id,data_field,attack\n" + "".join(rows)


def normal(frames):
    return [(ident, payload, 0) for ident, payload, _ in frames]


def lines(row, frames=FRAMES, header=""):
    return header + "".join(row(k, *frame) + "\n" for k, frame in enumerate(frames))


def bytes_of(payload):
    return ",".join(f"{byte:02x}" for byte in payload)


def hcrl(k, ident, payload, attack):
    """As HCRL's car hacking data: as many fields as there are bytes."""
    return ",".join(filter(None, (f"1478198376.{k:06d}", f"{ident:04x}", str(len(payload)), bytes_of(payload),
                                  "RT"[attack])))


def padded(k, ident, payload, attack, pad="", last="01"):
    fields = [f"{byte:02x}" for byte in payload] + [pad] * (8 - len(payload))
    return ",".join([str(1478198376000 + k), f"{ident:04x}", str(len(payload)), *fields, last[attack]])


BYTES = ",".join(f"DATA{k}" for k in range(1, 8))
LABELLED = {
    "hcrl": lines(hcrl),
    "hcrl_header": lines(hcrl, header=f"Timestamp,ID,DLC,DATA,{BYTES},Flag\n"),
    "hcrl_padded": lines(padded, header=f"Timestamp,ID,DLC,DATA,{BYTES},Flag\n"),
    "hcrl_zeros": lines(lambda *frame: padded(*frame, pad="00"),
                        header="Timestamp,CAN ID,DLC,DATA[0],DATA[1],DATA[2],DATA[3],DATA[4],DATA[5],DATA[6],DATA[7],Label\n"),
    "hcrl_shifted": lines(lambda k, i, p, a: hcrl(k, i, p, a) + "," * (8 - len(p))),
    "hcrl_spaces": lines(lambda *frame: hcrl(*frame).replace(",", " ")),
    "hcrl_0x": lines(lambda k, i, p, a: ",".join([f"{k}.25", f"0x{i:x}", str(len(p)), *(f"0x{b:x}" for b in p), "RT"[a]])),
    "milliseconds": lines(lambda k, i, p, a: f"{1478198376000 + k},{i:04x},{p.hex()},{a}",
                          header="timestamp,arbitration_id,data_field,attack\n"),
    "microseconds": lines(lambda k, i, p, a: f"{1478198376000000 + k},{i:04x},{p.hex()},{a}"),
    "nanoseconds": lines(lambda k, i, p, a: f"{1478198376000000000 + k},{i:04x},{p.hex()},{a}"),
    "challenge": lines(lambda k, i, p, a: f"{k}.5,{i:03X},{len(p)},{p.hex(' ').upper()},{('Normal', 'Attack')[a]},{a * 'Flooding'}",
                       header="Timestamp,Arbitration_ID,DLC,Data,Class,SubClass\n"),
    "semicolons": lines(lambda k, i, p, a: f"{k}.5;{i:03X};{p.hex()};{a}",
                        header="timestamp;arbitration_id;data_field;attack\n"),
    "tabs": lines(lambda k, i, p, a: f"{k}.5\t{i:03X}\t{p.hex()}\t{a}",
                  header="timestamp\tarbitration_id\tdata_field\tattack\n"),
    "gvret": lines(lambda k, i, p, a: ",".join([str(k * 1000), f"{i:08X}", "false", "Rx", "0", str(len(p)),
                                               *(f"{b:02X}" for b in p), *[""] * (8 - len(p)), str(a)]),
                   header="Time Stamp,ID,Extended,Dir,Bus,LEN,D1,D2,D3,D4,D5,D6,D7,D8,Label\n"),
    "candump_labels": lines(lambda k, i, p, a: f"({1436509052 + k}.249713) can0 {i:03X}#{p.hex().upper()} {a}"),
}
UNLABELLED = {
    "hcrl_text": lines(lambda k, i, p, a: f"Timestamp: {1479121434 + k}.850202        ID: {i:04x}    000    DLC: {len(p)}    {p.hex(' ')}"),
    "hcrl_without_flags": lines(lambda *frame: hcrl(*frame)[:-2], list(FRAMES)),
    "candump": lines(lambda k, i, p, a: f"({1436509052 + k}.249713) vcan0 {i:03X}#{p.hex().upper()}"),
    "candump_direction": lines(lambda k, i, p, a: f"({1436509052 + k}.249713) vcan0 {i:08X}#{p.hex().upper()} {'RT'[k % 2]}"),
    "candump_fd": lines(lambda k, i, p, a: f"({1436509052 + k}.249713) vcan0 {i:03X}##1{p.hex().upper()}"),
    "candump_screen": lines(lambda k, i, p, a: f"  can0  {i:03X}   [{len(p)}]  {p.hex(' ').upper()}"),
    "candump_ascii": lines(lambda k, i, p, a: f" (1436509052.{k:06d})  can0  {i:03X}   [{len(p)}]  {p.hex(' ').upper()}   '...'"),
}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wanted")
    made = {}
    for name, frames in (("labelled", FRAMES), ("normal", normal(FRAMES))):
        path = folder / f"{name}.csv"
        path.write_text(usual(frames), encoding="utf-8")
        with plimsoll.Governor("3GiB", foreign_bytes="512MiB") as governor:  # As the fixture governor, which has another scope.
            plimsoll.import_can(path, folder / name, window=4, stride=3, governor=governor)
        made[name] = graphs_of(folder / name)
    return made


def graphs_of(folder):
    with plimsoll.Governor("3GiB", foreign_bytes="512MiB") as governor, plimsoll.GraphSet.open(governor, folder) as graphs:
        return graphs.vocabulary.tolist(), [(graph.x.copy(), graph.edge_index.copy(), graph.edge_attr.copy(), graph.y.tolist())
                                            for graph in (graphs[number] for number in range(len(graphs)))]


def same(one, other):
    return one[0] == other[0] and len(one[1]) == len(other[1]) and all(
        np.array_equal(a, b) for x, y in zip(one[1], other[1], strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("name", LABELLED)
def test_s32_a_dialect_with_labels_gives_the_frames_that_it_holds(governor, tmp_path, wanted, name):
    path = tmp_path / "train_1.csv"
    path.write_text(LABELLED[name], encoding="utf-8")
    made = plimsoll.import_can(path, tmp_path / "set", window=4, stride=3, governor=governor)
    assert made["files"][0]["frames"] == len(FRAMES) and made["files"][0]["unlabelled_frames"] == 0
    assert made["files"][0]["attack_frames"] == 8
    assert made["files"][0]["empty_payloads"] == 4
    assert same(graphs_of(tmp_path / "set"), wanted["labelled"])


@pytest.mark.parametrize("name", UNLABELLED)
def test_s32_a_dialect_without_labels_is_taken_as_normal_and_counted(governor, tmp_path, wanted, name):
    path = tmp_path / "train_1.log"
    path.write_text(UNLABELLED[name], encoding="utf-8")
    made = plimsoll.import_can(path, tmp_path / "set", window=4, stride=3, governor=governor)
    assert made["files"][0]["unlabelled_frames"] == made["files"][0]["frames"] == len(FRAMES)
    assert same(graphs_of(tmp_path / "set"), wanted["normal"])


def test_s32_decimal_numbers_are_read_where_they_are_named(governor, tmp_path, wanted):
    header = "ID,DATA_0,DATA_1,DATA_2,DATA_3,DATA_4,DATA_5,DATA_6,DATA_7,label\n"
    path = tmp_path / "decimal.csv"
    path.write_text(lines(lambda k, i, p, a: ",".join([str(i), *map(str, p), *[""] * (8 - len(p)), str(a)]), header=header),
                    encoding="utf-8")
    with pytest.raises(ValueError, match=r"decimal.csv:1: no column \"timestamp\".*- for a time"):
        plimsoll.import_can(path, tmp_path / "set", window=4, stride=3, governor=governor)
    columns = ["-", "ID", "data_field", "label"]
    with pytest.raises(ValueError, match=r"decimal.csv:2: the payload"):  # 111 is no byte in hexadecimal.
        plimsoll.import_can(path, tmp_path / "set", window=4, stride=3, columns=columns, governor=governor)
    plimsoll.import_can(path, tmp_path / "set", window=4, stride=3, columns=columns, dialect="decimal", governor=governor)
    assert same(graphs_of(tmp_path / "set"), wanted["labelled"])


def test_s32_road_takes_its_labels_from_the_metadata_beside_it(governor, tmp_path, wanted):
    folder = tmp_path / "road"
    folder.mkdir()
    frames = [(0x100, bytes.fromhex("1122"), 0), (0x6e0, bytes.fromhex("595945450000ffff"), 0)] * 10
    text = lines(lambda k, i, p, a: f"({1000 + k}.000000) can0 {i:03X}#{p.hex().upper()}", frames)
    (folder / "correlated_1.log.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "ambient_1.log").write_text(text, encoding="utf-8")
    said = {"correlated_1": {"injection_id": "0x6e0", "injection_data_str": "595945450000XXXX",
                             "injection_interval": [4.5, 9.25]}, "ambient_1": {"injection_interval": None}}
    (folder / "capture_metadata.json").write_text(json.dumps(said), encoding="utf-8")
    made = plimsoll.import_can(folder, tmp_path / "set", window=4, stride=3, governor=governor)
    by_name = {file["name"]: file for file in made["files"]}
    assert by_name["road/correlated_1.log.gz"]["attack_frames"] == 3  # Those at 5, 7 and 9 seconds.
    assert by_name["road/correlated_1.log.gz"]["unlabelled_frames"] == 0
    assert by_name["road/ambient_1.log"]["attack_frames"] == 0
    assert by_name["road/ambient_1.log"]["unlabelled_frames"] == 20
    assert plimsoll.import_can(folder, tmp_path / "set", window=4, stride=3, governor=governor)["reused"]
    said["correlated_1"]["injection_interval"] = [0, 9.25]
    (folder / "capture_metadata.json").write_text(json.dumps(said), encoding="utf-8")
    made = plimsoll.import_can(folder, tmp_path / "set", window=4, stride=3, governor=governor)
    assert not made["reused"] and made["files"][1]["attack_frames"] == 5
    (folder / "capture_metadata.json").write_text("[]", encoding="utf-8")
    with pytest.raises(plimsoll.CorruptError, match="capture_metadata.json: not a JSON object"):
        plimsoll.import_can(folder, tmp_path / "set", window=4, stride=3, governor=governor)
    (folder / "capture_metadata.json").unlink()
    with pytest.raises(plimsoll.NotFoundError, match="no capture_metadata.json beside it.*--dialect candump"):
        plimsoll.import_can(folder, tmp_path / "set", window=4, stride=3, dialect="road", governor=governor)


def test_s32_skipping_all_rows_says_why_nothing_is_left(governor, tmp_path):
    path = tmp_path / "train_1.csv"
    path.write_text("timestamp,arbitration_id,data_field,attack\n" + "soon,7,FF,0\n" * 39 + "1,xyz,FF,0\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"no file has two frames.*39 skipped for their timestamp, 1 skipped for their id; "
                                         r"the first: .*train_1.csv:2: the timestamp is no number \(\"soon,7,FF,0\"\)"):
        plimsoll.import_can(path, tmp_path / "set", window=10, skip_bad=True, governor=governor)


@pytest.mark.parametrize("dialect, text, part", [
    ("candump", "1,7,FF,0\n2,7,FF,0\n", "no line of the dialect candump.*--dialect"),
    ("csv", "(1.5) can0 123#11\n(2.5) can0 123#11\n", "no line of the dialect csv"),
    ("hcrl", "(1.5) can0 123#11\n(2.5) can0 123#11\n", "no line of the dialect hcrl"),
    ("canalyzer", "1,7,FF,0\n", 'no dialect "canalyzer".*hcrl, candump'),
    ("auto", "date Mon Nov 3 18:39:36.389 2016\nbase hex  timestamps absolute\n", "Vector's.*can.logconvert"),
    ("auto", ";$FILEVERSION=1.1\n", "PEAK's.*can.logconvert"),
    ("auto", "1478198376.1,0316,8,05,21,68,R\n1478198376.1,0316,8,05,21,68,R\n", "not as many fields"),
    ("auto", "1,0316,9,05,21,68,05,21,68,05,21,68,R\n", "not as many fields"),
    ("auto", "1.5,0316,2,05,21,X\n1.5,0316,2,05,21,X\n", "the label is neither"),
    ("auto", "(1.5) can0 123#112233445566778899\n(1.5) can0 123#11\n", "the payload is not 0 to 8 bytes"),
    ("auto", "Timestamp,ID,DLC,DATA0,DATA1,DATA3,Flag\n1.5,0316,2,05,21,,R\n", "not numbered as those of 1 to 8 bytes"),
    ("auto", "Label,Time,ID,Signal_1_of_ID\n0,1.5,0316,0.25\n", 'no column "data_field".*--columns'),
])
def test_s32_what_is_no_line_of_a_dialect_is_refused_with_advice(governor, tmp_path, dialect, text, part):
    path = tmp_path / "train_1.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=part):
        plimsoll.import_can(path, tmp_path / "set", window=4, dialect=dialect, governor=governor)
    assert not (tmp_path / "set").exists()


def test_s32_a_folder_gives_its_logs_and_texts_of_frames(governor, tmp_path):
    folder = tmp_path / "bus"
    folder.mkdir()
    for name, text in (("a.csv", usual(FRAMES)), ("b.log", UNLABELLED["candump"]), ("c.txt", UNLABELLED["hcrl_text"]),
                       ("d.txt", LABELLED["hcrl"]), ("README.txt", "About these files.\n"), ("e.json", "{}\n")):
        (folder / name).write_text(text, encoding="utf-8")
    made = plimsoll.import_can(folder, tmp_path / "set", window=4, governor=governor)
    assert [file["name"] for file in made["files"]] == ["bus/a.csv", "bus/b.log", "bus/c.txt", "bus/d.txt"]


@pytest.mark.parametrize("head, part", [
    (b"PAR1\x15\x04\x15\x10\xff\xfe", "a Parquet file"), (b"BZh91AY&SY", "packed by bzip2"),
    (b"\xfd7zXZ\x00\x00", "packed by xz"), (b"PK\x03\x04" + bytes(40), "a zip archive"),
    (b"\xff\xfet\x00i\x00", "UTF-16"), (b"LOGG\x90\x00\x00\x00", "BLF"), (b"MDF     4.10    ", "MDF")])
def test_s31_files_that_are_no_text_are_named_for_what_they_are(governor, tmp_path, head, part):
    for name, data in (("train_1.csv", head), ("train_1.csv.gz", gzip.compress(head))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name}: .*{part}"):
            plimsoll.import_can(tmp_path / name, tmp_path / "set", skip_bad=True, governor=governor)
