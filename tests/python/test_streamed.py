# SPDX-License-Identifier: Apache-2.0
"""plimsoll.stream_frozen: frozen blocks come from disk, and nothing else changes."""
import copy
import gc
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
import types
import weakref

import pytest

torch = pytest.importorskip("torch")

import plimsoll
from plimsoll.training import _weight_files
from plimsoll.training._weight_ring import WeightRing
from tests.support.cgroup import MemoryCgroup

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20

# A model of one's own with LoRA by hand, and a run of it; the tests start it as a program, too.
MODEL = '''
import os, sys, torch, plimsoll

class Block(torch.nn.Module):
    """A frozen map, and a trained one of rank 4 beside it."""

    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.base = torch.nn.Linear(width, width)
        self.a, self.b = torch.nn.Linear(width, 4, bias=False), torch.nn.Linear(4, width, bias=False)
        for part in (self.norm, self.base):
            part.requires_grad_(False)

    def forward(self, x, scale=1.0):
        y = self.norm(x)
        return x + scale * torch.nn.functional.dropout(self.base(y) + self.b(self.a(y)), 0.1, self.training)

class Net(torch.nn.Module):
    def __init__(self, width=32, blocks=5):
        super().__init__()
        self.first = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = torch.nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)

def trained(folder, weights, kill=0, refuse=0, files=None, **options):
    """The losses and what was trained, of a run of six steps; killed in step `kill`."""
    with plimsoll.Run(folder, memory_limit="4GiB", seed=3, compute_threads=1) as run:
        torch.manual_seed(2)
        model = Net()
        streamed = plimsoll.stream_frozen(model, files, weights=weights, **options)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        run.track(model=model, optimizer=optimizer)
        batches = [(torch.randn(16, 8), torch.randint(3, (16,))) for _ in range(6)]

        def loss(x, y):
            if refuse and run.steps_made == 3 and run._steps._made[""][0].refusals == 0:
                from plimsoll.core import _torch_gate
                _torch_gate.load().refuse(refuse, 1)
            return torch.nn.functional.cross_entropy(model(x), y)

        losses = []
        for batch in run.steps(batches, progress=False, commit_every_steps=2):
            losses.append(run.step(loss, batch, loss="mean", accumulate=2))
            if kill and run.steps_made + 1 == kill:
                run._life.end_writing()
                os.kill(os.getpid(), 9)
        bits = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        model.eval()
        with torch.no_grad():
            losses.append(float(model(torch.ones(2, 8)).sum()))
        return losses, bits, streamed, run._steps._made[""][0].refusals
'''
exec(MODEL)


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.fixture(scope="module")
def resident(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("resident") / "run", "resident")


# ---- The same bits ----

@pytest.mark.parametrize("options", [{}, {"slots": 3}, {"slots": 99}, {"cache_bytes": "16KiB"}, {"cache_bytes": "1MiB"}])
def test_streamed_weights_give_the_bits_of_resident_ones(tmp_path, resident, options):
    losses, bits, streamed, _ = trained(tmp_path / "run", "streamed", **options)
    assert streamed.streamed and not resident[2].streamed
    assert losses == resident[0] and same(bits, resident[1])
    assert streamed.ring_bytes > 0 and (tmp_path / "run/weights/frozen.safetensors").exists()


def test_weights_that_fit_stay_in_memory_and_those_that_do_not_are_streamed(tmp_path):
    for left, streamed in ((64 * MIB, False), (8 * MIB, True)):
        with plimsoll.Governor("3GiB", foreign_bytes="64MiB") as governor:
            model = Net(width=8, blocks=2)
            model.blocks = torch.nn.ModuleList(Block(600) for _ in range(3))  # 1.4 MB each.
            with governor.reserve(governor.ledger().free_bytes - left):
                assert plimsoll.stream_frozen(model, directory=tmp_path).streamed == streamed


