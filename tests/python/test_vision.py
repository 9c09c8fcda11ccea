# SPDX-License-Identifier: Apache-2.0
"""The recipe `vision`: it learns from images, tokens are where the processor puts them, a run goes on bit for bit."""
import gc
import inspect
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from test_chat import digest, eight_end_alike, events, ranks_end_alike, torch, transformers  # Skips where a library is not there.

import plimsoll
from plimsoll.core import _torch_gate
from plimsoll.core._torch_settings import torch_settings
from plimsoll.recipes import vision
from plimsoll.recipes.tuning import _model, _train
from plimsoll.recipes.vision import _rows, _task
from tests.support.killed_recipes import killed
from tests.support.vision_models import ENDS, KINDS, make_model, make_set, rows

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("num2words")  # Of SmolVLM's processor.

DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"

QUICK = {"memory_limit": "4GiB", "foreign_bytes": "1GiB", "compute_threads": 1, "progress": False, "sequence_length": 96,
         "dtype": "float32", "lora_r": 4, "accumulate": 2, "lr": 1e-2, "seed": 3, "epochs": 1, "warmup_steps": 0,
         "schedule": "constant", "held_out": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A set of pictures, and a model of each kind."""
    folder = tmp_path_factory.mktemp("vision")
    for kind in KINDS:
        make_model(folder / kind, kind)
    make_set(folder / "set", 24)
    return folder


@pytest.fixture
def train(folder, tmp_path):
    """Trains a model of the folder on its pictures; (summary, digest of what was trained)."""
    def trained(out="run", kind="qwen2_vl", **options):
        given = {**QUICK, "data": folder / "set", "model": folder / kind, **options}
        summary = plimsoll.train("vision", out=tmp_path / out, **given)
        return summary, digest(tmp_path / out)
    return trained


# ---- Rows ----

def untouched(folder):
    """The processor as transformers makes it; without torchvision there is none of videos, which is not called."""
    kind = {"qwen2_vl": "Qwen2VL", "smolvlm": "SmolVLM", "idefics3": "Idefics3", "fast_vlm": "Llava"}[folder.name]
    kind = getattr(transformers, f"{kind}Processor")
    parts = {}
    if "video_processor" in inspect.signature(kind.__init__).parameters:
        parts["video_processor"] = mock.Mock(valid_kwargs=transformers.processing_utils.VideosKwargs)
    said = json.loads(one.read_text()) if (one := folder / "processor_config.json").exists() else {}
    said.pop("processor_class", None)
    with mock.patch.object(kind, "check_argument_for_proper_class"):
        return kind(image_processor=transformers.AutoImageProcessor.from_pretrained(folder, backend="pil"),
                    tokenizer=transformers.AutoTokenizer.from_pretrained(folder), **parts, **said)


def check_tokens(model, path, count, batch_size=3):
    """Of the first rows of a set: all that the model is called with, and labels."""
    maker = _rows.Maker(vision.Options(data="", model=str(model), sequence_length=1 << 20))
    theirs, template = untouched(model), maker.processor.chat_template
    with plimsoll.Governor("4GiB", foreign_bytes="1GiB") as governor, plimsoll.ImageSet(path) as images:
        batches = iter(images.batches(batch_size, governor=governor, shuffle=False))
        for _ in range(-(-min(count, len(images)) // batch_size)):
            batch = next(batches)
            inputs, labels = maker.batch(batch.rows, _rows.Counts())
            pictures = [[Image.fromarray(one) for one in row.images] for row in batch.rows]
            wanted = theirs(text=[theirs.tokenizer.apply_chat_template(row.messages, chat_template=template, tokenize=False)
                                  for row in batch.rows], images=pictures if any(pictures) else None, padding=True,
                            padding_side="right", return_tensors="pt")
            assert wanted.keys() == inputs.keys()
            assert all(torch.equal(one, inputs[name]) for name, one in wanted.items())
            for k, row in enumerate(batch.rows):
                said = maker.processor.tokenizer.decode(labels[k][labels[k] >= 0])
                assert said.strip() == row.messages[-1]["content"][0]["text"] + ENDS[model.name]
        del batch


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_pixels_and_labels_are_those_of_the_untouched_processor(kind, folder):
    check_tokens(folder / kind, folder / "set", 24)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_have_few_lengths_and_what_they_are_padded_with_changes_no_loss(kind, folder):
    made = {}
    for most in (1000, 4096):
        maker = _rows.Maker(vision.Options(data="", model=str(folder / kind), sequence_length=most))
        with plimsoll.Governor("4GiB", foreign_bytes="1GiB") as governor, plimsoll.ImageSet(folder / "set") as images:
            rows = images.batches(3, governor=governor, shuffle=False).next().rows
            tight = maker.batch(rows, _rows.Counts())
            made[most] = maker.padded(tight)
            del rows
    length = tight[1].shape[1]
    assert length < 256 and [one[1].shape[1] for one in made.values()] == [-(-length // 64) * 64, 256]
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / kind, dtype=torch.float32).eval()
    with torch.no_grad():
        losses = [torch.nn.functional.cross_entropy(model(**inputs).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
                  for inputs, labels in (tight, *made.values())]
    assert max(losses) - min(losses) < 1e-5, losses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [18, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_tokens_of_real_images_are_those_of_the_untouched_processor(kind, count, folder, tmp_path):
    """Of count of them, or all."""
    captions = DATA / "conceptual_captions_mini" / "captions.json"
    if not captions.exists():
        pytest.skip("needs ../shared/data")
    made = json.loads(captions.read_text())
    made = made[::max(1, len(made) // count)]
    with plimsoll.Governor("4GiB") as governor:
        plimsoll.import_vision([{"text": "what?", "image": str(captions.parent / one["image_path"]), "response": one["caption"]}
                                for one in made], tmp_path / "set", governor=governor)
    check_tokens(folder / kind, tmp_path / "set", count)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_several_images_and_with_text_alone_stand_in_one_batch(kind, folder, tmp_path):
    """And rows of text alone in a batch of their own; a run trains on all."""
    made = rows(8)
    for k in (0, 1, 2, 4):
        del made[k]["image"]
    made[7]["image"] = [made[7]["image"], made[6]["image"]]
    with plimsoll.Governor("4GiB") as governor:
        plimsoll.import_vision(made, tmp_path / "set", governor=governor)
    check_tokens(folder / kind, tmp_path / "set", 8)
    summary = plimsoll.train("vision", out=tmp_path / "run", data=tmp_path / "set", model=folder / kind,
                             **{**QUICK, "batch_size": 2, "held_out": 2, "sequence_length": 128})
    assert (summary["step"], summary["rows_left_out"]) == (3, 0) and summary["held_out_tokens"] > 0


def system_says(token):
    """Rows of one image each; the system of row 5, where no import places images, has a token of images in its text."""
    made = rows(8)
    made[5]["system"] = f"what is {token}?"
    return made


def question_says(token):
    """The same of the question's text."""
    return rows(8, text=lambda k: f"what is {token}?" if k == 5 else "what?")


@pytest.mark.parametrize("kind, token, made", [("qwen2_vl", "<|image_pad|>", question_says), ("qwen2_vl", "<|image_pad|>", system_says),
                                               ("smolvlm", "<image>", system_says), ("idefics3", "<image>", system_says)])
def test_a_text_that_has_the_token_of_images_is_refused_by_row(kind, token, made, train, tmp_path):
    with plimsoll.Governor("4GiB") as governor:
        plimsoll.import_vision(made(token), tmp_path / "set", governor=governor)
    with pytest.raises(ValueError, match="row 5: 2 places for images .* and 1 images: its text has such a place"):
        train(kind=kind, data=tmp_path / "set", held_out=0)


@pytest.mark.parametrize("kind", ["smolvlm", "idefics3"])
def test_where_image_stands_in_a_text_an_image_is_trained_on_and_no_other_number_is_imported(kind, train, folder, tmp_path):
    """<image> is these models' own token, too: each has its image, or the row is refused."""
    made = make_set(tmp_path / "set", 8, text=lambda k: "what is <image>?" if k == 5 else "what?")
    check_tokens(folder / kind, made, 8)
    assert train(kind=kind, data=made, held_out=0)[0]["step"] == 8
    for text in ("what is <image>?<image>", "<image>" * 3):
        with pytest.raises(ValueError, match=r"rows\[5\]: fewer images than parts of the messages name"):
            make_set(tmp_path / "no", 8, text=lambda k, text=text: text if k == 5 else "what?")
        assert not (tmp_path / "no").exists()


def test_m10_rows_without_a_token_to_train_on_are_counted_and_an_epoch_of_none_is_an_error(train, folder, tmp_path):
    summary, _ = train()
    assert summary["rows_left_out"] == 0 and summary["batch_count"] == summary["step"] == 20
    made = make_set(tmp_path / "some.images", 12, text=lambda k: "what? " * (40 if k % 3 == 0 else 1))  # Cut before its answer.
    summary, _ = train(out="some", data=made, held_out=0)
    assert (summary["step"], summary["rows_left_out"]) == (8, 4)
    summary, _ = train(out="last", data=made, held_out=0, seed=4)  # Three of them stand behind the last batch.
    assert (summary["step"], summary["rows_left_out"]) == (8, 4)
    assert plimsoll.resume(tmp_path / "last", progress=False)["rows_left_out"] == 4
    with pytest.raises(ValueError, match="none of the .* rows of .* has a token to train on within 20"):
        train(out="none", sequence_length=20)


@pytest.mark.slow  # test_chat.py has the same of texts.
def test_any_number_of_ranks_ends_in_the_same_bits(folder, tmp_path):
    """Five steps of four workers an epoch."""
    ranks_end_alike("vision", tmp_path, folder / "qwen2_vl", folder / "set", {**QUICK, "epochs": 2, "eval_every_n_steps": 4})


@pytest.mark.slow
def test_eight_ranks_end_in_the_same_bits(folder, tmp_path):
    eight_end_alike("vision", tmp_path, folder / "qwen2_vl", folder / "set", {**QUICK, "epochs": 3, "eval_every_n_steps": 4})


# ---- Options ----

def test_no_target_module_and_another_model_are_refused_by_name(train, folder, tmp_path):
    for options, text in [
            ({"model": ""}, "model: no folder was given"),
            ({"patience": 2}, "patience: it counts evaluations"),
            ({"finetune_vision": False, "finetune_language": False}, "leave no module of the model"),
            ({"lora_targets": "nothing"}, "leave no module of the model"),
            ({"train_whole": "nothing"}, "train_whole: no module of the model is called nothing; its parts are visual, language_model"),
            ({"train_whole": "language_model"}, "train_whole: model.language_model has blocks, or is in one"),
            ({"sequence_length": 513}, "sequence_length: 513, and the model knows 512 positions"),
            ({"data": ""}, "no data given: name it with --data PATH")]:
        with pytest.raises(ValueError, match=text):
            train(out=f"no-{'-'.join(options)}", **options)


BITS = [{"finetune_vision": False}, {"finetune_language": False}, {"finetune_attention": False}, {"finetune_mlp": False},
        {"lora_targets": "q_proj"}, {"method": "full"}, {"batch_size": 2}]
NO_BITS = [{"weights": "streamed"}, {"weights": "resident", "gradient_checkpointing": "on"}, {"cleanup_every_n_steps": 2},
           {"decode_threads": 3}, {"memory_limit": "3GiB"}]


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    """The digest where nothing was said."""
    out = tmp_path_factory.mktemp("plain") / "run"
    plimsoll.train("vision", out=out, **QUICK, data=folder / "set", model=folder / "qwen2_vl")
    return digest(out)


@pytest.mark.parametrize("options", BITS, ids=str)
def test_an_option_that_decides_bits_changes_them(train, plain, options):
    summary, made = train(**options)
    assert summary["status"] == "finished" and made != plain


@pytest.mark.parametrize("options", NO_BITS, ids=str)
def test_m6_what_decides_no_bits_changes_none(train, plain, options):
    """Cleaning up between the steps of an accumulation, too."""
    assert train(**options)[1] == plain


@pytest.mark.parametrize("kind", KINDS)
def test_kept_or_made_again_in_memory_or_streamed_each_kind_of_model_ends_in_the_same_bits(kind, train):
    summary, bits = train(out="kept", kind=kind, weights="resident", gradient_checkpointing="off")
    for name, more in (("again", {"weights": "resident", "gradient_checkpointing": "on"}), ("streamed", {"weights": "streamed"})):
        again, made = train(out=name, kind=kind, **more)
        assert made == bits and again["recomputes"] and again["held_out_loss"] == summary["held_out_loss"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("without, reads", [("vision", True), ("language", False)])
def test_adapters_are_where_they_were_asked_for(kind, folder, without, reads):
    given = vision.Options(data="", model=str(folder / kind), **{f"finetune_{without}": False})
    model = _model.config_of(given.model)
    made = _task.VisionTask(given).targets(transformers.AutoModelForImageTextToText.from_config(model))
    assert made and all(name.startswith(("model.language_model", "model.text_model")) is reads for name in made)


@pytest.mark.parametrize("kind, joins", [("fast_vlm", "multi_modal_projector"), ("smolvlm", "connector"), ("qwen2_vl", "merger")])
def test_what_joins_the_parts_is_trained_whole_beside_adapters(kind, joins, train, folder, tmp_path):
    """In bfloat16, itself in float32; kept or streamed, the same bits; other libraries read it."""
    options = {"kind": kind, "train_whole": joins, "dtype": "bfloat16", "finetune_vision": False, "epochs": 2, "lr": 3e-2}
    summary, bits = train(**options, weights="resident")
    without, other = train(out="without", **{**options, "train_whole": ""})
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / kind, dtype=torch.bfloat16)
    name = next(name for name, _ in model.named_modules() if name.endswith(joins))
    count = sum(one.numel() for one in model.get_submodule(name).parameters())
    assert summary["trained_parameters"] == without["trained_parameters"] + count and bits != other
    assert train(out="streamed", **options, weights="streamed")[1] == bits
    parts = torch.load(tmp_path / f"run/checkpoints/step-{summary['step']:09}/parts.pt", weights_only=True)["parts"]["model"]
    trained = {key: one for key, one in parts.items() if "modules_to_save" in key}
    assert len(trained) == len(list(model.get_submodule(name).parameters()))
    assert all(one.dtype == torch.float32 for one in trained.values())
    for key, one in trained.items():
        assert not torch.equal(one.bfloat16(), model.get_submodule(name).state_dict()[key.split("default.")[1]])
    plimsoll.export(tmp_path / "run", tmp_path / "adapters")
    plimsoll.export(tmp_path / "run", tmp_path / "merged", merge=True)
    import peft

    merged = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").get_submodule(name)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapters").get_base_model().get_submodule(name)
    for key, one in trained.items():
        key = key.split("default.")[1]
        assert torch.equal(merged.state_dict()[key], one)
        assert torch.equal(adapted.modules_to_save["default"].state_dict()[key], one.bfloat16())


