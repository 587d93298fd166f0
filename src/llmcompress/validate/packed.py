"""Linears on packed weights on the CPU: torch's int4 and int8 products where they fit, else decode and multiply."""

import torch
from torch import Tensor, nn

from llmcompress.grids.coded import Coded
from llmcompress.grids.integer import IntegerGrid

_INT4_GROUPS = (32, 64, 128, 256)


class PackedLinear(nn.Module):
    """y = x W^T + b with W kept as codes. `kernel` says what runs: int4, int8 or decode."""

    def __init__(self, coded: Coded, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        grid = coded.grid
        self.out_features, self.in_features = coded.codes.shape
        self.dtype = dtype
        self.bias = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)
        group = grid.spec.width(self.in_features)
        natural = bool((grid.group_index == torch.arange(self.in_features) // group).all())
        if not isinstance(grid, IntegerGrid):
            self._decoding(coded)
        elif grid.spec.bits == 4 and group in _INT4_GROUPS and natural and self.out_features % 16 == 0:
            self.kernel = "int4"
            self.register_buffer(
                "words", torch.ops.aten._convert_weight_to_int4pack_for_cpu(coded.codes.to(torch.int32), 1)
            )
            offset = (8 - grid.zero) * grid.scale  # the product computes (code - 8) * scale + offset
            self.register_buffer(
                "scale", torch.stack([grid.scale, offset], dim=-1).transpose(0, 1).contiguous().to(dtype)
            )
            self.group = group
        elif grid.spec.bits == 8 and group == self.in_features and grid.spec.symmetric:
            self.kernel = "int8"
            self.register_buffer("words", (coded.codes.to(torch.int16) - grid.spec.middle).to(torch.int8))
            self.register_buffer("scale", grid.scale[:, 0].to(dtype))
        else:
            self._decoding(coded)

    def _decoding(self, coded: Coded) -> None:
        self.kernel = "decode"
        self.register_buffer("words", coded.codes)
        self.grid = coded.grid

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        rows = x.reshape(-1, self.in_features)
        y: Tensor
        if self.kernel == "int4":
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.words, self.group, self.scale)
        elif self.kernel == "int8":
            y = torch.ops.aten._weight_int8pack_mm(rows, self.words, self.scale)
        else:
            y = rows @ self.grid.decode(self.words).to(self.dtype).T  # type: ignore[arg-type]
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias
