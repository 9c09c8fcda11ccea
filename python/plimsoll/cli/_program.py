# SPDX-License-Identifier: Apache-2.0
"""Whole recipes from Python, `info`, and the console script `plimsoll`.

Threads: one run at a time per process. Training runs without Python's lock.
"""
from __future__ import annotations

import json
import numbers
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from .. import _core
from ..core._torch_settings import MKL_CBWR, torch_settings
from ..errors import NotFoundError

_COMPUTES = (["train"], ["resume"], ["eval"], ["plan"], ["export"])  # Commands that need torch.
_USAGE_STATUS = 2  # cli/commands.h.
# Turns that a thread of torch's waits for work before it sleeps. With libgomp's own choice, 300,000, waiting threads take a
# busy machine's cores from those that would end the wait: beside two busy loops on two cores `train` made 1,758 rows/s with
# it and 5,622 with this one. On an idle machine the two are alike (19,000 rows/s).
_SPINS = "1000"


def train(recipe: str | os.PathLike[str], *, data: str | os.PathLike[str] = "", out: str | os.PathLike[str],
          memory_limit: int | str = "", config: str | os.PathLike[str] | None = None,
          progress: bool = True, **options: Any) -> dict[str, Any]:
    """Trains a recipe ("cosir", "can-kd", "chat", or one of plimsoll.recipes) inside a memory limit.

    The same as `plimsoll train`.

    recipe:  its name, or a Python file that holds it: "./mine.py".
    options: keys of the recipe (docs/recipes/): epochs=3, batch_size=512, store_bytes="64MiB",
             student_vgae_hidden_dims=[80, 40, 16], … They override those of `config`.
    config:  a file (.toml or .json), or the name of a preset ("small").
    Returns: the summary of `plimsoll train --json`: for cosir status, step, epoch, loss, rows_per_second,
             peak_resident_bytes, recall, state_sha256, …; {} on ranks that only help the first (cosir, can-kd). A run that
             ended before its last step has status "stopped" and stop_cause "asked" or "memory" (exit
             status 3 of the program). Its stop_reason names a limit to resume with.

    Requires: no other Governor holds memory. For the same bits as the program, set
              MKL_CBWR=AVX2,STRICT before torch first multiplies.
    Errors:   ValueError (option, data); BudgetExceeded before the first step, with the smallest
              sufficient limit; OSError. KeyboardInterrupt (Ctrl-C) is raised after a checkpoint:
              plimsoll.resume(out) continues the run.
    """
    core = _core_with_torch()
    recipe, file = _named(recipe)
    given = {"data": data, "out": out, "memory_limit": memory_limit, **options, **file}
    with torch_settings():
        text = core.train(recipe, "" if config is None else os.fspath(config),
                          _pairs(given), not progress)
    return _summary(text)


def plan(recipe: str | os.PathLike[str], *, data: str | os.PathLike[str], memory_limit: int | str = "",
         config: str | os.PathLike[str] | None = None, device: str = "cpu",
         device_memory_limit: int | str = "", choices: bool = False, effective_batch: int = 0,
         **options: Any) -> dict[str, Any]:
    """Returns the largest batch that a run of "cosir", "can-kd" or "chat" can train with, and each holder's bytes.

    The same as `plimsoll plan --json` prints: batch_size, label ("exact", "bounded"), peak_bytes, parts,
    store_bytes, cache_bytes, queue_bytes, eval_peak_bytes, advice, … `train(batch_size="auto")` makes the
    same plan. plimsoll.plan_batch() plans a training loop of your own.

    device, device_memory_limit: as plimsoll.plan_batch(). The result then has `device` and `pinned_bytes`.
    choices: plans and times other memory settings, too.
    effective_batch: number of graphs per optimizer step, for can-kd with choices; 0: not set.

    Errors: as train().
    """
    core = _core_with_torch()
    recipe, file = _named(recipe)
    given = {"data": data, "memory_limit": memory_limit, **options, **file}
    with torch_settings():
        return json.loads(core.plan(recipe, "" if config is None else os.fspath(config),
                                    _pairs(given), device, str(device_memory_limit),
                                    choices, effective_batch))


