# SPDX-License-Identifier: Apache-2.0
"""What the program says: the first wrong word, and helps that are understood alone."""
import json
import re
import subprocess
import sys

import pytest


@pytest.fixture
def call(program):
    def run(*arguments, **options) -> subprocess.CompletedProcess:
        return subprocess.run([program, *map(str, arguments)], text=True, capture_output=True,
                              timeout=120, check=False, **options)
    return run


@pytest.mark.parametrize("words, told", [
    ("train cosri --data x", "unknown command 'cosri'; did you mean cosir?"),
    ("trian cosir", "unknown command 'trian'; did you mean train?"),
    ("import imgs/ --out dd", "unknown command 'imgs/'; there are cosir, can"),
    ("run --memory-limit 500MiB --", "COMMAND is required"),
    ("run --memory-limit 500MiB", "COMMAND is required"),
    ("train cosir --epoch 3", "unknown option '--epoch'; did you mean --epochs?"),
    ("import cosir more --outt x", "'more' is one word too many"),
    ("resume RUN --bits 3", "unknown option '--bits'"),
    ("store --jsn info x", "unknown option '--jsn'"),
])
def test_r62_the_first_wrong_word_is_blamed(call, tmp_path, words, told):
    done = call(*words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr.splitlines()[0], done.stderr


def test_r62_what_is_no_run_has_a_hint_at_info(call, tmp_path):
    for command in (["status"], ["stop"], ["resume"], ["limit"]):
        done = call(*command, tmp_path, *(["1GiB"] if command == ["limit"] else []))
        assert done.returncode == 1
        assert "no run there" in done.stderr and "`plimsoll info PATH`" in done.stderr, done.stderr
    assert "`plimsoll info" not in call("status", tmp_path / "nowhere").stderr


def test_r62_info_of_a_saved_file_does_not_contradict_itself(call, tmp_path):
    (tmp_path / "ckpt.pt").write_bytes(b"PK\x03\x04")
    done = call("info", tmp_path / "ckpt.pt")
    assert done.returncode == 1
    assert "ckpt.pt: a file of torch.save()" in done.stderr
    assert "knows" not in done.stderr and "plimsoll store import" in done.stderr


HELPS: dict[tuple[str, ...], str] = {}  # Each command's, which is asked for once.


def help_of(call, words: list[str]) -> str:
    if tuple(words) not in HELPS:
        HELPS[tuple(words)] = call(*words, "--help").stdout
    return HELPS[tuple(words)]


def commands_of(call) -> list[list[str]]:
    """Every command there is, groups too, by what the helps list."""
    found, open_ = [], [[]]
    while open_:
        words = open_.pop()
        text = help_of(call, words)
        for line in re.split(r"^(?:Subcommands|SUBCOMMANDS):", text, flags=re.M)[1:]:
            for name in re.findall(r"^  ([a-z][a-z-]*)\b", line.split("\n\n")[0], flags=re.M):
                if name not in ("chat", "vision"):
                    open_.append([*words, name])
        found.append(words)
    return found


def test_r62_a_commands_help_has_its_own_examples(call):
    commands = commands_of(call)
    assert ["train", "cosir"] in commands and ["store", "verify"] in commands, commands
    for words in commands:
        text = help_of(call, words)
        examples = text[text.rindex("Example"):]
        begin = "plimsoll " + " ".join(words)
        assert begin in examples, (words, examples)
        if words:
            assert "plimsoll status run/            from another shell" not in text


def options_of(text: str) -> dict[str, str]:
    """Option → help, of a --help; a help that wraps is one line again."""
    found, name = {}, None
    for line in text.splitlines():
        match = re.match(r"^  (-[-\w,]+|[A-Z]+) *(.*)$", line)
        if match:
            name = match[1]
            found[name] = match[2]
        elif name and re.match(r"^ {20,}\S", line):
            found[name] = (found[name] + " " + line.strip()).strip()
        else:
            name = None
    kinds = r"^(?:(?:[A-Z]{2,}\S*|in|\[[^\]]*\]|\{\S*\}|\.\.\.|Needs: \S+)(?: +|$))+"
    return {one: re.sub(kinds, "", text) for one, text in found.items()}


def test_r40_every_help_is_understood_alone(call):
    seen = 0
    for words in commands_of(call):
        for option, text in options_of(help_of(call, words)).items():
            seen += 1
            assert len(text.split()) >= 3, (words, option, text)
            assert not re.match(r"(The same|Of |As |Worth|Never|Which|Whose|That|Weight:|\d+:)",
                                text), (words, option, text)
    assert seen > 150


def test_r40_standard_words_are_used(call):
    text = call("train", "can-kd", "--help").stdout
    for words in ("Discount factor of the Q-network", "Replay buffer size",
                  "Softmax temperature for distillation", "Lowest exploration rate",
                  "Attention heads of each layer of the student classifier"):
        assert words in " ".join(text.split()), words


def test_r62_the_package_imports_torch_only_when_needed(tmp_path):
    code = ("import sys\nfrom plimsoll.cli._program import main\n"
            "status = main({!r})\nprint('torch' in sys.modules, status)")
    for words, status in ((["status", str(tmp_path)], 1), (["limits", "--json"], 0),
                          (["store", "info", str(tmp_path)], 1)):
        done = subprocess.run([sys.executable, "-c", code.format(words)], text=True,
                              capture_output=True, timeout=120, check=False)
        assert done.stdout.splitlines()[-1] == f"False {status}", done.stderr
    assert json.loads(subprocess.run([sys.executable, "-c", code.format(["limits", "--json"])],
                                     text=True, capture_output=True, timeout=120,
                                     check=True).stdout.splitlines()[0])["limit_bytes"] > 0
