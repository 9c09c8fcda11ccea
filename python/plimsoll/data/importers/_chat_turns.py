# SPDX-License-Identifier: Apache-2.0
"""Turns: finds the characters that the assistant wrote, for templates without {% generation %} tags.

A template writes each message in one turn of a loop over the messages. _traced() compiles the template once more, with
marks where such a turn begins and where its loop ends, so that each character belongs to a message (decision 0060).
For a template without such a loop, the message is rendered again with another content; the difference is the answer.

Reading order: Turns, _traced().
Threads: one owner.   Memory: a few texts of the row's size.
"""
from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]
More = Mapping[str, Any] | None

_MARK = re.compile("\U000fff03([0-9]+)(?:,([0-9]+))?\U000fff04")  # Characters that occur in no text.
_THOUGHT = re.compile(r"<\|?think(ing)?\|?>")
_OTHER = "\ue000other\ue001"  # Stands for a content.


class TemplateError(ValueError):
    """Raised when a template refuses messages, or when the assistant's characters cannot be found."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The characters that a template writes for one message in one turn of a loop."""

    begin: int
    end: int
    message: int
    turn: int


@dataclasses.dataclass(frozen=True)
class Habits:
    """The texts that a template writes around every answer.

    header: the text that begins all answers and is in the generation prompt, too. closing: the text after the last
    answer, outside the loop.
    """

    header: str = ""
    closing: str = ""


class Turns:
    """Renders a template twice, the second time with marks. `render`: takes (template, messages, more, prompt)."""

    def __init__(self, environment: Any, plain: Any, source: str, render: Callable[..., str]) -> None:
        self._plain = plain
        self._traced = _traced(environment, source)
        self._globals = environment.globals
        self._render = render
        self._known: Habits | None = None

    def written(self, messages: Messages, more: More = None, prompt: bool = False) -> tuple[str, list[Part]]:
        """Returns the text and its parts; no parts where the marks change the text."""
        text = self._render(self._plain, messages, more, prompt)
        self._globals["_numbers"] = {id(message): k for k, message in enumerate(messages)}
        self._globals["_open"], self._globals["_by_variable"] = set(), set()
        try:
            found, parts = _parts(self._render(self._traced, messages, more, prompt))
        except TemplateError:
            return text, []
        return text, parts if found == text else []

    def spans(self, messages: Messages, more: More) -> tuple[str, list[tuple[int, Spans]]]:
        """Returns the text, and (number, spans) of each of the assistant's messages. Errors: TemplateError."""
        text, parts = self.written(messages, more)
        answers = [k for k, message in enumerate(messages) if message.get("role") == "assistant"]
        own = {k: [part for part in parts if part.message == k and text[part.begin:part.end].strip()] for k in answers}
        if all(_is_whole(text, own[k], messages[k]) for k in answers):
            return text, [(k, self._turn(text, parts, own[k], k == len(messages) - 1)) for k in answers if own[k]]
        return text, [(k, [self._answer(text, messages, more, k)]) for k in answers]

    def _turn(self, text: str, parts: Sequence[Part], own: list[Part], last: bool) -> Spans:
        """Returns a turn's spans, without its header and the spaces at its end: such a space begins the next turn's first token."""
        habits = self._habits()
        spans = [(part.begin, part.end) for part in own]
        begin, end = spans[0]
        at = text.find(habits.header, begin, end)
        if at == begin or (at > begin and own[0].message == 0):  # The first turn may begin with a preamble.
            spans[0] = (at + len(habits.header), end)
        begin, end = spans[-1]
        if last and not any(part.begin >= end and text[part.begin:part.end].strip() for part in parts):
            end = len(text)
        elif habits.closing and text.startswith(habits.closing, end):
            end += len(habits.closing)
        spans[-1] = (begin, _without_spaces(text, begin, end))
        return spans

    def _answer(self, text: str, messages: Messages, more: More, k: int) -> tuple[int, int]:
        """Returns the span of an answer, including the text that ends a chat after it. Errors: TemplateError."""
        unknown = TemplateError(f"what the assistant says in message {k + 1} cannot be told from the rest: give the "
                                "template {% generation %} tags")
        if not isinstance(messages[k].get("content"), str) or messages[k].keys() - {"role", "content"}:
            raise unknown
        other = self.written(_with(messages, k, _OTHER), more)[0]
        begin = len(os.path.commonprefix([text, other]))
        behind = len(os.path.commonprefix([text[begin:][::-1], other[begin:][::-1]]))
        end = len(text) - behind
        if _OTHER not in other[begin:len(other) - behind]:
            raise unknown
        ended = self.written(messages[:k + 1], more)[0]
        closing = ended[end:].rstrip(" \t") if ended[:end] == text[:end] else ""
        end += len(closing) if text.startswith(closing, end) else 0
        return begin, _without_spaces(text, begin, end)

    def _habits(self) -> Habits:
        if self._known is None:
            self._known = self._learnt()
        return self._known

    def _learnt(self) -> Habits:
        """Finds the habits by rendering chats of four messages or two, whose contents are texts or lists of parts."""
        for form in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
            for roles in (("user", "assistant") * 2, ("user", "assistant")):
                with contextlib.suppress(TemplateError):
                    said = [f"\ue000{k}\ue001" for k in range(len(roles))]
                    chat = [{"role": role, "content": form(one)} for role, one in zip(roles, said, strict=True)]
                    text, parts = self.written(chat)
                    heads = [text[part.begin:text.index(said[part.message])] for part in parts
                             if part.message % 2 and said[part.message] in text[part.begin:part.end]]
                    if not heads:
                        continue
                    with_prompt, without = (self.written(chat[:1], None, prompt)[0].partition(said[0])[2]
                                            for prompt in (True, False))
                    closing = text[max(part.end for part in parts):].strip()
                    return Habits(_header(os.path.commonprefix(heads), with_prompt, without), closing)
        return Habits()


