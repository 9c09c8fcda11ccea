# SPDX-License-Identifier: Apache-2.0
"""Previews: what the model answers by now, beside what the file says; each answer in bounded time.

Threads: the thread that trains.   Memory: a chat's keys and values; of the file at most _CHATS chats.
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
    """Generates the last answer of each chat, the likeliest token each time, and tells events.jsonl.

    Returns previews and previews_equal, how many were the file's. Errors: ValueError naming file and line; OSError.
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
    """Before a step is made. Errors: ValueError naming file and line; OSError."""
    for _ in _chats(path):
        pass


@torch.no_grad()
def _answer(tuned: Tuned, tokenizer: Any, asked: list[dict[str, str]], options: Options) -> str:
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    made = tuned.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                max_new_tokens=options.preview_tokens, max_time=options.preview_seconds,
                                pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(made[0, ids.shape[1]:], skip_special_tokens=True))


def _chats(path: str) -> Any:
    """(messages to answer, the answer or None), of at most _CHATS lines."""
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
