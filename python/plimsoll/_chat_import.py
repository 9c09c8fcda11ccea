# SPDX-License-Identifier: Apache-2.0
"""import_chat(): files of chats become a token set, in bounded memory.

C++ reads, checks and renders the rows (chat_reader.h) and writes the set (token_writer.cpp); the tokenizer and what of
a template is not compiled are called from here, a piece of half a mebibyte of text at a time. Torch is not imported.

Reading order: import_chat(), _Import.   Memory: a piece, its tokens, and the tokenizer.
"""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import _core
from ._arrays import byte_size
from ._chat_template import ChatTokenizer, Pieces, Spans, TemplateError, agree, compile_template
from ._memory import Governor, with_governor

_PIECE_BYTES = 512 << 10
_COMMIT_BYTES = 16 << 20
_SAMPLE = 64  # Every so many rows that are rendered by pieces, one is rendered by the template, too.
_TRAINING = ("assistant", "last", "all")
_RENDERED, _TEMPLATE, _PROMPT, _TEXT = range(4)  # ChatText::Kind.
_VERSION = 1  # Of what becomes of the same inputs.

_Path = str | os.PathLike[str]


@with_governor
def import_chat(files: _Path | Sequence[_Path], out: _Path, *, tokenizer: _Path, template: str | None = None,
                train: str = "assistant", max_length: int = 0, errors_max: int = 0, date: str | None = None,
                line_bytes_max: int | str = "100MiB", text_bytes_max: int | str = "2MiB", rebuild: bool = False,
                progress: Callable[[int, int], object] | None = None,
                governor: Governor | None = None) -> dict[str, Any]:
    """Makes a token set in the file `out` of chats in JSON lines, with the ids of a Hugging Face tokenizer.

    files:      .jsonl, plain or gzipped. A line has messages (OpenAI), conversations (ShareGPT),
                instruction, input and output (Alpaca), prompt and completion, or text.
    tokenizer:  folder with tokenizer.json, tokenizer_config.json and the chat template. Texts and prompts get the
                tokenizer's own special tokens and its end-of-sequence token.
    template:   chat template, in place of the folder's.
    train:      which tokens: the "assistant"'s turns (of a prompt the completion), the "last" of them, or "all".
    max_length: tokens of a row; what a row has beyond is cut off. 0: no bound.
    errors_max: lines that may be left out for an error; one more ends the import, with file and line.
    date:       day for templates that ask for it, "2026-01-31".
    line_bytes_max, text_bytes_max: of a line, and of one message or row where a text cannot be cut.
    rebuild:    also when neither inputs nor options have changed since `out` was made.
    progress:   called with bytes done and bytes in all.

    Killed at any moment and called again, it goes on where it was, to the same bytes. Rows without a token that is
    trained on are left out. Returns what plimsoll.info(out) says, and "reused".
    Errors: ValueError naming file and line, or the option; NotFoundError; CorruptError (a damaged .gz);
            BudgetExceeded; OSError. What was done stays, to go on with.
    """
    assert governor is not None  # By with_governor.
    if train not in _TRAINING:
        raise ValueError(f"train: {train!r} is none of {', '.join(_TRAINING)}")
    if max_length < 0 or errors_max < 0:
        raise ValueError("max_length and errors_max are not below 0")
    paths = [os.fspath(one) for one in ([files] if isinstance(files, (str, os.PathLike)) else files)]
    if not paths:
        raise ValueError("files: none were given")
    loaded = ChatTokenizer(tokenizer, template, date)
    options = {"train": train, "max_length": max_length, "errors_max": errors_max,
               "line_bytes_max": byte_size(line_bytes_max, "line_bytes_max"),
               "text_bytes_max": byte_size(text_bytes_max, "text_bytes_max")}
    job = _Import(paths, os.fspath(out), loaded, options, governor, progress)
    reused = job.run(rebuild)
    return {**json.loads(_core.describe(os.fspath(out))), "reused": reused}


class _NotEqual(Exception):
    """A row that pieces render otherwise than the template: the import begins anew without them."""


