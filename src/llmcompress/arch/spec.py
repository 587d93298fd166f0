"""What a model family looks like: which matrices its decoder layers hold, in which order they run, what they read.

What the engine needs is derived from it: matrices that read the same space share one Gram matrix and are solved
together (a stage); stages run in order of execution. From norms and flows follows where the channels of a space can be
scaled, and whether hidden states can be rotated (`sites.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llmcompress.arch.scaling_site import Site
from llmcompress.errors import CheckpointError

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""What config.json may call the number of layers."""
_FURTHER_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")
RESIDUAL = "residual"  # the space of the hidden states, which every layer adds to

_QUERY_HEADS = ("num_attention_heads", "n_head")
_EXPERT_COUNTS = ("num_experts", "num_local_experts")  # transformers 5 saves Qwen's under Mixtral's key


@dataclass(frozen=True)
class Linear:
    """A weight matrix of a decoder layer.

    path: module path below the layer, `{e}` standing for an expert's number. reads: the space its input lies in, with
    `{e}` if it is an expert's own. conv1d: stored [in, out], as in GPT-2. adds: its output is added to the hidden
    states as it is.
    """

    path: str
    reads: str
    conv1d: bool = False
    adds: bool = False

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.path


@dataclass(frozen=True)
class Norm:
    """A norm: normalised states times a gain per channel, plus a bias where it has one.

    path: module path, below the layer or of what stands after the layers. feeds: the spaces that are its output, with
    `{e}` those of all experts; RESIDUAL where it ends a branch. offset: the gain is its weight plus this. centred: it
    subtracts the mean (LayerNorm). when: config key and the value without which it feeds other things too.
    """

    path: str
    feeds: tuple[str, ...]
    offset: float = 0.0
    centred: bool = False
    when: tuple[str, Any] | None = None


@dataclass(frozen=True)
class Flow:
    """Outputs of a matrix that reach a space channel by channel, times things that do not depend on them.

    source: module path. target: the space. rows: which outputs those are: all, the last ones, or of every head the last
    third. heads: the target holds each key-value head once for every query head that shares it. when: config key and
    the value without which there is no such flow.
    """

    source: str
    target: str
    rows: Literal["all", "last", "third of heads"] = "all"
    heads: bool = False
    when: tuple[str, Any] | None = None


@dataclass(frozen=True)
class Scores:
    """Where queries and keys come from, which meet channel by channel in the scores of attention.

    query, key: module paths; the same where one matrix holds both, queries first. norms: of queries and of keys, where
    a model has them; offset: of their weights. rotary: whether channels are rotated in pairs, half a head apart.
    """

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    norms: tuple[str, str] | None = None
    offset: float = 0.0
    rotary: bool = True


@dataclass(frozen=True)
class Experts:
    """Mixture-of-experts blocks whose experts transformers keeps as 3-D parameters.

    paths: the blocks' module paths below the layer. count: config key that holds the number of experts. number: how
    many there are, where that was observed and not declared.
    """

    paths: tuple[str, ...]
    count: str = ""
    number: int | None = None

    def block(self, path: str) -> str | None:
        """The block that a module path below the layer lies in."""
        return next((block for block in self.paths if path.startswith(f"{block}.")), None)

    def general(self, path: str) -> tuple[str, str] | None:
        """A module path below the layer with `{e}` in place of an expert's number, and that; None if of no expert."""
        block = self.block(path)
        if block is None:
            return None
        number, dot, below = path.removeprefix(f"{block}.").partition(".")
        return f"{block}.{{e}}{dot}{below}", number


