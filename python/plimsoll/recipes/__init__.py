# SPDX-License-Identifier: Apache-2.0
"""Recipe and RunOptions: recipes written in Python, which `plimsoll train NAME` and plimsoll.train("NAME") start.

    @dataclasses.dataclass(kw_only=True)
    class Options(RunOptions):
        epochs: int = option(3, "Number of passes over the data", least=1)
        lr: float = option(1e-3, "Learning rate", least=0.0)

    def train(run: plimsoll.Run, options: Options) -> dict:
        ...                                             # the loop of plimsoll.Run's docstring
        return {"accuracy": accuracy}                   # beside status, step and memory in the summary

    RECIPE = Recipe("digits", "Digits from photographs", Options, train)

`plimsoll train ./digits.py` trains it. A package provides it by an entry point of the group "plimsoll.recipes"
(`digits = "my_package:RECIPE"`), and then `plimsoll train digits` does. Its options can be given as flags or in a file, and
appear in `--help` and `plimsoll config digits`. `resume`, `eval`, `status`, `stop`, `pause` and `limit` work as for any run.

Threads: recipes are found on the first call that needs them.   Memory: at most 64 recipes.
"""
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import pathlib
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

from .. import _core
from .._core import crc32c, format_bytes
from ..core import _compiler, _torch_gate
from ..core._folders import replaced
from ..errors import MemoryPressure, NotFoundError
from . import _files
from ._choices import table_of, weigh
from ._files import is_file as is_file

if typing.TYPE_CHECKING:
    from ..memory._memory import Governor
    from ..ranks._crew import Leader
    from ..ranks._group import Group, Solo
    from ..ranks._virtual_workers import WorkerBatches
    from ..run._run import Run
    from ..training._plan import BatchPlan

__all__ = ["DeviceOptions", "Group", "Recipe", "RunOptions", "Solo", "Told", "WorkerBatches", "add", "add_file", "committed", "crc32c", "entries_of",
           "limited", "option", "replaced", "tensor_bytes"]

_OF_RANKS = {"Group": "_group", "Solo": "_group", "WorkerBatches": "_virtual_workers"}  # Imported when asked for: they take NumPy.
_OURS: tuple[str, ...] = ("cosir", "can_kd", "chat", "vision")  # Modules beside this one, each with a RECIPE: a new recipe of ours is a word here.
_RESERVED = {name.replace("_", "-") for name in _OURS}  # Names that a file's recipe cannot have.
_GROUP = "plimsoll.recipes"
_COUNT_MAX = float(2**53)
_KINDS = {bool: "switch", int: "integer", float: "real", str: "text"}


def __getattr__(name: str) -> Any:
    if name not in _OF_RANKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"plimsoll.ranks.{_OF_RANKS[name]}"), name)


@dataclasses.dataclass(kw_only=True)
class RunOptions:
    """The options of every run. A recipe's options derive from this class.

    The run passed to train() was made with these options, so that a recipe itself needs only `data`. A recipe may have defaults
    of its own for seed, checkpoint_every_n_steps and foreign_bytes.
    """

    data: str
    """Absolute path of the data to train on."""
    out: str = ""
    """The run's folder."""
    memory_limit: str = ""
    disk_limit: str = ""
    seed: int = 0
    checkpoint_every_n_steps: int = 500
    keep_checkpoints: int = 2
    foreign_bytes: int = 128 << 20
    compute_threads: int = 0
    tensorboard: bool = True

    def devices(self) -> dict[str, str]:
        """Returns the memory limits of the devices that the run trains on, by torch's names; {}: it trains on the CPU."""
        return {}


