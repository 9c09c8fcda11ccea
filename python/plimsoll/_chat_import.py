# SPDX-License-Identifier: Apache-2.0
"""import_chat(): chats become a token set, in bounded memory.

C++ reads, checks and renders the rows (chat_reader.h) and writes the set (token_writer.cpp); the tokenizer and what of
a template is not compiled are called from here, a piece of a quarter of a mebibyte of text at a time. Torch is not imported.

Reading order: import_chat(), _set_import.py, _Import, _chat_source.py, _chat_encoder.py.
Memory: a piece, its tokens, the tokenizer.
"""
from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from . import _core
from ._arrays import byte_size
from ._chat_encoder import ENCODERS, Encoder
from ._chat_source import TRAINING, ChatFiles, ChatRows, chat_line, chat_source
from ._chat_template import ChatTokenizer, Pieces, Spans, TemplateError, agree, compile_template
from ._memory import Governor, with_governor
from ._parts import Part
from ._row_files import Reading
from ._set_import import Again, SetImport, digest
from ._tar_rows import Fields

_PIECE_BYTES = 256 << 10
_COMMIT_BYTES = 16 << 20
_SAMPLE = 256  # Every so many rows that are rendered by pieces, one is rendered by the template, too.
_SAMPLE_IDS = 1024  # Every so many texts that gigatoken encodes, one is encoded by the library, too.
_RENDERED, _TEMPLATE, _PROMPT, _TEXT = range(4)  # ChatText::Kind.
_VERSION = 4  # Of what becomes of the same inputs.

_Path = str | os.PathLike[str]


@with_governor
def import_chat(files: _Path | Sequence[_Path] | Iterable[dict[str, Any]], out: _Path, *, tokenizer: _Path,
                template: str | None = None, train: str = "assistant", max_length: int = 0, errors_max: int = 0,
                date: str | None = None, template_kwargs: Mapping[str, Any] | None = None,
                line_bytes_max: int | str = "100MiB", text_bytes_max: int | str = "2MiB",
                encoder: str = "auto", part: Part | None = None, join: int = 0, rebuild: bool = False,
                progress: Callable[[int, int], object] | None = None,
                governor: Governor | None = None) -> dict[str, Any]:
    """Makes a token set in the file `out` of chats, with the ids of a Hugging Face tokenizer.

    files:      rows of JSON (lines, one array, or indented objects), CSV, TSV, Parquet, Arrow, a folder that
                datasets.save_to_disk() wrote, or an archive of WebDataset; plain or packed by gzip, zstd, bzip2 or xz, in
                UTF-8, UTF-16 or UTF-32. Their first bytes say which, not their names. A row has
                messages (OpenAI), conversations (ShareGPT), instruction, input and output (Alpaca), prompt and
                completion, or text. In place of files any iterable of rows: a list, a Dataset of Hugging Face's.
    tokenizer:  folder with tokenizer.json, tokenizer_config.json and the chat template. Texts and prompts get the
                tokenizer's own special tokens and its end-of-sequence token.
    template:   chat template, in place of the folder's, or the name of one of the folder's. By default a row with tools
                takes the one named "tool_use", where the folder has it.
    template_kwargs: variables for the template, {"enable_thinking": False}. A row's own `chat_template_kwargs` go before
                them; a row's `tools` and `documents` are passed, too.
    train:      which tokens: the "assistant"'s turns (of a prompt the completion), the "last" of them, or "all".
    max_length: tokens of a row; what a row has beyond is cut off. 0: no bound.
    errors_max: rows that may be left out for an error; one more ends the import, with file and line.
    date:       day for templates that ask for it, "2026-01-31".
    line_bytes_max, text_bytes_max: of a line, and of one message or row where a text cannot be cut.
    encoder:    "tokenizers"; "gigatoken", which is faster and gives the same ids; "auto": gigatoken where it is
                installed and shown equal for this tokenizer. It is compared again every 1,024 texts.
    part:       (3, 8) imports the third of eight parts of the files, neighbours of about as many bytes, to a set of its
                own: `out` with .part-3-of-8 behind its name. A file is not divided, and a part may have none. Parts may be
                made side by side, by any processes that see files of the same names and sizes.
    join:       8: makes `out` of its eight parts, in the bytes that an import of all files at once has. The parts stay.
    rebuild:    also when neither inputs nor options have changed since `out` was made.
    progress:   called with bytes done and bytes in all; of an iterable with rows (in all: 0 where it has no length); of
                join with parts.

    Killed at any moment and called again, it goes on where it was, to the same bytes: what was read before is read
    again and compared. An iterator that can be asked only once is imported from its beginning. Rows without a token
    that is trained on are left out. Returns what plimsoll.info(out) says, "reused", and "encoder".
    Errors: ValueError naming file and line, or the option, or a part that is of other inputs; NotFoundError (also
            naming a part that is missing); CorruptError (a damaged file, an array without an end);
            BudgetExceeded; OSError. What was done stays, to go on with.
    """
    assert governor is not None  # By with_governor.
    if train not in TRAINING:
        raise ValueError(f"train: {train!r} is none of {', '.join(TRAINING)}")
    if max_length < 0 or errors_max < 0:
        raise ValueError("max_length and errors_max are not below 0")
    loaded = ChatTokenizer(tokenizer, template, date, template_kwargs)
    options = {"train": train, "max_length": max_length, "errors_max": errors_max,
               "line_bytes_max": byte_size(line_bytes_max, "line_bytes_max"),
               "text_bytes_max": byte_size(text_bytes_max, "text_bytes_max")}
    source = chat_source(files, Reading(Fields("text", "image", "response"), chat_line, governor, options["line_bytes_max"],
                                        options["line_bytes_max"], images=False))
    if encoder not in ENCODERS:
        raise ValueError(f"encoder: {encoder!r} is none of {', '.join(ENCODERS)}")
    job = _Import(source, os.fspath(out), loaded, options, Encoder(loaded.tokenizer, loaded.vocabulary, encoder),
                  governor, progress)
    path, reused = job.make(rebuild, part, join)
    return {**json.loads(_core.describe(path)), "reused": reused, "encoder": job.encoder.name}


