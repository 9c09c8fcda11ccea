# SPDX-License-Identifier: Apache-2.0
"""Rows of every shape that imports know, with keys renamed, nested, typed otherwise, null or too many.

Every text in a row has a mark of its own: what becomes of each can be followed.
"""
from __future__ import annotations

import copy
import itertools
import random
import re
from typing import Any

MARK = re.compile(r"~\d+~")
NAMES = ["id", "source", "score", "meta", "model", "url", "label", "weight", "train", "system", "history", "tools", "text", "caption",
         "name", "images", "image", "content", "role", "value", "from", "type", "answer", "question", "input", "output", "messages",
         "rejected", "prompt", "completion", "reasoning_content", "thinking", "tool_calls", "tool_call_id", "mood", "Text", "x", "",
         "user", "assistant", "texts", "function", "arguments", "texts_", "kto_tag", "loss", "path", "bytes", "videos", "refusal"]


class OddRows:
    """A source of rows. Threads: one owner."""

    def __init__(self, seed: int, image: str | None = None) -> None:
        """image: an image as rows name it; None: rows of chats."""
        self._numbers = random.Random(seed)
        self._marks = itertools.count()
        self._image = image

    def row(self) -> dict[str, Any]:
        """The next."""
        row = self._plain()
        if self._image is not None and self._numbers.random() < 0.9:
            name = self._one("image", "image", "images", "img", "file_name")
            row[name] = [self._image] if name == "images" else self._image
        for _ in range(self._one(0, 0, 1, 1, 2, 3)):
            self._spoil(row)
        return row

    def _one(self, *of: Any) -> Any:
        return self._numbers.choice(of)

    def text(self) -> str:
        return self._one("", " ", "a ") * (self._numbers.random() < 0.1) + f"~{next(self._marks)}~"

    def _plain(self) -> dict[str, Any]:
        kind = self._one("messages", "messages", "messages", "columns", "columns", "prompt", "pairs", "preference", "text")
        if kind == "messages":
            row = {self._one("messages", "conversations", "conversation"): self._chat()}
        elif kind == "columns":
            row = {self._one("instruction", "question", "query", "prompt"): self.text(),
                   self._one("output", "response", "answer", "completion"): self.text()}
            row |= {"input": self._one("", self.text())} if self._numbers.random() < 0.4 else {}
            row |= {"history": [[self.text(), self.text()]]} if self._numbers.random() < 0.3 else {}
        elif kind == "prompt":
            row = {"prompt": self._chat()[:1], "completion": [{"role": "assistant", "content": self.text()}]}
        elif kind == "pairs":
            row = {"texts": [{"user": self.text(), "assistant": self.text(), "source": self.text()}
                             for _ in range(self._one(1, 2))]}
        elif kind == "preference":
            row = {"prompt": self.text(), "chosen": self.text(), "rejected": self.text()}
        else:
            row = {"text": self.text()}
        for name, value in (("system", self.text()), ("id", 7), ("source", self.text()), ("label", self._one(True, False)),
                            ("tools", [{"type": "function", "function": {"name": self.text()}}]), ("meta", {"a": self.text()})):
            row |= {name: value} if self._numbers.random() < 0.1 else {}
        return row

    def _chat(self) -> list[dict[str, Any]]:
        role, content, names = self._one(("role", "content", ("user", "assistant", "system", "tool")),
                                         ("from", "value", ("human", "gpt", "system", "observation")))
        messages: list[dict[str, Any]] = [{role: names[2], content: self.text()}] * (self._numbers.random() < 0.3)
        for _ in range(self._one(1, 1, 2)):
            messages += [{role: names[0], content: self._content()}, {role: names[1], content: self._content()}]
            if self._numbers.random() < 0.2:
                call = {"type": "function", "id": self.text(), "function": {"name": self.text(), "arguments": {"k": self.text()}}}
                messages[-1]["tool_calls"] = [call]
                messages += [{role: names[3], content: self.text(), "tool_call_id": self.text()}, {role: names[1], content: self.text()}]
            if self._numbers.random() < 0.2:
                messages[-1][self._one("weight", "train", "training")] = self._one(0, 1, False, True)
            if self._numbers.random() < 0.2:
                messages[-1][self._one("reasoning_content", "thinking")] = self.text()
            if self._numbers.random() < 0.1:
                messages[-1]["name"] = self.text()
        return messages

    def _content(self) -> Any:
        if self._numbers.random() < 0.7:
            return self.text()
        return [{"type": "text", "text": self.text()} for _ in range(self._one(1, 2))]

    def _spoil(self, row: dict[str, Any]) -> None:
        """Changes one key somewhere in the row."""
        objects: list[dict[str, Any]] = []
        left: list[Any] = [row]
        while left:
            value = left.pop()
            if isinstance(value, dict):
                objects.append(value)
                left += value.values()
            elif isinstance(value, list):
                left += value
        where = self._one(*objects)
        extra = self._one("...", *NAMES)
        if not where or self._numbers.random() < 0.3:
            where[extra] = self._value()
            return
        name = self._one(*where)
        how = self._one("rename", "nest", "list", "type", "null", "drop", "copy")
        if how == "rename":
            where[extra] = where.pop(name)
        elif how == "nest":
            where[name] = {self._one(*NAMES): where[name]}
        elif how == "list":
            where[name] = [where[name]]
        elif how == "type":
            where[name] = self._value()
        elif how == "null":
            where[name] = None
        elif how == "drop":
            del where[name]
        else:
            where[extra] = copy.deepcopy(where[name])

    def _value(self) -> Any:
        return self._one(None, True, False, 0, 1, 0.5, "", [], {}, self.text(), [self.text()], {"a": self.text()}, [{"b": self.text()}],
                         [[self.text(), self.text()]])


def keys_in(value: Any) -> int:
    """Keys of all objects in it."""
    if isinstance(value, dict):
        return len(value) + sum(map(keys_in, value.values()))
    return sum(map(keys_in, value)) if isinstance(value, list) else 0


def marks_in(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, tuple[str, ...]]]:
    """Each mark and the keys that lead to it."""
    if isinstance(value, dict):
        return [one for key, inner in value.items() for one in marks_in(inner, (*path, key))]
    if isinstance(value, list):
        return [one for inner in value for one in marks_in(inner, path)]
    return [(mark, path) for mark in MARK.findall(value)] if isinstance(value, str) else []
