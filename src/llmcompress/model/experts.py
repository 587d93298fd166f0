"""Experts as separate linears: transformers keeps them as 3-D parameters, which no hook on a linear can see.

transformers says of its blocks how they are laid out (`use_experts_implementation`); of its few blocks that say
nothing, the shapes tell it. A block that fits neither is left as it is.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import _default_apply_gate

GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
_ROUTED = 3  # arguments of a block that routes: the tokens, which experts they go to, and with what weights


@dataclass(frozen=True)
class ExpertLayout:
    """How a block keeps its experts.

    gated: gate and up are one parameter, else there is only up. bias: every parameter has one. transposed: matrices are
    [in, out]. interleaved: rows of gate and up take turns. sorted: the block is called with one batch per expert,
    one after the other, and does not route. idle: numbers from `count` on stand for experts that return their input.
    """

    count: int
    hidden: int
    inner: int
    gated: bool = True
    bias: bool = False
    transposed: bool = False
    interleaved: bool = False
    sorted: bool = False
    idle: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The matrices of an expert, in order of execution."""
        return ("gate_proj", UP, DOWN) if self.gated else (UP, DOWN)

    def split(self, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Path below an expert, and the tensors of all experts in one, for each part of a parameter of the block."""
        stem, biased = name.removesuffix("_bias"), name.endswith("_bias")
        leaf = "bias" if biased else "weight"
        rows = value if biased or not self.transposed else value.transpose(1, 2)
        if stem != GATE_UP:
            yield f"{stem}.{leaf}", rows
        elif self.interleaved:
            yield f"gate_proj.{leaf}", rows[:, ::2]
            yield f"up_proj.{leaf}", rows[:, 1::2]
        else:
            half = rows.shape[1] // 2
            yield f"gate_proj.{leaf}", rows[:, :half]
            yield f"up_proj.{leaf}", rows[:, half:]


def layout_of(block: nn.Module) -> ExpertLayout | None:
    """How a module keeps experts in 3-D parameters, None if it is no such block or not of a layout known here."""
    own = {name: value for name, value in block._parameters.items() if value is not None}
    gated = GATE_UP in own
    first = own.get(GATE_UP, own.get(UP))
    bias = f"{DOWN}_bias" in own
    names = {GATE_UP if gated else UP, DOWN}
    if first is None or own.keys() != names | ({f"{name}_bias" for name in names} if bias else set()):
        return None
    down = own[DOWN]
    if first.ndim != 3 or down.ndim != 3 or not (hasattr(block, "act_fn") or _combines(block)):
        return None
    fold = 2 if gated else 1
    straight = first.shape[2] == down.shape[1] and first.shape[1] == fold * down.shape[2]
    turned = first.shape[1] == down.shape[2] and first.shape[2] == fold * down.shape[1]
    said = _said(block, gated, bias)
    if said is None or not (turned if said["transposed"] else straight):
        said = None if said is None or hasattr(block, "is_transposed") or not turned else said | {"transposed": True}
    if said is None:
        return None
    hidden, inner = (down.shape[2], down.shape[1]) if said["transposed"] else (down.shape[1], down.shape[2])
    return ExpertLayout(down.shape[0], hidden, inner, gated, bias, **said)


def _said(block: Any, gated: bool, bias: bool) -> dict[str, bool] | None:
    """What a block says of its layout, None if it says something that is not known here, or is of unknown origin."""
    if hasattr(block, "is_transposed"):
        if block.has_gate != gated or block.has_bias != bias or block.has_post_expert_norm:
            return None
        return {"transposed": block.is_transposed, "interleaved": not block.is_concatenated}
    if not type(block).__module__.startswith("transformers.models."):
        return None  # whose gate comes first, nothing tells
    arguments = len(inspect.signature(type(block).forward).parameters) - 1
    if arguments not in (1, _ROUTED):
        return None
    return {"transposed": False, "sorted": arguments == 1, "idle": hasattr(block, "identity_expert")}


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

    def __init__(self, layout: ExpertLayout, experts: list[Expert]) -> None:
        super().__init__(experts)
        self.layout = layout

    @classmethod
    def like(cls, fused: nn.Module, layout: ExpertLayout) -> "UnfusedExperts":
        """Experts with the sizes and the function of transformers' fused block."""
        block: Any = fused
        combine = block._apply_gate if _combines(block) else None
        activation = getattr(block, "act_fn", None)
        return cls(layout, [Expert(layout, activation, combine) for _ in range(layout.count)])

    def forward(self, hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
        """hidden_states [tokens, hidden] to [tokens, hidden]; routing: indices of experts and weights, [tokens, k]."""
        if self.layout.sorted:
            return self._each(hidden_states)
        top_k_index, top_k_weights = (*routing, *named.values())
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
        """Every expert on its own batch. Rows of zeros are tokens that were not sent there, and give zeros."""
        result = torch.zeros_like(hidden_states)
        for number, batch in enumerate(hidden_states.view(len(self), -1, hidden_states.shape[-1])):
            sent = batch.any(-1).nonzero()[:, 0]
            if sent.numel():
                result[number * len(batch) + sent] = self[number](batch[sent])
        return result


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
