# SPDX-License-Identifier: Apache-2.0
"""The table of docs/guide/gpu.md: what models of Qwen2.5's shapes take, by the estimate that `profile = "auto"` chooses by.

    PYTHONPATH=build/dev/python .venv/bin/python -m tests.support.what_fits
"""
import pathlib
import tempfile

from plimsoll.recipes.chat import Options
from plimsoll.recipes.tuning import _choice

GIB = 1 << 30
CARD = 22  # GiB that a card of 24 GB leaves a run.
TOKENS = 152_000
# Hidden size, that of its MLP, layers, heads, heads of keys; whether the head is the embedding.
SHAPES = {"1.5B": (1536, 8960, 28, 12, 2, True), "3B": (2048, 11008, 36, 16, 2, True), "7B": (3584, 18944, 28, 28, 4, False),
          "14B": (5120, 13824, 48, 40, 8, False), "32B": (5120, 27648, 64, 40, 8, False)}
# Words of the table, method, base, place of weights.
WAYS = (("all weights", "full", "as-saved", "resident"), ("adapters", "lora", "as-saved", "resident"),
        ("adapters, streamed", "lora", "as-saved", "streamed"), ("adapters, `nf4`", "lora", "nf4", "resident"),
        ("adapters, `nf4`, streamed", "lora", "nf4", "streamed"))
BATCHES = ((1, 2048), (4, 2048), (1, 8192))


def config(folder: pathlib.Path, shape: tuple) -> pathlib.Path:
    """A model's folder without weights."""
    import transformers

    hidden, inner, layers, heads, keys, tied = shape
    transformers.Qwen2Config(vocab_size=TOKENS, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                             num_key_value_heads=keys, tie_word_embeddings=tied, dtype="bfloat16", use_cache=False).save_pretrained(folder)
    return folder


def sizes(folder: pathlib.Path, method: str, base: str, rows: int, length: int) -> _choice._Sizes:
    """As `profile = "auto"` counts them."""
    options = Options(data="", out="", model=str(folder), batch_size=rows, sequence_length=length, base=base, lora_r=16, lora_targets="all-linear",
                      dtype="bfloat16")
    return _choice._Sizes.of(type(options), tuple(vars(options).items()), method)


def host(name: str, made: _choice._Sizes, method: str, place: str) -> str:
    """GiB of host memory for weights."""
    hidden, inner = SHAPES[name][:2]
    if method == "full":  # Loaded whole.
        return f"{made.weights / GIB:.1f}"
    largest = 2 * hidden * max(TOKENS, inner)  # Of its parameters, which are read one after another.
    if place == "resident":
        return f"{largest / GIB:.1f}"
    least = max(largest, 2 * made.largest_block)
    return f"{least / GIB:.1f} to {(least + made.blocks) / GIB:.1f}"


def row(folder: pathlib.Path, name: str, words: str, method: str, base: str, place: str) -> str:
    """A line of the table, of a model in the folder."""
    def figure(made: _choice._Sizes, anew: bool) -> str:
        needed = made.needed(place, anew) / GIB
        return f"**{needed:.1f}**" if needed <= CARD else f"{needed:.1f}"

    first, *more = (sizes(folder, method, base, *batch) for batch in BATCHES)
    kept = "" if place == "streamed" else f"{figure(first, False)} / "  # Streamed blocks run again.
    return f"| {name} | {words} | {kept}{' | '.join(figure(one, True) for one in (first, *more))} | {host(name, first, method, place)} |"


def table(names=tuple(SHAPES)):
    """Its lines, model by model."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            model = config(pathlib.Path(folder, name), SHAPES[name])
            for way in WAYS:
                yield row(model, name, *way)


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
