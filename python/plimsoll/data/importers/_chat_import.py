# SPDX-License-Identifier: Apache-2.0
"""import_chat(): makes a token set from chats, in bounded memory.

C++ reads, checks and renders rows of roles and texts (chat_reader.h) and writes the set (token_writer.cpp).
_row_reader.py reads all other rows. This file calls the tokenizer, and the template where it is not compiled,
on 256 KiB of text at a time. Torch is not imported.

Reading order: import_chat(), _set_import.py, _Import, _row_reader.py, _chat_source.py, _chat_encoder.py.
Memory: a piece, its tokens, the tokenizer.
"""
from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ... import _core
from ...core._arrays import byte_size
from ...memory._memory import Governor, with_governor
from .._token_set import TokenSet
from ._chat_encoder import ENCODERS, Encoder
from ._chat_source import TRAINING, ChatFiles, ChatRows, chat_source
from ._chat_template import ChatTemplate, ChatTokenizer, Messages, Pieces, Spans, TemplateError, agree, compile_template
from ._parts import Part
from ._row_files import Reading
from ._row_reader import MEANINGLESS, MESSAGES, PROMPT, BadRow, Row, RowReader, row_line
from ._set_import import Again, SetImport, digest
from ._tar_rows import Fields

_PIECE_BYTES = 256 << 10
_COMMIT_BYTES = 16 << 20
_SAMPLE = 256  # One of so many rows rendered by pieces is rendered by the template, too.
_SAMPLE_IDS = 1024  # One of so many texts that gigatoken encodes is encoded by the library, too.
_RENDERED, _PROMPT, _TEXT, _WHOLE, _BAD = range(5)  # ChatText::Kind.
_TEMPLATE = -1  # Stands for a row that the template rendered.
_VERSION = 6  # Raised when the same inputs give another set.
_MARK = "\ue000printed\ue001"  # Occurs in no text.

_Path = str | os.PathLike[str]


