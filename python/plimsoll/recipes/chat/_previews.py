# SPDX-License-Identifier: Apache-2.0
"""Previews: the model's present answers beside those of a file, each generated in bounded time.

Threads: the thread that trains.   Memory: the keys and values of a chat. At most _CHATS chats of the file are read.
"""
from __future__ import annotations

import functools
import json
import time
from typing import TYPE_CHECKING, Any

import torch

from ...memory._refusal import unless_refused
from ..tuning._model import libraries

if TYPE_CHECKING:
    from ...run._run import Run
    from ..tuning._model import Tuned
    from . import Options

_CHATS = 32
_LINE = 1 << 20


def preview(tuned: Tuned, options: Options, run: Run, step: int) -> dict[str, Any]:
    """Generates the last answer of each chat, always taking the likeliest token, and logs it to events.jsonl.

    Returns previews, the number of answers, and previews_equal, the number that equal the file's. Errors: ValueError naming file and line; OSError.
    """
    transformers, _ = libraries()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    equal = count = 0
    tuned.eval()
    try:
        for asked, wanted in _chats(options.previews):
            if run.stop_asked:
                break
            began = time.monotonic()
            answer, refusal = unless_refused(functools.partial(_answer, tuned, tokenizer, asked, options))
            count += 1
            equal += int(refusal is None and wanted is not None and answer.strip() == wanted.strip())
            run.event("preview", step=step, asked=asked[-1]["content"][:2000], wanted=(wanted or "")[:2000], answer=answer or "",
                      refusal=str(refusal or ""), seconds=time.monotonic() - began)
    finally:
        tuned.train()
    return {"previews": count, "previews_equal": equal}


def check(path: str) -> None:
    """Checks the file of previews, before the first step. Errors: ValueError naming file and line; OSError."""
    for _ in _chats(path):
        pass


@torch.no_grad()
def _answer(tuned: Tuned, tokenizer: Any, asked: list[dict[str, str]], options: Options) -> str:
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"].to(tuned.device)
    made = tuned.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                max_new_tokens=options.preview_tokens, max_time=options.preview_seconds,
                                pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(made[0, ids.shape[1]:], skip_special_tokens=True))


def _chats(path: str) -> Any:
    """Yields (messages to answer, the expected answer or None) of at most _CHATS lines."""
    with open(path, encoding="utf-8") as lines:
        for number in range(1, _CHATS + 1):
            line = lines.readline(_LINE)
            if not line:
                return
            try:
                messages = json.loads(line)["messages"]
                last = messages[-1]["content"] if messages[-1]["role"] == "assistant" else None
                asked = messages if last is None else messages[:-1]
                asked[-1]["content"]
            except (ValueError, TypeError, KeyError, IndexError):
                raise ValueError(f"previews: {path}:{number}: no line of JSON with messages, of role and content each") from None
            yield asked, last