class _Import:
    def __init__(self, paths: list[str], out: str, tokenizer: ChatTokenizer, options: dict[str, Any],
                 governor: Governor, progress: Callable[[int, int], object] | None) -> None:
        self._paths = paths
        self._out = out
        self._tokenizer = tokenizer
        self._options = options
        self._governor = governor
        self._progress = progress
        sums = [_core.checksum_of(path) for path in paths]
        self._inputs = [{"name": os.path.basename(path), "bytes": size, "crc32c": crc}
                        for path, (size, crc) in zip(paths, sums, strict=True)]
        self._fingerprint = hashlib.sha256(json.dumps(
            [_VERSION, tokenizer.fingerprint, options, self._inputs]).encode()).hexdigest()[:32]

    def run(self, rebuild: bool) -> bool:
        """Makes the set; True when it was there."""
        writer = self._open_writer(rebuild)
        try:
            if writer.whole:
                return True
            position = json.loads(writer.position) if writer.position else {"pieces": True}
            try:
                self._work(writer, position)
            except _NotEqual:
                writer.close()
                writer = self._open_writer(rebuild=True)
                self._work(writer, {"pieces": False})
        finally:
            writer.close()
        return False

    def _open_writer(self, rebuild: bool) -> _core.TokenWriter:
        most = self._options["max_length"] or 1 << 27
        return _core.TokenWriter.open(self._governor._core, self._out, self._tokenizer.vocabulary,
                                      self._fingerprint, most, rebuild)

    def _work(self, writer: _core.TokenWriter, position: dict[str, Any]) -> None:
        options = self._options
        reader = _core.ChatReader.open(self._governor._core, self._paths, _TRAINING.index(options["train"]),
                                       options["line_bytes_max"], options["text_bytes_max"], options["errors_max"])
        try:
            template = self._tokenizer.template
            pieces = compile_template(template, self._tokenizer.cuts()) if template and position["pieces"] else None
            if pieces is not None:
                reader.set_pieces(*pieces.arguments())
            if "reader" in position:
                reader.go_on(position["reader"])
            self._read(reader, writer, pieces)
            about = {"fingerprint": self._fingerprint, "tokenizer": self._tokenizer.fingerprint[:32],
                     "options": options, "inputs": self._inputs, "compiled": pieces is not None,
                     **json.loads(reader.report)}
            if writer.rows == 0:
                raise ValueError(f"{self._out}: no row of these files has a token to train on: {reader.report}")
            writer.finish(json.dumps(about, ensure_ascii=False))
        finally:
            reader.close()

    def _read(self, reader: _core.ChatReader, writer: _core.TokenWriter, pieces: Pieces | None) -> None:
        since = 0
        before = np.cumsum([0, *(one["bytes"] for one in self._inputs)])
        while texts := reader.next(_PIECE_BYTES, _SAMPLE):
            since += self._write(texts, reader, writer, pieces)
            if since >= _COMMIT_BYTES and reader.between_rows:
                reader.end_stretch()
                writer.commit(json.dumps({"pieces": pieces is not None, "reader": reader.state}))
                since = 0
            if self._progress is not None:
                file, _, at = reader.place
                done = min(before[file] + at, before[min(file + 1, len(self._inputs))])
                self._progress(int(done), int(before[-1]))

    def _write(self, texts: list[tuple], reader: _core.ChatReader, writer: _core.TokenWriter,
               pieces: Pieces | None) -> int:
        """Tokenizes and appends; returns the bytes of text, about."""
        rows = []
        for kind, file, line, text, spans, last, rich, messages in texts:
            if kind == _TEMPLATE:
                try:
                    text, spans = self._by_template(text, messages, rich)
                except TemplateError as error:
                    reader.note("template", file, line, str(error))
                    continue
                if len(text.encode()) > self._options["text_bytes_max"]:
                    reader.note("text_too_long", file, line, "")
                    continue
            elif messages and not agree(self._tokenizer.template, pieces,
                                        [{"role": role, "content": content} for role, content in messages]):
                raise _NotEqual
            rows.append((kind, file, line, text, spans, last))
        encode = self._tokenizer.tokenizer.encode_batch
        plain = iter(encode([row[3] for row in rows if row[0] >= _PROMPT], add_special_tokens=True))
        chats = iter(encode([row[3] for row in rows if row[0] < _PROMPT], add_special_tokens=False))
        for kind, file, line, text, spans, last in rows:
            encoding = next(plain if kind >= _PROMPT else chats)
            ids = np.array(encoding.ids, np.uint32)
            trained = _tokens_of(encoding, spans, len(ids))
            if kind >= _PROMPT:
                ids, trained = self._ended(ids, trained)
            writer.append(ids, trained)
            if last:
                _, count, cut = writer.end_row()
                if count == 0 or cut:
                    reader.note("cut" if count else "nothing_trained", file, line, "")
        return sum(len(row[3]) for row in rows)

    def _by_template(self, line: str, messages: list[tuple[str, str]], rich: bool) -> tuple[str, Spans]:
        """A row's text and what of it is trained on, by the template itself."""
        template = self._tokenizer.template
        if template is None:
            raise TemplateError("the tokenizer has none; pass one with template= (--template)")
        tools = None
        chat: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in messages]
        if rich:
            row = json.loads(line)
            tools = row.get("tools")
            tools = json.loads(tools) if isinstance(tools, str) and tools else tools
            chat = row.get("messages") or chat
        if self._options["train"] == "all":
            text = template.render(chat, tools)
            return text, [(0, len(text))]
        text, spans = template.render_marked(chat, tools)
        return text, spans[-1:] if self._options["train"] == "last" else spans

    def _ended(self, ids: np.ndarray, trained: Spans) -> tuple[np.ndarray, Spans]:
        """With the end-of-sequence token, trained on, where there is one and it is not there yet."""
        eos = self._tokenizer.eos_id
        if eos is None:
            return ids, trained
        if len(ids) == 0 or ids[-1] != eos:
            ids = np.append(ids, np.uint32(eos))
        return ids, [*trained, (len(ids) - 1, len(ids))] if trained else trained


def _tokens_of(encoding: Any, spans: Spans, count: int) -> Spans:
    """The tokens that have a character of each span."""
    found = []
    for begin, end in spans:
        while begin < end and (first := encoding.char_to_token(begin)) is None:
            begin += 1  # White space that the tokenizer leaves out.
        while begin < end and (last := encoding.char_to_token(end - 1)) is None:
            end -= 1
        if begin >= end:
            continue
        chars = encoding.token_to_chars(last)
        while last + 1 < count and encoding.token_to_chars(last + 1) == chars:
            last += 1  # More bytes of the same character.
        found.append((first, last + 1))
    return found
