# SPDX-License-Identifier: Apache-2.0
"""Weights that the recipe can-kd in Python reads: teachers, ours and the original's, and students the original published.
Whatever is no such file is refused by name, and nothing of it is run."""
import contextlib
import json
import os
import pathlib
import random
import shutil
import struct

import numpy as np
import pytest

import plimsoll

from tests.support.forked import first, forked  # noqa: F401  Fixtures.

from test_can_kd import train, traffic  # noqa: F401  Fixtures.
from test_can_kd_fusion import SMALL, same
from test_can_kd_teacher_file import as_original
from test_cli import call, trains  # noqa: F401  Fixtures.

torch = pytest.importorskip("torch")
from safetensors.torch import save_file

from plimsoll.recipes import can_kd
from plimsoll.recipes.can_kd import _evaluate, _models, _original_student, _tasks, _teacher_file

IDS = 9


def made(kind):
    if kind == "autoencoder":
        model = _models.Autoencoder(IDS, 3, [24, 20, 12], 2, 0.0, seed=5)
        for name, values in model.named_buffers():
            values.copy_(torch.rand(values.shape, generator=torch.Generator().manual_seed(len(name))) + 0.5)
        return model
    return _models.Classifier(IDS, 3, 12, 3, 4, 2, kind == "lstm", 0.0, seed=6)


@pytest.fixture(params=["concatenated", "lstm", "autoencoder"])
def model(request):
    return made(request.param)


def save(model, path):
    path.parent.parent.mkdir(exist_ok=True)
    _tasks.save_model(path, _models.file_tensors(model), {"task": "teacher"})
    return path


def load(path, ids=IDS, kind="classifier"):
    return _teacher_file.load_teacher(path, ids, autoencoder=kind == "autoencoder", task="student_vgae" if kind == "autoencoder"
                                      else "student_gat_normal")


def test_the_originals_weights_are_those_of_ours(model, tmp_path):
    kind = "autoencoder" if isinstance(model, _models.Autoencoder) else "classifier"
    ours = save(model, tmp_path / "models/teacher.safetensors")
    state = as_original(ours)
    torch.save(state, tmp_path / "plain.pt")
    torch.save({"epoch": 3, "state_dict": {f"module.model.{k}": v for k, v in state.items()}}, tmp_path / "checkpoint.pt")
    torch.save({k.replace("lin.weight", "lin_src.weight"): v for k, v in state.items()}, tmp_path / "older.pt")
    save_file({k: v.clone() for k, v in state.items()}, tmp_path / "names.safetensors")
    wanted = model.state_dict()
    for path in (ours, *(tmp_path / name for name in ("plain.pt", "checkpoint.pt", "older.pt", "names.safetensors"))):
        read = load(path, kind=kind)
        assert not read.training and not any(one.requires_grad for one in read.parameters())
        found = read.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], values) for name, values in wanted.items()), path


def test_the_teacher_of_a_task_is_found_in_a_run_or_a_folder(tmp_path):
    path = save(made("concatenated"), tmp_path / "run/models/teacher_gat_normal.safetensors")
    for given in (tmp_path / "run", tmp_path / "run/models", path):
        assert _teacher_file.find_teacher(str(given), "teacher_gat_normal") == path
    with pytest.raises(plimsoll.NotFoundError, match="teacher_path = .*no teacher_vgae.safetensors there"):
        _teacher_file.find_teacher(str(tmp_path / "run"), "teacher_vgae")


def test_a_teacher_whose_dense_layers_are_as_wide_as_what_they_read(tmp_path):
    state = as_original(save(made("concatenated"), tmp_path / "t.safetensors"))
    width = 3 * 4 * 12
    for name, shape in {"fc_layers.0.weight": (width, width), "fc_layers.0.bias": (width,), "fc_layers.3.weight": (width, width),
                        "fc_layers.3.bias": (width,), "fc_layers.6.weight": (2, width), "fc_layers.6.bias": (2,)}.items():
        state[name] = torch.ones(shape)
    torch.save(state, tmp_path / "wide.pt")
    assert sum(one.numel() for one in load(tmp_path / "wide.pt").parameters()) == sum(one.numel() for one in state.values())


class Malicious:
    def __reduce__(self):
        return os.system, ("touch this_was_run",)


def changed(state, **values):
    return {**state, **{name.replace("__", "."): value for name, value in values.items()}}


