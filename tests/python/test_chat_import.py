# SPDX-License-Identifier: Apache-2.0
"""import_chat: the ids are those of apply_chat_template, the masks those of {% generation %}; what is odd is counted or
refused with file and line; killed anywhere it goes on to the same bytes, in the same memory for any number of rows."""
import gzip
import json
import os
import pathlib
import random
import signal
import subprocess
import sys

import pytest

plimsoll = pytest.importorskip("plimsoll")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tests.support import chats


def imported(governor, tmp_path, rows, **options):
    """The set made of some rows, and what was said of it."""
    files = chats.write_lines(tmp_path / "rows.jsonl", rows)
    options.setdefault("tokenizer", tmp_path / "tokenizer")
    made = plimsoll.import_chat(files, tmp_path / "set", governor=governor, **options)
    return plimsoll.TokenSet(tmp_path / "set"), made


def compare(tokens, folder, rows):
    """Every row's ids with apply_chat_template's; returns the trained texts."""
    wanted = chats.reference(folder)
    assert len(tokens) == len(rows)
    trained = []
    for number, messages in enumerate(rows):
        ids, mask = tokens[number]
        right = wanted.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert ids.tolist() == list(right), number
        trained.append(wanted.decode(ids[mask], clean_up_tokenization_spaces=False))
    return trained


@pytest.mark.parametrize("family", ["bytes", "metaspace", "words"])
@pytest.mark.parametrize("template", list(chats.TEMPLATES))
def test_ids_are_those_of_apply_chat_template(governor, tmp_path, family, template):
    pytest.importorskip("transformers")
    folder = chats.make_tokenizer(tmp_path / "tokenizer", template, family)
    numbers = random.Random(f"{family}{template}")
    rows = [chats.chat(numbers, system=template != "alternating") for _ in range(60)]
    tokens, made = imported(governor, tmp_path, [{"messages": row} for row in rows])
    trained = compare(tokens, folder, rows)
    assert made["about"]["compiled"] is True, "rendered by the template, row by row"
    for messages, text in zip(rows, trained, strict=True):
        if family == "bytes":
            strip = template in ("trimmed", "alternating")
            end = {"trimmed": "<|eot|>", "alternating": " </s>"}.get(template, "<|im_end|>")
            before = " " if template == "alternating" else ""
            said = [m["content"].strip() if strip else m["content"] for m in messages if m["role"] == "assistant"]
            said = [before + one + end for one in said]
            if template == "thinking":
                said[-1] = "<think>\n\n</think>\n\n" + said[-1]
            # A token may hold white space of the header along with the first of the turn.
            assert "".join(text.split()) == "".join("".join(said).split())
    assert tokens.trained_tokens == sum(mask.sum() for _, mask in tokens)


def test_masks_are_those_of_the_generation_tags(governor, tmp_path):
    pytest.importorskip("transformers")
    folder = chats.make_tokenizer(tmp_path / "tokenizer", "marked")
    numbers = random.Random(3)
    rows = [chats.chat(numbers) for _ in range(80)]
    tokens, _ = imported(governor, tmp_path, [{"messages": row} for row in rows])
    wanted = chats.reference(folder)
    for number, messages in enumerate(rows):
        right = wanted.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        assert tokens[number][0].tolist() == right["input_ids"]
        assert tokens[number][1].astype(int).tolist() == right["assistant_masks"], number


def test_what_pieces_do_not_cover_goes_to_the_template(governor, tmp_path):
    pytest.importorskip("transformers")
    folder = chats.make_tokenizer(tmp_path / "tokenizer", "thinking")
    rows = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}],
            [{"role": "user", "content": "a"}, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "b"}],
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}],
            [{"role": "user", "content": "\u00a0a\u3000"}, {"role": "assistant", "content": "\u2028b\x1f"}]]
    tokens, _ = imported(governor, tmp_path, [{"messages": row} for row in rows])
    assert compare(tokens, folder, rows)[0] == "<think>\n\n</think>\n\nb<|im_end|>\n"


def test_a_template_that_is_more_than_pieces_is_rendered_by_jinja(governor, tmp_path):
    pytest.importorskip("transformers")
    template = ("{% for m in messages %}<|start|>{{ m.role }}:{{ m.content | length }}:{{ m.content }}<|eot|>"
                "{% endfor %}{% if add_generation_prompt %}<|start|>assistant:{% endif %}")
    folder = chats.make_tokenizer(tmp_path / "tokenizer", template)
    rows = [chats.chat(random.Random(k)) for k in range(20)]
    tokens, made = imported(governor, tmp_path, [{"messages": row} for row in rows])
    assert made["about"]["compiled"] is False
    trained = compare(tokens, folder, rows)
    said = [m["content"] for m in rows[0] if m["role"] == "assistant"]
    assert trained[0] == "".join(f"{len(one)}:{one}<|eot|>" for one in said)


