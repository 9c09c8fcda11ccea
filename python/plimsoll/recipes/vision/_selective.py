# SPDX-License-Identifier: Apache-2.0
"""Selective loss: finds the characters of a JSON answer that are not trained on.

An answer is JSON as a whole, or between fences (```json); any other answer is trained on in full. The content of
strings is kept, except for keys, and for names of types under the key "type".

Threads: pure functions.   Memory: a byte for each character.
"""
from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

LEVELS = {"none": 0, "conservative": 2, "moderate": 3, "aggressive": 4}
STRUCTURE, KEYWORD, NULL, KEY = 1, 2, 3, 4  # Classes of a character; 0: kept. A level leaves out classes up to its own.
TYPES = frozenset(("string", "number", "integer", "boolean", "object", "array"))
KEYWORDS = frozenset((
    "$schema", "$id", "$ref", "$defs", "$comment", "$anchor", "definitions", "type", "properties", "required", "items",
    "prefixItems", "additionalProperties", "patternProperties", "propertyNames", "additionalItems", "enum", "const",
    "format", "pattern", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems",
    "uniqueItems", "contains", "minContains", "maxContains", "minProperties", "maxProperties", "dependentRequired",
    "dependentSchemas", "dependencies", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "contentEncoding",
    "contentMediaType", "unevaluatedItems", "unevaluatedProperties"))
_FENCED = re.compile(r"\s*```(?:json|JSON)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL)
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|\s+|[^\s{}\[\]:,"]+')
_SAMPLES, _SHARE = 50, 0.3


def classes_of(answer: str, keys: frozenset[str] = frozenset()) -> np.ndarray | None:
    """Returns the class of each character; None where the answer is no JSON object or array. Shape: uint8 [characters]."""
    begin, text = _json_in(answer)
    if text is None:
        return None
    made = np.zeros(len(answer), np.uint8)
    inside: list[list[str | None]] = []  # [bracket, current key] of each open object or array.
    wants_key = False
    for part in _PART.finditer(text):
        first, last, word = begin + part.start(), begin + part.end(), part[0]
        if word in "{[":
            inside.append([word, None if word == "{" or not inside else inside[-1][1]])
            wants_key = word == "{"
        elif word in "}]":
            inside.pop()
        elif word == ",":
            wants_key = inside[-1][0] == "{"
        elif word == ":":
            wants_key = False
        elif word[0] == '"':
            made[first] = made[last - 1] = STRUCTURE
            made[first + 1:last - 1] = _class_of(str(json.loads(word, strict=False)), wants_key, inside, keys)
            continue
        elif not word.isspace():
            made[first:last] = NULL if word == "null" else 0
            continue
        made[first:last] = STRUCTURE
    return made


def _class_of(word: str, is_key: bool, inside: list[list[str | None]], keys: frozenset[str]) -> int:
    if is_key:
        inside[-1][1] = word
        return KEYWORD if word in KEYWORDS else KEY if word in keys else 0
    if inside[-1][1] != "type":
        return 0
    return KEYWORD if word in TYPES else NULL if word == "null" else 0


def _json_in(answer: str) -> tuple[int, str | None]:
    """Returns (begin, text) of the JSON in an answer; text is None where there is none."""
    fenced = _FENCED.fullmatch(answer)
    begin, text = (fenced.start(1), fenced[1]) if fenced else (0, answer)
    try:
        return begin, text if isinstance(json.loads(text, strict=False), (dict, list)) else None
    except (ValueError, RecursionError):
        return 0, None


def common_keys(answers: Iterable[str]) -> frozenset[str]:
    """Returns the keys that occur in at least 30 % of the first 50 answers in JSON."""
    counts: collections.Counter[str] = collections.Counter()
    seen = 0
    for answer in answers:
        text = _json_in(answer)[1]
        if text is None:
            continue
        found: set[str] = set()

        def note(pairs: list[tuple[str, Any]], found: set[str] = found) -> None:
            found.update(key for key, _ in pairs)

        json.loads(text, strict=False, object_pairs_hook=note)
        counts.update(found)
        seen += 1
        if seen == _SAMPLES:
            break
    return frozenset(key for key, count in counts.items() if count >= _SHARE * seen)


def left_out(classes: np.ndarray, begin: int, spans: np.ndarray, level: int) -> np.ndarray:
    """Marks the tokens whose characters are all left out at this level. Shape: bool [tokens].

    begin: the answer's first character, in the text that spans refer to; spans: int64 [tokens, 2], each token's
    characters.
    """
    kept = np.concatenate([[0], np.cumsum((classes == 0) | (classes > level))])
    first, last = spans[:, 0] - begin, spans[:, 1] - begin
    inside = (first >= 0) & (last <= len(classes)) & (last > first)
    first, last = np.where(inside, first, 0), np.where(inside, last, 0)
    return inside & (kept[last] == kept[first])
