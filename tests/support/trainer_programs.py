# SPDX-License-Identifier: Apache-2.0
"""Training programs with the loops of other libraries, for tests that kill them: main(run, kind, workers, limit)."""
import logging
import os
import warnings

import torch

import plimsoll
from tests.support.run_programs import digest_of, states

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def prepare(kind, *_):
    """Imports what main() needs."""
    if kind.startswith("lightning"):
        import plimsoll.integrations.lightning
    elif kind == "accelerate":
        import plimsoll.integrations.accelerate
    else:
        import transformers.models.gpt2.modeling_gpt2  # noqa: F401

        import plimsoll.integrations.transformers  # noqa: F401


class Lines:
    """Of tokens; some are masked by chance."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        words = (torch.arange(10) * (index + 1)) % 29 + 1
        return {"input_ids": torch.where(torch.rand(10) < 0.15, 0, words), "labels": words}


def make(run, workers=0, callbacks=(), data=None, commit_every_steps=2, cleanup_every_n_steps=0, dropout=0.1, **changes):
    """A Hugging Face Trainer of a tiny causal model with dropout, two batches a step, a schedule, clipping, evaluation."""
    import transformers

    from plimsoll.integrations.transformers import RunMixin

    class Trainer(RunMixin, transformers.Trainer):
        pass

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
                                     eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
                 "learning_rate": 1e-2, "warmup_steps": 3, "lr_scheduler_type": "cosine", "eval_strategy": "steps",
                 "eval_steps": 3, "logging_steps": 2, "save_strategy": "no", "use_cpu": True,
                 "report_to": [], "disable_tqdm": True, "dataloader_num_workers": workers,
                 "output_dir": str(run.path / "trainer"), **changes}
    return Trainer(transformers.GPT2LMHeadModel(config), transformers.TrainingArguments(**arguments),
                   train_dataset=data or Lines(46), eval_dataset=Lines(6), callbacks=list(callbacks), run=run,
                   commit_every_steps=commit_every_steps, cleanup_every_n_steps=cleanup_every_n_steps)


def hugging_face(path, workers, limit, stopped=30.0, prepare=lambda trainer: None, device_limit=None, **changes):
    with plimsoll.Run(path, memory_limit=limit, device_memory_limit=device_limit, seed=3, rank_stopped_seconds=stopped) as run:
        trainer = make(run, workers, **changes)
        prepare(trainer)
        trainer.train()
        losses = [line[key] for line in trainer.state.log_history for key in ("loss", "eval_loss") if key in line]
        return digest_of(list(trainer.model.state_dict().values()), states(trainer.optimizer),
                         torch.tensor(trainer.lr_scheduler.get_last_lr()), torch.tensor(losses))


def hugging_face_on_device(path, workers, limit):
    torch.use_deterministic_algorithms(True)
    return hugging_face(path, workers, limit, use_cpu=not torch.cuda.is_available())


def hugging_face_on_simulated_device(path, workers, limit):
    """On the simulated device (tests/device), within 64 MiB of it."""
    import tests.device  # noqa: F401

    os.environ["ACCELERATE_TORCH_DEVICE"] = "sim"
    return hugging_face(path, workers, limit, use_cpu=False, device_limit="64MiB", prepare=_must_be_on_simulated_device)


def _must_be_on_simulated_device(trainer):
    assert {one.device.type for one in trainer.model.parameters()} == {"sim"} == {trainer.args.device.type}


def fit(run, workers=0, callbacks=(), batch_size=4, data=None, commit_every_steps=2, cleanup_every_n_steps=0, dropout=0.1,
        prepare=lambda module: None, device=None, **changes):
    """A Lightning Trainer of a small net with dropout, two batches a step, a schedule, clipping, validation."""
    import lightning

    from plimsoll.integrations.lightning import RunCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(30, 16)
            self.net = torch.nn.Sequential(torch.nn.Dropout(dropout), torch.nn.Linear(16, 32), torch.nn.ReLU(),
                                           torch.nn.Linear(32, 30))

        def loss(self, batch):
            self.trained_on = self.words.weight.device.type  # Afterwards Lightning moves it to the host.
            logits = self.net(self.words(batch["input_ids"]))
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

        def training_step(self, batch, _):
            loss = self.loss(batch)
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch, _):
            self.log("val_loss", self.loss(batch))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9])
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(1)
    module = Module()
    prepare(module)
    keeper = RunCallback(run, commit_every_steps=commit_every_steps, cleanup_every_n_steps=cleanup_every_n_steps)
    stopping = lightning.pytorch.callbacks.EarlyStopping("val_loss", patience=100)
    arguments = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "val_check_interval": 6,
                 "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False,
                 "enable_model_summary": False, "strategy": "ddp" if "RANK" in os.environ else "auto",
                 "devices": int(os.environ.get("WORLD_SIZE", "1")), **changes}
    trainer = lightning.Trainer(callbacks=[stopping, *callbacks, keeper], plugins=[keeper.checkpoint_io()],
                                **arguments)
    trainer.fit(module, run.loader(data or Lines(46), batch_size=batch_size, workers=workers, device=device),
                torch.utils.data.DataLoader(Lines(6), batch_size=3), ckpt_path=keeper.ckpt_path)
    return module, trainer, stopping


def lightning_trainer(path, workers, limit, stopped=30.0, device_limit=None, **changes):
    with plimsoll.Run(path, memory_limit=limit, device_memory_limit=device_limit, seed=3, rank_stopped_seconds=stopped) as run:
        module, trainer, stopping = fit(run, workers, **changes)
        assert module.trained_on == changes.get("device", "cpu")
        return digest_of(list(module.state_dict().values()), states(trainer.optimizers[0]),
                         torch.tensor(trainer.lr_scheduler_configs[0].scheduler.get_last_lr()), stopping.best_score)


def lightning_on_simulated_device(path, workers, limit):
    """On the simulated device (tests/device), within 64 MiB of it; batches come to it one ahead of use."""
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.strategies import SingleDeviceStrategy

    import tests.device  # noqa: F401

    class Simulated(Accelerator):
        """Torch's simulated device, as Lightning wants one."""

        def setup_device(self, device):
            assert device.type == "sim"

        def teardown(self):
            pass

        @staticmethod
        def parse_devices(devices):
            return [0]

        @staticmethod
        def get_parallel_devices(devices):
            return [torch.device("sim", 0)]

        @staticmethod
        def auto_device_count():
            return 1

        @staticmethod
        def is_available():
            return True

        @staticmethod
        def name():
            return "sim"

        def get_device_stats(self, device):
            return {}

    return lightning_trainer(path, workers, limit, device_limit="64MiB", device="sim", data=Lines(30), accelerator=Simulated(),
                             strategy=SingleDeviceStrategy(device=torch.device("sim", 0)), devices=1)


