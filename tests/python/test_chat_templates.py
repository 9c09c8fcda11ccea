# SPDX-License-Identifier: Apache-2.0
"""Chat templates, compiled or not: ids and masks are those of transformers' apply_chat_template, and what a template
refuses is refused."""
import json
import pathlib

import numpy as np
import pytest

plimsoll = pytest.importorskip("plimsoll")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytest.importorskip("transformers")

from tests.support import chats, template_fuzz, token_fuzz

DATA = pathlib.Path(__file__).parents[3] / "shared" / "data" / "text"


@pytest.mark.parametrize("name", list(chats.TEMPLATES))
def test_fuzzed_chats_have_the_ids_and_masks_of_apply_chat_template(tmp_path, governor, name):
    assert template_fuzz.compare(chats.TEMPLATES[name], 250, 3, tmp_path, governor) is True


SWITCHED = ("{% for m in messages %}<|start|>{{ m.role }}<|end|>{% if m.prefix %}={% endif %}{% if m.name %}({{ m.name }})"
            "{% endif %}{% if 'content' in m %}{{ m.content }}{% else %}-{% endif %}<|eot|>{% endfor %}")


def test_what_a_message_has_beside_its_text_is_the_templates_to_see(tmp_path, governor):
    """Switches and numbers are; null is as if it were not there."""
    folder = chats.make_tokenizer(tmp_path / "tokenizer", SWITCHED)
    more = [{}, {"prefix": True}, {"prefix": False}, {"prefix": 1.5}, {"prefix": None}, {"name": None},
            {"name": "x"}, {"content": None}, {"content": None, "prefix": 0}]
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"} | one]} for one in more]
    chats.write_lines(tmp_path / "rows.jsonl", rows)
    plimsoll.import_chat(tmp_path / "rows.jsonl", tmp_path / "set", tokenizer=folder, train="all", governor=governor)
    wanted = chats.reference(folder)
    found = [wanted.decode(ids) for ids, _ in plimsoll.TokenSet(tmp_path / "set")]
    said = ["b", "=b", "b", "=b", "b", "b", "(x)b", "-", "-"]
    assert found == [f"<|start|>user<|end|>a<|eot|><|start|>assistant<|end|>{one}<|eot|>" for one in said]
    assert found == [wanted.apply_chat_template(row["messages"], tokenize=False) for row in rows]


@pytest.mark.parametrize("line", [b'{"text": "a\\ud800b"}', b'{"text": "a\\udc00\\ud800b"}', b'{"text": "a\xed\xa0\x80b"}'])
def test_a_lone_surrogate_is_refused(tmp_path, governor, line):
    chats.make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "a"}\n' + line)
    with pytest.raises(ValueError, match=r"rows.jsonl:2: not (JSON|UTF-8)"):
        plimsoll.import_chat(tmp_path / "rows.jsonl", tmp_path / "set", tokenizer=tmp_path / "tokenizer",
                             governor=governor)
    made = plimsoll.import_chat(tmp_path / "rows.jsonl", tmp_path / "set", tokenizer=tmp_path / "tokenizer",
                                errors_max=1, governor=governor)
    assert made["rows"] == 1


@pytest.mark.slow
def test_templates_of_trl_give_what_jinja2_gives(tmp_path):
    pytest.importorskip("trl", exc_type=ImportError)
    templates = template_fuzz.given_templates()
    made = template_fuzz.run(templates, 100, 5, tmp_path)
    assert made["compiled"] > len(templates) // 4