def test_nothing_is_left_of_a_model_that_was_moved_to_where_it_is(tmp_path):
    with plimsoll.Governor("3GiB", foreign_bytes="64MiB"):
        model = Net()
        plimsoll.stream_frozen(model, weights="streamed", directory=tmp_path)
        weights = [weakref.ref(block.base.weight) for block in model.blocks]
        model.to("cpu")
        del model
        gc.collect()
        assert [one() for one in weights] == [None] * len(weights)


def test_a_step_that_memory_refused_is_made_again_with_the_same_bits(tmp_path, resident):
    for refuse in (3, 40, 70):  # Forward; running again in backward.
        losses, bits, _, refusals = trained(tmp_path / str(refuse), "streamed", refuse=refuse)
        assert refusals == 1 and losses == resident[0] and same(bits, resident[1])


@pytest.mark.parametrize("then", ["streamed", "resident"])
def test_killed_and_started_again_it_ends_with_the_same_bits(tmp_path, resident, then):
    program = MODEL + "\ntrained(sys.argv[1], 'streamed', kill=5)"
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "run"], capture_output=True, text=True, timeout=200)
    assert done.returncode == -9, done.stderr
    losses, bits, streamed, _ = trained(tmp_path / "run", then)
    assert streamed.streamed == (then == "streamed")
    assert losses == resident[0][4:] and same(bits, resident[1])
    commit = torch.load(tmp_path / "run/checkpoints/step-000000006/parts.pt", weights_only=True)
    assert commit["parts"]["model"]["blocks.0.base.weight"].dtype == torch.int64  # Its checksum.


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a tiny model of Hugging Face's."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                                      num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def tuned(folder, weights, before=False):
    """Losses and adapters of a few steps of LoRA by peft; peft is first, or stream_frozen()."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    with plimsoll.Governor("3GiB", foreign_bytes="512MiB"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        model.requires_grad_(False)
        streamed = None if before else plimsoll.stream_frozen(model, folder, weights=weights)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, lora)
        streamed = streamed or plimsoll.stream_frozen(model, folder, weights=weights)
        assert streamed.streamed == (weights == "streamed")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        ids, losses = torch.randint(97, (2, 17)), []
        for _ in range(3):
            model.train()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                losses += [loss.item(), model(input_ids=ids, labels=ids).loss.item()]
        answer = model.generate(input_ids=ids[:, :4], max_new_tokens=3, do_sample=False)
        return losses, [*(p.detach().clone() for p in model.parameters() if p.requires_grad), answer]


@pytest.mark.parametrize("before", [False, True])
def test_a_llama_with_adapters_of_peft_trains_and_answers_with_the_same_bits(llama, before):
    one, two = tuned(llama, "resident"), tuned(llama, "streamed", before)
    assert one[0] == two[0] and same(one[1], two[1]) and one[0][-1] < one[0][0]


@pytest.mark.parametrize("weights", ["streamed", "resident"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_on_the_meta_device_comes_from_the_files(llama, dtype, weights):
    """As the docstring loads it; in float32 files of bfloat16 are converted to what from_pretrained(dtype=) gives."""
    transformers = pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    ids = torch.arange(12).reshape(2, 6)
    with plimsoll.Governor("3GiB", foreign_bytes="512MiB"), torch.no_grad():
        config = transformers.AutoConfig.from_pretrained(folder := llama)
        with accelerate.init_empty_weights():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model.requires_grad_(False)
        plimsoll.stream_frozen(model, folder, weights=weights)
        assert model.lm_head.weight.dtype == dtype and model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


class Normed(torch.nn.Module):
    """Batch norms in blocks and before them, and a buffer that is no part of the state."""

    def __init__(self, blocks=3):
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16, affine=False))
                                          for _ in range(blocks))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.scale * x


@pytest.mark.parametrize("weights", ["streamed", "resident"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_running_means_of_a_model_made_empty_come_from_the_files_and_others_stay(governor, tmp_path, weights, dtype):
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(3)
    plain, x = Normed(), torch.randn(64, 8)
    for _ in range(3):
        plain(x)
    plain.eval().requires_grad_(False)
    _weight_files.write_tensors(tmp_path / "frozen.safetensors", plain.state_dict())
    with accelerate.init_empty_weights():
        model = Normed()
    plimsoll.stream_frozen(model.to(dtype).eval().requires_grad_(False), tmp_path / "frozen.safetensors", weights=weights)
    assert int(model.first[1].num_batches_tracked) == 3
    with torch.no_grad():
        assert torch.equal(model(x.to(dtype)), plain.to(dtype)(x.to(dtype)))
    other = Normed().eval().requires_grad_(False)  # It has values, and statistics of its own.
    plimsoll.stream_frozen(other, tmp_path / "frozen.safetensors", weights=weights)
    assert int(other.first[1].num_batches_tracked) == 0 and not other.blocks[0][1].running_mean.any()


@pytest.mark.parametrize("weights", ["streamed", "resident"])
def test_weights_that_transformers_saves_under_other_names_are_found(tmp_path, weights):
    """GPT-NeoX's and Pythia's lm_head is "embed_out" in files."""
    transformers = pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    config = transformers.GPTNeoXConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                                        num_attention_heads=4)
    plain = transformers.GPTNeoXForCausalLM(config).eval()
    plain.save_pretrained(tmp_path)
    assert "embed_out.weight" in _weight_files.places_in(tmp_path)
    ids = torch.arange(12).reshape(2, 6)
    with plimsoll.Governor("3GiB", foreign_bytes="512MiB"), torch.no_grad():
        with accelerate.init_empty_weights():
            model = transformers.AutoModelForCausalLM.from_config(config)
        plimsoll.stream_frozen(model.eval().requires_grad_(False), tmp_path, weights=weights)
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("weights", ["streamed", "resident"])
@pytest.mark.parametrize("kept, wanted", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float64", "float16")])
def test_files_of_another_dtype_are_converted_as_they_are_read(governor, tmp_path, monkeypatch, kept, wanted, weights):
    """Numbers that begin at odd places and are cut into many pieces, whose ends are not the file's pages."""
    monkeypatch.setattr(_weight_files, "_PIECE", 2 * 4096)
    monkeypatch.setattr(_weight_files, "_CONVERTED", 1000)
    torch.manual_seed(4)
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(67, 53)) for _ in range(3)).requires_grad_(False)
    model.blocks.to(getattr(torch, kept))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    _weight_files.write_tensors(file := tmp_path / "m.safetensors", {"a": torch.ones(3, dtype=torch.int8), **values})
    model.blocks.to(getattr(torch, wanted))
    plimsoll.stream_frozen(model, file, weights=weights)
    seen = {}
    for number, block in enumerate(model.blocks):
        block[0].register_forward_hook(lambda part, x, y, number=number: seen.update(
            {f"blocks.{number}.0.{name}": value.clone() for name, value in part._parameters.items()}))
        block(torch.ones(67, dtype=getattr(torch, wanted)))
    assert seen.keys() == values.keys()
    assert all(torch.equal(value, values[name].to(getattr(torch, wanted))) for name, value in seen.items())


