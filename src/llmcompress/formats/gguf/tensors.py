"""A tensor of a GGUF file, and how it comes from tensors of a checkpoint."""

from collections.abc import Callable, Iterator, Mapping
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


@dataclass(frozen=True)
class Strips:
    """Which rows of a matrix are taken, as runs of rows one after the other.

    runs: each as first row, number of rows, step to the next of its like, and how many of them there are.
    """

    runs: tuple[tuple[int, int, int, int], ...]

    def __len__(self) -> int:
        return sum(count * times for _, count, _, times in self.runs)

    def index(self) -> "Tensor":
        """For each row the number of the row in the source: int64 [rows]."""
        import torch

        starts = [(first + step * at, count) for first, count, step, times in self.runs for at in range(times)]
        return torch.cat([torch.arange(first, first + count) for first, count in starts])


def rotary_pairs(heads: int, head_dim: int) -> Rows:
    """Rows of a projection whose rotary pairs lie half a head apart, put next to each other."""
    return Rows((heads, 2, head_dim // 2), (0, 2, 1))


def parted(heads: int, head_dim: int) -> Rows:
    """Rows of a fused projection of q, k and v of each head in turn: all of q, then all of k, then all of v."""
    return Rows((heads, 3, head_dim), (1, 0, 2))


def stretch(first: int, count: int, total: int) -> Rows:
    """`count` rows of `total`, from row `first` on."""
    return Rows((total,), (0,), first, count)


Factors = tuple[tuple[tuple[int, float], ...], ...]
"""What the rows of a matrix are multiplied by, one after the other: each time runs of rows, their number and factor."""


def multiplied(values: "Tensor", factors: Factors, rows: "slice | Tensor" = slice(None)) -> "Tensor":
    """Rows [rows, in] of a matrix times their factors, each product rounded to the type of the values."""
    for runs in factors:
        values = values * _by_row(runs, values)[rows]
    return values


def unmultiplied(values: "Tensor", factors: Factors, rows: "slice | Tensor" = slice(None)) -> "Tensor":
    """Rows [rows, in] of a matrix as they were before `multiplied`."""
    for runs in reversed(factors):
        values = values / _by_row(runs, values)[rows]
    return values


def _by_row(runs: tuple[tuple[int, float], ...], like: "Tensor") -> "Tensor":
    """The factor of every row [rows, 1], of the type and on the device of a tensor."""
    import torch

    return torch.cat([like.new_full((count, 1), factor) for count, factor in runs])


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a GGUF file.

    shape: in torch's order, [out, in], [experts, out, in] or [n]. sources: on-disk names of the checkpoint's tensors it
    is made of: one, or one per expert, or none if it is computed. Each is seen as [out, in] (`transposed`: stored
    [in, out]), or as `split` such matrices, one below the other, of which `rows` are taken, and columns in the
    order of `inputs`; `turned` matrices are transposed after that. form: what is done to every value (`FORMS`), before
    `offset` is added. factors: what the rows of a source are multiplied by after that. values: of a computed tensor.
    blank: all zeros, where llama.cpp asks for a tensor that it does not use and the checkpoint lacks.
    factor_of: on-disk names of the matrices whose codes are multiplied by the values of this tensor, one for each.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...] = ()
    transposed: bool = False
    rows: Rows | Strips | None = None
    inputs: Rows | Strips | None = None
    offset: float = 0.0
    values: tuple[float, ...] | None = None
    factor_of: tuple[str, ...] = ()
    split: int = 0
    turned: bool = False
    form: str = ""
    factors: Factors = ()
    blank: bool = False

    @property
    def by_rows(self) -> bool:
        """Whether rows of the tensor are rows of its sources, so that codes of a source can be taken as they are."""
        return not (self.split or self.turned or self.form or self.inputs)

    def viewed(self, values: "Tensor") -> "Tensor":
        """A source as the matrices, each [out, in], or the vector [n] that it is; shares its memory."""
        values = values.mT if self.transposed and values.ndim > 1 else values
        if values.ndim == 3 and values.shape[1] == 1:  # a convolution by channel
            values = values[:, 0]
        return values.view(self.split, -1, *values.shape[1:]) if self.split else values

    def parts(self, values: "Tensor") -> "Iterator[Tensor]":
        """The matrices of a source, one after the other."""
        values = self.viewed(values)
        yield from values if values.ndim == 3 else (values,)  # experts may be one tensor in the checkpoint too


def _decay(values: "Tensor") -> "Tensor":
    return -values.double().exp().to(values.dtype)  # float32's exp differs between processors in its last bit


def _decay_undone(values: "Tensor") -> "Tensor":
    return (-values).log()


FORMS: "Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]" = {
    "decay": (_decay, _decay_undone),  # of state space models, which keep the logarithm
}
"""What may be done to every value of a tensor, and how it is undone."""

Read = Callable[[str], "Tensor"]
"""Reads a tensor of a checkpoint by its on-disk name."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A matrix of a tensor, or a vector, as it lies in the checkpoint: values are converted only as they are taken.

    source: [out, in] or [n], of any float type. index: for each row its number in the source, None for all of them.
    factors: of the rows of the source.
    """

    source: "Tensor"
    index: "Tensor | None"
    offset: float
    form: str = ""
    factors: Factors = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.source.shape[1:])

    def __len__(self) -> int:
        return len(self.source if self.index is None else self.index)

    def rows(self, start: int = 0, stop: int | None = None) -> "Tensor":
        """Rows `start` to `stop`, all of them by default: float32."""
        import torch

        part = self.source[start:stop] if self.index is None else self.source[self.index[start:stop]]
        part = part.to(torch.float32)
        part = FORMS[self.form][0](part) if self.form else part
        part = part + self.offset if self.offset else part
        rows = slice(start, stop) if self.index is None else self.index[start:stop]
        return multiplied(part, self.factors, rows).contiguous()


def pieces(tensor: GGUFTensor, read: Read) -> "Iterator[Piece]":
    """What a tensor is made of, in order: one piece, or one of each expert."""
    import torch

    if tensor.values is not None:
        yield Piece(torch.tensor(tensor.values, dtype=torch.float32), None, 0.0)
    if tensor.blank:
        yield Piece(torch.zeros(1).expand(tensor.shape), None, 0.0)
    index = None if tensor.rows is None else tensor.rows.index()
    for name in tensor.sources:
        for part in tensor.parts(read(name)):
            part = part if tensor.inputs is None else part[:, tensor.inputs.index()]
            if tensor.turned:
                yield Piece((part if index is None else part[index]).mT, None, tensor.offset, tensor.form)
            else:
                yield Piece(part, index, tensor.offset, tensor.form, tensor.factors)


def convert(tensor: GGUFTensor, read: Read) -> "Tensor":
    """The float32 values of a tensor in its shape."""
    import torch

    return torch.cat([piece.rows() for piece in pieces(tensor, read)]).reshape(tensor.shape)