@pytest.mark.slow
@pytest.mark.parametrize("family", list(token_fuzz.FAMILIES))
def test_100000_fuzzed_texts_have_the_ids_masks_and_batches_of_real_tokenizers(tmp_path, family):
    if not DATA.is_dir():
        pytest.skip("needs ../shared/data/text")
    assert token_fuzz.run(family, 100_000, 11, DATA, tmp_path)["of"] == "real"


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def rows_of_the_data():
    """Rows as they are in files, and their messages as a template gets them; None where it prints no calls of tools, and
    of answers that were marked as bad."""
    demos, roles = DATA / "llama_factory_demos", {"human": "user", "gpt": "assistant", "observation": "tool"}
    for name in ("alpaca_en_demo", "alpaca_zh_demo", "identity"):
        for row in json.loads((demos / f"{name}.json").read_text(encoding="utf-8")):
            asked = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
            yield row, [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    for name in ("glaive_toolcall_en_demo", "glaive_toolcall_zh_demo"):
        for row in json.loads((demos / f"{name}.json").read_text(encoding="utf-8")):
            known = all(one["from"] in roles for one in row["conversations"])
            yield row, [{"role": roles[one["from"]], "content": one["value"]}
                        for one in row["conversations"]] if known else None
    for row in json.loads((demos / "kto_en_demo.json").read_text(encoding="utf-8")):
        yield row, row["messages"] if row["label"] else None
    for name in ("v1_sft_demo", "reason_tool_use_demo_50"):  # Contents are lists of parts.
        for row in lines_of(demos / f"{name}.jsonl"):
            yield row, row["messages"]
    for row in json.loads((DATA / "gpteacher" / "codegen-instruct.json").read_text(encoding="utf-8")):
        asked = row["instruction"] + ("\n" + row["input"] if row.get("input") else "")
        yield row, [{"role": "user", "content": asked}, {"role": "assistant", "content": row["response"]}]
    for row in lines_of(DATA / "gsm8k" / "train.jsonl"):
        chat = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        yield {"messages": chat}, chat


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["tokenizers", "gigatoken"])
@pytest.mark.parametrize("family", list(token_fuzz.FAMILIES))
def test_every_row_of_the_data_has_the_ids_and_mask_of_transformers(tmp_path, governor, family, encoder):
    if not DATA.is_dir():
        pytest.skip("needs ../shared/data/text")
    if encoder == "gigatoken":
        pytest.importorskip("gigatoken")
        if token_fuzz.FAMILIES[family] != "bytes":
            pytest.skip("gigatoken encodes byte-level BPE")
    folder = token_fuzz.make_family(tmp_path / "tokenizer", family, DATA)
    wanted, given, right = chats.reference(folder), [], []
    for row, messages in rows_of_the_data():
        given.append(row)
        if messages is None or any(isinstance(one["content"], list) for one in messages):
            continue  # Left out: those of None, and lists where the template adds texts.
        right.append(messages)
    texts = [row["text"] for row in lines_of(DATA / "llama_factory_demos" / "c4_demo.jsonl")]
    made = plimsoll.import_chat([*given, *({"text": text} for text in texts)], tmp_path / "set", tokenizer=folder,
                                encoder=encoder, errors_max=len(given), governor=governor)
    assert made["about"]["compiled"] is True and made["encoder"] == encoder
    tokens, odd = plimsoll.TokenSet(tmp_path / "set"), made["about"]["odd"]
    left_out = {kind: odd[kind]["count"] for kind in ("template", "unknown_key", "label_false")}
    assert left_out == {"template": 500, "unknown_key": 360, "label_false": 150}
    assert len(given) - len(right) == sum(left_out.values())
    assert len(tokens) == len(right) + len(texts) > 13_000
    for number, (ids, mask) in enumerate(token_fuzz.reference(wanted, right)):
        assert np.array_equal(tokens[number][0], ids), right[number]
        assert np.array_equal(tokens[number][1], mask), right[number]
    end = wanted.eos_token_id
    for number, text in enumerate(texts, len(right)):
        ids = wanted(text)["input_ids"]
        assert tokens[number][0].tolist() == ids + [end] * (ids[-1:] != [end]) and tokens[number][1][-1], text


@pytest.mark.slow
def test_the_llama2_tokenizer_of_these_tests_is_sentencepieces(tmp_path):
    """Against ids that spm_encode made of the model's own file."""
    if not DATA.is_dir():
        pytest.skip("needs ../shared/data/text")
    import tokenizers

    made = tokenizers.Tokenizer.from_file(str(token_fuzz.make_family(tmp_path / "t", "llama2", DATA) / "tokenizer.json"))
    golden = DATA / "tok_golden_sentencepiece"
    lines = golden.joinpath("lines.txt").read_text(encoding="utf-8").split("\n")[:-1]
    right = golden.joinpath("llama2.ids").read_text(encoding="utf-8").split("\n")[:-1]
    same = sum(one.ids == list(map(int, ids.split()))
               for one, ids in zip(made.encode_batch(lines, add_special_tokens=False), right, strict=True))
    assert same == len(lines) == 4200
