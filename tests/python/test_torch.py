# SPDX-License-Identifier: Apache-2.0
"""plimsoll beside torch: tensors without conversion, leases of tensors, notebook habits."""
import subprocess
import sys
import textwrap

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import plimsoll
from plimsoll.core import _torch_gate

extension = _torch_gate.load_if_torch_imported()  # Raises if it is there and does not load.
if extension is None:
    pytest.skip("plimsoll was built without torch", allow_module_level=True)

MIB = 1 << 20


def tensors_leased(governor) -> int:
    return governor.ledger().pools["tensors"].leased_bytes


def test_rows_are_a_leaf_over_the_same_bytes(table):
    rows = table.gather([3, 4, 3])
    assert rows.tensor.is_leaf and rows.tensor.requires_grad and rows.tensor.dtype == torch.float32
    assert rows.tensor is rows.tensor
    assert np.array_equal(rows.tensor.detach().numpy(), rows.array)


def test_apply_takes_the_gradient_of_rows(governor, tmp_path):
    def open_table(name):
        return plimsoll.EmbeddingStore.open(governor, tmp_path / name, rows=10, dim=4,
                                            optimizer=plimsoll.AdamW(lr=0.1))

    by_rows, by_ids = open_table("a"), open_table("b")
    ids = torch.tensor([3, 1, 3])
    target = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    rows = by_rows.gather(ids)
    ((rows.tensor - target) ** 2).sum().backward()
    grads = rows.tensor.grad.clone()
    by_rows.apply(rows)
    by_ids.apply(ids, grads)
    assert np.array_equal(by_rows.gather(ids).array, by_ids.gather(ids).array)
    for use in (lambda: rows.tensor, lambda: rows.array, lambda: by_rows.apply(rows)):
        with pytest.raises(ValueError, match="applied"):
            use()


def test_expanded_and_sparse_gradients_are_accepted(table):
    before = table.gather([1, 2]).array
    rows = table.gather([1, 2])
    rows.tensor.sum().backward()  # The gradient is one expanded number.
    table.apply(rows)
    rows = table.gather([1, 2])
    torch.nn.functional.embedding(torch.tensor([1]), rows.tensor, sparse=True).sum().backward()
    table.apply(rows)
    assert (table.gather([1, 2]).array < before).all()


