"""What `verify` knows of any quantised matrix, however it is stored."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmcompress.validate.stored import Array, DamageError, Tensor

PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
_BLOCK = 1 << 22  # weights decoded at once


@dataclass(frozen=True)
class Scheme:
    """What a config says of a module; size -1 is one group per row. order: groups may follow the activation order.

    stored: how codes lie in the file. inputs: how inputs are rounded, as in int8-token, None for not at all. kind: the
    name of the grid where it is not affine.
    """

    bits: int
    size: int
    symmetric: bool
    order: bool = False
    stored: str = PACKED
    inputs: str | None = None
    kind: str = ""

    @property
    def name(self) -> str:
        group = "row" if self.size == -1 else f"g{self.size}"
        return self.kind or f"int{self.bits}-{group}-{'sym' if self.symmetric else 'asym'}"


@dataclass(frozen=True)
class StoredMatrix(ABC):
    """A quantised matrix [rows, width]."""

    module: str
    scheme: Scheme
    rows: int
    width: int

    @abstractmethod
    def decode(self, rows: slice) -> Array:
        """Values float32 [rows, in]."""

    @abstractmethod
    def reach(self, rows: slice, weight: Array) -> Array:
        """How far rounding to the nearest value can take each weight [rows, in], with ties decided in float32."""

    def blocks(self) -> Iterator[slice]:
        """Slices of rows that fit in memory together with their decoded values."""
        step = max(1, _BLOCK // self.width)
        return (slice(start, min(start + step, self.rows)) for start in range(0, self.rows, step))


def nearest(weight: Array, values: Iterator[Array]) -> Array:
    """Distance of each weight from the nearest of some values, each an array that broadcasts to weight's shape."""
    least: Array = np.full(weight.shape, np.inf, np.float32)
    for value in values:
        np.minimum(least, np.abs(weight - value), out=least)
    return least


def shaped(tensor: Tensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
    """The tensor; DamageError unless it is of one of these types and of this shape."""
    if tensor.dtype not in dtypes or tensor.shape != shape:
        raise DamageError(
            f"{tensor.name} is {tensor.dtype} {list(tensor.shape)} and should be {dtypes[0]} {list(shape)}"
        )
    return tensor
