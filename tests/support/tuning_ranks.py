# SPDX-License-Identifier: Apache-2.0
"""The recipes `chat` and `vision` by several ranks, for test_chat.py and test_vision.py.

    python -m tests.support.tuning_ranks FOLDER OPTIONS RECIPE WORKERS    how runs of one process and of ranks ended, as JSON

FOLDER holds model/ and data. Ranks are forked from one process, which imports transformers once.
"""
import hashlib
import json
import os
import pathlib
import signal
import sys

import torch

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import plimsoll
from plimsoll.cli import _program
from plimsoll.recipes.tuning._train import Training
from tests.support.rank_programs import forked, launched


def signalled(step, rank, number):
    """This rank gets that signal in this step."""
    def leaves(training):
        if training.run.steps_made + 1 == step and os.environ.get("RANK", "0") == rank:
            os.kill(os.getpid(), number)
        return False

    Training.leaves = leaves


def train(recipe, folder, name, options, resumes=False, stop_at=0, killed_at=0):
    """(how it ended, digest of the last commit's weights, loss of what is held out). stop_at, killed_at: in this step rank 0 is
    signalled, or rank 1 killed."""
    signalled(stop_at or killed_at, *(("0", signal.SIGTERM) if stop_at else ("1", signal.SIGKILL)))
    out = pathlib.Path(folder, name)
    said = plimsoll.resume(out, progress=False) if resumes else plimsoll.train(
        recipe, out=out, progress=False, **options, data=f"{folder}/data", model=f"{folder}/model")
    step = plimsoll.status(out)["checkpoint_step"]
    parts = torch.load(out / f"checkpoints/step-{step:09}/parts.pt", weights_only=True)["parts"]
    digest = hashlib.sha256()
    for _, one in sorted(parts["model"].items()):
        digest.update(one.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return said["status"], digest.hexdigest(), said.get("held_out_loss"), said["step"]


def program(folder, recipe, options, killed_at):
    """The exit status of `plimsoll train`, which is killed, and of `plimsoll resume`."""
    signalled(killed_at, "1", signal.SIGKILL)
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    begins = ["train", recipe, "--data", f"{folder}/data", "--model", f"{folder}/model", "--out", f"{folder}/program",
              "--checkpoint-every-n-steps", "1", *words]
    return _program.main([*(begins if killed_at else ["resume", f"{folder}/program"]), "--json"])


def killed(made, *arguments, **options):
    """Ranks of which one is."""
    try:
        launched(made, *arguments, **options)
    except ChildFailedError:
        return
    raise SystemExit("none was killed")


def main(folder, options, recipe, workers):
    """Of 1, 2 and 4 ranks; of a run that 4 began, 1 went on with, and 2 ended; and of the program, of 2 ranks that are killed. Of 8
    workers: of 1 and 8 ranks; and of a run that 4 began and 2 went on with, killed both, and 8 ended."""
    options = {**json.loads(options), "virtual_workers": int(workers)}
    said = {"1": [forked(train, recipe, folder, "one", options)]}
    if workers == "8":
        said["8"] = launched(train, recipe, folder, "of 8", options, ranks=8)
        killed(train, recipe, folder, "moved", options, False, 0, 3, ranks=4)
        killed(train, recipe, folder, "moved", options, True, 0, 5, ranks=2)
        said["ended"] = launched(train, recipe, folder, "moved", options, True, ranks=8)
        return json.dumps(said)
    for ranks in (2, 4):
        said[str(ranks)] = launched(train, recipe, folder, f"of {ranks}", options, ranks=ranks)
    said["began"] = launched(train, recipe, folder, "moved", options, False, 3, ranks=4)
    said["went on"] = [forked(train, recipe, folder, "moved", options, True, 7)]
    said["ended"] = launched(train, recipe, folder, "moved", options, True, ranks=2)
    killed(program, folder, recipe, options, 3)
    said["program"] = launched(program, folder, recipe, options, 0)
    return json.dumps(said)


if __name__ == "__main__":
    import peft  # noqa: F401
    import torch._dynamo
    import transformers  # noqa: F401

    sys.stdout.write(main(*sys.argv[1:]) + "\n")