def _header(head: str, with_prompt: str, without: str) -> str:
    """Returns the part of the answers' common head that the generation prompt has; all of it where there is no prompt."""
    own = len(os.path.commonprefix([with_prompt, without]))
    if own < len(with_prompt):  # The prompt may begin earlier, at a chance common beginning such as "<|".
        shared = [len(os.path.commonprefix([head, with_prompt[at:]])) for at in range(own + 1)]
        head = head[:max((size for at, size in enumerate(shared) if at + size > own), default=0)]
    thought = _THOUGHT.search(head)  # It belongs to the answer, though a prompt may begin it.
    return head[:thought.start()] if thought else head


def _is_whole(text: str, own: Sequence[Part], message: dict[str, Any]) -> bool:
    """Whether these parts are one turn that has the message's content, if the text has it."""
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else ""
    if not said or said not in text:
        return len({part.turn for part in own}) <= 1
    return len({part.turn for part in own}) == 1 and said in text[own[0].begin:own[-1].end]


def _without_spaces(text: str, begin: int, end: int) -> int:
    """Returns the end, moved before trailing spaces and tabs. Line ends stay in the answer."""
    return begin + len(text[begin:end].rstrip(" \t"))


def _with(messages: Messages, k: int, content: Any) -> Messages:
    return [{**message, "content": content} if k == number else message for number, message in enumerate(messages)]


def check_contents(render: Callable[[Messages], str], messages: Messages, text: str) -> None:
    """Checks that the text has some of every message's content. Errors: TemplateError where it has none."""
    at = 0
    for k, message in enumerate(messages):
        content: Any = message.get("content")
        parts = [content] if isinstance(content, str) else [
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        ] if isinstance(content, list) else []
        parts = [part.strip() for part in parts if part.strip()]
        found = max((text.find(part, at) for part in parts), default=at)
        if found >= 0:
            at = found
            continue
        if any(part in text for part in parts):
            continue
        other = _OTHER if isinstance(content, str) else [
            {**part, "text": _OTHER} if isinstance(part, dict) and isinstance(part.get("text"), str) else part
            for part in content]
        try:
            same = render(_with(messages, k, other)) == text
        except TemplateError:
            continue  # The template reads this content.
        if same:
            advice = "; it may read lists of parts, {\"type\": \"text\", \"text\": …}" if isinstance(content, str) else ""
            raise TemplateError(f"the template writes nothing of the content of message {k + 1} ({message.get('role')}){advice}")


