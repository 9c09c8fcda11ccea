# SPDX-License-Identifier: Apache-2.0
"""What a row says: each of its keys is used, refused with file and line, or counted under its name (decision 0061)."""
import json
import pathlib
import subprocess
import sys

import pytest

plimsoll = pytest.importorskip("plimsoll")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tests.support import chats, pictures

# Prints all that a message may have.
PRINTS = ("{% if tools %}<|start|>tools:{{ tools | tojson }}<|eot|>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}"
          "{% if m.name %}({{ m.name }}){% endif %}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
          "{% if m.content is string %}{{ m.content }}{% elif m.content %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
          "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}")
ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = [{"type": "function", "function": {"name": "w", "arguments": {"city": "Bern"}}}]


@pytest.fixture
def imported(governor, tmp_path):
    """Imports some rows; every row as text, what is trained on between ⟦ and ⟧, and what was said of the import."""
    import tokenizers

    def import_(rows, template=PRINTS, **options):
        folder = chats.make_tokenizer(tmp_path / "tokenizer", template)
        files = chats.write_lines(tmp_path / "rows.jsonl", rows) if isinstance(rows, list) else rows
        made = plimsoll.import_chat(files, tmp_path / "set", tokenizer=folder, governor=governor, rebuild=True, **options)
        decoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        texts = []
        with plimsoll.TokenSet(tmp_path / "set") as tokens:
            for ids, trained in tokens:
                text, open_ = "", False
                for token, on in [*zip(ids.tolist(), trained.tolist(), strict=True), (None, False)]:
                    text += ("⟦" if on else "⟧") * (on != open_)
                    text += "" if token is None else decoder.decode([token], skip_special_tokens=False)
                    open_ = on
                texts.append(text)
        return texts, made

    return import_


@pytest.fixture
def seen(governor, tmp_path):
    """Imports rows with images; their messages, and what was said of the import."""
    (tmp_path / "a.png").write_bytes(pictures.random_picture("png", 3))
    (tmp_path / "b.jpg").write_bytes(pictures.random_picture("jpeg", 4))

    def import_(rows, **options):
        files = chats.write_lines(tmp_path / "rows.jsonl", rows) if isinstance(rows, list) else rows
        made = plimsoll.import_vision(files, tmp_path / "images", governor=governor, rebuild=True, images=tmp_path, **options)
        with plimsoll.ImageSet(tmp_path / "images") as images:
            return [row.messages for row in images], made

    return import_


def said(text):
    return {"type": "text", "text": text}


IMAGE = {"type": "image"}


def chat(*turns):
    return [{"role": role, "content": list(parts)} for role, *parts in turns]


LLAVA = [
    ({"image": "a.png", "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A."}]},
     chat(("user", IMAGE, said("\nWhat?")), ("assistant", said("A.")))),
    ({"image": "a.png", "conversations": [{"from": "human", "value": "What?\n<image>"}, {"from": "gpt", "value": "A."}]},
     chat(("user", said("What?\n"), IMAGE), ("assistant", said("A.")))),
    ({"image": ["a.png", "b.jpg"], "conversations": [{"from": "human", "value": "<image> or <image>?"}, {"from": "gpt", "value": "A."},
                                                     {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "B."}]},
     chat(("user", IMAGE, said(" or "), IMAGE, said("?")), ("assistant", said("A.")), ("user", said("Why?")),
          ("assistant", said("B.")))),
    ({"images": ["a.png"], "messages": [{"role": "user", "content": "<image>What?"}, ANSWERED]},
     chat(("user", IMAGE, said("What?")), ("assistant", said("a")))),
    ({"images": ["a.png"], "messages": [ASKED, ANSWERED], "system": "Be brief."},
     chat(("system", said("Be brief.")), ("user", IMAGE, said("q")), ("assistant", said("a")))),
    ({"images": ["a.png", "b.jpg"], "texts": [{"user": "One?", "assistant": "Two.", "source": "x"}, {"user": "q", "assistant": "a"}]},
     chat(("user", IMAGE, IMAGE, said("One?")), ("assistant", said("Two.")), ("user", said("q")), ("assistant", said("a")))),
    ({"conversations": [{"from": "user", "value": [{"image": "a.png"}, {"text": "q"}]}, {"from": "assistant", "value": "a"}]},
     chat(("user", IMAGE, said("q")), ("assistant", said("a")))),
]


@pytest.mark.parametrize("number", range(len(LLAVA)))
def test_s22_conversations_with_images_have_both(seen, number):
    row, wanted = LLAVA[number]
    messages, made = seen([row | {"id": "1"}])
    assert messages == [wanted] and made["about"]["keys"]["counted"]["id"] == [1, 1]
    assert made["images"] == sum(part == IMAGE for one in wanted for part in one["content"])
    assert made["first_rows"][0].count("[image]") == made["images"] and "⟦" in made["first_rows"][0]


@pytest.mark.parametrize("row, words", [
    ({"image": "a.png", "conversations": [{"from": "human", "value": "<image> and <image>"}]}, "fewer images than"),
    ({"images": ["a.png", "b.jpg"], "conversations": [{"from": "human", "value": "<image>"}]}, "more images than"),
    ({"image": "a.png", "conversations": [{"from": "human", "value": 7}]}, "neither text nor parts"),
    ({"image": "a.png", "video": "a.mp4", "messages": [ASKED]}, "keys that are not read: video"),
    ({"image": "a.png", "conversations": "q"}, "conversations is not a list")])
def test_s22_images_that_have_no_place_are_refused(seen, row, words):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{words}"):
        seen([LLAVA[0][0], row])


CHATS = [
    [{"role": "user", "content": [said("Name "), said("one.")]}, {"role": "assistant", "content": [said("Blue.")]}],
    [ASKED, {"role": "assistant", "content": "", "tool_calls": CALL}, {"role": "tool", "content": "sun", "name": "w"}, ANSWERED],
    [ASKED, {"role": "assistant", "content": None, "tool_calls": CALL}, {"role": "tool", "content": "sun"}, ANSWERED],
    [ASKED, {"role": "assistant", "content": "a", "reasoning_content": "hm"}],
    [ASKED, {"role": "assistant", "content": "a", "thinking": "hm"}],
]


@pytest.mark.parametrize("number", range(len(CHATS)))
def test_s23_one_reader_for_messages_and_conversations(imported, number):
    pytest.importorskip("transformers")
    rows = CHATS[number]
    named = [{"from": {"user": "human", "assistant": "gpt"}.get(one["role"], one["role"]), "value": one.get("content"),
              **{key: value for key, value in one.items() if key not in ("role", "content")}} for one in rows]
    texts, made = imported([{"messages": rows}, {"conversations": rows}, {"conversations": named}])
    wanted = chats.reference(pathlib.Path(made["path"]).parent / "tokenizer").apply_chat_template(rows, tokenize=False)
    assert [text.replace("⟦", "").replace("⟧", "") for text in texts] == [wanted] * 3
    assert len(set(texts)) == 1 and "⟦" in texts[0]
    assert set(made["about"]["odd"]) <= {"empty_turns", "duplicates"}


def test_s23_calls_of_sharegpt_and_of_parts_are_calls(imported):
    call = {"name": "w", "arguments": {"city": "Bern"}}
    turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(call)},
             {"from": "observation", "value": "sun"}, {"from": "gpt", "value": "a"}]
    parts = [{"role": "user", "content": [{"type": "text", "value": "q"}]},
             {"role": "assistant", "content": [{"type": "tool_call", "value": json.dumps(call)}]},
             {"role": "tool", "content": [{"type": "text", "value": "sun"}]},
             {"role": "assistant", "content": [{"type": "text", "value": "a"}]}]
    old = [ASKED, {"role": "assistant", "content": None, "function_call": call}, {"role": "tool", "content": "sun"}, ANSWERED]
    tools = [{"type": "function", "function": {"name": "w"}}]
    texts, _ = imported([{"conversations": turns, "tools": json.dumps(tools)}, {"messages": parts, "tools": tools},
                         {"messages": old, "functions": [{"name": "w"}]}])
    assert len(set(texts)) == 1
    assert '<|im_start|>assistant:⟦<call>w{"city": "Bern"}<|im_end|>\n⟧' in texts[0] and '"name": "w"}}]<|eot|>' in texts[0]


