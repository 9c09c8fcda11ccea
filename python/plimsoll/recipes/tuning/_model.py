# SPDX-License-Identifier: Apache-2.0
"""Tuned: the model to fine-tune (transformers' model, peft's adapters, weights that may stay on disk) and its loss.

Threads: the thread that trains.
Memory:  weights as _choice.py says; logits of CHUNK tokens at a time.
"""
from __future__ import annotations

import collections
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ... import _core
from ...errors import CorruptError
from ...memory._adopt import adopt
from ...memory._refusal import is_of_device
from ...memory._scratch import scratch_folder
from ...training._cross_entropy import linear_cross_entropy
from ...training._quantised import QuantisedLinear, quantise, quantised_file
from ...training._streamed import StreamedWeights, stream_frozen
from ...training._weight_files import bytes_of, names_in, places_in, plain

if TYPE_CHECKING:
    from ...memory._memory import Governor
    from . import TuningOptions
    from ._choice import Choice

CHUNK = 256  # Tokens whose logits are there at a time: it decides the bits, and no limit decides it.
_WIDENED = 16  # Of them those whose logits are there in float32, while a model is evaluated.
AS_SAVED = "as-saved"
_IGNORED = -100
_SCALED = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")  # More than a head's product.


def libraries() -> tuple[Any, Any]:
    """Returns (transformers, peft). Errors: ImportError naming the packages to install."""
    try:
        import accelerate  # noqa: F401  Of both.
        import peft
        import transformers
    except ImportError as error:
        raise ImportError(f"the recipes chat and vision take {error.name}, which is not installed: pip install transformers peft "
                          "accelerate safetensors; vision also takes pillow and num2words") from None
    transformers.utils.logging.disable_progress_bar()
    return transformers, peft


def config_of(folder: str) -> Any:
    """Returns a model's transformers config. Errors: ValueError where the folder has none."""
    transformers, _ = libraries()
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {folder} is no folder of a model: {error}") from None


def blocks_of(model: Any) -> list[Any]:
    """Returns the blocks whose activations can be recomputed in backward."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def quantised(model: Any, options: TuningOptions) -> bool:
    """Makes the linear maps of a model's blocks quantised ones without values, if options.base says so; whether it does.

    Errors: ValueError where there is none; ImportError.
    """
    if options.base == AS_SAVED:
        return False
    if not quantise(blocks_of(model), options.base):
        raise ValueError(f"base: the blocks of {options.model} have no torch.nn.Linear that could be {options.base}; say {AS_SAVED}")
    return True


def adapted(model: Any, options: TuningOptions) -> Any:
    """Returns the model with peft's adapters, and with the modules that are trained whole. Errors: ValueError naming lora_targets."""
    _, peft = libraries()
    task = options.task()
    lora = peft.LoraConfig(r=options.lora_r, lora_alpha=options.lora_alpha, lora_dropout=options.lora_dropout,
                           target_modules=task.targets(model), modules_to_save=task.whole(model) or None, use_rslora=options.rslora,
                           use_dora=options.dora, task_type="CAUSAL_LM")
    try:
        made = peft.get_peft_model(model, lora)
    except ValueError as error:
        raise ValueError(f"lora_targets: {error}") from None
    for part in _whole(made).values():
        part.float()  # As all trained weights. transformers' models cast its output.
        part.register_forward_pre_hook(_widened)
    return made


def _whole(model: Any) -> dict[str, Any]:
    """Returns the modules that are trained whole, by their names in the model without adapters."""
    return _wrapped(model, "modules_to_save.default")


def _wrapped(model: Any, which: str) -> dict[str, Any]:
    """Returns the submodule `which` of each module that peft wraps to train it whole, by name in the model without adapters."""
    from peft.utils.other import ModulesToSaveWrapper

    return {name.removeprefix("base_model.model."): part.get_submodule(which) for name, part in model.named_modules()
            if isinstance(part, ModulesToSaveWrapper)}


def _widened(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.float() if torch.is_tensor(one) and one.is_floating_point() else one for one in inputs)


