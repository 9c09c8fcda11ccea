# SPDX-License-Identifier: Apache-2.0
"""ChatTokenizer and ChatTemplate: a tokenizer's folder and its chat template, compiled where that is shown to be equal.

ChatTokenizer loads the folder. ChatTemplate renders with jinja2, and finds the characters that the assistant wrote
(_chat_turns.py). compile_template() finds the texts around the messages by rendering probes (chat_reader.h), and
checks them on other chats. It returns None for a template that does more than put texts around messages.

Threads: one owner.   Memory: that of the tokenizer; probes of a few kilobytes.
"""
from __future__ import annotations

import hashlib
import collections
import functools
import itertools
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ... import _core
from ._chat_turns import Messages, Spans, TemplateError, Turns, check_contents

_ROLES = ("system", "user", "assistant")
_OPEN, _CLOSE = "\U000fff01", "\U000fff02"  # Marks around the text of {% generation %}; they occur in no text.
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_WORD = re.compile(r"[a-z_]+")
_WHITE = "\t\n\v\f\r\x1c\x1d\x1e\x1f "  # ASCII white space.
_ODD = ("", " ", "\n", " a", "a ", "\n\na\n", "\ta \n b\t", "{{ messages }}{% raw %}", "\\n'\"<&>", "é漢字\U0001f600",
        "a\r\nb", "[x] <y> </z>", "###", "None", "0")


