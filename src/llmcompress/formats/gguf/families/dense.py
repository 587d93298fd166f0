"""Families whose layers are attention and a dense feed-forward block, each said in a line or a few."""

from llmcompress.formats.gguf.families import llama
from llmcompress.formats.gguf.families.layer_patterns import every, unrotated
from llmcompress.formats.gguf.family import ATTENTION, GATED, Family, Kin
from llmcompress.formats.gguf.fields import GRANITE
from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.keys import Key, f32, u32
from llmcompress.formats.gguf.rope import Rope

_SILU = {"hidden_act": ("silu", None)}
_NO_GATE = ("ffn_norm", "ffn_up", "ffn_down")
_QK_NORMS = ("attn_q_norm", "attn_k_norm")
_AFTER = (*ATTENTION[1:], *_QK_NORMS, "post_attention_norm", *GATED[1:], "post_ffw_norm")
_PHI = (*ATTENTION, "ffn_up", "ffn_down")
_STARCODER = (*ATTENTION, *_NO_GATE)


def _olmo3_keys(hyper: Hyper, rope: Rope) -> list[Key]:
    return [f32("olmo2.rope.freq_base_swa", rope.theta if rope.local_theta is None else rope.local_theta)]


def _cohere2_keys(hyper: Hyper, rope: Rope) -> list[Key]:
    return [u32("cohere2.rope.dimension_count", hyper.head_dim)]


def _exaone4_objection(hyper: Hyper) -> str | None:
    """llama.cpp has windows in the model of 64 layers alone."""
    if hyper.layers == 64 and hyper.config.get("sliding_window") is not None:
        return every(4)(hyper)
    if "sliding_attention" in (hyper.config.get("layer_types") or ()):
        return (
            f"config.json: layers have a sliding window, which llama.cpp looks for in 64 layers, not in {hyper.layers}"
        )
    return None


