# SPDX-License-Identifier: Apache-2.0
"""The loops of other libraries by several ranks, for test_trainer_ranks.py.

    python -m tests.support.trainer_ranks FOLDER KIND     what its scenarios give, as JSON; KIND: hugging_face, lightning
"""
import json
import os
import signal
import sys

import plimsoll
from plimsoll.core import _torch_gate
from plimsoll.run._run_outer import OuterLoop
from tests.support import trainer_programs
from tests.support.rank_programs import LIMIT, forked, launched
from tests.support.run_programs import digest_of
from tests.support.trainer_programs import Lines
from tests.support.trainers import Ends, Grows

WHOLE = {"hugging_face": trainer_programs.hugging_face, "lightning": trainer_programs.lightning_trainer}
MODULE = {"hugging_face": lambda trainer: trainer.model, "lightning": lambda module: module.net}


def of_rank(number):
    return os.environ.get("RANK", "0") == str(number)


class Broken(Lines):
    """Of one rank, in its second epoch."""

    def __init__(self, count):
        super().__init__(count)
        self.read = 0

    def __getitem__(self, index):
        self.read += 1
        if of_rank(1) and self.read == 30:
            raise KeyError("line 30")
        return super().__getitem__(index)


def hugging_face(run, do, batch_size=4, validates=True, **changes):
    """(steps of this life, module, losses that all ranks know). do(step): at the end of each."""
    import transformers

    class At(transformers.TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_step_end(self, args, state, control, **_):
            self.seen.append(state.global_step)
            do(state.global_step)

    at, validation = At(), {} if validates else {"eval_strategy": "no", "logging_steps": 1}
    trainer = trainer_programs.make(run, callbacks=[at], per_device_train_batch_size=batch_size, **validation, **changes)
    trainer.train()
    losses = [line[key] for line in trainer.state.log_history for key in ("loss", "eval_loss") if key in line]
    return at.seen, trainer.model, losses


def lightning(run, do, batch_size=4, validates=True, **changes):
    """As hugging_face()."""
    import lightning
    import torch

    class At(lightning.Callback):
        def __init__(self):
            self.seen, self.losses = [], []

        def on_train_batch_end(self, trainer, module, outputs, *_):
            self.losses.append(float(trainer.strategy.reduce(outputs["loss"].clone(), reduce_op="mean")))
            if not trainer.fit_loop._should_accumulate():
                self.seen.append(trainer.global_step)
                do(trainer.global_step)

    at, validation = At(), {} if validates else {"limit_val_batches": 0, "num_sanity_val_steps": 0}
    module, _, _ = trainer_programs.fit(run, callbacks=[at], batch_size=batch_size, **validation, **changes)
    assert not isinstance(module, torch.nn.parallel.DistributedDataParallel)
    return at.seen, module, at.losses


def main(folder, kind):
    def trained(path, signalled=0, **changes):
        """(why it stopped, steps of this life, digest of the weights, losses); rank 1 gets SIGTERM in a step."""
        with plimsoll.Run(path, memory_limit="4GiB", seed=3) as run:
            seen, module, losses = {"hugging_face": hugging_face, "lightning": lightning}[kind](
                run, lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == signalled and of_rank(1) else None, **changes)
            return run.stopped, seen, digest_of(list(module.state_dict().values())), losses

    def ended(path, **changes):
        """How it ended, and the limit that it names."""
        try:
            return "ended", WHOLE[kind](path, 0, LIMIT, **changes)
        except (RuntimeError, ValueError, KeyError, OSError, MemoryError) as error:
            return f"{type(error).__name__}: {error}", getattr(error, "smallest_limit_bytes", 0)

    def refused(path):
        """Rank 1 is refused an allocation, once, of each other part of a step, a later one each time."""
        extension, real, calls = _torch_gate.load(), OuterLoop.again, [0]

        def again(self, *arguments, **options):
            calls[0] += 1
            if of_rank(1) and calls[0] % 2:
                extension.refuse(1 + 5 * calls[0] % 42, 1)
            try:
                return real(self, *arguments, **options)
            finally:
                extension.refuse(0, 0)

        OuterLoop.again = again
        return WHOLE[kind](path, 0, LIMIT)

    def told_of(path):
        """A run that was told of virtual workers."""
        with plimsoll.Run(path, memory_limit=LIMIT, virtual_workers=2) as run:
            try:
                {"hugging_face": trainer_programs.make, "lightning": trainer_programs.fit}[kind](run)
            except ValueError as error:
                return str(error)

    def life(path, *arguments, of=trained, ranks=2, **changes):
        return launched(lambda: of(f"{folder}/{path}", *arguments, **changes), ranks=ranks)

    def waits(path):
        return ended(path, commit_every_steps=0, data=Ends(17, "memory") if of_rank(1) else Lines(46))

    def grows(path):
        return ended(path, prepare=lambda made: Grows(MODULE[kind](made), (1200 if of_rank(1) else 1) << 20, 4))

    trainer_programs.prepare(kind)
    same = {"dropout": 0.0, "validates": False, "data": Lines(48)}  # Every batch a whole one: a rank's mean counts as any other's.
    return json.dumps({
        "one": forked(lambda: trained(f"{folder}/one", batch_size=8, **same)), "two": life("two", batch_size=4, **same),
        "four": life("four", batch_size=2, ranks=4, **same),
        "undisturbed": life("undisturbed"), "stopped": life("stopped", 4), "went on": life("stopped"),
        "data": life("data", of=ended, data=Broken(46)), "waits": life("waits", of=waits), "goes on": life("waits"),
        "grows": life("grows", of=grows), "whole": life("whole", of=lambda path: WHOLE[kind](path, 0, LIMIT)),
        "refused": life("refused", of=refused), "told": life("told", of=told_of)})


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
