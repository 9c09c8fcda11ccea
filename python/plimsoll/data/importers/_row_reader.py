# SPDX-License-Identifier: Apache-2.0
"""RowReader: reads a row of any shape into one form. Each of its keys is used, refused, or counted (decision 0061).

C++ reads chats of roles and texts alone (src/data/chat_row.h), by the same rule. This file reads all other rows.

Reading order: RowReader.read(), _Keys, _Parts.
Threads: one owner.   Memory: the row, parsed.
"""
from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from ... import _core
from ._tar_rows import Fields

Message = dict[str, Any]

MESSAGES, PROMPT, TEXT = range(3)  # Row.kind.
_ROLES: dict[str, str] = dict(_core.chat_roles())
_CALLS = ("function_call", "tool_call")  # Roles whose content is a tool call.
_LISTS = ("messages", "conversations", "conversation")
_QUESTIONS = ("instruction", "question", "query", "prompt")
_MORE = ("input", "context")  # Columns appended to a question, on a line of their own.
_ANSWERS = ("output", "response", "completion", "answer", "chosen", "chosen_messages")
_CAPTIONS = ("caption", "captions")
_SYSTEMS = ("system", "system_prompt")
_TOOLS = ("tools", "functions")
_LABELS = ("label", "kto_tag")
_REJECTED = ("rejected", "rejected_messages")
_SWITCHES = ("weight", "loss_weight", "train", "training", "trainable", "loss")  # Keys that decide whether a message is trained on.
_SAID = ("role", "from", "content", "value")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_STORED = ("tool_calls", "name", "tool_call_id", *_REASONING)  # Keys of a message that an image set keeps.
_IMAGES = ("images", "img", "image_path", "image_file", "image_url", "jpg", "jpeg", "png", "webp")
_FILES = ("file_name", "filename", "file_path", "filepath", "path")  # Keys with the path of an image, in rows without messages.
_PART_TEXTS = ("text", "input_text", "output_text")
_PART_IMAGES = ("image", "image_url", "input_image")
_PLACE = "<image>"
_NAMED_MOST = 40  # Most characters of a row's value that an error quotes.
_OF_PILLOW = (OSError, SyntaxError, ValueError, TypeError, AttributeError, struct.error)  # Errors of Pillow for damaged pixels and EXIF.

# Keys that do not concern training, at any level of a row.
MEANINGLESS = frozenset("""
    id ids _id idx index uid uuid key __key__ __url__ __index_level_0__ row_id sample_id example_id item_id image_id question_id
    answer_id prompt_id completion_id message_id conversation_id conversation_hash chat_id session_id turn_id thread_id user_id
    task_id problem_id document_id doc_id parent_id message_tree_id annotation_id hash sha sha1 sha256 md5 hashed_ip
    source sources origin dataset dataset_name data_source subset split file filename file_name filepath file_path path url urls
    link license licence author creator annotator model model_name model_id generator provider
    language lang locale country state category categories topic topics tag tags domain type task task_type task_name difficulty
    timestamp created created_at create_time update_time updated_at modified date time version status
    score scores score_chosen score_rejected quality quality_score rating ratings rank reward rewards votes upvotes downvotes likes
    views confidence similarity aesthetic_score clip_score probability perplexity
    turn turns num_turns n_turns num_tokens n_tokens token_count tokens length char_count word_count
    toxic toxicity redacted flagged moderation openai_moderation detoxify_moderation nsfw pii
    meta metadata info extra_info additional_info avatarUrl skip_prompt_formatting is_classification
    width height size format mode detail cache_control annotations img_id imgid cocoid sentids
    dump added language_score lang_score int_score header turn_identifier custom_instruction
    original_width original_height exif error_message punsafe pwatermark parallel_tool_calls tool_choice temperature top_p max_tokens seed
""".split())


class BadRow(Exception):
    """Raised for a row that is left out, or ends the import. key: its reason in the counts; keys: number of keys in the row."""

    keys = 0

    def __init__(self, key: str, detail: str = "") -> None:
        super().__init__(detail)
        self.key = key
        self.detail = detail