class ChatTokenizer:
    """The tokenizer and the templates of a Hugging Face folder, as transformers' AutoTokenizer loads them.

    template: a template, or the name of one in the folder. given: as for ChatTemplate.
    Errors: ValueError naming the folder and the missing file, or the package to install.
    """

    def __init__(self, folder: str | os.PathLike[str], template: str | None = None, date: str | None = None,
                 given: Mapping[str, Any] | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ValueError("import_chat needs tokenizers and jinja2: pip install tokenizers jinja2") from None
        self.folder = pathlib.Path(folder)
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"tokenizer: {self.folder} has no tokenizer.json; save the tokenizer there with "
                             "transformers' save_pretrained()")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except BaseException as error:  # A panic in the library is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"tokenizer: {file}: {error}") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._used = {"tokenizer.json"}
        said = self._read("tokenizer_config.json")
        try:
            self.special = self._add_tokens(said)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"tokenizer: {self.folder / 'tokenizer_config.json'}: its special or added tokens: "
                             f"{type(error).__name__}: {error}") from None
        if not self.tokenizer.get_vocab(with_added_tokens=True):
            raise ValueError(f"tokenizer: {file} has no tokens")
        self.tokenizer.encode_special_tokens = bool(said.get("split_special_tokens"))
        sources = self._templates(said)
        if template is not None and template not in sources and "{" not in template:
            raise ValueError(f"template: {self.folder} has none of the name {template!r}, only {', '.join(sources) or 'none'}")
        chosen = {"default": sources.get(template, template)} if template is not None else sources
        self._templates_made = {name: ChatTemplate(source, self.special, date, given) for name, source in chosen.items()
                                if name in ("default", "tool_use")}
        self.template = self._templates_made.get("default")
        self.vocabulary = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())  # Ids may have gaps.
        self.eos_id = self.tokenizer.token_to_id(self.special.get("eos_token", "")) if self.special else None
        # What the ids and masks depend on.
        self.fingerprint = hashlib.sha256(json.dumps(
            [self.tokenizer.to_str(), sorted(chosen.items()), self.special, date, given, self.tokenizer.encode_special_tokens],
            sort_keys=True).encode()).hexdigest()

    def template_for(self, tools: Any) -> ChatTemplate:
        """Returns the template for a row: the one named "tool_use" for a row with tools. Errors: TemplateError."""
        named = "tool_use" if tools is not None and "tool_use" in self._templates_made else "default"
        if named not in self._templates_made:
            legacy = "; that of chat_template.json is a processor's" if (self.folder / "chat_template.json").is_file() else ""
            raise TemplateError(f"the tokenizer has none{legacy}; pass one with template= (--template)")
        return self._templates_made[named]

    def files(self) -> dict[str, list[str]]:
        """Returns the names of the folder's files: "used" were read, "unused" were not."""
        there = sorted(path.name for path in self.folder.iterdir() if path.is_file())
        return {"used": sorted(self._used), "unused": [name for name in there if name not in self._used]}

    def _read(self, name: str) -> dict[str, Any]:
        said = _json(self.folder / name)
        if said is None:
            return {}
        self._used.add(name)
        return said

    def _add_tokens(self, said: dict[str, Any]) -> dict[str, str]:
        """Adds the tokens named in the files beside tokenizer.json and returns those with a role, such as `eos_token`.

        The order is transformers': tokens with an id, tokens with a role, extra ones. These files override
        tokenizer.json."""
        import tokenizers

        said = dict(said)
        numbered: dict[int, Any] = {}
        if "added_tokens_decoder" in said:
            numbered = {int(number): _added(token) for number, token in said["added_tokens_decoder"].items()}
        else:  # Older formats.
            said |= self._read("special_tokens_map.json")
        extra = said.get("extra_special_tokens") or said.get("additional_special_tokens") or []
        roles = {name: said[name] for name in _SPECIAL if said.get(name) is not None}
        roles |= {name: token for name, token in said.items()
                  if name.endswith("_token") and name not in roles and isinstance(token, (str, dict))}
        if isinstance(extra, dict):
            roles, extra = roles | extra, []
        if "added_tokens_decoder" not in said:
            special = {_token_text(token) for token in (*roles.values(), *extra)}
            for text, number in self._read("added_tokens.json").items():
                numbered[number] = tokenizers.AddedToken(text, normalized=text not in special, special=text in special)
            numbered |= self.tokenizer.get_added_tokens_decoder()
        there = {token.content: repr(token) for token in self.tokenizer.get_added_tokens_decoder().values()}
        wanted = [token for _, token in sorted(numbered.items()) if there.get(token.content) != repr(token)]
        known = {*there, *(token.content for token in wanted)}
        for token in (*roles.values(), *extra):
            if _token_text(token) not in known:
                wanted.append(_added(token, special=True))
                known.add(wanted[-1].content)
        named = {name: said_text for name, token in roles.items() if (said_text := _token_text(token))}
        for token in wanted:
            token.special = token.special or token.content in named.values()
        self.tokenizer.add_tokens(wanted)
        for number, token in numbered.items():
            if self.tokenizer.token_to_id(token.content) != number:
                raise ValueError(f"tokenizer: {self.folder}: {token.content!r} is id {number} in tokenizer_config.json or "
                                 "added_tokens.json and another in tokenizer.json; save the tokenizer again")
        return named

    def _templates(self, said: dict[str, Any]) -> dict[str, str]:
        """Returns the templates by name. Files of their own replace those of tokenizer_config.json."""
        files = {"default": self.folder / "chat_template.jinja"} | {
            path.stem: path for path in sorted((self.folder / "additional_chat_templates").glob("*.jinja"))}
        found = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
        self._used |= {str(path.relative_to(self.folder)) for name, path in files.items() if name in found}
        source = said.get("chat_template")
        if found or source is None:
            return found
        if isinstance(source, list):
            source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        found = source if isinstance(source, dict) else {"default": source}
        if not all(isinstance(text, str) for text in (*found, *found.values())):
            raise ValueError(f"tokenizer: {self.folder / 'tokenizer_config.json'}: chat_template is no text")
        return found

    def cuts(self) -> list[str]:
        """Returns the tokens before which a text may be cut: encoding is independent on their two sides."""
        return [token.content for token in self.tokenizer.get_added_tokens_decoder().values()
                if not token.lstrip and not token.normalized and not token.single_word and token.content]


