# SPDX-License-Identifier: Apache-2.0
"""What benchmarks on chats share: template and tokenizer, sides that run in processes of their own, and the end."""
import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable

# As ChatML, and it marks what the assistant says.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer_of(texts: Iterable[str], vocabulary: int):
    """A byte-level BPE (tokenizers.Tokenizer) trained on them."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False,
                                                        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return made


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds --smoke, --directory, --keep and --side, which run() and one_side() use."""
    parser.add_argument("--smoke", action="store_true", help="seconds; only the answer counts")
    parser.add_argument("--directory", help="where to work [a temporary folder]")
    parser.add_argument("--keep", action="store_true", help="work in --directory itself, and leave what is made there")
    parser.add_argument("--side", help=argparse.SUPPRESS)


def one_side(side: str, words: list, work: pathlib.Path, *, threads: int, keep: str = "") -> dict:
    """What a side says: this benchmark run again with `words`, in a folder of its own; `keep`: its name, where it is to stay."""
    place = pathlib.Path(tempfile.mkdtemp(dir=work))
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads),
                                "RAYON_NUM_THREADS": str(threads)}
    command = [sys.executable, sys.argv[0], "--side", side, "--directory", place, *words]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True,
                          check=False)
    if done.returncode:
        sys.exit(f"{pathlib.Path(sys.argv[0]).resolve().parent.name}: {side} ended with status {done.returncode}: "
                 f"{done.stderr[-2000:]}")
    if keep:
        place.rename(work / keep)
    else:
        shutil.rmtree(place)
    return json.loads(done.stdout.splitlines()[-1])


def run(options: argparse.Namespace, side: Callable[[], dict], compare: Callable[[pathlib.Path], dict]) -> int:
    """The end of main(): of a side what it says, else the result, made in a folder; returns the exit status."""
    if options.side:
        print(json.dumps(side()))
        return 0
    with (contextlib.nullcontext(options.directory) if options.keep else tempfile.TemporaryDirectory(dir=options.directory)) as work:
        result = compare(pathlib.Path(work))
    print(json.dumps(result))
    return 0 if result["pass"] else 1