FAMILY = Kin(
    "dense",
    (
        Family(
            "gemma", ("gemma",), "gemma", tied=True, untied=False, ropes=("default",), norm_offset=1.0,
            defaults={"rms_norm_eps": 1e-6}, biases=(),
            only={"hidden_act": ("gelu_pytorch_tanh", None), "hidden_activation": ("gelu_pytorch_tanh", None),
                  "use_bidirectional_attention": (False, None)},
        ),
        Family(
            "olmo", ("olmo",), "olmo", ropes=("default",), unnormed=True, rms=False, square=True, rows=llama.rows,
            layer=(*ATTENTION[1:], *GATED[1:]), biases=(), told=("clip_qkv",), defaults={"layer_norm_eps": 1e-5},
            only=_SILU,
        ),
        Family(
            "olmo3", ("olmo3",), "olmo2", head_needed=True, square=True, norm_heads=True, windowed=True, layer=_AFTER,
            biases=(), told=("sliding_window", "layer_types"), keys=_olmo3_keys, defaults={"rms_norm_eps": 1e-5},
            only=_SILU,
        ),
        Family(
            "smollm3", ("smollm3",), "smollm3", tied=True, ropes=("default", "linear", "yarn"), rows=llama.rows,
            partly=True, biases=(), objection=unrotated(4), only={**_SILU, "use_sliding_window": (False, None)},
        ),
        Family(
            "granite", ("granite",), "granite", square=True, ropes=("default", "linear", "yarn", "llama3"), partly=True,
            rows=llama.rows, values=llama.values, biases=(),
            told=GRANITE, only=_SILU,
        ),
        Family(
            "cohere", ("cohere",), "command-r", tied=True, untied=False, rms=False, square=True, ropes=("default",),
            layer=(*ATTENTION, *GATED[1:]), told=("logit_scale",), only={**_SILU, "use_qk_norm": (False, None)},
        ),
        Family(
            "cohere2", ("cohere2",), "cohere2", tied=True, untied=False, rms=False, square=True, ropes=("default",),
            windowed=True, layer=(*ATTENTION, *GATED[1:]), told=("logit_scale", "sliding_window"), keys=_cohere2_keys,
            objection=every(4), only=_SILU,
        ),
        Family(
            "glm", ("glm",), "chatglm", fused_gate=True, partly=True, ropes=("default",),
            layer=(*ATTENTION, *_NO_GATE), only=_SILU,
        ),
        Family(
            "glm4", ("glm4",), "glm4", fused_gate=True, partly=True, ropes=("default",),
            layer=(*ATTENTION, "post_attention_norm", *_NO_GATE, "post_ffw_norm"), only=_SILU,
        ),
        Family(
            "phi", ("phi",), "phi2", rms=False, square=True, grouped=True, partly=True, ropes=("default",),
            head_needed=True, layer=_PHI, biased=("output_norm", "output", *_PHI), biases=(),
            only={"hidden_act": ("gelu_new", "gelu_pytorch_tanh"), "qk_layernorm": (False, None)},
        ),
        Family(
            "starcoder2", ("starcoder2",), "starcoder2", tied=True, rms=False, square=True, ropes=("default",),
            layer=_STARCODER, biased=("output_norm", "attn_norm", "ffn_norm"),
            biases=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"),
            only={"hidden_act": ("gelu_pytorch_tanh",)},
        ),
        Family(
            "stablelm", ("stablelm",), "stablelm", rms=False, square=True, head_needed=True, partly=True,
            ropes=("default",), biased=("output_norm", "attn_norm", "ffn_norm"), told=("use_parallel_residual",),
            only={**_SILU, "use_parallel_residual": (False, None), "qk_layernorm": (False, None)},
        ),
        Family(
            "exaone4", ("exaone4",), "exaone4", square=True, ropes=("default", "llama3"), values=llama.values,
            windowed=True, layer=_AFTER, biases=(), told=("sliding_window", "layer_types"),
            objection=_exaone4_objection, only=_SILU,
        ),
        Family(
            "ernie4_5", ("ernie4_5",), "ernie4_5", tied=True, ropes=("default",), biases=(), only=_SILU,
        ),
        Family(
            "hunyuan_v1_dense", ("hunyuan_v1_dense",), "hunyuan-dense", ropes=("default",),
            layer=(*ATTENTION, *_QK_NORMS, *GATED), biases=(), only=_SILU,
        ),
        Family(
            "seed_oss", ("seed_oss",), "seed_oss", ropes=("default",),
            layer=(*ATTENTION, "post_attention_norm", *GATED[1:]), only=_SILU,
        ),
        Family(
            "arcee", ("arcee",), "arcee", ropes=("default", "linear", "yarn", "llama3"), partly=True, rows=llama.rows,
            values=llama.values, layer=(*ATTENTION, *_NO_GATE), biases=(), only={"hidden_act": ("relu2",)},
        ),
        Family(
            "nemotron", ("nemotron",), "nemotron", rms=False, square=True, partly=True, ropes=("default",),
            norm_offset=1.0, layer=(*ATTENTION, *_NO_GATE), biased=("output_norm", "attn_norm", "ffn_norm"),
            head_needed=True, biases=(), only={"hidden_act": ("relu2",)},
        ),
        Family(
            "apertus", ("apertus",), "apertus", partly=True, ropes=("default", "llama3"), values=llama.values,
            head_needed=True, layer=(*ATTENTION, *_QK_NORMS, *_NO_GATE), biases=(),
            listed={f"xielu.{name}": f".act_fn.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")},
            only={"hidden_act": ("xielu",), "qk_norm": (True, None), "post_norm": (False, None)},
        ),
        Family(
            "jais2", ("jais2",), "jais2", rms=False, square=True, partly=True, ropes=("default",), biases=(),
            layer=_STARCODER, biased=("output_norm", *_STARCODER), only={"hidden_act": ("relu2",)},
        ),
    ),
)  # fmt: skip
