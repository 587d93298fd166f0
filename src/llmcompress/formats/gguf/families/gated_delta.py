"""Qwen3-Next and Qwen3.5: linear attention with a gated delta rule, and gated attention in every fourth layer."""

from collections.abc import Mapping, Sequence

from llmcompress.formats.gguf.family import ATTENTION, EXPERTS, GATED, SHARED_EXPERT, Family, Kin, Shape
from llmcompress.formats.gguf.hyper import Hyper, whole
from llmcompress.formats.gguf.keys import Key, flags, i32s, u32
from llmcompress.formats.gguf.rope import Rope
from llmcompress.formats.gguf.tensors import GGUFTensor, Strips

_SPARSE = ("post_attention_norm", *EXPERTS[1:], *SHARED_EXPERT, "ffn_gate_inp_shexp")
_DENSE = ("post_attention_norm", *GATED[1:])
_GATED_ATTENTION = (*ATTENTION, "attn_q_norm", "attn_k_norm")
LINEAR = ("attn_norm", "attn_qkv", "attn_gate", "ssm_conv1d", "ssm_dt.bias", "ssm_a", "ssm_norm", "ssm_out")
TOLD = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads")
WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size")
ONLY = {
    "hidden_act": ("silu", None), "norm_topk_prob": (True, None), "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
}  # fmt: skip
SECTIONS = (11, 11, 10)  # of the rotary positions, where config.json leaves them out


