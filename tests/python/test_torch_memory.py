# SPDX-License-Identifier: Apache-2.0
"""Tensors that others made, hold or share: adopted models, DataLoader workers, saved files, shared memory."""
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import plimsoll  # torch first, as a user's program would.
from plimsoll.core import _torch_gate

extension = _torch_gate.load_if_torch_imported()
if extension is None:
    pytest.skip("plimsoll was built without torch", allow_module_level=True)

MIB = 1 << 20


def run_python(code: str) -> str:
    """What a process of its own prints: its baseline is its own."""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=300,
                          check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


TRAIN = """
import sys
import torch
import plimsoll
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.BatchNorm1d(2048), torch.nn.Tanh(),
                            torch.nn.Linear(2048, 1024), torch.nn.Linear(1024, 1024))
model[4].weight = torch.nn.Parameter(model[3].weight.detach()[:, :1024])  # A view of another's bytes.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randn(64, 1024)
def step():
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
step()
"""


MAPPED = """
import time, torch, transformers, plimsoll
config = transformers.LlamaConfig(vocab_size=40_000, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=4, dtype="bfloat16")
transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(FOLDER)
def loaded():
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
    for parameter in model.parameters():
        parameter.view(torch.int16).max()  # Every page of it is there.
    return model
def line(governor):
    return [one.split(maxsplit=1)[1] for one in str(governor.ledger()).splitlines() if one.startswith("mapped")]
model = loaded() if BEFORE else None
with plimsoll.Governor("3GiB", foreign_bytes="512MiB") as governor:
    model = model or loaded()
    size = sum(p.nbytes for p in model.parameters())
    until = time.monotonic() + 60
    while not line(governor) and time.monotonic() < until:
        governor.step_boundary()
        time.sleep(0.05)
    mapped = governor.ledger().measured.tree.mapped_bytes
    assert size <= mapped <= size + (1 << 20), (size, mapped)
    assert line(governor) == [plimsoll._core.format_bytes(mapped)]
    assert (governor.ledger().measured.unexplained_bytes >= size) == (not BEFORE)
    plimsoll.adopt(model)
    while line(governor) and time.monotonic() < until:
        governor.step_boundary()
        time.sleep(0.05)
    assert not line(governor)
    assert governor.ledger().pools["tensors"].leased_bytes >= size
"""


@pytest.mark.parametrize("before", [True, False])
def test_weights_that_transformers_maps_are_in_the_ledger(before, tmp_path):
    """Made before the governor they are of its baseline, afterwards without a lease; adopted, they are leased."""
    pytest.importorskip("transformers")
    run_python(MAPPED.replace("FOLDER", repr(str(tmp_path))).replace("BEFORE", str(before)))


def test_an_adopted_model_is_leased_and_leaves_the_baseline():
    out = run_python(TRAIN + """
from plimsoll import _torch
with plimsoll.Governor("4GiB") as governor:
    before = governor.ledger()
    moved = plimsoll.adopt(model, optimizer)
    after = governor.ledger()
    held = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
    assert all(_torch.owns(t.untyped_storage().data_ptr()) for t in [*held, *model.buffers()])
    assert model[4].weight.untyped_storage().data_ptr() == model[3].weight.untyped_storage().data_ptr()
    assert model[4].weight.stride() == (2048, 1) and model[4].weight.grad is not None
    assert all(p in optimizer.state for p in model.parameters())
    distinct = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in [*held, *model.buffers()]}
    assert moved == sum(distinct.values()) > 60 << 20, moved
    leased = after.pools["tensors"].leased_bytes - before.pools["tensors"].leased_bytes
    assert moved <= leased <= moved * 1.1 + (4 << 20), (moved, leased)
    fell = before.baseline_bytes - after.baseline_bytes
    assert 0.9 * moved <= fell <= moved, (moved, fell)
    assert plimsoll.adopt(model, optimizer) == 0
    assert governor.ledger().baseline_bytes == after.baseline_bytes
    print(moved, fell)
""")
    assert len(out.split()) == 2


def test_conjugate_and_negative_views_are_adopted_with_their_values():
    waves = torch.randn(4, dtype=torch.complex64)
    views = {"conjugate": waves.conj(), "negative": torch.randn(4, dtype=torch.complex64).conj().imag, "plain": waves}
    before = {name: view.clone() for name, view in views.items()}
    with plimsoll.Governor("4GiB"):
        assert plimsoll.adopt(views) == 2 * waves.nbytes
        assert all(torch.equal(view, before[name]) for name, view in views.items())
        waves.zero_()
        assert not views["conjugate"].any()


def test_an_adopted_model_trains_into_the_same_bits():
    digest = """
step(); step()
import hashlib
print(hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())).hexdigest())
"""
    plain = run_python(TRAIN + "governor = plimsoll.Governor('2GiB')\n" + digest)
    adopted = run_python(TRAIN + "governor = plimsoll.Governor('2GiB')\n"
                         "assert plimsoll.adopt({'m': [model], 'o': optimizer}, data) > 0\n" + digest)
    assert plain == adopted


