"""Draft heads as the library speculators stores them, which vLLM and SGLang load: EAGLE-3 (arXiv:2503.01840)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import TensorSpec
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.headers import ModelHeaders, inside, read_file_header, read_json

KIND, CONFIG, WEIGHTS = "eagle3", "config.json", "model.safetensors"
AUXILIARY = 3  # hidden states of the target that are fused
IDS, KNOWN = "d2t", "t2d"
_LAYER = "layers.0."


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a head. hidden: of the target as well. vocabulary: tokens it can draft, of target_vocabulary.

    states: numbers of the target's hidden states that it reads; number n enters layer n, the last one leaves them all.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    target_vocabulary: int
    positions: int
    eps: float
    theta: float
    states: tuple[int, ...]

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that is learnt, by its name."""
        wide, own = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "input_layernorm": (self.hidden,),
            "hidden_norm": (self.hidden,),
            "self_attn.q_proj": (wide, 2 * self.hidden),
            "self_attn.k_proj": (own, 2 * self.hidden),
            "self_attn.v_proj": (own, 2 * self.hidden),
            "self_attn.o_proj": (self.hidden, wide),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
        }
        return {
            "fc.weight": (self.hidden, AUXILIARY * self.hidden),
            **{f"{_LAYER}{name}.weight": shape for name, shape in layer.items()},
            "norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocabulary, self.hidden),
        }

    def specs(self, dtype: str) -> list[TensorSpec]:
        """All tensors of the file, what is learnt in `dtype`."""
        learnt = [TensorSpec(name, dtype, shape) for name, shape in self.matrices.items()]
        ids = [TensorSpec(IDS, "I64", (self.vocabulary,)), TensorSpec(KNOWN, "BOOL", (self.target_vocabulary,))]
        return [*learnt, *ids]

    def config(self, dtype: str, tokens: int, verifier: str, architectures: list[str]) -> dict[str, Any]:
        """config.json. dtype: as torch names it. tokens: drafted at a time. verifier: the target's name."""
        proposal = {"proposal_type": "greedy", "speculative_tokens": tokens}
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": KIND,
            "draft_vocab_size": self.vocabulary,
            "target_hidden_size": self.hidden,
            "norm_before_residual": True,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "eagle_aux_hidden_state_layer_ids": list(self.states),
            "tie_word_embeddings": False,
            "dtype": dtype,
            "transformer_layer_config": {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": self.hidden,
                "intermediate_size": self.inner,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "num_hidden_layers": 1,
                "vocab_size": self.target_vocabulary,
                "max_position_embeddings": self.positions,
                "rms_norm_eps": self.eps,
                "rope_theta": self.theta,
                "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
                "hidden_act": "silu",
                "attention_bias": False,
                "mlp_bias": False,
                "tie_word_embeddings": False,
                "dtype": dtype,
            },
            "speculators_config": {
                "algorithm": KIND,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": verifier, "architectures": architectures},
            },
        }


def is_draft(path: Path) -> bool:
    """Whether a directory says that it holds a draft head."""
    return (path / CONFIG).is_file() and "speculators_model_type" in read_json(inside(path, path / CONFIG))


def read_draft(path: Path) -> tuple[DraftShape, Checkpoint]:
    """The sizes and the tensors of a draft head on disk; CheckpointError for what is not one, or is another kind."""
    config = read_json(inside(path, path / CONFIG))
    kind = config.get("speculators_model_type")
    if kind != KIND:
        raise CheckpointError(f"{path} holds a draft of type {kind!r}, which is not known here", f"{KIND} is")
    shape = _shape(path, config)
    file = inside(path, path / WEIGHTS)
    headers = ModelHeaders(path, config, read_file_header(file), (file,))
    found = {name: stored.spec.shape for name, stored in headers.tensors.items()}
    for name, wanted in {**shape.matrices, IDS: (shape.vocabulary,)}.items():
        if found.get(name) != wanted:
            said = "is missing" if name not in found else f"is {list(found[name])}"
            raise CheckpointError(f"{file}: tensor {name} {said}, config.json asks for {list(wanted)}")
    return shape, Checkpoint(headers)


def _shape(path: Path, config: dict[str, Any]) -> DraftShape:
    """The sizes that config.json says; CheckpointError for a head that computes anything else than ours."""
    layer = config.get("transformer_layer_config")
    layer = layer if isinstance(layer, dict) else {}
    for said, known in ((config, _AS_WRITTEN), (layer, _LAYER_AS_WRITTEN)):
        for key, value in known.items():
            if said.get(key, value) != value:
                raise CheckpointError(f"{path / CONFIG}: {key} {said[key]!r} is not known here", f"{value!r} is")
    rope = layer.get("rope_parameters")
    turned = dict(rope) if isinstance(rope, dict) else {}
    theta = turned.pop("rope_theta", layer.get("rope_theta"))
    scaled = {key: value for key, value in turned.items() if (key, value) not in _PLAIN_ROPE} or layer.get(
        "rope_scaling"
    )
    if scaled:
        raise CheckpointError(
            f"{path / CONFIG}: rotary embeddings with {scaled!r} are not known here", "plain ones are"
        )
    states = config.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(states, list) or len(states) != AUXILIARY or not all(map(_counts, states)):
        raise CheckpointError(f"{path / CONFIG} does not name three hidden states (eagle_aux_hidden_state_layer_ids)")
    sizes: dict[str, Any] = {
        "hidden": layer.get("hidden_size"),
        "inner": layer.get("intermediate_size"),
        "heads": layer.get("num_attention_heads"),
        "kv_heads": layer.get("num_key_value_heads"),
        "head_dim": layer.get("head_dim"),
        "vocabulary": config.get("draft_vocab_size"),
        "target_vocabulary": layer.get("vocab_size"),
        "positions": layer.get("max_position_embeddings"),
    }
    numbers: dict[str, Any] = {"eps": layer.get("rms_norm_eps"), "theta": theta}
    for key, value in {**sizes, **numbers}.items():
        if not (_is_positive(value) and (key in numbers or _counts(value))):
            raise CheckpointError(f"{path / CONFIG} does not say the sizes of the head: {key} is {value!r}")
    if sizes["heads"] % sizes["kv_heads"] or sizes["head_dim"] % 2:
        raise CheckpointError(
            f"{path / CONFIG}: heads of {sizes['head_dim']} in groups of {sizes['kv_heads']} do not go"
        )
    return DraftShape(**sizes, **numbers, states=tuple(sorted(states)))


_AS_WRITTEN = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
_LAYER_AS_WRITTEN = {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False,
                     "mlp_bias": False, "partial_rotary_factor": 1.0}  # fmt: skip
_PLAIN_ROPE = (("rope_type", "default"), ("partial_rotary_factor", 1.0))


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30