def _heads(hyper: Hyper) -> tuple[int, int, int, int]:
    """Number of heads of keys, of values for each of them, and sizes of both kinds of heads."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    keys, values, key, value = (whole(hyper.config, name) for name in names)
    return keys, values // keys, key, value


def shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    keys, times, key, value = _heads(hyper)
    wide, count, mixed = keys * times * value, keys * times, 2 * keys * key + keys * times * value
    return {
        "attn_q": (2 * hyper.heads * hyper.head_dim, hyper.hidden),
        "attn_qkv": (mixed, hyper.hidden),
        "attn_gate": (wide, hyper.hidden),
        "ssm_conv1d": (mixed, whole(hyper.config, "linear_conv_kernel_dim")),
        "ssm_dt.bias": (count,),
        "ssm_a": (count,),
        "ssm_norm": (value,),
        "ssm_out": (hyper.hidden, wide),
        "ssm_ba": (2 * count, hyper.hidden),
        "ssm_beta": (count, hyper.hidden),
        "ssm_alpha": (count, hyper.hidden),
        "ffn_gate_inp_shexp": (1, hyper.hidden),
    }


def kinds(hyper: Hyper) -> list[bool]:
    """Of each layer, whether its attention is linear."""
    kinds = hyper.config.get("layer_types")
    if isinstance(kinds, list):
        return [kind == "linear_attention" for kind in kinds]
    step = hyper.config.get("full_attention_interval") or 4
    return [(layer + 1) % step != 0 for layer in range(hyper.layers)]


def _layer(linear: tuple[str, ...], block: tuple[str, ...], hyper: Hyper, layer: int) -> tuple[str, ...]:
    return (*((*LINEAR, *linear) if kinds(hyper)[layer] else _GATED_ATTENTION), *block)


def _keys(arch: str, hyper: Hyper, rope: Rope) -> list[Key]:
    keys, times, _, value = _heads(hyper)
    return [
        u32(f"{arch}.ssm.inner_size", keys * times * value),
        flags(f"{arch}.attention.recurrent_layers", kinds(hyper)),
        u32(f"{arch}.full_attention_interval", hyper.config.get("full_attention_interval") or 4),
    ]


def sectioned(arch: str, hyper: Hyper, rope: Rope) -> list[Key]:
    sections = list(rope.scaling.get("mrope_section") or SECTIONS)
    return [*_keys(arch, hyper, rope), i32s(f"{arch}.rope.dimension_sections", (*sections, 0, 0, 0)[:4])]


def objection(hyper: Hyper) -> str | None:
    sections = (hyper.config.get("rope_parameters") or {}).get("mrope_section") or SECTIONS
    if "qwen3_5" in str(hyper.config.get("model_type")) and sum(sections) > hyper.head_dim:
        return f"config.json: mrope_section {list(sections)} is more than llama.cpp takes of heads of {hyper.head_dim}"
    if len(kinds(hyper)) != hyper.layers:
        return f"config.json: layer_types does not tell of {hyper.layers} layers"
    return None


def _parts(path: str, shape: Shape, hyper: Hyper) -> Sequence[GGUFTensor] | None:
    """Queries, keys, values and gates of each head of keys in turn, in one matrix: all of each one after the other."""
    if not path.endswith(".in_proj_qkvz.weight"):
        return None
    keys, times, key, value = _heads(hyper)
    wide = times * value
    step = 2 * (key + wide)
    if shape[0] != keys * step:
        return None
    mixed = Strips(((0, key, step, keys), (key, key, step, keys), (2 * key, wide, step, keys)))
    gates = Strips(((2 * key + wide, wide, step, keys),))
    return (
        GGUFTensor("attn_qkv.weight", (len(mixed), shape[1]), rows=mixed),
        GGUFTensor("attn_gate.weight", (len(gates), shape[1]), rows=gates),
    )


def _tiled(hyper: Hyper, size: int, first: int = 0) -> Strips:
    """Heads of values, each of `size`, that lie by heads of keys: the first of each, then the second of each."""
    keys, times, _, _ = _heads(hyper)
    before = ((0, first, 0, 1),) if first else ()
    return Strips((*before, *((first + at * size, size, times * size, keys) for at in range(times))))


def rows(role: str, hyper: Hyper) -> Strips | None:
    keys, _, key, value = _heads(hyper)
    if role in ("attn_qkv", "ssm_conv1d"):
        return _tiled(hyper, value, 2 * keys * key)
    sizes = {"attn_gate": value, "ssm_beta": 1, "ssm_alpha": 1, "ssm_a": 1, "ssm_dt": 1}
    return _tiled(hyper, sizes[role]) if role in sizes else None


def inputs(role: str, hyper: Hyper) -> Strips | None:
    return _tiled(hyper, _heads(hyper)[3]) if role == "ssm_out" else None


FAMILY = Kin(
    "gated_delta",
    (
        Family(
            "qwen3_next", ("qwen3_next",), "qwen3next", experts=True, partly=True, norm_offset=1.0, biases=(),
            ropes=("default",), skipped=("mtp.",), forms={"ssm_a": "decay"}, shapes=shapes, parts=_parts,
            layer=lambda hyper, layer: _layer(("ssm_ba",), _SPARSE, hyper, layer), objection=objection,
            keys=lambda hyper, rope: _keys("qwen3next", hyper, rope), told=(*TOLD, *WIDTHS),
            defaults={"partial_rotary_factor": 0.25}, only=ONLY,
        ),
        Family(
            "qwen3_5", ("qwen3_5_text",), "qwen35", partly=True, norm_offset=1.0, biases=(), ropes=("default",),
            skipped=("mtp.",), forms={"ssm_a": "decay"}, shapes=shapes, rows=rows, inputs=inputs,
            layer=lambda hyper, layer: _layer(("ssm_beta", "ssm_alpha"), _DENSE, hyper, layer), objection=objection,
            keys=lambda hyper, rope: sectioned("qwen35", hyper, rope), told=TOLD,
            defaults={"partial_rotary_factor": 0.25}, only=ONLY,
        ),
        Family(
            "qwen3_5_moe", ("qwen3_5_moe_text",), "qwen35moe", experts=True, partly=True, norm_offset=1.0, biases=(),
            ropes=("default",), skipped=("mtp.",), forms={"ssm_a": "decay"}, shapes=shapes, rows=rows, inputs=inputs,
            layer=lambda hyper, layer: _layer(("ssm_beta", "ssm_alpha"), _SPARSE, hyper, layer), objection=objection,
            keys=lambda hyper, rope: sectioned("qwen35moe", hyper, rope), told=(*TOLD, *WIDTHS),
            defaults={"partial_rotary_factor": 0.25}, only=ONLY,
        ),
    ),
)  # fmt: skip
