"""The feed-forward of a layer: which tensors write its inner channels, and which matrix reads them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llmcompress.engine.source.tensor_names import Anatomy
from llmcompress.errors import PlanError
from llmcompress.formats.base import TensorSpec

_OUTER, _INNER = "mlp_in", "mlp_hidden"  # the spaces that a declaration calls its inputs and its inner channels
_KEYS = ("ffn_dim", "n_inner", "intermediate_size")


@dataclass(frozen=True)
class FeedForward:
    """The inner channels of one layer. reader: path of the matrix that reads them; its weight is [in, out] if conv1d.

    writers: on-disk names of the tensors that write the channels, each with the dimension of its outputs and how many
    matrices lie one after the other in that dimension (2 where gate and up are fused).
    """

    reader: str
    weight: str
    conv1d: bool
    width: int
    space: str
    writers: Mapping[str, tuple[int, int]]

    def cut(self, name: str, tensor: Tensor, kept: Tensor) -> Tensor:
        """The tensor of a writer with only the outputs `kept`."""
        axis, parts = self.writers[name]
        index = torch.cat([kept + part * self.width for part in range(parts)])
        return tensor.index_select(axis, index.to(tensor.device))

    def spec(self, spec: TensorSpec, width: int) -> TensorSpec:
        """The spec of a tensor of the layer when `width` channels are left."""
        shape = list(spec.shape)
        if spec.name == self.weight:
            shape[0 if self.conv1d else 1] = width
        elif spec.name in self.writers:
            axis, parts = self.writers[spec.name]
            shape[axis] = parts * width
        return replace(spec, shape=tuple(shape))


def feed_forward(anatomy: Anatomy, number: int) -> FeedForward:
    """The feed-forward of layer `number`; PlanError where there is none whose channels can be taken out."""
    spec, shapes = anatomy.spec, anatomy.shapes(number)
    if spec.experts is not None:
        raise PlanError(f"{spec.name} models have experts, whose width is not pruned", "use depth, or sparse weights")
    readers = [linear for linear in spec.linears if linear.reads == _INNER and linear.path in shapes]
    if spec.observed or len(readers) != 1:
        raise PlanError(f"{spec.name} models have no declared feed-forward, so its channels are not known")
    reader = readers[0]
    width = shapes[reader.path][1]
    writers: dict[str, tuple[int, int]] = {}
    for linear in spec.linears:
        if linear.reads != _OUTER:
            continue
        parts, rest = divmod(shapes[linear.path][0], width)
        if rest or parts not in (1, 2):
            raise PlanError(
                f"{linear.path} of layer {number} has {shapes[linear.path][0]} outputs for {width} channels"
            )
        for leaf, axis in (("weight", 1 if linear.conv1d else 0), ("bias", 0)):
            name = anatomy.tensor(number, linear.path, leaf)
            if name is not None:
                writers[name] = (axis, parts)
    weight = anatomy.tensor(number, reader.path)
    assert weight is not None
    return FeedForward(reader.path, weight, reader.conv1d, width, _INNER, writers)


def narrowed_config(config: Mapping[str, Any], before: int, after: int) -> dict[str, Any]:
    """config.json of a model whose feed-forward has `after` channels; PlanError if it does not say how many it has."""
    keys = [key for key in _KEYS if config.get(key) == before]
    if not keys and config.get("n_inner") is None and "n_embd" in config:
        keys = ["n_inner"]  # of GPT-2: four times the hidden states unless said
    if not keys:
        raise PlanError(f"config.json does not say that the feed-forward has {before} channels ({', '.join(_KEYS)})")
    return {**config, **dict.fromkeys(keys, after)}
