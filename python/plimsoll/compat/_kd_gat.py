# SPDX-License-Identifier: Apache-2.0
"""A configuration or command line of KD-GAT as options of the recipe can-kd.

Threads: any.   Memory: the configuration, at most 1 MiB.
"""
from __future__ import annotations

import difflib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .. import _core, recipes

_RECIPE = "can-kd"
_BYTES_MAX = 1 << 20
_STAGES = {"autoencoder": "autoencoder", "curriculum": "curriculum", "normal": "normal", "fusion": "fusion",
           "evaluation": "evaluation", "vgae": "autoencoder", "gat": "curriculum", "dqn": "fusion"}
_SIZES = {"teacher": "teacher", "student": "student", "large": "teacher", "small": "student"}
_PRESET_STAGES, _PRESET_SIZES = ("vgae", "gat", "fusion", "dqn"), ("teacher", "student")

_SAME = frozenset("""
    seed max_epochs batch_size patience weight_decay gradient_clip precision use_scheduler scheduler_type
    scheduler_t_max scheduler_step_size scheduler_gamma gradient_checkpointing use_teacher_cache
    clear_cache_every_n offload_teacher_to_cpu accumulate_grad_batches save_top_k log_every_n_steps
    test_every_n_epochs gat_dropout vgae_dropout use_kd teacher_path kd_temperature kd_alpha
    kd_vgae_latent_weight kd_vgae_recon_weight curriculum_start_ratio curriculum_end_ratio
    difficulty_percentile use_vgae_mining difficulty_cache_update fusion_episodes fusion_lr run_test""".split())
_OTHER = {"lr": ("vgae_lr", "gat_lr", "fusion_lr"), "kd_model_path": ("teacher_path",),
          "dqn_hidden": ("fusion_hidden",), "dqn_gamma": ("fusion_gamma",), "dqn_epsilon": ("fusion_epsilon",),
          "dqn_epsilon_decay": ("fusion_epsilon_decay",), "dqn_min_epsilon": ("fusion_epsilon_min",),
          "dqn_buffer_size": ("fusion_replay",), "dqn_batch_size": ("fusion_batch",),
          "dqn_target_update": ("fusion_target_update",)}
# Keys of both the teacher and the student, or of the one in model_size.
_SIZED = frozenset("""vgae_hidden_dims vgae_heads vgae_embedding_dim gat_hidden gat_layers gat_heads
    gat_embedding_dim gat_fc_layers""".split())
_WIDTHS = {"teacher": "1024,512,96", "student": "80,40,16"}  # vgae_latent_dim replaces the last width.
_SPECIAL = ("preset", "model_type", "scale", "model_size", "kd_type", "vgae_latent_dim", "optimize_batch_size")

_BATCH_MOST = "4096"
_LIMIT = "the batch is planned for all of --memory-limit, and measured"
_LOSS = "a stage watches its own validation loss"
_GRAPHS = "the fusion learns from all graphs"
_BATCH = "fusion_batch transitions are a step"
_IMPORT = "windows are cut by `plimsoll import can`"
_IGNORED = {
    "dataset": "--data names the graph set", "modality": "a graph set is CAN traffic",
    "experiment_root": "--out names the run folder", "device": "can-kd computes on the CPU",
    "num_workers": "no process loads graphs beside this one", "mp_start_method": "no process is started",
    "deterministic": "every run is", "cudnn_benchmark": "can-kd computes on the CPU",
    "compile_model": "the models are compiled already", "find_unused_parameters": "one process trains",
    "dynamic_batching": "batch_nodes and batch_edges bound every batch", "safety_factor": _LIMIT,
    "batch_size_mode": _LIMIT, "max_batch_size_trials": _LIMIT, "memory_estimation": _LIMIT,
    "curriculum_memory_multiplier": "the curriculum's batches are batches like others",
    "monitor_metric": _LOSS, "monitor_mode": _LOSS, "log_teacher_student_comparison": "both are always reported",
    "dqn_layers": "the fusion's network has two hidden layers", "alpha_steps": "the fusion chooses among 21 weights",
    "fusion_max_samples": _GRAPHS, "max_val_samples": _GRAPHS, "episode_sample_size": _GRAPHS,
    "training_step_interval": _BATCH, "gpu_training_steps": _BATCH, "preprocessing_window_size": _IMPORT,
    "preprocessing_stride": _IMPORT}