LOADED = '''
import sys, torch, plimsoll

def resident(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

with plimsoll.Governor("3GiB", foreign_bytes="64MiB") as governor:
    with torch.device("meta"):
        model = torch.nn.Module()
        model.blocks = torch.nn.ModuleList(torch.nn.Linear(2048, 2048, bias=False) for _ in range(16)).requires_grad_(False)
    torch.nn.functional.linear(torch.ones(1, 2048), torch.ones(2048, 2048))  # What torch keeps from the first on.
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM begins again.
    before = resident("VmRSS")
    plimsoll.stream_frozen(model, sys.argv[1], weights=sys.argv[2])
    with torch.no_grad():
        model.blocks[3](torch.ones(1, 2048))
    print(resident("VmHWM") - before, governor.ledger().pools["tensors"].leased_bytes)
'''


@pytest.mark.parametrize("weights, most", [("resident", 256 + 24), ("streamed", 2 * 16 + 24)])
def test_conversion_at_load_holds_no_second_copy(tmp_path, weights, most):
    """128 MiB of bfloat16 become 256 of float32, which alone are in memory, and leased; streamed, two blocks of them."""
    _weight_files.write_tensors(file := tmp_path / "m.safetensors", {
        f"blocks.{k}.weight": torch.full((2048, 2048), k / 8, dtype=torch.bfloat16) for k in range(16)})
    done = subprocess.run([sys.executable, "-c", LOADED, file, weights], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    peak, leased = map(int, done.stdout.split())
    assert peak <= most * MIB and (leased >= 256 * MIB) == (weights == "resident")


# ---- Inside the limit ----

def test_the_ring_is_leased_and_returned(governor, tmp_path):
    before = governor.ledger().pools["weights"].leased_bytes
    streamed = plimsoll.stream_frozen(model := Net(), weights="streamed", directory=tmp_path)
    assert governor.ledger().pools["weights"].leased_bytes - before == streamed.ring_bytes
    model(torch.ones(1, 8))
    streamed.close()
    assert governor.ledger().pools["weights"].leased_bytes == before
    with pytest.raises(RuntimeError, match="the weights were closed, and the model cannot run any more"):
        model(torch.ones(1, 8))


def test_the_ring_goes_with_the_model_or_with_the_governor(tmp_path):
    for model_first in (True, False):
        with plimsoll.Governor("3GiB") as governor:
            plimsoll.stream_frozen(model := Net(), weights="streamed", directory=tmp_path)  # Nobody keeps what it made.
            gc.collect()
            model(torch.ones(1, 8)).sum().backward()
            if model_first:
                del model
                gc.collect()
                assert governor.ledger().pools["weights"].leased_bytes == 0
        assert not any(one.name == "plimsoll-weights" for one in threading.enumerate())


def test_a_ring_that_does_not_fit_is_refused_with_a_limit(governor, tmp_path):
    with governor.reserve(governor.ledger().free_bytes - MIB), pytest.raises(plimsoll.BudgetExceeded) as caught:
        plimsoll.stream_frozen(Net(), weights="streamed", directory=tmp_path)
    assert str(caught.value).startswith("stream_frozen: 2 slots of 4.4 KiB, the largest block, are refused: ")
    assert caught.value.smallest_limit_bytes > governor.limit_bytes


OVER = MODEL + '''
width, blocks, file = int(sys.argv[2]), int(sys.argv[3]), sys.argv[1]
with plimsoll.Governor(sys.argv[4], foreign_bytes="64MiB") as governor:
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = Net(width, blocks)
    for name, part in model.named_modules():
        if name.split(".")[-1] in ("first", "a", "b", "head"):
            part.to_empty(device="cpu")
            torch.nn.init.normal_(part.weight, std=0.02)
            if part.bias is not None: torch.nn.init.zeros_(part.bias)
    streamed = plimsoll.stream_frozen(model, file)
    assert streamed.streamed
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
    print(streamed.bytes, float(loss))
'''


@pytest.mark.slow
def test_frozen_weights_of_twice_the_limit_train_in_a_cgroup_of_it(tmp_path):
    """768 MiB of weights in 384 MiB."""
    MemoryCgroup.needed()
    limit, width, blocks = 384 * MIB, 2048, 48
    names = {"norm.weight": (width,), "norm.bias": (width,), "base.weight": (width, width), "base.bias": (width,)}
    torch.manual_seed(1)
    for shard in range(4):
        _weight_files.write_tensors(tmp_path / f"model-{shard}.safetensors", {
            f"blocks.{block}.{name}": torch.randn(shape) * 0.02 for block in range(shard, blocks, 4)
            for name, shape in names.items()})
    with MemoryCgroup(limit) as group:
        run = group.run([sys.executable, "-c", OVER, tmp_path, str(width), str(blocks), str(limit)], timeout=400)
    assert run.returncode == 0 and run.oom_kills == 0, run.stderr
    assert int(run.stdout.split()[0]) >= 2 * limit and run.unmapped_peak_bytes <= limit


# LoRA of a Llama as users of transformers and peft write it; prints its steps, and at the end what it came to.
TUNED = '''
import hashlib, json, sys
import accelerate, peft, torch, transformers, plimsoll

folder, files, weights, limit = sys.argv[1:]
with plimsoll.Run(folder, memory_limit=limit, seed=5, compute_threads=1) as run:
    config = transformers.AutoConfig.from_pretrained(files)
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False)
    frozen = plimsoll.stream_frozen(model, files, weights=weights)
    head = model.lm_head.weight
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    model.train()

    def loss(ids):
        hidden = model.base_model.model.model(input_ids=ids[None], use_cache=False).last_hidden_state
        return plimsoll.linear_cross_entropy(hidden[0, :-1], head, ids[1:], chunk=16)

    data = torch.randint(config.vocab_size, (24, 32), generator=torch.Generator().manual_seed(6))
    for batch in run.steps(list(data), progress=False, commit_every_steps=2):
        last = run.step(loss, batch)
        print(run.steps_made + 1, flush=True)
    digest = hashlib.sha256()
    for one in model.parameters():
        if one.requires_grad:
            digest.update(one.detach().numpy().tobytes())
    print(json.dumps({"loss": last, "adapters": digest.hexdigest(), "streamed": frozen.streamed,
                      "bytes": frozen.bytes, "stalled": frozen.stall_seconds}))
'''


@pytest.fixture(scope="module")
def large_llama(tmp_path_factory):
    """A folder as of a model hub: 1.6 GiB of bfloat16 in four files."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=2000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=56, num_attention_heads=16,
        num_key_value_heads=4, tie_word_embeddings=True, dtype="bfloat16")
    config.save_pretrained(folder := tmp_path_factory.mktemp("large"))
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in transformers.LlamaForCausalLM(config).named_parameters()}
    generator, names = torch.Generator().manual_seed(1), list(shapes)
    for shard in range(4):
        _weight_files.write_tensors(folder / f"model-{shard}.safetensors", {
            name: torch.ones(shapes[name], dtype=torch.bfloat16) if len(shapes[name]) == 1 else
            torch.empty(shapes[name], dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for name in names[shard::4]})
    return folder


@pytest.mark.slow
def test_a_model_of_twice_the_limit_killed_ten_times_in_a_cgroup_ends_in_the_bits_of_the_resident_run(large_llama, tmp_path):
    MemoryCgroup.needed()
    pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    limit, choose, killed, before = 768 * MIB, random.Random(3), 0, 0

    def command(folder, weights, limit):
        return [sys.executable, "-c", TUNED, folder, large_llama, weights, str(limit)]

    resident = subprocess.run(command(tmp_path / "calm", "resident", 6 << 30), capture_output=True, text=True, timeout=3600)
    assert resident.returncode == 0, resident.stderr[-3000:]
    expected = json.loads(resident.stdout.splitlines()[-1])
    with MemoryCgroup(limit) as group:
        while killed < 10:
            child = group.start(command(tmp_path / "run", "auto", limit), stdout=subprocess.PIPE, text=True)
            goal = before + choose.randint(1, 3)  # So that lives get on by two steps, and some by none.
            for line in child.stdout:
                if int(line) >= goal:
                    time.sleep(choose.random())
                    child.kill()
                    break
            else:
                pytest.fail(f"it ended with {child.wait()} before it was killed {killed + 1} times")
            child.stdout.close()
            assert child.wait() == -signal.SIGKILL
            killed, before = killed + 1, goal // 2 * 2
        last = group.run(command(tmp_path / "run", "auto", limit), timeout=3600)
    assert last.returncode == 0 and last.oom_kills == 0, last.stderr[-3000:]
    assert last.last_json["streamed"] and not expected["streamed"] and last.last_json["bytes"] >= 2 * limit
    assert (last.last_json["loss"], last.last_json["adapters"]) == (expected["loss"], expected["adapters"])
    assert last.unmapped_peak_bytes <= limit


# ---- Damage, and other errors ----

def flipped(path, name):
    place = _weight_files.places_in(path)[name]
    with open(path, "r+b") as file:
        file.seek(place.begin + place.size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_a_bit_that_flips_in_the_file_ends_the_step_with_its_name(governor, tmp_path):
    plimsoll.stream_frozen(model := Net(), weights="streamed", directory=tmp_path)
    model(torch.ones(1, 8)).sum().backward()
    flipped(file := tmp_path / "frozen.safetensors", "blocks.3.base.weight")
    with pytest.raises(plimsoll.CorruptError) as caught:
        model(torch.ones(1, 8)).sum().backward()
    assert str(caught.value).startswith(f"{file}: blocks.3.base.weight is not what training began with: its checksum is ")
    assert str(caught.value).endswith(". Put the file back, or train anew")


def test_a_checksum_is_made_once_and_again_when_the_file_has_changed(governor, tmp_path, monkeypatch):
    made, core = [], _weight_files._core
    monkeypatch.setattr(_weight_files, "_core", types.SimpleNamespace(
        crc32c=lambda data, before=0: made.append(len(data)) or core.crc32c(data, before)))
    plimsoll.stream_frozen(model := Net(), weights="streamed", directory=tmp_path)
    file = tmp_path / "frozen.safetensors"
    os.utime(file, (1, 1))  # Of a file written just now nobody knows whether it will be again in the same tick.
    for _ in range(2):  # What was read ahead before is summed once more.
        model(torch.ones(1, 8)).sum().backward()
    assert sum(made) >= sum(place.size for place in _weight_files.places_in(file).values())
    made.clear()
    for _ in range(3):
        model(torch.ones(1, 8)).sum().backward()
    assert not made
    flipped(file, "blocks.3.base.weight")
    with pytest.raises(plimsoll.CorruptError, match="blocks.3.base.weight is not what training began with"):
        model(torch.ones(1, 8)).sum().backward()


@pytest.mark.parametrize("header", [0, 8])  # Bytes that move all tensors off multiples of 64.
@pytest.mark.parametrize("piece", [8192, 1 << 20])
def test_tensors_of_any_size_and_place_are_read_beside_one_another(governor, tmp_path, monkeypatch, piece, header):
    """In place, or copied where the file has them at another address modulo 64 than kernels are to see."""
    monkeypatch.setattr(_weight_files, "_IN_PLACE", 1000)
    monkeypatch.setattr(_weight_files, "_PIECE", piece)
    dice = random.Random(3)
    wanted = {f"{k:02}": torch.frombuffer(bytearray(dice.randbytes(dice.choice([2, 64, 4096, 64 * dice.randint(1, 700), 9998]))),
                                          dtype=torch.uint8) for k in range(40)}
    _weight_files.write_tensors(file := tmp_path / "m.safetensors", wanted)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file.write_bytes((length + header).to_bytes(8, "little") + data[8:8 + length] + b" " * header + data[8 + length:])
    places = list(_weight_files.places_in(file).values())
    assert header or any(place.in_place for place in places)
    ring = WeightRing(blocks := [places[k:k + 8] for k in range(0, 40, 8)], 2, governor)
    for block in (0, 1, 2, 3, 4, 3, 2, 0):
        for place, made in zip(blocks[block], ring.use(block, []), strict=True):
            assert torch.equal(made, wanted[place.name]) and made.data_ptr() % 64 == 0
        del made
    ring.close()


@pytest.mark.parametrize("weights", ["streamed", "resident"])
def test_a_run_does_not_go_on_with_other_weights(tmp_path, weights):
    files = tmp_path / "model.safetensors"
    torch.manual_seed(2)
    _weight_files.write_tensors(files, {name: value for name, value in Net().state_dict().items() if "base" in name
                                        or "norm" in name})
    trained(tmp_path / "run", "streamed", files=files)
    flipped(files, "blocks.4.base.bias")
    with pytest.raises(plimsoll.CorruptError, match="blocks.4.base.bias is not what training began with"):
        trained(tmp_path / "run", weights, files=files)


def test_a_file_that_was_cut_off_is_an_error(governor, tmp_path):
    plimsoll.stream_frozen(Net(), weights="streamed", directory=tmp_path)
    file = tmp_path / "frozen.safetensors"
    os.truncate(file, file.stat().st_size - 8)
    with pytest.raises(plimsoll.CorruptError, match="was cut off: .* ends at byte"):
        plimsoll.stream_frozen(Net(), file)
    file.write_bytes(b"\0\1\2")
    with pytest.raises(plimsoll.CorruptError, match="is no safetensors file, or was cut off"):
        plimsoll.stream_frozen(Net(), file)


def test_outside_of_its_block_a_weight_has_a_shape_and_no_values(governor, tmp_path):
    plimsoll.stream_frozen(model := Net(), weights="streamed", directory=tmp_path)
    weight = model.blocks[1].base.weight
    assert weight.shape == (32, 32) and weight.dtype == torch.float32 and weight.device.type == "cpu"
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Net().parameters())
    said = ("blocks.1.base.weight is on disk (plimsoll.stream_frozen) and in memory while its block runs alone: {} asked "
            "for its values outside")
    for asks, name in ((lambda: weight.sum(), "sum"), (lambda: weight.data, "data"), (lambda: weight + 1, "add"),
                       (lambda: torch.ones(32) @ weight, "matmul"), (lambda: model.half(), "half")):
        with pytest.raises(RuntimeError) as caught:
            asks()
        assert str(caught.value).replace("blocks.0.norm", "blocks.1.base") == said.format(name)
    with pytest.raises(RuntimeError, match="a model whose weights stream cannot be copied"):
        copy.deepcopy(model)
    assert model.to("cpu") is model and plimsoll.adopt(model) >= 0
    assert repr(weight) == "<blocks.1.base.weight, on disk: float32 [32, 32]>"


def test_weights_that_are_kept_are_not_read_over(governor, tmp_path):
    """A hook of the user's keeps the weights of two blocks: no slot is left for a third."""
    plimsoll.stream_frozen(model := Net(), weights="streamed", directory=tmp_path)
    kept = []
    for block in model.blocks[:2]:
        block.base.register_forward_hook(lambda part, _, __: kept.append((part.weight, part.weight.detach().clone())))
    with torch.no_grad(), pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 8))
    assert "all 2 slots are in use, and none is left for block 2" in str(caught.value)
    assert len(kept) == 2 and all(torch.equal(one, copied) for one, copied in kept)
    kept.clear()
    del caught