def test_tensors_go_in_by_dlpack(table):
    weights = torch.arange(16.0).reshape(2, 8)
    table.update(torch.tensor([5, 6]), weights.requires_grad_())
    assert np.array_equal(table.gather(torch.tensor([5, 6])).array, weights.detach().numpy())
    with pytest.raises(ValueError, match="rows.*contiguous"):
        table.update([5, 6], torch.zeros(8, 2).t())
    with pytest.raises(ValueError, match="rows.*float16"):
        table.update([5, 6], torch.zeros(2, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="ids.*meta"):
        table.gather(torch.zeros(2, dtype=torch.int64, device="meta"))


def test_other_libraries_come_in_by_dlpack_alone(table):
    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    assert np.array_equal(table.gather(Foreign(np.array([4]))).array, table.gather([4]).array)
    assert torch.equal(torch.from_dlpack(table.gather([4]).array),
                       table.gather([4]).tensor.detach())


def test_features_become_tensors_without_a_copy(governor, tmp_path):
    values = torch.randn(5, 3)
    with plimsoll.FeatureWriter(governor, tmp_path / "f", {
            "half": ("bfloat16", (3,)), "full": ("float32", (3,))}) as writer:
        writer.append(range(5), half=values.to(torch.bfloat16), full=values)
    with plimsoll.FeatureStore.open(governor, tmp_path / "f") as store:
        batch = store.read([4, 0])
        assert batch["half"].dtype == np.uint16
        assert batch.tensor("half").dtype == torch.bfloat16
        assert torch.equal(batch.tensor("half"), values.to(torch.bfloat16)[[4, 0]])
        assert torch.equal(batch.tensors()["full"], values[[4, 0]])
        assert batch.tensor("full").data_ptr() == batch["full"].ctypes.data
        loader = plimsoll.Loader.open(governor, store, batch_rows=2)
        for one in loader:
            assert torch.equal(one.tensor("full"), values[torch.from_numpy(one.ids)])


def test_r33_tensors_are_leased_between_entry_and_exit():
    outside = torch.empty(4 * MIB, dtype=torch.uint8)
    with plimsoll.Governor("4GiB") as governor:
        assert governor.arena_attached
        before = tensors_leased(governor)
        inside = torch.full((8 * MIB,), 7, dtype=torch.uint8)
        assert extension.owns(inside.data_ptr())
        assert tensors_leased(governor) >= before + 8 * MIB
        del outside
        rows = inside.reshape(-1, 64).float()  # And what operators allocate.
        assert tensors_leased(governor) >= before + 40 * MIB
        del rows
    assert not governor.arena_attached
    assert inside.sum() == 7 * 8 * MIB  # Outlives the governor.
    after = torch.full((4 * MIB,), 5, dtype=torch.uint8)
    assert not extension.owns(after.data_ptr()) and after.sum() == 5 * 4 * MIB


def test_a_refusal_inside_torch_is_torchs_error_with_our_text(governor):
    with pytest.raises(torch.OutOfMemoryError, match="(?s)tensors.*GiB"):
        torch.empty(64 << 30, dtype=torch.uint8)
    assert torch.ones(3).sum() == 3  # And life goes on.


def test_a_refusal_of_our_own_call_is_budget_exceeded(governor, tmp_path):
    table = plimsoll.EmbeddingStore.open(governor, tmp_path / "t", rows=100, dim=4096)
    room = governor.reserve(governor.ledger().free_bytes - 8 * MIB)
    with pytest.raises(plimsoll.BudgetExceeded) as caught:
        table.gather(np.zeros(4096, np.int64))
    assert caught.value.tag == "tensors" and caught.value.requested_bytes >= 64 * MIB
    assert caught.value.limit_bytes == governor.limit_bytes
    smallest = caught.value.smallest_limit_bytes
    assert smallest >= governor.limit_bytes + 64 * MIB and f"try a limit of {smallest // MIB} MiB" in str(caught.value)
    room.close()
    assert len(table.gather(np.zeros(4096, np.int64))) == 4096


BORN_BEFORE = textwrap.dedent("""
    import gc, torch
    born_before = torch.randn(64, 64)  # Before plimsoll's allocator is there.
    import plimsoll
    from plimsoll.core import _torch_gate
    extension = _torch_gate.load()
    passed_through = torch.randn(64, 64)  # By our allocator, but with no governor.
    with plimsoll.Governor("4GiB"):
        wanted = born_before.double() @ born_before.double()
        product = born_before @ born_before
        gc.collect()
        before = extension.arena_stats()
        del born_before  # Freed by the allocator that made it.
        assert extension.arena_stats() == before
        del passed_through
        assert extension.arena_stats()["foreign_frees"] == before["foreign_frees"] + 1
        assert extension.arena_stats()["live_bytes"] == before["live_bytes"]
        assert torch.allclose(product.double(), wanted, atol=1e-3)
""")


def test_r33_a_tensor_born_before_the_arena_is_freed_after():
    """In a process of its own: in this one another module's tests may have brought the arena."""
    done = run_python(BORN_BEFORE)
    assert done.returncode == 0, done.stderr


def test_a_training_cell_may_run_twice(tmp_path):
    def cell():
        governor = plimsoll.Governor("4GiB")
        table = plimsoll.EmbeddingStore.open(governor, tmp_path / "t", rows=64, dim=4)
        model = torch.nn.Linear(4, 1)
        rows = table.gather(range(8))
        model(rows.tensor).sum().backward()
        table.apply(rows)
        return governor

    first = cell()  # Everything but the governor goes out of scope, as when a cell is replaced.
    second = cell()
    assert second.arena_attached and not first.arena_attached
    first.close()
    assert second.arena_attached
    second.close()


def test_a_model_from_an_earlier_cell_is_named_and_can_be_closed_over():
    first = plimsoll.Governor("4GiB")
    model = torch.nn.Linear(512, 512)
    with pytest.raises(ValueError, match="tensors"):
        plimsoll.Governor("4GiB")
    first.close()  # The model keeps its bytes, in the orphan account.
    with plimsoll.Governor("4GiB") as second:
        assert second.ledger().orphan_bytes >= 512 * 512 * 4
        assert model(torch.zeros(1, 512)).shape == (1, 512)


def run_python(code: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True,
                          timeout=300, check=False, **options)


def test_it_can_be_imported_directly_and_before_torch():
    done = run_python("import plimsoll._torch as t; import torch; assert t.installed(); "
                      "x = torch.randn(99, 99) @ torch.randn(99, 99); print(x.shape)")
    assert done.returncode == 0, done.stderr
    assert "99" in done.stdout


def test_late_installation_survives_tensors_and_threads_from_before():
    done = run_python("""
import torch
conv = torch.nn.Conv2d(3, 8, 3)             # oneDNN keeps reordered weights of its own.
x = torch.randn(4, 3, 32, 32)
y = conv(x)
z = torch.randn(512, 512) @ torch.randn(512, 512)
import plimsoll
with plimsoll.Governor("4GiB") as governor:
    y2 = conv(x)
    assert torch.allclose(y, y2)
    del x, y, z, conv
    y2.sum()
    print(governor.ledger())
del y2
""")
    assert done.returncode == 0, done.stderr
    assert "tensors" in done.stdout


def test_without_the_extension_the_error_says_how_to_build_it(tmp_path):
    """A copy of the package without _torch*.so is what `pip install .` gives."""
    package = tmp_path / "plimsoll"
    package.mkdir()
    import pathlib

    for path in pathlib.Path(plimsoll.__file__).parent.iterdir():
        if not path.name.startswith(("_torch.cpython", "__pycache__")):
            (package / path.name).symlink_to(path.resolve())
    done = run_python(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import torch, plimsoll
assert plimsoll.__file__.startswith({str(tmp_path)!r})
with plimsoll.Governor("4GiB") as governor:
    table = plimsoll.EmbeddingStore.open(governor, {str(tmp_path / "t")!r}, rows=4, dim=2)
    rows = table.gather([1])
    rows.tensor.sum().backward()            # Any torch works with the core alone.
    table.apply(rows)
    assert not governor.arena_attached
for touch in (lambda: plimsoll.train("cosir", data="x", out="y"), lambda: plimsoll.evaluate("x"),
              lambda: __import__("plimsoll._torch")):
    try:
        touch()
    except ImportError as error:
        assert "`pip install .`" in str(error), error
    else:
        raise SystemExit("no ImportError")
""")
    assert done.returncode == 0, done.stderr


def test_clean_up_gives_back_what_an_evaluation_left(governor):
    """After validation what is resident is what training had; no tensor alive is touched."""
    layer = torch.nn.Linear(512, 512)
    layer(torch.ones(64, 512)).sum().backward()
    weight, gradient = layer.weight.detach().clone(), layer.weight.grad.clone()
    governor.clean_up()
    before = plimsoll._core.resident().total
    with torch.no_grad():
        torch.randn(8192, 1024).sin_().sum()  # 32 MiB, free again.
    held = plimsoll._core.resident().total
    done = governor.clean_up()
    assert held - before > 16 * MIB
    assert done["freed_bytes"] > 16 * MIB
    assert done["resident_after_bytes"] <= before + MIB
    assert torch.equal(layer.weight, weight) and torch.equal(layer.weight.grad, gradient)


@pytest.mark.parametrize(("error", "expected"), [
    (ImportError("libx.so: plimsoll was built without it"), "does not fit the installed torch"),
    (_torch_gate.NotBuilt("in other words"), None),
])
def test_r25_a_build_without_torch_is_told_by_its_type_and_not_by_words(monkeypatch, error, expected):
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "plimsoll._torch":
                raise error

    monkeypatch.delitem(sys.modules, "plimsoll._torch")
    monkeypatch.delattr(plimsoll, "_torch")
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    if expected is None:
        assert _torch_gate.load_if_torch_imported() is None
    else:
        with pytest.raises(ImportError, match=expected):
            _torch_gate.load_if_torch_imported()


def test_no_room_for_the_arena_is_told_as_what_it_is():
    done = run_python("""
import resource, torch, plimsoll
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (200 << 20), held + (200 << 20)))
try:
    plimsoll.Governor("4GiB")
except OSError as error:
    print(error)
print(plimsoll._core.Governor.current().valid)
""")
    assert done.stdout.endswith("\nFalse\n")
    assert "tensor arena: no address range of 268435456 bytes" in done.stdout and "ulimit -v or -d" in done.stdout, done.stderr


@pytest.mark.parametrize("installed", ["2.12.1+cu126", "3.13.0"])
def test_another_torch_than_the_built_for_is_refused_before_its_libraries_are_touched(tmp_path, installed):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(f"__version__ = {installed!r}\nclass Tensor: pass\n")
    done = run_python(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import plimsoll                     # Any torch may be there.
import torch
try:
    plimsoll.Governor("4GiB")
except ImportError as error:
    print(error)
print("libplimsoll_torch" in open("/proc/self/maps").read())
""")
    assert done.returncode == 0, done.stderr
    built = plimsoll._core.torch_version
    minor = ".".join(built.split(".")[:2])
    assert done.stdout == (
        f"plimsoll._torch was built for torch {built} and does not fit the installed torch {installed}: "
        f'pip install "torch=={minor}.*", or build Plimsoll for the torch that is there, with `pip install .` in its '
        "source folder\nFalse\n")