@pytest.mark.parametrize("train, wanted", [("assistant", "b<|im_end|>\nd<|im_end|>\n"), ("last", "d<|im_end|>\n"),
                                           ("all", None)])
def test_train_says_which_turns(governor, tmp_path, train, wanted):
    chats.make_tokenizer(tmp_path / "tokenizer")
    messages = [{"role": role, "content": content} for role, content in
                (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))]
    tokens, _ = imported(governor, tmp_path, [{"messages": messages}], train=train)
    ids, mask = tokens[0]
    import tokenizers

    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    text = made.decode(ids[mask].tolist(), skip_special_tokens=False)
    assert text == wanted if wanted else mask.all()


def test_every_shape_of_line_is_read(governor, tmp_path):
    chats.make_tokenizer(tmp_path / "tokenizer")
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": 7},
            {"instruction": "a", "input": "", "output": "b", "meta": {"messages": [1]}},
            {"instruction": "a", "response": "b"},
            {"prompt": "a", "completion": "b"},
            {"text": "ab"}]
    files = tmp_path / "rows.jsonl"
    files.write_bytes("\ufeff".encode() + b"\r\n".join(json.dumps(row).encode() for row in rows))
    made = plimsoll.import_chat(files, tmp_path / "set", tokenizer=tmp_path / "tokenizer", governor=governor)
    tokens = plimsoll.TokenSet(tmp_path / "set")
    assert made["rows"] == 6
    for row in range(1, 4):
        assert tokens[row][0].tolist() == tokens[0][0].tolist()
        assert tokens[row][1].tolist() == tokens[0][1].tolist()
    assert tokens[4][1].tolist() == [False, True, True]  # The completion, and the end of the sequence.
    assert tokens[5][1].all() and tokens[5][0][-1] == 1


BAD = [(b"{", "not JSON"), (b"[1]", "not a JSON object"), (b'{"text": "\xff"}', "not UTF-8"),
       (b'{"a": 1}', "none of messages, conversations, instruction and output, prompt and completion, text"),
       (b'{"messages": []}', "no messages"),
       (b'{"messages": [1]}', "a message that is no object with a role and content"),
       (b'{"messages": [{"role": "user"}]}', "a message that is no object with a role and content"),
       (b'{"messages": [{"role": "king", "content": "a"}]}', "unknown role: king"),
       (b'{"text": "' + b"a" * 5000 + b'"}', "longer than line_bytes_max")]


@pytest.mark.parametrize("line, what", BAD)
def test_what_is_wrong_is_refused_with_its_line_and_counted_within_the_budget(governor, tmp_path, line, what):
    chats.make_tokenizer(tmp_path / "tokenizer")
    good = b'{"prompt": "a", "completion": "b"}'
    files = tmp_path / "rows.jsonl"
    files.write_bytes(good + b"\n\n" + line + b"\n" + good)
    options = {"tokenizer": tmp_path / "tokenizer", "line_bytes_max": 4096, "governor": governor}
    with pytest.raises(ValueError) as caught:
        plimsoll.import_chat(files, tmp_path / "set", **options)
    assert str(caught.value).startswith(f"{files}:3: {what}")
    assert "have more lines left out with errors_max (--errors-max)" in str(caught.value)
    made = plimsoll.import_chat(files, tmp_path / "set", errors_max=1, **options)
    assert made["rows"] == 2
    odd = made["about"]["odd"]
    assert odd.pop("blank_lines")["first"] == ["rows.jsonl:2"] and odd.pop("duplicates")["count"] == 1
    assert [entry["first"] for entry in odd.values()] == [["rows.jsonl:3"]]


ANSWERED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
STRICT = ("{% for m in messages %}{% if m.content | length > 100 %}{{ raise_exception('too long') }}{% endif %}"
          "<|start|>{{ m.role }}:{{ m.content }}<|eot|>{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
          "{% if add_generation_prompt %}<|start|>assistant:{% endif %}")


@pytest.mark.parametrize("line, what", [
    (json.dumps({"messages": ANSWERED, "tools": "search"}), "the row, or its tools, are no JSON"),
    (json.dumps({"messages": ANSWERED, "tools": json.dumps(["\ud800"])}), "surrogates not allowed"),
    ('{"messages": [{"role": "user", "content": ' + "[" * 5000 + "]" * 5000 + "}]}", "maximum recursion depth"),
    (json.dumps({"messages": [{"role": "user", "content": "a" * 101}, ANSWERED[1]]}), "too long")])