def test_a_slot_that_another_thread_is_about_to_let_go_is_waited_for(governor, tmp_path, monkeypatch):
    """As where that thread's garbage collection holds the last of its weights, and a second one does nothing."""
    plimsoll.stream_frozen(model := Net(), weights="streamed", directory=tmp_path)
    kept = []
    hooks = [block.base.register_forward_hook(lambda part, _, __: kept.append(part.weight)) for block in model.blocks[:2]]
    monkeypatch.setattr(gc, "collect", lambda: 0)
    letting_go = threading.Timer(0.3, kept.clear)
    letting_go.start()
    with torch.no_grad():
        model(torch.ones(1, 8))
    letting_go.join()
    assert len(hooks) == 2 and not kept


def test_blocks_may_run_in_any_order(governor, tmp_path):
    torch.manual_seed(1)
    model = Net().eval()
    x = torch.randn(2, 32)
    expected = [block(x) for block in model.blocks]
    plimsoll.stream_frozen(model, weights="streamed", directory=tmp_path)
    for k in (4, 0, 3, 3, 1, 4, 2, 0):
        assert torch.equal(model.blocks[k](x), expected[k])


def test_a_forked_process_lets_weights_go_while_the_parent_reads(governor, tmp_path):
    torch.manual_seed(1)
    model = Net().requires_grad_(False)
    streamed = plimsoll.stream_frozen(model, weights="streamed", directory=tmp_path)
    held, done = threading.Event(), threading.Event()

    def reads():
        with streamed._ring._changed:
            held.set()
            done.wait()

    weights = streamed._ring.use(0, [1])
    thread = threading.Thread(target=reads)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # Ends it if it waits.
        del weights
        gc.collect()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert status == 0