def resume(run: str | os.PathLike[str], *, progress: bool = True,
           accept_other_processor: bool = False, **options: Any) -> dict[str, Any]:
    """Resumes a run from its last checkpoint. Returns the summary, as train() does.

    options: changes to keys that do not decide the run's bits: memory_limit="2GiB", … A recipe in a file that has moved is found by
             recipe_file="./mine.py".
    accept_other_processor: resumes although the processor, or the kernels chosen for it, differ from
             the run's first ones. The bits will then differ, and events.jsonl records it.
    Errors:  NotFoundError (no run there); ValueError for a key that would change the run's
             identity; CorruptError (a file whose checksum does not match); otherwise as train().
    """
    core = _core_with_torch()
    from .. import recipes

    notes = recipes.file_of(os.fspath(run), options.get("recipe_file", ""))
    with torch_settings():
        text = core.resume(os.fspath(run), _pairs(options | notes), not progress,
                           accept_other_processor)
    return _summary(text)


def evaluate(run: str | os.PathLike[str], *, recipe_file: str | os.PathLike[str] = "") -> dict[str, Any]:
    """Evaluates a run's newest checkpoint, and changes nothing. Returns {"step", "epoch", "recall", …} for cosir.

    recipe_file: a file that holds the recipe, where it has moved since the run noted it.
    Errors: NotFoundError (no run or no checkpoint there); ValueError (other data than the run was
            trained on); CorruptError (a file whose checksum does not match); otherwise as train().
    """
    core = _core_with_torch()
    from .. import recipes

    recipes.file_of(os.fspath(run), recipe_file)
    with torch_settings():
        return json.loads(core.evaluate(os.fspath(run)))


def export(run: str | os.PathLike[str], out: str | os.PathLike[str], *, merge: bool = False,
           recipe_file: str | os.PathLike[str] = "") -> dict[str, Any]:
    """Writes the model of a run's newest checkpoint for other programs. Returns what `plimsoll export --json` prints.

    out:   folder to make.
    merge: merges adapters into the model's weights; else they are written alone.
    recipe_file: as evaluate()'s.
    Errors: as evaluate(); ValueError where `out` exists, or the run's recipe has no export.
    """
    core = _core_with_torch()
    from .. import recipes

    recipes.file_of(os.fspath(run), recipe_file)
    with torch_settings():
        return json.loads(core.export_model(os.fspath(run), os.path.abspath(out), merge))


def info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the contents of a Plimsoll folder or file, as `plimsoll info --json` prints them.

    `kind` is "run", "embedding_store", "tables", "feature_store", "graph_set", "token_set", "image_set", "checkpoint", "safetensors" or
    "npy".

    Errors: NotFoundError when nothing there is Plimsoll's; CorruptError; OSError.
    """
    return json.loads(_core.describe(os.fspath(path)))


def _core_with_torch() -> Any:
    """Returns plimsoll._core, with all recipes registered and torch loaded for them. Errors: ImportError."""
    from .. import recipes

    recipes.load_torch()
    recipes.find()
    return _core


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program `plimsoll` in this process. Returns its exit status."""
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:  # Streams that were closed: no file may take their place.
        pass
    os.close(spare)
    try:
        status = _run(["plimsoll", *(sys.argv[1:] if arguments is None else arguments)])
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # `plimsoll … | head`: nobody reads the rest. What was to be made is made.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE


def _run(given: list[str]) -> int:
    if given[1:2] == ["queue"]:
        from . import _queue_command

        return _queue_command.run(given[2:])
    if given[1:3] == ["recipes", "copy"]:
        from . import _recipes_command

        return _recipes_command.run(given[3:])
    if given[1:3] == ["import", "chat"]:
        from . import _chat_command

        return _chat_command.run(given[3:])
    if given[1:3] == ["import", "vision"]:
        from . import _vision_command

        return _vision_command.run(given[3:])
    if given[1:3] == ["import", "pairs"]:
        from . import _pairs_command

        return _pairs_command.run(given[3:])
    try:
        from .. import recipes

        recipes.find()
    except RuntimeError as error:
        print(f"plimsoll: error: {error}", file=sys.stderr)
        return 1
    try:
        given = [*given[:1], *_with_file(given[1:])]
    except (ImportError, NotFoundError, ValueError) as error:  # Others are faults of the file, and a traceback helps.
        print(f"plimsoll: error: {error}", file=sys.stderr)
        return _USAGE_STATUS
    if given[1:2] in _COMPUTES and not {"-h", "--help"} & set(given):
        # Before the recipe loads torch, so that every kernel sees it.
        os.environ.setdefault("MKL_CBWR", MKL_CBWR)
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    try:
        return _core.run_program(list(map(os.fsencode, given)))
    except KeyboardInterrupt:  # In what leaves no trace: a plan, an evaluation, a run before its first step.
        print(f"plimsoll: error: {' '.join(given[1:2])} was given up, as asked", file=sys.stderr)
        return 1


def _named(recipe: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    """Returns a recipe's name, and the options by which a run notes the file that it was read from."""
    from .. import recipes

    if not recipes.is_file(recipe):
        return os.fspath(recipe), {}
    return recipes.add_file(recipe)


def _with_file(words: list[str]) -> list[str]:
    """Returns the words of a command with a recipe's name in place of its file, and the options by which a run notes the file.

    Errors: those of recipes.add_file() and file_of().
    """
    command = words[0] if words else ""
    from .. import recipes

    if command in ("train", "plan", "config") and len(words) > 1 and recipes.is_file(words[1]):
        name, notes = recipes.add_file(words[1])
        return [command, name, *([] if command == "config" else _flags(notes)), *words[2:]]
    if command in ("resume", "eval", "export"):
        file, rest = _taken(words, "--recipe-file")
        run = next((word for word in rest[1:] if not word.startswith("-") and _core.RunFolder.is_run(word)), "")
        notes = recipes.file_of(run, file) if run else {}
        return [*rest, *(_flags(notes) if command == "resume" else [])]
    return words


def _taken(words: list[str], option: str) -> tuple[str, list[str]]:
    """Returns an option's value, "" where it is not given, and the words without it."""
    value, rest = "", []
    left = iter(words)
    for word in left:
        name, equals, text = word.partition("=")
        if name != option:
            rest.append(word)
        else:
            value = text if equals else next(left, "")
    return value, rest


def _flags(options: dict[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]


def _pairs(options: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns options as (key, text). Errors: ValueError for a value without a text form."""
    pairs = []
    for key, value in options.items():
        if isinstance(value, bool):
            text = "true" if value else "false"
        elif isinstance(value, (str, numbers.Real, os.PathLike)):  # NumPy's numbers, too.
            text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
        elif isinstance(value, (list, tuple)) and all(
                isinstance(part, (str, numbers.Integral)) and not isinstance(part, bool) for part in value):
            text = ",".join(map(str, value))
        else:
            raise ValueError(f"{key}: {value!r} is neither text nor a number")
        if not _is_utf8(text):
            raise ValueError(f"{key}: {text!r} is not UTF-8, and run.toml is: rename the file or folder")
        pairs.append((key, text))
    return pairs


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # Bytes of a path that are no text, as os.fsdecode() keeps them.
        return False
    return True


def _summary(text: str) -> dict[str, Any]:
    summary = json.loads(text or "{}")
    if summary.get("stop_reason") == "SIGINT":
        raise KeyboardInterrupt(
            f"stopped at step {summary['step']} with a checkpoint; "
            f"plimsoll.resume({summary.get('run', '')!r}) goes on")
    return summary