@dataclasses.dataclass
class Row:
    """A row in the form common to all imports.

    messages: role, content, and other keys that a template may read. A content is text, or parts of type "text" and
              "image".
    tools, more: variables for a template beside the messages: its tools, and all others.
    images:   the images of the parts of type "image", in their order, as the row names them.
    counted:  number of unused keys, by name. keys: number of all keys.
    """

    kind: int = MESSAGES
    messages: list[Message] = dataclasses.field(default_factory=list)
    images: list[Any] = dataclasses.field(default_factory=list)
    tools: Any = None
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    untrained: set[int] = dataclasses.field(default_factory=set)
    counted: dict[str, int] = dataclasses.field(default_factory=dict)
    keys: int = 0
    nulls: bool = False

    @property
    def used(self) -> int:
        return self.keys - sum(self.counted.values())

    def stored(self) -> str:
        """Returns the messages as an image set stores them, in JSON. Answers not to be trained on have "train": false."""
        return json.dumps([one | {"train": False} if k in self.untrained and one["role"] == "assistant" else one
                           for k, one in enumerate(self.messages)], ensure_ascii=False)

    @property
    def has_parts(self) -> bool:
        """Whether any message's content is a list of parts."""
        return any(isinstance(one.get("content"), list) for one in self.messages)

    @property
    def plain(self) -> bool:
        """Whether the row has only roles and texts, which pieces of a template can render."""
        return self.tools is None and not self.more and all(len(one) == 2 and isinstance(one.get("content"), str) for one in self.messages)


class KeyCounts:
    """Counts the keys of all rows: used ones, those of rows left out (refused), and unused ones, by name with rows and keys."""

    def __init__(self, said: dict[str, Any] | None = None) -> None:
        said = said or {}
        self.used, self.refused = said.get("used", 0), said.get("refused", 0)
        self.counted: dict[str, list[int]] = {name: list(one) for name, one in said.get("counted", {}).items()}

    def add(self, used: int, refused: int, counted: Iterable[tuple[str, int, int]]) -> None:
        """Adds counts. counted: (name, rows, keys) of unused keys."""
        self.used += used
        self.refused += refused
        for name, rows, keys in counted:
            both = self.counted.setdefault(name, [0, 0])
            self.counted[name] = [both[0] + rows, both[1] + keys]

    def said(self) -> dict[str, Any]:
        """Returns the counts as a dict that JSON can represent."""
        return {"used": self.used, "refused": self.refused, "counted": dict(sorted(self.counted.items()))}


