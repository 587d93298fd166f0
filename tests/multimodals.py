"""Tiny random multimodal models, with weights of a size that makes a wrong matrix show in the logits."""

import json

import torch

from madetokenizers import byte_level, save

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 288, "num_attention_heads": 4,
    "max_position_embeddings": 128, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 2,
}  # fmt: skip
IMAGE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
    "image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_key_value_heads": 2,
    "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0],
}  # fmt: skip
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
QWEN = {"image_token_id": 287, "video_token_id": 286, "vision_start_token_id": 285, "vision_end_token_id": 284}
GATED = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": [LINEAR, FULL],
}  # fmt: skip
SOUND = {"audio_config": None, "image_token_id": 287, "video_token_id": 286, "audio_token_id": 285}
PER_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 288, "num_kv_shared_layers": 0}
KINDS = {
    "gemma3": (
        {"query_pre_attn_scalar": 16, "sliding_window": 8},
        {},
        {"mm_tokens_per_image": 4, "image_token_index": 287},
    ),
    "gemma4": (
        {**PER_LAYER, "layer_types": [SLIDING, FULL], "sliding_window": 8},
        {"model_type": "gemma4_vision"},
        SOUND,
    ),
    "llama4": (
        {"intermediate_size_mlp": 96, "num_local_experts": 3, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
        {"vision_output_dim": 64, "projector_input_dim": 32, "projector_output_dim": 64},
        {"image_token_index": 287, "boi_token_index": 286, "eoi_token_index": 285},
    ),
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}, {"image_token_index": 287}),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral"}, {"image_token_index": 287}),
    "qwen2_5_vl": ({"rope_parameters": SECTIONS}, {}, QWEN),
    "qwen3_vl": ({"rope_parameters": {**SECTIONS, "mrope_interleaved": True}}, {}, QWEN),
    "qwen3_5": (GATED, {}, QWEN),
}


def multimodal(kind, path, dtype=torch.float32):
    """A model of a kind, saved to a directory; also the model."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, image, top = KINDS[kind]
    config = AutoConfig.for_model(kind, text_config={**TEXT, **text}, vision_config={**IMAGE, **image}, **top)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        enliven(model)
    model.to(dtype).save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "PixtralImageProcessor"}))
    return save(byte_level(), path), model


def enliven(model):
    """Give matrices values of the size of their inputs' inverse root, and norms values that differ."""
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "conv" not in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif "norm" in name and name.endswith("weight"):
            parameter.data += 0.1 * torch.randn(parameter.shape)
