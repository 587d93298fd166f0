"""What has to be known of a model family to write it as GGUF; each file of `families` declares one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from llmcompress.errors import CheckpointError, PlanError
from llmcompress.formats.gguf.fields import told
from llmcompress.formats.gguf.hyper import Hyper, read_hyper
from llmcompress.formats.gguf.keys import Key, u32
from llmcompress.formats.gguf.refused import REASONS
from llmcompress.formats.gguf.rope import Rope, read_rope, refuse_other
from llmcompress.formats.gguf.tensors import Factors, GGUFTensor, Rows, Strips
from llmcompress.registry import discover, suggest

ATTENTION = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
GATED = ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
EXPERTS = ("ffn_norm", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
SHARED_EXPERT = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
CHOICE = "exp_probs_b.bias"
"""What is added to the scores of experts where they are chosen."""

Shape = tuple[int, ...]


def _no_rows(role: str, hyper: Hyper) -> Rows | None:
    return None


def _no_factors(role: str, hyper: Hyper) -> Factors:
    return ()


def _no_values(hyper: Hyper, rope: Rope) -> Mapping[str, tuple[float, ...]]:
    return {}


def _no_keys(hyper: Hyper, rope: Rope) -> Sequence[Key]:
    return ()


def _no_objection(hyper: Hyper) -> str | None:
    return None


def _no_roles(hyper: Hyper, layer: int) -> tuple[str, ...]:
    return ()


def _no_shapes(hyper: Hyper, layer: int) -> Mapping[str, Shape]:
    return {}


def _as_is(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config


def _no_parts(path: str, shape: Shape, hyper: Hyper) -> Sequence[GGUFTensor] | None:
    return None


def renamed(names: Mapping[str, str]) -> Callable[[str, Shape, Hyper], Sequence[GGUFTensor] | None]:
    """Parts of a family: tensors of a layer that stay whole, with names in GGUF by the ends of their paths."""

    def parts(path: str, shape: Shape, hyper: Hyper) -> Sequence[GGUFTensor] | None:
        name = next((name for end, name in names.items() if path.endswith(end)), None)
        return None if name is None else (GGUFTensor(name, shape),)

    return parts


@dataclass(frozen=True)
class Family:
    """One model family, known by the `model_type` of config.json.

    arch: GGUF's name of it. named: that of an architecture whose tensors have the same names, for one that the gguf
    package does not know yet. base: what names of its tensors begin with; some checkpoints leave it out. head: path of
    the output matrix. tied: transformers' default of tie_word_embeddings. untied: llama.cpp knows an output matrix of
    its own. head_needed: it asks for one even where it is the embedding. grouped: it may have fewer heads of keys than
    of queries. rotary: it has rotary positions, else learned ones. square: heads together are as wide as the model.
    ropes: scalings that llama.cpp knows for it. windowed: llama.cpp computes its sliding window. fused_gate: gate and
    up are one matrix. norm_heads: norms of queries and keys span all heads, not one. transposed: last parts of paths of
    matrices stored [in, out]. norm_offset: added to the weights of norms. cut_vocabulary: rows of the embedding that no
    token has are cut. factored: llama.cpp multiplies by the factors of types that have such (types.FACTORED).
    layer: roles of the tensors of a layer, all of which llama.cpp asks for, or a function that says those of one layer;
    unused: roles among them of which llama.cpp only asks that they be there.
    outer: those outside of layers beyond embedding, norm and head. bare: roles of weights whose names do not say so
    at their end. biased: roles of both that have a bias too, biases:
    roles that may have one. shapes: of roles of a layer (-1: outside of them) that are not as usual. parts: what a
    tensor of the checkpoint, of that path, is taken apart into, without sources; None for one that stays whole.
    skipped: parts of names that are left out. listed: ends of names of numbers, one in each layer, that a key lists.
    lists: ends of names of tensors of whole numbers that keys hold, by key.
    forms: of values, by role (tensors.FORMS). reshaped: roles of tensors
    that take the extents `shapes` gives them. stacked: roles of tensors outside of layers that are made of numbered
    matrices, by the last part of the path before the number. lengthened: config keys that say how many rows a table
    outside of layers has, by its role; tokens beyond them take the first row.
    rms: its norms do not subtract the mean. unnormed: it has no norm with weights before the head.
    told: fields of config.json of which keys say the same (fields.py). partly: a key says how many values of a head are
    rotated. attention: it has layers of attention.
    defaults: values of config keys that may be absent. only: config keys with the values that llama.cpp computes,
    None standing for an absent key too. meant: config.json with what the family takes from other keys. objection: why
    llama.cpp would compute something else, or None. rows: rows taken for a role, such as "attn_q"; inputs: the order of
    its columns. factors: what the rows of a role's weights are multiplied by, as llama.cpp has no place for it. values:
    computed tensors by name. keys: keys beyond those all have.
    """

    name: str
    model_types: tuple[str, ...]
    arch: str
    named: str = ""
    base: str = "model."
    head: str = "lm_head"
    tied: bool = False
    untied: bool = True
    head_needed: bool = False
    grouped: bool = True
    experts: bool = False
    rotary: bool = True
    square: bool = False
    ropes: tuple[str, ...] = ("default", "linear", "yarn")
    windowed: bool = False
    fused_gate: bool = False
    norm_heads: bool = False
    transposed: tuple[str, ...] = ()
    norm_offset: float = 0.0
    layer: tuple[str, ...] | Callable[[Hyper, int], tuple[str, ...]] = (*ATTENTION, *GATED)
    unused: Callable[[Hyper, int], tuple[str, ...]] = _no_roles
    outer: tuple[str, ...] | Callable[[Hyper], tuple[str, ...]] = ()
    bare: tuple[str, ...] = ()
    biased: tuple[str, ...] = ()
    biases: tuple[str, ...] = ("attn_q", "attn_k", "attn_v")
    cut_vocabulary: bool = False
    factored: bool = False
    attention: bool = True
    partly: bool = False
    unnormed: bool = False
    told: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    forms: Mapping[str, str] = field(default_factory=dict)
    reshaped: tuple[str, ...] = ()
    listed: Mapping[str, str] = field(default_factory=dict)
    lists: Mapping[str, str] = field(default_factory=dict)
    stacked: Mapping[str, str] = field(default_factory=dict)
    lengthened: Mapping[str, str] = field(default_factory=dict)
    rms: bool = True
    shapes: Callable[[Hyper, int], Mapping[str, Shape]] = _no_shapes
    parts: Callable[[str, Shape, Hyper], Sequence[GGUFTensor] | None] = _no_parts
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    meant: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _as_is
    objection: Callable[[Hyper], str | None] = _no_objection
    rows: Callable[[str, Hyper], Rows | Strips | None] = _no_rows
    inputs: Callable[[str, Hyper], Rows | Strips | None] = _no_rows
    factors: Callable[[str, Hyper], Factors] = _no_factors
    values: Callable[[Hyper, Rope], Mapping[str, tuple[float, ...]]] = _no_values
    keys: Callable[[Hyper, Rope], Sequence[Key]] = _no_keys

    def read(self, config: Mapping[str, Any]) -> tuple[Hyper, Rope]:
        """Hyperparameters and rotary embedding of a config.json.

        CheckpointError for what is missing or no number, PlanError for what llama.cpp would compute otherwise.
        """
        hyper = read_hyper(self.meant(config), self.defaults, self.experts, self.grouped, self.attention)
        rope = read_rope(hyper.config) if self.rotary else Rope(0.0, None, "default", 1.0)
        if self.rotary:
            refuse_other(rope, self.ropes, self.name)
        for key, allowed in self.only.items():
            if hyper.config.get(key) not in allowed:
                raise PlanError(
                    f"config.json: {key} is {hyper.config.get(key)!r}, llama.cpp computes {self.name} models with "
                    f"{' or '.join(repr(value) for value in allowed if value is not None)}"
                )
        pairs = hyper.config.get("num_key_value_heads")
        if not self.grouped and pairs is not None and pairs != hyper.heads:
            raise PlanError(
                f"config.json: num_key_value_heads is {pairs}, llama.cpp takes for granted in {self.name} models that "
                f"it is that of all heads ({hyper.heads})"
            )
        if self.square and hyper.heads * hyper.head_dim != hyper.hidden:
            raise PlanError(
                f"config.json: {hyper.heads} heads of {hyper.head_dim} are not as wide as the model ({hyper.hidden}), "
                f"which llama.cpp takes for granted in {self.name} models"
            )
        if objection := self.objection(hyper):
            raise PlanError(objection)
        return hyper, rope

    def roles(self, hyper: Hyper, layer: int) -> tuple[str, ...]:
        """Roles of the tensors of a layer."""
        return self.layer(hyper, layer) if callable(self.layer) else self.layer

    def own_keys(self, hyper: Hyper, rope: Rope) -> list[Key]:
        """Keys beyond those that all families have, or instead of them."""
        partly = [u32(f"{self.arch}.rope.dimension_count", rope.dimensions(hyper.head_dim))] if self.partly else []
        return [*partly, *told(self.arch, hyper.config, self.told), *self.keys(hyper, rope)]


@dataclass(frozen=True)
class Kin:
    """Families of which a line each says all."""

    name: str
    members: tuple[Family, ...]


def find(config: Mapping[str, Any]) -> Family:
    """The family of a config.json; CheckpointError if GGUF files of it cannot be written here."""
    known = known_types()
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        if reason := REASONS.get(str(model_type)):
            raise CheckpointError(
                f"models of type {model_type!r} cannot be written as GGUF: {reason}", "keep safetensors"
            )
        raise CheckpointError(
            f"models of type {model_type!r} cannot be written as GGUF", suggest(str(model_type), list(known))
        )
    return known[model_type]


def known_architectures() -> frozenset[str]:
    """GGUF's names of the architectures that are known here."""
    return frozenset(family.arch for family in known_types().values())


def is_factored(arch: str) -> bool:
    """Whether llama.cpp multiplies by factors in models of a GGUF architecture."""
    return any(family.factored for family in known_types().values() if family.arch == arch)


def are_alike(arch: str) -> bool:
    """Whether all layers of models of a GGUF architecture have the same tensors."""
    return not any(callable(family.layer) for family in known_types().values() if family.arch == arch)


@cache
def known_types() -> Mapping[str, Family]:
    """The families by `model_type`."""
    from llmcompress.formats.gguf import families

    found = discover(families, "FAMILY").values()
    members = [family for item in found for family in (item.members if isinstance(item, Kin) else (item,))]
    return {kind: family for family in members for kind in family.model_types}
