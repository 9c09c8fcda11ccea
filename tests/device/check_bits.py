# SPDX-License-Identifier: Apache-2.0
"""The simulated device computes the bits of the CPU, and refuses what a device refuses."""
import copy
import io
import signal
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests import device

DEV = "sim"


def on_both(make):
    """make(where) -> tensors: the same bits on the CPU and on the device, where they also are."""
    there = []
    for where in ("cpu", DEV):
        torch.manual_seed(0)
        made = make(where)
        assert {one.device.type for one in made} == {where}
        there.append([one.detach().cpu() for one in made])
    assert len(there[0]) == len(there[1])
    for number, (a, b) in enumerate(zip(*there)):
        assert torch.equal(a, b), number
    return there[0]


def net():
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4))


def rows(where):
    """A batch. What is drawn after it is the same on both."""
    made = torch.randn(64, 16).to(where), torch.randint(0, 4, (64,)).to(where)
    torch.manual_seed(1)
    return made


def values_of(*parts):
    """Parameters, buffers, gradients, and states of optimizers that have more than one number."""
    found = []
    for part in parts:
        if isinstance(part, torch.optim.Optimizer):
            found += [one for state in part.state.values() for one in state.values() if one.dim() > 0]
        else:
            found += [*part.state_dict().values(), *(one.grad for one in part.parameters() if one.grad is not None)]
    return found


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_adamw(options):
    def make(where):
        model, (x, y) = net().to(where), rows(where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            optimizer.step()
        return values_of(model, optimizer)

    on_both(make)


@pytest.mark.parametrize(("kind", "options"), [
    ("LSTM", {"num_layers": 2, "dropout": 0.3}), ("LSTM", {"bidirectional": True, "batch_first": True}), ("LSTM", {"bias": False}),
    ("GRU", {"num_layers": 2, "dropout": 0.3}), ("GRU", {"bidirectional": True, "batch_first": True}), ("RNN", {"num_layers": 2, "dropout": 0.3}), ("RNN", {"nonlinearity": "relu"})])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_modules(kind, options, packed):
    def make(where):
        model = getattr(torch.nn, kind)(6, 8, **options).to(where)
        x = torch.randn(5, 3, 6).to(where).requires_grad_()
        given = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 2] if not options.get("batch_first") else [3, 3, 3, 2, 1]),
                                                        batch_first=options.get("batch_first", False)) if packed else x
        torch.manual_seed(1)
        out, hidden = model(given)
        out = out.data if packed else out
        every = [out, *(hidden if isinstance(hidden, tuple) else [hidden])]
        sum(one.square().sum() for one in every).backward()
        return [*every, x.grad, *values_of(model)]

    on_both(make)


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_recurrent_cells(kind):
    def make(where):
        cell, x = getattr(torch.nn, kind)(6, 8).to(where), torch.randn(3, 6).to(where)
        state = cell(x, cell(x))
        state = cell(x, (state[0], state[0]) if isinstance(state, tuple) else state)  # One tensor twice has one gradient.
        every = list(state) if isinstance(state, tuple) else [state]
        sum(one.square().sum() for one in every).backward()
        return [*every, *values_of(cell)]

    on_both(make)


def test_recurrent_modules_without_gradients():
    def make(where):
        model, x = torch.nn.LSTM(6, 8, num_layers=2).to(where).eval(), torch.randn(5, 3, 6).to(where)
        model.weight_ih_l0.requires_grad_(False)
        out = model(x)[0]
        out.sum().backward()
        with torch.no_grad():
            unseen = model(x)[0]
        with torch.inference_mode():
            return [out, unseen, model(x)[0].clone(), *values_of(model)]

    on_both(make)


