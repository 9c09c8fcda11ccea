# SPDX-License-Identifier: Apache-2.0
"""Tiny language models with random weights, and sets of chats for them, for tests of the recipe `chat`."""
import json
import pathlib
import random

from tests.support import chats

# Of chats.make_tokenizer() 600 ids. By the type's name in transformers, and what its config has beside sizes.
KINDS = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": False}),  # Biases.
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8,
                                "final_logit_softcapping": 5.0}),  # More than a head's product.
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "gpt_neox": ("GPTNeoXConfig", {}),  # Pythia's. Its head has another name in files.
    "gpt2": ("GPT2Config", {}),  # Learned positions, dropout, linear maps that lie the other way.
    "granite": ("GraniteConfig", {"logits_scaling": 4.0}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "opt": ("OPTConfig", {"ffn_dim": 64}),
    "phi": ("PhiConfig", {}),  # A head with biases.
    "phi3": ("Phi3Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "smollm3": ("SmolLM3Config", {}),  # Layers without positions.
}
SCALED = ("gemma2", "granite")  # Whose logits are no mere product.


def make_model(folder: pathlib.Path, kind: str = "llama", layers: int = 2, width: int = 32, dtype: str = "float32",
               vocabulary: int = 600) -> pathlib.Path:
    """A model with its tokenizer, as a hub has one."""
    import torch
    import transformers

    name, more = KINDS[kind]
    config = getattr(transformers, name)(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=1, **more)
    before = torch.get_rng_state()
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    torch.set_rng_state(before)
    model.save_pretrained(folder)
    chats.make_tokenizer(folder)
    return folder


def make_wide_model(folder: pathlib.Path, text: pathlib.Path, *, width: int, layers: int) -> pathlib.Path:
    """A Llama of random bfloat16, written a block at a time, with a tokenizer of a file of chats."""
    import torch
    import transformers
    from safetensors.torch import save_file

    lines = [one["content"] for line in text.read_text(encoding="utf-8").splitlines() for one in json.loads(line)["messages"]]
    chats.make_tokenizer(folder, lines=lines, vocabulary=2000)
    config = transformers.LlamaConfig(
        vocab_size=2000, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=1, dtype="bfloat16")
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in transformers.LlamaForCausalLM(config).named_parameters()}
    generator, names = torch.Generator().manual_seed(1), list(shapes)
    for part in range(layers):
        save_file({name: torch.ones(shapes[name], dtype=torch.bfloat16) if len(shapes[name]) == 1 else
                   torch.empty(shapes[name], dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
                   for name in names[part::layers]}, folder / f"model-{part:02}.safetensors", metadata={"format": "pt"})
    where = {name: f"model-{part:02}.safetensors" for part in range(layers) for name in names[part::layers]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def make_tokens(out: pathlib.Path, tokenizer: pathlib.Path, rows: int = 60, most: int = 12, seed: int = 0) -> pathlib.Path:
    """A token set of so many short chats."""
    import plimsoll  # The demo makes models without it.

    lines = [{"messages": chats.chat(random.Random(f"{seed} {k}"), most=most, turns=2)} for k in range(rows)]
    chats.write_lines(out.with_suffix(".jsonl"), lines)
    with plimsoll.Governor("4GiB") as governor:
        plimsoll.import_chat(out.with_suffix(".jsonl"), out, tokenizer=tokenizer, governor=governor)
    return out