def test_s23_what_a_template_does_not_print_is_counted_or_refused(imported):
    """What the standard knows is counted, as transformers passes it to templates that do not print it; all else is refused."""
    for key, value in (("tool_calls", CALL), ("reasoning_content", "hm"), ("name", "x")):
        texts, made = imported([{"messages": [ASKED, ANSWERED | {key: value}]}], "chatml")
        assert "⟦a<|im_end|>\n⟧" in texts[0] and made["about"]["keys"]["counted"][f"messages.{key}"][0] == 1
    for key, value in (("audio", {"id": "x"}), ("refusal", "No.")):
        row = {"messages": [ASKED, ANSWERED | {key: value}]}
        with pytest.raises(ValueError, match=rf"rows\.jsonl:1: keys that are not read: messages\.{key}: .*--ignore-keys messages\.{key}"):
            imported([row], "chatml")
        texts, made = imported([row], "chatml", ignore_keys=[f"messages.{key}"])
        assert "⟦a<|im_end|>\n⟧" in texts[0] and made["about"]["keys"]["counted"][f"messages.{key}"][0] == 1
    row = {"messages": [ASKED, ANSWERED], "tools": [{"name": "w"}], "chat_template_kwargs": {"enable_thinking": False}}
    counted = imported([row], "chatml")[1]["about"]["keys"]["counted"]
    assert counted["tools"] == [1, 2] and counted["chat_template_kwargs.enable_thinking"] == [1, 1]
    with pytest.raises(ValueError, match="type 'image'; text is known, and import vision reads images"):
        imported([{"messages": [{"role": "user", "content": [IMAGE]}, ANSWERED]}])
    with pytest.raises(ValueError, match="keys that are not read: images"):
        imported([{"messages": [ASKED, ANSWERED], "images": ["a.png"]}])


def test_s23_parts_that_a_template_prints_as_python_does_are_counted(imported):
    parts = [{"role": "user", "content": [said("one "), said("two")]}, ANSWERED]
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    made = imported([{"messages": parts}, {"messages": [ASKED, ANSWERED]}], template)[1]
    assert made["about"]["odd"]["parts_printed"] == {"count": 1, "first": ["rows.jsonl:1"]}
    with pytest.raises(ValueError, match="rows.jsonl:1: the chat template refused it"):
        imported([{"messages": parts}], "chatml")


SYSTEM = "<|im_start|>system:Be brief.<|im_end|>\n"
ONE = "<|im_start|>user:q<|im_end|>\n<|im_start|>assistant:⟦a<|im_end|>\n⟧"