@pytest.mark.parametrize("change, error, text, kind", [
    (lambda s: s, ValueError, "no autoencoder, which student_vgae learns from", "autoencoder"),
    (lambda s: {"id_embedding.weight": torch.zeros(IDS, 3), "encoder_layers.0.att_src": torch.ones(1, 1, 4)}, ValueError,
     "no tensor encoder.0.bias", "autoencoder"),
    (lambda s: changed(s, id_embedding__weight=torch.zeros(IDS - 1, 3)), ValueError,
     "a teacher of 8 ids .* but the set has 9; import the graphs that it was trained on", "classifier"),
    (lambda s: {k: v.half() for k, v in s.items()}, ValueError, r"is F16, not F32; .*model.float\(\)", "classifier"),
    (lambda s: {k: v for k, v in s.items() if k != "convs.1.bias"}, ValueError, "no tensor convs.1.bias", "classifier"),
    (lambda s: changed(s, convs__0__lin__weight=torch.zeros(3, 3)), ValueError, r"convs.0.lin.weight is of shape \[3, 3\]", "classifier"),
    (lambda s: changed(s, convs__0__att_src=torch.zeros(1).expand(1, 300, 2**30)), ValueError,  # A shape that only claims so.
     r"convs.0.att_src is of shape \[300, 1073741824\]", "classifier"),
    (lambda s: changed(s, convs__0__att_src=torch.zeros(1, 300, 4)), ValueError, "more than 256 heads", "classifier"),
    (lambda s: {f"x{k}": torch.zeros(1) for k in range(5000)}, ValueError, "5000 tensors, where 4096 are the most", "classifier"),
    (lambda s: {}, ValueError, "no tensors in it", "classifier"),
    (lambda s: [1, 2], ValueError, "no state dict", "classifier"),
    (lambda s: {**s, "more": Malicious()}, plimsoll.CorruptError, "posix.system, which no file of weights does", "classifier"),
    (lambda s: {**s, "more": pathlib.Path("x")}, plimsoll.CorruptError, "pathlib", "classifier")])
def test_what_is_no_teacher_is_refused_and_nothing_of_it_is_run(tmp_path, change, error, text, kind):
    torch.save(change(as_original(save(made("concatenated"), tmp_path / "o.safetensors"))), tmp_path / "t.pt")
    with pytest.raises(error, match=f"t.pt: .*{text}"):
        load(tmp_path / "t.pt", kind=kind)
    assert not pathlib.Path("this_was_run").exists()


@pytest.mark.parametrize("text", [b"", b"PK", b"PK\x03\x04 nothing", b"not a file of weights at all"])
def test_what_is_no_file_of_weights_is_refused(tmp_path, text):
    (tmp_path / "t.pt").write_bytes(text)
    with pytest.raises(plimsoll.CorruptError, match="t.pt: is damaged"):
        load(tmp_path / "t.pt")
    with pytest.raises(plimsoll.NotFoundError, match="absent.pt"):
        load(tmp_path / "absent.pt")


@pytest.mark.parametrize("saves", [torch.save, save_file], ids=["archive", "safetensors"])
def test_damage_anywhere_is_an_error_or_harmless(tmp_path, saves):
    state = as_original(save(made("concatenated"), tmp_path / "o.safetensors"))
    path, wanted = tmp_path / "t.pt", load(tmp_path / "o.safetensors").state_dict()
    saves({name: values.clone() for name, values in state.items()}, path)
    good, numbers, refused = path.read_bytes(), random.Random(11), 0
    for case in range(60):
        data = bytearray(good)
        if case % 4 == 3:
            data = data[:numbers.randrange(len(data))]
        most = len(data) if saves is torch.save else min(len(data), 8 + int.from_bytes(good[:8], "little"))  # No checksums behind it.
        for _ in range(1 + case % 3):
            if most:
                data[numbers.randrange(most)] = numbers.randrange(256)
        path.write_bytes(data)
        try:
            found = load(path).state_dict()
        except (ValueError, plimsoll.CorruptError) as error:
            refused += 1
            assert "t.pt" in str(error), case
        else:
            assert all(torch.equal(found[name], values) for name, values in wanted.items()), case
    assert refused > 30


def test_a_damaged_number_is_told_by_the_checksum_of_its_record(tmp_path):
    state = as_original(save(made("concatenated"), tmp_path / "o.safetensors"))
    state["convs.1.bias"] = torch.full_like(state["convs.1.bias"], 1e-4)
    torch.save(state, tmp_path / "t.pt")
    data = bytearray((tmp_path / "t.pt").read_bytes())
    data[data.find(struct.pack("<f", 1e-4) * 20) + 9] ^= 1
    (tmp_path / "t.pt").write_bytes(data)
    with pytest.raises(plimsoll.CorruptError, match="t.pt: .*another checksum"):
        load(tmp_path / "t.pt")


