"""Families with layers of a state space model (Mamba, Mamba 2) or of short convolutions, alone or beside attention."""

from collections.abc import Mapping
from dataclasses import dataclass

from llmcompress.formats.gguf.families import leading, llama
from llmcompress.formats.gguf.families.with_experts import halves
from llmcompress.formats.gguf.family import (
    ATTENTION,
    CHOICE,
    EXPERTS,
    GATED,
    SHARED_EXPERT,
    Family,
    Kin,
    Shape,
)
from llmcompress.formats.gguf.fields import GRANITE
from llmcompress.formats.gguf.hyper import Hyper, whole
from llmcompress.formats.gguf.keys import Key, flag, i32s, u32
from llmcompress.formats.gguf.rope import Rope

_SILU = {"hidden_act": ("silu", None)}
_NO_LIMIT = {"max_position_embeddings": 1 << 20}  # as llama.cpp's converter says of models without positions
_SCAN = ("ssm_in", "ssm_conv1d", "ssm_x", "ssm_dt", "ssm_a", "ssm_d", "ssm_out")
SCAN2 = ("ssm_in", "ssm_conv1d", "ssm_dt.bias", "ssm_a", "ssm_d", "ssm_norm", "ssm_out")
_INNER_NORMS = ("ssm_dt_norm", "ssm_b_norm", "ssm_c_norm")
_ATTENDS = ("attention", "full_attention")
_CONVOLUTION = ("shortconv.conv", "shortconv.in_proj", "shortconv.out_proj")
MAMBA2 = ("ssm_a", "ssm_d", "ssm_norm")