@pytest.mark.parametrize("row, wanted", [
    ({"messages": [ASKED, ANSWERED], "system": "Be brief."}, SYSTEM + ONE),
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "Be brief."}, SYSTEM + ONE),
    ({"messages": [{"role": "system", "content": "Be brief."}, ASKED, ANSWERED], "system": "Be brief."}, SYSTEM + ONE),
    ({"system_prompt": "Be brief.", "question": "q", "response": "a"}, SYSTEM + ONE),
    ({"system": "Be brief.", "prompt": "q", "completion": "a"}, SYSTEM + ONE),
    ({"system": "", "messages": [ASKED, ANSWERED]}, ONE),
    ({"instruction": "q", "input": "", "output": "a", "history": [], "system": ""}, ONE),
    ({"instruction": "q", "output": "a", "history": [["Bern?", "Sun."], ["Rome?", "Rain."]], "system": "Be brief."},
     SYSTEM + "<|im_start|>user:Bern?<|im_end|>\n<|im_start|>assistant:⟦Sun.<|im_end|>\n⟧"
     "<|im_start|>user:Rome?<|im_end|>\n<|im_start|>assistant:⟦Rain.<|im_end|>\n⟧" + ONE),
    ({"instruction": "q", "context": "c", "response": "a", "category": "x"}, ONE.replace("q", "q\nc")),
    ({"question": "q", "answer": "a"}, ONE), ({"prompt": "q", "response": "a"}, ONE), ({"input": "q", "output": "a"}, ONE),
    ({"prompt": [ASKED], "completion": [ANSWERED]}, ONE),
    ({"question": "q", "input": "c", "completion": [ANSWERED]}, ONE.replace("q", "q\nc")),
    ({"messages": [ASKED, {"from": "gpt", "value": "a", "content": ""}]}, ONE),
    ({"messages": [ASKED, ANSWERED], "prompt": "q", "prompt_id": "7"}, ONE),
    ({"prompt": [ASKED, {"role": "assistant", "content": "b"}, ASKED], "completion": [ANSWERED]},
     ONE.replace("⟦a", "b").replace("⟧", "") + ONE)])
def test_s24_columns_beside_messages_are_used(imported, row, wanted):
    texts, made = imported([row])
    assert texts == [wanted]
    assert made["first_rows"] == [wanted]


@pytest.mark.parametrize("row, words", [
    ({"messages": [{"role": "system", "content": "Be long."}, ASKED, ANSWERED], "system": "Be brief."}, "system beside a first"),
    ({"messages": [ASKED, ANSWERED], "system": ["Be brief."]}, "system is not text"),
    ({"instruction": "q", "output": "a", "history": [["Bern?"]]}, "history is not a list of pairs"),
    ({"instruction": "q", "output": ["a", "b"]}, "output is not text|a message that is no object"),
    ({"instruction": "q", "output": "a", "response": "b"}, "keys that are not read: response"),
    ({"messages": [ASKED, ANSWERED], "conversations": [ASKED]}, "keys that are not read: conversations"),
    ({"messages": [ASKED, ANSWERED], "persona": "pirate", "topic": "x"}, "keys that are not read: persona: .*--ignore-keys persona"),
    ({"messages": [ASKED, ANSWERED | {"mood": "x"}]}, r"messages\.mood"),
    ({"messages": [ASKED, {"role": "assistant", "content": [said("a") | {"bold": True}]}]}, r"content\.bold")])
def test_s24_what_cannot_be_used_is_refused_by_name(imported, row, words):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*({words})"):
        imported([{"messages": [ASKED, ANSWERED]}, row])


def test_s24_a_key_that_is_there_twice_is_refused(imported, seen, tmp_path):
    (tmp_path / "twice.jsonl").write_text('{"text": "a", "image": "a.png", "response": "b", "response": "c"}\n')
    with pytest.raises(ValueError, match=r"twice\.jsonl:1: a key that is there twice: response"):
        seen(tmp_path / "twice.jsonl")
    (tmp_path / "twice.jsonl").write_text('{"prompt": "a", "completion": "b", "completion": "c"}\n')
    with pytest.raises(ValueError, match=r"twice\.jsonl:1: a key that is there twice: completion"):
        imported(tmp_path / "twice.jsonl")


@pytest.mark.parametrize("key, off, on", [("weight", 0, 1), ("train", False, True), ("training", False, True),
                                          ("loss_weight", 0.0, 1.0), ("loss", False, None)])