def test_a_model_of_the_recipe_in_cpp_is_read_with_its_checksum(tmp_path):
    path = tmp_path / "teacher_gat_normal.safetensors"
    shutil.copy(pathlib.Path(__file__).parents[1] / "reference" / path.name, path)
    ids = len(_tasks.read_tensors(path)["embedding"])
    found, saved = _models.file_tensors(load(path, ids)), _tasks.read_tensors(path)
    assert found.keys() == saved.keys() and all(torch.equal(found[name], values) for name, values in saved.items())
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(plimsoll.CorruptError, match="its checksum is .*copy the file again"):
        load(path, ids)


# ---- Published students ----

def published(path, seed, width=3, heads=2):
    """A file of a student as the original published them: two layers, an LSTM over them."""
    draw, both = np.random.default_rng(seed), width * heads
    shapes = {"lin.weight": (1, both), "lin.bias": (1,), "jk.att.weight": (1, 2 * both), "jk.att.bias": (1,)}
    for layer, rows in enumerate((10, both)):
        shapes |= {f"convs.{layer}.att_src": (1, heads, width), f"convs.{layer}.att_dst": (1, heads, width), f"convs.{layer}.bias": (both,),
                   f"convs.{layer}.lin.weight": (both, rows)}
    for end in ("", "_reverse"):
        shapes |= {f"jk.lstm.weight_ih_l0{end}": (4 * both, both), f"jk.lstm.weight_hh_l0{end}": (4 * both, both),
                   f"jk.lstm.bias_ih_l0{end}": (4 * both,), f"jk.lstm.bias_hh_l0{end}": (4 * both,)}
    state = {name: torch.from_numpy(draw.normal(0, 0.3, shape).astype(np.float32)) for name, shape in shapes.items()}
    save_file(state, path)
    return state


def test_a_published_student_that_lacks_a_tensor_or_has_another_shape_is_named(tmp_path):
    path = tmp_path / "one.safetensors"
    state = published(path, 1)
    assert sum(one.numel() for one in _original_student.load_original(path).parameters()) == sum(one.numel() for one in state.values())
    for name, ours in (("convs.0.att_src", "convs.0.att_src"), ("convs.1.bias", "convs.1.bias"), ("jk.att.weight", "jk.score.weight"),
                       ("jk.lstm.bias_hh_l0_reverse", "jk.backward.hidden_bias"), ("lin.weight", "lin.weight")):
        save_file({**state, name: torch.zeros(2, 5, 7)}, path)
        with pytest.raises(ValueError, match=f"one.safetensors: .*{name}"):
            _original_student.load_original(path)
        save_file({key: values for key, values in state.items() if key != name}, path)
        with pytest.raises(ValueError, match=f"one.safetensors: .*{ours}"):
            _original_student.load_original(path)


def test_our_features_are_turned_back_into_ids_bytes_and_counts():
    with plimsoll.Governor("4GiB") as governor:
        batch = plimsoll.GraphBatch(governor, 1, 2, 3)
        batch.x[:] = [[1, 0.2, 0.4, 0, 0, 0, 0, 0, 1, 0.5, 0.9], [2, *[0] * 10]]  # The second's id is not in the vocabulary.
        batch.edge_index[:] = [[0, 0, 1], [0, 1, 0]]
        batch.edge_attr[:] = 0
        batch.edge_attr[:, 0] = [4, 2, 3]
        made = _original_student.original_features(batch, np.array([0x100, 0x2B0]))
        assert made.tolist() == pytest.approx(np.array([[688, 51, 102, 0, 0, 0, 0, 0, 255, 6], [0, 0, 0, 0, 0, 0, 0, 0, 0, 3]]))
        del batch


def test_published_students_are_evaluated_as_a_run_does(train, traffic, tmp_path):
    folder = tmp_path / "published"
    folder.mkdir()
    for name, seed in (("one", 1), ("two", 2)):
        published(folder / f"{name}.safetensors", seed)
    train("run", "--model-size", "teacher", "--stage", "normal")
    theirs = train("run", "--stage", "evaluation", "--original-students", folder)["evaluation"]
    shutil.copytree(tmp_path / "run/models", tmp_path / "copy/models")
    asked = can_kd.Options(data=str(traffic), **SMALL, original_students=str(folder))
    with plimsoll.Governor("4GiB") as governor, contextlib.closing(_tasks.Data(governor, asked)) as data:
        told, _ = _evaluate.evaluate(asked, data, tmp_path / "copy", True)
    assert list(told) == ["teacher", "original"] and list(told["original"]) == ["one", "two"]
    same(json.loads(json.dumps(told)), theirs)
    (folder / "three.safetensors").write_bytes(b"junk")
    with pytest.raises(plimsoll.CorruptError, match="three.safetensors: is damaged"):
        can_kd.before(asked)  # Before anything is trained.
    os.rename(folder / "three.safetensors", os.fsencode(folder) + b"/caf\xe9.safetensors")
    with pytest.raises(ValueError, match="original_students: .*is not UTF-8; rename it"):
        _evaluate.originals_of(asked)