_GROUPS = {"vgae": "vgae_", "gat": "gat_", "dqn": "dqn_", "fusion": "fusion_", "training": "",
           "auxiliaries": "kd_", "preprocessing": "preprocessing_"}
_KEYS = {*_SAME, *_OTHER, *_SIZED, *_SPECIAL, *_IGNORED}


class Converted(NamedTuple):
    """The result of from_kd_gat().

    options: the options of can-kd, as text: plimsoll.train("can-kd", data=…, out=…, **options).
    notes:   a line for each key that can-kd does not use, with the reason.
    toml:    the options as a file for `plimsoll train can-kd --config`, each with its source.
    """

    options: dict[str, str]
    notes: list[str]
    toml: str


class _Given(NamedTuple):
    text: str
    source: str  # "kd.json: gat.heads"


def from_kd_gat(config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
                arguments: Sequence[str] = ()) -> Converted:
    """Converts a configuration or command line of KD-GAT, or both, to options of the recipe can-kd.

        plimsoll.compat.from_kd_gat("config.json")
        plimsoll.compat.from_kd_gat(arguments=["curriculum", "--preset", "gat,student", "--lr", "0.001"])

    config:    a .json file, flat or nested (vgae, gat, dqn, training, fusion, auxiliaries), or its contents as a mapping.
    arguments: the arguments of `python -m pipeline.cli`. They override `config`, and may name its file (--config).
    Errors:    ValueError naming a key that is unknown or has a value can-kd does not accept; OSError.
    """
    stage, flags, named = _arguments(arguments)
    config = config if config is not None else named
    given = {} if config is None else _of_config(config)
    given.update(flags)
    if stage is not None:
        given["model_type"] = stage
    return _convert(given)


def _arguments(arguments: Sequence[str]) -> tuple[_Given | None, dict[str, _Given], str | None]:
    """Returns the stage, the flags, and the file that --config names."""
    words, stage, flags = list(arguments), None, {}
    if words and not words[0].startswith("-"):
        stage = _Given(words.pop(0), "the first argument")
    while words:
        flag, equals, text = words.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ValueError(f"{flag}: an option of KD-GAT begins with --")
        if not equals:
            if not words:
                raise ValueError(f"{flag}: the value is missing")
            text = words.pop(0)
        key = flag[2:].replace("-", "_")
        if key != "config":
            _check_known(key, flag)
        flags[key] = _Given({"True": "true", "False": "false"}.get(text, text), flag)
    named = flags.pop("config", None)
    return stage, flags, None if named is None else named.text


def _of_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, _Given]:
    if isinstance(config, Mapping):
        return dict(_keys_of(config, "config"))
    path = pathlib.Path(config)
    with path.open("rb") as file:
        raw = file.read(_BYTES_MAX + 1)
    if len(raw) > _BYTES_MAX:
        raise ValueError(f"{path}: more than {_BYTES_MAX} bytes are no configuration of KD-GAT")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: the outermost value must be an object")
    return dict(_keys_of(found, str(path)))


def _keys_of(found: Mapping[str, Any], where: str) -> Iterator[tuple[str, _Given]]:
    """Yields a configuration's flat keys. Keys of a group get the group's prefix where such a key exists."""
    for key, value in found.items():
        if key in _GROUPS and isinstance(value, (Mapping, list)):
            for table in [value] if isinstance(value, Mapping) else value:
                if not isinstance(table, Mapping):
                    raise ValueError(f"{where}: {key} must be an object or a list of objects")
                for inner, one in table.items():
                    prefixed = _GROUPS[key] + inner
                    name = inner if prefixed not in _KEYS and inner in _KEYS else prefixed
                    yield from _key_of(name, one, f"{where}: {key}.{inner}")
        else:
            yield from _key_of(key, value, f"{where}: {key}")