def _json(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file; None where there is no such file. Errors: ValueError naming the file."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tokenizer: {path}: {error}") from None
    if not isinstance(said, dict):
        raise ValueError(f"tokenizer: {path}: not a JSON object")
    return said


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _added(token: Any, **more: bool) -> Any:
    """Returns a token as the library's AddedToken. Errors: TypeError, KeyError."""
    import tokenizers

    if isinstance(token, str):
        return tokenizers.AddedToken(token, **more)
    kept = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in token}
    return tokenizers.AddedToken(token["content"], **{**more, **kept})


class ChatTemplate:
    """Renders a chat template as Hugging Face does, and finds the characters that the assistant wrote.

    These are the characters between {% generation %} tags. Where a template has no such tags, they are the text it
    writes for an assistant's message, without the header of every answer and without spaces at the end (_chat_turns.py).
    Errors of all calls: TemplateError.
    """

    def __init__(self, source: str, special: dict[str, str], date: str | None = None,
                 given: Mapping[str, Any] | None = None) -> None:
        """Compiles the template. given: variables for it beside the messages, such as `enable_thinking`."""
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.utils
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(jinja2.ext.Extension):
            """Renders {% generation %} … {% endgeneration %}: the text inside, between marks when `_marks` is set."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

            def marked(self, caller: Any) -> str:
                return f"{_OPEN}{caller()}{_CLOSE}" if self.environment.globals["_marks"] else caller()

        class Namespace(jinja2.utils.Namespace):
            """Behaves like jinja2's Namespace, but refuses names that begin with an underscore."""

            def __init__(*args: Any, **given: Any) -> None:
                said = dict(*args[1:], **given)
                for name in said:
                    Namespace._check(name)
                jinja2.utils.Namespace.__init__(args[0], said)

            def __setitem__(self, name: Any, value: Any) -> None:
                Namespace._check(name)
                jinja2.utils.Namespace.__setitem__(self, name, value)

            @staticmethod
            def _check(name: Any) -> None:
                if isinstance(name, str) and name.startswith("_"):
                    raise TemplateError(f"the template sets {name!r}, and a name may not begin with an underscore")

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

        self._jinja_errors = (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError,
                              RecursionError)
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        self._environment.filters["tojson"] = tojson
        self._environment.globals.update(raise_exception=refuse, strftime_now=today, namespace=Namespace, _marks=False)
        self.source = source
        self.special = special
        self._given = dict(given or {})
        try:
            self._template = self._environment.from_string(source)
            self._tree = self._environment.parse(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"tokenizer: its chat template is not Jinja: {error}") from None
        self.has_generation = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None

    def render(self, messages: Messages, tools: Any = None, add_generation_prompt: bool = False,
               more: Mapping[str, Any] | None = None) -> str:
        """Renders the chat like apply_chat_template(tokenize=False). more: variables of this row, such as `documents`."""
        return self._rendered(self._template, _ready(messages), _variables(tools, more), add_generation_prompt)

    def render_marked(self, messages: Messages, tools: Any = None, more: Mapping[str, Any] | None = None) -> tuple[str, Spans]:
        """Returns the text, and the spans (in characters) that the assistant wrote, in order."""
        text, turns = self.render_turns(messages, tools, more)
        return text, sorted(span for _, spans in turns for span in spans)

    def render_turns(self, messages: Messages, tools: Any = None, more: Mapping[str, Any] | None = None,
                     ) -> tuple[str, list[tuple[int, Spans]]]:
        """Returns the text, and (number, spans) for each of the assistant's messages. There may be no span, one, or several."""
        ready, variables = _ready(messages), _variables(tools, more)
        if not self.has_generation:
            return self._turns.spans(ready, variables)
        text, spans = self._by_marks(ready, variables)
        answers = [k for k, message in enumerate(ready) if message.get("role") == "assistant"]
        if len(answers) == len(spans):
            return text, [(k, [span]) for k, span in zip(answers, spans, strict=True)]
        begins = {part.message: part.begin for part in reversed(self._turns.written(ready, variables)[1])}
        of = [max((k for k in answers if begins.get(k, len(text)) < end), default=answers[-1] if answers else 0) for _, end in spans]
        return text, [(k, [span for span, one in zip(spans, of, strict=True) if one == k]) for k in dict.fromkeys(of)]

    def check_contents(self, messages: Messages, tools: Any, more: Mapping[str, Any] | None, text: str) -> None:
        """Checks that the template prints some of every message's content. Errors: TemplateError where it does not."""
        variables = _variables(tools, more)
        check_contents(lambda changed: self._rendered(self._template, changed, variables), _ready(messages), text)

    @functools.cached_property
    def _turns(self) -> Turns:
        return Turns(self._environment, self._template, self.source, self._rendered)

    def _rendered(self, template: Any, messages: Messages, more: Mapping[str, Any] | None,
                  add_generation_prompt: bool = False) -> str:
        try:
            return template.render(**{"tools": None, "documents": None, **self.special, **self._given, **(more or {}),
                                      "messages": messages, "add_generation_prompt": add_generation_prompt})
        except self._jinja_errors as error:
            raise TemplateError(str(error) or type(error).__name__) from None

    def _by_marks(self, messages: Messages, more: Mapping[str, Any] | None) -> tuple[str, Spans]:
        self._environment.globals["_marks"] = True
        try:
            marked = self._rendered(self._template, messages, more)
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
        if "".join(text) != self._rendered(self._template, messages, more):
            raise TemplateError("a message holds the characters U+FFF01 or U+FFF02, or the template changes what "
                                "{% generation %} holds")
        return "".join(text), spans

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Names of variables, keys and attributes that occur in the template."""
        from jinja2 import nodes

        return frozenset({node.attr for node in self._tree.find_all(nodes.Getattr)}
                         | {node.name for node in self._tree.find_all(nodes.Name)}
                         | {node.value for node in self._tree.find_all(nodes.Const) if isinstance(node.value, str)})

    def words(self) -> list[str]:
        """Returns the texts that the template compares with something, or passes to a call or filter."""
        from jinja2 import nodes

        keys = {id(node.arg) for node in self._tree.find_all(nodes.Getitem)}
        found: set[str] = set()
        for node in self._tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
            if isinstance(node, nodes.Call) and getattr(node.node, "name", "") == "raise_exception":
                continue
            found.update(const.value for const in node.find_all(nodes.Const)
                         if isinstance(const.value, str) and id(const) not in keys and const.value.strip())
        return sorted(found)


def _variables(tools: Any, more: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**(more or {}), **({} if tools is None else {"tools": tools})}


def _ready(messages: Messages) -> Messages:
    """Returns copies of the messages, with reasoning under the names that templates read, as Hugging Face passes them."""
    ready = []
    for message in messages:
        said = {key: value for key, value in message.items() if value is not None}
        reasoning = next((said[key] for key in ("reasoning_content", "thinking", "reasoning") if key in said), None)
        ready.append(said if reasoning is None else {"thinking": reasoning, **said, "reasoning_content": reasoning})
    return ready


class Pieces:
    """A compiled template: for each pair of roles, the text (gap) between two contents.

    gaps: key → (text, characters at its start that belong to the turn before, characters at its end that belong to the
    turn after, byte to cut at).
    """

    def __init__(self) -> None:
        self.gaps: dict[str, tuple[str, int, int, int]] = {}
        self.stripped: list[str] = []
        self.triggers: list[str] = []
        self.ends_at_tokens = False  # Whether every answer ends at the beginning or end of an added token.

    def keys(self, roles: Sequence[str]) -> list[str]:
        ends = ["", *roles, ""]
        return [_core.chat_gap_key(ends[k], ends[k + 1], k, len(roles)) for k in range(len(roles) + 1)]

    def covers(self, roles: Sequence[str]) -> bool:
        return all(key in self.gaps for key in self.keys(roles))

    def takes(self, messages: Messages) -> bool:
        """Whether pieces can render these messages, which have only roles and texts (ChatReader::compiled())."""
        if not self.covers([message["role"] for message in messages]):
            return False
        for message in messages:
            content = message["content"]
            if any(trigger in content for trigger in self.triggers):
                return False
            if message["role"] in self.stripped and (rest := content.strip(_WHITE)) and not (rest[0] + rest[-1]).isascii():
                return False
        return True

    def render(self, messages: Messages) -> tuple[str, Spans]:
        """Renders messages from pieces, as ChatReader does in C++ (chat_reader.cpp). Returns the text and the assistant's spans."""
        text = ""
        spans: Spans = []
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
        """Returns the arguments for ChatReader.set_pieces()."""
        return sorted(self.gaps.items()), self.stripped, self.triggers