def test_another_process_may_stream_a_model_from_the_same_directory(governor, tmp_path, monkeypatch):
    """Ranks, and programs of one folder. Its file takes the name before this one's reader comes to it."""
    torch.manual_seed(1)
    model = Net().requires_grad_(False).eval()
    wanted = model(x := torch.ones(2, 8))

    def ring(*given):
        assert [one.name for one in tmp_path.iterdir()] == ["frozen.safetensors"]
        monkeypatch.undo()
        _weight_files.write_tensors(tmp_path / "frozen.safetensors", others)
        return WeightRing(*given)

    others = {name: torch.zeros_like(value) for name, value in model.state_dict().items() if "blocks" in name}
    monkeypatch.setattr("plimsoll.training._streamed.WeightRing", ring)
    plimsoll.stream_frozen(model, weights="streamed", directory=tmp_path)
    assert torch.equal(model(x), wanted)


def test_a_forked_process_is_told_and_the_model_goes_on(governor, tmp_path):
    plimsoll.stream_frozen(model := Net(), weights="streamed", directory=tmp_path)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model(torch.ones(1, 8))
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).decode().startswith("stream_frozen: a forked process has no streamed weights: ")
    os.close(read), os.close(write)
    model(torch.ones(1, 8)).sum().backward()


def test_a_run_whose_loader_has_workers_streams(tmp_path):
    with plimsoll.Run(tmp_path / "run", memory_limit="3GiB", foreign_bytes="512MiB", compute_threads=1) as run:
        model = Net()
        plimsoll.stream_frozen(model, weights="streamed")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        run.track(model=model, optimizer=optimizer)
        data = run.loader([torch.ones(8) * k for k in range(8)], batch_size=2, workers=2)
        steps = [run.step(lambda x: model(x).square().mean(), batch)
                 for batch in run.steps(data, progress=False, largest=torch.ones(2, 8))]
    assert len(steps) == 4