class RowReader:
    """Reads rows of chats (fields: None), or rows with images (fields: their columns)."""

    def __init__(self, ignored: Collection[str], fields: Fields | None = None,
                 reads: Callable[[str, str, bool], bool] = lambda key, role, tools: key in _STORED) -> None:
        """Takes the options. ignored: names of keys to ignore: "topic", "messages.topic", "content.topic".
        reads:   called with (key, role, whether the row has tools): is this key of a message of that role used? With
                 role "" it asks about a key beside the messages."""
        self.ignored = frozenset(ignored.split(",") if isinstance(ignored, str) else ignored) - {""}
        self.fields = fields
        self.reads = reads
        self._images: tuple[str, ...] = ()
        self._questions: tuple[str, ...] = _QUESTIONS
        self._answers: tuple[str, ...] = _ANSWERS
        if fields is not None:  # A column whose name was given has no other names.
            self._images = (fields.image, *(_IMAGES if fields.image == "image" else ("images",)))
            self._questions = (fields.text, *(("txt", *_QUESTIONS) if fields.text == "text" else ()))
            self._answers = tuple(one for one in (fields.response, *((*_ANSWERS, *_CAPTIONS) if fields.response == "response"
                                                                     else ())) if one not in self._questions)
        self.known = frozenset((*_LISTS, *_QUESTIONS, *_MORE, *_ANSWERS, *_SYSTEMS, *_TOOLS, *_LABELS, *_REJECTED, *_SWITCHES,
                                *self._images, *(_FILES if fields else ()), *self._questions, *self._answers, "text", "texts",
                                "history", "documents", "chat_template_kwargs"))

    def read(self, line: bytes | str) -> Row:
        """Parses a line of JSON into a Row. Errors: BadRow."""
        try:
            given = json.loads(line, object_pairs_hook=_object, parse_constant=_no_number)
        except BadRow as bad:
            bad.keys = _keys_of_text(line)
            raise
        except UnicodeDecodeError:
            raise BadRow("not_utf8") from None
        except ValueError as error:
            raise BadRow("not_json", str(error)) from None
        except RecursionError as error:
            raise BadRow("template", f"the row, or its tools, are no JSON that Python reads: {error}") from None
        if not isinstance(given, dict):
            raise BadRow("not_an_object")
        total = key_count(given)
        row = Row(keys=total)
        try:
            self._read(given, row)
        except BadRow as bad:
            bad.keys = total
            raise
        return row

    def _read(self, given: dict[str, Any], row: Row) -> None:
        unknown: list[str] = []
        keys = _Keys(given, "", self.ignored, row, unknown)
        label = self._label(keys)
        trained = _switch(keys)
        self._add_variables(keys, row, unknown)
        images = _Images(self._image_column(keys, row, unknown))
        self._add_messages(keys, row, images, unknown)
        if self.fields is not None:
            images.end(row)
        if not row.messages:
            raise BadRow("no_messages")
        said = {text for one in row.messages for text in _texts_of(one.get("content")) if text}
        for name, value in list(keys.left.items()):
            if isinstance(value, str) and (value in said or (name == "text" and said and all(text in value for text in said))):
                keys.count(name)  # A message repeats it, or it is the whole chat in Alpaca's form.
        keys.end()
        if unknown:
            raise BadRow("unknown_key", f"{', '.join(unknown)}: correct the names, or have these keys left out with "
                                        f"ignore_keys (--ignore-keys {','.join(unknown)})")
        if label is False:
            raise BadRow("label_false")
        if trained is False:
            raise BadRow("not_trained")

    def _label(self, keys: _Keys) -> bool | None:
        found = None
        for name in _LABELS:
            if name in keys.left and name not in (self.fields.text, self.fields.response) if self.fields else name in keys.left:
                value = keys.take(name)
                if value is not None and not isinstance(value, bool):
                    raise BadRow("bad_value", f"{name} is {_short(value)}, and true or false is read (KTO): have it left out "
                                              f"with ignore_keys (--ignore-keys {name})")
                found = found if value is None else value if found is None else found and value
        return found

    def _image_column(self, keys: _Keys, row: Row, unknown: list[str]) -> list[Any]:
        """Takes the images in columns beside the messages or texts."""
        chats = any(keys.left.get(name) for name in (*_LISTS, "texts"))
        _, given = keys.first((*self._images, *(() if chats or self.fields is None else _FILES)))
        given = given if isinstance(given, list) else [] if given is None else [given]
        return [self._source(one, row, unknown) for one in given]

    def _source(self, image: Any, row: Row, unknown: list[str]) -> Any:
        """Returns an image as bytes_of() takes it."""
        if not isinstance(image, dict):
            return image
        keys = _Keys(image, "image", self.ignored, row, unknown)
        name, value = keys.first(("damage", "bytes", "url", "path"))
        for other in ("bytes", "url", "path"):
            keys.count(other)
        keys.end()
        return value if name in ("url", "path", None) else {name: value}

    def _add_messages(self, keys: _Keys, row: Row, images: _Images, unknown: list[str]) -> None:
        """Adds the messages, whatever shape the row has."""
        before = self._before(keys)
        name: str | None
        for name in _REJECTED:
            if keys.left.get(name):
                raise BadRow("preference", f"{name}: import the answer that was chosen alone with ignore_keys "
                                           f"(--ignore-keys {name})")
        others = any(keys.left.get(one) for one in (*self._questions, *_MORE, *self._answers, "text", "texts"))
        for name in _LISTS:
            if others and keys.left.get(name) == []:
                keys.count(name, "empty")
        name, given = keys.first(_LISTS)
        prompt = keys.left.get("prompt")
        if name:
            self._add_list(name, given, row, images, unknown)
            self._add_answer(keys, row, images, unknown, ("completion", "chosen", "chosen_messages"))
        elif isinstance(prompt, list):
            self._add_list("prompt", keys.take("prompt"), row, images, unknown)
            row.untrained = set(range(len(row.messages)))
            if not self._add_answer(keys, row, images, unknown, self._answers):
                raise BadRow("no_shape", "a prompt of messages without a completion")
        elif isinstance(keys.left.get("texts"), list):
            self._add_pairs("texts", keys.take("texts"), row, images, unknown)
        else:
            self._add_columns(keys, row, images, unknown)
        if before and row.messages and row.messages[0]["role"] == "system":
            if len(before) > 1 or before[0]["content"] != row.messages[0].get("content"):
                raise BadRow("bad_message", "system beside a first message of the system that says otherwise, or a history: have "
                                            "one left out with ignore_keys (--ignore-keys system)")
            before = []
        row.messages = before + row.messages
        row.untrained = {one + len(before) for one in row.untrained}
        beside = bool(before or row.tools or row.more)
        if row.kind == TEXT and beside:
            raise BadRow("bad_message", "a text with a system, a history or tools beside it, which belong to a chat: have them left "
                                        "out with ignore_keys (--ignore-keys)")
        row.kind = MESSAGES if beside else row.kind

    def _before(self, keys: _Keys) -> list[Message]:
        """Takes the messages in columns that precede the others: the system's text, and a history of pairs."""
        messages: list[Message] = []
        _, system = keys.first(_SYSTEMS)
        if system is not None and not isinstance(system, str):
            raise BadRow("bad_message", "system is not text")
        if system:
            messages.append({"role": "system", "content": system})
        history = keys.take("history")
        if history is not None and not isinstance(history, list):
            raise BadRow("bad_message", "history is not a list of pairs")
        for pair in history or []:
            if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(one, str) for one in pair)):
                raise BadRow("bad_message", "history is not a list of pairs of a question and its answer")
            messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
        if self.fields is None:
            return messages
        return [one | {"content": [{"type": "text", "text": one["content"]}]} for one in messages]

    def _add_list(self, name: str, given: Any, row: Row, images: _Images, unknown: list[str]) -> None:
        if isinstance(given, str) and given.lstrip().startswith("["):
            given = _from_json(given)
        if not isinstance(given, list):
            raise BadRow("bad_message", f"{name} is not a list")
        for message in given:
            self._add_message(message, row, images, unknown)

    def _add_answer(self, keys: _Keys, row: Row, images: _Images, unknown: list[str], names: Iterable[str]) -> bool:
        """Adds an answer from its own column after the messages: a text, a message, or several."""
        name, given = keys.first(names)
        if not name:
            return False
        if isinstance(given, str):
            given = [{"role": "assistant", "content": given}]
        given = [given] if isinstance(given, dict) else given
        if not isinstance(given, list):
            raise BadRow("bad_message", f"{name} is neither text nor messages")
        asked = [{"role": one["role"], "content": one.get("content")} for one in row.messages]
        if asked and given[:len(asked)] == asked:  # The column repeats the whole chat.
            row.messages, row.untrained = [], set()
        self._add_list(name, given, row, images, unknown)
        return True

    def _add_pairs(self, name: str, given: list[Any], row: Row, images: _Images, unknown: list[str]) -> None:
        """Adds turns given as {"user": …, "assistant": …}; images go before the first."""
        for pair in given:
            if not isinstance(pair, dict):
                raise BadRow("bad_message", f"{name} is not a list of turns of user and assistant")
            keys = _Keys(pair, name, self.ignored, row, unknown)
            user, assistant = keys.take("user"), keys.take("assistant")
            if not (isinstance(user, str) and isinstance(assistant, str)):
                raise BadRow("bad_message", f"{name}: a turn without texts of user and assistant")
            keys.end()
            row.messages += [{"role": "user", "content": self._content(user, images)},
                             {"role": "assistant", "content": self._content(assistant, images)}]

    def _add_columns(self, keys: _Keys, row: Row, images: _Images, unknown: list[str]) -> None:
        """Adds a question and its answer from columns, or a text."""
        caption = next((keys.left[name] for name in _CAPTIONS if name in self._answers and keys.left.get(name)), None)
        for name in self._questions:
            if self.fields is not None and caption is not None and keys.left.get(name) == caption:
                keys.count(name)  # As in img2dataset, which stores captions twice.
        asked, question = keys.first(self._questions)
        more, rest = keys.first(_MORE)
        answered, answer = keys.first(self._answers)
        chats = self.fields is None
        if chats and asked is None and more is None and answered is None:
            text = keys.take("text")
            if text is None:
                names = ", ".join(map(_short, list(keys.left)[:8]))
                raise BadRow("no_shape", f"it has {names}" if names else "")
            row.kind = TEXT
            row.messages = [{"role": "assistant", "content": self._text("text", text)}]
            return
        if chats and isinstance(answer, (list, dict)):
            answer = answer if isinstance(answer, list) else [answer]
            whole = any(isinstance(one, dict) and one.get("content") == question for one in answer)
            said = [self._text(str(name), one) for name, one in ((None if whole else asked, question), (more, rest)) if name]
            if whole and said:
                raise BadRow("bad_message", f"{more} beside a whole chat: have it left out with ignore_keys (--ignore-keys {more})")
            if said:
                row.messages = [{"role": "user", "content": "\n".join(text for text in said if text)}]
            self._add_list(str(answered), answer, row, images, unknown)
            return
        if chats and (answered is None or (asked is None and more is None)):
            raise BadRow("no_shape", f"it has {', '.join(map(_short, (one for one in (asked, more, answered) if one)))}")
        if not chats and not images and answered is None:
            assert self.fields is not None
            raise BadRow("no_shape", f"neither messages nor {self.fields.image} or {self.fields.response}")
        if chats and (asked, more, answered) == ("prompt", None, "completion"):
            row.kind = PROMPT
        texts = [(asked, question), (more, rest)]
        if chats:
            said = [self._text(str(name), one) for name, one in texts if one is not None and one != ""]
            row.messages = [{"role": "user", "content": "\n".join(said)},
                            {"role": "assistant", "content": self._text(str(answered), answer)}]
            return
        parts: list[Message] = []
        for asked_as, one in texts:
            for text in one if isinstance(one, list) else [] if one in (None, "") else [one]:
                parts += images.placed(self._text(str(asked_as), text))
        row.messages = [{"role": "user", "content": parts}] if parts else []
        if answered is not None:
            row.messages.append({"role": "assistant", "content": [
                part for text in (answer if isinstance(answer, list) else [answer])
                for part in images.placed(self._text(answered, text))]})

    @staticmethod
    def _text(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise BadRow("bad_message", f"{name} is not text")
        return value

    def _content(self, text: str, images: _Images) -> Any:
        return text if self.fields is None else images.placed(text)

    def _add_message(self, given: Any, row: Row, images: _Images, unknown: list[str]) -> None:
        if not isinstance(given, dict):
            raise BadRow("bad_message")
        keys = _Keys(given, "messages", self.ignored, row, unknown)
        _, role = keys.first(_SAID[:2])
        _, content = keys.first(_SAID[2:])
        trained = _switch(keys)
        if not isinstance(role, str):
            raise BadRow("bad_message")
        more: Message = {}
        if role in _CALLS:
            more["tool_calls"], content, role = _calls_of(content), None, "assistant"
        name = _ROLES.get(role)
        if name is None:
            raise BadRow("unknown_role", role[:_NAMED_MOST])
        parts: Any = content
        if isinstance(content, list):
            parts = self._parts(content, images, more, row, unknown)
        elif isinstance(content, str):
            parts = self._content(content, images)
        elif content is not None:
            raise BadRow("bad_message", f"a message whose content is {_short(content)}, neither text nor parts")
        if isinstance(keys.left.get("function_call"), dict) and not self._is_read("function_call", name):
            more["tool_calls"] = [{"type": "function", "function": keys.take("function_call")}]
        if any(not self._is_read(key, name) for key in more):  # Keys from parts of the content: the template must print them.
            raise BadRow("unknown_key", f"the chat template does not print {', '.join(more)}: pass another (--template)")
        thought = next((key for key in _REASONING if keys.left.get(key) is not None), None)
        for key, value in list(keys.left.items()):
            if value is None or key in more or key in _SAID or (key in _REASONING and key != thought):
                continue
            if self._is_read(key, name):
                more[key] = self._checked_calls(value, row, unknown) if key == "tool_calls" else value
                keys.take(key)
            elif key in (*_STORED, "function_call"):  # A standard key that the template does not print.
                more[key] = value
                keys.count(key)
        if parts is None and not more and "content" not in given:
            raise BadRow("bad_message")
        row.nulls = row.nulls or any(_has_null(value) for value in more.values())
        keys.end()
        if trained and name != "assistant":
            raise BadRow("bad_message", f"a message of the {name} that is to be trained on; only the assistant's are: have its "
                                        "weight or switch left out with ignore_keys (--ignore-keys messages.weight)")
        if trained is False:
            row.untrained.add(len(row.messages))
        row.messages.append({"role": name, **({} if parts is None else {"content": parts}), **more})

    def _is_read(self, key: str, role: str) -> bool:
        return any(self.reads(one, role, self._tools) for one in ((key, *_REASONING[:2]) if key in _REASONING else (key,)))

    def _checked_calls(self, given: Any, row: Row, unknown: list[str]) -> list[Any]:
        """Returns the tool calls as given, without ignored keys."""
        calls = []
        if not (isinstance(given, list) and all(isinstance(call, dict) for call in given)):
            raise BadRow("bad_message", "tool_calls is not a list of objects")
        for call in given:
            inner = call.get("function")
            if inner is not None and not isinstance(inner, dict):
                raise BadRow("bad_message", "a function of tool_calls is not an object")
            parts = []
            for one, names in ((call, ("name", "arguments")),) if inner is None else ((call, ("function",)), (inner, ("name", "arguments"))):
                keys = _Keys(one, "tool_calls", self.ignored, row, unknown)
                parts.append({name: value for name, value in one.items() if name in keys.left})
                for name in names:
                    keys.take(name)
                keys.end()
            calls.append(parts[0] | ({"function": parts[1]} if len(parts) > 1 else {}))
        return calls

    def _parts(self, given: list[Any], images: _Images, more: Message, row: Row, unknown: list[str]) -> Any:
        kept: list[Message] = []
        calls: list[Any] = []
        for part in given:
            if isinstance(part, str):
                kept += images.placed(part) if self.fields is not None else [{"type": "text", "text": part}]
                continue
            if not isinstance(part, dict):
                raise BadRow("bad_message", "a part of a content that is neither text nor an object")
            keys = _Keys(part, "content", self.ignored, row, unknown)
            kind = keys.take("type")
            kind = kind or next((one for one in ("text", *_PART_IMAGES) if keys.left.get(one) is not None), None)
            if kind in _PART_TEXTS:
                _, text = keys.first(("text", "value"))
                kept += images.placed(self._text("a part's text", text)) if self.fields is not None else \
                    [{"type": "text", "text": self._text("a part's text", text)}]
            elif kind in ("reasoning", "thinking"):
                _, text = keys.first(("value", "text", kind))
                more["reasoning_content"] = more.get("reasoning_content", "") + self._text("a part's reasoning", text)
            elif kind == "tool_call":
                calls += _calls_of(keys.take("value"))
            elif kind in _PART_IMAGES and self.fields is not None:
                kept.append({"type": "image"})
                _, image = keys.first(("image_url", "image", "url", "path", "base64"))
                images.name(self._source(image, row, unknown))
            else:
                known = "text, image and image_url" if self.fields is not None else "text"
                raise BadRow("bad_message", f"a part of type {str(kind)[:_NAMED_MOST]!r}; {known} {'is' if known == 'text' else 'are'} "
                                            f"known{'' if self.fields is not None else ', and import vision reads images'}")
            keys.end()
        if calls:
            more["tool_calls"] = calls
        return kept if kept or not given else None

    def _add_variables(self, keys: _Keys, row: Row, unknown: list[str]) -> None:
        """Adds the template's variables beside the messages: tools, documents, chat_template_kwargs."""
        given = dict(keys.left)
        name, tools = keys.first(_TOOLS)
        tools = _from_json(tools)
        if name == "functions" and isinstance(tools, list):
            tools = [{"type": "function", "function": one} for one in tools]
        self._tools = bool(tools)
        documents, more = _from_json(keys.take("documents")), _from_json(keys.take("chat_template_kwargs"))
        if more is not None and not isinstance(more, dict):
            raise BadRow("bad_value", "chat_template_kwargs is not an object")
        for key, column, value in (("tools", name or "", tools), ("documents", "documents", documents)):
            if value and self.fields is not None:
                raise BadRow("unknown_key", f"{column}: an image set keeps none: have them left out with ignore_keys "
                                            f"(--ignore-keys {column})")
            if value and not self.reads(key, "", self._tools):
                row.counted[column] = 1 + key_count(given[column])  # The template does not print it.
        row.tools = tools or None
        if documents:
            row.more["documents"] = documents
        variables = _Keys(more or {}, "chat_template_kwargs", self.ignored, row, unknown)
        for name in list(variables.left):
            if self.fields is not None:
                continue
            row.more[name] = variables.left[name]
            if self.reads(name, "", self._tools):
                variables.left.pop(name)
            else:
                variables.count(name)
        variables.end()


def _from_json(value: Any) -> Any:
    """Parses a text as JSON; returns any other value unchanged. Errors: BadRow."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow("template", f"the row, or its tools, are no JSON that Python reads: {error}") from None


class _Keys:
    """The keys of one object in a row. Each is taken once; those left are empty, meaningless, or unknown."""

    def __init__(self, given: dict[str, Any], level: str, ignored: frozenset[str], row: Row, unknown: list[str]) -> None:
        """Takes the keys of `given`. unknown: the list to which end() appends refused names."""
        self._level, self._row, self._unknown = level, row, unknown
        self.left = dict(given)
        if ignored:
            for name in given:
                if self._named(name) in ignored:
                    self.count(name)

    def _named(self, name: str) -> str:
        return f"{self._level}.{name}" if self._level else name

    def take(self, name: str) -> Any:
        """Returns a key's value and marks it used; None where it is missing or null. A null key stays, to be counted."""
        value = self.left.get(name)
        if value is not None:
            del self.left[name]
        return value

    def first(self, names: Iterable[str]) -> tuple[str | None, Any]:
        """Takes the first of these names that has a value, preferring a value that is not empty. Returns (name, value).

        Other names with an equal value are counted as unused; all others stay.
        """
        found = [name for name in names if self.left.get(name) is not None]
        full = [name for name in found if self.left[name] not in ("", [])]
        if not found:
            return None, None
        name = (full or found)[0]
        value = self.take(name)
        for other in found:
            if other in self.left and self.left[other] == value:
                self.count(other)
        return name, value

    def count(self, name: str, called: str | None = None) -> None:
        """Counts a key as unused, under its name."""
        if name in self.left:
            called = called or self._named(name)
            self._row.counted[called] = self._row.counted.get(called, 0) + 1 + key_count(self.left.pop(name))

    def end(self) -> None:
        """Counts the keys that are left, or adds them to the unknown ones."""
        for name in list(self.left):
            if name in MEANINGLESS:
                self.count(name)
            elif self.left[name] is None or self.left[name] in ("", [], {}):
                self.count(name, "empty")
            else:
                self._unknown.append(self._named(name))


class _Images:
    """The images of a row: those in its column, in order, and those that parts name."""

    def __init__(self, column: list[Any]) -> None:
        self._column = column
        self._next = 0
        self._found: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._column)

    def name(self, image: Any) -> None:
        """Adds an image that a part names, or for None the next one in the column. Errors: BadRow."""
        if image is None:
            if self._next == len(self._column):
                raise BadRow("bad_message", "fewer images than parts of the messages name")
            image = self._column[self._next]
            self._next += 1
        self._found.append(image)

    def placed(self, text: str) -> list[Message]:
        """Splits a text into parts, with an image in place of each <image>."""
        parts: list[Message] = []
        for k, piece in enumerate(text.split(_PLACE)):
            if k:
                self.name(None)
                parts.append({"type": "image"})
            if piece or k == 0 and _PLACE not in text:
                parts.append({"type": "text", "text": piece})
        return parts

    def end(self, row: Row) -> None:
        """Sets row.images. Images that no part places go before the user's first text. Errors: BadRow."""
        left = len(self._column) - self._next
        if left and self._found:
            raise BadRow("bad_message", "more images than parts of the messages name")
        if left:
            first = next((k for k, one in enumerate(row.messages) if one["role"] == "user"), None)
            if first is None:
                first = int(bool(row.messages) and row.messages[0]["role"] == "system")
                row.messages.insert(first, {"role": "user", "content": []})
                row.untrained = {one + (one >= first) for one in row.untrained}
            user = row.messages[first]
            row.messages[first] = user | {"content": [{"type": "image"}] * left + user.get("content", [])}
            self._found = self._column
        row.images = self._found