def test_what_a_template_refuses_names_its_line(governor, tmp_path, line, what):
    chats.make_tokenizer(tmp_path / "tokenizer", STRICT)
    good = json.dumps({"messages": ANSWERED})
    files = tmp_path / "rows.jsonl"
    files.write_text(line + "\n" + good)  # The first row of those that pieces render is rendered by the template, too.
    options = {"tokenizer": tmp_path / "tokenizer", "governor": governor, "train": "all"}
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: the chat template refused it: .*{what}"):
        plimsoll.import_chat(files, tmp_path / "set", **options)
    made = plimsoll.import_chat(files, tmp_path / "set", errors_max=1, **options)
    assert made["rows"] == 1 and made["about"]["odd"]["template"]["first"] == ["rows.jsonl:1"]


def test_m10_rows_without_a_trained_token_are_counted_and_left_out(governor, tmp_path):
    chats.make_tokenizer(tmp_path / "tokenizer")
    question = {"messages": [{"role": "user", "content": "a " * 50}, {"role": "assistant", "content": "b"}]}
    rows = [question, {"messages": question["messages"][:1]}, {"prompt": "a", "completion": "b"}]
    tokens, made = imported(governor, tmp_path, rows, max_length=20)
    odd = made["about"]["odd"]
    assert odd["nothing_trained"]["first"] == ["rows.jsonl:1"] and odd["no_assistant"]["first"] == ["rows.jsonl:2"]
    assert len(tokens) == 1 and tokens[0][1].any()
    assert all(mask.any() for _, mask in tokens)


def test_t5_max_length_is_what_rows_are_cut_at(governor, tmp_path):
    chats.make_tokenizer(tmp_path / "tokenizer")
    rows = [{"messages": chats.chat(random.Random(k))} for k in range(30)]
    whole, _ = imported(governor, tmp_path, rows)
    lengths = [whole.length(k) for k in range(30)]
    cut, made = imported(governor, tmp_path, rows, max_length=64)
    assert cut.longest_row == 64 and made["about"]["options"]["max_length"] == 64
    odd = made["about"]["odd"]
    left_out = odd.get("nothing_trained", {"count": 0})["count"]
    assert odd["cut"]["count"] + left_out == sum(length > 64 for length in lengths)


def test_a_second_import_is_done_at_once_and_changed_options_or_inputs_are_not(governor, tmp_path):
    chats.make_tokenizer(tmp_path / "tokenizer")
    rows = [{"messages": chats.chat(random.Random(k))} for k in range(5)]
    _, first = imported(governor, tmp_path, rows)
    before = os.stat(tmp_path / "set").st_mtime_ns
    assert first["reused"] is False
    assert imported(governor, tmp_path, rows)[1]["reused"] is True
    assert os.stat(tmp_path / "set").st_mtime_ns == before
    assert imported(governor, tmp_path, rows, train="all")[1]["reused"] is False
    assert imported(governor, tmp_path, rows[:4], train="all")[1]["rows"] == 4
    chats.make_tokenizer(tmp_path / "tokenizer", "marked")
    assert imported(governor, tmp_path, rows[:4], train="all")[1]["reused"] is False
    assert not (tmp_path / "set.partial").exists()


def test_packed_files_give_the_same_rows(governor, tmp_path):
    chats.make_tokenizer(tmp_path / "tokenizer")
    rows = [{"messages": chats.chat(random.Random(k))} for k in range(50)]
    plain, _ = imported(governor, tmp_path, rows)
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    plimsoll.import_chat([packed, tmp_path / "rows.jsonl"], tmp_path / "two", tokenizer=tmp_path / "tokenizer",
                         governor=governor)
    two = plimsoll.TokenSet(tmp_path / "two")
    assert len(two) == 100
    for row in range(50):
        assert two[row][0].tolist() == two[row + 50][0].tolist() == plain[row][0].tolist()
    packed.write_bytes(packed.read_bytes()[:-30])
    with pytest.raises(plimsoll.CorruptError, match="rows.jsonl.gz:"):
        plimsoll.import_chat(packed, tmp_path / "cut", tokenizer=tmp_path / "tokenizer", governor=governor)


def test_a_chat_far_beyond_a_piece_has_the_ids_of_the_whole(governor, tmp_path):
    pytest.importorskip("transformers")
    folder = chats.make_tokenizer(tmp_path / "tokenizer")
    numbers = random.Random(9)
    long = chats.chat(numbers, turns=1)[-2:] * 4000
    rows = [[*long, *chats.chat(numbers, system=False)], long[:2]]
    tokens, _ = imported(governor, tmp_path, [{"messages": row} for row in rows])
    assert (tmp_path / "rows.jsonl").stat().st_size > 400_000
    compare(tokens, folder, rows)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: a message longer than text_bytes_max"):
        imported(governor, tmp_path, [{"prompt": "a", "completion": "b" * 3000}], text_bytes_max=2000)