def test_a_state_dict_with_values_is_refused(governor, tmp_path):
    values = Net().state_dict()
    plimsoll.stream_frozen(model := Net(), weights="streamed", directory=tmp_path)
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r"blocks.0.norm.weight stays on disk \(stream_frozen\): its values are not"):
        model.load_state_dict(values)


def meta():
    with torch.device("meta"):
        return Net()


@pytest.mark.parametrize("make, options, text", [
    (Net, {"weights": "disk"}, "weights: 'disk' is none of 'auto', 'resident', 'streamed'"),
    (Net, {"slots": 1}, "slots: 1; it is 2 or more: one block runs, and the next one is read"),
    (lambda: torch.nn.Linear(2, 2), {}, "model: it has no torch.nn.ModuleList of two or more modules of one type with "
                                        "parameters that require no gradient: model.requires_grad_(False) freezes all"),
    (meta, {}, "model: first.weight is on the meta device and has no values: name its files=…"),
    (meta, {"files": "here"}, "model: first.weight is on the meta device and has no values: it is trained, so make it on "
                              "the CPU"),
    (Net, {"files": "other"}, "files: none has blocks.0.norm.weight, a frozen parameter of the model"),
    (Net, {"files": "whole"}, "files: blocks.0.norm.weight of whole is int8 [32], and the model's is float32 [32]: "
                              "these are the files of another model"),
    (Net, {"files": "short"}, "files: blocks.0.norm.weight of short is float32 [31], and the model's is float32 [32]: "
                              "these are the files of another model"),
])
def test_errors_name_the_argument_and_the_parameter(governor, tmp_path, monkeypatch, make, options, text):
    monkeypatch.chdir(tmp_path)
    _weight_files.write_tensors(pathlib.Path("other"), {"x": torch.ones(2)})
    _weight_files.write_tensors(pathlib.Path("whole"), {"blocks.0.norm.weight": torch.ones(32, dtype=torch.int8)})
    _weight_files.write_tensors(pathlib.Path("short"), {"blocks.0.norm.weight": torch.ones(31)})
    with pytest.raises(ValueError) as caught:
        plimsoll.stream_frozen(make(), **options)
    assert str(caught.value) == text


def test_without_a_governor_it_says_what_to_make():
    with pytest.raises(ValueError, match="there is no Governor that its memory is leased from: make one first, or a Run"):
        plimsoll.stream_frozen(Net())