def compile_template(template: ChatTemplate, cuts: Sequence[str]) -> Pieces | None:
    """Compiles a template into the texts around the messages. Returns None where these render differently."""
    pieces = Pieces()
    refused, contradicted = [], set()
    for roles in _probes():
        try:
            contradicted.update(_learn(template, pieces, roles, cuts))
        except TemplateError:
            refused.append(roles)
    pieces.gaps = {key: gap for key, gap in pieces.gaps.items() if key not in contradicted}
    seen = collections.Counter(key for roles in _probes() if roles not in refused for key in pieces.keys(roles))
    for roles in refused:  # The template is taken to refuse the chat for its rarest piece.
        while pieces.covers(roles):
            del pieces.gaps[min(pieces.keys(roles), key=seen.__getitem__)]
    words = template.words()
    plain = [word for word in words if _WORD.fullmatch(word)]  # Names of roles and keys, which are tried below.
    pieces.triggers = [word for word in words if word not in plain]
    pieces.stripped = _stripped(template)
    pieces.ends_at_tokens = all(
        gap[:after].endswith(tuple(cuts)) or gap[after:].startswith(tuple(cuts)) or after == len(gap) and not key.split("|")[1]
        for key, (gap, after, _, _) in pieces.gaps.items() if key.startswith("assistant|"))
    if pieces.gaps and _proven(template, pieces, plain):
        return pieces
    # Many templates treat an empty system text differently; rows without one should still be compiled.
    pieces.gaps = {key: gap for key, gap in pieces.gaps.items() if "system" not in key.split("|")}
    return pieces if pieces.gaps and _proven(template, pieces, plain) else None


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
    """Returns the texts around the sentinels; None unless each sentinel occurs once, in order."""
    gaps = []
    for k in range(count):
        before, found, text = text.partition(_sentinel(k))
        if not found:
            return None
        gaps.append(before)
    gaps.append(text)
    return None if any("\ue000" in gap for gap in gaps) else gaps


