# SPDX-License-Identifier: Apache-2.0
"""The recipe `chat`: every option has its effect, a run goes on bit for bit, and what it leaves other libraries read."""
import dataclasses
import gc
import hashlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("safetensors")
pytest.importorskip("accelerate")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from safetensors.torch import load_file, save_file

import plimsoll
from plimsoll.core import _torch_gate
from plimsoll.core._torch_settings import torch_settings

if _torch_gate.load_if_torch_imported() is None:
    pytest.skip("plimsoll was built without torch", allow_module_level=True)

from plimsoll.recipes import chat
from plimsoll.recipes.chat import _task
from plimsoll.recipes.tuning import _choice, _model, _train
from tests.support import chats
from tests.support.chat_models import KINDS, SCALED, make_model, make_tokens
from tests.support.killed_recipes import killed

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUICK = {"memory_limit": "4GiB", "foreign_bytes": "1GiB", "compute_threads": 1, "progress": False, "sequence_length": 64,
         "dtype": "float32", "lora_r": 4, "accumulate": 2, "lr": 1e-2, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    make_model(folder / "model")
    make_tokens(folder / "chats.tokens", folder / "model", rows=40)
    return folder


@pytest.fixture
def train(folder, tmp_path):
    """Trains on the folder's model and chats; (summary, digest of what was trained)."""
    def trained(out="run", **options):
        given = {**QUICK, "data": folder / "chats.tokens", "model": folder / "model", **options}
        summary = plimsoll.train("chat", out=tmp_path / out, **given)
        return summary, digest(tmp_path / out)
    trained.model = folder / "model"
    return trained


def digest(run):
    """Of the last commit's weights, checksums of frozen ones left out."""
    step = plimsoll.status(run)["checkpoint_step"]
    parts = torch.load(pathlib.Path(run) / f"checkpoints/step-{step:09}/parts.pt", weights_only=True)["parts"]
    found = hashlib.sha256()
    for name, one in sorted(parts["model"].items()):
        if one.dtype != torch.int64:
            found.update(name.encode() + one.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def events(run, name):
    lines = map(json.loads, (pathlib.Path(run) / "events.jsonl").read_text().splitlines())
    return [one for one in lines if one["event"] == name]


# ---- Options ----

def test_options_that_cannot_be_are_refused_by_name(train, folder, tmp_path):
    make_model(tmp_path / "small", vocabulary=300)
    for options, text in [
            ({"model": ""}, "model: no folder was given; name the model's with --model DIR"),
            ({"model": tmp_path / "none"}, "is no folder of a model"),
            ({"model": tmp_path / "small"}, "has ids of a vocabulary of .*, and the model's is of 300: import it again with"),
            ({"inbox": tmp_path}, "inbox: data was given, too"),
            ({"data": "", "inbox": tmp_path, "schedule": "linear"}, "schedule must be constant, and patience 0"),
            ({"data": ""}, "no data given: name it with --data PATH, or --inbox PATH"),
            ({"patience": 2}, "patience: it counts evaluations"),
            ({"previews_every_n_steps": 2}, "previews_every_n_steps: no file was given"),
            ({"dora": True, "weights": "streamed"}, "weights: adapters of DoRA begin with the weights' norms"),
            ({"method": "full", "weights": "streamed"}, "weights: all weights are trained, and those are in memory"),
            ({"sequence_length": 513}, "sequence_length: 513, and the model knows 512 positions"),
            ({"held_out": 40}, "held_out: 40 of the 40 rows of .* leave none to train on"),
            ({"held_out": 0, "eval_every_n_steps": 1}, "eval_every_n_steps: no row is held out"),
            ({"lora_targets": "nothing"}, "lora_targets: Target modules .*nothing.* not found")]:
        with pytest.raises(ValueError, match=text):
            train(out=f"no-{'-'.join(options)}", **options)


BITS = [{"lora_r": 8}, {"lora_alpha": 8.0}, {"lora_dropout": 0.3}, {"lora_targets": "q_proj,v_proj"}, {"rslora": True},
        {"dora": True}, {"method": "full"}, {"lr": 3e-3}, {"schedule": "linear"}, {"schedule": "cosine"}, {"warmup_steps": 3},
        {"weight_decay": 0.5}, {"clip_norm": 1e-3}, {"batch_size": 2}, {"accumulate": 1}, {"sequence_length": 48},
        {"packing": False}, {"epochs": 2}, {"dtype": "bfloat16"}, {"seed": 4}, {"held_out": 20}]
NO_BITS = [{"weights": "streamed"}, {"weights": "resident", "gradient_checkpointing": "on"}, {"weights": "resident",
           "gradient_checkpointing": "off"}, {"memory_limit": "3GiB"}, {"eval_every_n_steps": 3}, {"cleanup_every_n_steps": 2}]


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    """The digest where nothing was said."""
    out = tmp_path_factory.mktemp("plain") / "run"
    plimsoll.train("chat", out=out, **QUICK, data=folder / "chats.tokens", model=folder / "model")
    return digest(out)


@pytest.mark.parametrize("options", BITS, ids=str)
def test_an_option_that_decides_bits_changes_them(train, plain, options):
    summary, made = train(**options)
    assert summary["status"] == "finished" and made != plain


@pytest.mark.parametrize("options", NO_BITS, ids=str)
def test_an_option_that_decides_no_bits_changes_none(train, plain, options):
    summary, made = train(**options)
    assert made == plain and summary["weights"] == options.get("weights", summary["weights"])
    assert summary["recomputes"] == (options.get("gradient_checkpointing") == "on" or options.get("weights") == "streamed")


def test_the_program_with_python_has_nothing_to_install():
    code = "import sys; from plimsoll.cli._program import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "train", "chatt"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "did you mean chat?" in done.stderr and "pip install" not in done.stderr, done.stderr


# ---- Ranks ----

RANKED = {**QUICK, "epochs": 3, "eval_every_n_steps": 4, "schedule": "linear"}


def test_any_number_of_ranks_ends_in_the_same_bits(folder, tmp_path):
    """Four virtual workers, two batches an update, dropout, a rate that falls, an evaluation meanwhile; 4 ranks are stopped within a
    window, one process goes on and is stopped, and 2 ranks end it."""
    ranks_end_alike("chat", tmp_path, folder / "model", folder / "chats.tokens", {**RANKED, "epochs": 2, "batch_size": 2})
    assert (tmp_path / "of 4" / "adapter" / "adapter_model.safetensors").exists()


def ranks_end_alike(recipe, folder, model, data, options):
    """1, 2 and 4 of them; 4 that are stopped in the third step, 1 in the seventh, and 2; and `plimsoll train` by 2, killed, and `resume`. Runs are
    made in `folder`."""
    said, errors = ranks_of(recipe, folder, model, data, options)
    began, went_on = said.pop("began"), said.pop("went on")
    assert said.pop("program") == [0, 0] and "goes on at step 2" in errors
    assert [(one[0], one[3]) for one in (*began, *went_on)] == [("stopped", 3)] * 4 + [("stopped", 7)]
    assert len({tuple(one) for ranks in said.values() for one in ranks}) == 1, said
    assert [len(ranks) for ranks in said.values()] == [1, 2, 4, 2]
    assert said["1"][0][0] == "finished" and said["1"][0][1] not in (began[0][1], went_on[0][1])
    assert digest(folder / "program") == digest(folder / "one") and plimsoll.status(folder / "program")["status"] == "finished"


def eight_end_alike(recipe, folder, model, data, options):
    """1 and 8 of them; and 4 and 2 of which one is killed, and 8."""
    said, errors = ranks_of(recipe, folder, model, data, {**options, "checkpoint_every_n_steps": 1, "foreign_bytes": "256MiB"}, 8)
    assert len({tuple(one) for ranks in said.values() for one in ranks}) == 1, said
    assert [len(ranks) for ranks in said.values()] == [1, 8, 8] and said["1"][0][0] == "finished"
    assert "goes on at step 2" in errors and "goes on at step 4" in errors


def ranks_of(recipe, folder, model, data, options, workers=4):
    """(what tuning_ranks.py says, its standard error)."""
    (folder / "model").symlink_to(model)
    (folder / "data").symlink_to(data)
    options = {name: value for name, value in options.items() if name != "progress"} | {"memory_limit": "8GiB"}
    done = subprocess.run([sys.executable, "-m", "tests.support.tuning_ranks", folder, json.dumps(options), recipe, str(workers)],
                          cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"},
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_eight_ranks_end_in_the_same_bits(folder, tmp_path):
    eight_end_alike("chat", tmp_path, folder / "model", folder / "chats.tokens", RANKED)


@pytest.mark.slow
def test_torchrun_starts_the_program(folder, tmp_path):
    """Killed in its second step, rank 1 has torchrun start both again, and they go on."""
    options = {**QUICK, "memory_limit": "8GiB", "virtual_workers": 2, "checkpoint_every_n_steps": 1}
    del options["progress"]
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    (tmp_path / "program.py").write_text(
        "import os, signal, sys\n"
        "from plimsoll.cli import _program\n"
        "from plimsoll.recipes.tuning._train import Training\n"
        "def leaves(training):\n"
        "    if training.run.steps_made == 1 and (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) == ('1', '0'):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return False\n"
        "Training.leaves = leaves\n"
        "sys.exit(_program.main())\n")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
         tmp_path / "program.py", "train", "chat", "--data", folder / "chats.tokens", "--model", folder / "model", "--out",
         tmp_path / "run", "--json", *words], text=True, capture_output=True, timeout=400, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "goes on at step 1" in done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["status"] == "finished" and summary["step"] > 3


# ---- Loss and attention ----

def tuned_of(folder, kind, **options):
    """(the model, its options) of a folder; a Governor must be there."""
    given = chat.Options(data="", model=str(folder), dtype="float32", sequence_length=64, lora_r=4, **options)
    return _model.Tuned(given, _choice.choose(given, 1 << 30)), given


@pytest.mark.parametrize("kind", [kind if kind in ("llama", "gemma2", "gpt2", "gpt_neox", "opt", "phi3") else
                                  pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])  # The others' layers are like these.
def test_t6_packed_chats_have_the_losses_that_they_have_alone(kind, tmp_path):
    """And these are transformers' own."""
    make_model(tmp_path / "model", kind)
    made = make_tokens(tmp_path / "chats.tokens", tmp_path / "model", rows=20)
    with plimsoll.Governor("4GiB", foreign_bytes="1GiB"), plimsoll.TokenSet(made) as tokens:
        tuned, options = tuned_of(tmp_path / "model", kind, batch_size=2)
        assert tuned.chunked == (kind not in SCALED)
        for name, one in tuned.named_parameters():  # Adapters that do something.
            if "lora_B" in name:
                torch.nn.init.normal_(one, std=0.1)
        tuned.eval()
        sums = []
        for packing in (True, False):
            options.packing = packing
            batches = list(_task.TokenSequences(tokens, options, evaluates=True))
            losses = [tuned.scores(*batch) for batch in batches]
            sums.append([sum(column) for column in zip(*losses)])
            for batch, (loss, _, count) in zip(batches, losses):
                with torch.no_grad():
                    assert float(tuned(*batch)) == pytest.approx(loss / count, rel=1e-5)
        assert len({one[2] for one in sums}) == 1 and sums[0][0] == pytest.approx(sums[1][0], rel=1e-5)
        alone = right = 0.0
        for ids, trained in tokens:
            ids, labels = torch.from_numpy(ids[None, :64]).long(), torch.from_numpy(trained[None, :64])
            with torch.no_grad():
                logits = tuned.model(input_ids=ids).logits[0, :-1]
            wanted = torch.where(labels, ids, -100)[0, 1:]
            alone += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
            right += int((logits.argmax(1) == wanted).sum())
        assert sums[0][0] == pytest.approx(alone, rel=1e-5) and sums[0][1] == right


def test_without_packing_batches_have_few_lengths_and_end_no_sooner_than_their_rows(tmp_path):
    """For each length oneDNN keeps code of the products in bfloat16, of which no limit knows."""
    make_model(tmp_path / "model", "llama")
    made = make_tokens(tmp_path / "chats.tokens", tmp_path / "model", rows=400)
    with plimsoll.Governor("4GiB", foreign_bytes="1GiB"), plimsoll.TokenSet(made) as tokens:
        for longest in (64, 100, 1600):
            options = chat.Options(data="", model="", sequence_length=longest, packing=False, batch_size=1)
            got = [(inputs["input_ids"].shape[1], int((labels != -100).nonzero()[-1, 1]))
                   for inputs, labels in _task.TokenSequences(tokens, options, evaluates=True)]
            assert len({length for length, _ in got}) <= 16
            assert all(last < length <= longest for length, last in got)
            grain = max(64, longest // 16)
            assert all(length == longest or length % grain == 0 for length, _ in got)


# ---- Going on ----

def test_killed_within_an_epoch_and_an_accumulation_it_ends_in_the_same_bits(train, folder, tmp_path):
    options = {"epochs": 2, "accumulate": 3, "checkpoint_every_n_steps": 4, "schedule": "cosine", "warmup_steps": 2,
               "lora_dropout": 0.2, "eval_every_n_steps": 5, "patience": 3}
    whole, bits = train(out="whole", **options)
    killed("chat", 10, **{**QUICK, **options}, data=folder / "chats.tokens", model=folder / "model", out=tmp_path / "killed")
    assert plimsoll.status(tmp_path / "killed")["checkpoint_step"] == 8  # Two batches into a window of three.
    again = plimsoll.resume(tmp_path / "killed", progress=False, weights="streamed")
    assert digest(tmp_path / "killed") == bits and again["step"] == whole["step"] > 12
    assert again["held_out_loss"] == whole["held_out_loss"]


def test_t13_a_run_goes_on_from_the_step_that_its_manifest_names_and_backups_stay(train, folder, tmp_path):
    options = {"checkpoint_every_n_steps": 4}
    whole, bits = train(out="whole", **options)
    killed("chat", 9, **{**QUICK, **options}, data=folder / "chats.tokens", model=folder / "model", out=tmp_path / "killed")
    checkpoints = tmp_path / "killed/checkpoints"
    for name in ("step-9000", "step-000000008-mine", "zz-best"):
        shutil.copytree(checkpoints / "step-000000004", checkpoints / name)
    shutil.copytree(checkpoints / "step-000000004", checkpoints / "step-000000012")  # No manifest has named it.
    again = plimsoll.resume(tmp_path / "killed", progress=False)
    assert digest(tmp_path / "killed") == bits and again["step"] == whole["step"] > 9
    assert {"step-9000", "step-000000008-mine", "zz-best"} < set(os.listdir(checkpoints))


def test_an_evaluation_is_of_the_data_that_the_run_was_trained_on(train, folder, tmp_path):
    """Rows that are held out of another set may have been trained on."""
    shutil.copy(folder / "chats.tokens", tmp_path / "own.tokens")
    train(data=tmp_path / "own.tokens")
    make_tokens(tmp_path / "other.tokens", folder / "model", rows=60, seed=1)
    os.replace(tmp_path / "other.tokens", tmp_path / "own.tokens")
    with pytest.raises(ValueError, match="data: .*own.tokens is another set than the run began with .* put that one back"):
        plimsoll.evaluate(tmp_path / "run")


def test_a_set_to_evaluate_on_is_refused_before_a_step_where_the_model_lacks_its_ids(train, folder, tmp_path):
    large = tmp_path / "large"
    make_model(large, vocabulary=1200)
    tokenizer = transformers.AutoTokenizer.from_pretrained(large)
    tokenizer.add_tokens([f"word{k}" for k in range(300)])
    tokenizer.save_pretrained(large)
    made = make_tokens(tmp_path / "other.tokens", large, rows=5)
    with pytest.raises(ValueError, match="eval_data: .*other.tokens has ids of a vocabulary of .* import it again with --tokenizer"):
        train(eval_data=made)
    assert not (tmp_path / "run").exists()  # A run that made no step leaves nothing.


def test_another_set_to_evaluate_on_is_refused_where_patience_goes_by_it(train, folder, tmp_path, monkeypatch):
    made = make_tokens(tmp_path / "eval.tokens", folder / "model", rows=10, seed=1)
    other = make_tokens(tmp_path / "other.tokens", folder / "model", rows=10, seed=2)
    for patience in (0, 3):
        run, options = tmp_path / f"run{patience}", {"eval_data": made, "eval_every_n_steps": 4, "patience": patience}
        with monkeypatch.context() as patch:
            touched(patch, run, 3, ".stop")
            train(out=run.name, **options)
        if patience:
            with pytest.raises(ValueError, match="eval_data: .*other.tokens is another set than the run began with"):
                plimsoll.resume(run, progress=False, eval_data=str(other))
            os.replace(other, made)
            with pytest.raises(ValueError, match="eval_data: .*eval.tokens is another set than the run began with"):
                plimsoll.resume(run, progress=False, eval_data=str(made))
        else:
            assert plimsoll.resume(run, progress=False, eval_data=str(other))["status"] == "finished"


def test_other_data_or_another_model_is_refused_when_a_run_goes_on(train, folder, tmp_path):
    train(out="run")
    make_tokens(tmp_path / "other.tokens", folder / "model", seed=1)
    with pytest.raises(ValueError, match="data: .*other.tokens is another set than the run began with"):
        plimsoll.resume(tmp_path / "run", progress=False, data=str(tmp_path / "other.tokens"))
    copy = shutil.copytree(folder / "model", tmp_path / "model1")
    held = load_file(copy / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        save_file({**held, name: held[name] + 1}, copy / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(plimsoll.CorruptError, match="not what training began with: .* Put the files? back, or train anew"):
            plimsoll.resume(tmp_path / "run", progress=False, data=str(folder / "chats.tokens"), model=str(copy))
        for work in (plimsoll.evaluate, lambda run: plimsoll.export(run, out=tmp_path / "out", merge=True)):
            with pytest.raises(plimsoll.CorruptError, match="not what training began with"):
                work(tmp_path / "run")
    moved = make_model(tmp_path / "model2", width=64)
    with pytest.raises(ValueError, match="model is not what the commit of step"):
        plimsoll.resume(tmp_path / "run", progress=False, model=str(moved))


# ---- What comes of it ----

def test_adapters_and_merged_models_are_read_by_peft_and_transformers(train, folder, tmp_path):
    summary, _ = train(out="run", epochs=2)
    said = plimsoll.evaluate(tmp_path / "run")
    assert said["held_out_loss"] == summary["held_out_loss"] and said["held_out_tokens"] == summary["held_out_tokens"] > 0
    assert 0 <= said["token_accuracy"] <= 1
    assert plimsoll.export(tmp_path / "run", tmp_path / "adapters")["kind"] == "adapters"
    assert plimsoll.export(tmp_path / "run", tmp_path / "merged", merge=True)["kind"] == "model"
    with pytest.raises(ValueError, match="merged is there already"):
        plimsoll.export(tmp_path / "run", tmp_path / "merged", merge=True)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
        before = base(input_ids=ids).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
        for place in (tmp_path / "adapters", tmp_path / "run" / "adapter"):
            adapted = peft.PeftModel.from_pretrained(base, place)(input_ids=ids).logits
            base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
            assert torch.allclose(adapted, merged, atol=1e-5) and (adapted - before).abs().max() > 1e-2
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template


def test_an_adapter_of_a_weight_that_files_call_otherwise_is_merged_into_it(tmp_path):
    model, data = make_model(tmp_path / "model", "gpt_neox"), tmp_path / "set"
    make_tokens(data, model)
    plimsoll.train("chat", out=tmp_path / "run", data=data, model=model, **{**QUICK, "lora_targets": "lm_head,query_key_value"})
    plimsoll.export(tmp_path / "run", tmp_path / "merged", merge=True)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        base = transformers.AutoModelForCausalLM.from_pretrained(model)
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert not torch.equal(merged.lm_head.weight, base.lm_head.weight)
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run/adapter")
        assert torch.allclose(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, atol=1e-5)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_of_a_tied_weight_is_not_merged(target, train, tmp_path):
    """As that would be another model: the embedding and the head have one weight, and one adapter is of one of them."""
    train(lora_targets=f"{target},q_proj")
    with pytest.raises(ValueError, match=f"merge: the weight of .*{target}, which was trained, is another module's, too"):
        plimsoll.export(tmp_path / "run", out=tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()
    assert plimsoll.export(tmp_path / "run", out=tmp_path / "adapter")["kind"] == "adapters"


def test_all_weights_are_exported_as_a_model(train, tmp_path):
    summary, _ = train(out="run", method="full", lr=1e-3)
    assert plimsoll.export(tmp_path / "run", tmp_path / "model")["kind"] == "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert sum(one.numel() for one in model.parameters()) == summary["trained_parameters"]
    state = torch.load(tmp_path / f"run/checkpoints/step-{summary['step']:09}/parts.pt", weights_only=True)["parts"]["model"]
    assert all(torch.equal(state[name], one) for name, one in model.named_parameters())


@pytest.mark.parametrize("method, lr, share", [("lora", 5e-2, 0.99), ("full", 1e-2, 0.9)])
def test_training_lowers_the_loss_on_other_chats(train, folder, tmp_path, method, lr, share):
    made = make_tokens(tmp_path / "other.tokens", folder / "model", rows=20, seed=7)
    summary, _ = train(epochs=4, eval_data=made, eval_every_n_steps=2, lr=lr, accumulate=1, method=method)
    losses = [one["held_out_loss"] for one in events(tmp_path / "run", "step") if "held_out_loss" in one]
    assert losses[-1] == summary["held_out_loss"] < share * losses[0]


def test_early_stopping_ends_a_run_that_gets_no_better(train, tmp_path):
    summary, _ = train(epochs=50, eval_every_n_steps=2, patience=2, lr=1.0)
    steps = [one["step"] for one in events(tmp_path / "run", "step") if "held_out_loss" in one]
    assert summary["status"] == "finished" and steps[-1] == summary["step"] < 40
    again = plimsoll.resume(tmp_path / "run", progress=False)
    assert again["step"] == summary["step"] and again["held_out_loss"] == summary["held_out_loss"]


def test_t11_previews_compare_and_end_in_time(train, folder, tmp_path):
    lines = [{"messages": [{"role": "user", "content": "the of and"}, {"role": "assistant", "content": "it is"}]},
             {"messages": [{"role": "user", "content": "in that"}]}]
    file = chats.write_lines(tmp_path / "previews.jsonl", lines)
    options = {"previews": file, "preview_tokens": 5}
    summary, bits = train(previews_every_n_steps=4, **options)
    told = events(tmp_path / "run", "preview")
    assert summary["previews"] == 2 and {one["step"] for one in told} >= {4, 8} and told[0]["wanted"] == "it is"
    assert train(out="none")[1] == bits  # They change nothing.
    train(out="slow", preview_seconds=0.0, **{**options, "preview_tokens": 400})
    assert all(one["seconds"] < 5 for one in events(tmp_path / "slow", "preview"))
    chats.write_lines(file, [{"text": "no chat"}])
    with pytest.raises(ValueError, match="previews.jsonl:1: no line of JSON with messages"):
        train(out="wrong", **options)
    assert not (tmp_path / "wrong").exists()  # It is said before a step is made.
    with pytest.raises(OSError, match="none.jsonl"):
        train(out="missing", previews=tmp_path / "none.jsonl")
    assert not (tmp_path / "missing").exists()


# ---- What fits ----

def test_the_profile_is_chosen_by_what_is_left_and_says_why(tmp_path):
    """Of a model that is not there: its config is enough."""
    transformers.LlamaConfig(vocab_size=30_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12,
                             num_attention_heads=16).save_pretrained(tmp_path)
    given = chat.Options(data="", model=str(tmp_path), profile="auto", sequence_length=1024)
    order = [("full", "resident", False), ("full", "resident", True), ("lora", "resident", False), ("lora", "resident", True),
             ("lora", "streamed", True)]
    seen, left = [], 8 << 30
    while True:
        choice = _choice.choose(given, left)
        assert plimsoll.format_bytes(left) in choice.why and plimsoll.format_bytes(choice.needed_bytes) in choice.why
        seen.append((choice.method, choice.weights, choice.recomputes))
        if choice.needed_bytes > left:
            break
        left = choice.needed_bytes - 1  # A byte too little for it.
    assert [one for k, one in enumerate(seen) if one not in seen[:k]] == order
    assert _choice.choose(given, 1 << 20, "full").method == "full"  # What a run began with it goes on with.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_autograd_keeps_is_counted_without_values_to_the_byte(kind, dtype, tmp_path):
    """But for LayerNorm in bfloat16: its two numbers a token are float32 where there are no values."""
    make_model(tmp_path, kind)
    given = chat.Options(data="", model=str(tmp_path), dtype=dtype, sequence_length=64, batch_size=2, lora_r=4)
    counted = _choice._Sizes.of(chat.Options, tuple(vars(given).items()), "lora")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype)).requires_grad_(False)
    model = _model.adapted(model, given)
    kept = _choice.kept_bytes(model.get_base_model(), 2, 64)
    norms = dtype == "bfloat16" and any(isinstance(one, torch.nn.LayerNorm) for one in model.modules())
    assert kept < counted.kept < 1.01 * kept if norms else counted.kept == kept > 0
    assert counted.weights == sum(one.numel() * one.element_size() for one in model.parameters())


def test_a_plan_is_what_a_step_takes(train, folder, tmp_path):
    with plimsoll.Governor("4GiB") as governor:
        limit = governor.ledger().baseline_bytes + (64 + 40 << 20)
    options = {**QUICK, "accumulate": 1, "weights": "resident", "gradient_checkpointing": "off", "foreign_bytes": "64MiB",
               "sequence_length": 256, "memory_limit": limit}
    plan = plimsoll.plan("chat", data=folder / "chats.tokens", model=folder / "model",
                         **{name: value for name, value in options.items() if name != "progress"})
    assert plan["label"] == "exact" and plan["batch_size"] >= 3
    assert plan["peak_bytes"] == plan["measured_bytes"]  # Of a step of which every token is trained on.
    train(out="run", **{**options, "batch_size": plan["batch_size"]})
    admitted = events(tmp_path / "run", "admitted")[0]
    assert admitted["rows"] == plan["batch_size"] and admitted["admitted_bytes"] <= plan["leased_bytes"]
    with pytest.raises(plimsoll.BudgetExceeded, match="a limit of .* would do|try a limit of"):
        train(out="more", **{**options, "batch_size": 3 * plan["batch_size"]})


def test_s37_a_plan_is_told_in_words_and_ends_with_one_step_of_its_size(folder, monkeypatch):
    from plimsoll.training._step import TrainingStep
    from plimsoll.recipes._files import Source
    from plimsoll.recipes.tuning import _results

    made, rehearse = [], TrainingStep.rehearse
    monkeypatch.setattr(TrainingStep, "rehearse", lambda step, batch, *f: (made.append(len(batch[1])), rehearse(step, batch, *f)))
    plan_batch = _results.plan_batch

    def few(step, **options):
        plan = plan_batch(step, **options, max_batch_size=4)
        made.append("planned")
        return plan

    monkeypatch.setattr(_results, "plan_batch", few)
    options = {name: value for name, value in QUICK.items() if name not in ("progress", "memory_limit")}
    asked = chat.Options(data=str(folder / "chats.tokens"), model=str(folder / "model"), memory_limit="4GiB",
                         **{**options, "foreign_bytes": 1 << 30, "weights": "resident"})
    with torch_settings():
        said, text, _ = plimsoll.recipes._Work(chat.RECIPE, Source("", "")).plan(dataclasses.asdict(asked), "cpu", "", False, 0)
    assert made[made.index("planned") + 1:] == [1, 4]
    assert json.loads(said)["batch_size"] == 4 and json.loads(said)["parts"]["activations"] > 0
    assert "batch size 4 (" in text and "  activations " in text and not set("{}[]'") & set(text), text
    assert "a step: 4 sequences of 64 tokens, 256 in all; one was made, and took " in text


# ---- An inbox ----

def drop(inbox, name, rows, seed=0):
    lines = [{"messages": chats.chat(random.Random(f"{seed} {k}"), most=12, turns=2)} for k in range(rows)]
    chats.write_lines(inbox / f".{name}", lines)
    os.rename(inbox / f".{name}", inbox / name)


def test_t7_dropped_files_add_their_steps_and_a_broken_one_is_named(train, tmp_path):
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    drop(inbox, "a.jsonl", 30)
    (inbox / "b.jsonl").write_text('{"messages": [{"role": "user"\n')
    drop(inbox, "c.jsonl", 20, seed=1)
    for number, name in enumerate("abc"):
        os.utime(inbox / f"{name}.jsonl", (1e9 + number, 1e9 + number))
    summary, _ = train(data="", inbox=inbox, inbox_wait_seconds=0.5)
    assert (summary["files_trained"], summary["files_failed"], summary["status"]) == (2, 1, "finished")
    ledger = json.loads((tmp_path / "run/inbox.json").read_text())["files"]
    assert [(one["name"], one["outcome"]) for one in ledger] == [("a.jsonl", "trained"), ("b.jsonl", "failed"),
                                                                 ("c.jsonl", "trained")]
    assert summary["step"] == ledger[0]["steps"] + ledger[2]["steps"] and ledger[2]["steps"] > 0 < ledger[0]["steps"]
    assert "b.jsonl:1" in ledger[1]["why"]
    assert sorted(path.relative_to(inbox).as_posix() for path in inbox.rglob("*.jsonl")) == [
        "done/a.jsonl", "done/c.jsonl", "failed/b.jsonl"]
    drop(inbox, "a.jsonl", 10, seed=2)  # The name again, with other chats.
    again = plimsoll.resume(tmp_path / "run", progress=False)
    assert again["step"] > summary["step"] and again["files_trained"] == 3 and again["files_failed"] == 1
    assert (inbox / "done/a.jsonl.1").exists()


def touched(monkeypatch, run, at, name):
    """Somebody makes a file in the run's folder, in a step."""
    log = plimsoll.Run.log

    def logged(self, **values):
        if self.steps_made == at and "loss" in values:
            (run / name).touch()
        log(self, **values)

    monkeypatch.setattr(plimsoll.Run, "log", logged)


@pytest.fixture
def inbox(tmp_path):
    """A function: an inbox of two files, made anew."""
    def made(name):
        (tmp_path / name).mkdir()
        for number in range(2):
            drop(tmp_path / name, f"{number}.jsonl", 12, seed=number)
            os.utime(tmp_path / name / f"{number}.jsonl", (1e9 + number, 1e9 + number))
        return tmp_path / name
    return made


def test_t8_stopped_in_a_dropped_file_it_goes_on_in_it_to_the_same_bits(train, inbox, tmp_path, monkeypatch):
    options = {"data": "", "inbox_wait_seconds": 0.5, "accumulate": 3}
    whole, bits = train(out="whole", inbox=inbox("one"), **options)
    first = json.loads((tmp_path / "whole/inbox.json").read_text())["files"][0]["steps"]
    with monkeypatch.context() as patch:
        touched(patch, tmp_path / "run", first + 1, ".stop")
        stopped, _ = train(out="run", inbox=inbox("two"), **options)
    assert (stopped["status"], stopped["stop_reason"], stopped["step"]) == ("stopped", ".stop", first + 2)
    assert not (tmp_path / "two/done/1.jsonl").exists()
    again = plimsoll.resume(tmp_path / "run", progress=False)
    assert digest(tmp_path / "run") == bits and again["step"] == whole["step"] and again["files_trained"] == 2
    assert [one["steps"] for one in json.loads((tmp_path / "run/inbox.json").read_text())["files"]][0] == first


def test_a_dropped_file_is_skipped_and_the_next_one_is_not(train, inbox, tmp_path, monkeypatch):
    touched(monkeypatch, tmp_path / "run", 1, ".skip")
    summary, _ = train(data="", inbox=inbox("in"), inbox_wait_seconds=0.5)
    ledger = json.loads((tmp_path / "run/inbox.json").read_text())["files"]
    assert [(one["outcome"], one["steps"] == 2) for one in ledger] == [("skipped", True), ("trained", False)]
    assert (tmp_path / "in/skipped/0.jsonl").exists() and (tmp_path / "in/done/1.jsonl").exists()
    assert summary["files_skipped"] == 1 and not (tmp_path / "run/.skip").exists()


def test_the_ledger_has_a_bound(train, inbox, tmp_path, monkeypatch):
    from plimsoll.recipes.chat import _inbox

    monkeypatch.setattr(_inbox, "_KEPT", 1)
    train(data="", inbox=inbox("in"), inbox_wait_seconds=0.5)
    assert [one["name"] for one in json.loads((tmp_path / "run/inbox.json").read_text())["files"]] == ["1.jsonl"]
    assert len(list((tmp_path / "run/inbox").iterdir())) <= 2  # Nor do token sets stay.


def test_a_damaged_ledger_is_named(train, inbox, tmp_path):
    train(data="", inbox=inbox("in"), inbox_wait_seconds=0.5)
    (tmp_path / "run/inbox.json").write_text("{")
    drop(tmp_path / "in", "3.jsonl", 10, seed=3)
    with pytest.raises(plimsoll.CorruptError, match="run/inbox.json: no ledger of an inbox; remove it"):
        plimsoll.resume(tmp_path / "run")


def test_an_inbox_that_nothing_comes_to_waits_and_can_be_stopped(train, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    idle = plimsoll.Run.idle
    monkeypatch.setattr(plimsoll.Run, "idle", lambda self, seconds: (self.path / ".stop").touch() or idle(self, seconds))
    summary = plimsoll.train("chat", out=tmp_path / "run", model=train.model, inbox=tmp_path / "in", **QUICK)
    assert (summary["status"], summary["stop_reason"], summary["step"]) == ("stopped", ".stop", 0)


# ---- Stops and ends ----

def test_a_run_that_made_no_update_is_an_error(train, folder, tmp_path):
    """As it was of a small set under the default accumulate, and finished."""
    made = make_tokens(tmp_path / "few.tokens", folder / "model", rows=30)
    with pytest.raises(ValueError, match="accumulate: nothing was trained: the run has 4 steps, and an update takes 8; train anew"):
        train(data=made, sequence_length=512, accumulate=8)
    assert plimsoll.status(tmp_path / "run")["status"] == "failed"
    assert train(out="enough", data=made, sequence_length=512, accumulate=4)[0]["status"] == "finished"


def test_m10_where_no_answer_is_within_sequence_length_an_evaluation_is_null_and_a_training_an_error(train, folder, tmp_path):
    line = {"messages": [{"role": "user", "content": "the of and " * 60}, {"role": "assistant", "content": "it is"}]}
    file = chats.write_lines(tmp_path / "long.jsonl", [line] * 25)
    with plimsoll.Governor("4GiB") as governor:
        plimsoll.import_chat(file, tmp_path / "long.tokens", tokenizer=folder / "model", governor=governor)
    summary, _ = train(eval_data=tmp_path / "long.tokens", eval_every_n_steps=2, patience=2)
    assert (summary["held_out_loss"], summary["token_accuracy"], summary["held_out_tokens"]) == (None, None, 0)
    assert summary["status"] == "finished" and summary["step"] > 6  # No worse, and no better.
    said = [one["held_out_loss"] for one in events(tmp_path / "run", "step") if "held_out_loss" in one]
    assert said and set(said) == {None}
    with pytest.raises(ValueError, match="sequence_length: no row of .*long.tokens has a token to train on within 64"):
        train(out="none", data=tmp_path / "long.tokens")


def test_t8_an_evaluation_that_a_stop_ends_is_made_when_the_run_goes_on(train, tmp_path, monkeypatch):
    """So that it ends where the one does that nobody stopped."""
    options = {"epochs": 3, "eval_every_n_steps": 4, "patience": 2, "lr": 0.3, "held_out": 15}
    whole, bits = train(out="whole", **options)
    scores, calls = _model.Tuned.scores, []

    def stopping(self, *batch):
        calls.append(len(calls))
        if len(calls) == 2:
            (tmp_path / "run/.stop").touch()
        return scores(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(_model.Tuned, "scores", stopping)
        stopped, _ = train(out="run", **options)
    assert (stopped["status"], stopped["step"], len(calls)) == ("stopped", 4, 2) and "held_out_loss" not in stopped
    again = plimsoll.resume(tmp_path / "run", progress=False)
    assert digest(tmp_path / "run") == bits and again["step"] == whole["step"]
    found = [[(one["step"], one["held_out_loss"]) for one in events(tmp_path / run, "step") if "held_out_loss" in one]
             for run in ("whole", "run")]
    assert found[0] == found[1] and len(found[0]) >= 2


@pytest.mark.parametrize("patience, lowest, stops", [(2, 4, [4]), (1, 4, [8]), (1, 4, [8, 8]), (2, 8, [4, 8])], ids=str)
def test_t8_patience_counts_an_evaluation_that_a_stop_ended(patience, lowest, stops, train, tmp_path, monkeypatch):
    """Losses are made up: the lowest is at one step, all others are the same."""
    options = {"epochs": 3, "eval_every_n_steps": 4, "patience": patience}
    asked_at = []

    def told(_, __, asked):
        run = plimsoll.run._run.current()
        step = run.steps_made + int(run._in_body)
        if step in asked_at:
            asked_at.remove(step)
            (run.path / ".stop").touch()
            assert asked()
            return None
        return {"held_out_loss": 1.0 if step == lowest else 2.0, "token_accuracy": 0.0, "held_out_tokens": 1}

    monkeypatch.setattr(_train, "evaluated", told)
    whole, bits = train(out="whole", **options)
    assert whole["step"] == lowest + 4 * patience
    asked_at += stops
    said, _ = train(out="run", **options)
    for at in stops:
        assert (said["status"], said["step"]) == ("stopped", at)
        said = plimsoll.resume(tmp_path / "run", progress=False)
    assert (said["status"], said["step"], digest(tmp_path / "run")) == ("finished", whole["step"], bits)
    assert plimsoll.status(tmp_path / "run")["status"] == "finished" and (tmp_path / "run/adapter").exists()
    assert plimsoll.resume(tmp_path / "run", progress=False)["step"] == whole["step"]


def test_t8_a_stop_in_the_last_evaluation_stops_the_run_and_the_rest_is_made_when_it_goes_on(train, tmp_path, monkeypatch):
    file = chats.write_lines(tmp_path / "previews.jsonl", [{"messages": [{"role": "user", "content": "the of and"}]}] * 2)
    options = {"held_out": 15, "previews": file, "preview_tokens": 2}
    whole, bits = train(out="whole", **options)
    scores, calls = _model.Tuned.scores, []

    def stopping(self, *batch):
        calls.append(len(calls))
        (tmp_path / "run/.stop").touch()
        return scores(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(_model.Tuned, "scores", stopping)
        said, _ = train(out="run", **options)
    assert len(calls) == 1 and (said["status"], said["stop_reason"], said["step"]) == ("stopped", ".stop", whole["step"])
    assert plimsoll.status(tmp_path / "run")["status"] == "stopped" and not (tmp_path / "run/adapter").exists()
    said = plimsoll.resume(tmp_path / "run", progress=False)
    assert [said[name] for name in ("status", "step", "held_out_loss", "previews")] == [
        whole[name] for name in ("status", "step", "held_out_loss", "previews")]
    assert digest(tmp_path / "run") == bits and (tmp_path / "run/adapter").exists()


def test_t4_when_a_run_has_ended_or_failed_its_bytes_are_back(train, monkeypatch):
    def live():
        gc.collect()
        return _torch_gate.load().arena_stats()["live_bytes"]

    before = live()
    train(out="finished")
    assert live() <= before + (64 << 10)
    monkeypatch.setattr(_train.Training, "loop", lambda self, tokens: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(out="failed")
    assert live() <= before + (64 << 10)
