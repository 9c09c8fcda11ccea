# SPDX-License-Identifier: Apache-2.0
"""Public chat templates through import_chat(), beside transformers' ids and TRL's masks.

    PYTHONPATH=build/dev/python .venv/bin/python -m tests.templates.compare [NAME …] [--folder DIR]

Templates: those of formats.py, of the package `trl` where it is installed, and of DIR (*.jinja); NAMEs choose some. Each is
given a row of every kind (kinds.py), and a tokenizer that has its control tokens. Of every row that transformers renders,
import_chat() must have the same ids or refuse it; masks must be those of {% generation %} tags. Of a template that TRL has
in a second form with such tags (X_training), rows of the same ids are compared with the masks of that form: equal, or
equal but for white space around an answer, or but for a header of the assistant's that TRL trains on, too, or but for what
stands behind an answer: the next header, by which some models end.
Ends with one line of JSON; a difference ends it at once.
"""
from __future__ import annotations

import argparse
import collections
import datetime
import json
import pathlib
import re
import sys
import tempfile
import types
import unittest.mock
from typing import Any

import numpy as np

from tests.support import chats
from tests.templates import formats, kinds

DATE = "2026-01-31"
_TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CONTROL = re.compile(r"<[|｜][^\s<>|｜'\"]+[|｜]>|<[a-z_]+[|]>|<[|][a-z_]+>|</?(?:start|end)_of_(?:turn|utterance)>|</?think>|\[/?INST\]")


def tokenizer_of(source: str, folder: pathlib.Path) -> pathlib.Path:
    """A small tokenizer of bytes that has the control tokens of a template."""
    import tokenizers

    chats.make_tokenizer(folder, None, vocabulary=320)
    file = folder / "tokenizer.json"
    made = tokenizers.Tokenizer.from_file(str(file))
    made.add_special_tokens(sorted(set(_CONTROL.findall(source))))
    made.save(str(file))
    return folder


class Reference:
    """transformers, on the day DATE."""

    def __init__(self, folder: pathlib.Path) -> None:
        from transformers.utils import chat_template_utils

        self.tokenizer = chats.reference(folder)
        day = types.SimpleNamespace(now=lambda: datetime.datetime.fromisoformat(DATE))
        self._patch = unittest.mock.patch.object(chat_template_utils, "datetime", day)

    def text(self, source: str, row: dict[str, Any]) -> str | None:
        return self._applied(source, row, tokenize=False)

    def ids_and_mask(self, source: str, row: dict[str, Any]) -> tuple[list[int], np.ndarray] | None:
        """None where the template refuses the row. The mask is one of zeros where it has no tags."""
        tags = _TAGS.search(source) is not None
        made = self._applied(source, row, tokenize=True, return_dict=True, return_assistant_tokens_mask=tags)
        if made is None:
            return None
        ids = list(made["input_ids"])
        return ids, np.array(made["assistant_masks"] if tags else [0] * len(ids), np.bool_)

    def _applied(self, source: str, row: dict[str, Any], **options: Any) -> Any:
        import jinja2

        try:
            with self._patch:
                return self.tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), chat_template=source, **options,
                                                          **row.get("chat_template_kwargs", {}))
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError):
            return None

    def loses(self, source: str, row: dict[str, Any]) -> bool:
        """Whether another content of some message gives the same text."""
        text = self.text(source, row) or ""
        for k, message in enumerate(row["messages"]):
            content = message.get("content")
            said = [content] if isinstance(content, str) else [part.get("text", "") for part in content or []]
            if not any(one.strip() for one in said) or any(one.strip() and one.strip() in text for one in said):
                continue
            other = "other words" if isinstance(content, str) else [{**part, "text": "other words"} for part in content]
            messages = [*row["messages"][:k], {**message, "content": other}, *row["messages"][k + 1:]]
            if self.text(source, {**row, "messages": messages}) == text:
                return True
        return False


def imported(source: str, rows: list[dict[str, Any]], folder: pathlib.Path, work: pathlib.Path, governor: Any,
             given: dict[str, Any] | None) -> list[tuple[list[int], np.ndarray]]:
    """Rows of the set that import_chat() makes; none where it refuses them all."""
    import plimsoll

    if not any(one["role"] == "assistant" for row in rows for one in row["messages"]):
        return []
    try:
        plimsoll.import_chat([{key: row[key] for key in ("messages", "tools") if key in row} for row in rows], work / "set",
                             tokenizer=folder, template=source, date=DATE, template_kwargs=given, errors_max=len(rows),
                             rebuild=True, governor=governor)
    except ValueError as error:
        if "no row of these files has" not in str(error):
            raise
        return []
    with plimsoll.TokenSet(work / "set") as made:
        return [(ids.tolist(), mask) for ids, mask in made]


