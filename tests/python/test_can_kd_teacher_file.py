# SPDX-License-Identifier: Apache-2.0
"""Weights that --teacher-path takes: ours, and those the original saved with torch.save (read without
running anything of the pickle) or that were made safetensors of, under the original's names."""
import os
import pathlib
import random
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.forked import first, forked  # noqa: F401  Fixtures.

from test_can_kd import events, traffic, train  # noqa: F401  Fixtures.
from test_cli import assert_refused, trains  # noqa: F401  Fixtures.

# The beginning and the end of our names, a number between them, and what the original calls them.
NAMES = [("embedding", "", "id_embedding.weight", ""),
         ("convs.", ".weight", "convs.", ".lin.weight"), ("convs.", ".bias", "convs.", ".bias"),
         ("convs.", ".att_source", "convs.", ".att_src"), ("convs.", ".att_target", "convs.", ".att_dst"),
         ("jk.score.", "", "jk.att.", ""),
         ("jk.forward.input_bias", "", "jk.lstm.bias_ih_l0", ""),
         ("jk.forward.hidden_bias", "", "jk.lstm.bias_hh_l0", ""),
         ("jk.forward.input", "", "jk.lstm.weight_ih_l0", ""),
         ("jk.forward.hidden", "", "jk.lstm.weight_hh_l0", ""),
         ("jk.backward.input_bias", "", "jk.lstm.bias_ih_l0_reverse", ""),
         ("jk.backward.hidden_bias", "", "jk.lstm.bias_hh_l0_reverse", ""),
         ("jk.backward.input", "", "jk.lstm.weight_ih_l0_reverse", ""),
         ("jk.backward.hidden", "", "jk.lstm.weight_hh_l0_reverse", ""),
         ("mean.", "", "z_mean.", ""), ("log_variance.", "", "z_logvar.", ""),
         ("id.", "", "canid_classifier.", "")]
for part in ("encoder", "decoder"):
    NAMES += [(f"{part}.", f".norm.{ours}", f"{part}_bns.", f".{theirs}")
              for ours, theirs in (("weight", "weight"), ("bias", "bias"), ("running_mean", "running_mean"),
                                   ("running_variance", "running_var"))]
    NAMES += [(f"{part}.", ".weight", f"{part}_layers.", ".lin.weight"),
              (f"{part}.", ".bias", f"{part}_layers.", ".bias"),
              (f"{part}.", ".att_source", f"{part}_layers.", ".att_src"),
              (f"{part}.", ".att_target", f"{part}_layers.", ".att_dst")]
LISTS = {"dense": "fc_layers", "neighbours": "neighborhood_decoder"}
SIZES = ["--teacher-gat-hidden", "12", "--teacher-gat-layers", "3", "--teacher-gat-fc-layers", "2",
         "--teacher-vgae-hidden-dims", "24,20,12", "--teacher-vgae-heads", "2"]


def original_name(name):
    for begin, end, as_begin, as_end in NAMES:
        if name.startswith(begin) and name.endswith(end) and (begin.endswith(".") or name == begin):
            return as_begin + name[len(begin):len(name) - len(end)] + as_end
    part, place, rest = name.split(".", 2)
    return f"{LISTS[part]}.{3 * int(place)}.{rest}"


def as_original(path):
    """The state dict the original would have saved of this model."""
    state = {}
    for name, one in load_file(path).items():
        theirs = original_name(name)
        state[theirs] = one.unsqueeze(0) if ".att_" in theirs else one
        if theirs.endswith("running_var"):
            state[theirs.replace("running_var", "num_batches_tracked")] = torch.tensor(7)
    return state


@pytest.fixture
def teacher(train, tmp_path):
    """The file of a teacher of SIZES, trained by us, and a student's state when it learns from it."""
    def make(stage, *options):
        train("taught", "--stage", stage, "--model-size", "teacher", *SIZES, *options)
        [path] = (tmp_path / "taught/models").iterdir()
        return path
    return make


