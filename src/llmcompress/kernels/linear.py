"""Linears of a model on packed weights: rounds inputs where the checkpoint says so, multiplies, adds the bias."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llmcompress.grids.coded import Coded
from llmcompress.grids.inputs import Rounding
from llmcompress.kernels.compile_errors import TakesNotError
from llmcompress.kernels.decoded import DecodedProduct
from llmcompress.kernels.launch import Launcher
from llmcompress.kernels.products import Products

Say = Callable[[str], None]


class CodedLinear(nn.Module):
    """y = x W^T + b with W in the packed form of `product`, and x first rounded to `inputs`, if given.

    product: multiplies x [tokens, in] by W, with a kernel or torch, and may round x itself (`rounds`). bias: may be on
    the meta device, to be filled later.
    """

    def __init__(
        self,
        product: nn.Module,
        shape: tuple[int, int],
        bias: Tensor | None,
        dtype: torch.dtype,
        inputs: Rounding | None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.product, self.inputs, self.dtype = product, inputs, dtype
        self.bias = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """Shape and type of the weight, without values: some models ask a linear for the type of its inputs."""
        return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")

    @property
    def kernel(self) -> str:
        """The name of the product that multiplies."""
        name: Any = self.product.name
        return str(name)

    @property
    def rounds(self) -> bool:
        """Whether inputs are rounded to codes, here or by the product."""
        return self.inputs is not None or bool(getattr(self.product, "rounds", False))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        rows = x.reshape(-1, self.in_features)
        y: Tensor = self.product(rows if self.inputs is None else self.inputs.rounded(rows), self.bias)
        return y.view(*x.shape[:-1], self.out_features)


class Linears:
    """Makes linears for one device. launcher: runs kernels; None to have torch do everything.

    say: told, once for each reason, which matrices no kernel takes.
    """

    def __init__(self, device: torch.device, launcher: Launcher | None, say: Say) -> None:
        self.device, self.say = device, say
        self.products = None if launcher is None else Products(launcher, device)
        self._said: set[str] = set()

    def __call__(
        self, coded: Coded, bias: Tensor | None, dtype: torch.dtype, inputs: Rounding | None = None
    ) -> CodedLinear:
        """A linear of codes on any device."""
        coded = coded.to(self.device)
        inputs = None if inputs is None else inputs.to(self.device)
        product, rounding = self._product(coded, dtype, inputs)
        return CodedLinear(product, (coded.codes.shape[0], coded.codes.shape[1]), bias, dtype, rounding)

    def _product(self, coded: Coded, dtype: torch.dtype, inputs: Rounding | None) -> tuple[nn.Module, Rounding | None]:
        """A product, and the rounding of inputs that must come before the product; None if the product rounds."""
        if self.products is not None:
            try:
                return self.products(coded, dtype, inputs)
            except TakesNotError as error:
                if error.message not in self._said:
                    self._said.add(error.message)
                    self.say(f"torch decodes and multiplies: {error.message}")
        return DecodedProduct(coded, dtype), inputs