class _Import(SetImport):
    wanted = "a token to train on"
    harmless = [key for key, error in _core.chat_oddities() if not error]
    odd_order = [key for key, _ in _core.chat_oddities()]

    def __init__(self, source: ChatFiles | ChatRows, out: str, tokenizer: ChatTokenizer, options: dict[str, Any],
                 encoder: Encoder, governor: Governor, progress: Callable[[int, int], object] | None) -> None:
        super().__init__(source, out, digest([_VERSION, tokenizer.fingerprint, options, source.identity()]), governor,
                         progress)
        self._tokenizer = tokenizer
        self.encoder = encoder
        self._encoded = 0
        self._torn: tuple[int, int] | None = None  # A row that is left out, of which more parts may come.
        self._options = options

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
        """One part whose rows pieces render otherwise than the template, and all are rendered by the template."""
        if len({about["compiled"] for about in abouts}) == 1:
            return True
        for job, about in zip(parts, abouts, strict=True):
            if about["compiled"]:
                job.run(True, {"pieces": False})
        return False

    def open_reader(self) -> _core.ChatReader:
        names, feed = self.source.lines()
        options = self._options
        return _core.ChatReader.open(self.governor._core, names, TRAINING.index(options["train"]),
                                     options["line_bytes_max"], options["text_bytes_max"], options["errors_max"], feed)

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
        """Tokenizes and appends; returns the bytes of text, about."""
        rows = []
        for kind, file, line, text, spans, last, rich, messages in texts:
            if kind == _TEMPLATE:
                try:
                    text, spans = self._by_template(text, messages, rich)
                    size = len(text.encode())
                except (TemplateError, UnicodeEncodeError) as error:  # Half a character, of tools that are text.
                    reader.note("template", file, line, str(error))
                    continue
                if size > self._options["text_bytes_max"]:
                    reader.note("text_too_long", file, line, "")
                    continue
            elif messages and not agree(self._tokenizer.template, pieces,
                                        [{"role": role, "content": content} for role, content in messages]):
                # Pieces render a row otherwise than the template.
                if not self.source.can_be_asked_again:
                    raise ValueError("the chat template does what only some rows show: pass the rows as an iterable "
                                     "that can be asked again, a list or a dataset")
                raise Again({"pieces": False})
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
        """Kinds of texts whose turns may end within a token. Of {% generation %} tags that is trained on, as in transformers."""
        template = self._tokenizer.template
        if template is None or template.has_generation or self._options["train"] == "all":
            return ()
        return (_TEMPLATE,) if pieces is not None and pieces.ends_at_tokens else (_TEMPLATE, _RENDERED)

    def _by_template(self, line: str, messages: list[tuple[str, str]], rich: bool) -> tuple[str, Spans]:
        """A row's text and what of it is trained on, by the template itself."""
        more: dict[str, Any] = {}
        tools = None
        chat: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in messages]
        if rich:
            try:
                row = json.loads(line)
                tools, documents = (json.loads(value) if isinstance(value, str) and value else value
                                    for value in (row.get("tools"), row.get("documents")))
                more = {**(row.get("chat_template_kwargs") or {}), **({"documents": documents} if documents else {})}
            except (ValueError, RecursionError, TypeError) as error:
                raise TemplateError(f"the row, or its tools, are no JSON that Python reads: {error}") from None
            chat = row.get("messages") or chat
        template = self._tokenizer.template_for(tools)
        if self._options["train"] == "all":
            text = template.render(chat, tools, more=more)
            spans = [(0, len(text))]
        else:
            text, turns = template.render_turns(chat, tools, more)
            spans = sorted(span for _, one in (turns[-1:] if self._options["train"] == "last" else turns) for span in one)
        template.check_contents(chat, tools, more, text)
        return text, spans

    def _ended(self, ids: np.ndarray, trained: Spans) -> tuple[np.ndarray, Spans]:
        """With the end-of-sequence token, trained on, where there is one and it is not there yet."""
        eos = self._tokenizer.eos_id
        if eos is None:
            return ids, trained
        if len(ids) == 0 or ids[-1] != eos:
            ids = np.append(ids, np.uint32(eos))
        return ids, [*trained, (len(ids) - 1, len(ids))] if trained else trained
