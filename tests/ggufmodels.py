"""Tiny models of the families that GGUF files are written of: what is special in their configs, by model type."""

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

MAY_BE_NONE = ("sliding_window", "n_group", "topk_group")
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SECTIONED = {
    "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
TRUNCATED = {  # of yarn, as llama.cpp computes it; the published models do without
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True,
}  # fmt: skip
SLOWED = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
INDEX = {"index_n_heads": 4, "index_head_dim": 64, "index_topk": 64}
PERIOD = [SLIDING, SLIDING, SLIDING, FULL]
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_hidden_size", "shared_intermediate_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"), 1),
    "vocab_size": 96, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_chunk_size": 16,
    "mamba_expand": 2, "mamba_dt_rank": 8, "mamba_d_ssm": 128, "n_groups": 1, "chunk_size": 16, "rotary_dim": 8,
    "hidden_size_per_layer_input": 16, "laurel_rank": 8,
    "vocab_size_per_layer_input": 96, "num_nextn_predict_layers": 0,
    "attention_chunk_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    # dense
    "gemma": {}, "olmo": {}, "olmo3": {"num_hidden_layers": 4, "layer_types": PERIOD},
    "smollm3": {"num_hidden_layers": 4}, "granite": {}, "cohere": {},
    "cohere2": {"num_hidden_layers": 4, "layer_types": PERIOD}, "glm": {}, "glm4": {},
    "phi": {"num_key_value_heads": 4, "intermediate_size": 256}, "starcoder2": {}, "stablelm": {},
    "exaone4": {"sliding_window": None, "layer_types": [FULL] * 2}, "ernie4_5": {}, "hunyuan_v1_dense": {},
    "seed_oss": {}, "arcee": {}, "nemotron": {},
    "iquestcoder": {}, "jais2": {}, "apertus": {"rope_parameters": SLOWED},
    "internlm3": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 6.0}},
    # experts
    "olmoe": {"num_key_value_heads": 4}, "qwen2_moe": {}, "granitemoe": {}, "granitemoeshared": {},
    "dots1": {"num_key_value_heads": 4}, "glm4_moe": {},
    "ernie4_5_moe": {"num_hidden_layers": 3, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
    "hunyuan_v1_moe": {}, "minimax_m2": {"intermediate_size": 32},
    "exaone_moe": {"num_hidden_layers": 4, "layer_types": PERIOD, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "afmoe": {"num_hidden_layers": 4, "layer_types": PERIOD, "mup_enabled": True}, "solar_open": {},
    "minimax_m3_vl_text": {
        "num_hidden_layers": 3, "mlp_layer_types": ["dense", *["sparse"] * 2], "intermediate_size": 32,
        "dense_intermediate_size": 96, "shared_intermediate_size": 32,
        "layer_types": [FULL, *["minimax_m3_sparse"] * 2], "index_n_heads": 2,
        "index_head_dim": 16, "index_block_size": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "mellum": {
        "num_hidden_layers": 4, "layer_types": PERIOD, "mlp_layer_types": ["sparse"] * 4,
        "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 150000.0}},
    },
    "hy_v3": {"num_hidden_layers": 3},
    "minimax": {
        "num_hidden_layers": 4, "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
        **dict.fromkeys(("full_attn_alpha_factor", "linear_attn_alpha_factor", "mlp_alpha_factor"), 1.75),
    },
    "cohere2_moe": {"num_hidden_layers": 4, "layer_types": PERIOD},
    "granite_swa": {
        "num_hidden_layers": 4, "layer_types": PERIOD, "layer_rope_theta": [10000.0, 0.0, 10000.0, 10000.0],
    },
    "granitemoe_swa": {"num_hidden_layers": 4, "layer_types": PERIOD},
    "mimo_v2_flash": {
        "num_hidden_layers": 4, "layer_types": [FULL, *PERIOD[:3]], "mlp_layer_types": ["dense", *["sparse"] * 3],
        "num_key_value_heads": 1,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    },
    "laguna": {
        "num_hidden_layers": 4, "layer_types": [FULL, *PERIOD[:3]], "num_attention_heads_per_layer": [4, 2, 2, 2],
        "rope_parameters": {
            FULL: {**YARN, "partial_rotary_factor": 0.5}, SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    # state space models and convolutions
    "mamba": {"intermediate_size": 128, "state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"intermediate_size": 128, "state_size": 8, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, FULL, LINEAR]},
    "nemotron_h": {
        "num_hidden_layers": 4, "layers_block_type": [LINEAR, "moe", FULL, "moe"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 8, "moe_shared_expert_intermediate_size": 32,
    },
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [2]},
    "falcon_h1": {
        "head_dim": 16, "mamba_n_groups": 2, "embedding_multiplier": 1.7, "lm_head_multiplier": 0.6,
        "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.9, "key_multiplier": 0.7,
        "mlp_multipliers": [1.9, 0.8], "ssm_in_multiplier": 1.4, "ssm_out_multiplier": 1.1,
        "ssm_multipliers": [0.55, 1.25, 1.6, 0.65, 1.15],
    },
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", FULL, "conv"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", FULL, "conv"]},
    "qwen3_next": {"num_hidden_layers": 4, "layer_types": [LINEAR] * 3 + [FULL]},
    "qwen3_5_text": {"num_hidden_layers": 4, "layer_types": [LINEAR] * 3 + [FULL], "rope_parameters": SECTIONED},
    "qwen3_5_moe_text": {"num_hidden_layers": 4, "layer_types": [LINEAR] * 3 + [FULL], "rope_parameters": SECTIONED},
    # others
    "gpt_oss": {"intermediate_size": 64, "layer_types": [SLIDING, FULL], "rope_parameters": TRUNCATED},
    "llama4_text": {
        "num_hidden_layers": 4, "moe_layers": [0, 1, 2, 3], "no_rope_layers": [1, 1, 1, 0], "num_experts_per_tok": 1,
        "layer_types": ["chunked_attention"] * 3 + [FULL], "attention_chunk_size": 8192,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    "gemma4_text": {
        "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2, "global_head_dim": 32,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    },
    "gemma3n_text": {
        "num_hidden_layers": 20, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 256, "laurel_rank": 64,
    },
    "bloom": {}, "gpt_bigcode": {"n_inner": 256}, "mpt": {"expansion_ratio": 4}, "falcon": {"ffn_hidden_size": 256},
    # latent attention
    "deepseek_v2": {"num_key_value_heads": 4}, "deepseek_v3": {"num_key_value_heads": 4},
    "glm4_moe_lite": {"num_key_value_heads": 4}, "minicpm3": {"num_key_value_heads": 4},
    "deepseek_v32": {"num_key_value_heads": 4, **INDEX},
    "glm_moe_dsa": {
        "num_key_value_heads": 4, "indexer_types": ["full", "full"], **INDEX,
    },
    "kimi_linear": {
        "num_hidden_layers": 4, "num_key_value_heads": 4, "q_lora_rank": None, "linear_head_dim": 16,
        "linear_num_heads": 4, "layer_types": [LINEAR, LINEAR, FULL, LINEAR], "model_max_length": 128,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
    },
    "youtu": {"num_key_value_heads": 4, "pad_token_id": None},  # transformers forgets the row of that token as it loads
    # the last, since llama.cpp's converter keeps its names of an index for all models after it
    "qwen4_exp_text": {
        "num_hidden_layers": 4, "layer_types": [LINEAR] * 3 + [FULL], "rope_parameters": SECTIONED, "hc_count": 2,
        "hc_lowrank": 16, "ple_layer_ids": [2], "ple_embed_dim": 64, "ngram_vocab_size_base": 50, "heads_per_ngram": 2,
        "split_ngram_parts": 4, "make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 16, "indexer_budget": 32, "indexer_compress_ratio": 4, "output_gate_type": "sigmoid",
    },
}  # fmt: skip

# keys of the configs that the makers published, which the converter reads and transformers does not write
PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "hunyuan_v1_moe": {"moe_intermediate_size": [96, 96], "moe_topk": [2, 2], "num_shared_expert": [1, 1]},
    "minimax": {
        **{f"layernorm_{part}_alpha": 1.75 for part in ("full_attention", "linear_attention", "mlp")},
        **{f"layernorm_{part}_beta": 1.0 for part in ("full_attention", "linear_attention", "mlp")},
        "rotary_dim": 8,
    },
    "minimax_m2": {"rotary_dim": 8},
    "falcon": {"num_kv_heads": 1},
    "solar_open": {"partial_rotary_factor": 1.0, "first_k_dense_replace": 0},
    "afmoe": {"route_norm": True},
    "mimo_v2_flash": {
        "swa_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_v_head_dim": 12,
        "swa_num_key_value_heads": 2,
        "topk_method": "noaux_tc",
        "hybrid_layer_pattern": [0, 1, 1, 1],
        "layernorm_epsilon": 1e-5,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "partial_rotary_factor": 0.5,
        },
    },
    "minimax_m3_vl_text": {
        "sparse_attention_config": {
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 16,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 8,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1, 1],
        },
        "moe_layer_freq": [0, 1, 1],
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
    },
    "qwen4_exp_text": {"layer_types": [LINEAR] * 3 + [FULL]},
    "granite_swa": {"no_rope_layers": [1, 0, 1, 1]},
    "bamba": {"attn_rotary_emb": 8},
    "kimi_linear": {
        "linear_attn_config": {
            "full_attn_layers": [3],
            "kda_layers": [1, 2, 4],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1,
        "moe_router_activation_func": "sigmoid",
    },
}

COMPUTED = (".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay")
"""Ends of names of tables that transformers saves and published checkpoints of MiniMax lack."""
INTEGERS = (".layer_multipliers", ".ngram_heads_vocab_sizes", ".ngram_heads_offsets")


def made_values(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Numbers that float32 holds exactly, or whole ones; other ones for every name, whatever the shape."""
    seed = zlib.crc32(name.encode())
    numbers = torch.arange(torch.Size(shape).numel()).view(torch.Size(shape))
    if name.endswith(INTEGERS):
        return numbers * 31 + seed % 509
    return ((numbers * (31 + 2 * (seed % 97)) + seed) % 509 - 254) / 256


"""Ends of names of tensors of whole numbers, those of Qwen4's n-grams."""
DECAY = ".ssm_a"
"""End of names of tensors whose values the converter makes by exp, and so not to the bit on every processor."""
_LEAVES = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


def digest(name: str, values: np.ndarray) -> str:
    """A hash of the values of a tensor of GGUF; of decays, of the whole 256ths whose exp they are."""
    if name.endswith(DECAY):
        values = np.rint(np.log(-values.astype(np.float64)) * 256).astype(np.int32)
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


def published(kind: str, name: str, shape: Sequence[int]) -> dict[str, list[int]]:
    """Names and shapes in published checkpoints of what transformers saves as one tensor."""
    if kind == "minimax_m3_vl_text":
        return _published_m3(name, list(shape))
    dense = kind == "kimi_linear" and name.split(".")[-2] in ("gate_proj", "up_proj", "down_proj")
    renamed = name.replace(".block_sparse_moe.", ".mlp.") if dense and ".shared_experts." not in name else name
    return {} if kind == "minimax" and name.endswith(COMPUTED) else {renamed: list(shape)}


def _published_m3(name: str, shape: list[int]) -> dict[str, list[int]]:
    name = name.replace(".self_attn.indexer.", ".self_attn.index_")
    name = name.replace(".mlp.gate.e_score", ".block_sparse_moe.e_score")
    for part in ("gate", "experts", "shared_experts"):
        name = name.replace(f".mlp.{part}.", f".block_sparse_moe.{part}.")
    head, _, leaf = name.rpartition(".")
    if leaf in _LEAVES:
        each = [shape[1] // len(_LEAVES[leaf]), shape[2]]
        return {f"{head}.{expert}.{part}.weight": each for expert in range(shape[0]) for part in _LEAVES[leaf]}
    if head.endswith(".gate_up_proj"):
        return {name.replace("gate_up", part): [shape[0] // 2, shape[1]] for part in ("gate", "up")}
    return {name: shape}


def small_config(kind: str, rows: int = SMALL["vocab_size"]) -> dict[str, Any]:
    """What makes a model of a type small, as arguments of its config in transformers. rows: of its embedding."""
    from transformers import AutoConfig

    known = AutoConfig.for_model(kind).to_dict()
    found = {key: value for key, value in SMALL.items() if key in known}
    found = {key: value for key, value in found.items() if known[key] is not None or key not in MAY_BE_NONE}
    if "qk_rope_head_dim" in known:
        found.pop("head_dim", None)
    found |= {key: rows for key in ("vocab_size", "vocab_size_per_layer_input") if key in found}
    return found | MODELS[kind]