def test_s25_messages_of_weight_zero_are_not_trained_on(imported, key, off, on):
    rows = [ASKED, {"role": "assistant", "content": "5", key: off}, ASKED, {"role": "assistant", "content": "4", key: on}]
    for name in ("messages", "conversations"):
        texts, made = imported([{name: rows}])
        assert texts == ["<|im_start|>user:q<|im_end|>\n<|im_start|>assistant:5<|im_end|>\n"
                         "<|im_start|>user:q<|im_end|>\n<|im_start|>assistant:⟦4<|im_end|>\n⟧"]
    assert imported([{"messages": rows}], train="all")[0] == [
        "⟦<|im_start|>user:q<|im_end|>\n<|im_start|>assistant:⟧5<|im_end|>\n⟦"
        "<|im_start|>user:q<|im_end|>\n<|im_start|>assistant:4<|im_end|>\n⟧"]
    texts, made = imported([{"messages": rows[:2]}, {"messages": rows[2:]}, {"prompt": "q", "completion": "a", key: off}])
    assert len(texts) == 1 and made["about"]["odd"]["nothing_trained"]["count"] == made["about"]["odd"]["not_trained"]["count"] == 1
    assert "⟦" in imported([{"messages": rows[:2]}], ignore_keys=[f"messages.{key}"])[0][0]


@pytest.mark.parametrize("value", [0.5, "0", -1, [0], 2])
def test_s25_other_weights_are_refused(imported, value):
    row = {"messages": [ASKED, ANSWERED | {"weight": value}]}
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: a value that is not read: messages\.weight is .*--ignore-keys"):
        imported([row])
    with pytest.raises(ValueError, match="a message of the user that is to be trained on"):
        imported([{"messages": [ASKED | {"weight": 1}, ANSWERED]}])


def test_s25_an_image_set_says_what_is_not_trained_on(seen):
    rows = [{"role": "user", "content": "<image>q"}, ANSWERED | {"weight": 0}, ASKED, ANSWERED | {"weight": 1}]
    messages, made = seen([{"image": "a.png", "messages": rows}])
    assert [one.get("train") for one in messages[0]] == [None, False, None, None]
    assert made["first_rows"][0].count("⟦") == 1


@pytest.mark.parametrize("row, asked, answer", [
    ({"caption": "A."}, [], "A."), ({"question": "q", "answer": "A."}, [said("q")], "A."),
    ({"text": "q", "output": "A."}, [said("q")], "A."), ({"prompt": "q", "completion": "A."}, [said("q")], "A."),
    ({"query": "q", "response": "A."}, [said("q")], "A."), ({"instruction": "q", "input": "more", "output": "A."},
                                                           [said("q"), said("more")], "A."),
    ({"prompt": [ASKED], "completion": [{"role": "assistant", "content": "A."}]}, [said("q")], "A.")])
def test_s29_columns_of_other_names_are_read(seen, row, asked, answer):
    for name in ("image", "images", "img", "image_path", "file_name", "jpg"):
        value = ["a.png"] if name == "images" else "a.png"
        messages, _ = seen([{name: value, **row}])
        assert messages == [chat(("user", IMAGE, *asked), ("assistant", said(answer)))], name


@pytest.mark.parametrize("row, names", [({"legend": "A."}, "legend"), ({"question": "q", "reply": "A."}, "reply"),
                                        ({"caption": "A.", "caption_zh": "B."}, "caption_zh"),
                                        ({"question": "q", "answer": "A.", "choices": ["a", "b"]}, "choices"),
                                        ({"a": "1", "b": "2"}, "a, b")])
def test_s29_columns_that_nobody_knows_are_refused_with_the_option(seen, row, names):
    joined = names.replace(", ", ",")
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: keys that are not read: {names}: .*--ignore-keys {joined}"):
        seen([{"image": "a.png", **row}])
    _, made = seen([{"image": "a.png", **row}], ignore_keys=joined.split(","))
    assert all(made["about"]["keys"]["counted"][name][0] == 1 for name in joined.split(","))


