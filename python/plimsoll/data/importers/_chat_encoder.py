# SPDX-License-Identifier: Apache-2.0
"""Encoder: encodes texts into ids, and maps the characters to train on to tokens.

The bytes of a byte-level tokenizer's tokens are known. Joined, they must be the text; then they show which token has
which character (src/data/token_spans.h). Otherwise, and for all other tokenizers, the library's offsets are used.

gigatoken replaces the library where it is installed and gives the same ids for texts made to tell the two apart.
Texts that are not in Unicode's form NFC, or have unassigned characters, always go to the library. Encoder.differs()
compares some of the others. Encoder.torn() finds turns that end within a token.

Threads: one owner.   Memory: the bytes of the vocabulary; gigatoken's tables, and 1 MiB that says which
characters are assigned; a piece of text and its tokens.
"""
from __future__ import annotations

import functools
import importlib.util
import json
import os
import random
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ... import _core
from ._chat_template import Spans

_VOCABULARY_MOST = 1 << 22  # Ids may have gaps; a single large id must not need a long table.
_GROWS_MOST = 12 << 20  # Bytes by which the process may grow until gigatoken begins with an empty table of words.
_USUAL = 0x20000  # The planes of Unicode that have the characters of texts, and emoji.
_WORDS_MOST = 1000  # Size of the library's own cache beside gigatoken; its default of 10,000 fills for 700,000 rows.
ENCODERS = ("auto", "tokenizers", "gigatoken")
Encoded = tuple[np.ndarray, Spans]


class Encoder:
    """Encodes texts with one tokenizer (tokenizers.Tokenizer) of `vocabulary` ids.

    encoder: "tokenizers"; "gigatoken"; "auto": gigatoken where it can be used. Errors: ValueError for "gigatoken" where it
    cannot.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, encoder: str = "tokenizers") -> None:
        self._tokenizer = tokenizer
        said = tokenizer.to_str()
        tokens = _byte_tokens(json.loads(said), tokenizer, vocabulary)
        self._spans = None if tokens is None else _core.TokenSpans(*tokens)
        self._sizes = np.array([] if tokens is None else [len(token) for token in tokens[0]], np.int64)
        self._fast = None
        if encoder == "gigatoken" or (encoder == "auto" and importlib.util.find_spec("gigatoken") is not None):
            self._fast, why = _fast_encoder(said, tokenizer) if self._spans is not None else \
                (None, "the tokenizer is no byte-level BPE")
            if self._fast is None and encoder == "gigatoken":
                raise ValueError(f"encoder: gigatoken cannot be used: {why}; leave it out (--encoder)")
            if self._fast is not None and hasattr(tokenizer.model, "_resize_cache"):
                tokenizer.model._resize_cache(_WORDS_MOST)
        _core.trim()  # Frees memory from reading the tokenizer and trying gigatoken.

    @property
    def name(self) -> str:
        """Name of the library in use: "gigatoken" or "tokenizers"."""
        return "tokenizers" if self._fast is None else "gigatoken"

    def encode(self, texts: Sequence[tuple[str, Spans]], special: bool) -> Iterator[Encoded]:
        """Yields each text's ids, and the range of tokens that overlap each of its spans.

        special: adds the tokens that the tokenizer puts around a text.
        """
        only = [text for text, _ in texts]
        if special or self._spans is None:
            found = self._tokenizer.encode_batch(only, add_special_tokens=special)
            for encoding, (_, spans) in zip(found, texts, strict=True):
                yield _by_offsets(encoding, spans)
            return
        for ids, (text, spans) in zip(self._ids(only), texts, strict=True):
            trained = self._spans.find(ids, text, spans)
            if trained is None:  # A normalizer has changed the text.
                yield _by_offsets(self._tokenizer.encode(text, add_special_tokens=False), spans)
            else:
                yield ids, trained

    def differs(self, text: str, ids: np.ndarray) -> bool:
        """Whether these ids of gigatoken differ from the library's."""
        return self._fast is not None and not np.array_equal(ids, _library_ids(self._tokenizer, [text])[0])

    def torn(self, text: str, ids: np.ndarray, spans: Spans) -> str | None:
        """Returns the first token that holds the end of a span and then more than white space; None where there is none."""
        places = [end for begin, end in spans if begin < end < len(text)]
        if not places:
            return None
        for place, begin, end in self._around(text, ids, places):
            if begin < place < end and text[place:end].strip():
                return text[begin:end]
        return None

    def _around(self, text: str, ids: np.ndarray, places: list[int]) -> Iterator[tuple[int, int, int]]:
        """Yields each place, with begin and end (in characters) of the token that holds the character before it."""
        data = text.encode()
        ends: Any = np.cumsum(self._sizes[np.asarray(ids, np.int64)]) if self._spans is not None else ()
        if len(ends) and ends[-1] == len(data):
            starts = np.flatnonzero((np.frombuffer(data, np.uint8) & 0xC0) != 0x80)  # First bytes of characters.
            for place in places:
                token = int(np.searchsorted(ends, starts[place]))
                begin = ends[token - 1] if token else 0
                yield place, int(np.searchsorted(starts, begin)), int(np.searchsorted(starts, ends[token]))
            return
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        for place in places:
            token = encoding.char_to_token(place - 1)
            if token is not None:
                yield place, *encoding.token_to_chars(token)

    def _ids(self, texts: list[str]) -> list[np.ndarray]:
        if self._fast is None:
            return _library_ids(self._tokenizer, texts)
        found: list[np.ndarray] = [np.empty(0, np.uint32)] * len(texts)
        odd = [k for k, text in enumerate(texts) if _is_odd(text)]
        for these, encode in ((sorted({*range(len(texts))} - {*odd}), self._fast),
                              (odd, lambda some: _library_ids(self._tokenizer, some))):
            for k, ids in zip(these, encode([texts[k] for k in these]) if these else (), strict=True):
                found[k] = ids
        return found