def _key_of(key: str, value: Any, source: str) -> Iterator[tuple[str, _Given]]:
    _check_known(key, source)
    if isinstance(value, bool):
        yield key, _Given("true" if value else "false", source)
    elif isinstance(value, (int, float, str)):
        yield key, _Given(str(value), source)
    elif isinstance(value, (list, tuple)) and all(isinstance(one, (int, str)) for one in value):
        yield key, _Given(",".join(map(str, value)), source)
    elif value is not None:  # null: as it is by default.
        raise ValueError(f"{source}: {value!r} is neither text, a number nor true or false")


def _check_known(key: str, source: str) -> None:
    if key not in _KEYS:
        near = difflib.get_close_matches(key, sorted(_KEYS), 1)
        raise ValueError(f"{source}: KD-GAT has no key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _convert(given: dict[str, _Given]) -> Converted:
    options: dict[str, str] = {}
    lines: dict[str, str] = {}
    recipes.find()

    def put(ours: str, text: str, source: str) -> None:
        options[ours] = text
        comment = "".join(letter if letter.isprintable() else "?" for letter in source)
        lines[ours] = f"{f'{ours} = {_core.option_literal(_RECIPE, ours, text, source)}':<40}  # {comment}\n"

    stage, size = _chosen(given)
    for ours, choice in (("stage", stage), ("model_size", size)):
        if choice is not None:
            put(ours, *choice)
    sizes = ["teacher", "student"] if size is None else [size.text]
    for theirs in sorted(given, key=lambda key: key != "lr"):  # A model's own rate overrides lr.
        text, source = given[theirs]
        for ours in ([theirs] if theirs in _SAME else _OTHER.get(theirs, ())):
            put(ours, text, source)
        if theirs in _SIZED:
            for one in sizes:
                put(f"{one}_{theirs}", text, source)
    if "kd_type" in given:
        if given["kd_type"].text != "kd":
            raise ValueError(f"{given['kd_type'].source}: can-kd knows the type kd, not {given['kd_type'].text!r}")
        put("use_kd", "true", given["kd_type"].source)
    if "vgae_latent_dim" in given:
        text, source = given["vgae_latent_dim"]
        for one in sizes:
            key = f"{one}_vgae_hidden_dims"
            widths = options.get(key, _WIDTHS[one]).strip("[]() ").split(",")
            put(key, ",".join([*widths[:-1], text]), source)
    if "optimize_batch_size" in given and _switch(given["optimize_batch_size"]):
        put("batch_size", "auto", given["optimize_batch_size"].source)
        put("batch_size_max", *given.get("batch_size", _Given(_BATCH_MOST, "KD-GAT's default")))
    notes = [f"ignored: {key} = {given[key].text}: {_IGNORED[key]}" for key in given if key in _IGNORED]
    return Converted(options, notes, f"# From KD-GAT.\n[{_RECIPE}]\n" + "".join(lines.values()))


def _chosen(given: dict[str, _Given]) -> tuple[_Given | None, _Given | None]:
    """Returns (stage, size). Words of --preset count only where no other key sets them."""
    stage = size = None
    for word in given["preset"].text.split(",") if "preset" in given else ():
        source = f"{given['preset'].source} {word}"
        if word in _PRESET_STAGES and stage is None:
            stage = _Given(_STAGES[word], source)
        elif word in _PRESET_SIZES and size is None:
            size = _Given(_SIZES[word], source)
        elif word in (*_PRESET_STAGES, *_PRESET_SIZES):
            raise ValueError(f"{source}: one model and one of teacher and student make a preset")
        else:
            raise ValueError(f"{source}: the words of a preset are "
                             + ", ".join((*_PRESET_STAGES, *_PRESET_SIZES)))
    for key in ("model_type", "scale", "model_size"):
        if key in given:
            text, source = given[key]
            known = _STAGES if key == "model_type" else _SIZES
            if text not in known:
                raise ValueError(f"{source}: {text!r} is none of {', '.join(known)}")
            if key == "model_type":
                stage = _Given(known[text], source)
            else:
                size = _Given(known[text], source)
    return stage, size


def _switch(given: _Given) -> bool:
    if given.text not in ("true", "false"):
        raise ValueError(f"{given.source}: must be true or false, not {given.text!r}")
    return given.text == "true"
