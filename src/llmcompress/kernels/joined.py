"""Matrices that read one input, multiplied by one launch: query, key and value, or gate and up."""

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmcompress.kernels.products import TiledProduct
from llmcompress.kernels.tiles import OUTPUTS, stacked


def join(linears: Sequence[Any]) -> None:
    """Let linears that read one input share products, where they are on codes and a kernel can take them as one."""
    groups: dict[Hashable, list[Any]] = {}
    for linear in linears:
        product = getattr(linear, "product", None)
        if isinstance(product, TiledProduct) and linear.inputs is None and _aligned(product):
            groups.setdefault((product.weight.spec, product.dtype, linear.bias is None), []).append(linear)
    for group in groups.values():
        if len(group) > 1:
            joined = _Joined(group)
            for number, linear in enumerate(group):
                linear.product = _Share(joined, number, linear.product)


def _aligned(product: TiledProduct) -> bool:
    """Whether a matrix is whole tiles, its inputs in their own order."""
    return product.weight.order is None and product.weight.outputs % OUTPUTS == 0


class _Known(NamedTuple):
    """An input that was multiplied, as it was then, and the outputs of all; waiting: who has not asked for theirs."""

    x: Tensor
    version: int
    outputs: tuple[Tensor, ...]
    waiting: set[int]


class _Joined:
    """The outputs of several linears, made when the first of them asks, and kept until the last one has."""

    def __init__(self, linears: Sequence[Any]) -> None:
        weights = [linear.product.weight for linear in linears]
        self._linears, self._sizes = linears, [weight.outputs for weight in weights]
        self._product = TiledProduct(stacked(weights), linears[0].product.dtype, linears[0].product.tools)
        self._known: _Known | None = None

    @cached_property
    def _bias(self) -> Tensor | None:
        """The biases of all [out], once the model has been read."""
        biases = [linear.bias for linear in self._linears if linear.bias is not None]
        return torch.cat(biases) if biases else None

    def of(self, number: int, x: Tensor) -> Tensor:
        """The outputs [tokens, out] of a linear for x [tokens, in], with its bias."""
        known = self._known
        # while an input is kept, nothing else lies where it does
        if known is None or number not in known.waiting or not (x.is_set_to(known.x) and x._version == known.version):
            outputs = self._product(x, self._bias).split(self._sizes, dim=1)
            known = _Known(x, x._version, outputs, set(range(len(outputs))))
        known.waiting.remove(number)
        self._known = known if known.waiting else None
        return known.outputs[number]


class _Share(nn.Module):
    """What multiplies for one of several linears."""

    def __init__(self, joined: _Joined, number: int, alone: TiledProduct) -> None:
        super().__init__()
        self.joined, self.number = joined, number
        self.name, self.packed_bytes = alone.name, alone.packed_bytes

    def forward(self, x: Tensor, _: Tensor | None) -> Tensor:
        """x [tokens, in] to [tokens, out]; the bias is added for all at once."""
        return self.joined.of(self.number, x)
