"""Heads of EAGLE-3 (arXiv:2503.01840, section 3), as the library speculators stores them for vLLM and SGLang.

A head is one decoder layer upon hidden states of its target. A row is a token: its embedding beside a feature of the
token before. The feature is made of hidden states of the target where those are known; beyond, it is the output of the
row before. vLLM computes the same (`llama_eagle3`), the feature being normalised before it is the residual.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from llmcompress.errors import CheckpointError, PlanError
from llmcompress.formats.base import TensorSpec
from llmcompress.model.draft_heads.base import (
    CALM,
    HEAD_WEIGHT,
    Drafting,
    DraftShape,
    HeadTarget,
    LearntSlowly,
    LearntTensor,
    Read,
    TargetSample,
    is_count,
    refuse_no_sizes,
    refuse_others,
)

AUXILIARY = 3  # hidden states of the target that are fused
IDS, KNOWN = "d2t", "t2d"
_LAYER, _FUSED = "layers.0.", "fc.weight"
_SPREAD = 0.5  # of weights that begin at random, times the root of their inputs
_EPS, _THETA, _POSITIONS = 1e-5, 10_000.0, 2048  # of targets whose config does not say them


@dataclass(frozen=True)
class EagleShape(DraftShape):
    """Sizes of a head. inner: channels of its feed-forward."""

    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    eps: float
    theta: float

    kind: ClassVar[str] = "eagle3"
    ids_name: ClassVar[str] = IDS

    @property
    def most(self) -> None:
        return None

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
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
            _FUSED: (self.hidden, AUXILIARY * self.hidden),
            **{f"{_LAYER}{name}.weight": shape for name, shape in layer.items()},
            "norm.weight": (self.hidden,),
            HEAD_WEIGHT: (self.vocabulary, self.hidden),
        }

    @property
    def values(self) -> int:
        return self.hidden + self.inner

    @property
    def scores(self) -> int:
        return self.heads

    @property
    def id_specs(self) -> list[TensorSpec]:
        return [TensorSpec(IDS, "I64", (self.vocabulary,)), TensorSpec(KNOWN, "BOOL", (self.target_vocabulary,))]

    def id_tensors(self, ids: Tensor) -> dict[str, Tensor]:
        known = torch.zeros(self.target_vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
        return {IDS: ids - torch.arange(len(ids)), KNOWN: known}

    def ids(self, read: Read) -> Tensor:
        offsets = read(IDS)
        return torch.arange(len(offsets)) + offsets

    def config(self, dtype: str, tokens: int, target: str, architectures: Sequence[str]) -> dict[str, Any]:
        proposal = {"proposal_type": "greedy", "speculative_tokens": tokens}
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": self.kind,
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
                "algorithm": self.kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": target, "architectures": list(architectures)},
            },
        }

    def head(self, weights: Mapping[str, Tensor]) -> "EagleHead":
        return EagleHead(self, weights)


class SeenRows(NamedTuple):
    """Keys and values [rows, key-value heads, head_dim] of rows, keys turned by the position."""

    key: Tensor
    value: Tensor


class EagleHead:
    """A head on its weights. weights: by the names in the file, without those of ids; of any one type."""

    def __init__(self, shape: EagleShape, weights: Mapping[str, Tensor]) -> None:
        self.shape, self.weights = shape, weights

    def fused(self, states: Tensor) -> Tensor:
        """The feature [rows, hidden] of the target's hidden states [rows, 3 hidden]."""
        return functional.linear(states, self.weights[_FUSED])

    def logits(self, outputs: Tensor) -> Tensor:
        return functional.linear(self._normed(outputs, "norm"), self.weights[HEAD_WEIGHT])

    def advance(
        self, embedded: Tensor, features: Tensor, first: int, before: SeenRows | None
    ) -> tuple[Tensor, SeenRows]:
        """Outputs [rows, hidden] of further rows, and all keys and values.

        embedded, features [rows, hidden]. first: position of the first row. before: of the rows before them.
        """
        positions = torch.arange(first, first + len(features), device=features.device)
        residual, query, own = self._entering(embedded, features, positions)
        rows = own if before is None else SeenRows(*(torch.cat(pair) for pair in zip(before, own, strict=True)))
        mask = torch.arange(len(rows.key), device=features.device)[None] <= positions[:, None]
        scores = self._scores(query, rows.key).masked_fill(~mask, float("-inf"))
        chances = scores.to(torch.float32).softmax(dim=-1).to(features.dtype)
        return self._leaving(residual, self._mixed(chances, rows.value)), rows

    def unrolled(self, embedded: Tensor, states: Tensor, depths: int) -> list[Tensor]:
        """As of `DraftHead` ("training-time test", section 3.2).

        Row r at depth d sees rows up to r - d with features of the target, then one of each depth up to its own, on
        outputs of the row before at the depth before.
        """
        features = self.fused(states)
        count = len(features)
        positions = torch.arange(count, device=features.device)
        apart = positions[:, None] - positions[None]
        seen: list[SeenRows] = []
        outputs: list[Tensor] = []
        for depth in range(depths):
            residual, query, own = self._entering(embedded, features, positions)
            seen.append(own)
            scores = self._scores(query, seen[0].key).masked_fill(apart < depth, float("-inf"))
            later = [
                SeenRows(*(_shifted(part, depth - number) for part in seen[number])) for number in range(1, depth + 1)
            ]
            own_scores = [self._own_scores(query, rows.key) for rows in later]
            chances = torch.cat([scores, *own_scores], dim=-1).to(torch.float32).softmax(dim=-1).to(features.dtype)
            mixed = self._mixed(chances[..., :count], seen[0].value)
            for number, rows in enumerate(later):
                mixed = mixed + self._own(chances[..., count + number], rows.value)
            outputs.append(self._leaving(residual, mixed))
            features = _shifted(outputs[-1], 1)
        return outputs

    def drafting(self) -> Drafting:
        return _EagleDrafting(self)

    def _normed(self, values: Tensor, name: str) -> Tensor:
        wide = values.to(torch.float32)
        scaled = wide * (wide.square().mean(dim=-1, keepdim=True) + self.shape.eps).rsqrt()
        return scaled.to(values.dtype) * self.weights[f"{name}.weight"]

    def _projected(self, values: Tensor, name: str) -> Tensor:
        return functional.linear(values, self.weights[f"{_LAYER}{name}.weight"])

    def _entering(self, embedded: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, SeenRows]:
        """The residual [rows, hidden], queries [rows, heads, head_dim], keys and values."""
        residual = self._normed(features, f"{_LAYER}hidden_norm")
        both = torch.cat([self._normed(embedded, f"{_LAYER}input_layernorm"), residual], dim=-1)
        query, key, value = (self._projected(both, f"self_attn.{name}_proj") for name in "qkv")
        width = self.shape.head_dim
        query, key, value = (part.reshape(len(part), -1, width) for part in (query, key, value))
        turn = self._turn(positions)
        return residual, _turned(query, turn), SeenRows(_turned(key, turn), value)

    def _leaving(self, residual: Tensor, mixed: Tensor) -> Tensor:
        hidden = residual + self._projected(mixed.flatten(-2), "self_attn.o_proj")
        inner = self._normed(hidden, f"{_LAYER}post_attention_layernorm")
        gate = functional.silu(self._projected(inner, "mlp.gate_proj"))
        return hidden + self._projected(gate * self._projected(inner, "mlp.up_proj"), "mlp.down_proj")

    @property
    def _scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    def _grouped(self, query: Tensor) -> Tensor:
        """[rows, key-value heads, queries of each, head_dim]."""
        return query.reshape(len(query), self.shape.kv_heads, -1, query.shape[-1])

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        """[key-value heads, queries of each, rows, rows of keys]."""
        return torch.einsum("rkgd,skd->kgrs", self._grouped(query), key) * self._scale

    def _own_scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Of each row with the key of its own: [key-value heads, queries of each, rows, 1]."""
        return torch.einsum("rkgd,rkd->kgr", self._grouped(query), key)[..., None] * self._scale

    def _mixed(self, chances: Tensor, value: Tensor) -> Tensor:
        """[rows, heads, head_dim]."""
        return torch.einsum("kgrs,skd->rkgd", chances, value).flatten(1, 2)

    def _own(self, chances: Tensor, value: Tensor) -> Tensor:
        """Of chances [key-value heads, queries of each, rows] of each row's own value: [rows, heads, head_dim]."""
        return torch.einsum("kgr,rkd->rkgd", chances, value).flatten(1, 2)

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [rows, 1, head_dim / 2] of rotary positions (arXiv:2104.09864)."""
        half = self.shape.head_dim // 2
        steps = torch.arange(half, dtype=torch.float32, device=positions.device) / half
        angles = positions.to(torch.float32)[:, None, None] * self.shape.theta**-steps
        return angles.cos(), angles.sin()


def _turned(values: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Halves of the last dimension turned against each other, as llama pairs them."""
    (cos, sin), (first, second) = turn, values.to(torch.float32).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(values.dtype)


