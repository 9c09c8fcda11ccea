# SPDX-License-Identifier: Apache-2.0
"""Fuzzed chats through import_chat() with many chat templates, compared with transformers' apply_chat_template.

    PYTHONPATH=build/dev/python .venv/bin/python -m tests.support.template_fuzz --count 1000 --seed 1 FILES.jinja

Without files: those of the installed package `trl`, and of this folder's chats.py. Of every row the ids are compared,
and where a template has {% generation %} tags the masks; a row that the template refuses must be refused. Contents are
made of the template's own texts, white space, markup and token_fuzz.py's. Ends with one line of JSON; a difference ends it at once.
"""
import argparse
import json
import pathlib
import random
import sys
import tempfile
import time

import numpy as np

from tests.support import chats, token_fuzz
from tests.templates import formats
from tests.templates.compare import DATE, Reference

_TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks <up> \"it\"", "parameters": {
    "type": "object", "properties": {"what": {"type": "string", "enum": ["a", "é"]}}, "required": ["what"]}}}]


def given_templates() -> dict[str, str]:
    """By name: those of chats.py, and of `trl` where it is installed."""
    return chats.TEMPLATES | {f"trl/{name}": source for name, source in formats.trl_templates().items()}


def texts_of(source: str) -> list[str]:
    """What a template writes or compares with."""
    import jinja2
    import jinja2.ext

    class Generation(jinja2.ext.Extension):
        tags = {"generation", "endgeneration"}

        def parse(self, parser):
            next(parser.stream)
            return []

    tree = jinja2.Environment(extensions=[Generation, "jinja2.ext.loopcontrols"]).parse(source)
    found = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
    found |= {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    return sorted(text for text in found if text and len(text) < 200)


class Chats:
    """Rows with all that a template may look at, more often those that pieces cover."""

    def __init__(self, numbers: random.Random, texts: list[str]) -> None:
        self._numbers, self._texts = numbers, texts

    def content(self) -> str:
        numbers, parts = self._numbers, []
        for _ in range(numbers.choice((0, 1, 1, 1, 2, 4))):
            kind = numbers.random()
            if kind < 0.2 and self._texts:
                text = numbers.choice(self._texts)
                begin = numbers.choice((0, 0, numbers.randrange(len(text))))
                parts.append(text[begin:] if numbers.random() < 0.7 else text[:begin + 1])
            elif kind < 0.4:
                parts.append(numbers.choice((" ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2028", "\x1f", "\x00", "  \n ")))
            elif kind < 0.6:
                parts.append(numbers.choice(("{{ messages }}", "{% endfor %}", "{# x #}", "</think>", "<think>\nhm\n</think>\n\n",
                                             "None", "null", "<b>&amp;</b>", "\\n", "'", '"', "0", "system", "assistant")))
            else:
                parts.append(token_fuzz.fuzzed(numbers))
        return "".join(parts)

    def messages(self) -> list[dict]:
        numbers = self._numbers
        if numbers.random() < 0.7:
            roles = ["system"] * numbers.randrange(2) + ["user", "assistant"] * numbers.randrange(1, 6)
            roles = roles[:len(roles) - (numbers.random() < 0.1)]
        else:
            roles = [numbers.choice(("system", "user", "assistant", "assistant", "tool", "developer"))
                     for _ in range(numbers.randrange(1, 10))]
        return [{"role": role, "content": self.content()} for role in roles]

    def row(self) -> dict:
        numbers, row = self._numbers, {"messages": self.messages()}
        if numbers.random() < 0.8:
            return row
        for message in row["messages"]:
            kind = numbers.randrange(9)
            if kind == 0:
                message["name"] = self.content()
            elif kind == 1:
                message["content"] = None
            elif kind == 2:
                message["content"] = [{"type": "text", "text": self.content()} for _ in range(numbers.randrange(3))]
            elif kind == 3:
                message[numbers.choice(("reasoning_content", "thinking", "reasoning"))] = self.content()
            elif kind == 4:
                message[numbers.choice(("prefix", "train", "weight"))] = numbers.choice((True, False, 0, 1.5, None))
            elif kind == 5 and message["role"] == "assistant":
                message["tool_calls"] = [{"type": "function", "id": "call12345", "function": {
                    "name": "look", "arguments": numbers.choice(({"what": self.content()}, {}, '{"what": 1}'))}}]
        if numbers.random() < 0.4:
            row["tools"] = _TOOLS
        return row


def compare(source: str, count: int, seed: int, work: pathlib.Path, governor) -> bool:
    """Compares `count` rows of one template; whether it was compiled. AssertionError names a row that differs."""
    import plimsoll
    from plimsoll.data.importers._chat_template import ChatTokenizer, compile_template

    folder = chats.make_tokenizer(work / "tokenizer", source)
    loaded = ChatTokenizer(folder, date=DATE)
    compiled = compile_template(loaded.template, loaded.cuts()) is not None
    some = Chats(random.Random(f"{source}/{seed}"), texts_of(source))
    rows = [some.row() for _ in range(count)]
    reference = Reference(folder)
    for train in ("all", "assistant") if loaded.template.has_generation else ("all",):
        given = rows if train == "all" else [row for row in rows if any(one["role"] == "assistant" for one in row["messages"])]
        right = []
        for row in given:
            made = reference.ids_and_mask(source, row)
            if made is not None and not reference.loses(source, row):
                right.append((row, (np.array(made[0]), made[1] if train == "assistant" else np.ones(len(made[0]), np.bool_))))
        kept = [(row, made) for row, made in right if made[1].any()]
        if not kept:
            continue
        done = plimsoll.import_chat([*given], work / "set", tokenizer=folder, date=DATE, train=train, errors_max=count,
                                    ignore_keys=["messages.prefix", "messages.train", "messages.weight"],
                                    governor=governor, rebuild=True)
        odd = done["about"]["odd"]
        refused = odd.get("template", {"count": 0, "first": []})
        assert done["about"]["compiled"] is compiled, "a sampled row differed from the template"
        with plimsoll.TokenSet(work / "set") as made:
            for (row, (ids, mask)), (our_ids, our_mask) in zip(kept, made, strict=False):
                assert np.array_equal(our_ids, ids), f"ids of {json.dumps(row)}"
                assert np.array_equal(our_mask, mask), f"mask of {json.dumps(row)}"
            assert (len(made), refused["count"]) == (len(kept), len(given) - len(right)), f"refused: {refused}"
    return compiled


def run(templates: dict[str, str], count: int, seed: int, work: pathlib.Path) -> dict:
    """Compares `count` rows of every template."""
    import plimsoll

    began, compiled = time.monotonic(), []
    with plimsoll.Governor("4GiB") as governor:
        for name, source in templates.items():
            try:
                compiled += [name] if compare(source, count, seed, work, governor) else []
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
    return {"templates": len(templates), "compiled": len(compiled), "by_jinja2": sorted(templates.keys() - {*compiled}),
            "rows": count * len(templates), "seed": seed, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("FILES", nargs="*", type=pathlib.Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    templates = {path.name: path.read_text(encoding="utf-8") for path in options.FILES} or given_templates()
    with tempfile.TemporaryDirectory() as work:
        print(json.dumps(run(templates, options.count, options.seed, pathlib.Path(work))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
