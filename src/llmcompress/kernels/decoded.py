"""Products with weights that torch decodes on use: the replacement of a kernel on any device."""

import torch
from torch import Tensor, nn

from llmcompress.grids.coded import Coded

_AT_ONCE = 1 << 24  # weights decoded at once


class DecodedProduct(nn.Module):
    """x W^T with W kept as codes, two to a byte where they have 4 bits or fewer, and decoded in slabs of rows."""

    name = "torch"

    def __init__(self, coded: Coded, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = coded.codes.shape
        self.dtype, self.grid = dtype, coded.grid
        self.halved = coded.grid.spec.levels <= 16 and self.in_features % 2 == 0
        codes = coded.codes
        self.register_buffer("words", codes[:, ::2] | codes[:, 1::2] << 4 if self.halved else codes, persistent=False)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [tokens, in] to [tokens, out]."""
        rows = max(1, _AT_ONCE // self.in_features)
        parts = [x @ self._weight(slice(at, at + rows)).T for at in range(0, self.out_features, rows)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return y if bias is None else y + bias

    def _weight(self, rows: slice) -> Tensor:
        """Some rows of the decoded weight."""
        words: Tensor = self.words[rows]  # type: ignore[index]
        codes = torch.stack([words & 15, words >> 4], dim=-1).flatten(1) if self.halved else words
        return self.grid.rows(rows).decode(codes).to(self.dtype)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the grid's tensors, without the codes."""
        parts = vars(self.grid).values()
        return sum(part.nbytes for part in parts if isinstance(part, Tensor))