def _library_ids(tokenizer: Any, texts: list[str]) -> list[np.ndarray]:
    return [np.array(one.ids, np.uint32) for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


class _Gigatoken:
    """gigatoken for one tokenizer. It caches every word it has seen, so it is made anew when the cache is large."""

    def __init__(self, said: str) -> None:
        import awkward  # noqa: F401  Imported here, as gigatoken hides a Ctrl-C during its own import of it.
        import gigatoken

        self._make = lambda: gigatoken.Tokenizer.from_json(said)
        self._begin()

    def _begin(self) -> None:
        self._made: Any = None  # First, so that two never exist together.
        _core.trim()  # The cached words are small blocks, which the allocator would keep.
        self._made = self._make()
        _core.trim()
        self._least = _anonymous_bytes()

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        if _anonymous_bytes() > self._least + _GROWS_MOST:
            self._begin()
        layout = self._made.encode_batch(texts, parallel=False).layout
        ids = np.asarray(layout.content.data).astype(np.uint32, copy=False)
        ends = np.asarray(layout.offsets).tolist()
        return [ids[begin:end] for begin, end in zip(ends, ends[1:])]


def _anonymous_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _fast_encoder(said: str, tokenizer: Any) -> tuple[Any, str]:
    """Returns (gigatoken's encode function, ""), or (None, the reason) where it is missing or differs."""
    try:
        encode = _Gigatoken(said)
    except Exception as error:  # Its own exceptions: an unknown tokenizer, or an incomplete installation.
        return None, str(error)
    texts = _telling_texts(tokenizer)
    for text, ours, right in zip(texts, encode(texts), _library_ids(tokenizer, texts), strict=True):
        if not np.array_equal(ours, right):
            return None, f"it gives other ids than tokenizers for {text[:80]!r}"
    return encode, ""


def _telling_texts(tokenizer: Any) -> list[str]:
    """Returns texts whose ids tell encoders apart: white space, numbers, scripts, added tokens, long and random ones."""
    numbers = random.Random(0)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:64]
    parts = [*added, " ", "  ", "\n", "\n\n", "\t", "\r\n", " \n", "\u00a0", "a", " a", "the", " The", "don't",
             "I'LL", "'s", "1", "12", "123", "1234", "3.14", "-", "--", "...", "#include <x>", "{\"k\": [1]}",
             "_x_", "é", "ñandú", "ß", "Привет", "東京", "日本語", "한국어", "مرحبا", "हिन्दी", "ไทย", "😀", "👨‍👩‍👧",
             "\u200b", "\ufeff", "\u2028", "\x00", "\x1f", "İ", "ǅ", "²", "½", "Ⅷ", "𝒳", "\U000e0001", "</s>",
             "<|x|>", "http://a.b/c?d=1", "A" * 300, " " * 50]
    texts = [*parts, ""]
    for _ in range(1500):
        texts.append("".join(numbers.choice(parts) for _ in range(numbers.randrange(1, 12))))
    for _ in range(500):
        texts.append("".join(chr(numbers.choice((numbers.randrange(0x20, 0x7F), numbers.randrange(0xA0, 0xD7FF))))
                             for _ in range(numbers.randrange(1, 40))))
    return [text for text in texts if not _is_odd(text)]


