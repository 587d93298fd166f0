"""A tensor of a GGUF file, and how it comes from tensors of a checkpoint."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Which rows of a matrix are taken, in which order: all of them seen as `view`, its axes put into `order`.

    first, count: the stretch of the result that is kept, all of it where `count` is None. Whatever belongs to an output
    of a matrix (bias, codes, scales) moves with its row.
    """

    view: tuple[int, ...]
    order: tuple[int, ...]
    first: int = 0
    count: int | None = None

    def __len__(self) -> int:
        return prod(self.view) if self.count is None else self.count

    def index(self) -> "Tensor":
        """For each row the number of the row in the source: int64 [rows]."""
        import torch

        rows = torch.arange(prod(self.view)).view(self.view).permute(self.order).flatten()
        return rows[self.first : self.first + len(self)]


def rotary_pairs(heads: int, head_dim: int) -> Rows:
    """Rows of a projection whose rotary pairs lie half a head apart, put next to each other."""
    return Rows((heads, 2, head_dim // 2), (0, 2, 1))


def parted(heads: int, head_dim: int) -> Rows:
    """Rows of a fused projection of q, k and v of each head in turn: all of q, then all of k, then all of v."""
    return Rows((heads, 3, head_dim), (1, 0, 2))


def stretch(first: int, count: int, total: int) -> Rows:
    """`count` rows of `total`, from row `first` on."""
    return Rows((total,), (0,), first, count)


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a GGUF file.

    shape: in torch's order, [out, in], [experts, out, in] or [n]. sources: on-disk names of the checkpoint's tensors it
    is made of: one, or one per expert, or none if it is computed. Each is seen as [out, in] (`transposed`: stored
    [in, out]), of which `rows` are taken, and `offset` is added to every value. values: of a computed tensor.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...] = ()
    transposed: bool = False
    rows: Rows | None = None
    offset: float = 0.0
    values: tuple[float, ...] | None = None


Read = Callable[[str], "Tensor"]
"""Reads a tensor of a checkpoint by its on-disk name."""


def pieces(tensor: GGUFTensor, read: Read) -> Iterator["Tensor"]:
    """The float32 values of a tensor, in order, one source at a time: the experts of a stack one by one."""
    import torch

    if tensor.values is not None:
        yield torch.tensor(tensor.values, dtype=torch.float32)
    index = None if tensor.rows is None else tensor.rows.index()
    for name in tensor.sources:
        values = read(name).to(torch.float32)
        values = values.t() if tensor.transposed else values
        if index is not None:
            values = values.index_select(-2 if values.ndim > 1 else 0, index)
        yield (values + tensor.offset if tensor.offset else values).contiguous()


def convert(tensor: GGUFTensor, read: Read) -> "Tensor":
    """The float32 values of a tensor in its shape."""
    import torch

    found = list(pieces(tensor, read))
    return (found[0] if len(found) == 1 else torch.stack(found)).reshape(tensor.shape)