class Average:
    """Of a model's parameters, as one registers it."""

    def __init__(self, model):
        self.model, self.values, self.steps = model, [one.detach().clone() for one in model.parameters()], 0

    def update(self):
        self.steps += 1
        for value, one in zip(self.values, self.model.parameters()):
            value.lerp_(one.detach(), 0.1)

    def state_dict(self):
        return {"values": self.values, "steps": self.steps}

    def load_state_dict(self, state):
        self.values, self.steps = state["values"], state["steps"]


def accelerated(path, workers, limit):
    """A loop with an Accelerator: three batches a step, a schedule, clipping, an average that is registered."""
    import accelerate

    from plimsoll.integrations.accelerate import parts

    with plimsoll.Run(path, memory_limit=limit, seed=3) as run:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
        net = torch.nn.Sequential(torch.nn.Embedding(30, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 30))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
        model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
        average = Average(model)
        accelerator.register_for_checkpointing(average)
        run.track(**parts(accelerator))
        for batch in run.steps(run.loader(Lines(46), batch_size=4, workers=workers), epochs=2, commit_every_steps=2,
                               progress=False):
            with accelerator.accumulate(model):
                logits = model(batch["input_ids"])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    average.update()
            run.log(loss=loss)
        assert average.steps == 8 and schedule.get_last_lr()[0] < 1e-3
        return digest_of(list(net.state_dict().values()), states(optimizer), average.values)


KINDS = {"hugging_face": hugging_face, "hugging_face_on_device": hugging_face_on_device,
         "hugging_face_on_simulated_device": hugging_face_on_simulated_device, "lightning": lightning_trainer,
         "lightning_on_simulated_device": lightning_on_simulated_device, "accelerate": accelerated}


def main(path, kind, workers="0", limit="2GiB"):
    return KINDS[kind](path, int(workers), limit)


if __name__ == "__main__":
    import sys

    print(main(*sys.argv[1:]))
