# SPDX-License-Identifier: Apache-2.0
"""Selective loss (M11): each level leaves out what it says of answers in JSON and nothing else, whatever strings hold."""
import json
import random

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from plimsoll.recipes.vision import _selective

KEEPS, STRUCTURE, KEYWORD, NULL, KEY = range(5)
KEYS = frozenset(("total", "shop"))
ODD = ("null", "type", "string", "a, b: {c}", "[1]", 'say "x"', " ", "", "total", "é\\", "properties")


def value(dice, depth, key):
    """[(text, class)] of any JSON. An oracle that writes what it means, where the code reads."""
    kind = dice.choice("sssntx" + "oa" * (depth > 0))
    if kind == "s":
        word = dice.choice(ODD + tuple(sorted(_selective.TYPES)))
        own = KEYWORD if key == "type" and word in _selective.TYPES else NULL if key == "type" and word == "null" else KEEPS
        return [('"', STRUCTURE), (json.dumps(word, ensure_ascii=False)[1:-1], own), ('"', STRUCTURE)]
    if kind == "n":
        return [(dice.choice(("0", "-1.5", "2e9")), KEEPS)]
    if kind == "t":
        return [(dice.choice(("true", "false")), KEEPS)]
    if kind == "x":
        return [("null", NULL)]
    return container(dice, depth - 1, kind, key)


def container(dice, depth, kind, key):
    made = [("{[" [kind == "a"], STRUCTURE), space(dice)]
    for k in range(dice.randrange(4)):
        made += [(",", STRUCTURE), space(dice)] if k else []
        if kind == "o":
            key = dice.choice(("type", "properties", "total", "shop", "own", "null", "string", "x: {"))
            own = KEYWORD if key in _selective.KEYWORDS else KEY if key in KEYS else KEEPS
            made += [('"', STRUCTURE), (key, own), ('"', STRUCTURE), space(dice), (":", STRUCTURE), space(dice)]
        made += [*value(dice, depth, key), space(dice)]
    return [*made, ("}]"[kind == "a"], STRUCTURE)]


def space(dice):
    return dice.choice(("", " ", "\n\t")), STRUCTURE


@pytest.mark.parametrize("seed", range(300))
def test_m11_classes_are_those_of_the_grammar_and_levels_hold_one_another(seed):
    dice = random.Random(seed)
    parts = container(dice, 3, dice.choice("oa"), None)
    text = "".join(part for part, _ in parts)
    wanted = np.array([own for part, own in parts for _ in part], np.uint8)
    json.loads(text)
    assert np.array_equal(_selective.classes_of(text, KEYS), wanted), text
    fenced = f"```json\n{text}\n```"
    assert np.array_equal(_selective.classes_of(fenced, KEYS)[8:8 + len(text)], wanted)
    spans = np.stack([np.arange(len(text)), np.arange(1, len(text) + 1)], 1)  # A token for each character.
    for level, most in _selective.LEVELS.items():
        out = _selective.left_out(wanted, 0, spans, most)
        assert np.array_equal(out, (wanted > 0) & (wanted <= most)), level


MATRIX = '{"type": "string", "total": null, "own": "null, type: {}"}'


def test_m11_each_level_leaves_out_more_than_the_one_before():
    classes = _selective.classes_of(MATRIX, KEYS)
    kept = {level: "".join(c for c, own in zip(MATRIX, classes) if own == 0 or own > most)
            for level, most in _selective.LEVELS.items()}
    assert kept == {"none": MATRIX, "conservative": "totalnullownnull, type: {}", "moderate": "totalownnull, type: {}",
                    "aggressive": "ownnull, type: {}"}


def test_a_token_that_holds_anything_else_is_kept():
    text = '{"own": "x"}'
    spans = np.array([[0, 2], [1, 5], [5, 8], [7, 10], [10, 12], [12, 14], [0, 0]])  # {"  "own  ": .  "x  "}  beyond  none
    out = _selective.left_out(_selective.classes_of(text), 0, spans, 4)
    assert out.tolist() == [True, False, True, False, True, False, False]


@pytest.mark.parametrize("answer", ["a red picture", '{"a": 1', "3", '"null"', "{} {}", "", "[" * 100_000])
def test_other_answers_are_kept_whole(answer):
    assert _selective.classes_of(answer) is None


def test_a_string_may_hold_a_line_end_or_a_tab_as_it_is():
    """Which is no JSON by the letter, and what answers with several lines often have."""
    text = '{"own": "two\nlines\t", "shop\n": 1}'
    classes = _selective.classes_of(text, frozenset(("shop\n",)))
    assert "".join(c for c, own in zip(text, classes) if own == KEEPS) == "owntwo\nlines\t1"
    assert _selective.common_keys([text]) == {"own", "shop\n"}


def test_keys_are_those_that_three_of_ten_answers_have():
    answers = [json.dumps({"all": 1, "inner": [{"some" if k % 3 == 0 else "own": 0}], f"k{k}": "all"}) for k in range(20)]
    assert _selective.common_keys([*answers, "no JSON"]) == {"all", "inner", "some", "own"}
    rare = [json.dumps({"all": 1, **({"rare": 2} if k % 4 == 0 else {})}) for k in range(40)]
    assert _selective.common_keys(rare) == {"all"}