def test_the_date_is_asked_for(governor, tmp_path):
    template = chats.TEMPLATES["chatml"].replace("{% for", "{{ strftime_now('%d %b %Y') }}{% for", 1)
    chats.make_tokenizer(tmp_path / "tokenizer", template)
    rows = [{"messages": chats.chat(random.Random(1))}]
    with pytest.raises(ValueError, match="the template asks for the date"):
        imported(governor, tmp_path, rows)
    assert imported(governor, tmp_path, rows, date="2026-01-31")[1]["rows"] == 1


PROGRAM = """
import sys
import plimsoll
from plimsoll.data.importers import _chat_import
_chat_import._COMMIT_BYTES = 20_000
_chat_import._PIECE_BYTES = 8_000
files, out, tokenizer, limit = sys.argv[1:]
made = plimsoll.import_chat(files, out, tokenizer=tokenizer, governor=plimsoll.Governor(limit))
assert "torch" not in sys.modules and "transformers" not in sys.modules
print(made["rows"])
"""


def run(arguments, crash="", timeout=120):
    environment = os.environ | {"PLIMSOLL_CRASH": crash, "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run([sys.executable, "-c", PROGRAM, *map(str, arguments)], env=environment, timeout=timeout,
                          capture_output=True, text=True)


def test_killed_anywhere_it_goes_on_to_the_same_bytes(tmp_path):
    chats.make_tokenizer(tmp_path / "tokenizer")
    files = chats.write_lines(tmp_path / "rows.jsonl", [{"messages": chats.chat(random.Random(k % 150))}
                                                        for k in range(300)])
    whole = run([files, tmp_path / "whole", tmp_path / "tokenizer", "512MiB"])
    assert whole.returncode == 0, whole.stderr
    killed = 0
    for crash in (9, 20, 40):
        killed += run([files, tmp_path / "set", tmp_path / "tokenizer", "256MiB"], f"*:{crash}").returncode == \
            -signal.SIGKILL
    assert killed == 3
    assert run([files, tmp_path / "set", tmp_path / "tokenizer", "1GiB"]).returncode == 0
    assert (tmp_path / "set").read_bytes() == (tmp_path / "whole").read_bytes()
    assert not (tmp_path / "set.partial").exists()


DATA = pathlib.Path(__file__).parents[3] / "shared" / "data" / "text"


def real_rows():
    rows = []
    for name in ("gpteacher/codegen-instruct.json", "llama_factory_demos/alpaca_en_demo.json",
                 "llama_factory_demos/alpaca_zh_demo.json", "llama_factory_demos/identity.json"):
        for row in json.loads((DATA / name).read_text(encoding="utf-8")):
            question = row["instruction"] + ("\n" + row["input"] if row.get("input") else "")
            rows.append([{"role": "user", "content": question},
                         {"role": "assistant", "content": row.get("response") or row["output"]}])
    for line in (DATA / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.append([{"role": "system", "content": "Think."}, {"role": "user", "content": row["question"]},
                     {"role": "assistant", "content": row["answer"]}])
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tok_llama3", "tok_gpt2"])
def test_real_chats_have_the_ids_of_real_tokenizers(governor, tmp_path, name):
    pytest.importorskip("transformers")
    if not DATA.is_dir():
        pytest.skip("needs ../shared/data/text")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for file in (DATA / name).glob("tokenizer*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    if not (folder / "tokenizer_config.json").exists():
        (folder / "tokenizer_config.json").write_text(json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>",
             "chat_template": chats.TEMPLATES["chatml"]}), encoding="utf-8")
    rows = real_rows()
    tokens, made = imported(governor, tmp_path, [{"messages": row} for row in rows], date="2026-01-31")
    assert made["rows"] == len(rows) and made["about"]["compiled"] is True
    compare(tokens, folder, rows)


def command(*arguments):
    return subprocess.run([sys.executable, "-c", "import sys, plimsoll.cli._program as p; sys.exit(p.main())", "import",
                           "chat", *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_the_command_makes_the_set_and_says_what_is_wrong(tmp_path):
    chats.make_tokenizer(tmp_path / "tokenizer")
    files = chats.write_lines(tmp_path / "rows.jsonl", [{"messages": chats.chat(random.Random(k))} for k in range(5)])
    options = ["--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "set", "--memory-limit", "512MiB"]
    made = command(files, *options)
    assert made.returncode == 0 and f"token set {tmp_path / 'set'}\n  rows      5, " in made.stdout, made.stderr
    again = command(files, *options, "--json")
    assert json.loads(again.stdout)["reused"] is True
    files.write_text("{\n", encoding="utf-8")
    wrong = command(files, *options)
    assert wrong.returncode == 1 and wrong.stderr.startswith(f"plimsoll: error: {files}:1: not JSON")
    assert command(files, "--out", "x").returncode == 2