def _traced(environment: Any, source: str) -> Any:
    """Compiles the template with a mark where a loop's turn starts on a message, and where the loop ends.

    A turn belongs to a message from its beginning if the loop's variable is that message. Otherwise it does from where a
    variable is set to the message.
    """
    from jinja2 import nodes

    tree = environment.parse(source)

    def mark(name: str, at: Any, *given: Any) -> Any:
        call = nodes.Call(nodes.Name(name, "load"), list(given), [], None, None)
        return nodes.Output([call]).set_lineno(at.lineno).set_environment(environment)

    def names_of(target: Any) -> list[Any]:
        return [nodes.Name(node.name, "load") for node in (target, *target.find_all(nodes.Name)) if isinstance(node, nodes.Name)]

    numbers = itertools.count(1)

    def visit(node: Any, loop: int) -> None:
        for name, field in list(node.iter_fields()):
            if isinstance(field, nodes.Node):
                visit(field, loop)
            elif isinstance(field, list):
                found: list[Any] = []
                for one in field:
                    found.append(one)
                    if isinstance(one, nodes.For):
                        number = next(numbers)
                        visit(one, number)
                        one.body.insert(0, mark("_turn_begins", one, nodes.Const(number), *names_of(one.target)))
                        found.append(mark("_loop_ends", one, nodes.Const(number)))
                    elif isinstance(one, nodes.Node):
                        visit(one, loop)
                        if loop and isinstance(one, nodes.Assign):
                            found += [mark("_message_set", one, nodes.Const(loop), name) for name in names_of(one.target)]
                setattr(node, name, found)

    visit(tree, 0)
    state = environment.globals

    def begins(number: int, message: int) -> str:
        state["_open"].add(number)
        return f"\U000fff03{number},{message}\U000fff04"

    def turn_begins(number: int, *values: Any) -> str:
        messages = [state["_numbers"][id(value)] for value in values if id(value) in state["_numbers"]]
        if not messages:
            state["_by_variable"].discard(number)
            return loop_ends(number)
        state["_by_variable"].add(number)
        return begins(number, messages[0])

    def message_set(number: int, value: Any) -> str:
        message = state["_numbers"].get(id(value))
        return "" if message is None or number in state["_by_variable"] else begins(number, message)

    def loop_ends(number: int) -> str:
        if number not in state["_open"]:
            return ""
        state["_open"].remove(number)
        return f"\U000fff03{number}\U000fff04"

    state.update(_turn_begins=turn_begins, _message_set=message_set, _loop_ends=loop_ends)
    return environment.from_string(tree)


def _parts(marked: str) -> tuple[str, list[Part]]:
    """Splits a marked text into the text without marks, and its parts."""
    text: list[str] = []
    parts: list[Part] = []
    open_: list[tuple[int, int, int]] = []  # (loop, message, turn) of the open loops, innermost last.
    at = turns = end = 0
    for found in [*_MARK.finditer(marked), None]:
        piece = marked[end:found.start() if found else len(marked)]
        if piece and open_:
            parts.append(Part(at, at + len(piece), *open_[-1][1:]))
        text.append(piece)
        at += len(piece)
        if found is None:
            break
        end = found.end()
        loop = int(found[1])
        if any(one[0] == loop for one in open_):
            while open_.pop()[0] != loop:
                pass
        if found[2] is not None:
            turns += 1
            open_.append((loop, int(found[2]), turns))
    return "".join(text), parts
