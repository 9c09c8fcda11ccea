# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers with chat templates, and chats to import, for tests of token sets."""
import json
import pathlib
import random

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
        " + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"),
    "default_system": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}"),
    "trimmed": (
        "{{ bos_token }}{% for message in messages %}{% set content = '<|start|>' + message['role'] + '<|end|>\n\n' + "
        "message['content'] | trim + '<|eot|>' %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"),
    "alternating": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}{% else %}{{ ' ' + message['content'].strip() + ' ' "
        "+ eos_token }}{% endif %}{% endfor %}"),
    "thinking": (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% set content = message.content %}"
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{{ '<|im_start|>assistant\n' }}{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ content }}"
        "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"),
    "marked": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"),
}
_SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]
_WORDS = (
    "the of and to in that was his he it with is for as had you not be her on at by which have or from this "
    "naïve café 東京 日本語 😀 don't can't 3.14 100 def return\n if: \n\n\t — “so” Ünïcödé e\u0301").split(" ")


def text(numbers: random.Random, most: int = 40) -> str:
    words = " ".join(numbers.choice(_WORDS) for _ in range(numbers.randrange(1, most)))
    return numbers.choice(["", " ", "\n", ""]) + words + numbers.choice(["", "", " ", "\n\n", "."])


def make_tokenizer(folder: pathlib.Path, template: str | None = "chatml", family: str = "bytes",
                   lines: list[str] | None = None, vocabulary: int = 600) -> pathlib.Path:
    """Trains a small tokenizer into a folder as transformers saves one. Families: bytes, metaspace, words."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    numbers = random.Random(5)
    lines = lines or [text(numbers) for _ in range(400)]
    if family == "bytes":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=_SPECIAL, show_progress=False,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    elif family == "metaspace":
        made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=_SPECIAL, show_progress=False)
    else:
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=_SPECIAL, show_progress=False)
    made.train_from_iterator(lines, trainer)
    if family == "metaspace":
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
            "unk_token": "<unk>"}
    if template is not None:
        said["chat_template"] = TEMPLATES.get(template, template)
    (folder / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
    return folder


def chat(numbers: random.Random, system: bool = True, turns: int = 4, most: int = 40) -> list[dict]:
    messages = [{"role": "system", "content": text(numbers, most)}] if system and numbers.random() < 0.5 else []
    for _ in range(numbers.randrange(1, turns + 1)):
        messages += [{"role": "user", "content": text(numbers, most)},
                     {"role": "assistant", "content": text(numbers, most)}]
    return messages


def write_lines(path: pathlib.Path, rows) -> pathlib.Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def reference(folder: pathlib.Path):
    """The tokenizer as transformers has it."""
    import transformers

    return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