@dataclass(frozen=True)
class ArchSpec:
    """One model family, known by the `model_type` of config.json.

    layers, embed, head: module paths in transformers' causal model. outside: those of other modules outside of the
    layers, such as the last norm, without whose weight no checkpoint is whole. disk: module paths, below a layer or of
    what stands outside the layers, that are called otherwise on disk; `{e}` stands for an expert's number. Of an
    observed family also paths of parameters, and that of the list of layers. joined: parameter paths, below a layer or
    of what stands outside, with the on-disk paths of the parts that follow one another along the first dimension.
    never: matrices that are never quantised (routers). norms, flows: those of a layer; without, nothing can be scaled
    or rotated. scores: where queries and keys come from. final: the norm that feeds the head. positions: module path of
    learned positions. attention: implementation to ask transformers for where its default would change the function.
    outputs: how many values a layer returns, the hidden states first; a tuple if more than one.
    grouped_queries: whether attention may have fewer key-value heads than query heads; without, a count of them in
    config.json means nothing.
    observed: found by running the model, not declared; `linears` are then those of all layers together, and a layer may
    lack some. left_out: paths below a layer of what an observation found but cannot offer, with the reason. idle: by
    number of a layer, paths of matrices that it has and does not run, as another layer that is built alike may.
    proven: the sites of layers of an observed family by number, where a plan asks for them.
    tiny: config values of a small random model for tests.
    """

    name: str
    model_types: tuple[str, ...]
    linears: tuple[Linear, ...]
    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    head: str = "lm_head"
    outside: tuple[str, ...] = ("model.norm",)
    experts: Experts | None = None
    disk: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    never: tuple[Linear, ...] = ()
    norms: tuple[Norm, ...] = ()
    flows: tuple[Flow, ...] = ()
    scores: Scores | None = None
    final: Norm | None = None
    positions: str | None = None
    attention: str | None = None
    outputs: int = 1
    grouped_queries: bool = True
    observed: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)
    idle: Mapping[int, frozenset[str]] = field(default_factory=dict)
    proven: Mapping[int, tuple[Site, ...]] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def stages(self) -> list[tuple[Linear, ...]]:
        """Linears grouped by the space they read, in order of execution."""
        grouped: dict[str, list[Linear]] = {}
        for linear in self.linears:
            grouped.setdefault(linear.reads, []).append(linear)
        return [tuple(group) for group in grouped.values()]

    def expert_count(self, config: Mapping[str, Any]) -> int:
        """Experts per layer by config.json, 0 for a dense family."""
        if self.experts is None:
            return 0
        if self.experts.number is not None:
            return self.experts.number
        for key in (self.experts.count, *_EXPERT_COUNTS):
            if isinstance(config.get(key), int):
                return int(config[key])
        raise CheckpointError(f"config.json does not say how many experts there are ({self.experts.count})")

    def expand(self, linear: Linear, experts: int) -> Iterable[tuple[int | None, str, str]]:
        """(expert number or None, module path, space) of each matrix a declaration stands for."""
        if not linear.per_expert:
            yield None, linear.path, linear.reads
            return
        for expert in range(experts):
            yield expert, linear.path.format(e=expert), linear.reads.format(e=expert)

    def disk_path(self, path: str) -> str:
        """On-disk path of a module path, both below the layer, or both of what stands outside the layers."""
        if path in self.disk:
            return self.disk[path]
        found = self.experts.general(path) if self.experts is not None else None
        return path if found is None else self.disk.get(found[0], found[0]).format(e=found[1])

    def disk_parameter(self, path: str) -> str:
        """On-disk path of a parameter, both below the layer, or both of what stands outside the layers."""
        module, dot, leaf = path.rpartition(".")
        return self.disk.get(path) or f"{self.disk_path(module)}{dot}{leaf}"


def further_layers(config: Mapping[str, Any]) -> int:
    """The number of layers after the last by config.json, which predict further tokens; 0 where it says none."""
    said = (config.get(key) for key in _FURTHER_COUNTS)
    return next((count for count in said if isinstance(count, int)), 0)


def head_width(config: Mapping[str, Any]) -> int | None:
    """Numbers of a key or value of one head by config.json, None where it does not say."""
    said, heads, hidden = config.get("head_dim"), attention_heads(config), config.get("hidden_size")
    if isinstance(said, int):
        return said
    return hidden // heads[0] if heads is not None and isinstance(hidden, int) else None


def attention_heads(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Query heads and key-value heads by config.json, None where it does not say."""
    queries = next((config[key] for key in _QUERY_HEADS if config.get(key) is not None), None)
    pairs = config.get("num_key_value_heads") or queries
    if isinstance(queries, int) and isinstance(pairs, int) and min(queries, pairs) > 0:
        return queries, pairs
    return None


def rotated_share(config: Mapping[str, Any]) -> float:
    """How much of every head is rotated by position; newer files say so beside the frequencies."""
    nested = config.get("rope_parameters")
    values = nested.get("partial_rotary_factor") if isinstance(nested, Mapping) else None
    found = values if values is not None else config.get("partial_rotary_factor")
    return float(found) if isinstance(found, int | float) else 1.0


def attention_and_mlp() -> tuple[Linear, ...]:
    """The seven matrices of a Llama-like layer: q, k, v | o | gate, up | down."""
    return (
        Linear("self_attn.q_proj", reads="attn_in"),
        Linear("self_attn.k_proj", reads="attn_in"),
        Linear("self_attn.v_proj", reads="attn_in"),
        Linear("self_attn.o_proj", reads="attn_out", adds=True),
        Linear("mlp.gate_proj", reads="mlp_in"),
        Linear("mlp.up_proj", reads="mlp_in"),
        Linear("mlp.down_proj", reads="mlp_hidden", adds=True),
    )


LLAMA_NORMS = (Norm("input_layernorm", ("attn_in",)), Norm("post_attention_layernorm", ("mlp_in",)))
LLAMA_FLOWS = (Flow("self_attn.v_proj", "attn_out", heads=True), Flow("mlp.up_proj", "mlp_hidden"))
LLAMA_FINAL = Norm("model.norm", ("head",))

EXPERT_LINEARS = (
    Linear("mlp.experts.{e}.gate_proj", reads="expert_in.{e}"),
    Linear("mlp.experts.{e}.up_proj", reads="expert_in.{e}"),
    Linear("mlp.experts.{e}.down_proj", reads="expert_hidden.{e}", adds=True),
)
"""The matrices of a mixture of experts in a Llama-like layer; what follows belongs to it."""
ROUTER = Linear("mlp.gate", reads="mlp_in")
EXPERT_NORMS = (Norm("input_layernorm", ("attn_in",)), Norm("post_attention_layernorm", ("mlp_in", "expert_in.{e}")))
EXPERT_FLOW = Flow("mlp.experts.{e}.up_proj", "expert_hidden.{e}")
