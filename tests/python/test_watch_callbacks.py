# SPDX-License-Identifier: Apache-2.0
"""WatchCallback of Lightning and of Hugging Face: a leak in a real Trainer's loop is warned of, once."""
import warnings

import pytest

import plimsoll

torch = pytest.importorskip("torch")

STEPS = 260


class Leaks(torch.utils.data.Dataset):
    """Items of a data set; each step keeps 200 kB."""

    def __init__(self):
        self.kept = []

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        self.kept.append(bytearray(200_000))  # site
        x = torch.full((8,), float(index % 7))
        return {"x": x, "labels": x.sum()}


def told(caught):
    return [str(one.message) for one in caught if str(one.message).startswith("plimsoll: leak")]


def assert_warned_once(callback, caught):
    if callback.watch.verdict().kind == "too short":
        pytest.skip("looks were left out: the machine is busy")
    (text,) = told(caught)
    owner = "native" if "native" in callback.watch.owners else "unexplained"  # malloc() of a process of many tests may have a rest.
    assert f"{owner} grows by" in text and "held by attribute `kept` of Leaks" in text, text
    assert "test_watch_callbacks.py:" in text and "empty it, bound it" in text, text


class Same(torch.utils.data.Dataset):
    """Keeps nothing."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.full((8,), float(index % 7))
        return {"x": x, "labels": x.sum()}


def test_s44_a_line_every_ten_steps_and_a_summary_without_a_leak(tmp_path, capsys):
    lightning = pytest.importorskip("lightning")
    from plimsoll.integrations.lightning import WatchCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.large = torch.nn.Linear(8, 1), torch.nn.Embedding(4096, 128)

        def training_step(self, batch, _):
            return (self.net(batch["x"]).squeeze(1) - batch["labels"]).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(callbacks=[WatchCallback(log_every_n_steps=10)], max_epochs=1, logger=False,
                                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                                accelerator="cpu", default_root_dir=tmp_path)
    trainer.fit(Module(), torch.utils.data.DataLoader(Same(), batch_size=1))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("plimsoll: ")]
    assert [line.split(":")[1].strip() for line in lines[:4]] == [f"step {step}" for step in (10, 20, 30, 40)]
    assert all(" held (" in line and " than at the start" in line for line in lines[:4])
    assert lines[4].startswith("plimsoll: memory after 40 steps: ") and "; most " in lines[4]
    assert lines[5].startswith("plimsoll: verdict: ")
    assert any("2.0 MiB  float32 4096x128 on cpu" in line for line in lines[6:]), lines
    with pytest.raises(ValueError, match="log_every_n_steps -1"):
        WatchCallback(log_every_n_steps=-1)


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")
    from plimsoll.integrations.lightning import WatchCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(8, 1)

        def training_step(self, batch, _):
            return (self.net(batch["x"]).squeeze(1) - batch["labels"]).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    callback = WatchCallback()
    trainer = lightning.Trainer(callbacks=[callback], max_epochs=1, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
                                default_root_dir=tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Module(), torch.utils.data.DataLoader(Leaks(), batch_size=1))
    assert callback.watch.steps == STEPS
    assert_warned_once(callback, caught)


def test_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    from plimsoll.integrations.transformers import WatchCallback

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(8, 1)

        def forward(self, x, labels):
            return {"loss": (self.net(x).squeeze(1) - labels).pow(2).mean()}

    callback = WatchCallback(plimsoll.Watch())
    arguments = transformers.TrainingArguments(str(tmp_path), num_train_epochs=1, per_device_train_batch_size=1,
                                               save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
                                               logging_strategy="no")
    trainer = transformers.Trainer(Model(), arguments, train_dataset=Leaks(), callbacks=[callback])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    assert callback.watch.steps == STEPS
    assert_warned_once(callback, caught)