def option(default: bool | int | float | str, about: str, *, least: float | None = None,
           most: float | None = None, choices: tuple[str, ...] = (), path: bool = False, size: bool = False,
           auto: bool = False, widths: bool = False, decides_bits: bool = True, may_grow: bool = False) -> Any:
    """Makes a field of a recipe's options.

    default:      the default, which also decides the type: bool, int, float or str.
    about:        description for --help, without a full stop.
    least, most:  bounds of a number; None: 0 and 2**53 for an int, none for a float.
    choices:      the only values of a str.
    path:         whether a str is a path. It is made absolute, and may differ when the run is resumed.
    size:         whether an int is a number of bytes, which may be written as "64MiB".
    auto:         whether an int may be written as "auto", which is 0.
    widths:       whether a str is two to eight whole numbers from `least` to `most`, such as "80,40,16"; in a file also [80, 40, 16].
    decides_bits: whether the option decides the run's bits; if False, it may change when the run is resumed.
    may_grow:     whether an int that decides the bits may be larger when the run is resumed: epochs of a last phase.
    """
    return dataclasses.field(default=default, metadata={
        "about": about, "least": least, "most": most, "choices": choices, "path": path, "size": size, "auto": auto,
        "widths": widths, "decides_bits": decides_bits, "may_grow": may_grow})


@dataclasses.dataclass(kw_only=True)
class DeviceOptions(RunOptions):
    """The options of a run that trains on a device of torch, or on the processor."""

    device: str = option("auto", "Device to train on: auto, cpu, cuda, cuda:1; auto is the GPU that torch has, else the processor; ranks and "
                                 "virtual workers train on the processor", decides_bits=False)
    device_memory_limit: str = option("", "Memory limit of the device: 20GiB, 80%; without one, 95 % of what is free when the run begins",
                                      decides_bits=False)

    def device_name(self) -> str:
        """Returns torch's name of the device to train on."""
        import torch

        if self.device != "auto":
            return self.device
        found = None if self.on_processor_because() else torch.accelerator.current_accelerator()
        return found.type if found is not None else "cpu"

    def on_processor_because(self) -> str:
        """Says what can only be had on the processor; "" where nothing of it is asked for."""
        return ""

    def devices(self) -> dict[str, str]:
        from ..memory._device_memory import limit_around

        name = self.device_name()
        return {} if name == "cpu" else {name: self.device_memory_limit or limit_around()}