@pytest.mark.parametrize("row", [{"messages": [ASKED, ANSWERED], "label": False}, {"prompt": "q", "completion": "a", "label": False},
                                 {"instruction": "q", "input": "", "output": "a", "kto_tag": False}])
def test_s30_answers_that_are_labelled_bad_are_left_out_and_counted(imported, row):
    key = "kto_tag" if "kto_tag" in row else "label"
    texts, made = imported([row, row | {key: True}, row])
    assert len(texts) == 1 and made["about"]["odd"]["label_false"] == {"count": 2, "first": ["rows.jsonl:1", "rows.jsonl:3"]}
    assert len(imported([row] * 2, ignore_keys=[key])[0]) == 2
    with pytest.raises(ValueError, match=rf"{key} is 0, and true or false is read.*--ignore-keys {key}"):
        imported([row | {key: 0}])


@pytest.mark.parametrize("row", [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [ANSWERED]},
                                 {"conversations": [ASKED], "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}},
                                 {"prompt": "q", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, ANSWERED]},
                                 {"chosen_messages": [ASKED, ANSWERED], "rejected_messages": [ASKED, ANSWERED]}])
def test_s30_pairs_of_answers_are_refused_with_the_option(imported, row):
    name = "rejected_messages" if "rejected_messages" in row else "rejected"
    with pytest.raises(ValueError, match=rf"a row of two answers: {name}: .*--ignore-keys {name}"):
        imported([row])
    assert imported([row], ignore_keys=[name])[0] == [ONE]


def test_s33_nulls_of_a_dataset_are_what_transformers_makes_of_them(imported, seen):
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("transformers")

    def row(name, key):
        return [ASKED, {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": {key: "x"}}}]}]

    table = datasets.Dataset.from_list([{"messages": row("a", "city")}, {"messages": row("b", "zone")}])
    texts, made = imported(table)
    wanted = chats.reference(pathlib.Path(made["path"]).parent / "tokenizer")
    assert [text.replace("⟦", "").replace("⟧", "") for text in texts] == [
        wanted.apply_chat_template(one["messages"], tokenize=False) for one in table]
    assert made["about"]["odd"]["nulls"]["count"] == 2, "and the import says so"
    stored, made = seen([{"image": "a.png", "messages": one["messages"]} for one in table])
    assert [one[1]["tool_calls"] for one in stored] == [one["messages"][1]["tool_calls"] for one in table]
    assert all("tool_calls" not in one[0] for one in stored) and made["about"]["odd"]["nulls"]["count"] == 2


def command(*arguments):
    return subprocess.run([sys.executable, "-c", "import sys; from plimsoll.cli._program import main; sys.exit(main())", "import", "chat",
                           *map(str, arguments)], capture_output=True, text=True)


def test_s24_the_command_shows_what_is_trained_on_and_what_is_not_used(tmp_path):
    rows = [{"messages": [ASKED, ANSWERED], "id": k, "score": 0.5, "note": None} for k in range(3)]
    options = ["--tokenizer", chats.make_tokenizer(tmp_path / "tokenizer", PRINTS), "--out", tmp_path / "set", "--quiet"]
    made = command(chats.write_lines(tmp_path / "rows.jsonl", rows), *options)
    assert made.returncode == 0, made.stderr
    for what in ("id in 3 rows", "score in 3 rows", "empty keys in 3 rows"):
        assert f"  not used  {what}\n" in made.stdout
    assert made.stdout.count("<|im_start|>assistant:⟦a<|im_end|>\n    ⟧") == 2
    bad = chats.write_lines(tmp_path / "bad.jsonl", [rows[0] | {"moods": "x"}])
    refused = command(bad, *options)
    assert refused.returncode == 1 and f"{bad}:1: keys that are not read: moods: " in refused.stderr
    said = json.loads(command(bad, *options, "--ignore-keys", "moods,x", "--json").stdout)
    assert said["about"]["keys"]["counted"]["moods"] == [1, 1] and len(said["first_rows"]) == 1