def _texts_of(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if "text" in part:
            yield part["text"]


def _switch(keys: _Keys) -> bool | None:
    """Returns whether an object is to be trained on, by its weight or switch; None where it has none. Errors: BadRow."""
    found = None
    for name in _SWITCHES:
        value = keys.take(name)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            named = keys._named(name)
            raise BadRow("bad_value", f"{named} is {_short(value)}, and 0 or 1, true or false is read: have it left out with "
                                      f"ignore_keys (--ignore-keys {named})")
        found = bool(value) if found is None else found and bool(value)
    return found


def _calls_of(text: Any) -> list[Any]:
    """Parses tool calls from JSON: {"name": …, "arguments": …}, or a list of them. Errors: BadRow."""
    try:
        said = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise BadRow("bad_message", f"a call of a tool that is not JSON: {error}") from None
    calls = said if isinstance(said, list) else [said]
    if not calls or not all(isinstance(one, dict) and "name" in one for one in calls):
        raise BadRow("bad_message", "a call of a tool without its name")
    return [{"type": "function", "function": one} for one in calls]


def _has_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(one is None or _has_null(one) for one in value.values())
    return isinstance(value, list) and any(one is None or _has_null(one) for one in value)


def _short(value: Any) -> str:
    return value[:_NAMED_MOST] if isinstance(value, str) else json.dumps(value)[:_NAMED_MOST]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise BadRow("duplicate_key", _short(next(name for name in names if names.count(name) > 1)))
    return made


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def key_count(value: Any) -> int:
    """Returns the number of keys in all objects inside a value."""
    count, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            count += len(one)
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
    return count


def _keys_of_text(line: bytes | str) -> int:
    counts: list[int] = []
    json.loads(line, object_pairs_hook=lambda pairs: counts.append(len(pairs)))
    return sum(counts)


def row_line(known: Collection[str]) -> Callable[[Any], Any]:
    """Returns a function that makes a row of an iterable representable in JSON.

    Bytes and pictures become base64. Columns that are not read may hold anything, so only their keys are kept.

    known: the columns that are read.
    """

    def line(row: Any) -> Any:
        if not isinstance(row, dict):
            return row
        return {key: _plain(value) if key in known else _outline(value) for key, value in row.items()}

    return line


def _outline(value: Any) -> Any:
    """Returns a value's keys, and whether it is empty, without its content."""
    if isinstance(value, dict):
        return {str(key): _outline(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_outline(one) for one in value if isinstance(one, (dict, list, tuple))] or [0] * (len(value) > 0)
    if isinstance(value, str):
        return value and "…"
    return None if value is None else 0


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "save") and hasattr(value, "getdata"):  # A Pillow image: stored lossless, and turned upright by EXIF.
        packed = io.BytesIO()
        try:  # Pillow reads the file only here.
            kept = value if value.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else value.convert("RGB")
            kept.save(packed, "PNG", compress_level=1, exif=value.getexif())
        except _OF_PILLOW as error:
            return {"damage": str(error)}
        return {"bytes": base64.b64encode(packed.getvalue()).decode()}
    return value
