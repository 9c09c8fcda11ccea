# SPDX-License-Identifier: Apache-2.0
"""plimsoll.clean_up(): what it collects and when, with a Governor or without; after evaluations, in any loop."""
import gc
import json
import subprocess
import sys
import types

import pytest

import plimsoll
from plimsoll.memory import _garbage

torch = pytest.importorskip("torch")


RING_BYTES = 16 << 20


class Ring:
    """Reachable from nowhere but itself; while it lives, RING_BYTES of `process` are resident."""

    def __init__(self, process):
        self.process, self.me = process, self
        process.resident += RING_BYTES

    def __del__(self):
        self.process.resident -= RING_BYTES


@pytest.fixture
def collections(monkeypatch):
    """The generations that were collected, newest last, of a process whose clock is `.seconds`, and of which
    `.resident` bytes are in memory: no thread of another test moves them."""
    seen = types.SimpleNamespace(generations=[], seconds=100.0, resident=1 << 30)
    core = types.SimpleNamespace(resident=lambda: types.SimpleNamespace(total=seen.resident))
    tensors = types.SimpleNamespace(clean_up=lambda: {"arena_bytes": 0, "resident_after_bytes": seen.resident})
    monkeypatch.setattr(_garbage, "_core", core)
    monkeypatch.setitem(sys.modules, "plimsoll._torch", tensors)
    monkeypatch.setattr(_garbage, "time", types.SimpleNamespace(monotonic=lambda: seen.seconds))
    monkeypatch.setattr(_garbage, "_collector", _garbage._Collector())

    def note(phase, info):
        if phase == "start":
            seen.generations.append(info["generation"])
            seen.seconds += 0.2 if info["generation"] == 2 else 0.001

    gc.callbacks.append(note)
    gc.disable()
    yield seen
    gc.enable()
    gc.callbacks.remove(note)


def test_s42_a_full_collection_is_made_only_where_one_has_freed_something_lately(collections):
    heap = [[one] for one in range(100_000)]
    gc.collect()
    collections.generations.clear()
    ring = Ring(collections)  # Young.
    del ring
    assert plimsoll.clean_up()["collected_objects"] >= 1
    for _ in range(20):
        plimsoll.clean_up()
    assert collections.generations == [1] * 21
    collections.seconds += 3600  # One takes less than a hundredth of that.
    plimsoll.clean_up()
    plimsoll.clean_up()
    assert collections.generations[21:] == [1, 2, 1]
    old = Ring(collections)
    gc.collect()
    del old
    collections.generations.clear()
    collections.seconds += 3600
    for _ in range(3):
        plimsoll.clean_up()
    assert collections.generations == [1, 2, 1, 2, 1], "once more where it has freed something"
    assert len(heap) == 100_000


def test_s42_the_share_of_the_time_is_bounded(collections):
    """Full collections that free nothing take a hundredth of the time, however often it is asked for."""
    for _ in range(6000):
        collections.seconds += 0.1
        plimsoll.clean_up()
    assert 0.2 * collections.generations.count(2) <= 0.011 * 600 + 0.2


def test_s43_without_torch_or_a_governor_it_gives_back_the_heap():
    done = subprocess.run([sys.executable, "-c", """
import plimsoll, sys
kept = [bytearray(100_000) for _ in range(400)]
last = bytearray(64)
del kept
done = plimsoll.clean_up()
assert "torch" not in sys.modules
assert done["freed_bytes"] == done["resident_before_bytes"] - done["resident_after_bytes"]
assert set(done) >= {"arena_bytes", "collected_objects", "seconds"}, done
print("ok")
"""], text=True, capture_output=True, check=False)
    assert done.stdout == "ok\n", done.stderr


def test_s43_a_phase_of_evaluation_in_a_loop_of_ones_own_is_followed_by_a_clean_up(tmp_path):
    with plimsoll.Run(tmp_path / "run", memory_limit="8GiB") as run:
        net = torch.nn.Linear(8, 1)
        run.track(net=net, optimizer=torch.optim.SGD(net.parameters(), 0.1))
        for _ in run.steps(run.loader(list(range(8)), batch_size=4), epochs=1, progress=False):
            with run.phase("evaluate"), torch.no_grad():
                torch.randn(8192, 1024).sin_().sum()  # 32 MiB, free again.
            with run.phase("decode"):
                pass
    seen = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    cleaned = [one for one in seen if one["event"] == "cleanup"]
    assert [one["when"] for one in cleaned] == ["evaluation"] * 2
    assert all(one["freed_bytes"] > 16 << 20 for one in cleaned)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        x = torch.full((8,), float(index % 7))
        return {"x": x, "labels": x.sum()}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def forward(self, x, labels):
        return {"loss": (self.net(x).squeeze(1) - labels).pow(2).mean()}


def hugging_face(tmp_path, base=(), callbacks=(), **options):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=1, per_device_train_batch_size=1, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=True, logging_strategy="no", eval_strategy="steps", eval_steps=4)
    kind = type("Trainer", (*base, transformers.Trainer), {})
    kind(Model(), arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=list(callbacks), **options).train()


def lightning_of(tmp_path, callbacks=(), **options):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def validation_step(self, batch, _):
            self.model(**batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(callbacks=list(callbacks), max_epochs=1, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
                                num_sanity_val_steps=0, val_check_interval=4, default_root_dir=tmp_path)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=1)
    trainer.fit(Module(), loader, loader)


@pytest.mark.parametrize("library", ["transformers", "lightning"])
@pytest.mark.parametrize(("every", "times"), [(0, 3), (5, 5)])
def test_s43_a_callback_cleans_up_after_evaluations_without_a_run(tmp_path, monkeypatch, library, every, times):
    module = pytest.importorskip(f"plimsoll.integrations.{library}")
    called = []
    monkeypatch.setattr(module, "clean_up", lambda: called.append(1))
    train = hugging_face if library == "transformers" else lightning_of
    train(tmp_path, callbacks=[module.CleanUpCallback(cleanup_every_n_steps=every)])
    assert len(called) == times  # Evaluations follow steps 4, 8 and 12.
    with pytest.raises(ValueError, match="CleanUpCallback: cleanup_every_n_steps -1"):
        module.CleanUpCallback(-1)


def test_s43_an_evaluation_of_a_trainer_of_a_run_is_followed_by_a_clean_up(tmp_path):
    pytest.importorskip("transformers")
    from plimsoll.integrations.transformers import RunMixin
    with plimsoll.Run(tmp_path / "run", memory_limit="8GiB") as run:
        hugging_face(tmp_path, (RunMixin,), run=run)
    seen = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [one["when"] for one in seen if one["event"] == "cleanup"] == ["evaluation"] * 3
