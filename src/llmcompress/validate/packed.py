"""Linears on packed weights on the CPU: torch's int4 and int8 products where they fit, else decode and multiply."""

from typing import cast

import torch
from torch import Tensor, nn

from llmcompress.grids.coded import Coded, Grid
from llmcompress.grids.inputs import InputGrid, Rounding

_INT4_GROUPS = (32, 64, 128, 256)
_VECTOR = 16  # numbers in the widest vector of a processor
_SUMMED = 1 << 17  # terms: an int32 holds the sum of this many products of 8-bit codes


class PackedLinear(nn.Module):
    """y = x W^T + b with W kept as codes, and x rounded to `inputs` first where that is given.

    `kernel` says what runs: int4, int8, int8-int8 (codes times codes, summed in int32) or decode.
    """

    def __init__(self, coded: Coded, bias: Tensor | None, dtype: torch.dtype, inputs: Rounding | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = coded.codes.shape
        self.dtype, self.inputs = dtype, inputs
        self.bias = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)
        if coded.grid.spec.affine:
            self._integers(coded, coded.grid)
        else:
            self._decoding(coded)

    def _integers(self, coded: Coded, grid: Grid) -> None:
        group = grid.spec.width(self.in_features)
        natural = bool((grid.group_index == torch.arange(self.in_features) // group).all())
        both = self.inputs is not None and self.inputs.integers and self.in_features < _SUMMED
        # torch's product with bfloat16 reads whole vectors, beyond the end of a row of another width
        whole_vectors = both or self.dtype != torch.bfloat16 or self.in_features % _VECTOR == 0
        whole_rows = grid.spec.bits == 8 and group == self.in_features and grid.centred and whole_vectors
        if grid.spec.bits == 4 and group in _INT4_GROUPS and natural and self.out_features % 16 == 0:
            self.kernel = "int4"
            self.register_buffer(
                "words", torch.ops.aten._convert_weight_to_int4pack_for_cpu(coded.codes.to(torch.int32), 1)
            )
            offset = (8 - grid.zero) * grid.scale  # the product computes (code - 8) * scale + offset
            self.register_buffer(
                "scale", torch.stack([grid.scale, offset], dim=-1).transpose(0, 1).contiguous().to(self.dtype)
            )
            self.group = group
        elif whole_rows:
            self.kernel = "int8-int8" if both else "int8"
            self.register_buffer("words", (coded.codes.to(torch.int16) - grid.spec.middle).to(torch.int8))
            self.register_buffer("scale", grid.scale[:, 0].to(torch.float32 if both else self.dtype))
        else:
            self._decoding(coded)

    def _decoding(self, coded: Coded) -> None:
        self.kernel = "decode"
        self.register_buffer("words", coded.codes)
        self.grid = coded.grid

    @property
    def weight(self) -> Tensor:
        """Shape and type of the weight, without values: some models ask a linear for the type of its inputs."""
        return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")

    @property
    def rounds(self) -> bool:
        """Whether inputs are rounded to codes."""
        return self.inputs is not None

    @property
    def packed_bytes(self) -> int:
        """Bytes of what a grid has that codes are decoded by, beside the buffers."""
        parts = vars(self.grid).values() if self.kernel == "decode" else ()
        return sum(part.nbytes for part in parts if isinstance(part, Tensor))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        rows = x.reshape(-1, self.in_features)
        y: Tensor
        if self.kernel == "int8-int8":
            y = self._codes_by_codes(rows)
        else:
            rows = rows if self.inputs is None else self.inputs.rounded(rows)
            y = self._by_weights(rows)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def _codes_by_codes(self, rows: Tensor) -> Tensor:
        """Exact sums of products of codes; the scales of token and row come last."""
        inputs = cast("InputGrid", self.inputs)
        scales = inputs.scales(rows)
        levels = inputs.levels(rows, scales)
        scales = torch.where(levels.isnan().any(-1, keepdim=True), torch.nan, scales)  # no code says NaN
        sums = torch._int_mm(levels.to(torch.int8), self.words.t())  # type: ignore[operator]
        return sums.to(torch.float32).mul_(scales).mul_(self.scale).to(self.dtype)  # type: ignore[arg-type]

    def _by_weights(self, rows: Tensor) -> Tensor:
        if self.kernel == "int4":
            return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.words, self.group, self.scale)  # type: ignore[no-any-return]
        if self.kernel == "int8":
            return torch.ops.aten._weight_int8pack_mm(rows, self.words, self.scale)  # type: ignore[no-any-return]
        return rows @ self.grid.decode(self.words).to(self.dtype).T  # type: ignore[arg-type]
