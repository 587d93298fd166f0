"""What has to be known of a model family to write it as GGUF; each file of `families` declares one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from llmcompress.errors import CheckpointError, PlanError
from llmcompress.formats.gguf.hyper import Hyper, read_hyper
from llmcompress.formats.gguf.keys import Key
from llmcompress.formats.gguf.rope import Rope, read_rope, refuse_other
from llmcompress.formats.gguf.tensors import Rows
from llmcompress.registry import discover, suggest

ATTENTION = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
GATED = ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
EXPERTS = ("ffn_norm", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def _no_rows(role: str, hyper: Hyper) -> Rows | None:
    return None


def _no_values(hyper: Hyper, rope: Rope) -> Mapping[str, tuple[float, ...]]:
    return {}


def _no_keys(hyper: Hyper, rope: Rope) -> Sequence[Key]:
    return ()


def _no_objection(hyper: Hyper) -> str | None:
    return None


@dataclass(frozen=True)
class Family:
    """One model family, known by the `model_type` of config.json.

    arch: GGUF's name of it. base: what names of its tensors begin with; some checkpoints leave it out. head: path of
    the output matrix. tied: transformers' default of tie_word_embeddings. untied: llama.cpp knows an output matrix of
    its own. head_needed: it asks for one even where it is the embedding. grouped: it may have fewer heads of keys than
    of queries. rotary: it has rotary positions, else learned ones. square: heads together are as wide as the model.
    ropes: scalings that llama.cpp knows for it. windowed: llama.cpp computes its sliding window. fused_gate: gate and
    up are one matrix. norm_heads: norms of queries and keys span all heads, not one. transposed: last parts of paths of
    matrices stored [in, out]. norm_offset: added to the weights of norms. cut_vocabulary: rows of the embedding that no
    token has are cut. factored: llama.cpp multiplies by the factors of types that have such (types.FACTORED).
    layer: roles of the weights of a layer, all of which llama.cpp asks for. biased: each of them has a bias too.
    biases: roles that may have one.
    defaults: values of config keys that may be absent. only: config keys with the values that llama.cpp computes,
    None standing for an absent key too. objection: why llama.cpp would compute something else, or None.
    rows: rows taken for a role, such as "attn_q". values: computed tensors by name. keys: keys beyond those all have.
    """

    name: str
    model_types: tuple[str, ...]
    arch: str
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
    layer: tuple[str, ...] = (*ATTENTION, *GATED)
    biased: bool = False
    biases: tuple[str, ...] = ("attn_q", "attn_k", "attn_v")
    cut_vocabulary: bool = False
    factored: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    objection: Callable[[Hyper], str | None] = _no_objection
    rows: Callable[[str, Hyper], Rows | None] = _no_rows
    values: Callable[[Hyper, Rope], Mapping[str, tuple[float, ...]]] = _no_values
    keys: Callable[[Hyper, Rope], Sequence[Key]] = _no_keys

    def read(self, config: Mapping[str, Any]) -> tuple[Hyper, Rope]:
        """Hyperparameters and rotary embedding of a config.json.

        CheckpointError for what is missing or no number, PlanError for what llama.cpp would compute otherwise.
        """
        hyper = read_hyper(config, self.defaults, self.experts, self.grouped)
        rope = read_rope(hyper.config) if self.rotary else Rope(0.0, None, "default", 1.0)
        if self.rotary:
            refuse_other(rope, self.ropes, self.name)
        for key, allowed in self.only.items():
            if hyper.config.get(key) not in allowed:
                raise PlanError(
                    f"config.json: {key} is {hyper.config.get(key)!r}, llama.cpp computes {self.name} models with "
                    f"{' or '.join(repr(value) for value in allowed if value is not None)}"
                )
        if self.square and hyper.heads * hyper.head_dim != hyper.hidden:
            raise PlanError(
                f"config.json: {hyper.heads} heads of {hyper.head_dim} are not as wide as the model ({hyper.hidden}), "
                f"which llama.cpp takes for granted in {self.name} models"
            )
        if objection := self.objection(hyper):
            raise PlanError(objection)
        return hyper, rope


def find(config: Mapping[str, Any]) -> Family:
    """The family of a config.json; CheckpointError if GGUF files of it cannot be written here."""
    known = known_types()
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
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


@cache
def known_types() -> Mapping[str, Family]:
    """The families by `model_type`."""
    from llmcompress.formats.gguf import families

    return {kind: family for family in discover(families, "FAMILY").values() for kind in family.model_types}