@dataclass(frozen=True)
class _Scan:
    """Sizes of a state space model. ranks: of Mamba the rank of its steps, of Mamba 2 the number of heads."""

    inner: int
    state: int
    kernel: int
    groups: int
    ranks: int

    def keys(self, arch: str, grouped: bool) -> list[Key]:
        sizes = {"conv_kernel": self.kernel, "inner_size": self.inner, "state_size": self.state}
        sizes |= {"time_step_rank": self.ranks} | ({"group_count": self.groups} if grouped else {})
        return [u32(f"{arch}.ssm.{name}", value) for name, value in sizes.items()]

    def shapes(self, hidden: int) -> dict[str, Shape]:
        """Of the first Mamba."""
        return {
            "ssm_in": (2 * self.inner, hidden),
            "ssm_conv1d": (self.inner, self.kernel),
            "ssm_x": (self.ranks + 2 * self.state, self.inner),
            "ssm_dt": (self.inner, self.ranks),
            "ssm_a": (self.inner, self.state),
            "ssm_d": (self.inner,),
            "ssm_out": (hidden, self.inner),
            "ssm_dt_norm": (self.ranks,),
            "ssm_b_norm": (self.state,),
            "ssm_c_norm": (self.state,),
        }

    def shapes2(self, hidden: int) -> dict[str, Shape]:
        """Of Mamba 2."""
        mixed = self.inner + 2 * self.groups * self.state
        return {
            "ssm_in": (self.inner + mixed + self.ranks, hidden),
            "ssm_conv1d": (mixed, self.kernel),
            "ssm_dt.bias": (self.ranks,),
            "ssm_a": (self.ranks, 1),
            "ssm_d": (self.ranks, 1),
            "ssm_norm": (self.groups, self.inner // self.groups),
            "ssm_out": (hidden, self.inner),
        }


def scan(hyper: Hyper) -> _Scan:
    """The sizes of a model's state space layers."""
    config = hyper.config
    kernel = whole(config, "conv_kernel", "mamba_d_conv")
    state = whole(config, "state_size", "ssm_state_size", "mamba_d_state")
    heads = next((name for name in ("mamba_num_heads", "mamba_n_heads", "num_heads") if config.get(name)), None)
    if heads is None:
        inner = (whole(config, "intermediate_size") if config.get("time_step_rank")
                 else whole(config, "mamba_expand") * hyper.hidden)  # fmt: skip
        return _Scan(inner, state, kernel, 1, whole(config, "time_step_rank", "mamba_dt_rank"))
    one = config.get("mamba_head_dim") or config.get("mamba_d_head")
    one = one if isinstance(one, int) else whole(config, "head_dim")
    return _Scan(whole(config, heads) * one, state, kernel, whole(config, "n_groups", "mamba_n_groups"),
                 whole(config, heads))  # fmt: skip


def _shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    return scan(hyper).shapes(hyper.hidden)


def shapes2(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    """Shapes of a layer of Mamba 2."""
    return scan(hyper).shapes2(hyper.hidden)


def pairs(arch: str, hyper: Hyper, kinds: list[bool]) -> Key:
    """Heads of keys and values by layer: none where it does not attend."""
    return i32s(f"{arch}.attention.head_count_kv", [hyper.heads_kv if attends else 0 for attends in kinds])


def _kinds(hyper: Hyper) -> list[str]:
    kinds = hyper.config.get("layers_block_type") or hyper.config.get("layer_types") or ()
    return [str(kind) for kind in kinds]


def _attends(hyper: Hyper) -> list[bool]:
    return [kind in _ATTENDS for kind in _kinds(hyper)]


def _known_layers(hyper: Hyper) -> str | None:
    if len(_kinds(hyper)) == hyper.layers:
        return None
    return f"config.json: the kinds of layers are not told of {hyper.layers} layers (layer_types)"


def _jamba_attends(hyper: Hyper) -> list[bool]:
    period, offset = (int(hyper.config[f"attn_layer_{name}"]) for name in ("period", "offset"))
    return [layer % period == offset for layer in range(hyper.layers)]


def _jamba_layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    period, offset = (int(hyper.config[f"expert_layer_{name}"]) for name in ("period", "offset"))
    mixer = ATTENTION if _jamba_attends(hyper)[layer] else ("attn_norm", *_SCAN, *_INNER_NORMS)
    return (*mixer, *(EXPERTS if layer % period == offset and hyper.experts > 1 else GATED))


def _jamba_keys(hyper: Hyper, rope: Rope) -> list[Key]:
    return [pairs("jamba", hyper, _jamba_attends(hyper)), *scan(hyper).keys("jamba", False)]


def _granite_layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    mixer = ATTENTION if _attends(hyper)[layer] else ("attn_norm", *SCAN2)
    return (*mixer, *(EXPERTS if hyper.experts else ("ffn_norm",)), *SHARED_EXPERT)


def _granite_keys(hyper: Hyper, rope: Rope) -> list[Key]:
    arch = "granitehybrid"
    rotated = flag(f"{arch}.rope.scaling.finetuned", False)
    return [pairs(arch, hyper, _attends(hyper)), rotated, *scan(hyper).keys(arch, True)]


def _granite_objection(hyper: Hyper) -> str | None:
    if hyper.config.get("position_embedding_type") == "rope":
        return (
            "config.json: position_embedding_type is 'rope', llama.cpp computes granitehybrid models without positions"
        )
    return _known_layers(hyper)


def _lfm2_layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    attention = (*ATTENTION, "attn_q_norm", "attn_k_norm")
    mixer = attention if _attends(hyper)[layer] else ("attn_norm", *_CONVOLUTION)
    dense = not hyper.experts or layer < leading.dense(hyper)
    return (*mixer, *(GATED if dense else (*EXPERTS, CHOICE)))


def _lfm2_shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    return {
        "shortconv.conv": (hyper.hidden, whole(hyper.config, "conv_L_cache")),
        "shortconv.in_proj": (3 * hyper.hidden, hyper.hidden),
        "shortconv.out_proj": (hyper.hidden, hyper.hidden),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (_lfm2_inner(hyper), hyper.hidden)),
        "ffn_down": (hyper.hidden, _lfm2_inner(hyper)),
    }


def _lfm2_inner(hyper: Hyper) -> int:
    """Width of the feed-forward block, which these configs may ask to be made of the one they state."""
    config, inner = hyper.config, hyper.inner
    if config.get("block_auto_adjust_ff_dim"):
        scaled = int((config.get("block_ffn_dim_multiplier") or 1) * int(2 * inner / 3))
        step = whole(config, "block_multiple_of")
        return step * -(-scaled // step)
    return inner


def _lfm2_keys(hyper: Hyper, rope: Rope) -> list[Key]:
    arch = "lfm2moe" if hyper.experts else "lfm2"
    gating = [u32("lfm2moe.expert_gating_func", leading.SIGMOID), leading.key(arch, hyper)] if hyper.experts else []
    return [pairs(arch, hyper, _attends(hyper)), u32(f"{arch}.feed_forward_length", _lfm2_inner(hyper)), *gating]


def _nemotron_layer(hyper: Hyper, layer: int) -> tuple[str, ...]:
    kind = _kinds(hyper)[layer]
    if kind in _ATTENDS:
        return ATTENTION
    if kind == "moe":
        return ("attn_norm", "ffn_gate_inp", "ffn_up_exps", "ffn_down_exps", CHOICE, "ffn_up_shexp", "ffn_down_shexp")
    return ("attn_norm", "ffn_up", "ffn_down") if kind == "mlp" else ("attn_norm", *SCAN2)


def _nemotron_keys(hyper: Hyper, rope: Rope) -> list[Key]:
    arch, kinds = "nemotron_h_moe", _kinds(hyper)
    widths = {"moe": hyper.expert_inner, "mlp": hyper.inner}
    return [
        i32s(f"{arch}.feed_forward_length", [widths.get(kind, 0) for kind in kinds]),
        pairs(arch, hyper, _attends(hyper)),
        u32(f"{arch}.rope.dimension_count", hyper.head_dim),
        flag(f"{arch}.rope.scaling.finetuned", False),
        u32(f"{arch}.expert_gating_func", leading.SIGMOID),
        *scan(hyper).keys(arch, True),
    ]


def _nemotron_objection(hyper: Hyper) -> str | None:
    kinds = _kinds(hyper)
    if "mlp" in kinds or "moe" not in kinds:
        return "config.json: layers_block_type has dense blocks, and llama.cpp knows nemotron_h with experts alone here"
    return _known_layers(hyper)


FAMILY = Kin(
    "state_space",
    (
        Family(
            "mamba", ("mamba",), "mamba", base="backbone.", tied=True, rotary=False, attention=False,
            layer=("attn_norm", *_SCAN), biased=("ssm_conv1d", "ssm_dt"), biases=(), forms={"ssm_a": "decay"},
            shapes=_shapes, keys=lambda hyper, rope: scan(hyper).keys("mamba", False), defaults=_NO_LIMIT, only=_SILU,
        ),
        Family(
            "falcon_mamba", ("falcon_mamba",), "mamba", base="backbone.", tied=True, rotary=False, attention=False,
            layer=("attn_norm", *_SCAN), biased=("ssm_conv1d", "ssm_dt"), biases=(), forms={"ssm_a": "decay"},
            shapes=_shapes, defaults=_NO_LIMIT, only=_SILU,
            keys=lambda hyper, rope: [*scan(hyper).keys("mamba", False), flag("mamba.ssm.dt_b_c_rms", True)],
        ),
        Family(
            "mamba2", ("mamba2",), "mamba2", base="backbone.", rotary=False, attention=False,
            layer=("attn_norm", *SCAN2), biased=("ssm_conv1d",), biases=(), forms={"ssm_a": "decay"},
            reshaped=MAMBA2, shapes=shapes2, defaults=_NO_LIMIT, only=_SILU,
            keys=lambda hyper, rope: scan(hyper).keys("mamba2", True),
        ),
        Family(
            "jamba", ("jamba",), "jamba", experts=True, rotary=False, layer=_jamba_layer, shapes=_shapes,
            biased=("ssm_conv1d", "ssm_dt"), biases=(), forms={"ssm_a": "decay"}, keys=_jamba_keys, only=_SILU,
        ),
        Family(
            "granitemoehybrid", ("granitemoehybrid",), "granitehybrid", experts=True, square=True, ropes=("default",),
            partly=True, layer=_granite_layer, biased=("ssm_conv1d",), biases=(), forms={"ssm_a": "decay"},
            reshaped=MAMBA2, shapes=shapes2, parts=halves, keys=_granite_keys,
            told=(*GRANITE, "shared_intermediate_size"), defaults=_NO_LIMIT, objection=_granite_objection, only=_SILU,
        ),
        Family(
            "nemotron_h", ("nemotron_h",), "nemotron_h_moe", base="backbone.", experts=True, rotary=False,
            rms=False, rows=llama.rows, layer=_nemotron_layer, biased=("ssm_conv1d",), biases=(),
            forms={"ssm_a": "decay"}, reshaped=MAMBA2, shapes=shapes2, keys=_nemotron_keys,
            objection=_nemotron_objection,
            told=("moe_intermediate_size", "moe_shared_expert_intermediate_size", "n_shared_experts",
                  "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
            only={"mlp_hidden_act": ("relu2", None), "moe_latent_size": (None,)},
        ),
        Family(
            "lfm2", ("lfm2",), "lfm2", tied=True, unnormed=True, outer=("token_embd_norm",), ropes=("default",),
            layer=_lfm2_layer, biases=(), shapes=_lfm2_shapes, keys=_lfm2_keys, told=("conv_L_cache",),
            objection=_known_layers,
        ),
        Family(
            "lfm2_moe", ("lfm2_moe",), "lfm2moe", tied=True, experts=True, unnormed=True, outer=("token_embd_norm",),
            ropes=("default",), layer=_lfm2_layer, biases=(), shapes=_lfm2_shapes, keys=_lfm2_keys,
            told=("conv_L_cache", "moe_intermediate_size"), objection=_known_layers,
            only={"norm_topk_prob": (True,), "use_expert_bias": (True, None)},
        ),
    ),
)  # fmt: skip
