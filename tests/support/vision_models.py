# SPDX-License-Identifier: Apache-2.0
"""Tiny models of images and text with random weights, and pictures of one colour with captions, for tests of `vision`."""
import io
import pathlib
import random

from tests.support import chats

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "white": (240, 240, 240)}
_QWEN2_VL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
_SMOLVLM = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
            *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))]
TEMPLATES = {
    "qwen2_vl":
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}"
        "{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}",
    # A turn begins with its role, a blank before each text, and ends with a token of its own, as SmolVLM's do.
    "smolvlm":
        "{{ '<|im_start|>' }}{% for message in messages %}{{ message['role'] | capitalize + ':' }}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ ' ' + part['text'] }}"
        "{% endif %}{% endfor %}{{ '<end_of_utterance>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"}
TEMPLATES["idefics3"] = TEMPLATES["smolvlm"]
TEMPLATES["fast_vlm"] = TEMPLATES["qwen2_vl"].replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
KINDS = tuple(TEMPLATES)
ENDS = {kind: "<end_of_utterance>" if "<end_of_utterance>" in template else "<|im_end|>" for kind, template in TEMPLATES.items()}
"""What the assistant's text is followed by."""


def make_model(folder: pathlib.Path, kind: str = "qwen2_vl", width: int = 32, layers: int = 2) -> pathlib.Path:
    """A model with its processor, as a hub has one."""
    import torch
    import transformers

    special = {"qwen2_vl": _QWEN2_VL, "fast_vlm": ["<image>"]}.get(kind, _SMOLVLM)
    lines = [f'a {colour} picture {{"colour": "{colour}", "size": null}}' for colour in COLOURS]
    chats.make_tokenizer(folder, TEMPLATES[kind], lines=lines, vocabulary=340)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.pad_token = "</s>"
    tokenizer.save_pretrained(folder)
    text = {"vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0,
            "eos_token_id": 1, "pad_token_id": 1}
    made = {"qwen2_vl": _qwen2_vl, "fast_vlm": _fast_vlm}.get(kind, _smolvlm)
    config = made(folder, kind, text, tokenizer.convert_tokens_to_ids(special))
    before = torch.get_rng_state()
    torch.manual_seed(11)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    torch.set_rng_state(before)
    return folder


def _qwen2_vl(folder: pathlib.Path, _: str, text: dict, ids: list[int]):
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=256,
                             max_pixels=1024).save_pretrained(folder)
    image, video, start, end = ids
    width = text["hidden_size"]
    rope = {"rope_type": "default", "mrope_section": [width // 32, width // 32, width // 16], "rope_theta": 10000.0}
    return transformers.Qwen2VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": width, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
                       "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end)


def _smolvlm(folder: pathlib.Path, kind: str, text: dict, ids: list[int]):
    """Images of 32 to 64 pixels, in pieces of 32, of 4 tokens each."""
    import importlib
    import json

    import transformers

    name = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[kind]
    module = importlib.import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
    getattr(module, f"{name}ImageProcessorPil")(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}).save_pretrained(
        folder)
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 4, "processor_class": f"{name}Processor"}),
                                                  encoding="utf-8")
    return getattr(transformers, f"{name}Config")(
        text_config={"model_type": "llama", **text}, image_token_id=ids[0], scale_factor=2, pad_token_id=1,
        tie_word_embeddings=False,
        vision_config={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                       "image_size": 32, "patch_size": 8})


def _fast_vlm(folder: pathlib.Path, _: str, text: dict, ids: list[int]):
    """A convolutional network with batch norms, of images of 16 pixels, and a Llama."""
    import json

    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(
        {"processor_class": "LlavaProcessor", "patch_size": 4, "vision_feature_select_strategy": "full"}), encoding="utf-8")
    sees = transformers.EfficientNetConfig(
        width_coefficient=0.25, depth_coefficient=1.0, hidden_dim=320, hidden_size=320, drop_connect_rate=0.0, kernel_sizes=[3],
        in_channels=[32], out_channels=[32], strides=[2], num_block_repeats=[1], expand_ratios=[1], image_size=16)
    return transformers.FastVlmConfig(vision_config=sees.to_dict(), text_config={"model_type": "llama", **text},
                                      image_token_index=ids[0])


def rows(count: int, seed: int = 0, answer=lambda colour: f"a {colour} picture",
         text=lambda k: "what?") -> list[dict]:
    """Pictures of one colour and some noise, and what they are of."""
    import numpy as np
    from PIL import Image

    made, dice = [], random.Random(seed)
    for k in range(count):
        colour = dice.choice(sorted(COLOURS))
        noise = np.random.default_rng(seed * 1000 + k).integers(-15, 16, (dice.choice([24, 32, 40]), dice.choice([24, 32]), 3))
        packed = io.BytesIO()
        Image.fromarray(np.clip(noise + COLOURS[colour], 0, 255).astype(np.uint8)).save(packed, "PNG")
        made.append({"text": text(k), "image": {"bytes": packed.getvalue()}, "response": answer(colour)})
    return made


def make_set(out: pathlib.Path, count: int = 40, **options) -> pathlib.Path:
    import plimsoll

    with plimsoll.Governor("4GiB") as governor:
        plimsoll.import_vision(rows(count, **options), out, governor=governor)
    return out