def against_training(ids: list[int], ours: np.ndarray, theirs: np.ndarray, decode: Any) -> str:
    """How a mask is beside TRL's: equal; white space; header or behind an answer; other."""
    if np.array_equal(ours, theirs):
        return "equal"
    differ = [k for k in np.flatnonzero(ours != theirs) if decode([ids[k]]).strip()]
    if not differ:
        return "white space"
    how = set()
    for k in differ:
        first = next(at + 1 for at in range(k, -2, -1) if at < 0 or ours[at] == theirs[at])
        behind = next(at for at in range(k, len(ids) + 1) if at == len(ids) or ours[at] == theirs[at])
        if theirs[k] and behind < len(ids) and ours[behind]:
            how.add("header")
        else:
            how.add("behind" if first and ours[first - 1] else "other")
    return " and ".join(sorted(how)) if "other" not in how else "other"


def as_parts(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose contents are lists of parts."""
    return row | {"messages": [one | {"content": [{"type": "text", "text": one["content"]}]} if isinstance(one.get("content"), str)
                               else one for one in row["messages"]]}


def measure(name: str, templates: dict[str, str], work: pathlib.Path, governor: Any) -> collections.Counter:
    """Counts of one template. AssertionError names a row that differs."""
    source, counts = templates[name], collections.Counter()
    folder = tokenizer_of(source, work / f"tokenizer-{name}")
    reference = Reference(folder)
    tags = _TAGS.search(source) is not None
    twin = templates.get(f"{name}_training")
    # A template for pictures may write nothing of texts, and is given what its processor gives it.
    plain = kinds.KINDS["one answer"]
    reads_parts = reference.text(source, plain) is None or reference.loses(source, plain)
    switched = [kind for kind, row in kinds.KINDS.items() if "chat_template_kwargs" in row and "enable_thinking" in source]
    for some, given in (([kind for kind in kinds.KINDS if kind not in switched], None), (switched, {"enable_thinking": False})):
        rows = {kind: kinds.KINDS[kind] if given else {key: value for key, value in kinds.KINDS[kind].items() if key != "chat_template_kwargs"}
                for kind in some}
        if reads_parts:
            rows = {kind: as_parts(row) for kind, row in rows.items()}
        ours = iter(imported(source, list(rows.values()), folder, work, governor, given))
        found = next(ours, None)
        for kind, row in rows.items():
            right = reference.ids_and_mask(source, row)
            if right is None:
                counts["refused by the template"] += 1
                continue
            ids, mask = right
            if tags and not mask.any():
                counts["nothing to train on"] += 1
                continue
            counts["rendered"] += 1
            if found is None or found[0] != ids:
                said = any(one.get("content") for one in row["messages"] if one["role"] == "assistant")
                how = "refused" if said else "nothing to train on"
                how = "a content is nowhere in the text" if reference.loses(source, row) else how
                counts[how] += 1
                counts[f"refused: {kind}"] += how == "refused"
                continue
            counts["equal ids"] += 1
            if tags:
                assert np.array_equal(found[1], mask), f"{name}: {kind}: its mask is not that of the tags"
                counts["equal masks"] += 1
            elif twin is not None and (theirs := reference.ids_and_mask(twin, row)) is not None and theirs[0] == ids:
                how = against_training(ids, found[1], theirs[1], reference.tokenizer.decode)
                counts[f"beside training: {how}"] += 1
                counts[f"{how}: {kind}"] += how == "other"
            found = next(ours, None)
        assert found is None, f"{name}: a row has ids that transformers does not give"
    return +counts


def run(templates: dict[str, str], names: list[str], work: pathlib.Path) -> dict[str, Any]:
    import plimsoll

    all_: collections.Counter = collections.Counter()
    by_name = {}
    with plimsoll.Governor("2GiB") as governor:
        for name in names:
            by_name[name] = measure(name, templates, work, governor)
            all_ += by_name[name]
            print(f"{name}: {dict(by_name[name])}", file=sys.stderr, flush=True)
    share = all_["refused"] / max(1, all_["rendered"])
    return {"templates": len(names), "kinds": len(kinds.KINDS), **all_, "refused_share": round(share, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("NAME", nargs="*")
    parser.add_argument("--folder", type=pathlib.Path)
    options = parser.parse_args()
    templates = formats.FORMATS | formats.trl_templates()
    if options.folder:
        templates |= {path.stem: path.read_text(encoding="utf-8") for path in sorted(options.folder.glob("*.jinja"))}
    with tempfile.TemporaryDirectory() as work:
        print(json.dumps(run(templates, options.NAME or list(templates), pathlib.Path(work)), ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