def test_an_embedding_that_is_the_head_too_and_trained_whole_is_not_merged(train, folder, tmp_path):
    """One of both was trained, and the files have one weight."""
    config = transformers.AutoConfig.from_pretrained(folder / "smolvlm")
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    shutil.copytree(folder / "smolvlm", tmp_path / "tied")
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "tied")
    train(model=tmp_path / "tied", train_whole="embed_tokens")
    with pytest.raises(ValueError, match="merge: the weight of .*embed_tokens, which was trained, is another module's, too"):
        plimsoll.export(tmp_path / "run", tmp_path / "merged", merge=True)


def test_frozen_batch_norms_keep_their_statistics_and_trained_ones_are_in_a_commit(train, folder, tmp_path):
    kept = transformers.AutoModelForImageTextToText.from_pretrained(folder / "fast_vlm").state_dict()
    statistics = [name for name in kept if name.endswith(("running_mean", "running_var"))]
    for method, changes in (("lora", False), ("full", True)):
        summary, _ = train(out=method, kind="fast_vlm", method=method)
        found = torch.load(tmp_path / method / f"checkpoints/step-{summary['step']:09}/parts.pt", weights_only=True)["parts"]["model"]
        for name in statistics:
            prefix = "base_model.model." if method == "lora" else ""
            assert torch.equal(found[prefix + name], kept[name]) is not changes


