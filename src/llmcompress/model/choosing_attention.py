"""Attention that leaves positions out: transformers' own of a model, under masks made of the weights it would have."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from llmcompress.errors import CheckpointError
from llmcompress.model.streamed_model import StreamedModel

_NAME = "llmcompress_choosing"
_CHOICE = "_llmcompress_choice"  # key of what an attention module's layer and choice are
_PLAIN = "eager_attention_forward"  # what transformers calls the attention of a family that returns its weights


@dataclass(frozen=True)
class Attended:
    """The attention of layer `layer` to whole windows, before anything is left out.

    query [batch, heads, length, dim] and key, value [batch, kv heads, length, dim], after rotation. weights [batch,
    heads, length, length]; where a text is written there are fewer queries than keys, the last ones. visible: which of
    them the model's own mask allows, bool, broadcastable to weights. scaling: what products of queries and keys are
    multiplied by.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    visible: Tensor
    scaling: float

    @property
    def whole(self) -> bool:
        """Whether each token sees all tokens before it, as no layer with a shorter sliding window does."""
        length = self.key.shape[2]
        return bool(self.visible.expand(-1, -1, length, length).tril().sum(-1).equal(self._counts(length)))

    def _counts(self, length: int) -> Tensor:
        counts = torch.arange(1, length + 1, device=self.visible.device)
        return counts.expand(*self.visible.shape[:2], length)


Choice = Callable[[Attended], Tensor | None]
"""The weights that count, bool, broadcastable to them; the softmax is over these alone. None: all that are visible."""


def choose(model: StreamedModel, choice: Choice) -> None:
    """Have all layers of a model attend as `choice` says. Before anything is run.

    CheckpointError for a model whose attention cannot be replaced: of another kind, or of code of its own.
    """
    AttentionInterface.register(_NAME, _choosing)
    AttentionMaskInterface.register(_NAME, eager_mask)
    causal: Any = model.causal
    replaceable = any(hasattr(home(part), _PLAIN) for layer in model.layers for part in layer.modules())
    if not replaceable or not causal._can_set_attn_implementation():
        raise CheckpointError(
            f"this {model.spec.name!r} model has no attention that can leave positions out",
            "only families with transformers' plain attention can be measured so",
        )
    causal.set_attn_implementation(_NAME)
    for number, layer in enumerate(model.layers):
        for part in layer.modules():
            part.__dict__[_CHOICE] = number, choice


def home(part: nn.Module) -> Any:
    """The module of Python code that a part of a model is defined in."""
    return sys.modules[type(part).__module__]


def _choosing(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The output [batch, length, heads, dim] of attention to what the choice of the module's layer keeps."""
    number, choice = module.__dict__[_CHOICE]
    least = torch.finfo(query.dtype).min
    mask = attention_mask
    if mask is None:
        mask = query.new_full((1, 1, query.shape[2], key.shape[2]), least).triu(1 + key.shape[2] - query.shape[2])
    plain = getattr(home(module), _PLAIN)
    scaling = options.get("scaling")
    options["scaling"] = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, weights = plain(module, query, key, value, mask, **options)
    kept = choice(Attended(number, query, key, value, weights, mask > least / 2, options["scaling"]))
    if kept is None:
        return out, None
    out, _ = plain(module, query, key, value, mask.masked_fill(~kept, least), **options)
    return out, None
