# SPDX-License-Identifier: Apache-2.0
"""Training programs with the loops of other libraries, for tests that kill them: main(run, kind, workers, limit)."""
import os

import torch
import transformers

import plimsoll
from plimsoll.integrations.transformers import RunMixin
from tests.support.run_programs import digest_of, states

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers.utils.logging.set_verbosity_error()


class Trainer(RunMixin, transformers.Trainer):
    pass


class Lines:
    """Of tokens; some are masked by chance."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        words = (torch.arange(10) * (index + 1)) % 29 + 1
        return {"input_ids": torch.where(torch.rand(10) < 0.15, 0, words), "labels": words}


def make(run, workers=0, callbacks=(), **changes):
    """A Trainer of a tiny causal model with dropout, two batches a step, a schedule, clipping, evaluation."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2,
                                     bos_token_id=0, eos_token_id=0)
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
                 "learning_rate": 1e-2, "warmup_steps": 3, "lr_scheduler_type": "cosine", "eval_strategy": "steps",
                 "eval_steps": 3, "logging_steps": 2, "save_strategy": "no", "use_cpu": True,
                 "report_to": [], "disable_tqdm": True, "dataloader_num_workers": workers,
                 "output_dir": str(run.path / "trainer"), **changes}
    return Trainer(transformers.GPT2LMHeadModel(config), transformers.TrainingArguments(**arguments),
                   train_dataset=Lines(46), eval_dataset=Lines(6), callbacks=list(callbacks), run=run,
                   commit_every_steps=2)


def hugging_face(path, workers, limit):
    with plimsoll.Run(path, memory_limit=limit, seed=3) as run:
        trainer = make(run, workers)
        trainer.train()
        losses = [line[key] for line in trainer.state.log_history for key in ("loss", "eval_loss") if key in line]
        return digest_of(list(trainer.model.state_dict().values()), states(trainer.optimizer),
                         torch.tensor(trainer.lr_scheduler.get_last_lr()), torch.tensor(losses))


def main(path, kind, workers="0", limit="2GiB"):
    return {"hugging_face": hugging_face}[kind](path, int(workers), limit)


if __name__ == "__main__":
    import sys

    print(main(*sys.argv[1:]))