@with_governor
def import_chat(files: _Path | Sequence[_Path] | Iterable[dict[str, Any]], out: _Path, *, tokenizer: _Path,
                template: str | None = None, train: str = "assistant", max_length: int = 0, errors_max: int = 0,
                date: str | None = None, template_kwargs: Mapping[str, Any] | None = None,
                line_bytes_max: int | str = "100MiB", text_bytes_max: int | str = "2MiB",
                encoder: str = "auto", ignore_keys: Collection[str] = (), part: Part | None = None, join: int = 0,
                rebuild: bool = False, progress: Callable[[int, int], object] | None = None,
                governor: Governor | None = None) -> dict[str, Any]:
    """Makes a token set in the file `out` from chats, with the ids of a Hugging Face tokenizer.

    files:      paths of files whose rows are JSON (lines, one array, or indented objects), CSV, TSV, Parquet or Arrow; a
                folder written by datasets.save_to_disk(); or WebDataset archives. Files are plain or packed by gzip, zstd,
                bzip2 or xz, in UTF-8, UTF-16 or UTF-32. The format is found from their first bytes, not their names. A row
                has messages (OpenAI), conversations (ShareGPT), instruction, input and output (Alpaca), question and
                answer, prompt and completion, or text; docs/guide/data.md lists the columns that are read. Instead of
                files, any iterable of rows will do: a list, a Hugging Face Dataset.
    tokenizer:  folder with tokenizer.json, tokenizer_config.json and the chat template. Texts and prompts get the
                tokenizer's own special tokens and its end-of-sequence token.
    template:   a chat template that replaces the folder's, or the name of one in the folder. By default a row with tools
                takes the template named "tool_use", where the folder has it.
    template_kwargs: variables for the template, such as {"enable_thinking": False}. A row's own `chat_template_kwargs`
                override them; a row's `tools` and `documents` are passed, too.
    train:      the tokens to train on: "assistant" takes the assistant's turns (and a prompt's completion), "last" the
                last of these turns, "all" every token.
    max_length: most tokens of a row; the rest is cut off. 0: no bound.
    errors_max: number of rows that may be left out for an error; one more ends the import, with file and line.
    date:       the day for templates that ask for it, such as "2026-01-31".
    line_bytes_max, text_bytes_max: most bytes of a line, and of one message, or of a row whose text cannot be cut.
    encoder:    "tokenizers"; "gigatoken", which is faster and gives the same ids; "auto": gigatoken where it is
                installed and shown equal for this tokenizer. It is compared again every 1,024 texts.
    ignore_keys: keys that are ignored: "topic" of a row, "messages.topic" of a message.
    part:       (3, 8) imports the third of eight parts of the files into a set of its own, named `out` with .part-3-of-8
                appended. A part is neighbouring files with about an eighth of the bytes; a file is not divided, so a part
                may be empty. Parts may be made side by side, by any processes that see files of the same names and sizes.
    join:       8 makes `out` from its eight parts, in the same bytes as one import of all files. The parts stay.
    rebuild:    makes the set even when neither inputs nor options have changed since `out` was made.
    progress:   called with (bytes done, bytes in all). For an iterable it counts rows (in all: 0 where it has no length),
                for join it counts parts.

    If the import is killed at any moment, the same call resumes it, to the same bytes: inputs read before are read
    again and compared. An iterator that can be read only once is imported from its beginning. Rows without a token
    to train on are left out. Each key of a row is used, refused with file and line, or counted under its name
    (about["keys"]). Returns plimsoll.info(out), "reused", "encoder", and "first_rows": the first two rows as text,
    with the parts that are trained on between ⟦ and ⟧.
    Errors: ValueError naming file and line, or the option, or a part made from other inputs; NotFoundError (also
            naming a part that is missing); CorruptError (a damaged file, an array without an end);
            BudgetExceeded; OSError. The work done so far is kept for the next call.
    """
    assert governor is not None  # By with_governor.
    if train not in TRAINING:
        raise ValueError(f"train: {train!r} is none of {', '.join(TRAINING)}")
    if max_length < 0 or errors_max < 0:
        raise ValueError("max_length and errors_max are not below 0")
    loaded = ChatTokenizer(tokenizer, template, date, template_kwargs)
    prints = _Prints(loaded)
    rows = RowReader(ignore_keys, reads=prints)
    options: dict[str, Any] = {"train": train, "max_length": max_length, "errors_max": errors_max, "ignore_keys": sorted(rows.ignored),
               "line_bytes_max": byte_size(line_bytes_max, "line_bytes_max"),
               "text_bytes_max": byte_size(text_bytes_max, "text_bytes_max")}
    source = chat_source(files, Reading(Fields("text", "image", "response"), row_line(rows.known), governor,
                                        options["line_bytes_max"], options["line_bytes_max"], images=False))
    if encoder not in ENCODERS:
        raise ValueError(f"encoder: {encoder!r} is none of {', '.join(ENCODERS)}")
    job = _Import(source, os.fspath(out), loaded, options, Encoder(loaded.tokenizer, loaded.vocabulary, encoder),
                  rows, prints, governor, progress)
    path, reused = job.make(rebuild, part, join)
    return {**json.loads(_core.describe(path)), "reused": reused, "encoder": job.encoder.name,
            "first_rows": _first_rows(path, loaded.tokenizer)}


