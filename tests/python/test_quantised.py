# SPDX-License-Identifier: Apache-2.0
"""Frozen weights in fewer bits, by bitsandbytes: option `base` of the recipes chat and vision."""
import gc
import pathlib
import shutil
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from safetensors.torch import load_file, save_file

import plimsoll
from plimsoll.core import _torch_gate

if _torch_gate.load_if_torch_imported() is None:
    pytest.skip("plimsoll was built without torch", allow_module_level=True)

from plimsoll.recipes import chat, vision
from plimsoll.recipes.tuning import _choice
from plimsoll.training import _quantised, _weight_files
from plimsoll.training._quantised import KINDS, QuantisedLinear
from tests.support import chat_models, quantised, vision_models
from tests.support.killed_recipes import killed
from tests.support.trained_bits import digest

quantised.needed()
QUICK = {"memory_limit": "4GiB", "foreign_bytes": "1GiB", "compute_threads": 1, "progress": False, "sequence_length": 64, "dtype": "float32",
         "lora_r": 4, "accumulate": 2, "lr": 1e-2, "seed": 3, "checkpoint_every_n_steps": 4}


@pytest.fixture(scope="module", autouse=True)
def installed():
    with quantised.importable():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    chat_models.make_model(folder / "model")
    chat_models.make_tokens(folder / "chats.tokens", folder / "model", rows=40)
    return folder


@pytest.fixture
def given(folder):
    return {**QUICK, "data": str(folder / "chats.tokens"), "model": str(folder / "model")}


def filled(kind, weight, bias=None):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    layer.requires_grad_(False)
    if bias is not None:
        layer.bias.copy_(bias)
    made = QuantisedLinear(layer, kind)
    made.packed.data, made.scales.data = made.quantised(weight)
    return made


# ---- One map ----

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, bits, most", [("nf4", 4.5, 0.1), ("int8", 8 + 32 / 96, 0.01)])
def test_a_product_is_that_with_the_rounded_weight(kind, bits, most, dtype):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(64, 96, dtype=dtype), torch.randn(64, dtype=dtype), torch.randn(2, 5, 96, dtype=dtype, requires_grad=True)
    part = filled(kind, weight, bias)
    assert part.packed.nbytes + part.scales.nbytes == 64 * 96 * bits / 8
    rounded = part.rounded(weight)
    assert (rounded - weight).float().abs().mean() < most * weight.float().abs().mean()
    assert torch.equal(part.rounded(rounded), rounded) or kind == "int8"  # Levels are levels.
    made = part(x)
    made.square().sum().backward()
    gradient, x.grad = x.grad, None
    plain = torch.nn.functional.linear(x, rounded, bias)
    assert torch.equal(made, plain)
    assert torch.equal(gradient, 2 * made.detach() @ rounded)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_quantised_as_the_whole_is(kind, monkeypatch):
    torch.manual_seed(1)
    weight = torch.randn(40, 64)
    weight[7] = 0
    whole = filled(kind, weight)
    monkeypatch.setattr(_quantised, "_PIECE", 256)
    pieces = filled(kind, weight)
    assert torch.equal(whole.packed, pieces.packed) and torch.equal(whole.scales, pieces.scales)
    assert not whole.rounded(weight)[7].any() and whole.rounded(weight).isfinite().all()


def test_the_weight_of_a_quantised_map_has_a_shape_and_no_values():
    part = filled("nf4", torch.randn(4, 64, dtype=torch.bfloat16))
    assert part.weight.shape == (4, 64) and part.weight.dtype == torch.bfloat16 and part.weight.device.type == "cpu"
    with pytest.raises(RuntimeError, match="a weight that is nf4"):
        part.weight + 1


def test_what_has_no_whole_blocks_stays_as_it_is():
    block = torch.nn.ModuleDict({"odd": torch.nn.Linear(3, 5), "even": torch.nn.Linear(64, 2), "scaled": torch.nn.LayerNorm(64)})
    assert len(_quantised.quantise([block], "nf4")) == 1
    assert type(block["odd"]) is torch.nn.Linear and type(block["even"]) is QuantisedLinear


# ---- The recipes ----

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("base", KINDS)
def test_streamed_it_ends_in_the_bits_of_resident_and_killed_too(base, dtype, given, tmp_path):
    given = {**given, "base": base, "dtype": dtype}
    for weights in ("resident", "streamed"):
        made = plimsoll.train("chat", out=tmp_path / weights, weights=weights, **given)
        assert made["weights"] == weights
    killed("chat", 6, **given, weights="streamed", out=tmp_path / "killed")
    plimsoll.resume(tmp_path / "killed", progress=False)
    resident = digest(tmp_path / "resident")
    assert any(name.endswith("q_proj.base_layer.packed") for name in resident[1])
    assert digest(tmp_path / "streamed") == resident == digest(tmp_path / "killed")
    plain = plimsoll.train("chat", out=tmp_path / "plain", **{**given, "base": "as-saved"})
    assert digest(tmp_path / "plain")[0] != resident[0] and abs(plain["held_out_loss"] - made["held_out_loss"]) < 0.3
    assert plimsoll.evaluate(tmp_path / "resident")["held_out_loss"] == made["held_out_loss"]


def test_pictures_and_text_train_on_quantised_weights(tmp_path):
    vision_models.make_model(tmp_path / "model")
    vision_models.make_set(tmp_path / "pictures", 24)
    given = {**QUICK, "sequence_length": 96, "model": str(tmp_path / "model"), "data": str(tmp_path / "pictures"), "base": "nf4"}
    for weights in ("resident", "streamed"):
        plimsoll.train("vision", out=tmp_path / weights, weights=weights, **given)
    assert digest(tmp_path / "streamed") == digest(tmp_path / "resident")