def test_what_does_not_fit_is_refused_and_the_model_still_works():
    out = run_python(TRAIN + """
parts = [torch.ones(24 << 20) for _ in range(6)]            # 96 MiB each.
resident = plimsoll._core.resident().total
with plimsoll.Governor(f"{(resident >> 20) + 340}MiB", foreign_bytes="128MiB") as governor:
    room = governor.reserve(governor.ledger().free_bytes - (60 << 20))  # Not even one of them fits.
    small = torch.ones(1 << 20)
    try:
        plimsoll.adopt(parts)
    except plimsoll.BudgetExceeded as error:
        assert "0 bytes moved" in str(error), error
    else:
        raise SystemExit("nothing was refused")
    room.close()
    before = governor.ledger().baseline_bytes
    assert plimsoll.adopt(parts) == 6 * 96 << 20             # What goes makes room for what comes.
    assert governor.ledger().baseline_bytes < before - (500 << 20)
    assert all(float(part.sum()) == 24 << 20 for part in parts)
    step()
    print("done")
""")
    assert out.strip() == "done"


def test_r33_what_others_see_is_left_alone(tmp_path):
    shared, sparse = torch.ones(1000).share_memory_(), torch.eye(8).to_sparse()
    meta, empty = torch.ones(8, device="meta"), torch.empty(0)
    address = shared.data_ptr()
    plain = torch.ones(5000)
    with plimsoll.Governor("4GiB"):
        assert plimsoll.adopt([shared, sparse, meta, empty]) == 0
        assert shared.is_shared() and shared.data_ptr() == address
        born_inside = torch.ones(100)
        assert plimsoll.adopt(born_inside, {"a": [plain, plain[10:20]]}) == 20_000
        assert extension.owns(plain.data_ptr()) and plain.sum() == 5000
        for part, text in ((3, "int is no module"), ("name", "str is no module")):
            with pytest.raises(ValueError, match=text):
                plimsoll.adopt(part)
    with pytest.raises(ValueError, match="no governor leases tensors"):
        plimsoll.adopt(plain)


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        before = extension.arena_stats()["leased_bytes"]
        made = torch.full((256, 256), float(index)) ** 2
        after = extension.arena_stats()["leased_bytes"]
        return made, torch.tensor([extension.owns(made.data_ptr()), after != before])


@pytest.mark.parametrize("persistent", [False, True])
def test_r33_fork_with_dataloader_workers(persistent):
    with plimsoll.Governor("4GiB") as governor:
        model = torch.nn.Linear(256, 256)
        before = governor.ledger().pools["tensors"].leased_bytes
        assert Squares()[0][1][0]  # Here tensors are the arena's …
        loader = torch.utils.data.DataLoader(Squares(), batch_size=8, num_workers=2, persistent_workers=persistent,
                                             multiprocessing_context="fork")
        for _ in range(2):
            seen = 0
            for batch, leased in loader:
                assert not leased.any()  # … and in a worker they are not, and lease nothing.
                assert batch.is_shared()
                assert torch.equal(batch[:, 0, 0], torch.arange(seen, seen + 8.0) ** 2)
                model(batch).sum().backward()
                seen += 8
            assert seen == 64
        del loader, batch, leased
        model.zero_grad(set_to_none=True)
        governor.clean_up()
        assert governor.ledger().pools["tensors"].leased_bytes <= before + MIB
        assert torch.ones(3).sum() == 3 and governor.arena_attached


def test_torch_save_and_load_plain_and_mapped(tmp_path):
    path = tmp_path / "state.pt"
    with plimsoll.Governor("4GiB") as governor:
        model = torch.nn.Linear(2048, 1024)
        torch.save(model.state_dict(), path)
        held = lambda: governor.ledger().pools["tensors"].leased_bytes  # noqa: E731
        begin = held()
        plain = torch.load(path, weights_only=True)
        assert extension.owns(plain["weight"].data_ptr()) and held() >= begin + 8 * MIB
        begin = held()
        mapped = torch.load(path, weights_only=True, mmap=True)
        assert not extension.owns(mapped["weight"].data_ptr()) and held() < begin + MIB
        for name, tensor in model.state_dict().items():
            assert torch.equal(plain[name], tensor) and torch.equal(mapped[name], tensor)
        other = torch.nn.Linear(2048, 1024)
        other.load_state_dict(mapped, assign=True)
        assert plimsoll.adopt(other) == 2048 * 1024 * 4 + 1024 * 4
        assert extension.owns(other.weight.data_ptr()) and torch.equal(other.weight, model.weight)
    assert torch.equal(plain["weight"], mapped["weight"])  # All of them outlive the governor.


def test_shared_and_pinned_tensors():
    with plimsoll.Governor("4GiB") as governor:
        tensor = torch.arange(4.0 * MIB)
        begin = governor.ledger().pools["tensors"].leased_bytes
        tensor.share_memory_()  # Its bytes move to a file in /dev/shm; the arena's are free again.
        assert tensor.is_shared() and not extension.owns(tensor.data_ptr())
        governor.clean_up()
        assert governor.ledger().pools["tensors"].leased_bytes <= begin - 16 * MIB
        assert tensor[-1] == 4 * MIB - 1
        child = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=True)
        assert child.stdout == b"1\n"
        if torch.cuda.is_available():
            pinned = torch.ones(1000).pin_memory()
            assert pinned.is_pinned() and not extension.owns(pinned.data_ptr())
            assert plimsoll.adopt(pinned) == 0 and pinned.is_pinned()
        else:
            with pytest.raises(RuntimeError):
                torch.ones(1000).pin_memory()
        assert torch.ones(1000).sum() == 1000