def test_m11_selective_loss_leaves_tokens_out_level_by_level_and_counts_them(train, tmp_path):
    made = make_set(tmp_path / "json.images", 12, answer=lambda colour: json.dumps({"colour": colour, "size": None}))
    said, bits = {}, set()
    for level in ("none", "conservative", "moderate", "aggressive"):
        said[level], one = train(out=level, data=made, selective_loss=level, epochs=2)
        bits.add(one)
    masked = [one["masked_tokens"] for one in said.values()]
    assert masked[0] == 0 < masked[1] < masked[2] < masked[3] and len(bits) == 4
    last = said["aggressive"]
    assert last["batch_count"] == last["step"] == 16 and last["total_tokens"] == said["none"]["total_tokens"]
    assert last["mask_percentage"] == 100 * last["masked_tokens"] / last["total_tokens"] < 100
    late, _ = train(out="late", data=made, selective_loss="aggressive", epochs=2, masking_start_epoch=1.0)
    assert 2 * late["masked_tokens"] == last["masked_tokens"]
    given, _ = train(out="given", data=made, selective_loss="aggressive", selective_loss_keys="size", epochs=2)
    assert masked[2] < given["masked_tokens"] < last["masked_tokens"]


# ---- Runs ----

def test_killed_within_an_epoch_and_an_accumulation_it_ends_in_the_same_bits(train, folder, tmp_path):
    options = {"epochs": 2, "accumulate": 3, "checkpoint_every_n_steps": 4, "schedule": "cosine", "lora_dropout": 0.2,
               "eval_every_n_steps": 5, "patience": 9}
    whole, bits = train(out="whole", **options)
    killed("vision", 10, **{**QUICK, **options}, data=folder / "set", model=folder / "qwen2_vl", out=tmp_path / "killed")
    assert plimsoll.status(tmp_path / "killed")["checkpoint_step"] == 8
    again = plimsoll.resume(tmp_path / "killed", progress=False, weights="streamed")
    assert digest(tmp_path / "killed") == bits and again["step"] == whole["step"] == 40
    assert {key: again[key] for key in ("held_out_loss", "total_tokens", "batch_count")} == {
        key: whole[key] for key in ("held_out_loss", "total_tokens", "batch_count")}