class _Prints:
    """Finds the keys of messages that a template prints, by rendering chats that have them."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, str, bool], bool] = {}
        self.parts = self._parts()

    def __call__(self, key: str, role: str, tools: bool) -> bool:
        """Whether a key of a message of `role` changes the rendered text. Role "": whether a variable of that name does.

        tools: whether the row has tools, which may have a template of their own.
        """
        found = self._known.get((key, role, tools))
        if found is None:
            try:
                template = self._tokenizer.template_for([{}] if tools else None)
            except TemplateError:
                return False
            found = self._known[key, role, tools] = key in template.names and self._rendered(template, key, role)
        return found

    @staticmethod
    def _rendered(template: ChatTemplate, key: str, role: str) -> bool:
        """Whether the key changes the text that the template writes."""
        call: list[Any] = [{"type": "function", "id": "abcdefghi", "function": {"name": "n", "arguments": {"k": "v"}}}]
        schema = {"name": "n", "description": "d", "parameters": {"type": "object", "properties": {}, "required": []}}
        chat: Messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        if not role and key not in ("tools", "documents"):
            return True  # The key is a switch.
        if role == "tool":
            chat[1] = {"role": "assistant", "content": "", "tool_calls": call}
            chat += [{"role": "tool", "content": "t"}, {"role": "assistant", "content": "a"}]
        elif role not in ("", "user", "assistant"):
            chat.insert(0, {"role": role, "content": "s"})
        try:
            without = template.render(chat)
            if key == "tools" and not role:
                return without != template.render(chat, [{"type": "function", "function": schema}])
            if not role:
                return without != template.render(chat, more={key: [{"title": "t", "text": _MARK, "contents": _MARK}]})
            next(one for one in chat if one["role"] == role)[key] = call if key == "tool_calls" else _MARK
            return without != template.render(chat)
        except TemplateError:
            return True  # The template reads the key, and expects another value.

    def _parts(self) -> bool:
        """Whether a content may be a list of parts: False where the template prints the list as Python prints it."""
        parts: list[dict[str, Any]] = [
            {"role": role, "content": [{"type": "text", "text": one}]} for role, one in (("user", "q"), ("assistant", "a"))]
        try:
            template = self._tokenizer.template_for(None)
            return template.render(parts) == template.render([{**one, "content": one["content"][0]["text"]} for one in parts])
        except TemplateError:
            return True


class _Import(SetImport):
    wanted = "a token to train on"
    harmless = [key for key, error, _ in _core.chat_oddities() if not error]
    odd_order = [key for key, *_ in _core.chat_oddities()]

    def __init__(self, source: ChatFiles | ChatRows, out: str, tokenizer: ChatTokenizer, options: dict[str, Any],
                 encoder: Encoder, rows: RowReader, prints: _Prints, governor: Governor,
                 progress: Callable[[int, int], object] | None) -> None:
        super().__init__(source, out, digest([_VERSION, tokenizer.fingerprint, options, source.identity()]), governor,
                         progress)
        self._tokenizer = tokenizer
        self.encoder = encoder
        self._encoded = 0
        self._by_pieces = 0
        self._torn: tuple[int, int] | None = None  # A skipped row, of which more parts may come.
        self._options = options
        self._rows = rows
        self._prints = prints

    def open_writer(self, fingerprint: str, rebuild: bool) -> _core.TokenWriter:
        most = self._options["max_length"] or 1 << 27
        return _core.TokenWriter.open(self.governor._core, self.out, self._tokenizer.vocabulary, fingerprint, most,
                                      rebuild)

    def open_set(self) -> _core.TokenSet:
        return _core.TokenSet.open(self.out)

    def about(self) -> dict[str, Any]:
        return {"tokenizer": self._tokenizer.fingerprint[:32], "tokenizer_files": self._tokenizer.files(),
                "options": self._options}

    def count(self, writer: _core.TokenWriter) -> int:
        return writer.rows

    def joined_alike(self, parts: list[SetImport], abouts: list[dict[str, Any]]) -> bool:
        """Whether all parts were rendered alike. Else renders those made by pieces anew, by the template, and returns False."""
        if len({about["compiled"] for about in abouts}) == 1:
            return True
        for job, about in zip(parts, abouts, strict=True):
            if about["compiled"]:
                job.run(True, {"pieces": False})
        return False

    def open_reader(self) -> _core.ChatReader:
        names, feed = self.source.lines()
        options = self._options
        roles = {role for _, role in _core.chat_roles()}
        of_messages = {key for key in MEANINGLESS if not any(
            self._prints(key, role, tools) for role in roles for tools in (False, True))}
        return _core.ChatReader.open(
            self.governor._core, names, TRAINING.index(options["train"]), options["line_bytes_max"], options["text_bytes_max"],
            options["errors_max"], feed, sorted(MEANINGLESS - self._rows.known | {key for key in self._rows.ignored if "." not in key}),
            sorted(of_messages | {key[9:] for key in self._rows.ignored if key.startswith("messages.")}))

    def work(self, reader: _core.ChatReader, writer: _core.TokenWriter, position: dict[str, Any]) -> None:
        template = self._tokenizer.template
        compiled = position.get("pieces", True)
        pieces = compile_template(template, self._tokenizer.cuts()) if template and compiled else None
        if pieces is not None:
            reader.set_pieces(*pieces.arguments())
        self._read(reader, writer, pieces)
        self.finish(reader, writer, {**self.about(), "compiled": pieces is not None})

    def _read(self, reader: _core.ChatReader, writer: _core.TokenWriter, pieces: Pieces | None) -> None:
        since = 0
        while texts := reader.next(_PIECE_BYTES, _SAMPLE):
            since += self._write(texts, reader, writer, pieces)
            if since >= _COMMIT_BYTES and reader.between_rows:
                writer.commit(json.dumps({"pieces": pieces is not None, "reader": reader.state}))
                since = 0
            if self.progress is not None:
                self.progress(reader.done, self.source.total)

    def _write(self, texts: list[tuple], reader: _core.ChatReader, writer: _core.TokenWriter,
               pieces: Pieces | None) -> int:
        """Tokenizes and appends the texts. Returns roughly the bytes of text."""
        rows = []
        for kind, file, line, text, spans, last, messages, odd in texts:
            if kind == _BAD:
                reader.note(odd, file, line, text)
                continue
            if kind == _WHOLE:
                found = self._whole_row(text, reader, file, line, pieces)
                if found is not None:
                    rows.append(found)
                continue
            if messages:
                self._compare([{"role": role, "content": content} for role, content in messages], pieces)
            rows.append((kind, file, line, text, spans, last))
        plain = self.encoder.encode([(row[3], row[4]) for row in rows if row[0] >= _PROMPT], special=True)
        chats = self.encoder.encode([(row[3], row[4]) for row in rows if row[0] < _PROMPT], special=False)
        may_tear = self._may_tear(pieces)
        for kind, file, line, text, spans, last in rows:
            ids, trained = next(plain if kind >= _PROMPT else chats)
            if kind >= _PROMPT:
                ids, trained = self._ended(ids, trained)
            elif self._encoded % _SAMPLE_IDS == 0 and self.encoder.differs(text, ids):
                raise ValueError(f"{reader.name_of(file, line)}: gigatoken gives other ids than tokenizers: pass "
                                 "encoder='tokenizers' (--encoder tokenizers) and rebuild=True (--rebuild)")
            self._encoded += 1
            if self._torn is not None and self._torn == (file, line):
                continue
            if kind in may_tear and (token := self.encoder.torn(text, ids, spans)) is not None:
                self._torn = file, line
                writer.drop_row()
                reader.note("template", file, line, f"an answer ends inside of the token {token!r}: add the tokens that end "
                            "turns to the tokenizer, or give the template {% generation %} tags")
                continue
            writer.append(ids, trained)
            if last:
                _, count, cut = writer.end_row()
                if count == 0 or cut:
                    reader.note("cut" if count else "nothing_trained", file, line, "")
        return sum(len(row[3]) for row in rows)

    def _may_tear(self, pieces: Pieces | None) -> tuple[int, ...]:
        """Returns the kinds of texts whose turns must not end within a token. With {% generation %} tags they may, as in transformers."""
        template = self._tokenizer.template
        if template is None or template.has_generation or self._options["train"] == "all":
            return ()
        return (_TEMPLATE,) if pieces is not None and pieces.ends_at_tokens else (_TEMPLATE, _RENDERED)

    def _compare(self, messages: Messages, pieces: Pieces | None) -> None:
        """Compares pieces and template on a row. Errors: Again where they differ."""
        template = self._tokenizer.template
        assert template is not None and pieces is not None
        if not agree(template, pieces, messages):
            if not self.source.can_be_asked_again:
                raise ValueError("the chat template does what only some rows show: pass the rows as an iterable "
                                 "that can be asked again, a list or a dataset")
            raise Again({"pieces": False})

    def _whole_row(self, text: str, reader: _core.ChatReader, file: int, line: int, pieces: Pieces | None) -> tuple | None:
        """Returns a row that is read in Python, as _write() takes it; None where it is left out."""
        train = self._options["train"]
        keys = 0
        try:
            row = self._rows.read(text)
            keys = row.keys
            if train != "all" and not any(one["role"] == "assistant" for one in row.messages):
                raise BadRow("no_assistant")
            if row.kind == MESSAGES:
                kind, text, spans = self._rendered(row, pieces)
            else:
                said = [one["content"] for one in row.messages]
                kind, text = _PROMPT if row.kind == PROMPT else _TEXT, "".join(said)
                spans = [(len(said[0]) if kind == _PROMPT and train != "all" else 0, len(text))]
            if len(text.encode()) > self._options["text_bytes_max"]:
                raise BadRow("text_too_long")
        except BadRow as bad:
            reader.count_row(0, keys or bad.keys, [])
            reader.note(bad.key, file, line, bad.detail)
            return None
        except (TemplateError, UnicodeEncodeError) as error:  # A lone surrogate.
            reader.count_row(0, keys, [])
            reader.note("template", file, line, str(error))
            return None
        reader.count_row(row.used, 0, list(row.counted.items()))
        empty = any(one.get("content") in ("", None) and "tool_calls" not in one for one in row.messages)
        for key, there in (("empty_turns", empty), ("nulls", row.nulls),
                           ("parts_printed", row.has_parts and not self._prints.parts)):
            if there:
                reader.note(key, file, line, "")
        return kind, file, line, text, spans, True

    def _rendered(self, row: Row, pieces: Pieces | None) -> tuple[int, str, Spans]:
        """Returns (kind, text, spans to train on), rendered by pieces where these cover the row. Errors: Again, TemplateError."""
        if pieces is not None and row.plain and not row.untrained and pieces.takes(row.messages):
            if self._by_pieces % _SAMPLE == 0:
                self._compare(row.messages, pieces)
            self._by_pieces += 1
            text, spans = pieces.render(row.messages)
            train = self._options["train"]
            return _RENDERED, text, [(0, len(text))] if train == "all" else spans[-1:] if train == "last" else spans
        template = self._tokenizer.template_for(row.tools)
        if self._options["train"] == "all" and not row.untrained:
            text = template.render(row.messages, row.tools, more=row.more)
            spans = [(0, len(text))]
        else:
            text, turns = template.render_turns(row.messages, row.tools, row.more)
            spans = chosen(text, turns, row.messages, row.untrained, self._options["train"])
        template.check_contents(row.messages, row.tools, row.more, text)
        return _TEMPLATE, text, spans

    def _ended(self, ids: np.ndarray, trained: Spans) -> tuple[np.ndarray, Spans]:
        """Appends the end-of-sequence token, where there is one and it is missing, and trains on it."""
        eos = self._tokenizer.eos_id
        if eos is None:
            return ids, trained
        if len(ids) == 0 or ids[-1] != eos:
            ids = np.append(ids, np.uint32(eos))
        return ids, [*trained, (len(ids) - 1, len(ids))] if trained else trained


def chosen(text: str, turns: list[tuple[int, Spans]], messages: Messages, untrained: Collection[int], train: str) -> Spans:
    """Returns the spans of a text to train on. turns: from ChatTemplate.render_turns(); untrained: messages to leave out.

    Errors: TemplateError.
    """
    if train != "all":
        return sorted(span for k, spans in (turns[-1:] if train == "last" else turns) if k not in untrained for span in spans)
    if any(messages[k]["role"] != "assistant" for k in untrained):
        raise TemplateError("a message of another than the assistant is not to be trained on, and train is \"all\"")
    left_out = sorted(span for k, spans in turns if k in untrained for span in spans)
    ends = [0, *(at for span in left_out for at in span), len(text)]
    return [(begin, end) for begin, end in zip(ends[::2], ends[1::2], strict=True) if begin < end]


def _first_rows(path: str, tokenizer: Any) -> list[str]:
    """Returns the first two rows of a set as text, shortened; see shown()."""
    with TokenSet(path) as made:
        return [shown(*made.row(row), tokenizer) for row in range(min(2, len(made)))]


def shown(ids: np.ndarray, trained: np.ndarray, tokenizer: Any) -> str:
    """Returns tokens as text, with the parts that are trained on between ⟦ and ⟧. The middle of a long part is left out."""
    ends = [0, *(np.flatnonzero(np.diff(trained.astype(np.int8))) + 1).tolist(), len(ids)]
    text = ""
    for begin, end in zip(ends, ends[1:]):
        part = tokenizer.decode(ids[begin:end].tolist(), skip_special_tokens=False)
        text += f"⟦{shortened(part)}⟧" if end > begin and trained[begin] else shortened(part)
    return shortened(text, 4000)


def shortened(text: str, most: int = 600) -> str:
    """Returns a text, or the beginning and the end of one longer than `most` characters."""
    return text if len(text) <= most else f"{text[:most // 2]} … [{len(text) - most} characters] … {text[-(most // 2):]}"