def made_within(governor: Governor, options: TuningOptions, choice: Choice, whole: Callable[[int], int] = int) -> Tuned:
    """Makes the model. Errors: those of Tuned; BudgetExceeded naming a limit to try, where memory is refused.

    whole: returns the limit of all ranks, given that of this one.
    """
    try:
        return Tuned(options, choice)
    except torch.OutOfMemoryError as error:
        if is_of_device(error):
            raise governor.device_refusal(f"model: {options.model} does not fit (--device cpu trains on the processor)") from None
        raise governor.refusal("tensors", 0, f"model: {options.model} does not fit: {error}", whole=whole) from None


class Tuned(torch.nn.Module):
    """A model whose adapters or whose whole weights are trained. Calling it with a Batch returns the loss.

    Its state_dict() holds the trained weights, and checksums of the blocks' frozen weights (see stream_frozen).
    """

    def __init__(self, options: TuningOptions, choice: Choice) -> None:
        """Loads the model. Errors: ValueError naming the option; BudgetExceeded; CorruptError; OSError."""
        super().__init__()
        config, self._class = config_of(options.model), options.task().model_class()
        self.frozen: StreamedWeights | None = None
        self.device = torch.device(options.device_name())
        """The model's device. forward() and scores() move their arguments there."""
        if choice.method == "full":
            self.model = self._class.from_pretrained(options.model, dtype=torch.float32)
            adopt(self.model)  # Weights mapped from files move into leased memory.
        else:
            self.model = self._adapted(options, choice, config)
        if choice.recomputes and choice.weights == "resident":  # Streamed blocks run again in any case.
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.to(self.device)
        self._cast = choice.method == "full" and options.dtype == "bfloat16"
        self._dtype = torch.float32 if choice.method == "full" else getattr(torch, options.dtype)
        text = config.get_text_config()
        scaled = [name for name in _SCALED if getattr(text, name, None) not in (None, 1)]
        head = self.language_model.get_output_embeddings()
        self.chunked = type(head) is torch.nn.Linear and not scaled
        """Whether logits are computed CHUNK tokens at a time. A model whose head does more than multiply computes all at once."""
        self.train()

    def _adapted(self, options: TuningOptions, choice: Choice, config: Any) -> Any:
        import accelerate

        dtype = getattr(torch, options.dtype)
        config._name_or_path = options.model  # The adapters' config names it.
        if options.dora:
            model = self._class.from_pretrained(options.model, dtype=dtype)
        else:
            with accelerate.init_empty_weights():
                model = self._class.from_config(config, dtype=dtype)
            model.generation_config = _generation_config(options.model, model)
        model.requires_grad_(False)
        if options.dora:  # DoRA needs the weights' norms at once.
            model = adapted(model, options)
        files: Any = options.model
        if quantised(model, options):
            files = [*pathlib.Path(files).glob("*.safetensors"), quantised_file(model, files, self._folder_of(options))]
        self.frozen = stream_frozen(model, files, weights=choice.weights, device=self.device)
        return model if options.dora else adapted(model, options)

    def _folder_of(self, options: TuningOptions) -> pathlib.Path:
        """Returns the run's folder for quantised weights; without a run one that goes with this model."""
        if os.path.isdir(options.out):
            return pathlib.Path(options.out) / "weights"
        self._scratch = tempfile.TemporaryDirectory(prefix="plimsoll-", dir=scratch_folder(None, "base"))
        return pathlib.Path(self._scratch.name)

    @property
    def language_model(self) -> Any:
        """The transformers model, with the adapters inside."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def blocks(self) -> list[Any]:
        """The blocks whose activations can be recomputed in backward."""
        return blocks_of(self.model)

    def trained(self) -> list[Any]:
        """Returns the parameters that are trained."""
        return [one for one in self.model.parameters() if one.requires_grad]

    def train(self, mode: bool = True) -> Tuned:
        """Sets the training mode, but keeps frozen batch norms in evaluation: their statistics are no part of a commit."""
        super().train(mode)
        for part in self.modules():
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and not any(one.requires_grad for one in part.parameters()):
                part.eval()
        return self

    # ---- Loss ----

    def forward(self, inputs: dict[str, Any], labels: Any) -> Any:
        """Returns the mean loss over the tokens to train on."""
        inputs, labels = self._brought(inputs, labels)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._cast):
            if not self.chunked:
                logits = self._logits(inputs)[:, :-1].float()
                return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
            head = self.language_model.get_output_embeddings()
            return linear_cross_entropy(self._hidden(inputs)[:, :-1], head.weight, labels[:, 1:], bias=head.bias, chunk=CHUNK)

    @torch.no_grad()
    def scores(self, inputs: dict[str, Any], labels: Any) -> tuple[float, int, int]:
        """Returns (sum of losses, number of tokens predicted right, number of tokens), over the tokens to train on."""
        loss, right, count = 0.0, 0, 0
        inputs, labels = self._brought(inputs, labels)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._cast):
            for logits, wanted in self._chunks(inputs, labels):
                for some, labelled in zip(logits.split(_WIDENED), wanted.split(_WIDENED)):  # Less than a step's chunk takes.
                    loss += float(torch.nn.functional.cross_entropy(some.float(), labelled, reduction="sum"))
                right += int((logits.argmax(1) == wanted).sum())
                count += len(wanted)
        return loss, right, count

    def _brought(self, inputs: dict[str, Any], labels: Any) -> tuple[dict[str, Any], Any]:
        return {name: one.to(self.device) for name, one in inputs.items()}, labels.to(self.device)

    def _chunks(self, inputs: dict[str, Any], labels: Any) -> Iterator[tuple[Any, Any]]:
        places = labels[:, 1:] != _IGNORED
        made = (self._hidden if self.chunked else self._logits)(inputs)[:, :-1][places]
        head = self.language_model.get_output_embeddings()
        for rows, wanted in zip(made.split(CHUNK), labels[:, 1:][places].split(CHUNK)):
            yield head(rows) if self.chunked else rows, wanted

    # Without a mask transformers tells documents apart by their positions, and sliding windows stay what they are.

    def _hidden(self, inputs: dict[str, Any]) -> Any:
        return self.language_model.base_model(**self._cast_to(inputs), use_cache=False).last_hidden_state

    def _logits(self, inputs: dict[str, Any]) -> Any:
        return self.language_model(**self._cast_to(inputs), use_cache=False).logits

    def _cast_to(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the inputs with pixels in the weights' dtype: not all transformers models convert them."""
        return {name: one.to(self._dtype) if one.is_floating_point() else one for name, one in inputs.items()}

    # ---- State ----

    def state_dict(self, *_: Any, **__: Any) -> Any:
        """Returns the state for a commit: trained weights, and the checksums of frozen blocks."""
        return self._state(True)

    def _state(self, held: bool) -> dict[str, Any]:
        """Returns the part of the state that a commit holds, or the rest: frozen weights outside the blocks."""
        trained = {name: one.requires_grad for name, one in self.model.named_parameters(remove_duplicate=False)}
        return {name: one for name, one in self.model.state_dict().items()
                if held == (trained.get(name, True) or (one.dtype == torch.int64 and one.dim() == 0))}

    def must_be_noted(self, notes: dict[str, Any]) -> None:
        """Checks the checksum of the weights that no commit holds against the notes, or notes it there. Errors: CorruptError if it differs."""
        found = 0
        for _, one in sorted(self._state(False).items()):
            found = _core.crc32c(bytes_of(one.cpu()), found)
        if notes.setdefault("frozen", found) != found:
            raise CorruptError(f"model: frozen weights outside of the blocks are not what training began with: their checksum is "
                               f"{found:08x} and was {notes['frozen']:08x}. Put the files back, or train anew")

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
        """Loads a commit's state. Errors: CorruptError where the frozen weights differ from the state's."""
        return self.model.load_state_dict(state_dict, strict=False)

    # ---- For others ----

    def save(self, folder: pathlib.Path, source: str) -> None:
        """Saves the adapters in peft's format, or the whole model in transformers' format. Errors: OSError."""
        if self.frozen is not None:
            self.model.save_pretrained(folder, save_embedding_layers=False)
            return
        self.model.save_pretrained(folder)
        _copy_rest(source, folder, index=False)

    def save_merged(self, folder: pathlib.Path, source: str) -> None:
        """Saves the model's own files with the adapters merged in by peft, holding one file in memory at a time. Weights that
        were quantised are those that were trained with: rounded, in the files' dtype.

        Errors: ValueError where a trained weight is shared with another module, which merging would change; OSError.
        """
        from peft.tuners.lora import LoraLayer
        from safetensors import safe_open
        from safetensors.torch import save_file

        layers: dict[str, Any] = {plain(name): part for name, part in self.model.named_modules() if isinstance(part, LoraLayer)}
        small: dict[str, Any] = {plain(name): part for name, part in self.model.named_modules() if isinstance(part, QuantisedLinear)}
        whole = {f"{name}.{key}": one for name, part in _whole(self.model).items() for key, one in part.state_dict().items()}
        bases = {**{name: part.get_base_layer() for name, part in layers.items()}, **_wrapped(self.model, "original_module")}
        held = collections.Counter(id(one) for part in self.model.modules() for one in part._parameters.values())
        for name, base in bases.items():
            if any(held[id(one)] > 1 for one in base.parameters()):
                raise ValueError(f"merge: the weight of {name}, which was trained, is another module's, too (tied): merged it "
                                 "would change both. Export without --merge, or train without it")
        folder.mkdir(parents=True)
        called = names_in(self.model, places_in(source))
        for file in sorted(pathlib.Path(source).glob("*.safetensors")):
            with safe_open(file, "pt") as held:
                tensors = {}
                for name in held.keys():
                    tensors[name] = held.get_tensor(name)
                    stem = called[name].removesuffix(".weight")
                    if name.endswith(".weight") and (key := _called(stem, small)) is not None:
                        tensors[name] = small.pop(key).rounded(tensors[name])
                    if name.endswith(".weight") and (key := _called(stem, layers)) is not None:
                        tensors[name] = _merged(layers.pop(key), tensors[name])
                    elif called[name] in whole:
                        tensors[name] = whole.pop(called[name]).to(tensors[name].dtype).contiguous()
                save_file(tensors, folder / file.name, metadata=held.metadata())
        if missed := [*layers, *whole]:
            raise ValueError(f"merge: the files of {source} have no weight of {missed[0]}, which was trained")
        _copy_rest(source, folder, index=True)


