"""Experts as separate linears: transformers keeps them as 3-D parameters, which no hook on a linear can see.

transformers says of its blocks how they are laid out (`use_experts_implementation`); of its few blocks that say
nothing, the shapes tell it. A block that fits neither is left as it is.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import _default_apply_gate

from llmcompress.store.expert_stacks import ExpertStack

GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
_FLAT = {"w1": "gate_proj", "v1": UP, "w2": DOWN}  # parameters of the blocks of DBRX
_ROUTED = 3  # arguments of a block that routes: the tokens, which experts they go to, and with what weights


@dataclass(frozen=True)
class ExpertLayout:
    """How a block keeps its experts.

    stacks: by path below the block, how its parameters are cut. gated: gate and up, else there is only up. bias: every
    matrix has one. interleaved: outputs of gate and up take turns in what makes the input of down_proj. sorted: the
    block is called with one batch per expert, one after the other, and does not route. idle: numbers from `count` on
    stand for experts that return their input. single: the block is one matrix of every expert, called with tokens one
    expert after the other and with how many each has; from `hidden` to `inner` channels.
    """

    count: int
    hidden: int
    inner: int
    stacks: Mapping[str, ExpertStack]
    gated: bool = True
    bias: bool = False
    interleaved: bool = False
    sorted: bool = False
    idle: bool = False
    single: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The parameters of an expert."""
        return tuple(part for stack in self.stacks.values() for part in stack.parts)