class Told(dict[str, Any]):
    """A result with entries for `--json`, and a separate text for people."""

    def __init__(self, entries: dict[str, Any], text: str) -> None:
        super().__init__(entries)
        self.text = text


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A named way to train, written in Python: its options, and the functions that the commands call.

    name:     lower-case letters, digits and hyphens.
    about:    description of the trained model, for lists, without a full stop.
    options:  a dataclass that derives from RunOptions and whose fields are option()s.
    train:    called with the run, new or resumed, and the options. Returns entries for the summary,
              representable in JSON, or None. It may check run.stopped after a loop.
    evaluate: called with the options, whose `out` is the run's folder. Returns what `plimsoll eval` prints: a line per
              entry, or the text of a Told.
    plan:     called with the options, and device= and device_memory_limit= as for plan_batch(). Returns what
              `plimsoll plan` prints.
    before:   called with the options before anything else, when there is no limit yet. It checks the options and imports
              libraries, so that their memory counts as held before the run.
    export:   called with the options, and out= and merge= of `plimsoll export`. Returns what that prints.
    helped:   whether, under torchrun, the first rank trains as a process alone would, and the others compute tiles of plimsoll.Tiled for
              it. Otherwise each rank trains, as plimsoll.Run's docstring says.
    unit:     the unit of a batch's size: "rows", "tokens".
    examples: command lines for --help.
    data:     description of --data, for --help.
    data_or:  an option that may replace --data; "": none.
    plan_example: command line for the help of plan.
    presets:  folder of files of options, NAME.toml, which `--config NAME` reads.
    choices:  options that move memory, with their values, which `plan --choices` plans and times. plan() then returns batch_size,
              peak_bytes, bytes_per_row and step_seconds, as a BatchPlan has them.
    weighed:  called with the options and the plan's result. Returns the options of the part of a run that choices are planned for, its
              name, and the names of the choices that it has. None: the whole run and all choices.
    accumulates: the option that `plan --effective-batch` sets: the number of batches of an optimizer step; "": none.
    threads_decide_bits: whether compute_threads decides the run's bits. False: all that train() computes has the same bits for any number
              of threads, as `plimsoll.kernels` has, and a run may be resumed with another.
    """

    name: str
    about: str
    options: type[RunOptions]
    train: Callable[..., dict[str, Any] | None]
    evaluate: Callable[..., dict[str, Any]] | None = None
    plan: Callable[..., dict[str, Any]] | None = None
    export: Callable[..., dict[str, Any]] | None = None
    before: Callable[[Any], object] | None = None
    helped: bool = False
    unit: str = "rows"
    examples: tuple[str, ...] = ()
    data: str = "Data to train on"
    data_or: str = ""
    plan_example: str = ""
    presets: str | os.PathLike[str] | None = None
    choices: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    weighed: Callable[[Any, dict[str, Any]], tuple[Any, str, set[str]]] | None = None
    accumulates: str = ""
    threads_decide_bits: bool = True


def add(recipe: Recipe) -> None:
    """Adds a recipe to the program's, and replaces one of the same name.

    Errors: ValueError naming the recipe and the option that lacks a type or text; those of find().
    """
    _add(recipe, _files.Source("", ""))


def add_file(path: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    """Adds the recipe of a Python file, its RECIPE. Returns its name, and the options by which a run notes the file.

    Errors: NotFoundError (no such file); ValueError (no RECIPE there; one of Plimsoll's own has its name); those of add(); whatever the
            file raises.
    """
    module, source = _files.read(path)
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{source.path}: it has no RECIPE = plimsoll.recipes.Recipe(...)")
    if recipe.name in _RESERVED:
        raise ValueError(f"{source.path}: its recipe is called {recipe.name!r}, as one of Plimsoll's own; give it another name")
    _add(recipe, source)
    return recipe.name, {"recipe_file": source.path, "recipe_sha256": source.sha256}


def file_of(run: str, file: str | os.PathLike[str] = "") -> dict[str, str]:
    """Adds the recipe of a run that was made from a file. Returns the options by which it notes the file; {}: its recipe has a name only.

    file: where the file is now; "": where the run notes it.
    Errors: those of add_file(); ValueError where the file has another recipe now.
    """
    noted = _files.noted(run)
    if not (path := noted["recipe_file"]):
        if file:
            raise ValueError(f"{run}: its recipe was not read from a file")
        return {}
    if not file and not os.path.isfile(path):
        raise NotFoundError(f"{run}: its recipe was read from {path}, which is not there now; say where it is with --recipe-file FILE "
                            "(recipe_file= in Python)")
    name, notes = add_file(file or path)
    if name != noted["recipe"]:
        raise ValueError(f"{notes['recipe_file']}: its recipe is {name!r}, and {run} is a run of {noted['recipe']!r}")
    return notes


def _add(recipe: Recipe, source: _files.Source) -> None:
    find()  # Our own recipes come first, so this one can replace them.
    _core.add_recipe(name=recipe.name, about=recipe.about, unit=recipe.unit,
                     examples="\n".join("  " + line for line in recipe.examples), data_help=recipe.data,
                     data_advice="name it with --data PATH" + (f", or --{recipe.data_or.replace('_', '-')} PATH" if recipe.data_or else "")
                     + f": {recipe.data}",
                     keys_advice=f"`plimsoll train {source.path or recipe.name} --help` lists every key",
                     choices=", ".join(recipe.choices), effective_batch=bool(recipe.choices and recipe.accumulates), presets=_presets_of(recipe),
                     data_or=recipe.data_or, plan_example=recipe.plan_example or f"plimsoll plan {source.path or recipe.name} --data PATH",
                     threads_decide_bits=recipe.threads_decide_bits, common=_common_of(recipe), fields=_fields_of(recipe) + _fields_of_file(source),
                     work=_Work(recipe, source))


_found = False


def find() -> None:
    """Adds Plimsoll's own recipes and those of installed packages, once.

    Errors: RuntimeError naming the entry point that cannot be loaded.
    """
    global _found
    if _found:
        return
    _found = True
    for name in _OURS:
        add(importlib.import_module(f"{__name__}.{name}").RECIPE)
    from importlib import metadata  # Not quick to import.

    for point in metadata.entry_points(group=_GROUP):
        try:
            add(point.load())
        except Exception as error:
            raise RuntimeError(f"the recipe {point.name!r} ({point.value}) cannot be loaded: {error}; repair or "
                               "remove the package that brings it") from error


def load_torch() -> None:
    """Loads torch as recipes compute with it: beside Plimsoll's operators, its compiler for when it is used. Errors: ImportError."""
    _torch_gate.load()
    _compiler.import_when_used()


def _presets_of(recipe: Recipe) -> dict[str, str]:
    files = sorted(pathlib.Path(recipe.presets).glob("*.toml")) if recipe.presets is not None else []
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def _common_of(recipe: Recipe) -> dict[str, int]:
    """Returns the recipe's own defaults of options that every run has."""
    usual = {field.name: field.default for field in dataclasses.fields(RunOptions)}
    return {field.name: int(typing.cast(int, field.default)) for field in dataclasses.fields(recipe.options)
            if field.name in usual and field.default != usual[field.name]}


def _fields_of(recipe: Recipe) -> list[_core.RecipeField]:
    types_of = typing.get_type_hints(recipe.options)
    common = {field.name for field in dataclasses.fields(RunOptions)}
    fields = []
    for field in dataclasses.fields(recipe.options):
        if field.name in common:
            continue
        said, kind = field.metadata, types_of[field.name]
        default: Any = field.default
        if "about" not in said or kind not in _KINDS or type(default) is not kind:
            raise ValueError(f"recipe {recipe.name}: {field.name} must be an option(default, about) of a bool, "
                             "int, float or str, as its annotation says")
        choices = "|".join(said["choices"])
        word = "size" if said["size"] else "path" if said["path"] else "auto" if said["auto"] else "widths" if said["widths"] else (
            "choice" if choices else _KINDS[kind])
        least, most = said["least"], said["most"]
        if least is None:
            least = 0.0 if kind is int else -1e300
        fields.append(_core.RecipeField(field.name, word, said["decides_bits"], default, said["about"],
                                        float(least), float(_COUNT_MAX if most is None and kind is int else
                                                            1e300 if most is None else most), choices))
    return fields


def _fields_of_file(source: _files.Source) -> list[_core.RecipeField]:
    """Returns the options by which a run notes the file of its recipe; the program gives them."""
    if not source.path:
        return []
    return [_core.RecipeField("recipe_file", "path", False, "", "File that holds the recipe, where it has moved", -1e300, 1e300, ""),
            _core.RecipeField("recipe_sha256", "text", False, "", "Its digest at the last start, noted by the program", -1e300, 1e300, "")]


class _Work:
    """The functions of a recipe in the form that the program `plimsoll` calls. source: the file that it was read from."""

    def __init__(self, recipe: Recipe, source: _files.Source) -> None:
        self._recipe, self._source = recipe, source

        self.evaluates, self.plans, self.exports = (
            one is not None for one in (recipe.evaluate, recipe.plan, recipe.export))

    def train(self, values: dict[str, Any], run_toml: str, resume: bool, accept_other_processor: bool,
              quiet: bool) -> tuple[str, str, bool]:
        out = values["out"]
        # With several ranks the first one makes the folder. The launcher restarts ranks with the same arguments.
        again = int(os.environ.get("RANK", "0")) > 0 or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if not resume and not again and _core.RunFolder.is_run(out):
            raise ValueError(f"{out}: it is a run already; `plimsoll resume {out}` goes on with it, or name another folder (--out)")
        if (file := values.get("recipe_file", "")) != self._source.path:
            raise ValueError(f"recipe_file: {file!r} is not {self._source.path!r}, where the recipe was read; name the file in its place")
        options = self._options(values)
        from ..ranks import _crew
        from ..run import _run_settings
        from ..run._run import Run

        own = {field.name: values[field.name] for field in dataclasses.fields(options)
               if field.metadata.get("decides_bits") and not field.metadata["path"]}
        group = _crew.join() if self._recipe.helped else None
        if isinstance(group, _crew.Helper):
            group.serve(lambda threads: _run_settings.settle(options.seed, threads, True), options.memory_limit, foreign_bytes=options.foreign_bytes)
            return "", "", False
        accepted: tuple[str, ...] = (*_run_settings.OF_PROCESSOR, "device") if accept_other_processor else ()
        if resume:  # The options were compared with those of run.toml: these can only have grown.
            accepted += tuple(f"options.{field.name}" for field in dataclasses.fields(options) if field.metadata.get("may_grow"))
        before = _files.noted(out)
        stop: dict[str, str] = {}
        said: dict[str, Any] | None = None
        run = Run(out, memory_limit=options.memory_limit, device_memory_limit=options.devices(), seed=options.seed, options=own,
                  foreign_bytes=options.foreign_bytes, disk_limit=options.disk_limit,
                  compute_threads=options.compute_threads, accept=accepted, keep_checkpoints=options.keep_checkpoints,
                  tensorboard=options.tensorboard, virtual_workers=getattr(options, "virtual_workers", 0),
                  _of_recipe=_OfRecipe(run_toml, options.checkpoint_every_n_steps, quiet, self._recipe.threads_decide_bits, group))
        try:
            with run:
                self._note_file(run, before)
                with _refused_by_name(run):
                    said = self._recipe.train(run, options)
        except MemoryPressure as error:
            stop = {"stop_cause": "memory", "stop_reason": str(error)}
        except KeyboardInterrupt:  # Between its loops.
            if not run.steps_made:
                raise
            stop = {"stop_cause": "asked", "stop_reason": "SIGINT"}
        if run.stopped:
            stop = {"stop_cause": "asked", "stop_reason": run.stopped}
        status = json.loads(_core.run_status(out))
        summary = {"status": "stopped" if stop else "finished", "run": out, **stop, "step": run.steps_made,
                   "epoch": run.epoch, "seconds": status["seconds"], "limit_bytes": status["limit_bytes"],
                   "peak_resident_bytes": status["peak_resident_bytes"], **(said or {})}
        return _json_of(summary), _text_of(summary) if run.is_writer else "", stop.get("stop_cause") == "memory"

    def _note_file(self, run: Run, before: dict[str, str]) -> None:
        """Notes the recipe's file among the run's events, and tells of one that is another than at the last start."""
        if not self._source.path:
            return
        changed = before["recipe_sha256"] not in ("", self._source.sha256)
        run.event("recipe", step=run.steps_made, file=self._source.path, sha256=self._source.sha256, changed=changed)
        if changed and run.is_writer:
            print(f"plimsoll: {self._source.path} has changed since this run last started; steps after {run.steps_made} are made by the file "
                  "as it is now", file=sys.stderr)

    def evaluate(self, values: dict[str, Any]) -> tuple[str, str, bool]:
        return self._said(self._recipe.evaluate, values)

    def plan(self, values: dict[str, Any], device: str, device_memory_limit: str, choices: bool, effective_batch: int) -> tuple[str, str, bool]:
        recipe = self._recipe
        if choices and not recipe.choices:
            raise ValueError(f"choices: the recipe {recipe.name} has none that a plan could weigh")
        if effective_batch and not (choices and recipe.accumulates):
            raise ValueError(f"effective_batch: it needs choices, and an option of the recipe {recipe.name} for batches of a step")
        options = self._options(values)

        def planned(one: Any) -> dict[str, Any]:
            assert recipe.plan is not None
            return recipe.plan(one, device=device, device_memory_limit=device_memory_limit)

        said = planned(options)
        if not choices:
            return _told(said)
        if recipe.weighed is None:
            said = planned(options)  # Beside what the first plan loaded, as those of the choices are.
        part, of, names = recipe.weighed(options, said) if recipe.weighed is not None else (options, "a step", set(recipe.choices))
        chosen = {name: of_one for name, of_one in recipe.choices.items() if name in names}
        weighed = weigh(planned, part, chosen, effective_batch, recipe.accumulates, recipe.unit)
        text = said.text if isinstance(said, Told) else _text_of(said)
        return _told(Told({**said, "choices": weighed}, text + table_of(weighed, of, recipe.unit)))

    def export(self, values: dict[str, Any], out: str, merge: bool) -> tuple[str, str, bool]:
        return self._said(self._recipe.export, values, out=out, merge=merge)

    def _said(self, work: Any, values: dict[str, Any], **more: Any) -> tuple[str, str, bool]:
        return _told(work(self._options(values), **more))

    def _options(self, values: dict[str, Any]) -> Any:
        options = self._recipe.options(**{name: value for name, value in values.items() if name not in ("recipe_file", "recipe_sha256")})
        load_torch()  # Wrong options are refused without: it takes two seconds.
        if self._recipe.before is not None:
            self._recipe.before(options)
        return options


def _told(said: dict[str, Any]) -> tuple[str, str, bool]:
    return _json_of(said), said.text if isinstance(said, Told) else _text_of(said), False


@contextlib.contextmanager
def limited(options: RunOptions) -> Iterator[Governor]:
    """Yields a governor of the options' limits, with torch as a run has it: for a recipe's functions beside train().

    Errors: as plimsoll.Governor's.
    """
    from ..memory._memory import Governor
    from ..run import _run_settings

    _run_settings.settle(options.seed, options.compute_threads, True)
    with Governor(options.memory_limit, foreign_bytes=options.foreign_bytes, devices=options.devices()) as governor:
        yield governor


def entries_of(plan: BatchPlan) -> dict[str, Any]:
    """Returns a plan's fields by name, for what a recipe's plan() tells. `device` is left out where there is none."""
    return {name: value for name, value in dataclasses.asdict(plan).items() if name != "device" or value}


def tensor_bytes(work: Callable[[], object]) -> tuple[int, int]:
    """Calls work(). Returns the most bytes of tensors on the processor meanwhile, those before it included, and with a plan's cache and margin."""
    extension = _torch_gate.load()
    extension.reset_peak()
    work()
    peak = int(extension.arena_stats()["live_peak_bytes"])
    return peak, int(extension.with_cache_and_margin(peak))


def committed(run: str) -> tuple[int, dict[str, Any]]:
    """Returns the step of a run's last commit, and the states of its tracked parts by name. Tensors are pages of the file.

    Errors: NotFoundError where nothing is committed yet; CorruptError.
    """
    from ..run import _runs
    from ..training._checkpoint import read

    step = int(_runs.status(run)["checkpoint_step"])
    if step < 0:
        raise NotFoundError(f"{run}: nothing is committed yet")
    parts: dict[str, Any] = read(pathlib.Path(run) / "checkpoints" / f"step-{step:09}" / "parts.pt", step, mapped=True)["parts"]
    return step, parts


@contextlib.contextmanager
def _refused_by_name(run: Run) -> Iterator[None]:
    """Names a limit to try where the limit refused memory to an operator of torch's before the first step. Errors: BudgetExceeded."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError" or "DefaultCPUAllocator" not in str(error) or run.steps_made:
            raise
        raise run.governor.refusal("tensors", 0, str(error).splitlines()[0]) from None


class _OfRecipe(typing.NamedTuple):
    """A recipe's settings for its Run."""

    run_toml: str
    commit_every_steps: int
    quiet: bool
    threads_decide_bits: bool
    group: Leader | None = None


def _json_of(summary: dict[str, Any]) -> str:
    """Encodes a summary as JSON. Numbers that are not finite become null: JSON has none."""
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(summary))


def _text_of(summary: dict[str, Any]) -> str:
    def text(key: str, value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {text(f'{name}_bytes' if key.endswith('_bytes') else name, one)}" for name, one in value.items())
        if isinstance(value, (list, tuple)):
            return "; ".join(text(key, one) for one in value)
        return "-" if value is None else format_bytes(value) if key.endswith("_bytes") else f"{value:.6g}" if isinstance(
            value, float) else os.fspath(value) if isinstance(value, os.PathLike) else str(value)

    width = max(map(len, summary), default=0)
    return "\n".join(f"{key:<{width}}  {text(key, value)}" for key, value in summary.items())