def _is_odd(text: str) -> bool:
    """Whether the library must encode the text: it is not in form NFC, or has a character that Python's Unicode leaves
    unassigned, which newer tables may call a letter."""
    if text.isascii() or not _core.has_any(text, _notable()):
        return False
    return any(map(_is_unassigned, set(text))) or not unicodedata.is_normalized("NFC", text)


def _is_unassigned(character: str) -> bool:
    return unicodedata.category(character) == "Cn"


@functools.cache
def _notable() -> bytes:
    """Returns one flag per usual character: may a text with it be odd? Source: UAX #15, section 9 (NFC_Quick_Check)."""
    second = {*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)}  # Second characters of compositions: Hangul, …
    for code in range(_USUAL):
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            second.add(int(parts[1], 16))
    return bytes(code in second or unicodedata.combining(chr(code)) > 0 or _is_unassigned(chr(code))
                 or not unicodedata.is_normalized("NFC", chr(code)) for code in range(_USUAL))


def _by_offsets(encoding: Any, spans: Spans) -> Encoded:
    ids = np.array(encoding.ids, np.uint32)
    found = []
    for begin, end in spans:
        while begin < end and (first := encoding.char_to_token(begin)) is None:
            begin += 1  # White space that the tokenizer leaves out.
        while begin < end and (last := encoding.char_to_token(end - 1)) is None:
            end -= 1
        if begin >= end:
            continue
        while last + 1 < len(ids) and (chars := encoding.token_to_chars(last + 1)) and chars[0] < min(end, chars[1]):
            last += 1  # More bytes of the same character.
        found.append((first, last + 1))
    return ids, found


def _byte_tokens(said: dict[str, Any], tokenizer: Any, vocabulary: int) -> tuple[list[bytes], bool, bool] | None:
    """Returns TokenSpans' arguments for a byte-level BPE: (each token's bytes, trimmed, prefixed). None for other tokenizers."""
    steps = {step["type"] for step in _steps(said.get("pre_tokenizer"))}
    if vocabulary > _VOCABULARY_MOST or said["model"].get("type") != "BPE" or "ByteLevel" not in steps:
        return None
    added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
    byte_of = _bytes_of_characters()
    tokens = [b""] * vocabulary
    for text, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number in added:
            tokens[number] = added[number].encode()
        elif all(character in byte_of for character in text):
            tokens[number] = bytes(byte_of[character] for character in text)
    trims = [step for step in _steps(said.get("post_processor")) if step.get("trim_offsets")]
    return tokens, bool(trims), any(step.get("add_prefix_space") for step in trims)


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the steps of a sequence, or the step itself."""
    if part is None:
        return []
    inner = part.get("pretokenizers") or part.get("processors")
    return [step for one in inner for step in _steps(one)] if inner else [part]


def _bytes_of_characters() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for.

    Source: Radford et al., "Language models are unsupervised multitask learners" (2019), their code's
    bytes_to_unicode(): printable bytes are themselves, the others follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + k): byte for k, byte in enumerate(others)}