def split(stack: ExpertStack, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Path below an expert, and the tensors of all experts in one, for each part of a parameter of a block."""
    for part, cut in stack.cuts(tuple(value.shape)):
        yield part, cut.of(value.reshape(-1, *cut.share))


def layout_of(block: nn.Module) -> ExpertLayout | None:
    """How a module keeps experts in stacked parameters, None if it is no such block or not of a layout known here."""
    own = {name: value for name, value in block._parameters.items() if value is not None}
    if not own:
        return _flat_layout(block)
    if own.keys() == {"weight"}:
        return _single_layout(block, own["weight"])
    gated = GATE_UP in own
    first = own.get(GATE_UP, own.get(UP))
    bias = f"{DOWN}_bias" in own
    names = {GATE_UP if gated else UP, DOWN}
    if first is None or own.keys() != names | ({f"{name}_bias" for name in names} if bias else set()):
        return None
    down = own[DOWN]
    if first.ndim != 3 or down.ndim != 3 or not (hasattr(block, "act_fn") or _combines(block)):
        return None
    said = _said(block, gated, bias)
    turned = None if said is None else _turned(block, first, down, 2 if gated else 1)
    if said is None or turned is None:
        return None
    count, hidden, inner = down.mT.shape if turned else down.shape
    parts = ("gate_proj", UP) if gated else (UP,)
    interleaved = said.get("interleaved", False)
    stacks = {}
    for name, of in ((GATE_UP if gated else UP, parts), (DOWN, (DOWN,))):
        weights, biases = (tuple(f"{part}.{leaf}" for part in of) for leaf in ("weight", "bias"))
        mixed = interleaved and len(of) > 1
        stacks[name] = ExpertStack(count, weights, turned=turned, interleaved=mixed)
        if bias:
            stacks[f"{name}_bias"] = ExpertStack(count, biases, interleaved=mixed)
    return ExpertLayout(count, hidden, inner, stacks, gated, bias, **said)


def _flat_layout(block: Any) -> ExpertLayout | None:
    """The layout of a block in which all experts share one axis with their rows, as in DBRX."""
    mlp, count = getattr(block, "mlp", None), getattr(block, "num_experts", None)
    if not type(block).__module__.startswith("transformers.models.") or not isinstance(mlp, nn.Module) or not count:
        return None
    shapes = {name: tuple(value.shape) for name, value in mlp.named_parameters()}
    if shapes.keys() != set(_FLAT) or len(set(shapes.values())) != 1 or not hasattr(mlp, "activation_fn"):
        return None
    rows, hidden = shapes["w1"]
    stacks = {
        f"mlp.{name}": ExpertStack(count, (f"{part}.weight",), flat=True, turned=part == DOWN)
        for name, part in _FLAT.items()
    }
    return ExpertLayout(count, hidden, rows // count, stacks)


def _single_layout(block: Any, weight: Tensor) -> ExpertLayout | None:
    """The layout of a block that is one matrix of every expert, as in JetMoe."""
    if weight.ndim != 3 or not type(block).__module__.startswith("transformers.models."):
        return None
    if [*inspect.signature(type(block).forward).parameters][1:] != ["inputs", "expert_size"]:
        return None
    count, inner, hidden = weight.shape
    return ExpertLayout(count, hidden, inner, {"weight": ExpertStack(count, ("weight",))}, single=True)


def _turned(block: Any, first: Tensor, down: Tensor, fold: int) -> bool | None:
    """Whether matrices are [in, out], by what a block says or by shapes; None where it says what shapes do not."""
    straight = first.shape[2] == down.shape[1] and first.shape[1] == fold * down.shape[2]
    turned = first.shape[1] == down.shape[2] and first.shape[2] == fold * down.shape[1]
    if hasattr(block, "is_transposed"):
        return block.is_transposed if (turned if block.is_transposed else straight) else None
    return False if straight else True if turned else None


def _said(block: Any, gated: bool, bias: bool) -> dict[str, bool] | None:
    """What a block says of its layout, None if it says something that is not known here, or is of unknown origin."""
    if hasattr(block, "is_transposed"):
        if block.has_gate != gated or block.has_bias != bias or block.has_post_expert_norm:
            return None
        return {"interleaved": not block.is_concatenated}
    if not type(block).__module__.startswith("transformers.models."):
        return None  # whose gate comes first, nothing tells
    arguments = len(inspect.signature(type(block).forward).parameters) - 1
    if arguments not in (1, _ROUTED):
        return None
    return {"sorted": arguments == 1, "idle": hasattr(block, "identity_expert")}


def _combines(block: nn.Module) -> bool:
    """Whether a block has its own way of making the input of down_proj."""
    return getattr(type(block), "_apply_gate", _default_apply_gate) is not _default_apply_gate


class _Matrix(nn.Linear):
    """A linear without random values, which take long for thousands of experts and are never used."""

    def reset_parameters(self) -> None:
        pass


class Expert(nn.Module):
    """One feed-forward expert, gated or not.

    combine: what makes the input of down_proj of gate and up, side by side as the block keeps them; without, activation
    of gate times up.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        activation: Callable[[Tensor], Tensor] | None,
        combine: Callable[[Tensor], Tensor] | None,
    ) -> None:
        super().__init__()
        if layout.gated:
            self.gate_proj = _Matrix(layout.hidden, layout.inner, bias=layout.bias)
        self.up_proj = _Matrix(layout.hidden, layout.inner, bias=layout.bias)
        self.down_proj = _Matrix(layout.inner, layout.hidden, bias=layout.bias)
        self.activation = activation
        self._gated, self._interleaved, self._combine = layout.gated, layout.interleaved, combine

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] to [tokens, hidden]."""
        out: Tensor = self.down_proj(self.inner(x))
        return out

    def inner(self, x: Tensor) -> Tensor:
        """The input of down_proj: [tokens, intermediate]."""
        if self._combine is None:
            assert self.activation is not None
            if not self._gated:
                return self.activation(self.up_proj(x))
            gated: Tensor = self.activation(self.gate_proj(x)) * self.up_proj(x)
            return gated
        pair = self.gate_proj(x), self.up_proj(x)
        return self._combine(torch.stack(pair, -1).flatten(-2) if self._interleaved else torch.cat(pair, -1))


class UnfusedExperts(nn.ModuleList):
    """Stands in for a block of fused experts; same call, same function, summed in order of the experts' numbers."""

    def __init__(self, layout: ExpertLayout, experts: Sequence[nn.Module]) -> None:
        super().__init__(experts)
        self.layout = layout

    @classmethod
    def like(cls, fused: nn.Module, layout: ExpertLayout) -> "UnfusedExperts":
        """Experts with the sizes and the function of transformers' fused block."""
        if layout.single:
            matrices = [_Matrix(layout.hidden, layout.inner, bias=False) for _ in range(layout.count)]
            return UnfusedMatrix(layout, matrices)
        block: Any = fused
        combine = block._apply_gate if _combines(block) else None
        home = getattr(block, "mlp", block)
        activation = getattr(home, "act_fn", getattr(home, "activation_fn", None))
        return cls(layout, [Expert(layout, activation, combine) for _ in range(layout.count)])

    def forward(self, hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
        """hidden_states [..., hidden] to the same; routing: indices of experts and weights, [tokens, k]."""
        if self.layout.sorted:
            return self._each(hidden_states)
        return self._routed(hidden_states.flatten(0, -2), *routing, *named.values()).view(hidden_states.shape)

    def _routed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            tokens, place = torch.where(top_k_index == number)
            if tokens.numel() == 0:
                continue
            out = expert(hidden_states[tokens]) * top_k_weights[tokens, place, None]
            result.index_add_(0, tokens, out.to(result.dtype))
        if self.layout.idle:
            weights = torch.where(top_k_index >= len(self), top_k_weights, 0).sum(-1, keepdim=True)
            result += (hidden_states * weights).to(result.dtype)
        return result

    def _each(self, hidden_states: Tensor) -> Tensor:
        """Every expert on its own batch. Rows of zeros are tokens that were not sent there, and give zeros.

        Where there are zeros alone, as when a layer is observed, every row is taken for sent.
        """
        result = torch.zeros_like(hidden_states)
        sent = hidden_states.any(-1)
        sent |= ~sent.any()
        for expert, rows in zip(self, torch.arange(len(sent), device=sent.device).chunk(len(self)), strict=True):
            own = rows[sent[rows]]
            if own.numel():
                result[own] = expert(hidden_states[own])
        return result


class UnfusedMatrix(UnfusedExperts):
    """Stands in for a block that is one matrix of every expert."""

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:  # type: ignore[override]
        """inputs [tokens, hidden], the tokens of one expert after those of the other, to [tokens, inner]."""
        parts = zip(self, torch.split(inputs, expert_size), strict=True)
        return torch.cat([expert(part) for expert, part in parts if len(part)])


def unfuse(layer: nn.Module, path: str) -> None:
    """Replace the block of fused experts at a path below a layer by separate ones, if the layer has such a block."""
    parent_path, _, name = path.rpartition(".")
    try:
        parent = layer.get_submodule(parent_path)
    except AttributeError:
        return
    block = getattr(parent, name, None)
    layout = layout_of(block) if isinstance(block, nn.Module) else None
    if block is not None and layout is not None:
        setattr(parent, name, UnfusedExperts.like(block, layout))