@pytest.mark.parametrize("base", KINDS)
def test_merged_it_is_the_model_that_was_trained(base, given, tmp_path):
    made = plimsoll.train("chat", out=tmp_path / "run", base=base, **given)
    plimsoll.export(tmp_path / "run", out=tmp_path / "merged", merge=True)
    plimsoll.export(tmp_path / "run", out=tmp_path / "adapters")
    assert (tmp_path / "adapters/adapter_model.safetensors").exists()
    # Its loss is that of the run; that of adapters merged into weights that were never rounded is another.
    losses = {}
    for name, options in {"merged": {"model": tmp_path / "merged"}, "rounded": {"base": base}}.items():
        again = plimsoll.train("chat", out=tmp_path / name / "run", **{**given, "lr": 0.0, **options})
        losses[name] = again["held_out_loss"]
    assert abs(losses["merged"] - made["held_out_loss"]) < 1e-5 < abs(losses["rounded"] - made["held_out_loss"])
    merged, saved = (_weights(one) for one in (tmp_path / "merged", pathlib.Path(given["model"])))
    assert merged.keys() == saved.keys() and {one.dtype for one in merged.values()} == {torch.float32}
    outside = [name for name in saved if "_proj" not in name]
    assert outside and all(torch.equal(merged[name], saved[name]) for name in outside)


def _weights(folder):
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def test_the_file_of_a_run_is_made_once_and_anew_for_other_weights(given, tmp_path):
    killed("chat", 6, **given, base="nf4", out=tmp_path / "run")
    file = tmp_path / "run/weights/nf4.safetensors"
    before = file.stat()
    assert "'nf4'" in _weight_files.made_of(file) and "model.safetensors" in _weight_files.made_of(file)
    plimsoll.evaluate(tmp_path / "run")
    assert file.stat().st_ino == before.st_ino
    shutil.copytree(given["model"], tmp_path / "other")
    values = _weights(tmp_path / "other")
    values["model.layers.0.mlp.up_proj.weight"] += 1
    save_file(values, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(plimsoll.CorruptError, match="layers.0.mlp.up_proj.(packed|scales) is not what training began with"):
        plimsoll.resume(tmp_path / "run", model=str(tmp_path / "other"), progress=False)
    assert file.stat().st_ino != before.st_ino
    assert plimsoll.resume(tmp_path / "run", model=given["model"], progress=False)["status"] == "finished"


def test_a_choice_and_a_plan_count_the_bytes_that_are_there(given, tmp_path):
    given = {name: value for name, value in given.items() if name != "progress"}
    given["model"] = str(chat_models.make_model(tmp_path / "wide", width=256))
    sizes = {}
    for base in ("as-saved", "int8", "nf4"):
        options = chat.Options(**{**given, "base": base})
        sizes[base] = _choice._Sizes.of(type(options), tuple(vars(options).items()), "lora")
    numbers = 2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512)  # Of the linear maps of two blocks.
    norms = 2 * 2 * 256 * 4
    assert sizes["as-saved"].blocks == 4 * numbers + norms
    assert sizes["nf4"].blocks == numbers // 2 + 4 * numbers // 64 + norms
    assert numbers + norms < sizes["int8"].blocks < 1.02 * numbers + norms
    assert sizes["nf4"].needed("resident", False) < sizes["int8"].needed("resident", False) < sizes["as-saved"].needed("resident", False)
    assert sizes["nf4"].again == 256 * 512 * 8 and sizes["as-saved"].again == 0


@pytest.mark.parametrize("base", KINDS)
def test_a_plan_is_what_a_step_takes(base, given):
    with plimsoll.Governor("4GiB") as governor:
        limit = governor.ledger().baseline_bytes + (64 + 40 << 20)
    given = {name: value for name, value in given.items() if name != "progress"}
    plan = plimsoll.plan("chat", **{**given, "accumulate": 1, "foreign_bytes": "64MiB", "sequence_length": 256, "memory_limit": limit}, base=base,
                         weights="resident", gradient_checkpointing="off")
    assert plan["label"] == "exact" and plan["peak_bytes"] == plan["measured_bytes"] and plan["batch_size"] >= 1


@pytest.mark.parametrize("options, text", [
    ({"method": "full"}, "base: all weights are trained, and none of them is nf4"), ({"dora": True}, "base: adapters of DoRA"),
    ({"base": "fp4"}, "base")])
def test_options_that_cannot_be_are_refused_by_name(options, text, given, tmp_path):
    with pytest.raises(ValueError, match=text):
        plimsoll.train("chat", out=tmp_path / "run", **{**given, "base": "nf4", **options})
    assert vision.Options.__dataclass_fields__["base"].default == "as-saved"


def test_without_bitsandbytes_it_says_what_to_install(given, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"base: nf4 and int8 take bitsandbytes, which is not installed: pip install bitsandbytes"):
        plimsoll.train("chat", out=tmp_path / "run", base="int8", **given)
    gc.collect()


def test_weights_that_bitsandbytes_has_quantised_itself_are_refused_by_name(governor, tmp_path):
    import bitsandbytes

    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4") for _ in range(2)).requires_grad_(False)
    with pytest.raises(ValueError, match=r'blocks.0.weight is a Params4bit, which has more than its values, and does not stream: .*base = "nf4"'):
        plimsoll.stream_frozen(model, weights="streamed", directory=tmp_path)