@pytest.fixture
def student(train, tmp_path):
    def make(name, stage, path, *options):
        train(name, "--stage", stage, "--model-size", "student", "--teacher-path", path, *options)
        [model] = (tmp_path / name / "models").iterdir()
        return model.read_bytes()
    return make


@pytest.mark.parametrize("stage, options", [("normal", ()), ("normal", ("--gat-jk", "lstm")),
                                            ("autoencoder", ())],
                         ids=["concatenated", "lstm", "autoencoder"])
def test_the_originals_weights_teach_the_bits_that_ours_do(teacher, student, tmp_path, stage, options):
    ours = teacher(stage, *options)
    state = as_original(ours)
    assert not set(state) & set(load_file(ours)) - {n for n in state if n.startswith("convs.")}
    torch.save(state, tmp_path / "plain.pt")
    torch.save({"epoch": 3, "state_dict": {f"model.{k}": v for k, v in state.items()}},
               tmp_path / "checkpoint.pt")
    torch.save({k.replace("lin.weight", "lin_src.weight"): v for k, v in state.items()},
               tmp_path / "older.pt")
    save_file({k: v.clone() for k, v in state.items()}, tmp_path / "names.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    torch.save(state, folder / (ours.stem + ".pt"))
    wanted = student("ours", stage, ours, *options)  # Its shape is its own, not this run's.
    for name in ("plain.pt", "checkpoint.pt", "older.pt", "names.safetensors", "folder"):
        run = "by_" + name.replace(".", "_")
        assert student(run, stage, tmp_path / name, *options) == wanted, name
        assert not any((tmp_path / run / "cache").iterdir())
    other = student("other", stage, ours, "--kd-alpha", "0.1", *options)
    assert other != wanted  # The teacher matters.
    released = student("released", stage, tmp_path / "plain.pt", "--offload-teacher-to-cpu", "true",
                       "--use-teacher-cache", "false", *options)
    assert released == wanted


def test_a_teacher_whose_dense_layers_are_as_wide_as_what_they_read(teacher, student, tmp_path):
    state = as_original(teacher("normal"))
    heads, hidden = state["convs.0.att_src"].shape[1:]
    width = 3 * heads * hidden  # The original's: all layers side by side, all the way (K18).
    numbers = torch.Generator().manual_seed(1)
    for name, shape in {"fc_layers.0.weight": (width, width), "fc_layers.0.bias": (width,),
                        "fc_layers.3.weight": (width, width), "fc_layers.3.bias": (width,),
                        "fc_layers.6.weight": (2, width), "fc_layers.6.bias": (2,)}.items():
        state[name] = torch.randn(shape, generator=numbers) * 0.1
    torch.save(state, tmp_path / "wide.pt")
    student("run", "normal", tmp_path / "wide.pt")
    [told] = events(tmp_path / "run", "teacher")
    assert told["parameters"] == sum(one.numel() for one in state.values())


def test_a_teacher_larger_than_what_is_read_at_once(teacher, student, forked, traffic, tmp_path):
    state = as_original(teacher("normal"))
    read_at_once = 4 << 20
    inner = 18_000  # 2 × 36 × inner × 4 bytes: a matrix of 5 MB.
    state["fc_layers.0.weight"] = torch.full((inner, state["fc_layers.0.weight"].shape[1]), 1e-4)
    state["fc_layers.0.bias"] = torch.zeros(inner)
    state["fc_layers.3.weight"] = torch.full((2, inner), 1e-4)
    assert state["fc_layers.0.weight"].numel() * 4 > read_at_once
    torch.save(state, tmp_path / "large.pt")
    save_file({k: v.clone() for k, v in state.items()}, tmp_path / "large.safetensors")
    assert student("run", "normal", tmp_path / "large.pt") == \
        student("same", "normal", tmp_path / "large.safetensors")
    damaged = bytearray((tmp_path / "large.pt").read_bytes())
    at = damaged.find(struct.pack("<f", 1e-4) * 1000)
    damaged[at + 2000] ^= 1
    (tmp_path / "damaged.pt").write_bytes(damaged)
    done = forked("train", "can-kd", "--data", traffic, "--out", tmp_path / "damaged", "--memory-limit", "1GiB", "--config", "small",
                  "--model-size", "student", "--stage", "normal", "--quiet", "--teacher-path", tmp_path / "damaged.pt")
    assert done.status == 1 and "damaged.pt: large/data/" in done.err and "another checksum" in done.err, done.err


class Malicious:
    def __reduce__(self):
        return os.system, ("touch this_was_run",)


def test_what_is_no_teacher_is_refused_and_nothing_of_it_is_run(teacher, forked, traffic, tmp_path):
    good = as_original(teacher("normal"))
    base = ["train", "can-kd", "--data", traffic, "--out", tmp_path / "run", "--memory-limit", "1GiB",
            "--config", "small", "--model-size", "student", "--quiet"]
    path = tmp_path / "t.pt"

    def refused(state, *texts, stage="normal"):
        torch.save(state, path)
        done = forked(*base, "--stage", stage, "--teacher-path", path)
        assert_refused(done, 1, "t.pt", *texts)
        assert "CSV" not in done.err  # That is advice for saved graphs.
        assert not (tmp_path / "run/models").exists() or not any((tmp_path / "run/models").iterdir())

    refused({"id_embedding.weight": good["id_embedding.weight"], "encoder_layers.0.att_src": torch.ones(1, 1, 4)},
            "no tensor encoder.0.bias", stage="autoencoder")
    refused(good, "no autoencoder, which student_vgae learns from", stage="autoencoder")
    refused({**good, "id_embedding.weight": good["id_embedding.weight"][1:].clone()}, "a teacher of", "ids",
            "import the graphs that it was trained on")
    refused({k: v.half() for k, v in good.items()}, "is F16, not F32", "model.float()")
    refused({k: v for k, v in good.items() if k != "convs.1.bias"}, "convs.1.bias")
    refused({**good, "convs.0.lin.weight": torch.zeros(3, 3)}, "convs.0.lin.weight is of shape [3, 3]")
    huge = torch.zeros(1).expand(1, 300, 2**30)  # A shape that only claims so.
    refused({**good, "convs.0.att_src": huge}, "convs.0.att_src is of shape [300, 1073741824]")
    refused({**good, "convs.0.att_src": torch.zeros(1, 300, 4)}, "more than 256 heads")
    refused({f"x{k}": torch.zeros(1) for k in range(5000)}, "5000 tensors, where 4096 are the most")
    refused({}, "no tensors in it")
    refused([1, 2], "no state dict")
    refused({**good, "more": Malicious()}, "system")
    assert not pathlib.Path("this_was_run").exists()
    for text in (b"", b"PK", b"PK\x03\x04 nothing", b"not a file of weights at all"):
        path.write_bytes(text)
        done = forked(*base, "--stage", "normal", "--teacher-path", path)
        assert_refused(done, 1, "t.pt")
        assert "CSV" not in done.err


def test_damage_anywhere_in_a_teachers_file_is_an_error_or_harmless(teacher, forked, traffic, tmp_path):
    torch.save(as_original(teacher("normal")), tmp_path / "good.pt")
    good = (tmp_path / "good.pt").read_bytes()
    numbers = random.Random(11)
    for case in range(24):
        data = bytearray(good)
        if case % 4 == 3:
            data = data[:numbers.randrange(len(data))]
        for _ in range(1 + case % 3):
            if data:
                data[numbers.randrange(len(data))] = numbers.randrange(256)
        (tmp_path / "t.pt").write_bytes(data)
        done = forked("train", "can-kd", "--data", traffic, "--out", tmp_path / f"run{case}", "--memory-limit",
                    "1GiB", "--config", "small", "--model-size", "student", "--stage", "normal", "--max-epochs",
                    "1", "--min-steps-per-epoch", "1", "--quiet", "--teacher-path", tmp_path / "t.pt")
        assert done.status in (0, 1), (case, done.err)
        assert done.status == 0 or "t.pt" in done.err, (case, done.err)
