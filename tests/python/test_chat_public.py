# SPDX-License-Identifier: Apache-2.0
"""Public templates and tokenizers' folders as strangers have them: ids are transformers', masks are the answers, and what would
be lost is an error."""
import json

import numpy as np
import pytest

plimsoll = pytest.importorskip("plimsoll")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
transformers = pytest.importorskip("transformers")

from tests.support import chats
from tests.templates import compare, formats, kinds

CHAT = [{"role": role, "content": content} for role, content in
        (("user", "one"), ("assistant", "first"), ("user", "two"), ("assistant", "second"))]
PARTS = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
         "{% endfor %}<|im_end|>\n{% endfor %}")


def folder_of(path, source=None, tokens=("<|im_start|>", "<|im_end|>", "<|endoftext|>"), letters=(), **config):
    """A tokenizer of bytes, with some added tokens, and its config."""
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({one: k for k, one in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(list(tokens))
    made.add_tokens(list(letters))
    path.mkdir()
    made.save(str(path / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast"} | config | ({} if source is None else {"chat_template": source})
    (path / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
    return path


def texts_of(rows, folder, governor, **options):
    """Each row's text, what is trained on between brackets; and what the import says."""
    out = folder.parent / "set"
    said = plimsoll.import_chat(rows, out, tokenizer=folder, governor=governor, rebuild=True, **options)
    decode = transformers.AutoTokenizer.from_pretrained(folder).decode
    found = []
    with plimsoll.TokenSet(out) as made:
        for ids, trained in made:
            ends = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
            found.append("".join(f"[[{decode(ids[begin:end])}]]" if trained[begin] else decode(ids[begin:end])
                                 for begin, end in zip(ends, ends[1:])))
    return found, said


def wanted(folder, messages, **options):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]


def ids_of(rows, folder, governor, **options):
    plimsoll.import_chat(rows, folder.parent / "set", tokenizer=folder, governor=governor, rebuild=True, **options)
    with plimsoll.TokenSet(folder.parent / "set") as made:
        return [ids.tolist() for ids, _ in made]


@pytest.mark.parametrize("name, end, last", [("phi-3-end", "<|end|>", "<|end|>\n<|endoftext|>"), ("chatml", "<|im_end|>", "<|im_end|>\n")])
def test_s21_a_turn_ends_before_the_next_header(tmp_path, governor, name, end, last):
    """Its closing text and the next header begin with the same characters."""
    source = formats.FORMATS[name]
    folder = folder_of(tmp_path / "tok", source, ("<|end|>", "<|user|>", "<|assistant|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"),
                       eos_token="<|endoftext|>")
    (text,), _ = texts_of([{"messages": CHAT}], folder, governor)
    assert f"[[first{end}\n]]<|" in text and text.rstrip().endswith(f"[[second{last}]]") and text.count("[[") == 2


def test_s21_of_one_end_of_text_behind_all_a_turn_in_the_middle_has_none(tmp_path, governor):
    source = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}")
    folder = folder_of(tmp_path / "tok", source)
    assert texts_of([{"messages": CHAT}], folder, governor)[0] == [
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n[[first<|im_end|>\n]]<|im_start|>user\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n[[second<|im_end|>\n<|endoftext|>]]"]


@pytest.mark.parametrize("plain", [True, False])
def test_s21_a_turn_that_ends_within_a_token_is_refused(tmp_path, governor, plain):
    """The answer's last letter and the header's first are one token."""
    source = "{% for m in messages %}{{ 'bQ:' if m.role == 'user' else 'A:' }}{{ m.content }}{% endfor %}"
    folder = folder_of(tmp_path / "tok", source + ("" if plain else "{% if messages | length > 40 %}x{% endif %}"), letters=["ab"])
    spoilt = {"messages": [*CHAT[:1], {"role": "assistant", "content": "la"}, *CHAT[2:]]}
    rows = [{"messages": CHAT}, spoilt, {"messages": CHAT}]
    with pytest.raises(ValueError, match=r"rows\[1\]: .*an answer ends inside of the token 'ab'"):
        texts_of(rows, folder, governor)
    found, said = texts_of(rows, folder, governor, errors_max=1)
    assert found == ["bQ:oneA:[[first]]bQ:twoA:[[second]]"] * 2 and said["about"]["odd"]["template"]["count"] == 1


BARE = {
    "additional tokens of the config": ({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"}, {}),
    "extra tokens of the config": ({"extra_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"}, {}),
    "named tokens of the config": ({"extra_special_tokens": {"turn_token": "<|im_start|>"}, "eos_token": "<|im_end|>"}, {}),
    "a token of another role": ({"turn_token": "<|im_start|>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}, {}),
    "special_tokens_map": ({}, {"special_tokens_map.json": {"additional_special_tokens": ["<|im_start|>"],
                                                            "eos_token": {"content": "<|im_end|>", "lstrip": False}}}),
    "added_tokens": ({"eos_token": "<|im_end|>"}, {"added_tokens.json": {"<|im_end|>": 257, "<|im_start|>": 256}}),
    "added_tokens_decoder": ({"eos_token": "<|im_end|>", "added_tokens_decoder": {
        "256": {"content": "<|im_end|>", "special": True}, "257": {"content": "<|im_start|>", "special": False}}},
        {"special_tokens_map.json": {"eos_token": "never read"}}),
}


@pytest.mark.parametrize("name", list(BARE))
def test_s26_special_tokens_that_only_other_files_name_are_added_as_transformers_adds_them(tmp_path, governor, name):
    config, files = BARE[name]
    folder = folder_of(tmp_path / "tok", chats.TEMPLATES["chatml"] + "{{ turn_token }}", (), **config)
    for file, said in files.items():
        (folder / file).write_text(json.dumps(said), encoding="utf-8")
    (folder / "merges.txt").write_text("")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat, text = ids_of([{"messages": CHAT}, {"text": "a text"}], folder, governor)
    assert chat == wanted(folder, CHAT) and tokenizer.convert_tokens_to_ids("<|im_start|>") in chat
    assert text == [*tokenizer("a text")["input_ids"], tokenizer.eos_token_id]
    said = plimsoll.info(tmp_path / "set")["about"]["tokenizer_files"]
    left = [] if name != "added_tokens_decoder" else ["special_tokens_map.json"]  # transformers does not read it, either.
    assert said["unused"] == ["merges.txt", *left] and {"tokenizer.json", "tokenizer_config.json"} <= {*said["used"]}


def test_s26_an_id_that_a_token_does_not_get_is_refused(tmp_path, governor):
    folder = folder_of(tmp_path / "tok", chats.TEMPLATES["chatml"], ())
    (folder / "added_tokens.json").write_text('{"<|im_start|>": 300}')
    with pytest.raises(ValueError, match=r"tok: '<\|im_start\|>' is id 300 in tokenizer_config.json or added_tokens.json and another"):
        ids_of([{"messages": CHAT}], folder, governor)


def test_s27_thoughts_of_the_last_turn_alone(tmp_path, governor):
    folder = folder_of(tmp_path / "tok", formats.FORMATS["think-last"])
    rows = [{"messages": CHAT}, {"messages": [*CHAT[:3], {**CHAT[3], "reasoning_content": "hm"}]}]
    (first, second), _ = texts_of(rows, folder, governor)
    assert first == ("<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n[[first<|im_end|>\n]]<|im_start|>user\ntwo<|im_end|>\n"
                     "<|im_start|>assistant\n[[<think>\n\n</think>\n\nsecond<|im_end|>\n]]")
    assert second.endswith("[[<think>\nhm\n</think>\n\nsecond<|im_end|>\n]]")
    (last,), _ = texts_of(rows[:1], folder, governor, train="last")
    assert last.count("[[") == 1 and last.endswith("[[<think>\n\n</think>\n\nsecond<|im_end|>\n]]")


def test_s27_an_end_that_depends_on_the_place(tmp_path, governor):
    tokens = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
    folder = folder_of(tmp_path / "tok", formats.FORMATS["end-by-place"], tokens)
    (text,), _ = texts_of([{"messages": CHAT}], folder, governor)
    assert text == ("<|start|>user<|message|>one<|end|><|start|>assistant[[<|channel|>final<|message|>first<|end|>]]"
                    "<|start|>user<|message|>two<|end|><|start|>assistant[[<|channel|>final<|message|>second<|return|>]]")


def test_s27_what_a_tool_answers_within_a_turn_is_not_trained_on(tmp_path, governor):
    folder = folder_of(tmp_path / "tok", formats.FORMATS["answers-of-tools"], ("<|turn>", "<turn|>", "<|call>", "<|answer>"))
    row = kinds.KINDS["two calls"] | {"messages": kinds.KINDS["two calls"]["messages"]}
    (text,), _ = texts_of([row], folder, governor)
    assert ("[[I look.<|call>look{\"what\": \"x\"}<call|><|call>look{\"what\": \"y\"}<call|>]]<|answer>7<answer|><|answer>8<answer|>"
            "[[<turn|>\n]]<|turn>assistant\n[[Seven and eight.<turn|>\n]]") in text
    (last,), _ = texts_of([{"messages": row["messages"][:-1]}], folder, governor, train="last")
    assert last.count("[[") == 2 and "[[<turn|>\n]]" in last


def test_s27_a_template_without_a_loop_and_one_that_cannot_be_told(tmp_path, governor):
    one = "<|im_start|>Q {{ messages[0].content }} A {{ messages[1].content | trim }}<|im_end|>"
    folder = folder_of(tmp_path / "tok", one)
    rows = [{"messages": [CHAT[0], {"role": "assistant", "content": " said\n"}]}]
    assert texts_of(rows, folder, governor)[0] == ["<|im_start|>Q one A [[said<|im_end|>]]"]
    mirrored = "{% for m in messages %}{{ m.content | reverse }}{% endfor %}{{ messages[1].content | length }}"
    folder = folder_of(tmp_path / "mirrored", mirrored)
    assert texts_of(rows, folder, governor)[0] == ["eno[[\ndias 6]]"]
    both = "{{ messages[1].content }}{{ messages[1].content }}" + one
    folder = folder_of(tmp_path / "both", both)
    with pytest.raises(ValueError, match=r"rows\[0\]: .*cannot be told from the rest: give the template {% generation %} tags"):
        texts_of([{"messages": [CHAT[0], {"role": "assistant", "content": "x", "tool_calls": []}]}], folder, governor)


def test_s27_named_templates_and_variables_are_transformers(tmp_path, governor):
    base = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    named = [{"name": "default", "template": base + "{{ 'quick' if enable_thinking is false else 'slow' }}"},
             {"name": "tool_use", "template": "{{ tools | tojson }}" + base}, {"name": "rag", "template": "RAG" + base}]
    folder = folder_of(tmp_path / "tok", named)
    rows = [{"messages": CHAT}, {"messages": CHAT, "tools": kinds.TOOLS}]
    assert ids_of(rows, folder, governor) == [wanted(folder, CHAT), wanted(folder, CHAT, tools=kinds.TOOLS)]
    assert ids_of(rows[:1], folder, governor, template="rag") == [wanted(folder, CHAT, chat_template="rag")]
    assert ids_of(rows[:1], folder, governor, template_kwargs={"enable_thinking": False}) == [wanted(folder, CHAT, enable_thinking=False)]
    with pytest.raises(ValueError, match="template: .*tok has none of the name 'other', only default, tool_use, rag"):
        ids_of(rows, folder, governor, template="other")
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_template.jinja").write_text("FILE" + base)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("TOOLS" + base)
    assert ids_of(rows, folder, governor) == [wanted(folder, CHAT), wanted(folder, CHAT, tools=kinds.TOOLS)]
    used = plimsoll.info(tmp_path / "set")["about"]["tokenizer_files"]["used"]
    assert {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"} <= {*used}


def test_s27_a_name_that_begins_with_an_underscore_is_refused_as_in_transformers(tmp_path, governor):
    folder = folder_of(tmp_path / "tok", "{% set ns = namespace(_x=1) %}" + chats.TEMPLATES["chatml"])
    with pytest.raises(ValueError, match=r"rows\[0\]: .*a name may not begin with an underscore"):
        ids_of([{"messages": CHAT}], folder, governor)


@pytest.mark.parametrize("source", [
    "{% for m in messages %}{% if m.role != 'system' or m.content %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}",
    "{% if 'user' not in messages | map(attribute='role') %}{{ raise_exception('no question') }}{% endif %}"
    "{{ messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join }}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"])
def test_s27_what_a_template_does_with_some_roles_does_not_slow_the_others(tmp_path, governor, source):
    folder = folder_of(tmp_path / "tok", source)
    rows = [CHAT, [{"role": "system", "content": "kind"}, *CHAT], [{"role": "system", "content": ""}, *CHAT], CHAT[1:]]
    assert ids_of([{"messages": row} for row in rows], folder, governor) == [wanted(folder, row) for row in rows]
    assert plimsoll.info(tmp_path / "set")["about"]["compiled"] is True


@pytest.mark.parametrize("name", ["think-last", "end-by-place", "answers-of-tools", "phi-3-end", "trl/qwen3", "trl/gptoss"])
def test_s27_public_formats_have_transformers_ids(tmp_path, governor, name):
    templates = formats.FORMATS | {f"trl/{key}": source for key, source in formats.trl_templates().items()}
    if name not in templates:
        pytest.skip("needs trl: tools/setup.sh")
    counts = compare.measure(name, templates, tmp_path, governor)
    assert counts["equal ids"] > 10 and not counts["refused"], counts


@pytest.mark.slow
def test_s27_of_all_public_templates_at_most_two_in_a_hundred_rows_are_refused(tmp_path):
    pytest.importorskip("trl", exc_type=ImportError)
    templates = formats.FORMATS | formats.trl_templates()
    counts = compare.run(templates, list(templates), tmp_path)
    print(counts)
    assert counts["templates"] >= 73 and counts["rendered"] > 1200 and counts["refused_share"] <= 0.02
    assert counts["equal masks"] > 300 and not counts.get("beside training: other")


FLAGS = [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True, "special": False}, {"special": False}]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("of", ["decoder", "role"])
def test_s33_flags_of_the_config_win(tmp_path, governor, flags, of):
    token = {"content": "<|x|>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True} | flags
    folder = folder_of(tmp_path / "tok", "{% for m in messages %}{{ m.content }}{% endfor %}", ("<|x|>",),
                       **({"added_tokens_decoder": {"256": token}} if of == "decoder" else
                          {"sep_token": {"__type": "AddedToken", **token}}))
    chat = [{"role": "user", "content": "a <|x|> b<|x|>c"}, {"role": "assistant", "content": "  <|x|>  d"}]
    assert ids_of([{"messages": chat}], folder, governor) == [wanted(folder, chat)]


def test_s33_a_content_that_is_nowhere_in_the_text_is_an_error(tmp_path, governor):
    folder = folder_of(tmp_path / "tok", PARTS)
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in CHAT]
    rows = [{"messages": parts}, {"messages": CHAT}]
    with pytest.raises(ValueError, match=r"rows\[1\]: .*writes nothing of the content of message 1 \(user\); it may read lists of parts"):
        ids_of(rows, folder, governor)
    with pytest.raises(ValueError, match=r"rows\[1\]: .*writes nothing of the content of message 1"):
        ids_of(rows, folder, governor, train="all")
    found, said = texts_of(rows, folder, governor, errors_max=1)
    assert found == ["<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n[[first<|im_end|>\n]]<|im_start|>user\ntwo<|im_end|>\n"
                     "<|im_start|>assistant\n[[second<|im_end|>\n]]"] and said["rows"] == 1


def test_s33_a_thought_or_white_space_that_a_template_leaves_out_is_none(tmp_path, governor):
    folder = folder_of(tmp_path / "tok", formats.FORMATS["think-last"])
    chat = [CHAT[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfirst"}, {"role": "user", "content": " \n"}, CHAT[3]]
    assert ids_of([{"messages": chat}], folder, governor) == [wanted(folder, chat)]