def _called(stem: str, parts: dict[str, Any]) -> str | None:
    """Returns the name among `parts` of what a file calls `stem`."""
    return next((one for one in parts if one == stem or one.endswith("." + stem) or stem.endswith("." + one)), None)


def _merged(layer: Any, weight: Any) -> Any:
    """Returns a weight with its adapter merged in. The merge is computed in float32."""
    before = layer.base_layer
    if isinstance(before, QuantisedLinear):
        layer.base_layer = torch.nn.Linear(before.in_features, before.out_features, bias=False, device="meta")
    base = layer.get_base_layer()
    own = base._parameters["weight"]
    base._parameters["weight"] = torch.nn.Parameter(weight.float(), requires_grad=False)
    try:
        layer.merge(safe_merge=True)
        return base._parameters["weight"].data.to(weight.dtype).contiguous()
    finally:
        base._parameters["weight"] = own
        layer.base_layer = before


def _copy_rest(source: str, folder: pathlib.Path, *, index: bool) -> None:
    """Copies config, tokenizer and template, and with `index` the map from weights to files; no weights."""
    for file in sorted(pathlib.Path(source).iterdir()):
        if file.is_file() and file.suffix in (".json", ".txt", ".jinja", ".model") and not (folder / file.name).exists() \
                and (index or not file.name.endswith(".index.json")):
            shutil.copyfile(file, folder / file.name)


def _generation_config(folder: str, model: Any) -> Any:
    transformers, _ = libraries()
    if os.path.exists(os.path.join(folder, "generation_config.json")):
        return transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.generation_config
