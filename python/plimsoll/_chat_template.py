# SPDX-License-Identifier: Apache-2.0
"""A tokenizer's folder: its tokenizer and its chat template, compiled where that can be shown to be equal.

ChatTokenizer loads the folder. ChatTemplate renders with jinja2, and says which characters are the assistant's.
compile_template() finds the texts around the messages by rendering probes (chat_reader.h) and compares what they
give on others; None where a template does more than that.

Threads: one owner.   Memory: that of the tokenizer; probes of a few kilobytes.
"""
from __future__ import annotations

import hashlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from . import _core

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]

_ROLES = ("system", "user", "assistant")
_OPEN, _CLOSE = "\U000fff01", "\U000fff02"  # Around what {% generation %} holds; no text has them.
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_WORD = re.compile(r"[a-z_]+")
_ODD = ("", " ", "\n", " a", "a ", "\n\na\n", "\ta \n b\t", "{{ messages }}{% raw %}", "\\n'\"<&>", "é漢字\U0001f600",
        "a\r\nb", "[x] <y> </z>", "###", "None", "0")


class TemplateError(ValueError):
    """What a template says of messages that it refuses, or why nobody can say what the assistant wrote."""


class ChatTokenizer:
    """The tokenizer and the template of a Hugging Face folder.

    Errors: ValueError naming the folder, and what is missing or to be installed.
    """

    def __init__(self, folder: str | os.PathLike[str], template: str | None = None, date: str | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ValueError("import_chat needs tokenizers and jinja2: pip install plimsoll[chat]") from None
        self.folder = pathlib.Path(folder)
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"tokenizer: {self.folder} has no tokenizer.json; save the tokenizer there with "
                             "transformers' save_pretrained()")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except BaseException as error:  # A panic of the library's is none of Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"tokenizer: {file}: {error}") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        said = _json(self.folder / "special_tokens_map.json") | _json(self.folder / "tokenizer_config.json")
        try:
            self._add_tokens(said)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"tokenizer: {self.folder / 'tokenizer_config.json'}: added_tokens_decoder: "
                             f"{type(error).__name__}: {error}") from None
        if not self.tokenizer.get_vocab(with_added_tokens=True):
            raise ValueError(f"tokenizer: {file} has no tokens")
        self.special = {name: text for name in _SPECIAL if (text := _token_text(said.get(name)))}
        source = template if template is not None else _template_of(self.folder, said)
        self.template = None if source is None else ChatTemplate(source, self.special, date)
        self.vocabulary = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())  # Ids may have gaps.
        self.eos_id = self.tokenizer.token_to_id(self.special.get("eos_token", "")) if self.special else None
        # What the ids and masks depend on.
        self.fingerprint = hashlib.sha256(json.dumps(
            [self.tokenizer.to_str(), source, self.special, date], sort_keys=True).encode()).hexdigest()

    def _add_tokens(self, said: dict[str, Any]) -> None:
        import tokenizers

        for number, token in sorted(said.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
            if self.tokenizer.token_to_id(token["content"]) is None:
                kept = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
                        if key in token}
                self.tokenizer.add_tokens([tokenizers.AddedToken(token["content"], **kept)])
            if self.tokenizer.token_to_id(token["content"]) != int(number):
                raise ValueError(f"tokenizer: {self.folder}: {token['content']!r} is id {number} in "
                                 "tokenizer_config.json and another in tokenizer.json; save the tokenizer again")

    def cuts(self) -> list[str]:
        """Tokens before which a text may be cut: nothing to their left depends on them, nor they on it."""
        return [token.content for token in self.tokenizer.get_added_tokens_decoder().values()
                if not token.lstrip and not token.normalized and not token.single_word and token.content]


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tokenizer: {path}: {error}") from None
    if not isinstance(said, dict):
        raise ValueError(f"tokenizer: {path}: not a JSON object")
    return said


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template_of(folder: pathlib.Path, said: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = said.get("chat_template")
    if isinstance(source, list):
        source = next((one.get("template") for one in source
                       if isinstance(one, dict) and one.get("name") == "default"), None)
    if not (source is None or isinstance(source, str)):
        raise ValueError(f"tokenizer: {folder / 'tokenizer_config.json'}: chat_template is no text")
    return source


class ChatTemplate:
    """A chat template as Hugging Face renders it, and the characters that the assistant wrote.

    These are what {% generation %} holds; where a template has none, from behind the generation prompt to the end
    of the turn, white space behind it not counted. Errors of all calls: TemplateError.
    """

    def __init__(self, source: str, special: dict[str, str], date: str | None = None) -> None:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(jinja2.ext.Extension):
            """{% generation %} … {% endgeneration %}: what it holds, between marks when they are wanted."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

            def marked(self, caller: Any) -> str:
                return f"{_OPEN}{caller()}{_CLOSE}" if self.environment.globals["_marks"] else caller()

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def today(form: str) -> str:
            if date is None:
                raise TemplateError("the template asks for the date, and ids would change from day to day: pass "
                                    "date='2026-01-31' (--date)")
            import datetime

            return datetime.datetime.fromisoformat(date).strftime(form)

        def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
                   sort_keys: bool = False) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                              sort_keys=sort_keys)

        self._jinja_errors = (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError)
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        self._environment.filters["tojson"] = tojson
        self._environment.globals.update(raise_exception=refuse, strftime_now=today, _marks=False)
        self.source = source
        self.special = special
        try:
            self._template = self._environment.from_string(source)
            self._tree = self._environment.parse(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"tokenizer: its chat template is not Jinja: {error}") from None
        self.has_generation = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None

    def render(self, messages: Messages, tools: Any = None, add_generation_prompt: bool = False) -> str:
        """As apply_chat_template(tokenize=False)."""
        try:
            return self._template.render(messages=[_named(message) for message in messages], tools=tools,
                                         documents=None, add_generation_prompt=add_generation_prompt,
                                         **self.special)
        except self._jinja_errors as error:
            raise TemplateError(str(error) or type(error).__name__) from None

    def render_marked(self, messages: Messages, tools: Any = None) -> tuple[str, Spans]:
        """The text, and the characters of each of the assistant's turns."""
        if self.has_generation:
            return self._by_marks(messages, tools)
        text = self.render(messages, tools)
        spans = []
        for k, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            asked = self.render(messages[:k], tools, add_generation_prompt=True)
            answered = self.render(messages[:k + 1], tools)
            if not text.startswith(answered.rstrip()) or not answered.startswith(asked):
                raise TemplateError(f"what the assistant says in message {k + 1} cannot be told from the rest: give "
                                    "the template {% generation %} tags")
            spans.append((len(asked), max(len(asked), len(answered.rstrip()))))
        return text, spans

    def _by_marks(self, messages: Messages, tools: Any) -> tuple[str, Spans]:
        self._environment.globals["_marks"] = True
        try:
            marked = self.render(messages, tools)
        finally:
            self._environment.globals["_marks"] = False
        parts = re.split(f"({_OPEN}|{_CLOSE})", marked)
        text, spans, begin = [], [], 0
        at = 0
        for part in parts:
            if part == _OPEN:
                begin = at
            elif part == _CLOSE:
                spans.append((begin, at))
            else:
                text.append(part)
                at += len(part)
        if "".join(text) != self.render(messages, tools):
            raise TemplateError("a message holds the characters U+FFF01 or U+FFF02, or the template changes what "
                                "{% generation %} holds")
        return "".join(text), spans

    def words(self) -> list[str]:
        """Texts that the template compares with something, or passes to a call or filter."""
        from jinja2 import nodes

        keys = {id(node.arg) for node in self._tree.find_all(nodes.Getitem)}
        found = set()
        for node in self._tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
            if isinstance(node, nodes.Call) and getattr(node.node, "name", "") == "raise_exception":
                continue
            found.update(const.value for const in node.find_all(nodes.Const)
                         if isinstance(const.value, str) and id(const) not in keys and const.value.strip())
        return sorted(found)


def _named(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under the name that templates read, as Hugging Face passes it."""
    for key in ("reasoning_content", "thinking", "reasoning"):
        if message.get(key) is not None:
            return {"thinking": message[key], **message, "reasoning_content": message[key]}
    return message


class Pieces:
    """A compiled template: by key, (text, characters of the turn before, of the turn behind, byte to cut at)."""

    def __init__(self) -> None:
        self.gaps: dict[str, tuple[str, int, int, int]] = {}
        self.stripped: list[str] = []
        self.triggers: list[str] = []

    def keys(self, roles: Sequence[str]) -> list[str]:
        ends = ["", *roles, ""]
        return [_core.chat_gap_key(ends[k], ends[k + 1], k, len(roles)) for k in range(len(roles) + 1)]

    def covers(self, roles: Sequence[str]) -> bool:
        return all(key in self.gaps for key in self.keys(roles))

    def render(self, messages: Messages) -> tuple[str, Spans]:
        """As ChatReader renders (chat_reader.cpp)."""
        text, spans = "", []
        for k, key in enumerate(self.keys([message["role"] for message in messages])):
            gap, after, before, _ = self.gaps[key]
            if k and messages[k - 1]["role"] == "assistant":
                spans[-1] = (spans[-1][0], len(text) + after)
            text += gap
            if k < len(messages):
                content = messages[k]["content"]
                if messages[k]["role"] == "assistant":
                    spans.append((len(text) - before, len(text)))
                text += content.strip() if messages[k]["role"] in self.stripped else content
        return text, spans

    def arguments(self) -> tuple[list[tuple[str, tuple[str, int, int, int]]], list[str], list[str]]:
        """For ChatReader.set_pieces()."""
        return sorted(self.gaps.items()), self.stripped, self.triggers


def compile_template(template: ChatTemplate, cuts: Sequence[str]) -> Pieces | None:
    """The template as the texts around the messages; None where these do not give what it gives."""
    pieces = Pieces()
    refused = []
    for roles in _probes():
        try:
            if not _learn(template, pieces, roles, cuts):
                return None
        except TemplateError:
            refused.append(roles)
    words = template.words()
    plain = [word for word in words if _WORD.fullmatch(word)]  # Of roles and keys: tried instead, below.
    pieces.triggers = [word for word in words if word not in plain]
    pieces.stripped = _stripped(template)
    if any(pieces.covers(roles) for roles in refused) or not pieces.gaps:
        return None
    return pieces if _proven(template, pieces, plain) else None


def _probes() -> list[tuple[str, ...]]:
    every = [roles for count in range(1, 5) for roles in itertools.product(_ROLES, repeat=count)]
    turns = ("user", "assistant") * 4
    return every + [head + turns[:count] for head in ((), ("system",)) for count in range(4, 8)]


def _sentinel(k: int) -> str:
    return f"\ue000{k}\ue001"


def _probe(roles: Sequence[str], contents: Sequence[str] | None = None) -> Messages:
    return [{"role": role, "content": _sentinel(k) if contents is None else contents[k]}
            for k, role in enumerate(roles)]


def _gaps_of(text: str, count: int) -> list[str] | None:
    """The texts around the sentinels; None unless each is there once, in order."""
    gaps = []
    for k in range(count):
        before, found, text = text.partition(_sentinel(k))
        if not found:
            return None
        gaps.append(before)
    gaps.append(text)
    return None if any("\ue000" in gap for gap in gaps) else gaps


def _learn(template: ChatTemplate, pieces: Pieces, roles: Sequence[str], cuts: Sequence[str]) -> bool:
    """Adds the gaps of one probe; False where they contradict those of another."""
    messages = _probe(roles)
    text = template.render(messages)
    gaps = _gaps_of(text, len(roles))
    if gaps is None:
        return False
    shares = _marked_shares(template, messages, gaps) if template.has_generation else None
    if template.has_generation and shares is None:
        return False
    for k, key in enumerate(pieces.keys(roles)):
        after, before = shares[k] if shares is not None else _shares(template, messages, gaps, k)
        cut = min((at for token in cuts if after <= (at := gaps[k].find(token, after)) <= len(gaps[k]) - before),
                  default=-1)
        gap = (gaps[k], after, before, len(gaps[k][:cut].encode()) if cut >= 0 else -1)
        if pieces.gaps.setdefault(key, gap) != gap:
            return False
    return True


def _shares(template: ChatTemplate, messages: Messages, gaps: list[str], k: int) -> tuple[int, int]:
    """Characters of gap k that belong to the assistant's turn before it, and to the one behind it."""
    after = before = 0
    end = ""
    if k:
        alone = _gaps_of(template.render(messages[:k]), k)
        end = alone[-1] if alone else ""
    if k and messages[k - 1]["role"] == "assistant":
        after = len(os.path.commonprefix([gaps[k], end]).rstrip())
    if k < len(messages) and messages[k]["role"] == "assistant":
        asked = template.render(messages[:k], add_generation_prompt=True)
        prompt = asked[asked.rfind("\ue001") + 1:]
        if gaps[k].startswith(prompt):
            before = len(gaps[k]) - len(prompt)
    return after, before


def _marked_shares(template: ChatTemplate, messages: Messages, gaps: list[str]) -> list[tuple[int, int]] | None:
    """As _shares(), of all gaps, by {% generation %}; None where it holds anything but whole turns."""
    _, spans = template.render_marked(messages)
    shares = [[0, 0] for _ in gaps]
    at, left = 0, list(spans)
    for k, message in enumerate(messages):
        begin = at + len(gaps[k])
        at = begin + len(message["content"])
        if message["role"] != "assistant":
            continue
        if not left:
            return None
        first, last = left.pop(0)
        if not (begin - len(gaps[k]) <= first <= begin and at <= last <= at + len(gaps[k + 1])):
            return None
        shares[k][1], shares[k + 1][0] = begin - first, last - at
    return None if left else [(after, before) for after, before in shares]


def _stripped(template: ChatTemplate) -> list[str]:
    """Roles whose contents lose the white space at their ends."""
    found = []
    for role in _ROLES:
        for roles in ((role, "user", "assistant"), ("user", role), (role,)):
            try:
                text = template.render(_probe(roles, [" \n\ue000 \n" if one == role else "x" for one in roles]))
            except TemplateError:
                continue
            if " \n\ue000 \n" not in text:
                found.append(role)
            break
    return found


def _proven(template: ChatTemplate, pieces: Pieces, words: Sequence[str]) -> bool:
    """Whether pieces and template agree, in text and masks, on odd contents in every probe that they cover."""
    odd = [*_ODD, *(f"say {word} now" for word in words), *words]
    odd = [text for text in odd if not any(trigger in text for trigger in pieces.triggers)]
    shift = 0
    for roles in _probes():
        if not pieces.covers(roles):
            continue
        for _ in range(4):
            shift += 1
            messages = _probe(roles, [odd[(shift * 7 + k * 3) % len(odd)] for k in range(len(roles))])
            if not agree(template, pieces, messages):
                return False
    return all(agree(template, pieces, _probe(("user", "assistant"), [text, text[::-1]]))
               for text in odd if pieces.covers(("user", "assistant"))
               and not any(trigger in text[::-1] for trigger in pieces.triggers))


def agree(template: ChatTemplate, pieces: Pieces, messages: Messages) -> bool:
    """Whether pieces give what the template gives, and it refuses nothing; masks where the template can say them."""
    text, spans = pieces.render(messages)
    try:
        if text != template.render(messages):
            return False
    except TemplateError:
        return False
    try:
        wanted = template.render_marked(messages)[1]
    except TemplateError:
        return True
    return [span for span in spans if span[0] < span[1]] == [span for span in wanted if span[0] < span[1]]