def test_recurrent_results_are_kept_for_backward():
    """The graph has them when the program has let go of all but one, and new tensors where they could be."""
    def make(where):
        model, x = torch.nn.LSTM(6, 8, num_layers=2).to(where), torch.randn(5, 3, 6).to(where)
        hidden = model(x)[1][0].sum()
        others = [torch.full((5, 3, 8), 9.0, device=where) for _ in range(20)]
        hidden.backward()
        return [*others, *values_of(model)]

    on_both(make)
    model, x = torch.nn.LSTM(6, 8).to(DEV), torch.randn(5, 3, 6, device=DEV)
    out = model(x)[0]
    with torch.no_grad():
        model.weight_hh_l0.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def small(kind):
    transformers = pytest.importorskip("transformers")
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_language_models(kind):
    def make(where):
        model, ids = small(kind).to(where).train(), torch.randint(2, 120, (2, 24)).to(where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        torch.manual_seed(4)  # GPT-2 has dropout.
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
            losses[-1].backward()
            optimizer.step()
        return [*losses, *values_of(model, optimizer)]

    on_both(make)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_a_scaler_that_skips_steps(dtype):
    def make(where):
        model, (x, y) = net().to(where), rows(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(where, init_scale=2.0**30)
        losses = []
        for _ in range(20):
            with torch.autocast(where, dtype=dtype):
                hidden = model[0](x)
                out = model[4](F.gelu(hidden))
            assert out.dtype == hidden.dtype == dtype
            losses.append(F.cross_entropy(out.float(), y))
            optimizer.zero_grad()
            scaler.scale(losses[-1]).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return [*losses, scaler._scale, *values_of(model)]

    losses = on_both(make)
    assert losses[19] < losses[0]


def test_checkpoint_with_dropout():
    def make(where):
        model, x = net().to(where), rows(where)[0].requires_grad_()
        out = checkpoint(model, x, use_reentrant=False)
        out.square().sum().backward()
        return [out, x.grad, *values_of(model)]

    on_both(make)


def test_random_numbers_are_the_devices_own():
    torch.manual_seed(3)
    state, cpu = device.get_rng_state(), torch.get_rng_state()
    drawn = torch.randn(5, device=DEV), F.dropout(torch.ones(100, device=DEV)), torch.randperm(9, device=DEV)
    assert torch.equal(torch.get_rng_state(), cpu)
    device.set_rng_state(state)
    again = torch.randn(5, device=DEV), F.dropout(torch.ones(100, device=DEV)), torch.randperm(9, device=DEV)
    assert all(torch.equal(a, b) for a, b in zip(drawn, again))
    one = torch.Generator(DEV).manual_seed(1)
    first = torch.rand(5, device=DEV, generator=one)
    assert torch.equal(first, torch.rand(5, device=DEV, generator=one.manual_seed(1)))


def test_saved_and_loaded_anywhere():
    model = net().to(DEV)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 16, device=DEV)).sum().backward()
    optimizer.step()
    kept = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
    for where, there in ((None, DEV), ("cpu", "cpu"), (DEV, DEV), ("sim:0", DEV)):
        kept.seek(0)
        state = torch.load(kept, map_location=where, weights_only=True)
        weight = state["model"]["0.weight"]
        assert weight.device.type == there and torch.equal(weight.cpu(), model[0].weight.cpu())
        torch.optim.AdamW(net().to(DEV).parameters()).load_state_dict(state["optimizer"])
    other = copy.deepcopy(model)[0].weight
    assert other.device.type == DEV and other.data_ptr() != model[0].weight.data_ptr()
    first = model[0].weight
    assert model.cpu()[0].weight is first and model.to(DEV)[0].weight is first


def test_operators():
    ids = torch.randint(0, 10, (4, 6))

    def make(where):
        x, j = torch.randn(10, 6).to(where), ids.to(where)
        images, kernel = torch.randn(2, 3, 9, 9).to(where), torch.randn(4, 3, 3, 3).to(where)
        q = torch.randn(3, 2, 4, 16, 8).to(where)
        out = torch.empty(0, device=where)
        torch.add(x, 1, out=out)
        resized = torch.empty(0, device=where).resize_(5).zero_()
        several = [torch.ones(3, device=where), torch.ones(2, device=where)]
        torch._foreach_mul_(several, 3.0)
        moved = torch.zeros(4, 4, device=where)
        moved[1], moved[:, 2] = 3, torch.arange(4.0, device=where)
        complex_ = torch.ones(3, dtype=torch.complex64, device=where) * 1j
        return [x.t() @ x, x[1:, ::2].contiguous() + 1, *x.chunk(3), torch.cat([x, x.relu()]), x[j], F.embedding(j, x), x[torch.tensor([1, 3])],
                torch.zeros(10, 6, device=where).scatter_add(0, j, x[:4]), x.gather(0, j), F.conv2d(images, kernel, padding=1),
                F.max_pool2d(images, 2), F.interpolate(images, scale_factor=2, mode="bilinear"),
                F.scaled_dot_product_attention(*q, is_causal=True), F.rms_norm(x, (6,)), x.topk(3)[0], x.cumsum(0), x[x > 0], (x > 0).nonzero(),
                torch.fft.rfft(x).abs(), x.bfloat16().float(), x.var(0), out, resized, *several, moved.t_(), complex_.conj().imag,
                torch.linalg.qr(x)[1]]

    on_both(make)


def test_tensors_of_two_devices_do_not_meet():
    x = torch.ones(3, device=DEV)
    with pytest.raises(RuntimeError, match="two devices, sim:0 and cpu"):
        x + torch.ones(3)
    with pytest.raises(TypeError):
        x.numpy()
    device.set_device_count(2)
    try:
        other = x.to("sim:1")
        assert other.device.index == 1 and torch.equal((other + 1).cpu(), (x + 1).cpu())
    finally:
        device.set_device_count(1)


def test_a_host_that_reads_a_device_address_dies_at_once():
    program = ("import ctypes, torch; from tests import device; x = torch.ones(4, device='sim'); print(x.sum().item(), flush=True); "
               "ctypes.c_float.from_address(x.data_ptr()).value")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.stdout.strip(), done.returncode) == ("4.0", -signal.SIGSEGV), done.stderr[-500:]
