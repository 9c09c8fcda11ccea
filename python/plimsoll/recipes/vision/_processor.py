# SPDX-License-Identifier: Apache-2.0
"""processor_of(): loads the processor in a model's folder, for images and text.

Threads: the thread that trains.   Memory: that of its tokenizer.
"""
from __future__ import annotations

import inspect
import json
import pathlib
from typing import Any

from ...data._image_processor import image_processor
from ..tuning._model import config_of, libraries


def processor_of(folder: str) -> Any:
    """Returns transformers' own processor, with pixels computed by Plimsoll to the same bits.

    It has no part for videos, which would need torchvision.

    Errors: ValueError naming the folder.
    """
    transformers, _ = libraries()
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    said = _said(folder)
    kind = getattr(transformers, said.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(config_of(folder).model_type) or "", None)
    try:
        if kind is None:
            made = transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
        else:
            parts = {"image_processor": transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True,
                                                                                        backend="pil"),
                     "tokenizer": transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)}
            made = _without_videos(kind)(**{**_options(folder, kind, said), **parts})
    except (OSError, TypeError, ImportError) as error:
        raise ValueError(f"model: {folder} has no processor of images and text: {error}") from None
    if not getattr(made, "chat_template", None):
        made.chat_template = made.tokenizer.chat_template
    if isinstance(made.chat_template, dict):  # Named ones.
        made.chat_template = made.chat_template.get("default")
    if not made.chat_template:
        raise ValueError(f"model: {folder} has no chat template; save one there, chat_template.jinja")
    made.image_processor = image_processor(made.image_processor)
    return made


def _without_videos(kind: Any) -> Any:
    if "video_processor" not in inspect.signature(kind.__init__).parameters:
        return kind
    check = kind.check_argument_for_proper_class
    return type(kind.__name__, (kind,), {
        "__module__": kind.__module__,
        "__init__": lambda self, **given: kind.__init__(self, **{"video_processor": None, **given}),
        "get_attributes": classmethod(lambda cls: kind.get_attributes()),
        "check_argument_for_proper_class":
            lambda self, name, part: None if part is None else check(self, name, part)})


def _said(folder: str) -> dict[str, Any]:
    """Returns the content of processor_config.json; {} where there is none."""
    try:
        said = json.loads((pathlib.Path(folder) / "processor_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return said if isinstance(said, dict) else {}


def _options(folder: str, kind: Any, said: dict[str, Any]) -> dict[str, Any]:
    """Returns the plain options in processor_config.json, and the chat template."""
    known = inspect.signature(kind.__init__).parameters
    template = pathlib.Path(folder) / "chat_template.jinja"
    plain = {key: value for key, value in said.items() if key in known and isinstance(value, (int, float, str))}
    return {**plain, "chat_template": template.read_text(encoding="utf-8") if template.exists() else None}
