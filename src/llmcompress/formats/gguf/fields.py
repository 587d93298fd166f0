"""Keys of a GGUF file that say just what a field of config.json says: their names, without the architecture."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.hyper import number
from llmcompress.formats.gguf.keys import Key, f32, flag, flags, u32

GRANITE = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
"""The fields of all of Granite's models."""

_WHOLE = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "num_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "sliding_window": "attention.sliding_window",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "conv_L_cache": "shortconv.l_cache",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_NUMBER = {
    **dict.fromkeys(
        ("routed_scaling_factor", "moe_routed_scaling_factor", "router_scaling_factor"), "expert_weights_scale"
    ),
    "logit_scale": "logit_scale",
    "logits_scaling": "logit_scale",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "final_logit_softcapping": "final_logit_softcapping",
    "clip_qkv": "attention.clamp_kqv",
}
_FLAG = {
    "norm_topk_prob": "expert_weights_norm",
    "use_parallel_residual": "use_parallel_residual",
}


def told(arch: str, config: Mapping[str, Any], fields: Sequence[str]) -> list[Key]:
    """The keys that say what `fields` of a config.json say, without those that it leaves out.

    Kinds of layers are told where there is a window. CheckpointError for a value of another kind.
    """
    whole = config.get("sliding_window") is None
    stated = [field for field in fields if config.get(field) is not None and not (whole and field == "layer_types")]
    return [_key(f"{arch}.", config, field) for field in stated]


def _key(prefix: str, config: Mapping[str, Any], field: str) -> Key:
    value = config[field]
    if field == "layer_types":
        return flags(f"{prefix}attention.sliding_window_pattern", (kind == "sliding_attention" for kind in value))
    if field in _NUMBER:
        return f32(prefix + _NUMBER[field], number(config, field))
    if field in _FLAG and isinstance(value, bool):
        return flag(prefix + _FLAG[field], value)
    if field in _WHOLE and isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31:
        return u32(prefix + _WHOLE[field], value)
    raise CheckpointError(f"config.json: {field} is {value!r}, which no key of a GGUF file can say")
