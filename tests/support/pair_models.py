# SPDX-License-Identifier: Apache-2.0
"""Tiny models of images and texts with random weights, with tokenizer and image processor, as a hub has them."""
import json
import pathlib

from tests.support import chats

_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {**_SIZES, "vocab_size": 600, "max_position_embeddings": 12, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
_VISION = {**_SIZES, "image_size": 32, "patch_size": 8}


def make_pair_model(folder: pathlib.Path, kind: str = "clip", seed: int = 3) -> pathlib.Path:
    """kind: "clip" or "siglip"."""
    import torch
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    before = torch.get_rng_state()
    torch.manual_seed(seed)
    if kind == "clip":
        made = transformers.CLIPModel(transformers.CLIPConfig(text_config=_TEXT, vision_config=_VISION, projection_dim=12))
        processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    else:
        made = transformers.SiglipModel(transformers.SiglipConfig(text_config=_TEXT, vision_config=_VISION))
        processor = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    torch.set_rng_state(before)
    made.save_pretrained(folder)
    processor.save_pretrained(folder)
    chats.make_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "</s>",
                                                                "model_input_names": ["input_ids", "attention_mask"]}))
    return folder