def _shifted(rows: Tensor, by: int) -> Tensor:
    """Rows [rows, ...] moved down; zeros come in."""
    return rows if by == 0 else torch.cat([torch.zeros_like(rows[:by]), rows[:-by]])


class _EagleDrafting:
    """Keys and values of the rows that were read."""

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self._rows: SeenRows | None = None  # of tokens whose hidden states of the target are known
        self._own: SeenRows | None = None  # and of those that were drafted since
        self._output: Tensor | None = None  # of the last row

    def read(self, embedded: Tensor, states: Tensor) -> Tensor:
        output, self._rows = self._advance(embedded, self.head.fused(states), self._rows)
        self._own = self._rows
        return output

    def read_own(self, embedded: Tensor) -> Tensor:
        assert self._output is not None  # something was read before
        output, self._own = self._advance(embedded[None], self._output[None], self._own)
        return output

    def _advance(self, embedded: Tensor, features: Tensor, before: SeenRows | None) -> tuple[Tensor, SeenRows]:
        first = 0 if before is None else len(before.key)
        outputs, rows = self.head.advance(embedded.to(features.dtype), features, first, before)
        self._output = outputs[-1]
        return self._output, rows


class _Eagle3:
    name: ClassVar[str] = EagleShape.kind
    depths: ClassVar[int] = 3
    title: ClassVar[str] = "An EAGLE-3 head"
    tags: ClassVar[tuple[str, ...]] = ("speculators", name)
    readers: ClassVar[str] = "vLLM reads such heads"

    def shape(self, target: HeadTarget, vocabulary: int) -> EagleShape:
        """The sizes of a layer of the target, where its config says them as llama does."""
        config, path = target.config, target.path
        config.allow_global_per_layer_attribute_access = True  # of Gemma 4, where layers differ, what most layers have
        if target.layers < AUXILIARY - 1:
            raise PlanError(f"{path} has {target.layers} layer, too few for a head that reads {AUXILIARY} states")
        heads = _whole(config, "num_attention_heads") or 1
        head_dim = _whole(config, "head_dim") or target.hidden // heads
        if head_dim % 2:
            raise PlanError(f"heads of {head_dim} channels have no rotary positions, which a head of {self.name} needs")
        kv_heads = _whole(config, "num_key_value_heads") or heads
        rope = getattr(config, "rope_parameters", None)
        theta = rope.get("rope_theta") if isinstance(rope, Mapping) else None
        return EagleShape(
            hidden=target.hidden,
            vocabulary=min(vocabulary, target.vocabulary),
            target_vocabulary=target.vocabulary,
            states=states_of(target.layers),
            inner=_whole(config, "intermediate_size") or 4 * target.hidden,
            heads=heads,
            kv_heads=kv_heads if heads % kv_heads == 0 else heads,
            head_dim=head_dim,
            positions=_whole(config, "max_position_embeddings") or _POSITIONS,
            eps=float(getattr(config, "rms_norm_eps", None) or _EPS),
            theta=float(theta or _THETA),
        )

    def start(self, shape: EagleShape, target: TargetSample, seed: int) -> dict[str, LearntTensor]:
        """The feature is the last of the hidden states that are read, what attention and the feed-forward add is
        nothing, logits are made as the target makes them. All else is random."""
        generator = torch.Generator().manual_seed(seed)
        found = {}
        for name, size in shape.matrices.items():
            if len(size) == 1:
                found[name] = LearntTensor.of(torch.ones(size))
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                found[name] = LearntTensor.of(torch.zeros(size))
            else:
                drawn = torch.randn(size, generator=generator) * _SPREAD / size[1] ** 0.5
                found[name] = LearntTensor.of(drawn)
        fused = torch.zeros(shape.matrices[_FUSED])
        fused[:, -shape.hidden :] = torch.eye(shape.hidden)
        return {
            **found,
            _FUSED: LearntTensor.of(fused, target.sizes),
            "norm.weight": LearntTensor.of(target.gains * CALM),
            HEAD_WEIGHT: LearntSlowly.of(target.rows),
        }

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("speculators_model_type") == self.name

    def read(self, file: Path, config: Mapping[str, Any]) -> EagleShape:
        layer = config.get("transformer_layer_config")
        layer = layer if isinstance(layer, dict) else {}
        refuse_others(file, config, _AS_WRITTEN)
        refuse_others(file, layer, _LAYER_AS_WRITTEN)
        rope = layer.get("rope_parameters")
        turned = dict(rope) if isinstance(rope, dict) else {}
        theta = turned.pop("rope_theta", layer.get("rope_theta"))
        scaled = {key: value for key, value in turned.items() if (key, value) not in _PLAIN_ROPE} or layer.get(
            "rope_scaling"
        )
        if scaled:
            raise CheckpointError(f"{file}: rotary embeddings with {scaled!r} are not known here", "plain ones are")
        states = config.get("eagle_aux_hidden_state_layer_ids")
        if not isinstance(states, list) or len(states) != AUXILIARY or not all(map(is_count, states)):
            raise CheckpointError(f"{file} does not name three hidden states (eagle_aux_hidden_state_layer_ids)")
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
        refuse_no_sizes(file, sizes, numbers)
        if sizes["heads"] % sizes["kv_heads"] or sizes["head_dim"] % 2:
            raise CheckpointError(f"{file}: heads of {sizes['head_dim']} in groups of {sizes['kv_heads']} do not go")
        return EagleShape(**sizes, **numbers, states=tuple(sorted(states)))


_AS_WRITTEN = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
_LAYER_AS_WRITTEN = {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False,
                     "mlp_bias": False, "partial_rotary_factor": 1.0}  # fmt: skip
_PLAIN_ROPE = (("rope_type", "default"), ("partial_rotary_factor", 1.0))


def states_of(layers: int) -> tuple[int, ...]:
    """Numbers of the hidden states that are read: vLLM's default, or the last three where that names one twice."""
    return (2, layers // 2, layers - 3) if layers > 6 else (layers - 2, layers - 1, layers)


def _whole(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


HEAD = _Eagle3()
