# SPDX-License-Identifier: Apache-2.0
"""Kinds of chats that are told apart by templates, one row of each."""
from __future__ import annotations

from typing import Any

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks <up> \"it\"", "parameters": {
    "type": "object", "properties": {"what": {"type": "string", "description": "é"}}, "required": ["what"]}}}]


def _said(*turns: tuple[str, Any], **of_last: Any) -> list[dict[str, Any]]:
    chat = [{"role": {"s": "system", "u": "user", "a": "assistant", "d": "developer"}[who], "content": what} for who, what in turns]
    chat[-1] |= of_last
    return chat


def _call(content: str | None, *arguments: Any) -> dict[str, Any]:
    calls = [{"type": "function", "id": f"call0000{k}", "function": {"name": "look", "arguments": one}} for k, one in enumerate(arguments)]
    return {"role": "assistant", "tool_calls": calls} | ({} if content is None else {"content": content})


def _answer(text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "name": "look", "tool_call_id": f"call0000{number}", "content": text}


_ONE, _TWO = (("u", "What is one?"), ("a", "One is first.")), (("u", "And two?"), ("a", "Two, second"))
_PARTS = [{"type": "text", "text": "In a part"}]
KINDS: dict[str, dict[str, Any]] = {
    "one answer": {"messages": _said(*_ONE)},
    "system": {"messages": _said(("s", "Be brief."), *_ONE)},
    "two answers": {"messages": _said(*_ONE, *_TWO)},
    "system and four answers": {"messages": _said(("s", "Be brief."), *(_ONE + _TWO) * 2)},
    "ends with the user": {"messages": _said(*_ONE, ("u", "And then?"))},
    "white space": {"messages": _said(("u", " \n one\t"), ("a", "\n\n first \n"), ("u", "  two"), ("a", "second\n\n"))},
    "other scripts": {"messages": _said(("u", "é漢字\U0001f600\r\n"), ("a", "東京 и\u0301\u200d"), *_TWO)},
    "markup": {"messages": _said(("u", "{{ messages }} <|im_end|>"), ("a", "<b>&amp;</b> {% raw %} <|im_start|>user"), *_TWO)},
    "empty answer": {"messages": _said(*_ONE, ("u", "Say nothing."), ("a", ""))},
    "thought in the content": {"messages": _said(("u", "one"), ("a", "<think>\nhm\n</think>\n\nfirst"))},
    "thoughts in contents": {"messages": _said(("u", "one"), ("a", "<think>\nhm\n</think>\n\nfirst"), ("u", "two"),
                                               ("a", "<think>\noh\n</think>\n\nsecond"))},
    "reasoning": {"messages": _said(*_ONE, reasoning_content="By counting.")},
    "reasoning in all": {"messages": [*_said(*_ONE, reasoning_content="By counting."), *_said(*_TWO, reasoning_content="On.")]},
    "tools, no call": {"messages": _said(*_ONE), "tools": TOOLS},
    "tool call": {"messages": [*_said(("u", "Look.")), _call(None, {"what": "x"}), _answer("7"), *_said(("a", "It is seven."))],
                  "tools": TOOLS},
    "two calls": {"messages": [*_said(("u", "Look.")), _call("I look.", {"what": "x"}, {"what": "y"}), _answer("7"), _answer("8", 1),
                               *_said(("a", "Seven and eight."))], "tools": TOOLS},
    "call at the end": {"messages": [*_said(("s", "Look things up."), ("u", "Look.")), _call("", {"what": "x"})], "tools": TOOLS},
    "arguments as text": {"messages": [*_said(("u", "Look.")), _call("", '{"what": "x"}'), _answer('{"is": 7}'), *_said(("a", "Seven."))]},
    "parts": {"messages": _said(("u", _PARTS), ("a", [{"type": "text", "text": "An answer in a part"}]))},
    "assistant twice": {"messages": _said(*_ONE, ("a", "And more."), *_TWO)},
    "user twice": {"messages": _said(("u", "Hello?"), *_ONE)},
    "developer": {"messages": _said(("d", "Be brief."), *_ONE)},
    "thinking off": {"messages": _said(*_ONE, *_TWO), "chat_template_kwargs": {"enable_thinking": False}},
}