PROGRAM = [sys.executable, "-c", "import sys, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
           "from plimsoll.cli import _program; sys.exit(_program.main())"]


def words_of(options):
    """Options as the command line has them."""
    return [f"--{name.replace('_', '-')}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in options.items() if name != "progress"]


def test_the_program_trains_and_after_ctrl_c_goes_on_to_the_same_bits(train, folder, tmp_path):
    """In the middle of an accumulation."""
    options = {"epochs": 3, "accumulate": 3, "schedule": "linear", "checkpoint_every_n_steps": 1000}
    whole, bits = train(out="whole", **options)
    given = {**QUICK, **options, "data": folder / "set", "model": folder / "qwen2_vl", "out": tmp_path / "run"}
    child = subprocess.Popen([*PROGRAM, "train", "vision", *words_of(given), "--json", "--quiet"], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not (tmp_path / "run/events.jsonl").exists() or len(events(tmp_path / "run", "step")) < 4:
            assert child.poll() is None, child.communicate()
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
    finally:
        child.kill()
    stopped = json.loads(out.splitlines()[-1])
    assert (child.returncode, stopped["status"], stopped["stop_reason"]) == (0, "stopped", "SIGINT"), err
    assert plimsoll.status(tmp_path / "run")["checkpoint_step"] == stopped["step"] < whole["step"]
    done = subprocess.run([*PROGRAM, "resume", str(tmp_path / "run"), "--json", "--quiet"], capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout.splitlines()[-1])
    assert again["status"] == "finished" and again["step"] == whole["step"] and digest(tmp_path / "run") == bits


def test_the_programs_help_has_examples_and_each_option(tmp_path):
    said = subprocess.run([*PROGRAM, "train", "vision", "--help"], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    text = " ".join(said.stdout.split())
    for example in vision.RECIPE.examples:
        assert example in text
    for name in vision.Options.__dataclass_fields__:
        assert f"--{name.replace('_', '-')} " in text, name
    wrong = subprocess.run([*PROGRAM, "train", "vision", "--selective-loss", "some"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2 and "--selective-loss" in wrong.stderr


def test_early_stopping_ends_a_run_that_gets_no_better(train, tmp_path):
    summary, bits = train(epochs=50, eval_every_n_steps=4, patience=2, lr=0.5)
    steps = [one["step"] for one in events(tmp_path / "run", "step") if "held_out_loss" in one]
    assert summary["status"] == "finished" and steps[-1] == summary["step"] < 200
    again = plimsoll.resume(tmp_path / "run", progress=False)
    assert again["step"] == summary["step"] and again["held_out_loss"] == summary["held_out_loss"]
    assert digest(tmp_path / "run") == bits


@pytest.mark.parametrize("kind", ["qwen2_vl", "idefics3"])
def test_it_learns_to_caption_held_out_images_better_than_chance(kind, train, folder, tmp_path):
    """Right captions of other images are likelier than those that are exchanged."""
    made = make_set(tmp_path / "set", 80)
    summary, _ = train(kind=kind, data=made, method="full", epochs=8, lr=3e-3, accumulate=1, batch_size=4, held_out=16)
    own = summary["held_out_loss"]
    held = [dict(row) for row in rows(24, seed=5)]
    losses = {}
    for name, shift in (("right", 0), ("wrong", 1)):
        by = sorted({row["response"] for row in held})
        other = {word: by[(k + shift) % len(by)] for k, word in enumerate(by)}
        with plimsoll.Governor("4GiB") as governor:
            plimsoll.import_vision([{**row, "response": other[row["response"]]} for row in held], tmp_path / name,
                                   governor=governor)
        again = {**QUICK, "model": folder / kind, "data": made, "method": "full"}
        given = vision.Options(**{key: str(value) if isinstance(value, pathlib.Path) else value for key, value in again.items()
                                  if key in vision.Options.__dataclass_fields__ and key != "memory_limit"}
                               | {"foreign_bytes": 1 << 30, "eval_data": str(tmp_path / name), "out": str(tmp_path / "run")})
        losses[name] = _results_of(given)
    assert own < 0.3 and losses["right"] < 0.5 * losses["wrong"], (own, losses)


def _results_of(given):
    from plimsoll.recipes.tuning import _results

    with torch_settings():
        return _results.evaluate_run(given)["held_out_loss"]


@pytest.mark.parametrize("name", KINDS)
def test_what_it_leaves_peft_and_transformers_read(name, train, folder, tmp_path):
    train(kind=name, epochs=2)
    said = plimsoll.evaluate(tmp_path / "run")
    assert said["held_out_tokens"] > 0
    assert plimsoll.export(tmp_path / "run", tmp_path / "adapters")["kind"] == "adapters"
    assert plimsoll.export(tmp_path / "run", tmp_path / "merged", merge=True)["kind"] == "model"
    import peft

    kind, ids = transformers.AutoModelForImageTextToText, torch.arange(40)[None]
    with torch.no_grad():
        before = kind.from_pretrained(folder / name)(input_ids=ids).logits
        merged = kind.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(kind.from_pretrained(folder / name), tmp_path / "adapters")(
            input_ids=ids).logits
    assert torch.allclose(adapted, merged, atol=1e-5) and (adapted - before).abs().max() > 1e-3


def test_m9_when_a_run_has_ended_or_failed_its_bytes_are_back(train, monkeypatch):
    def live():
        gc.collect()
        return _torch_gate.load().arena_stats()["live_bytes"]

    train(out="warm")
    before = live()
    train(out="finished")
    assert live() <= before + (64 << 10)
    monkeypatch.setattr(_train.Training, "loop", lambda self, data: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(out="failed")
    assert live() <= before + (64 << 10)


def test_a_plan_is_never_below_what_a_step_takes(folder, tmp_path, train):
    with plimsoll.Governor("4GiB") as governor:
        limit = governor.ledger().baseline_bytes + (64 + 40 << 20)
    given = {**QUICK, "foreign_bytes": "64MiB", "memory_limit": limit, "accumulate": 1}
    plan = plimsoll.plan("vision", data=folder / "set", model=folder / "qwen2_vl",
                         **{name: value for name, value in given.items() if name != "progress"})
    train(**{**given, "batch_size": plan["batch_size"]})
    admitted = events(tmp_path / "run", "admitted")[0]
    assert plan["batch_size"] >= 1 and admitted["admitted_bytes"] <= plan["leased_bytes"]