def _learn(template: ChatTemplate, pieces: Pieces, roles: Sequence[str], cuts: Sequence[str]) -> list[str]:
    """Adds the gaps of one probe. Returns the keys whose gap contradicts another probe's. Errors: TemplateError, also for no gaps."""
    messages = _probe(roles)
    text, spans = template.render_marked(messages)
    gaps = _gaps_of(text, len(roles))
    shares = None if gaps is None else _shares(messages, gaps, spans)
    if gaps is None or shares is None:
        raise TemplateError("contents, or turns, are not one behind the other")
    contradicted = []
    for key, gap, (after, before) in zip(pieces.keys(roles), gaps, shares, strict=True):
        cut = min((at for token in cuts if after <= (at := gap.find(token, after)) <= len(gap) - before), default=-1)
        learnt = (gap, after, before, len(gap[:cut].encode()) if cut >= 0 else -1)
        if pieces.gaps.setdefault(key, learnt) != learnt:
            contradicted.append(key)
    return contradicted


def _shares(messages: Messages, gaps: list[str], spans: Spans) -> list[tuple[int, int]] | None:
    """Returns for each gap how many characters belong to the assistant's turn before it, and to the one after it.

    None where a span is anything but a whole turn.
    """
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
    """Returns the roles whose contents the template strips of white space at their ends."""
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
    """Whether pieces and template agree, in text and spans, on odd contents in every probe that the pieces cover."""
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
    """Whether pieces render the same text as the template, which must not refuse it; and the same spans, where the template has them."""
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
