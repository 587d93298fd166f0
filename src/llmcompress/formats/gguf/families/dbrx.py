"""DBRX: a config of configs, all experts of a layer in one flat tensor, that of the last matrices stored [in, out]."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmcompress.formats.gguf.family import Family, Shape
from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.tensors import GGUFTensor

_LEAVES = {".experts.mlp.w1": "gate", ".experts.mlp.v1": "up", ".experts.mlp.w2": "down"}


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    attention, experts = config.get("attn_config") or {}, config.get("ffn_config") or {}
    return {
        **config,
        "rope_theta": attention.get("rope_theta"),
        "clip_qkv": attention.get("clip_qkv"),
        "num_key_value_heads": attention.get("kv_n_heads"),
        "intermediate_size": experts.get("ffn_hidden_size"),
        "num_experts": experts.get("moe_num_experts"),
        "num_experts_per_tok": experts.get("moe_top_k"),
        "moe_normalize_expert_weights": experts.get("moe_normalize_expert_weights"),
        "hidden_act": (experts.get("ffn_act_fn") or {}).get("name"),
    }


def _parts(path: str, shape: Shape, hyper: Hyper) -> Sequence[GGUFTensor] | None:
    leaf = next((leaf for end, leaf in _LEAVES.items() if path.endswith(end)), None)
    if leaf is None or shape != (hyper.experts * hyper.inner, hyper.hidden):
        return None
    name = f"ffn_{leaf}_exps.weight"
    if leaf == "down":
        return (GGUFTensor(name, (hyper.experts, hyper.hidden, hyper.inner), split=hyper.experts, turned=True),)
    return (GGUFTensor(name, (hyper.experts, hyper.inner, hyper.hidden)),)


FAMILY = Family(
    name="dbrx",
    model_types=("dbrx",),
    arch="dbrx",
    base="transformer.",
    experts=True,
    head_needed=True,
    square=True,
    rms=False,
    ropes=("default",),
    layer=("attn_norm", "attn_qkv", "attn_output", "attn_output_norm", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps",
           "ffn_down_exps"),
    biases=(),
    told=("clip_qkv",),
    shapes=lambda hyper, layer: {"attn_output_norm": (hyper.hidden,)},
    parts=_parts,
    meant=_flat,
    defaults={"layer_norm_eps": 1e-5},
    only={"hidden_act": ("silu", None), "moe_normalize_expert_weights": (1, None)},
)  # fmt: skip
